"""Queries and what all rows of a stream see -> partial attention results, by torch's paged FlashAttention (CUDA).

The alternative to reading the context with our own kernel, where its conditions hold. Whole contexts only: no mask, no
window, no soft cap.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from paceline.kernels.attention_pieces import Pieces

_PAGE = 256
"""FlashAttention 2 reads pools whose blocks are a multiple of this."""


def why_not_varlen(pool: Tensor, block_size: int, *, window: int | None, softcap: float | None) -> str:
    """Why the context cannot be read so; empty if it can."""
    if not pool.is_cuda:
        return "no CUDA device"
    if pool.dtype not in (torch.bfloat16, torch.float16):
        return f"{pool.dtype}: expected bfloat16 or float16"
    if block_size % _PAGE:
        return f"kv.block_size={block_size}: expected a multiple of {_PAGE}"
    if window is not None or softcap is not None:
        return "a window or a soft cap"
    if pool.shape[-1] > 256:
        return f"head size {pool.shape[-1]}: expected at most 256"
    return ""


def varlen_context(
    q_THD: Tensor,
    k_pool_GSD: Tensor,
    v_pool_GSD: Tensor,
    pieces: Pieces,
    context: Tensor,
    partial_EHD: Tensor,
    lse_EH: Tensor,
    *,
    block_size: int,
    scaling: float,
) -> None:
    """Fill partial results 0..T - 1 with each row's attention over the first `context[b]` keys of its segment.

    Keys are in the pool as [G, slots, D]; the op reads the same memory as pages [blocks, block, G, D] by its strides.
    """
    num_rows = q_THD.shape[0]
    out, lse = varlen_attn(
        q_THD,
        _pages(k_pool_GSD, block_size),
        _pages(v_pool_GSD, block_size),
        pieces.segment_start,
        None,
        num_rows,
        pieces.tables.shape[1] * block_size,
        return_aux=AuxRequest(lse=True),
        scale=scaling,
        enable_gqa=True,
        seqused_k=context,
        block_table=pieces.tables,
        num_splits=1,
    )
    partial_EHD[:num_rows] = out
    lse_EH[:num_rows] = lse.T


def _pages(pool_GSD: Tensor, block_size: int) -> Tensor:
    num_kv, _, dim = pool_GSD.shape
    return pool_GSD.view(num_kv, -1, block_size, dim).permute(1, 2, 0, 3)
