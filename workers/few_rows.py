"""A loaded decoder of the Llama kind -> its maths for a few tokens at a time, all layers in one compiled loop (CPU).

For draft models: small ones, asked for one token of a stream after the other, where calling an operation costs more
than the operation. The plain twin is `paceline.workers.lean`, which takes every batch that is not a few plain rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.few_rows_jit import HalfArray, Weights, few_rows
from paceline.workers.kv_cache import KVCache
from paceline.workers.lean import LeanDecoder
from paceline.workers.model_batch import PackedBatch

MAX_ROWS = 6
"""With more, products of all rows at once are faster than row by row."""
_MAX_WEIGHTS = 8_000_000
"""Of all products: 16 MB. Larger ones wait for memory, not for calls, and then more than one thread helps."""


class FewRowsDecoder:
    """Weights of one model as the loop wants them, beside those of its lean twin."""

    def __init__(self, model: Any, lean: LeanDecoder) -> None:
        layers = model.model.layers
        self._weights = Weights(
            embedding=model.model.embed_tokens.weight.detach().numpy(),
            norm_in=np.stack([layer.input_layernorm.weight.detach().numpy() for layer in layers]),
            qkv=np.stack([_halves(*_qkv(layer)) for layer in layers]),
            out=np.stack([_halves(layer.self_attn.o_proj) for layer in layers]),
            norm_mlp=np.stack([layer.post_attention_layernorm.weight.detach().numpy() for layer in layers]),
            gate_up=np.stack([_halves(layer.mlp.gate_proj, layer.mlp.up_proj) for layer in layers]),
            down=np.stack([_halves(layer.mlp.down_proj) for layer in layers]),
            norm=model.model.norm.weight.detach().numpy(),
            head=_halves(model.lm_head),
        )
        self._num_heads = int(model.config.num_attention_heads)
        self._eps = np.float32(model.config.rms_norm_eps)
        self._scaling = np.float32(layers[0].self_attn.scaling)
        self._cos_PD, self._sin_PD = lean.rotations

    @staticmethod
    def why_not(model: Any) -> str:
        """Why a model that can run lean cannot run here; empty if it can."""
        layers = model.model.layers
        attention = layers[0].self_attn
        if getattr(attention, "q_norm", None) is not None:
            return "norms of queries and keys"
        window = getattr(attention.config, "sliding_window", None)
        if any(getattr(layer.self_attn, "sliding_window", window) is not None for layer in layers):
            return "sliding windows"
        linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        if any(linear.bias is not None for linear in linears):
            return "biases"
        if (num := sum(linear.weight.numel() for linear in linears)) > _MAX_WEIGHTS:
            return f"{num} weights, more than {_MAX_WEIGHTS}"
        if any(not torch.equal(m.weight, m.weight.bfloat16().float()) for m in linears):
            return "weights that are not bfloat16"
        return ""

    @staticmethod
    def takes(batch: PackedBatch) -> bool:
        """Whether a batch is a few rows, each behind all earlier positions of its stream."""
        plan = batch.attention
        return len(batch.slots) <= MAX_ROWS and len(plan.own) == 0 and batch.on_layer is None

    def forward(self, batch: PackedBatch, cache: KVCache) -> Tensor:
        """float32 logits [len(keep), V] of a batch that it `takes`."""
        plan = batch.attention
        logits = few_rows(
            batch.input_ids.numpy(),
            plan.positions,
            batch.slots,
            batch.keep.numpy(),
            plan.row_segment,
            plan.tables,
            plan.block_size,
            self._weights,
            cache.array,
            self._cos_PD,
            self._sin_PD,
            self._num_heads,
            self._eps,
            self._scaling,
        )
        return torch.from_numpy(logits)


def _qkv(layer: Any) -> tuple[torch.nn.Linear, ...]:
    attention = layer.self_attn
    return attention.q_proj, attention.k_proj, attention.v_proj


def _halves(*linears: torch.nn.Linear) -> HalfArray:
    """Weights side by side as [out, in], the bits of their bfloat16."""
    stacked = torch.cat([linear.weight.detach() for linear in linears]).to(torch.bfloat16).contiguous()
    halves: HalfArray = stacked.view(torch.int16).numpy().view(np.uint16)
    return halves
