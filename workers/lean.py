"""A loaded Hugging Face decoder of the Llama kind -> the same maths with a tenth of the Python per layer (CPU).

The plain twin is the Hugging Face model itself, through the same attention and the same pool. Host overhead is what
small models die of: modules, decorators and separate q, k, v, gate and up calls cost more than their arithmetic.
Here a layer is two norms, four packed linears (two add the residual), a rotation, an attention, a gate. Which path a worker took is in its
start-up log (`forward=lean` or `forward=transformers`); a model that is not recognised, or whose lean logits
differ from the plain ones at load, takes the plain path and says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from paceline.kernels.layer_jit import gate, rms_norm, rotate_and_store
from paceline.kernels.tree_attention import tree_attention
from paceline.kernels.tree_attention_jit import attend
from paceline.workers.kv_cache import KVCache
from paceline.workers.layers import PackedLinear
from paceline.workers.model_batch import PackedBatch

FloatArray = npt.NDArray[np.float32]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""model_type values whose layer is: norm, attention, add, norm, gated SiLU MLP, add."""


@dataclass(slots=True)
class _Layer:
    norm_in: FloatArray
    qkv: PackedLinear
    q_norm: FloatArray
    k_norm: FloatArray
    """Empty: no such norm."""
    out: PackedLinear
    norm_mlp: FloatArray
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
        self._eps = np.float32(config.rms_norm_eps)
        self._hidden = int(config.hidden_size)
        self._intermediate = int(config.intermediate_size)
        self._attended = self._num_heads * self._head_dim
        self._embedding: Tensor = decoder.embed_tokens.weight.detach()
        self._norm = _weight(decoder.norm)
        self._head = PackedLinear(model.lm_head)
        self._layers = [self._repack(layer) for layer in decoder.layers]
        self._cos_PD, self._sin_PD = rotations(model, max_context)

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
            norm_in=_weight(layer.input_layernorm),
            qkv=PackedLinear(_stack(attention.q_proj, attention.k_proj, attention.v_proj)),
            q_norm=_weight(getattr(attention, "q_norm", None)),
            k_norm=_weight(getattr(attention, "k_norm", None)),
            out=PackedLinear(attention.o_proj),
            norm_mlp=_weight(layer.post_attention_layernorm),
            gate_up=PackedLinear(_stack(mlp.gate_proj, mlp.up_proj)),
            down=PackedLinear(mlp.down_proj),
            # Per layer where layers differ, else for the whole model.
            window=getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)),
        )

    def forward(self, batch: PackedBatch, cache: KVCache, attention: str) -> Tensor:
        """float32 logits [len(keep), V]; see `ModelRunner.forward`."""
        plan, num = batch.attention, len(batch.slots)
        x = self._embedding[batch.input_ids]
        normed, queries, attended, gated = (
            torch.empty(num, size)
            for size in (self._hidden, self._attended, self._attended, self._intermediate)
        )
        # Every operation below reads its input before the next one writes: four buffers serve all layers.
        normed_TE, gated_TI = normed.numpy(), gated.numpy()
        q_THD = queries.view(num, -1, self._head_dim).numpy()
        for index, layer in enumerate(self._layers):
            k_pool, v_pool = cache.arrays[index]
            rms_norm(x.numpy(), layer.norm_in, self._eps, normed_TE)
            rotate_and_store(
                layer.qkv.rows(normed).numpy(),
                plan.positions,
                batch.slots,
                self._cos_PD,
                self._sin_PD,
                layer.q_norm,
                layer.k_norm,
                self._eps,
                self._num_heads,
                k_pool,
                v_pool,
                q_THD,
            )
            if batch.on_layer is not None:
                batch.on_layer(index)
            if attention == "reference":
                attended = self._attend_plainly(queries, cache, index, batch, layer.window)
            else:
                out = attended.view(num, -1, self._head_dim).numpy()
                attend(
                    q_THD, k_pool, v_pool, plan, out, scaling=self._scaling, window=layer.window, softcap=None
                )
            x = layer.out.rows_plus(attended, x)
            rms_norm(x.numpy(), layer.norm_mlp, self._eps, normed_TE)
            gate(layer.gate_up.rows(normed).numpy(), gated_TI)
            x = layer.down.rows_plus(gated, x)
        if len(batch.keep) == 0:
            return x.new_empty(0, self._head.out_features)
        kept = x if len(batch.keep) == len(x) else x[batch.keep]
        normed = torch.empty_like(kept)
        rms_norm(kept.numpy(), self._norm, self._eps, normed.numpy())
        return self._head.rows(normed)

    def _attend_plainly(
        self, queries: Tensor, cache: KVCache, index: int, batch: PackedBatch, window: int | None
    ) -> Tensor:
        """The plain twin of attention, for comparisons."""
        q_THD = queries.view(len(queries), -1, self._head_dim)
        keys, values = cache.keys(index), cache.values(index)
        out = tree_attention(
            q_THD, keys, values, batch.attention, scaling=self._scaling, window=window, backend="reference"
        )
        return out.view(len(queries), -1)


def rotations(model: Any, max_context: int) -> tuple[FloatArray, FloatArray]:
    """cos and sin [positions, D], the signs of rotate_half in sin."""
    decoder = model.model
    like = decoder.embed_tokens.weight.detach()[None, :1]
    cos, sin = decoder.rotary_emb(like, torch.arange(max_context)[None])
    half = cos.shape[-1] // 2
    # rotate_half(x) * sin = cat(-x2, x1) * sin = cat(x2, x1) * cat(-sin1, sin2)
    turned = torch.cat([-sin[0][:, :half], sin[0][:, half:]], dim=-1)
    return cos[0].contiguous().numpy(), turned.contiguous().numpy()


def _weight(norm: Any) -> FloatArray:
    """A norm's weight; empty if there is no norm."""
    return np.empty(0, np.float32) if norm is None else norm.weight.detach().numpy()


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
