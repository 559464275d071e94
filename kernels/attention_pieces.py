"""Who sees what in one step -> pieces of equal work for a GPU: which rows meet which run of keys, and how they are merged.

A tile is a few packed rows that read keys of one block table together; a piece is a run of a tile's keys. Streams whose
tables begin with the same blocks share tiles over them, level by level, so that a common prefix is read once for all
(Hydragen). All pieces, one after the other, are dealt to the programs of one launch in equal numbers of key tiles, whatever
the lengths of the contexts (stream-K, LeanAttention). A row's pieces are merged by their log-sum-exps.

How keys are cut decides the bits of a row. `split` None cuts where a program's share ends: fastest, and the bits depend on
who else is in the step. A number cuts at its multiples, for every row the same, whoever shares what: the bits of a row
follow from the row and its keys alone, at the price of more partial results.

Legend: T packed rows, B segments (streams), X table entries, W words of 32 mask bits, N tiles, R rows of a tile, P pieces,
C programs for each KV head, M partial results of rows.
Source: Juravsky et al. 2402.05099 (Hydragen); Sanovar et al. 2405.10480 (LeanAttention).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.kernels.tree_attention import AttentionPlan

IntArray = npt.NDArray[np.int32]
NO_KEY = np.int32(2**31 - 1)


@dataclass(frozen=True, slots=True)
class Cut:
    """How work is cut; what a kernel is compiled for."""

    rows_per_tile: int
    """R. R * (query heads of a KV head) rows of scores make a tile of the matrix units: 64 is a good product."""
    block_keys: int = 64
    """Keys of one inner step of the kernel."""
    num_programs: int = 132
    """C, for each KV head: all are resident at once on a card with C * G places."""
    split: int | None = 512
    """Keys of a piece at most, a multiple of `block_keys`; None: as many as an even share takes."""
    min_shared: int = 256
    """A common prefix of fewer keys is not worth tiles of its own."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """One step's work, int32 arrays on one device, or numpy before they go there.

    tables [B, X]; segment_start [B + 1]: each segment's rows. leading [T]: a row sees keys below; base [T]: the key of mask bit 0; bits, ranks [T, W]: further keys it
    sees, and how many of those come before each word; positions [T].
    tile_rows [N, R], -1 where there is none; tile_segment [N]; tile_base [N]: no row of it has a mask bit below this key.
    piece_tile, piece_start, piece_stop [P]; piece_entry [P]: row r of the piece leaves partial result entry + r, or, at -1,
    the row's result, for it has no other piece. program_start [C + 1]: the pieces of each program.
    merge_start [T + 1], merge_entry [M]: the partial results of each row, in order of keys.
    """

    tables: Tensor
    segment_start: Tensor
    leading: Tensor
    positions: Tensor
    base: Tensor
    bits: Tensor
    ranks: Tensor
    tile_rows: Tensor
    tile_segment: Tensor
    tile_base: Tensor
    piece_tile: Tensor
    piece_start: Tensor
    piece_stop: Tensor
    piece_entry: Tensor
    program_start: Tensor
    merge_start: Tensor
    merge_entry: Tensor


ARRAYS = tuple(field.name for field in fields(Pieces))


@dataclass(slots=True)
class _Tile:
    rows: list[int]
    segment: int
    start: int
    stop: int


def plan_pieces(
    plan: AttentionPlan, cut: Cut, *, window: int | None = None, context: IntArray | None = None
) -> dict[str, IntArray]:
    """The arrays of `Pieces`, by name.

    `window`: keys that no row sees because of it are in no piece. `context` [B]: the first keys of each segment are attended
    to elsewhere, and row t's partial result for them is number t, before those of the pieces.
    """
    rows = _row_arrays(plan)
    tiles = _tiles(plan, cut, context)
    pieces = _cut(tiles, plan, cut, window)
    return rows | _tile_arrays(tiles, cut, rows["base"]) | _piece_arrays(tiles, pieces, plan, cut, context)


def on_device(arrays: dict[str, IntArray], device: torch.device | str) -> Pieces:
    """All arrays in one copy to the device."""
    flat = np.concatenate([arrays[name].ravel() for name in ARRAYS])
    whole = torch.from_numpy(flat)
    if torch.device(device).type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    views, at = [], 0
    for name in ARRAYS:
        array = arrays[name]
        views.append(whole[at : at + array.size].view(array.shape))
        at += array.size
    return Pieces(*views)


def _row_arrays(plan: AttentionPlan) -> dict[str, IntArray]:
    """What each row sees: keys below `leading`, and mask bits from its segment's first own key on."""
    num_rows = len(plan.positions)
    which, bounds = _segments(plan)
    segment = np.repeat(np.arange(len(which)), np.diff(bounds))
    base = np.full(len(which), NO_KEY)
    num_own = np.diff(plan.own_start)
    own_row = np.repeat(np.arange(num_rows), num_own)
    np.minimum.at(base, segment[own_row], plan.own)
    row_base = base[segment]
    bit = plan.own - row_base[own_row]
    words = int(bit.max(initial=0)) // 32 + 1
    bits = np.zeros((num_rows, words), np.uint32)
    np.bitwise_or.at(bits, (own_row, bit // 32), np.uint32(1) << (bit % 32).astype(np.uint32))
    count = np.zeros((num_rows, words + 1), np.int32)
    np.add.at(count, (own_row, bit // 32 + 1), 1)
    return {
        "tables": plan.tables[which],
        "segment_start": bounds,
        "leading": plan.num_leading,
        "positions": plan.positions.astype(np.int32),
        "base": row_base,
        "bits": bits.view(np.int32),
        "ranks": np.cumsum(count, 1, dtype=np.int32)[:, :words],
    }


def _segments(plan: AttentionPlan) -> tuple[IntArray, IntArray]:
    """[B] tables of the segments that have rows; [B + 1] where their rows, which lie together, begin."""
    which, first = np.unique(plan.row_segment, return_index=True)
    return which, np.append(first, len(plan.row_segment)).astype(np.int32)


def unmasked_context(plan: AttentionPlan) -> IntArray:
    """[B]: the first keys of each segment, those that all of its rows see."""
    return np.minimum.reduceat(plan.num_leading, _segments(plan)[1][:-1])


def _ends(plan: AttentionPlan) -> IntArray:
    """[T]: no row sees a key from here on."""
    ends = plan.num_leading.copy()
    own_row = np.repeat(np.arange(len(ends)), np.diff(plan.own_start))
    np.maximum.at(ends, own_row, plan.own + 1)
    return ends


def _tiles(plan: AttentionPlan, cut: Cut, context: IntArray | None) -> list[_Tile]:
    """Shared prefixes first, then what each segment sees alone."""
    which, bounds = _segments(plan)
    num_segments, seen_by_all = len(which), unmasked_context(plan)
    begin = np.zeros(num_segments, np.int32) if context is None else context.copy()
    tiles: list[_Tile] = []

    def add(rows: Sequence[int], segment: int, start: int, stops: IntArray) -> None:
        for first in range(0, len(rows), cut.rows_per_tile):
            taken = list(rows[first : first + cut.rows_per_tile])
            stop = int(stops[taken].max())
            if stop > start:
                tiles.append(_Tile(taken, segment, start, stop))

    if context is None and num_segments > 1:
        for members, start, stop in shared_prefixes(
            plan.tables[which], seen_by_all // plan.block_size, plan.block_size, cut
        ):
            rows = [row for b in members for row in range(bounds[b], bounds[b + 1])]
            add(rows, members[0], start, np.full(len(plan.positions), stop, np.int32))
            begin[members] = stop
    ends = _ends(plan)
    for b in range(num_segments):
        add(range(bounds[b], bounds[b + 1]), b, int(begin[b]), ends)
    return tiles


def shared_prefixes(
    tables: IntArray, limits: npt.NDArray[np.integer], block_size: int, cut: Cut
) -> list[tuple[list[int], int, int]]:
    """(segments, first key, end) of runs of keys that several segments have in common, outermost first.

    `limits` [B]: blocks of each segment, from its first, all of whose keys all of its rows see.
    """
    least = max(1, -(-cut.min_shared // block_size))
    whole = 1 if cut.split is None else max(1, cut.split // block_size)  # bits must not depend on who shares
    found: list[tuple[list[int], int, int]] = []

    def descend(members: list[int], first: int, at: int) -> None:
        """Split by the block at `at`; all of them agree on the blocks from `first` up to there."""
        same_block: defaultdict[int, list[int]] = defaultdict(list)
        for b in members:
            if at < limits[b]:
                same_block[int(tables[b, at])].append(b)
        for same in same_block.values():
            if len(same) < 2:
                continue
            end = int(limits[same].min())
            agree = (tables[same, at:end] == tables[same[0], at:end]).all(0)
            common = end if agree.all() else at + int(agree.argmin())
            usable = common // whole * whole
            if usable - first >= least:
                found.append((same, first * block_size, usable * block_size))
                descend(same, usable, common)
            else:
                descend(same, first, common)

    descend(list(range(len(tables))), 0, 0)
    return found


def _cut(
    tiles: list[_Tile], plan: AttentionPlan, cut: Cut, window: int | None
) -> list[tuple[int, int, int, int]]:
    """(tile, first key, end, program) of each piece, in the order of the programs."""
    runs: list[tuple[int, int, int]] = []
    size = cut.block_keys
    for index, tile in enumerate(tiles):
        start = tile.start
        if window is not None:
            lowest = int(plan.positions[tile.rows].min()) - window + 1
            start = max(start, lowest // size * size)
        if start < tile.stop:
            runs.append((index, start, tile.stop))
    total = sum(-(-(stop - start) // size) for _, start, stop in runs)
    share = max(1, -(-total // cut.num_programs))
    pieces: list[tuple[int, int, int, int]] = []
    dealt = 0  # key tiles so far
    for index, start, stop in runs:
        while start < stop:
            if cut.split is None:
                end = min(stop, start + (share - dealt % share) * size)
            else:
                end = min(stop, (start // cut.split + 1) * cut.split)
            pieces.append((index, start, end, min(dealt // share, cut.num_programs - 1)))
            dealt += -(-(end - start) // size)
            start = end
    return pieces


def _tile_arrays(tiles: list[_Tile], cut: Cut, row_base: IntArray) -> dict[str, IntArray]:
    rows = np.full((len(tiles), cut.rows_per_tile), -1, np.int32)
    for at, tile in zip(rows, tiles, strict=True):
        at[: len(tile.rows)] = tile.rows
    return {
        "tile_rows": rows,
        "tile_segment": np.asarray([tile.segment for tile in tiles], np.int32),
        "tile_base": np.asarray([row_base[tile.rows].min() for tile in tiles], np.int32),
    }


def _piece_arrays(
    tiles: list[_Tile],
    pieces: list[tuple[int, int, int, int]],
    plan: AttentionPlan,
    cut: Cut,
    context: IntArray | None,
) -> dict[str, IntArray]:
    """Where each piece's results go, and what is merged into each row."""
    num_rows = len(plan.positions)
    count = np.zeros(num_rows, np.int32)
    for tile, *_ in pieces:
        count[tiles[tile].rows] += 1
    first_entry = 0
    merged: list[tuple[int, int, int]] = []  # row, first key, partial result
    if context is not None:
        has_context = context[plan.row_segment] > 0
        count += has_context
        merged = [(int(row), -1, int(row)) for row in np.flatnonzero(has_context)]
        first_entry = num_rows
    entries = np.full(len(pieces), -1, np.int32)
    for at, (tile, start, _, _) in enumerate(pieces):
        rows = tiles[tile].rows
        if (count[rows] == 1).all():
            continue
        entries[at] = first_entry
        merged += [(row, start, first_entry + r) for r, row in enumerate(rows)]
        first_entry += len(rows)
    merged.sort()
    per_row = np.bincount([row for row, _, _ in merged], minlength=num_rows)
    programs = np.asarray([piece[3] for piece in pieces], np.int32)
    return {
        "piece_tile": np.asarray([piece[0] for piece in pieces], np.int32),
        "piece_start": np.asarray([piece[1] for piece in pieces], np.int32),
        "piece_stop": np.asarray([piece[2] for piece in pieces], np.int32),
        "piece_entry": entries,
        "program_start": np.searchsorted(programs, np.arange(cut.num_programs + 1)).astype(np.int32),
        "merge_start": np.concatenate([[0], np.cumsum(per_row)]).astype(np.int32),
        "merge_entry": np.asarray([entry for _, _, entry in merged], np.int32),
    }
