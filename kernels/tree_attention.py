"""Queries of packed rows and a paged KV pool -> attention output, chunks and draft trees alike.

A row sees keys of its own stream only: the first `num_leading` of them, which for a prompt chunk is everything up to
itself, and for a node of a draft tree its stream's committed context; then the node's ancestors and itself.

Legend: T packed rows, B segments (streams), S pool slots, H query heads, G KV heads, D head size.
Source: Miao et al. 2305.09781 (tree attention) for who sees whom.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.kernels import attention_pieces_reference as pieces_reference
from paceline.kernels import tree_attention_jit as jit
from paceline.kernels import tree_attention_reference as reference
from paceline.kernels.attention_pieces import Cut, Pieces, on_device, plan_pieces, unmasked_context


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
    pieces: dict[tuple[Cut, int | None, bool, str], tuple[Pieces, Tensor | None]] = field(
        default_factory=dict
    )
    """The plan cut for a GPU, worked out by the first layer with a window."""


def tree_attention(
    q_THD: Tensor,
    k_pool_GSD: Tensor,
    v_pool_GSD: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    backend: str = "jit",
    cut: Cut | None = None,
    context: str = "triton",
) -> Tensor:
    """Attention of every row over the keys it sees, whose K and V are in the pool already.

    Args:
        q_THD: float32; on a GPU also bfloat16 and float16. k_pool_GSD, v_pool_GSD: the same dtype, contiguous; G divides H.
        scaling: factor on the scores. window: a row sees positions above its own less window. softcap: tanh cap.
        sinks_H: logit of one more key without a value for each head.
        backend: "jit" (CPU, numba; bits of a row independent of the batch), "reference" (plain torch), "triton" (GPU, or
            Triton's interpreter) or "pieces" (the plain twin of that).
        cut: how "triton" and "pieces" cut their work; with `split` set, bits of a row are independent of the batch.
        context: what reads the keys that all rows of a stream see, in "triton": itself, or "varlen", torch's paged
            FlashAttention, where `varlen_context.why_not_varlen` has nothing against it.
    Returns:
        [T, H, Dv] of q's dtype.
    """
    how: dict[str, Any] = {"scaling": scaling, "window": window, "softcap": softcap, "sinks_H": sinks_H}
    if backend == "jit":
        return jit.tree_attention(q_THD, k_pool_GSD, v_pool_GSD, plan, **how)
    if backend == "reference":
        return reference.tree_attention(q_THD, k_pool_GSD, v_pool_GSD, plan, **how)
    if cut is None:
        cut = default_cut(q_THD.shape[1], k_pool_GSD.shape[0], q_THD.device)
    pieces, lengths = _pieces(plan, cut, window, context == "varlen", q_THD.device)
    size = plan.block_size
    if backend == "pieces":
        return pieces_reference.attend(q_THD, k_pool_GSD, v_pool_GSD, pieces, cut, block_size=size, **how)
    from paceline.kernels import tree_attention_triton as kernel  # there is no Triton where there is no GPU

    return kernel.attend(q_THD, k_pool_GSD, v_pool_GSD, pieces, cut, block_size=size, context=lengths, **how)


def default_cut(num_heads: int, num_kv: int, device: torch.device) -> Cut:
    """Rows for a tile of 64 rows of scores; as many programs as the device holds at once, two on each multiprocessor."""
    places = 16
    if device.type == "cuda":
        places = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return Cut(rows_per_tile=max(1, 64 * num_kv // num_heads), num_programs=max(1, places // num_kv))


def _pieces(
    plan: AttentionPlan, cut: Cut, window: int | None, is_varlen: bool, device: torch.device
) -> tuple[Pieces, Tensor | None]:
    """The plan's pieces, and the lengths [B] of the contexts that others read; kept for all layers."""
    key = cut, window, is_varlen, str(device)
    if key not in plan.pieces:
        context = unmasked_context(plan) if is_varlen else None
        arrays = plan_pieces(plan, cut, window=window, context=context)
        lengths = None if context is None else torch.from_numpy(context).to(device)
        plan.pieces[key] = on_device(arrays, device), lengths
    return plan.pieces[key]
