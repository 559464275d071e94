"""Packed queries and a paged pool -> attention output whose bits do not depend on what else is in the batch (CPU).

A row's result must be the same whether it is computed alone, inside a prompt chunk or as a node of a tree: then
chunking, speculation and hand-off cannot change a token. Matrix products break this in two places: few rows take
another code path, and sums over the keys are split by the number of keys. So here:

    rows are padded to at least 4; keys to a multiple of 64, with keys and values of zero that are masked
    scores = q K^T          block of 64 keys by block: the sum is over D, always the same shape
    p = exp(scores - max)   max is exact, masked keys give an exact 0
    o_b = p_b V_b           block by block
    o = sum_b o_b / sum_b l_b   in float64, where adding the blocks in any order rounds to the same float32

This holds for chunks and for a tree's spine, which stands first among its nodes. A side branch's row sums the same
keys in another order, so it equals the row of a plain step within rounding only.

Segments with few rows share one pass: their blocks of keys become one batch of small products, so that sixteen
streams cost little more Python than one. Long chunks go alone, in slices that bound the memory of the scores.

Legend: B segments of a pass, N rows of each (padded), X blocks of all of them, M = N * heads / KV heads, K = 64.

Measured (one thread, 4 heads, 2 KV heads, D = 32, context 300; us a layer at 1x1, 1x8, 16x1, 16x8 streams x rows):
plain twin 63 / 94 / 998 / 1479, this one 102 / 122 / 554 / 1017, most of it the gathering of K and V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.kernels.tree_attention import AttentionSegment

KEY_BLOCK = 64
MIN_ROWS = 4
SHARED_ROWS = 32
"""Segments with at most this many rows share passes."""
MAX_SCORES = 1 << 22
"""Elements of the scores of one pass, about: 16 MB."""


@dataclass(slots=True)
class Pass:
    """Indices of one pass, computed once a step and window, used by all layers.

    units [G * X * K / unit] runs of `unit` slots to gather, head by head; tail: keys in [X * K] that were gathered with
    the last run of a segment but are not its own: their V is zeroed, since 0 * NaN would not be 0; block_of [X] segment of each block (None: one segment); rows [B * N] packed rows, padding
    repeats a segment's first row; hidden [X, N, K] keys a row must not see; kept: rows of the output that are real.
    """

    num_segments: int
    num_rows: int
    num_blocks: int
    unit: int
    units: Tensor
    tail: Tensor | None
    block_of: Tensor | None
    rows: Tensor
    hidden: Tensor | None
    kept: Tensor | None
    out_rows: Tensor


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
    num_heads = q_THD.shape[1]
    out = q_THD.new_empty(q_THD.shape[0], num_heads, v_pool_SGD.shape[-1])
    # The pool is stored head by head: this view is free, and runs of slots of one head are contiguous.
    k_pool_GSD, v_pool_GSD = k_pool_SGD.transpose(0, 1), v_pool_SGD.transpose(0, 1)
    for one in plan_passes(segments, window, num_heads, k_pool_GSD.shape):
        o = _run(one, q_THD, k_pool_GSD, v_pool_GSD, scaling, softcap)
        out[one.out_rows] = o if one.kept is None else o[one.kept]
    return out


def plan_passes(
    segments: list[AttentionSegment], window: int | None, num_heads: int, pool: torch.Size
) -> list[Pass]:
    """The passes of a step, remembered with its first segment. `pool` is [G, S, D]."""
    memory = segments[0].passes
    key = (window, num_heads, *pool)
    if key not in memory:
        group = num_heads // pool[0]
        short = [s for s in segments if s.num_rows <= SHARED_ROWS]
        passes = [_shared(part, window, group, pool) for part in _parts(short, num_heads)]
        for segment in segments:
            if segment.num_rows > SHARED_ROWS:
                step = max(MIN_ROWS, MAX_SCORES // (len(segment.key_slots) * num_heads))
                for start in range(0, segment.num_rows, step):
                    stop = min(start + step, segment.num_rows)
                    passes.append(_slice(segment, window, group, pool, start, stop))
        memory[key] = passes
    return memory[key]


def _parts(segments: list[AttentionSegment], num_heads: int) -> list[list[AttentionSegment]]:
    """Segments by similar numbers of rows, each part small enough for one pass."""
    parts: list[list[AttentionSegment]] = []
    size, most = 0, 0
    for segment in sorted(segments, key=lambda s: s.num_rows):
        wanted = len(segment.key_slots) * segment.num_rows * num_heads
        # Rows are padded to the longest: do not let one tree of 32 make 15 plain rows pay for 32.
        if not parts or size + wanted > MAX_SCORES or segment.num_rows > 2 * most:
            parts.append([])
            size, most = 0, max(MIN_ROWS, segment.num_rows)
        parts[-1].append(segment)
        size += wanted
    return parts


def _shared(segments: list[AttentionSegment], window: int | None, group: int, pool: torch.Size) -> Pass:
    num_rows = max(max(s.num_rows for s in segments), -(-MIN_ROWS // group))
    num_blocks = [len(s.key_slots) // KEY_BLOCK for s in segments]
    block_of = None
    if len(segments) > 1:
        block_of = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(num_blocks))
    rows = torch.cat([_padded_rows(s, 0, s.num_rows, num_rows) for s in segments])
    hidden = torch.cat([_hidden_blocks(s, window, 0, s.num_rows, num_rows) for s in segments])
    is_full = all(s.num_rows == num_rows for s in segments)
    kept = None
    if not is_full:
        kept = torch.cat([torch.arange(s.num_rows) + i * num_rows for i, s in enumerate(segments)])
    out_rows = rows if kept is None else rows[kept]
    masked = hidden if bool(hidden.any()) else None
    unit, units, tail = _units(segments, pool)
    return Pass(
        len(segments), num_rows, sum(num_blocks), unit, units, tail, block_of, rows, masked, kept, out_rows
    )


def _slice(
    segment: AttentionSegment, window: int | None, group: int, pool: torch.Size, start: int, stop: int
) -> Pass:
    num_rows = max(stop - start, -(-MIN_ROWS // group))
    rows = _padded_rows(segment, start, stop, num_rows)
    hidden = _hidden_blocks(segment, window, start, stop, num_rows)
    kept = None if num_rows == stop - start else torch.arange(stop - start)
    unit, units, tail = _units([segment], pool)
    num_blocks = len(segment.key_slots) // KEY_BLOCK
    return Pass(1, num_rows, num_blocks, unit, units, tail, None, rows, hidden, kept, rows[: stop - start])


def _units(segments: list[AttentionSegment], pool: torch.Size) -> tuple[int, Tensor, Tensor | None]:
    """(unit, runs to gather, keys whose V must be zeroed)."""
    num_heads, num_slots = pool[0], pool[1]
    unit = segments[0].unit if num_slots % segments[0].unit == 0 else 1
    starts = torch.cat([s.key_slots[::unit] for s in segments]) // unit
    units = torch.arange(num_heads)[:, None] * (num_slots // unit) + starts[None, :]
    tails, at = [], 0
    for segment in segments:
        num_real = segment.context_len + segment.num_rows
        tails.append(torch.arange(at + num_real, at + -(-num_real // unit) * unit))
        at += len(segment.key_slots)
    tail = torch.cat(tails)
    return unit, units.reshape(-1), tail if len(tail) else None


def _padded_rows(segment: AttentionSegment, start: int, stop: int, num_rows: int) -> Tensor:
    rows = torch.full((num_rows,), segment.row_start + start)
    rows[: stop - start] = torch.arange(segment.row_start + start, segment.row_start + stop)
    return rows


def _hidden_blocks(
    segment: AttentionSegment, window: int | None, start: int, stop: int, num_rows: int
) -> Tensor:
    """bool [blocks, N, K]"""
    num_keys = len(segment.key_slots)
    num_real = segment.context_len + segment.num_rows
    hidden = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    visible = segment.mask(window)
    if visible is not None:
        hidden[: stop - start, :num_real] = ~visible[start:stop]
    hidden[:, num_real:] = True
    return hidden.view(num_rows, -1, KEY_BLOCK).transpose(0, 1)


def _gather(pool_GSD: Tensor, one: Pass) -> Tensor:
    """[G * X, K, D]"""
    num_heads, num_slots, dim = pool_GSD.shape
    runs = pool_GSD.reshape(num_heads * num_slots // one.unit, one.unit * dim).index_select(0, one.units)
    return runs.view(num_heads * one.num_blocks, KEY_BLOCK, dim)


def _run(
    one: Pass, q_THD: Tensor, k_pool_GSD: Tensor, v_pool_GSD: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """[B * N, H, Dv]"""
    num_heads, num_kv = q_THD.shape[1], k_pool_GSD.shape[0]
    group, num_b, num_n = num_heads // num_kv, one.num_segments, one.num_rows
    num_x, num_m = one.num_blocks, group * num_n
    q = (q_THD[one.rows] * scaling).view(num_b, num_n, num_kv, group, -1).permute(2, 0, 3, 1, 4)
    q_GBMD = q.reshape(num_kv, num_b, num_m, -1)
    q_GXMD = q_GBMD.expand(-1, num_x, -1, -1) if one.block_of is None else q_GBMD[:, one.block_of]
    k, v = _gather(k_pool_GSD, one), _gather(v_pool_GSD, one)
    if one.tail is not None:
        v.view(num_kv, num_x * KEY_BLOCK, -1).index_fill_(1, one.tail, 0.0)
    scores = torch.bmm(q_GXMD.reshape(num_kv * num_x, num_m, -1), k.transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if one.hidden is not None:
        scores.view(num_kv, num_x, group, num_n, KEY_BLOCK).masked_fill_(
            one.hidden[None, :, None], -torch.inf
        )
    scores = scores.view(num_kv, num_x, num_m, KEY_BLOCK)
    top_GXM = scores.amax(-1)
    if one.block_of is None:
        top_GBM = top_GXM.amax(1, keepdim=True)
        p = scores.sub_(top_GBM[..., None]).exp_()
        o_GXMD = torch.bmm(p.view(num_kv * num_x, num_m, KEY_BLOCK), v).view(num_kv, num_x, num_m, -1)
        total = p.sum(-1).sum(1, keepdim=True, dtype=torch.float64)
        o = o_GXMD.sum(1, keepdim=True, dtype=torch.float64)
    else:
        top_GBM = top_GXM.new_full((num_kv, num_b, num_m), -torch.inf)
        top_GBM.scatter_reduce_(1, one.block_of[None, :, None].expand_as(top_GXM), top_GXM, "amax")
        p = scores.sub_(top_GBM[:, one.block_of, :, None]).exp_()
        o_GXMD = torch.bmm(p.view(num_kv * num_x, num_m, KEY_BLOCK), v).view(num_kv, num_x, num_m, -1)
        total = torch.zeros(num_kv, num_b, num_m, dtype=torch.float64)
        total.index_add_(1, one.block_of, p.sum(-1).double())
        o = torch.zeros(num_kv, num_b, num_m, o_GXMD.shape[-1], dtype=torch.float64)
        o.index_add_(1, one.block_of, o_GXMD.double())
    o = (o / total[..., None]).to(v.dtype).view(num_kv, num_b, group, num_n, -1)
    return o.permute(1, 3, 0, 2, 4).reshape(num_b * num_n, num_heads, -1)
