"""Queries, a paged pool and pieces of work -> attention output: one persistent launch and a merge (Triton).

A program goes through its pieces. Of each it holds R rows times the query heads of one KV head, and streams over the keys,
64 at a time: gather K through the block table, scores, who sees what, running maximum and sum (FlashAttention), V. A
piece that is all its rows see writes their output, others leave a partial result with its log-sum-exp. Ancestors of a tree
node are bits, looked at in the last few keys only; windows and the tree's positions are counted from them.

    floor    bytes of K and V of every key once / memory bandwidth; a shared prefix counts once for all who share it
    versions 1, this one: gathers by pointers, no TMA, one stage less than the compiler likes for float32.
             Not timed on a card yet; see docs/kernels.md for what is predicted.

`context="varlen"` leaves what all rows of a stream see to torch's paged FlashAttention and does only the rest here.
Source: Dao 2307.08691 (FlashAttention-2); Miao et al. 2305.09781 (tree attention); serving.md's hybrid (LongSpec).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.attention_merge import attention_merge
from paceline.kernels.attention_pieces import Cut, Pieces
from paceline.kernels.varlen_context import varlen_context


def attend(
    q_THD: Tensor,
    k_pool_GSD: Tensor,
    v_pool_GSD: Tensor,
    pieces: Pieces,
    cut: Cut,
    *,
    block_size: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    context: Tensor | None = None,
) -> Tensor:
    """What `paceline.kernels.tree_attention.tree_attention` gives, of a plan that was cut into pieces.

    Args:
        q_THD, k_pool_GSD, v_pool_GSD: float32, bfloat16 or float16, last dimension contiguous.
        pieces: on the same device, planned for the same `window`.
        context: int32 [B], what `plan_pieces` was told: those keys are read by `varlen_attn`.
    Returns:
        [T, H, Dv] of q's dtype; zeros for rows that are in no piece.
    """
    num_rows, num_heads, dim = q_THD.shape
    num_kv, _, dim_v = v_pool_GSD.shape
    group = num_heads // num_kv
    rows = cut.rows_per_tile
    # Each partial result is merged once; the last piece's tile may have fewer rows than the kernel's.
    num_partials = pieces.merge_entry.numel() + rows + (num_rows if context is not None else 0)
    device = q_THD.device
    out = torch.zeros(num_rows, num_heads, dim_v, dtype=q_THD.dtype, device=device)
    partial = torch.empty(num_partials, num_heads, dim_v, dtype=torch.float32, device=device)
    lse = torch.empty(num_partials, num_heads, dtype=torch.float32, device=device)
    if context is not None:
        varlen_context(
            q_THD,
            k_pool_GSD,
            v_pool_GSD,
            pieces,
            context,
            partial,
            lse,
            block_size=block_size,
            scaling=scaling,
        )
    _attend[(cut.num_programs, num_kv)](
        q_THD,
        k_pool_GSD,
        v_pool_GSD,
        out,
        partial,
        lse,
        lse if sinks_H is None else sinks_H,
        pieces.tables,
        pieces.leading,
        pieces.positions,
        pieces.base,
        pieces.bits,
        pieces.ranks,
        pieces.tile_rows,
        pieces.tile_segment,
        pieces.tile_base,
        pieces.piece_tile,
        pieces.piece_start,
        pieces.piece_stop,
        pieces.piece_entry,
        pieces.program_start,
        q_THD.stride(0),
        q_THD.stride(1),
        k_pool_GSD.stride(0),
        k_pool_GSD.stride(1),
        v_pool_GSD.stride(0),
        v_pool_GSD.stride(1),
        pieces.tables.stride(0),
        scaling,
        window or 0,
        softcap or 0.0,
        dim,
        dim_v,
        num_heads,
        GROUP=group,
        ROWS=rows,
        WORDS=pieces.bits.shape[1],
        BLOCK_SIZE=block_size,
        HAS_WINDOW=window is not None,
        HAS_CAP=softcap is not None,
        HAS_SINKS=sinks_H is not None,
        BLOCK_M=max(16, triton.next_power_of_2(rows * group)),
        BLOCK_N=cut.block_keys,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_V=max(16, triton.next_power_of_2(dim_v)),
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
    )
    attention_merge(
        partial, lse, pieces.merge_start, pieces.merge_entry, out, sinks_H=sinks_H, backend="triton"
    )
    return out


@triton.jit
def _popcount(x):
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _attend(
    q, k_pool, v_pool, out, partial, lse, sinks,
    tables, leading, positions, base, bits, ranks,
    tile_rows, tile_segment, tile_base, piece_tile, piece_start, piece_stop, piece_entry, program_start,
    stride_q_row, stride_q_head, stride_k_head, stride_k_slot, stride_v_head, stride_v_slot, stride_table,
    scaling, window, softcap, dim, dim_v, num_heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    kv_head = tl.program_id(1)
    packed = tl.arange(0, BLOCK_M)
    place = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    column = tl.arange(0, BLOCK_D)
    column_v = tl.arange(0, BLOCK_V)
    k_base = k_pool + kv_head.to(tl.int64) * stride_k_head
    v_base = v_pool + kv_head.to(tl.int64) * stride_v_head
    first_piece = tl.load(program_start + tl.program_id(0))
    last_piece = tl.load(program_start + tl.program_id(0) + 1)
    for piece in range(first_piece, last_piece):
        tile = tl.load(piece_tile + piece)
        row = tl.load(tile_rows + tile * ROWS + place, mask=place < ROWS, other=-1)
        is_row = row >= 0
        table = tables + tl.load(tile_segment + tile).to(tl.int64) * stride_table
        masked_from = tl.load(tile_base + tile)
        row_leading = tl.load(leading + row, mask=is_row, other=0)
        row_position = tl.load(positions + row, mask=is_row, other=0)
        row_base = tl.load(base + row, mask=is_row, other=0)
        q_tile = tl.load(
            q + row.to(tl.int64)[:, None] * stride_q_row + head[:, None] * stride_q_head + column[None, :],
            mask=is_row[:, None] & (column < dim)[None, :],
            other=0.0,
        )
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        stop = tl.load(piece_stop + piece)
        for first_key in range(tl.load(piece_start + piece), stop, BLOCK_N):
            key = first_key + tl.arange(0, BLOCK_N)
            is_key = key < stop
            block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0)
            slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
            k_tile = tl.load(
                k_base + slot[None, :] * stride_k_slot + column[:, None],
                mask=is_key[None, :] & (column < dim)[:, None],
                other=0.0,
            )
            scores = tl.dot(q_tile, k_tile, input_precision=PRECISION) * scaling
            if HAS_CAP:
                # tanh x = 2 sigmoid(2x) - 1
                scores = softcap * (2.0 * tl.sigmoid(2.0 * (scores / softcap)) - 1.0)
            sees = key[None, :] < row_leading[:, None]
            if HAS_WINDOW:
                sees = sees & (key[None, :] > row_position[:, None] - window)
            if first_key + BLOCK_N > masked_from:
                bit = key[None, :] - row_base[:, None]
                is_bit = is_row[:, None] & (bit >= 0) & (bit < 32 * WORDS)
                word_at = row[:, None] * WORDS + bit // 32
                word = tl.load(bits + word_at, mask=is_bit, other=0).to(tl.uint32, bitcast=True)
                shift = (bit % 32).to(tl.uint32)
                is_own = is_bit & (((word >> shift) & 1) != 0)
                if HAS_WINDOW:
                    # The rows' own keys follow their leading ones in position, one by one.
                    below = word & (((shift - shift + 1) << shift) - 1)
                    rank = tl.load(ranks + word_at, mask=is_bit, other=0) + _popcount(below)
                    is_own = is_own & (row_leading[:, None] + rank > row_position[:, None] - window)
                sees = sees | is_own
            scores = tl.where(sees & is_key[None, :], scores * LOG2E, float("-inf"))
            above = tl.maximum(top, tl.max(scores, 1))
            reference = tl.where(above == float("-inf"), 0.0, above)
            shrink = tl.exp2(top - reference)
            power = tl.exp2(scores - reference[:, None])
            weight = weight * shrink + tl.sum(power, 1)
            v_tile = tl.load(
                v_base + slot[:, None] * stride_v_slot + column_v[None, :],
                mask=is_key[:, None] & (column_v < dim_v)[None, :],
                other=0.0,
            )
            total = total * shrink[:, None] + tl.dot(
                power.to(v_tile.dtype), v_tile, input_precision=PRECISION
            )
            top = above
        entry = tl.load(piece_entry + piece)
        log = top + tl.log2(tl.where(weight > 0, weight, 1.0))  # base 2
        divisor = tl.where(weight > 0, weight, 1.0)
        is_out = is_row[:, None] & (column_v < dim_v)[None, :]
        if entry < 0:
            if HAS_SINKS:
                # One more key of weight 2^(sink - top) and no value.
                sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
                divisor = divisor + tl.exp2(sink - top)
            at = row.to(tl.int64)[:, None] * (num_heads * dim_v) + head[:, None] * dim_v + column_v[None, :]
            tl.store(out + at, (total / divisor[:, None]).to(out.dtype.element_ty), mask=is_out)
        else:
            result = (entry.to(tl.int64) + place) * num_heads + head
            tl.store(
                partial + result[:, None] * dim_v + column_v[None, :], total / divisor[:, None], mask=is_out
            )
            tl.store(lse + result, log * 0.6931471805599453, mask=is_row)
