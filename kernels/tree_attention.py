"""Queries of packed rows and a paged KV pool -> attention output, chunks and draft trees alike.

A row sees keys of its own stream only: the first `num_leading` of them, which for a prompt chunk is everything up to
itself, and for a node of a draft tree its stream's committed context; then the node's ancestors and itself.

Legend: T packed rows, B segments (streams), S pool slots, H query heads, G KV heads, D head size.
Source: Miao et al. 2305.09781 (tree attention) for who sees whom.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paceline.kernels import tree_attention_jit as jit
from paceline.kernels import tree_attention_reference as reference


@dataclass(slots=True)
class AttentionPlan:
    """Who sees what in one step. A key is named by its index i in its stream; `tables` turn that into a pool slot.

    tables: int32 [B, X], pool blocks of each stream in order; key i lies in slot tables[b, i // block_size] *
        block_size + i % block_size.
    row_segment: int32 [T], the stream of each row. positions: int64 [T].
    num_leading: int32 [T]: the row sees keys 0..num_leading - 1, whose positions are their indices.
    own: int32 [*] and own_start: int32 [T + 1]: the row also sees keys own[own_start[t] : own_start[t + 1]], whose
        positions follow those of the leading ones without a gap and end with the row's own.
    """

    tables: npt.NDArray[np.int32]
    block_size: int
    row_segment: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    num_leading: npt.NDArray[np.int32]
    own_start: npt.NDArray[np.int32]
    own: npt.NDArray[np.int32]
    parts: tuple[int, list[tuple[int, int]]] | None = None
    """Ranges of rows for so many threads, worked out by the first layer."""


def tree_attention(
    q_THD: Tensor,
    k_pool_GSD: Tensor,
    v_pool_GSD: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    backend: str = "jit",
) -> Tensor:
    """Attention of every row over the keys it sees, whose K and V are in the pool already.

    Args:
        q_THD: float32. k_pool_GSD, v_pool_GSD: float32, contiguous; G divides H.
        scaling: factor on the scores. window: a row sees positions above its own less window. softcap: tanh cap.
        backend: "jit" (bits of a row independent of the batch) or "reference" (plain torch).
    Returns:
        float32 [T, H, Dv].
    """
    run = reference.tree_attention if backend == "reference" else jit.tree_attention
    return run(q_THD, k_pool_GSD, v_pool_GSD, plan, scaling=scaling, window=window, softcap=softcap)
