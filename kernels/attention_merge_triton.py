"""Partial attention outputs -> the rows' outputs, one launch (Triton). A program merges some heads of one row.

Reads every partial result once and writes every row once; what there is of them is a few per cent of the keys' bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def attention_merge(
    partial_EHD: Tensor,
    lse_EH: Tensor,
    starts: Tensor,
    entries_M: Tensor,
    out_THD: Tensor,
    sinks_H: Tensor | None,
) -> None:
    """See `paceline.kernels.attention_merge.attention_merge`."""
    num_rows, num_heads, dim = out_THD.shape
    heads = min(8, triton.next_power_of_2(num_heads))
    _merge[(num_rows, triton.cdiv(num_heads, heads))](
        partial_EHD,
        lse_EH,
        starts,
        entries_M,
        out_THD,
        lse_EH if sinks_H is None else sinks_H,
        out_THD.stride(0),
        out_THD.stride(1),
        num_heads,
        dim,
        HAS_SINKS=sinks_H is not None,
        HEADS=heads,
        BLOCK_D=triton.next_power_of_2(dim),
    )


@triton.jit
def _merge(
    partial, lse, starts, entries, out, sinks, stride_row, stride_head, num_heads, dim,
    HAS_SINKS: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_D)
    is_head = head < num_heads
    mask = is_head[:, None] & (column < dim)[None, :]
    first = tl.load(starts + row)
    stop = tl.load(starts + row + 1)
    if stop > first:
        if HAS_SINKS:
            top = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32)
            weight = tl.full([HEADS], 1.0, tl.float32)
        else:
            top = tl.full([HEADS], float("-inf"), tl.float32)
            weight = tl.zeros([HEADS], tl.float32)
        total = tl.zeros([HEADS, BLOCK_D], tl.float32)
        for at in range(first, stop):
            entry = tl.load(entries + at).to(tl.int64)
            log = tl.load(lse + entry * num_heads + head, mask=is_head, other=0.0)
            part = tl.load(
                partial + (entry * num_heads + head)[:, None] * dim + column[None, :], mask=mask, other=0.0
            )
            above = tl.maximum(top, log)
            # Nothing seen yet, here or before: any finite reference will do, the weights are zero.
            reference = tl.where(above == float("-inf"), 0.0, above)
            old = tl.exp(top - reference)
            new = tl.exp(log - reference)
            total = total * old[:, None] + part * new[:, None]
            weight = weight * old + new
            top = above
        result = total / weight[:, None]
        tl.store(
            out + row.to(tl.int64) * stride_row + head[:, None] * stride_head + column[None, :],
            result.to(out.dtype.element_ty),
            mask=mask,
        )
