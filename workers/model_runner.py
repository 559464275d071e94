"""A model folder and packed segments -> logits of the wanted rows, with K and V written to the paged pool.

Any Hugging Face decoder that uses the attention interface runs unforked: its attention calls come to
`_attention`, which stores K and V in our pool and attends through `paceline.kernels.tree_attention`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from paceline.cluster.errors import ModelError
from paceline.cluster.speculation import Tree
from paceline.kernels.tree_attention import AttentionSegment, tree_attention
from paceline.workers.kv_cache import KVCache
from paceline.workers.layers import can_pack, pack_linears

LayerHook = Callable[[int], None]


@dataclass(slots=True)
class PackedBatch:
    """One forward. Legend: T rows.

    input_ids, position_ids, slots: int64 [T]. keep: int64, rows whose logits are wanted, may be empty.
    on_layer: called with a layer's index once its K and V of all rows are in the pool.
    """

    input_ids: Tensor
    position_ids: Tensor
    slots: Tensor
    segments: list[AttentionSegment]
    keep: Tensor
    on_layer: LayerHook | None = None


class BatchBuilder:
    """Segments, one at a time -> one PackedBatch and the positions of its kept rows."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._ids: list[npt.NDArray[np.int32]] = []
        self._positions: list[npt.NDArray[np.int64]] = []
        self._slots: list[Tensor] = []
        self._segments: list[AttentionSegment] = []
        self._keep: list[npt.NDArray[np.int64]] = []
        self._num_rows = 0

    def add_chunk(self, table: list[int], ids: npt.NDArray[np.int32], start: int, *, keep_last: bool) -> None:
        """Consecutive tokens from position `start` on, causal."""
        num = len(ids)
        self._add(table, ids, start, np.arange(start, start + num, dtype=np.int64), None)
        if keep_last:
            self._keep.append(np.asarray([self._num_rows - 1]))

    def add_tree(self, table: list[int], tree: Tree, start: int) -> None:
        """A draft tree whose root stands at position `start`; node i uses the slot of position start + i."""
        own_mask = torch.from_numpy(tree.ancestor_mask()) if len(tree) > 1 else None
        self._add(table, tree.tokens, start, start + tree.depths.astype(np.int64), own_mask)
        self._keep.append(np.arange(self._num_rows - len(tree), self._num_rows))

    def _add(
        self,
        table: list[int],
        ids: npt.NDArray[np.int32],
        start: int,
        positions: npt.NDArray[np.int64],
        own_mask: Tensor | None,
    ) -> None:
        num = len(ids)
        key_slots = self._cache.slots(table, 0, start + num)
        self._ids.append(ids)
        self._positions.append(positions)
        self._slots.append(key_slots[start:])
        self._segments.append(
            AttentionSegment(self._num_rows, num, start, key_slots, torch.from_numpy(positions), own_mask)
        )
        self._num_rows += num

    def build(self, on_layer: LayerHook | None = None) -> tuple[PackedBatch, npt.NDArray[np.int64]]:
        """The batch, and int64 positions of its kept rows."""
        positions = np.concatenate(self._positions)
        keep = np.concatenate(self._keep) if self._keep else np.empty(0, np.int64)
        batch = PackedBatch(
            torch.from_numpy(np.concatenate(self._ids).astype(np.int64)),
            torch.from_numpy(positions),
            torch.cat(self._slots),
            self._segments,
            torch.from_numpy(keep),
            on_layer,
        )
        return batch, positions[keep]


@dataclass(slots=True)
class _Step:
    cache: KVCache
    batch: PackedBatch


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paceline_step: _Step | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention hook. query [1, H, T, D], key and value [1, G, T, D], keys rotated already."""
    assert paceline_step is not None, "the paceline attention needs a step; use ModelRunner.forward"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    cache, batch = paceline_step.cache, paceline_step.batch
    cache.write(layer, batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if batch.on_layer is not None:
        batch.on_layer(layer)
    out = tree_attention(
        query[0].transpose(0, 1),
        cache.keys(layer),
        cache.values(layer),
        batch.segments,
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
    )
    return out[None], None


AttentionInterface.register("paceline", _attention)


class ModelRunner:
    """One model and its KV pool on one device."""

    def __init__(self, model: PreTrainedModel, version: str, *, num_blocks: int, block_size: int) -> None:
        config = text_config(model.config)
        self.version = version
        self.vocab_size = int(config.vocab_size)
        self.max_context = int(config.max_position_embeddings)
        layers, heads, dim = kv_shape(config)
        self.cache = KVCache(
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=dim,
            num_blocks=num_blocks,
            block_size=block_size,
            model_version=version,
        )
        self._model = model

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> Tensor:
        """Run one packed batch; float32 logits [len(keep), V]."""
        common = {
            "input_ids": batch.input_ids[None],
            "position_ids": batch.position_ids[None],
            "use_cache": False,
            "paceline_step": _Step(self.cache, batch),
        }
        if len(batch.keep) == 0:
            self._model.base_model(**common)
            return torch.empty(0, self.vocab_size)
        out: Tensor = self._model(**common, logits_to_keep=batch.keep).logits[0]
        return out.float()


def load_runner(
    folder: Path, *, kv_memory_mb: int, block_size: int, packed: bool = True
) -> tuple[ModelRunner, str]:
    """Load weights and make the pool; also returns why the pool has the size it has.

    Raises:
        ModelError: the folder, its weights or its family cannot be used.
    """
    config = load_model_config(folder)
    model = load_model(folder, config)
    if packed and can_pack():
        pack_linears(model)
    layers, heads, dim = kv_shape(text_config(config))
    per_block = KVCache.bytes_per_token(layers, heads, dim) * block_size
    num_blocks = (kv_memory_mb << 20) // per_block
    if num_blocks < 1:
        raise ModelError(f"kv_memory_mb={kv_memory_mb}: not room for one block of {per_block} bytes")
    reason = f"{kv_memory_mb} MB / ({per_block} bytes a block of {block_size} tokens)"
    return ModelRunner(model, weights_version(folder), num_blocks=num_blocks, block_size=block_size), reason


def load_model_config(folder: Path) -> PreTrainedConfig:
    """config.json of a model folder."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"model folder {folder}: no config.json there")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise ModelError(f"{folder}/config.json: {error}") from error


def load_model(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Weights from safetensors only, computed in float32, attention through our hook."""
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"model folder {folder}: no *.safetensors there; pickled weights are never loaded")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="paceline",
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise ModelError(f"model folder {folder}: {error}") from error
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def text_config(config: PreTrainedConfig) -> Any:
    """The decoder's part of a configuration."""
    return config.get_text_config()


def kv_shape(config: Any) -> tuple[int, int, int]:
    """(layers, KV heads, head size)."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    if heads % kv_heads:
        raise ModelError(f"num_key_value_heads={kv_heads}: expected a divisor of num_attention_heads={heads}")
    return int(config.num_hidden_layers), kv_heads, dim


def weights_version(folder: Path) -> str:
    """12 hex digits of the SHA-256 over configuration and weights."""
    state = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        with path.open("rb") as file:
            state.update(hashlib.file_digest(file, "sha256").digest())
    return state.hexdigest()[:12]
