"""A draft's folder -> other versions of it, published as the trainer's are; for tests of swaps."""

from __future__ import annotations

from pathlib import Path

import fsspec

from paceline.cluster.learning.publish import publish
from paceline.cluster.types import DraftRef
from paceline.deploy.bench.learn.swap import publish_perturbed

TARGET = "feedfacecafe"
"""Version of the target that they were trained for."""


def published(base: Path, place: Path, *, seed: int, noise: float = 0.2, target: str = TARGET) -> DraftRef:
    """A copy with noise on its weights, relative to their size."""
    return publish_perturbed(base, place, seed=seed, noise=noise, target=target)


def publish_folder(folder: Path, place: Path) -> DraftRef:
    """A version as it lies in a folder."""
    return publish(fsspec.filesystem("file"), str(place), folder)
