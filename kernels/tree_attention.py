"""Queries of packed segments and a paged KV pool -> attention output, chunks and draft trees alike.

A segment is a run of rows of one stream: a prompt chunk (causal among themselves) or a draft tree (each row sees its
ancestors). All rows see the stream's committed context. Rows of different segments never see each other.

Legend: T packed rows, S pool slots, H query heads, G KV heads, D head size, C context, N rows of a segment.
Source: Miao et al. 2305.09781 (tree attention) for the mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.kernels import tree_attention_cpu as cpu
from paceline.kernels import tree_attention_reference as reference
from paceline.kernels import tree_attention_sdpa as sdpa

KEY_BLOCK = cpu.KEY_BLOCK


@dataclass(slots=True)
class AttentionSegment:
    """Rows [row_start, row_start + N) of the packed batch.

    key_slots: int64 [P], pool slots of the context in order of position, then of the segment's own rows, then of the
        pool's zero row up to a multiple of KEY_BLOCK.
    positions: int64 [N], absolute positions of the rows.
    own_mask: bool [N, N], or None for a causal chunk.
    """

    row_start: int
    num_rows: int
    context_len: int
    key_slots: Tensor
    positions: Tensor
    own_mask: Tensor | None = None
    unit: int = 1
    """key_slots come in runs of this many consecutive slots, each beginning at a multiple of it; divides KEY_BLOCK."""
    _masks: dict[int, Tensor | None] = field(default_factory=dict)
    passes: dict[tuple[int | None, ...], list[cpu.Pass]] = field(default_factory=dict)
    """What the shared passes worked out for the step this segment is the first of."""
    runs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Runs of slots to gather for this segment alone."""

    def mask(self, window: int | None) -> Tensor | None:
        """bool [N, C + N] of visible keys for a sliding window (None: unlimited); None if all are visible.

        Computed once a step and window, shared by all layers.
        """
        key = window or 0
        if key not in self._masks:
            self._masks[key] = self._build_mask(window)
        return self._masks[key]

    def _build_mask(self, window: int | None) -> Tensor | None:
        if self.num_rows == 1 and (window is None or self.context_len < window):
            return None
        own = self.own_mask
        if own is None:
            own = torch.ones(self.num_rows, self.num_rows, dtype=torch.bool).tril()
        mask = torch.ones(self.num_rows, self.context_len + self.num_rows, dtype=torch.bool)
        mask[:, self.context_len :] = own
        if window is not None:
            key_positions = torch.cat([torch.arange(self.context_len), self.positions])
            mask &= key_positions[None, :] > self.positions[:, None] - window
        return mask


def tree_attention(
    q_THD: Tensor,
    k_pool_SGD: Tensor,
    v_pool_SGD: Tensor,
    segments: list[AttentionSegment],
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    backend: str = "exact",
) -> Tensor:
    """Attention of every row over its stream's context and its own ancestors, whose K and V are in the pool already.

    Args:
        q_THD: float32. k_pool_SGD, v_pool_SGD: float32, G divides H.
        segments: cover each row of q exactly once.
        scaling: factor on the scores. window: sliding window in tokens. softcap: tanh cap of the scores.
        backend: "exact" (bits independent of the batch, for targets), "fast" (for drafts) or "reference" (plain).
    Returns:
        [T, H, Dv], dtype of q.
    """
    if backend == "fast" and softcap is None and len(segments) <= sdpa.MAX_SEGMENTS:
        return sdpa.tree_attention(q_THD, k_pool_SGD, v_pool_SGD, segments, scaling=scaling, window=window)
    run = reference.tree_attention if backend == "reference" else cpu.tree_attention
    return run(q_THD, k_pool_SGD, v_pool_SGD, segments, scaling=scaling, window=window, softcap=softcap)
