"""Rows of logits -> the token each decides: the kernels of `verify` that look at the vocabulary (Triton).

    change   P entries        bias and penalties of single entries, in float64
    scan     rows x splits    reads the logits once. Plain rows: best score and its token, noise only where it can matter.
                              Filtered rows: the maximum of each 32 ids, nothing else
    collect  filtered rows    a floor from the maxima, so that few thousand tokens are above it; lists them, sums all mass
    settle   filtered rows    exact boundaries of top-k, top-p and min-p inside the list, noise for it, the decided token
    settle_wide               rows that keep more than the list holds: the same searches over the logits themselves

Noise is the dearest part of a plain row: ten rounds of Philox a token, and two logarithms. E >= u, so a token whose u is
not below exp(z - best so far) cannot win; the logarithms are computed only for tiles where some token can, and a tile whose
largest z is 23 below the best needs no Philox either, since no noise is above 22.88.

Versions: see docs/kernels.md. Not timed on a card yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.keyed_noise_triton import gumbel_of, words_of_groups, words_of_ids
from paceline.kernels.vocabulary_triton import (
    LOWEST_KEY,
    NEVER,
    adjusted,
    best_of,
    fetch,
    is_filtered,
    is_nan,
    keep_better,
    key_value,
    largest_key,
    load_tile,
    mass_of,
    ordered_key,
    over,
    tile_lanes,
)

PLAIN = tl.constexpr(0)
"""Filtered rows are collected, the others decided at once."""
SAMPLED = tl.constexpr(1)
"""Every sampled row is collected: its boundary and mass are wanted."""
RAW = tl.constexpr(2)
"""Every row is collected as it came; `rows` says which ones, -1 for none."""

_LARGEST_NOISE = tl.constexpr(22.9)


@triton.jit
def change(
    logits, stride, num_ids, first_id, starts, ids, bias, repetition, minus, values, BLOCK: tl.constexpr
):
    """`penalties.penalise` for the entries in this shard, one program a row."""
    row = tl.program_id(0)
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    for first in range(begin, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        local = tl.load(ids + entry, mask=entry < end, other=-1) - first_id
        inside = (entry < end) & (local >= 0) & (local < num_ids)
        z = tl.load(logits + row.to(tl.int64) * stride + local, mask=inside, other=0).to(tl.float64)
        z += tl.load(bias + entry, mask=inside, other=0)
        factor = tl.load(repetition + entry, mask=inside, other=1)
        z = tl.where(z > 0, z / factor, z * factor) - tl.load(minus + entry, mask=inside, other=0)
        tl.store(values + entry, z.to(tl.float32), mask=inside)


@triton.jit
def _collects(columns, row, MODE: tl.constexpr):
    """Whether a row goes through `collect`."""
    if MODE == SAMPLED:
        return tl.load(columns.temperature + row) > 0
    elif MODE == PLAIN:
        return is_filtered(columns, row)
    else:
        return row >= 0


@triton.jit
def scan(
    logits, stride, num_ids, first_id, rows, columns, edits,
    scores, score_ids, broken, maxima, num_groups, tiles_per_split,
    MODE: tl.constexpr, HAS_FILTERS: tl.constexpr, HAS_CHANGES: tl.constexpr, HAS_MASKS: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program: some tiles of a row. Writes [splits, rows]: best score, its global id, whether there is NaN."""
    at = tl.program_id(0)
    num_rows = tl.num_programs(0)
    split = tl.program_id(1)
    row = at
    temperature = 1.0
    collected = True
    if MODE == RAW:
        row = tl.load(rows + at)
    else:
        temperature = tl.load(columns.temperature + row)
        collected = False
        if HAS_FILTERS:
            collected = _collects(columns, row, MODE)
    if row >= 0:
        lanes = tile_lanes(BLOCK)
        best = tl.full([BLOCK // 4, 4], NEVER, tl.float32)
        best_ids = tl.zeros([BLOCK // 4, 4], tl.int32)
        nan = tl.zeros([BLOCK // 4, 4], tl.int32)
        bar = tl.full([], NEVER, tl.float32)
        num_tiles = (num_ids + BLOCK - 1) // BLOCK
        first_tile = split * tiles_per_split
        last_tile = tl.minimum(first_tile + tiles_per_split, num_tiles)
        begin = row.to(tl.int64) * stride
        faster = 1.0 / tl.where(temperature > 0, temperature, 1.0)
        raw = fetch(logits, begin, num_ids, first_tile * BLOCK + lanes)
        for tile in range(first_tile, last_tile):
            start = tile * BLOCK
            local = start + lanes
            upcoming = fetch(logits, begin, tl.where(tile + 1 < last_tile, num_ids, 0), local + BLOCK)
            z = adjusted(raw, row, num_ids, first_id, start, local, edits, BLOCK, HAS_CHANGES, HAS_MASKS)
            raw = upcoming
            nan |= is_nan(z).to(tl.int32)
            if collected:
                group = tile * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
                z = tl.where(is_nan(z), float("-inf"), z)
                largest = over(tl.max(tl.reshape(z, [BLOCK // GROUP, GROUP]), 1), temperature)
                tl.store(maxima + at.to(tl.int64) * num_groups + group, largest, mask=group < num_groups)
            else:
                # NaN is never the largest and loses every comparison.
                top = tl.max(z)
                if temperature > 0:
                    if top * faster + _LARGEST_NOISE > bar:
                        groups = (first_id + start) // 4 + tl.arange(0, BLOCK // 4)
                        words = words_of_groups(
                            groups,
                            tl.load(columns.position + row),
                            tl.load(columns.choice + row),
                            tl.load(columns.prompt + row),
                            tl.load(columns.seed + row),
                        )
                        # 2^23 steps, rounded down: never above u. The slack is far above any rounding here.
                        u = ((words >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
                        ahead = 1e-3 + 1e-6 * tl.abs(bar) - bar
                        can_win = u < tl.exp(tl.minimum(z * faster + ahead, 80.0))
                        if tl.max(can_win.to(tl.int32)) > 0:
                            noisy = over(z, temperature) + gumbel_of(words)
                            best, best_ids = keep_better(noisy, local, best, best_ids)
                            bar = tl.max(best)
                else:
                    if top > bar:
                        best, best_ids = keep_better(z, local, best, best_ids)
                        bar = top
        to = split * num_rows + at
        tl.store(broken + to, tl.max(nan))
        if not collected:
            score, local_id = best_of(best, best_ids)
            tl.store(scores + to, score)
            tl.store(score_ids + to, first_id + local_id)


@triton.jit
def collect(
    logits, stride, num_ids, first_id, rows, columns, edits, maxima, num_groups,
    tops, masses, listed, listed_ids, found, floors, wanted, least,
    MODE: tl.constexpr, HAS_CHANGES: tl.constexpr, HAS_MASKS: tl.constexpr,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """One program: a row. Lists all tokens above a floor that leaves at most CAPACITY of them; sums all mass.

    The floor is the `wanted`-th largest maximum, then half as far down, and so on: there are always at least as many
    tokens above it. Below `least` it is infinity, and nothing is listed.
    """
    at = tl.program_id(0)
    row = at
    temperature = 1.0
    if MODE == RAW:
        row = tl.load(rows + at)
    else:
        temperature = tl.load(columns.temperature + row)
    if _collects(columns, row, MODE):
        group = tl.arange(0, GROUPS)
        values = tl.load(
            maxima + at.to(tl.int64) * num_groups + group, mask=group < num_groups, other=float("-inf")
        )
        keys = ordered_key(values)
        ones = tl.full([GROUPS], 1, tl.int32)
        top_key = tl.max(keys)
        top = key_value(top_key)
        finite_top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
        floor_key = tl.full([], LOWEST_KEY, tl.int32)
        total = tl.zeros([], tl.int64)
        goal = wanted + tl.zeros([], tl.int32)
        num = tl.full([], CAPACITY + 1, tl.int32)
        while num > CAPACITY:
            num = tl.zeros([], tl.int32)
            floor_key = tl.full([], 2139095040, tl.int32)  # plus infinity
            if goal >= least:
                floor_key = largest_key(keys, ones, goal, top_key)
            mass = tl.zeros([BLOCK], tl.int64)
            for start in range(0, num_ids, BLOCK):
                local = start + tl.arange(0, BLOCK)
                z = load_tile(
                    logits, row.to(tl.int64) * stride, row, num_ids, first_id, start, local, temperature, edits,
                    BLOCK, HAS_CHANGES, HAS_MASKS,
                )  # fmt: skip
                mass += mass_of(tl.minimum(z, finite_top), finite_top)
                is_in = (ordered_key(z) >= floor_key) & (tl.abs(z) < float("inf"))
                num_in = tl.sum(is_in.to(tl.int32))
                if num_in > 0:
                    slot = num + tl.cumsum(is_in.to(tl.int32), 0) - 1
                    has_room = is_in & (slot < CAPACITY)
                    to = at.to(tl.int64) * CAPACITY + slot
                    tl.store(listed + to, z, mask=has_room)
                    tl.store(listed_ids + to, first_id + local, mask=has_room)
                num += num_in
            total = tl.sum(mass)
            goal = goal // 2
        tl.store(tops + at, top)
        tl.store(masses + at, total)
        tl.store(found + at, num)
        tl.store(floors + at, key_value(floor_key))


@triton.jit
def settle(
    columns, tops, masses, listed, listed_ids, found, floors,
    row_tops, row_masses, boundaries, scores, score_ids, settled, num_parts,
    MODE: tl.constexpr, CAPACITY: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """One program: a row; LISTED holds the lists of all shards. `settled` is 1 if they hold all that the row keeps.

    Writes the top of all shards, the kept mass relative to it, the boundary (kept is z >= boundary), score and token.
    """
    row = tl.program_id(0)
    num_rows = tl.num_programs(0)
    if _collects(columns, row, MODE):
        top = tl.full([], float("-inf"), tl.float32)
        floor = tl.full([], float("-inf"), tl.float32)
        for part in range(num_parts):
            top = tl.maximum(top, tl.load(tops + part * num_rows + row))
            floor = tl.maximum(floor, tl.load(floors + part * num_rows + row))
        total = tl.zeros([], tl.float64)
        finite_top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
        for part in range(num_parts):
            part_top = tl.load(tops + part * num_rows + row)
            share = tl.exp(tl.minimum(part_top, finite_top) - finite_top)
            total += tl.load(masses + part * num_rows + row).to(tl.float64) * share.to(tl.float64)

        i = tl.arange(0, LISTED)
        part = i // CAPACITY
        of_part = part * num_rows + row
        there = i % CAPACITY < tl.load(found + of_part, mask=part < num_parts, other=0)
        to = of_part.to(tl.int64) * CAPACITY + i % CAPACITY
        z = tl.load(listed + to, mask=there, other=float("-inf"))
        ids = tl.load(listed_ids + to, mask=there, other=0)
        z = tl.where(z >= floor, z, float("-inf"))  # below it some shard's list has gaps
        keys = ordered_key(z)
        top_key = tl.max(keys)
        mass = mass_of(z, finite_top)
        num = tl.sum((z > float("-inf")).to(tl.int32))

        top_k = tl.load(columns.top_k + row)
        top_p = tl.load(columns.top_p + row)
        is_all = floor == float("-inf")
        has_k = (top_k > 0) & (num >= top_k)
        boundary_key = tl.full([], LOWEST_KEY, tl.int32)
        if has_k:
            boundary_key = largest_key(keys, tl.full([LISTED], 1, tl.int32), top_k, top_key)
        kept_mass = total
        if has_k | is_all:
            kept_mass = tl.sum(tl.where(keys >= boundary_key, mass, 0)).to(tl.float64)
        limit = top_p.to(tl.float64) * kept_mass
        has_p = (top_p < 1) & (tl.sum(mass).to(tl.float64) >= limit)
        if has_p:
            boundary_key = tl.maximum(boundary_key, largest_key(keys, mass, limit, top_key))
        boundary = key_value(boundary_key)
        min_p_boundary = finite_top + tl.load(columns.log_min_p + row)
        boundary = tl.maximum(boundary, min_p_boundary)
        # The list shows the boundary if it reaches down to it, and what top-p is a share of, if there is top-p.
        reaches = is_all | has_k | has_p | (floor <= min_p_boundary)
        knows_mass = (top_p >= 1) | (top_k == 0) | has_k | is_all
        is_plain = (top_p >= 1) & (top_k == 0) & (min_p_boundary == float("-inf"))  # its list is not needed
        is_usable = tl.abs(top) < float("inf")  # else nothing is left, or infinity
        is_settled = (reaches & knows_mass) | is_plain | (is_usable == 0)

        is_kept = z >= boundary
        words = words_of_ids(
            ids,
            tl.load(columns.position + row),
            tl.load(columns.choice + row),
            tl.load(columns.prompt + row),
            tl.load(columns.seed + row),
        )
        noisy = tl.where(is_kept & (z > float("-inf")), z + gumbel_of(words), NEVER)
        score, id = best_of(noisy, ids)
        score = tl.where(is_usable, score, top)
        kept_units = tl.sum(tl.where(is_kept, mass, 0))
        if is_plain:
            kept_units = total.to(tl.int64)
        tl.store(settled + row, is_settled.to(tl.int32))
        tl.store(row_tops + row, top)
        tl.store(row_masses + row, kept_units)
        tl.store(boundaries + row, boundary)
        tl.store(scores + row, score)
        tl.store(score_ids + row, id)


@triton.jit
def _survey(
    logits, stride, num_ids, first_id, row, temperature, edits, key, top, floor_key,
    HAS_CHANGES: tl.constexpr, HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one row's tokens not below `key`: how many, their mass, the smallest key; and the largest key below it."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    above = tl.full([BLOCK], 2147483647, tl.int32)
    below = tl.full([BLOCK], LOWEST_KEY, tl.int32)
    for start in range(0, num_ids, BLOCK):
        local = start + tl.arange(0, BLOCK)
        z = load_tile(
            logits, row.to(tl.int64) * stride, row, num_ids, first_id, start, local, temperature, edits,
            BLOCK, HAS_CHANGES, HAS_MASKS,
        )  # fmt: skip
        keys = ordered_key(z)
        is_in = (keys >= key) & (z > float("-inf"))
        count += is_in.to(tl.int32)
        mass += tl.where(is_in & (keys >= floor_key), mass_of(tl.minimum(z, top), top), 0)
        above = tl.where(is_in, tl.minimum(above, keys), above)
        below = tl.where(is_in, below, tl.maximum(below, keys))
    return tl.sum(count), tl.sum(mass), tl.min(above), tl.max(below)


@triton.jit
def settle_wide(
    logits, stride, num_ids, first_id, columns, edits, settled, row_tops, masses,
    row_masses, boundaries, scores, score_ids,
    MODE: tl.constexpr, HAS_CHANGES: tl.constexpr, HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a row that `settle` could not settle. Bisection over the logits: some ten passes for each filter."""
    row = tl.program_id(0)
    if _collects(columns, row, MODE):  # noqa: SIM102 (both sides of a tensor's `and` are computed)
        if tl.load(settled + row) == 0:
            temperature = tl.load(columns.temperature + row)
            top = tl.load(row_tops + row)
            top_k = tl.load(columns.top_k + row)
            top_p = tl.load(columns.top_p + row)
            boundary_key = tl.full([], LOWEST_KEY, tl.int32)
            kept_mass = tl.load(masses + row)
            # First top-k, which changes what top-p is a share of, then top-p. `wanted` is of tokens, then of mass.
            for turn in range(2):
                wanted = top_k.to(tl.float64)
                is_on = top_k > 0
                if turn == 1:
                    wanted = top_p.to(tl.float64) * kept_mass.to(tl.float64)
                    is_on = top_p < 1
                if is_on:
                    low = tl.full([], LOWEST_KEY, tl.int64)
                    high = ordered_key(top).to(tl.int64)
                    while low < high:
                        middle = low + (high - low + 1) // 2
                        num, mass, above, below = _survey(
                            logits, stride, num_ids, first_id, row, temperature, edits, middle.to(tl.int32), top, boundary_key,
                            HAS_CHANGES, HAS_MASKS, BLOCK,
                        )  # fmt: skip
                        measured = num.to(tl.float64)
                        if turn == 1:
                            measured = mass.to(tl.float64)
                        if measured >= wanted:
                            low = above.to(tl.int64)
                        else:
                            high = below.to(tl.int64)
                    boundary_key = tl.maximum(boundary_key, low.to(tl.int32))
                    num, kept_mass, above, below = _survey(
                        logits, stride, num_ids, first_id, row, temperature, edits, boundary_key, top, boundary_key,
                        HAS_CHANGES, HAS_MASKS, BLOCK,
                    )  # fmt: skip
            boundary = tl.maximum(key_value(boundary_key), top + tl.load(columns.log_min_p + row))

            best = tl.full([BLOCK // 4, 4], NEVER, tl.float32)
            best_ids = tl.zeros([BLOCK // 4, 4], tl.int32)
            mass = tl.zeros([BLOCK // 4, 4], tl.int64)
            for start in range(0, num_ids, BLOCK):
                local = start + tile_lanes(BLOCK)
                z = load_tile(
                    logits, row.to(tl.int64) * stride, row, num_ids, first_id, start, local, temperature, edits,
                    BLOCK, HAS_CHANGES, HAS_MASKS,
                )  # fmt: skip
                is_kept = (z >= boundary) & (z > float("-inf"))  # not where there is NaN
                if tl.max(is_kept.to(tl.int32)) > 0:
                    mass += tl.where(is_kept, mass_of(tl.where(is_kept, z, top), top), 0)
                    groups = (first_id + start) // 4 + tl.arange(0, BLOCK // 4)
                    words = words_of_groups(
                        groups,
                        tl.load(columns.position + row),
                        tl.load(columns.choice + row),
                        tl.load(columns.prompt + row),
                        tl.load(columns.seed + row),
                    )
                    noisy = tl.where(is_kept, z + gumbel_of(words), NEVER)
                    best, best_ids = keep_better(noisy, first_id + local, best, best_ids)
            score, id = best_of(best, best_ids)
            tl.store(row_masses + row, tl.sum(mass))
            tl.store(boundaries + row, boundary)
            tl.store(scores + row, score)
            tl.store(score_ids + row, id)
