"""Names that several test files share."""

from __future__ import annotations

from paceline.cluster.config import ModelConfig, model_folder

MODEL = ModelConfig().name
TARGET = model_folder(ModelConfig().target)
