"""Packed queries and a paged pool -> attention output by torch's fused attention: fast, its bits depend on the shape.

For draft models: what they propose is checked by the target, so rounding may differ from step to step. One call for
each segment; with many of them the shared passes of `tree_attention_cpu` are faster.

Measured (one thread, 4 heads, 2 KV heads, D = 32, context 300; us a layer at 1x1, 1x8 streams x rows): 38 / 57, where
the passes take 102 / 122.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from paceline.kernels.tree_attention import AttentionSegment

MAX_SEGMENTS = 4
"""Above this, shared passes win."""


def tree_attention(
    q_THD: Tensor,
    k_pool_SGD: Tensor,
    v_pool_SGD: Tensor,
    segments: list[AttentionSegment],
    *,
    scaling: float,
    window: int | None,
) -> Tensor:
    """See `paceline.kernels.tree_attention.tree_attention`; without softcap."""
    k_pool_GSD, v_pool_GSD = k_pool_SGD.transpose(0, 1), v_pool_SGD.transpose(0, 1)
    out = q_THD.new_empty(*q_THD.shape[:2], v_pool_SGD.shape[-1])
    for segment in segments:
        rows = slice(segment.row_start, segment.row_start + segment.num_rows)
        o = F.scaled_dot_product_attention(
            q_THD[rows].transpose(0, 1)[None],
            _gather(k_pool_GSD, segment),
            _gather(v_pool_GSD, segment),
            attn_mask=segment.mask(window),
            scale=scaling,
            enable_gqa=True,
        )
        out[rows] = o[0].transpose(0, 1)
    return out


def _gather(pool_GSD: Tensor, segment: AttentionSegment) -> Tensor:
    """[1, G, C + N, D], runs of slots at a time."""
    num_heads, num_slots, dim = pool_GSD.shape
    num_keys = segment.context_len + segment.num_rows
    unit = segment.unit if num_slots % segment.unit == 0 else 1
    units = segment.runs.get((num_heads, num_slots))
    if units is None:
        starts = segment.key_slots[: -(-num_keys // unit) * unit : unit] // unit
        units = (torch.arange(num_heads)[:, None] * (num_slots // unit) + starts[None, :]).reshape(-1)
        segment.runs[num_heads, num_slots] = units
    runs = pool_GSD.reshape(num_heads * num_slots // unit, unit * dim).index_select(0, units)
    return runs.view(1, num_heads, -1, dim)[:, :, :num_keys]
