"""Packed queries and a paged pool -> attention output, segment by segment in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.kernels.tree_attention import AttentionSegment


def tree_attention(
    q_THD: Tensor,
    k_pool_SGD: Tensor,
    v_pool_SGD: Tensor,
    segments: list[AttentionSegment],
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """See `paceline.kernels.tree_attention.tree_attention`."""
    num_heads, num_kv_heads = q_THD.shape[1], k_pool_SGD.shape[1]
    group = num_heads // num_kv_heads
    out = q_THD.new_empty(q_THD.shape[0], num_heads, v_pool_SGD.shape[-1])
    for segment in segments:
        rows = slice(segment.row_start, segment.row_start + segment.num_rows)
        key_slots = segment.key_slots[: segment.context_len + segment.num_rows]
        k_GCD = k_pool_SGD.index_select(0, key_slots).transpose(0, 1)
        v_GCD = v_pool_SGD.index_select(0, key_slots).transpose(0, 1)
        q_GND = q_THD[rows].reshape(segment.num_rows, num_kv_heads, group, -1).permute(1, 2, 0, 3)
        q_GND = q_GND.reshape(num_kv_heads, group * segment.num_rows, -1)
        scores = torch.bmm(q_GND, k_GCD.transpose(1, 2)) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        mask = segment.mask(window)
        if mask is not None:
            scores = scores.view(num_kv_heads, group, segment.num_rows, -1)
            scores = scores.masked_fill(~mask, -torch.inf).view(num_kv_heads, group * segment.num_rows, -1)
        o_GND = torch.bmm(scores.softmax(-1), v_GCD)
        o_NHD = o_GND.view(num_kv_heads, group, segment.num_rows, -1).permute(2, 0, 1, 3)
        out[rows] = o_NHD.reshape(segment.num_rows, num_heads, -1)
    return out
