"""Logits, trees and draws -> the verdict of `verify_ratio` (Triton).

    scan, collect, settle   of `verify`, for every sampled row: largest z, boundary of the filters, kept mass
    walk_ratio  streams     p at the Q tokens that q names and nowhere else; tests the children of each node on the way
    draw        streams x splits    argmax of log residual + noise over the row where the path ends, outside q's tokens
    join        streams     the best of the splits and of q's tokens, where the residual is p - q

The residual is p times a factor wherever q is nothing, so of the vocabulary only one row a stream is read again.

Versions: 1, this. Not timed on a card yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.keyed_noise_triton import gumbel_of, words_of_groups, words_of_ids
from paceline.kernels.verify import Rows, Trees
from paceline.kernels.verify_ratio import Draws, RatioVerdict
from paceline.kernels.verify_triton import DEFAULT, RowScan, Tuning, settle_whole
from paceline.kernels.vocabulary_triton import (
    NEVER,
    adjusted,
    best_of,
    fetch,
    keep_better,
    load_tile,
    over,
    tile_lanes,
)

_ACCEPT_DOMAIN = tl.constexpr(2147483648)
_DRAW_DOMAIN = tl.constexpr(1073741824)
_EVERYTHING = tl.constexpr(1 << 30)
_MASS_UNIT = tl.constexpr(5.684341886080802e-14)  # 2^-44


@triton.jit
def walk_ratio(
    logits, stride, num_ids, columns, edits, starts, tokens, parents, q_ids, q, is_drawn,
    row_tops, row_masses, boundaries, scores, score_ids, broken, num_pieces, num_rows,
    out_tokens, out_rows, out_num, out_usable, rest, scales, stop_rows, num_support,
    WITHOUT_REPLACEMENT: tl.constexpr, HAS_CHANGES: tl.constexpr, HAS_MASKS: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SUPPORT: tl.constexpr,
):  # fmt: skip
    """One program: a stream. Leaves the row where its path ends (-1: unusable), the residual at that row's q tokens, and
    the factor of p everywhere else; for a greedy row the token itself is in `out_tokens` already.
    """
    stream = tl.program_id(0)
    first = tl.load(starts + stream)
    num = tl.load(starts + stream + 1) - first
    lane = tl.arange(0, SUPPORT)
    piece = tl.arange(0, PIECES)
    is_piece = piece < num_pieces
    here = tl.zeros([], tl.int32)
    depth = tl.zeros([], tl.int32)
    is_going = tl.full([], 1, tl.int32)
    while is_going != 0:
        row = first + here
        temperature = tl.load(columns.temperature + row)
        is_fine = tl.max(tl.load(broken + piece * num_rows + row, mask=is_piece, other=0)) == 0
        tl.store(out_rows + stream * WIDTH + depth, row)
        id = tl.load(q_ids + row.to(tl.int64) * num_support + lane, mask=lane < num_support, other=-1)
        is_q = id >= 0
        p = tl.zeros([SUPPORT], tl.float32)
        token = tl.full([], -1, tl.int32)
        if temperature > 0:
            top = tl.load(row_tops + row)
            is_fine = is_fine & (tl.abs(top) < float("inf"))
            raw = fetch(logits, row.to(tl.int64) * stride, num_ids, tl.where(is_q, id, num_ids))
            z = over(
                adjusted(raw, row, num_ids, 0, 0, id, edits, _EVERYTHING, HAS_CHANGES, HAS_MASKS), temperature
            )
            mass = (tl.load(row_masses + row).to(tl.float64) * _MASS_UNIT).to(tl.float32)
            is_kept = is_q & (z >= tl.load(boundaries + row)) & (z > float("-inf"))
            p = tl.where(is_kept, tl.exp(tl.where(is_kept, z - top, 0.0)) / mass, 0.0)
        else:
            best = tl.load(scores + piece * num_rows + row, mask=is_piece, other=NEVER)
            best_id = tl.load(score_ids + piece * num_rows + row, mask=is_piece, other=2147483647)
            score, token = best_of(best, best_id)
            is_fine = is_fine & (score > NEVER) & (score < float("inf"))
            p = tl.where(is_q & (id == token), 1.0, 0.0)
        outside = tl.maximum(1.0 - tl.sum(p), 0.0)  # p's mass where q has none
        scale = tl.full([], 1.0, tl.float32)
        drawn = tl.load(is_drawn + row).to(tl.int32) != 0
        mine = tl.load(q + row.to(tl.int64) * num_support + lane, mask=is_q, other=0)
        accepted = tl.full([], -1, tl.int32)
        slot = tl.zeros([], tl.int32)
        for node in range(1, num):
            if (accepted < 0) & is_fine & (tl.load(parents + first + node) == here):
                child = tl.load(tokens + first + node)
                is_child = is_q & (id == child)
                other = tl.where(drawn, mine, is_child.to(tl.float32))
                words = words_of_ids(
                    slot * 4 + tl.zeros([1], tl.int32),
                    tl.load(columns.position + row),
                    tl.load(columns.choice + row),
                    tl.load(columns.prompt + row) + _ACCEPT_DOMAIN,
                    tl.load(columns.seed + row),
                )
                u = tl.sum((words >> 8).to(tl.float32)) * 5.9604644775390625e-8  # 2^-24
                left = tl.maximum(p - other, 0.0)
                total = tl.sum(left) + outside * scale
                is_accepted = u * tl.sum(tl.where(is_child, other, 0.0)) < tl.sum(tl.where(is_child, p, 0.0))
                if is_accepted | (total <= 0):
                    accepted = node
                else:
                    p = left / total
                    scale = scale / total
                    if WITHOUT_REPLACEMENT:
                        mine = tl.where(is_child, 0.0, mine)
                        mine = mine / tl.maximum(tl.sum(mine), 1e-30)
                slot += 1
        if accepted >= 0:
            token = tl.load(tokens + first + accepted)
        tl.store(out_tokens + stream * WIDTH + depth, tl.where(is_fine, token, -1))
        depth += 1
        if accepted < 0:
            tl.store(rest + stream * SUPPORT + lane, p)
            tl.store(scales + stream, scale)
            tl.store(stop_rows + stream, tl.where(is_fine, row, -1))
            tl.store(out_num + stream, depth)
            tl.store(out_usable + stream, is_fine)
            is_going = tl.zeros([], tl.int32)
        else:
            here = accepted
    behind = tl.arange(0, PADDED)
    is_empty = (behind >= depth) & (behind < WIDTH)
    nothing = tl.full([PADDED], -1, tl.int32)
    tl.store(out_tokens + stream * WIDTH + behind, nothing, mask=is_empty)
    tl.store(out_rows + stream * WIDTH + behind, nothing, mask=is_empty)


@triton.jit
def draw(
    logits, stride, num_ids, columns, edits, stop_rows, q_ids, boundaries, scores, score_ids, num_support,
    tiles_per_split, HAS_CHANGES: tl.constexpr, HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr, SUPPORT: tl.constexpr,
):  # fmt: skip
    """One program: some tiles of the row where a stream's path ends; best z + noise outside q's tokens."""
    stream = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.load(stop_rows + stream)
    best = tl.full([BLOCK // 4, 4], NEVER, tl.float32)
    best_ids = tl.zeros([BLOCK // 4, 4], tl.int32)
    if row >= 0:
        temperature = tl.load(columns.temperature + row)
        if temperature > 0:
            boundary = tl.load(boundaries + row)
            first_tile = split * tiles_per_split
            last_tile = tl.minimum(first_tile + tiles_per_split, (num_ids + BLOCK - 1) // BLOCK)
            for tile in range(first_tile, last_tile):
                start = tile * BLOCK
                local = start + tile_lanes(BLOCK)
                z = load_tile(
                    logits, row.to(tl.int64) * stride, row, num_ids, 0, start, local, temperature, edits,
                    BLOCK, HAS_CHANGES, HAS_MASKS,
                )  # fmt: skip
                z = tl.where(z >= boundary, z, float("-inf"))
                if tl.max(z) > float("-inf"):
                    for at in range(num_support):
                        id = tl.load(q_ids + row.to(tl.int64) * num_support + at)
                        if (id >= start) & (id < start + BLOCK):
                            z = tl.where(local == id, float("-inf"), z)
                    words = words_of_groups(
                        start // 4 + tl.arange(0, BLOCK // 4),
                        tl.load(columns.position + row),
                        tl.load(columns.choice + row),
                        tl.load(columns.prompt + row) + _DRAW_DOMAIN,
                        tl.load(columns.seed + row),
                    )
                    best, best_ids = keep_better(z + gumbel_of(words), local, best, best_ids)
    score, id = best_of(best, best_ids)
    to = split * tl.num_programs(0) + stream
    tl.store(scores + to, score)
    tl.store(score_ids + to, id)


@triton.jit
def join(
    columns, stop_rows, q_ids, rest, scales, row_tops, row_masses, scores, score_ids, num_pieces, num_support,
    out_tokens, out_num, WIDTH: tl.constexpr, PIECES: tl.constexpr, SUPPORT: tl.constexpr,
):  # fmt: skip
    """One program: a stream. Writes the last token of a sampled path."""
    stream = tl.program_id(0)
    row = tl.load(stop_rows + stream)
    if row >= 0:  # noqa: SIM102 (both sides of a tensor's `and` are computed)
        if tl.load(columns.temperature + row) > 0:
            piece = tl.arange(0, PIECES)
            to = piece * tl.num_programs(0) + stream
            found = tl.load(scores + to, mask=piece < num_pieces, other=NEVER)
            found_ids = tl.load(score_ids + to, mask=piece < num_pieces, other=2147483647)
            score, token = best_of(found, found_ids)
            lane = tl.arange(0, SUPPORT)
            id = tl.load(q_ids + row.to(tl.int64) * num_support + lane, mask=lane < num_support, other=-1)
            p = tl.load(rest + stream * SUPPORT + lane)
            is_left = (id >= 0) & (p > 0)
            # Outside, the residual is exp(z - top) / mass * scale, and the score is z + noise.
            mass = (tl.load(row_masses + row).to(tl.float64) * _MASS_UNIT).to(tl.float32)
            shift = tl.load(row_tops + row) + tl.log(mass) - tl.log(tl.load(scales + stream))
            words = words_of_ids(
                tl.where(is_left, id, 0),
                tl.load(columns.position + row),
                tl.load(columns.choice + row),
                tl.load(columns.prompt + row) + _DRAW_DOMAIN,
                tl.load(columns.seed + row),
            )
            noisy = tl.where(is_left, tl.log(tl.where(is_left, p, 1.0)) + shift + gumbel_of(words), NEVER)
            other, other_token = best_of(noisy, id)
            is_other = (other > score) | ((other == score) & (other_token < token))
            token = tl.where(is_other, other_token, token)
            tl.store(out_tokens + stream * WIDTH + tl.load(out_num + stream) - 1, token)


def verify_ratio(
    logits_NV: Tensor, rows: Rows, trees: Trees, draws: Draws, tuning: Tuning = DEFAULT
) -> RatioVerdict:
    """See `paceline.kernels.verify_ratio.verify_ratio`."""
    scan = RowScan(logits_NV, rows, tuning=tuning, collect_all=True)
    part = scan.run()
    settled = settle_whole(scan, part)
    num_streams, width = len(trees.starts_S1) - 1, trees.max_depth + 1
    num_support = draws.ids_NQ.shape[1]
    support = triton.next_power_of_2(num_support)
    device = logits_NV.device
    tokens, path = (torch.empty(num_streams, width, dtype=torch.int32, device=device) for _ in range(2))
    num, stop_rows = (torch.empty(num_streams, dtype=torch.int32, device=device) for _ in range(2))
    usable = torch.empty(num_streams, dtype=torch.bool, device=device)
    rest = torch.empty(num_streams, support, dtype=torch.float32, device=device)
    scales = torch.empty(num_streams, dtype=torch.float32, device=device)
    verdict = RatioVerdict(tokens, path, num, usable)
    if not num_streams:
        return verdict
    pieces = len(part.scores_N)
    logits = (logits_NV, logits_NV.stride(0), scan.num_ids, scan.columns, scan.edits)
    walk_ratio[(num_streams,)](
        *(*logits, trees.starts_S1, trees.tokens_N, trees.parents_N),
        *(draws.ids_NQ, draws.q_NQ, draws.is_drawn_N, settled.tops, settled.masses, settled.boundaries),
        *(part.scores_N, part.ids_N, part.broken_N, pieces, scan.num_rows),
        *(tokens, path, num, usable, rest, scales, stop_rows, num_support),
        **scan.flags,
        WITHOUT_REPLACEMENT=draws.without_replacement,
        PIECES=triton.next_power_of_2(pieces),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        SUPPORT=support,
        num_warps=1,
    )
    num_tiles = triton.cdiv(scan.num_ids, tuning.block)
    per_split = triton.cdiv(num_tiles, scan.splits_for(num_streams))
    splits = triton.cdiv(num_tiles, per_split)
    scores = torch.empty(splits, num_streams, dtype=torch.float32, device=device)
    ids = torch.empty(splits, num_streams, dtype=torch.int32, device=device)
    draw[(num_streams, splits)](
        *(*logits, stop_rows, draws.ids_NQ, settled.boundaries, scores, ids, num_support, per_split),
        **scan.flags,
        BLOCK=tuning.block,
        SUPPORT=support,
        num_warps=tuning.warps,
    )
    join[(num_streams,)](
        *(scan.columns, stop_rows, draws.ids_NQ, rest, scales, settled.tops, settled.masses),
        *(scores, ids, splits, num_support, tokens, num),
        WIDTH=width,
        PIECES=triton.next_power_of_2(splits),
        SUPPORT=support,
        num_warps=1,
    )
    return verdict
