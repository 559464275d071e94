"""Queries and a paged pool -> attention output, row by row in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.kernels.tree_attention import AttentionPlan


def tree_attention(
    q_THD: Tensor,
    k_pool_GSD: Tensor,
    v_pool_GSD: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `paceline.kernels.tree_attention.tree_attention`."""
    num_heads, num_kv = q_THD.shape[1], k_pool_GSD.shape[0]
    out = q_THD.new_empty(q_THD.shape[0], num_heads, v_pool_GSD.shape[-1])
    for row, q_HD in enumerate(q_THD):
        leading = int(plan.num_leading[row])
        own = plan.own[plan.own_start[row] : plan.own_start[row + 1]]
        keys = np.concatenate([np.arange(leading), own])
        positions = np.arange(leading + len(own))
        if window is not None:
            keys = keys[positions > plan.positions[row] - window]
        blocks = plan.tables[plan.row_segment[row]][keys // plan.block_size].astype(np.int64)
        slots = torch.from_numpy(blocks * plan.block_size + keys % plan.block_size)
        k_GCD, v_GCD = k_pool_GSD[:, slots], v_pool_GSD[:, slots]
        scores = torch.einsum("ghd,gcd->ghc", q_HD.view(num_kv, num_heads // num_kv, -1), k_GCD) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.softmax(-1)
        if sinks_H is not None:
            # e^s / (sum e^s + e^sink) = softmax(s) * sigmoid(log sum e^s - sink): one key more in the softmax itself
            # would shift the order of its sum, and with it the bits even of a sink that weighs nothing.
            sinks = sinks_H.float().view(num_kv, -1, 1)
            weights = weights * torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks)
        out[row] = torch.einsum("ghc,gcd->ghd", weights, v_GCD).reshape(num_heads, -1)
    return out
