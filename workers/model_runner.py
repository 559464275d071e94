"""A model folder and packed segments -> logits of the wanted rows, with K and V written to the paged pool.

Any Hugging Face decoder that uses the attention interface runs unforked: its attention calls come to
`_attention`, which stores K and V in our pool and attends through `paceline.kernels.tree_attention`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
from paceline.kernels.tree_attention import tree_attention
from paceline.workers.kv_cache import KVCache
from paceline.workers.layers import can_pack, pack_linears
from paceline.workers.lean import LeanDecoder
from paceline.workers.model_batch import BatchBuilder, PackedBatch


@dataclass(slots=True)
class _Step:
    cache: KVCache
    batch: PackedBatch
    attention: str


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
        backend=paceline_step.attention,
    )
    return out[None], None


AttentionInterface.register("paceline", _attention)

_LEAN_TOLERANCE = 1e-4
"""Largest difference of lean and plain logits, relative to the largest logit: rounding, nothing else."""


class ModelRunner:
    """One model and its KV pool on one device."""

    def __init__(
        self,
        model: PreTrainedModel,
        version: str,
        *,
        num_blocks: int,
        block_size: int,
        lean: bool = True,
        attention: str = "exact",
    ) -> None:
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
        self._attention = attention
        self._model: PreTrainedModel | None = model
        self._lean: LeanDecoder | None = None
        self.path = "transformers"
        """Which forward runs: "lean", or "transformers" and why not lean."""
        if lean:
            self._try_lean(config)
        if can_pack() and self._lean is None:
            pack_linears(model)

    def _try_lean(self, config: Any) -> None:
        """Take the lean path if the family allows it and its logits are the plain ones; else say why not."""
        assert self._model is not None
        reason = LeanDecoder.why_not(config) if can_pack() else "no oneDNN"
        if reason:
            self.path = f"transformers: {reason}"
            return
        plain = self._probe()
        self._lean = LeanDecoder(self._model, self.max_context)
        difference = float((self._probe() - plain).abs().max())
        if not difference <= _LEAN_TOLERANCE * max(1.0, float(plain.abs().max())):  # NaN is refused too
            self._lean = None
            self.path = f"transformers: lean logits differ by {difference:.1e}"
            return
        self.path = "lean"
        self._model = None  # its weights live on, repacked

    def _probe(self) -> Tensor:
        """Logits of a chunk and a tree of fixed tokens, on blocks that nobody owns yet."""
        num_blocks = min(self.cache.num_blocks, -(-40 // self.cache.block_size))
        num = min(24, num_blocks * self.cache.block_size - 8, self.max_context - 8)
        ids = ((np.arange(num + 5) * 7919 + 13) % self.vocab_size).astype(np.int32)
        table = list(range(num_blocks))
        chunk, tree = BatchBuilder(self.cache), BatchBuilder(self.cache)
        chunk.add_chunk(table, ids[:num], 0, keep_last=True)
        tree.add_tree(table, Tree.build(int(ids[num]), ids[num + 1 :].tolist(), [-1, 0, -1, 0]), num)
        return torch.cat([self.forward(chunk.build()[0]), self.forward(tree.build()[0])])

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> Tensor:
        """Run one packed batch; float32 logits [len(keep), V]."""
        if self._lean is not None:
            return self._lean.forward(batch, self.cache, self._attention)
        assert self._model is not None
        common = {
            "input_ids": batch.input_ids[None],
            "position_ids": batch.position_ids[None],
            "use_cache": False,
            "paceline_step": _Step(self.cache, batch, self._attention),
        }
        if len(batch.keep) == 0:
            self._model.base_model(**common)
            return torch.empty(0, self.vocab_size)
        out: Tensor = self._model(**common, logits_to_keep=batch.keep).logits[0]
        return out.float()


def load_runner(
    folder: Path, *, kv_memory_mb: int, block_size: int, lean: bool = True, attention: str = "exact"
) -> tuple[ModelRunner, str]:
    """Load weights and make the pool; also returns why the pool has the size it has.

    `lean=False` keeps to the plain Hugging Face forward. `attention` is a backend of `tree_attention`: "exact" for
    targets, "fast" for drafts.

    Raises:
        ModelError: the folder, its weights or its family cannot be used.
    """
    config = load_model_config(folder)
    model = load_model(folder, config)
    layers, heads, dim = kv_shape(text_config(config))
    per_block = KVCache.bytes_per_token(layers, heads, dim) * block_size
    num_blocks = (kv_memory_mb << 20) // per_block
    if num_blocks < 1:
        raise ModelError(f"kv_memory_mb={kv_memory_mb}: not room for one block of {per_block} bytes")
    reason = f"{kv_memory_mb} MB / ({per_block} bytes a block of {block_size} tokens)"
    version = weights_version(folder)
    runner = ModelRunner(
        model, version, num_blocks=num_blocks, block_size=block_size, lean=lean, attention=attention
    )
    return runner, reason


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
