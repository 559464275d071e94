"""Accepted tree nodes -> their places in the pool, one launch for all streams, layers and heads (Triton).

A program moves one stream's nodes of one layer, K or V, and head: up to 64 rows are read before any of them is written. Of a
longer path the next 64 follow; what they read lies behind all that was written, because node j + 1 of a path stands at
place j + 1 or later. Streams whose path is a spine cost a read of it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def kv_commit(
    pool_LEGSD: Tensor, tables_BX: Tensor, starts_B: Tensor, paths_BN: Tensor, block_size: int
) -> None:
    """See `paceline.kernels.kv_commit.kv_commit`."""
    layers, two, heads, _, dim = pool_LEGSD.shape
    num_streams, longest = paths_BN.shape
    _move[(num_streams, layers * two * heads)](
        pool_LEGSD,
        tables_BX,
        starts_B,
        paths_BN,
        *pool_LEGSD.stride()[:4],
        tables_BX.stride(0),
        paths_BN.stride(0),
        two,
        heads,
        dim,
        longest,
        BLOCK_SIZE=block_size,
        BLOCK_N=min(64, triton.next_power_of_2(max(longest, 1))),
        BLOCK_D=triton.next_power_of_2(dim),
    )


@triton.jit
def _move(
    pool, tables, starts, paths, stride_layer, stride_kv, stride_head, stride_slot, stride_table, stride_path,
    two, heads, dim, longest,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    stream = tl.program_id(0)
    part = tl.program_id(1)
    base = (
        pool
        + (part // (two * heads)).to(tl.int64) * stride_layer
        + (part // heads % two).to(tl.int64) * stride_kv
        + (part % heads).to(tl.int64) * stride_head
    )
    start = tl.load(starts + stream)
    column = tl.arange(0, BLOCK_D)
    for first in range(0, longest, BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        node = tl.load(paths + stream * stride_path + place, mask=place < longest, other=-1)
        moves = (node >= 0) & (node != place + 1)
        if tl.max(moves.to(tl.int32), 0) > 0:
            here = start + node
            there = start + place + 1
            table = tables + stream * stride_table
            source = tl.load(table + here // BLOCK_SIZE, mask=moves, other=0) * BLOCK_SIZE + here % BLOCK_SIZE
            target = (
                tl.load(table + there // BLOCK_SIZE, mask=moves, other=0) * BLOCK_SIZE + there % BLOCK_SIZE
            )
            mask = moves[:, None] & (column < dim)[None, :]
            rows = tl.load(base + source.to(tl.int64)[:, None] * stride_slot + column[None, :], mask=mask)
            tl.debug_barrier()
            tl.store(base + target.to(tl.int64)[:, None] * stride_slot + column[None, :], rows, mask=mask)
            tl.debug_barrier()
