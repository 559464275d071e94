"""A trained draft and its base's folder -> a folder that can be published: the same files with other weights."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from paceline.cluster.errors import ModelError
from paceline.cluster.learning.publish import FILES
from paceline.cluster.model_files import WEIGHTS, read_object, weight_files
from paceline.workers.training.lora import GAIN, adapter_tensors, merge_adapters

CARD = "card.json"
ADAPTER = "adapter.safetensors"
"""Beside the merged weights, for whoever wants to merge it into others."""


def write_version(model: PreTrainedModel, base: Path, out: Path, card: dict[str, Any]) -> tuple[int, int]:
    """Write config.json, model.safetensors in the base's dtypes, tokenizer files and card.json; the adapters, if any.

    Returns:
        How many parameters it has, and the bytes of its weights.

    The model itself stays as it is: training could go on.

    Raises:
        ModelError: a weight is not finite, or the tensors are not those of the base.
    """
    adapters = adapter_tensors(model)
    merged = copy.deepcopy(model)
    merge_adapters(merged)
    dtypes = _dtypes(base)
    out.mkdir(parents=True, exist_ok=True)
    tensors = merged.state_dict()
    if not dtypes.keys() <= tensors.keys():  # a family whose tensors have other names in files
        merged.save_pretrained(out, max_shard_size="1000GB")
        tensors = _read(out / WEIGHTS)
        if tensors.keys() != dtypes.keys():
            name = min(tensors.keys() ^ dtypes.keys())
            raise ModelError(f"{base}: tensor {name}: expected the same names before and after training")
    tensors = {name: tensors[name] for name in dtypes}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"tensor {name} has NaN or infinite values after training: nothing is published")
    save_file({n: t.to(dtypes[n]).contiguous() for n, t in tensors.items()}, out / WEIGHTS, {"format": "pt"})
    if adapters:
        how = {"format": "pt", "gain": str(GAIN), "base": str(card.get("base", ""))}
        save_file({name: tensor.contiguous() for name, tensor in adapters.items()}, out / ADAPTER, how)
    for path in out.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes for its owner alone
    for path in base.iterdir():
        if path.name in FILES and path.name not in (CARD, WEIGHTS, ADAPTER) and path.is_file():
            shutil.copyfile(path, out / path.name)
    (out / CARD).write_text(json.dumps(card, indent=1, sort_keys=True), encoding="utf-8")
    return sum(tensor.numel() for tensor in tensors.values()), (out / WEIGHTS).stat().st_size


def _dtypes(folder: Path) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for file in weight_files(folder) for name, tensor in _read(file).items()}


def _read(file: Path) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def read_card(folder: Path) -> dict[str, Any]:
    """card.json of a version; empty if it has none, as a draft that nobody trained here."""
    return read_object(folder / CARD) if (folder / CARD).is_file() else {}
