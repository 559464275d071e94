"""A loaded Hugging Face decoder of the Llama kind -> the same maths with a tenth of the Python per layer (CPU).

The plain twin is the Hugging Face model itself, through the same attention and the same pool. Host overhead is what
small models die of: modules, decorators and separate q, k, v, gate and up calls cost more than their arithmetic.
Here a layer is two norms, four packed linears, one rotation, one attention. Which path a worker took is in its
start-up log (`forward=lean` or `forward=transformers`); a model that is not recognised, or whose lean logits
differ from the plain ones at load, takes the plain path and says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.kernels.tree_attention import tree_attention
from paceline.workers.kv_cache import KVCache
from paceline.workers.layers import PackedLinear
from paceline.workers.model_batch import PackedBatch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""model_type values whose layer is: norm, attention, add, norm, gated SiLU MLP, add."""


@dataclass(slots=True)
class _Layer:
    norm_in: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: PackedLinear
    norm_mlp: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None


class LeanDecoder:
    """Weights repacked once from a Hugging Face model; the model itself can be dropped afterwards."""

    def __init__(self, model: Any, max_context: int) -> None:
        config = model.config
        self._num_heads = int(config.num_attention_heads)
        self._num_kv_heads = int(config.num_key_value_heads)
        decoder = model.model
        attention = decoder.layers[0].self_attn
        self._head_dim = int(attention.head_dim)
        self._scaling = float(attention.scaling)
        self._eps = float(config.rms_norm_eps)
        self._hidden = int(config.hidden_size)
        self._embedding: Tensor = decoder.embed_tokens.weight.detach()
        self._norm: Tensor = decoder.norm.weight.detach()
        self._head = PackedLinear(model.lm_head)
        self._layers = [self._repack(layer) for layer in decoder.layers]
        positions = torch.arange(max_context)[None]
        cos, sin = decoder.rotary_emb(self._embedding[None, :1], positions)
        half = self._head_dim // 2
        self._cos_P1D = cos[0][:, None].contiguous()
        # rotate_half(x) * sin = cat(-x2, x1) * sin = cat(x2, x1) * cat(-sin1, sin2)
        self._sin_P1D = torch.cat([-sin[0][:, :half], sin[0][:, half:]], dim=-1)[:, None].contiguous()

    @staticmethod
    def why_not(config: Any) -> str:
        """Why a model of this configuration cannot run lean; empty if it can."""
        if config.model_type not in FAMILIES:
            return f"model_type {config.model_type}"
        if getattr(config, "hidden_act", "silu") != "silu":
            return f"hidden_act {config.hidden_act}"
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
            return f"rope_type {rope.get('rope_type')}"  # tables that depend on the length seen
        if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
            return "partial rotary"
        return ""

    @staticmethod
    def _repack(layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return _Layer(
            norm_in=layer.input_layernorm.weight.detach(),
            qkv=PackedLinear(_stack(attention.q_proj, attention.k_proj, attention.v_proj)),
            q_norm=_weight(getattr(attention, "q_norm", None)),
            k_norm=_weight(getattr(attention, "k_norm", None)),
            out=PackedLinear(attention.o_proj),
            norm_mlp=layer.post_attention_layernorm.weight.detach(),
            gate_up=PackedLinear(_stack(mlp.gate_proj, mlp.up_proj)),
            down=PackedLinear(mlp.down_proj),
            # Per layer where layers differ, else for the whole model.
            window=getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)),
        )

    def forward(self, batch: PackedBatch, cache: KVCache, attention: str) -> Tensor:
        """float32 logits [len(keep), V]; see `ModelRunner.forward`."""
        num_heads, num_kv = self._num_heads, self._num_kv_heads
        x = self._embedding[batch.input_ids]
        cos, sin = self._cos_P1D[batch.position_ids], self._sin_P1D[batch.position_ids]
        half = self._head_dim // 2
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv.rows(F.rms_norm(x, (self._hidden,), layer.norm_in, self._eps))
            qkv = qkv.view(-1, num_heads + 2 * num_kv, self._head_dim)
            qk, v = qkv[:, : num_heads + num_kv], qkv[:, num_heads + num_kv :]
            if layer.q_norm is not None and layer.k_norm is not None:
                q = F.rms_norm(qk[:, :num_heads], (self._head_dim,), layer.q_norm, self._eps)
                k = F.rms_norm(qk[:, num_heads:], (self._head_dim,), layer.k_norm, self._eps)
                qk = torch.cat([q, k], dim=1)
            qk = qk * cos + qk.roll(half, dims=-1) * sin
            cache.write(index, batch.slots, qk[:, num_heads:], v)
            if batch.on_layer is not None:
                batch.on_layer(index)
            attended = tree_attention(
                qk[:, :num_heads],
                cache.keys(index),
                cache.values(index),
                batch.segments,
                scaling=self._scaling,
                window=layer.window,
                backend=attention,
            )
            x = x + layer.out.rows(attended.view(len(x), -1))
            gate, up = layer.gate_up.rows(F.rms_norm(x, (self._hidden,), layer.norm_mlp, self._eps)).chunk(
                2, dim=-1
            )
            x = x + layer.down.rows(F.silu(gate) * up)
        if len(batch.keep) == 0:
            return x.new_empty(0, self._head.out_features)
        kept = x if len(batch.keep) == len(x) else x[batch.keep]
        logits: Tensor = self._head.rows(F.rms_norm(kept, (self._hidden,), self._norm, self._eps))
        return logits


def _weight(norm: Any) -> Tensor | None:
    return None if norm is None else norm.weight.detach()


def _stack(*linears: nn.Linear) -> nn.Linear:
    """One linear whose outputs are the given ones' outputs, side by side."""
    has_bias = linears[0].bias is not None
    total = sum(linear.out_features for linear in linears)
    stacked = nn.Linear(linears[0].in_features, total, bias=has_bias)
    stacked.weight = nn.Parameter(
        torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False
    )
    if has_bias:
        stacked.bias = nn.Parameter(
            torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False
        )
    return stacked
