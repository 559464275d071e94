"""Logits of the nodes of draft trees -> the verdict of `verify`: launches, and the kernel that walks the trees (Triton).

Plain rows take two launches (scan, walk), one more with bias or penalties; filtered rows three more. Which ones run
depends on `Rows` alone and grids on shapes alone, so the launches of a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels import verify_rows_triton as kernels
from paceline.kernels.verify import Part, Rows, Trees, Verified
from paceline.kernels.vocabulary_triton import NEVER, Columns, Edits

MODES = {"plain": 0, "sampled": 1, "raw": 2}


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of the launches. `block` tokens of a tile, `splits` programs of a row (None: enough to fill the GPU)."""

    block: int = 1024
    splits: int | None = None
    group: int = 32
    """Tokens under one maximum."""
    capacity: int = 4096
    """Tokens listed of a filtered row; a row that keeps more is searched in memory."""
    wanted: int = 2048
    """Maxima above the floor of the list: half of what fits, because a group has more than one token above it."""
    warps: int = 4
    row_block: int = 4096
    row_warps: int = 16
    """Tile and warps of a program that has a row to itself."""


DEFAULT = Tuning()


@triton.jit
def walk(
    columns, starts, tokens, parents, scores, score_ids, broken, num_pieces, row_scores, row_ids, num_rows,
    decided, decided_usable, out_tokens, out_rows, out_num, out_usable,
    HAS_FILTERS: tl.constexpr, PIECES: tl.constexpr, NODES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program: a stream. Joins the pieces of its rows, then goes from the root to the child that is right."""
    stream = tl.program_id(0)
    first = tl.load(starts + stream)
    num = tl.load(starts + stream + 1) - first
    node = tl.arange(0, NODES)
    is_node = node < num
    row = first + node
    piece = tl.arange(0, PIECES)
    inside = is_node[:, None] & (piece < num_pieces)[None, :]
    at = piece[None, :] * num_rows + row[:, None]
    found = tl.load(scores + at, mask=inside, other=NEVER)
    found_ids = tl.load(score_ids + at, mask=inside, other=2147483647)
    is_broken = tl.max(tl.load(broken + at, mask=inside, other=0), 1) != 0
    score = tl.max(found, 1)
    id = tl.min(tl.where(found == score[:, None], found_ids, 2147483647), 1)
    if HAS_FILTERS:
        has_filter = tl.load(columns.top_k + row, mask=is_node, other=0) > 0
        has_filter = has_filter | (tl.load(columns.top_p + row, mask=is_node, other=1) < 1)
        has_filter = has_filter | (tl.load(columns.log_min_p + row, mask=is_node, other=0) > float("-inf"))
        has_filter = has_filter & (tl.load(columns.temperature + row, mask=is_node, other=0) > 0)
        score = tl.where(has_filter, tl.load(row_scores + row, mask=is_node, other=0), score)
        id = tl.where(has_filter, tl.load(row_ids + row, mask=is_node, other=0), id)
    usable = (is_broken == 0) & (score > NEVER) & (score < float("inf"))
    tl.store(decided + row, id, mask=is_node)
    tl.store(decided_usable + row, usable, mask=is_node)

    token = tl.load(tokens + row, mask=is_node, other=-1)
    parent = tl.load(parents + row, mask=is_node, other=-1)
    here = tl.zeros([], tl.int32)
    depth = tl.zeros([], tl.int32)
    is_fine = tl.full([], 1, tl.int32)
    while here < NODES:
        is_here = node == here
        emitted = tl.sum(tl.where(is_here, id, 0))
        is_fine = is_fine & tl.sum(tl.where(is_here & usable, 1, 0))
        tl.store(out_tokens + stream * WIDTH + depth, emitted)
        tl.store(out_rows + stream * WIDTH + depth, first + here)
        depth += 1
        is_child = is_node & (node > 0) & (parent == here) & (token == emitted)
        here = tl.min(tl.where(is_child, node, NODES))
    behind = tl.arange(0, PADDED)
    is_empty = (behind >= depth) & (behind < WIDTH)
    nothing = tl.full([PADDED], -1, tl.int32)
    tl.store(out_tokens + stream * WIDTH + behind, nothing, mask=is_empty)
    tl.store(out_rows + stream * WIDTH + behind, nothing, mask=is_empty)
    tl.store(out_num + stream, depth)
    tl.store(out_usable + stream, is_fine != 0)


@dataclass(slots=True)
class RowScan:
    """Launches over the rows of one shard's logits, and their scratch. Nothing is computed before a method says so."""

    logits: Tensor
    rows: Rows | None
    """None: raw rows, those of `raw_rows`."""
    first_id: int = 0
    tuning: Tuning = DEFAULT
    collect_all: bool = False
    """Every sampled row is collected, not only filtered ones."""
    raw_rows: Tensor | None = None
    columns: Columns = field(init=False)
    edits: Edits = field(init=False)

    def __post_init__(self) -> None:
        assert self.logits.stride(-1) == 1, "logits: expected the last dimension to be contiguous"
        assert self.first_id % 4 == 0, "first_id: four ids share a counter of the noise"
        if self.rows is None:
            nothing = self._empty(1)
            self.columns = Columns(*[nothing] * len(Columns._fields))
        else:
            self.columns = columns_of(self.rows)
        self.edits = self._edits()

    @property
    def num_rows(self) -> int:
        return len(self.logits) if self.raw_rows is None else len(self.raw_rows)

    @property
    def num_ids(self) -> int:
        return self.logits.shape[1]

    @property
    def mode(self) -> int:
        return MODES["raw" if self.rows is None else "sampled" if self.collect_all else "plain"]

    @property
    def has_collected(self) -> bool:
        """Some row goes through `collect`."""
        return self.rows is None or self.collect_all or self.rows.is_filtered

    @property
    def flags(self) -> dict[str, bool]:
        has_rows = self.rows is not None
        return {
            "HAS_CHANGES": has_rows and self.rows.changes is not None,  # type: ignore[union-attr]
            "HAS_MASKS": has_rows and self.rows.masks is not None,  # type: ignore[union-attr]
        }

    def _empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.logits.device)

    def _edits(self) -> Edits:
        nothing = self._empty(1)
        starts, ids, values, of_row, words, num_words = nothing, nothing, nothing, nothing, nothing, 0
        if self.rows is not None and self.rows.changes is not None:
            c = self.rows.changes
            starts, ids = c.starts_N1, c.ids_P
            values = self._empty(max(1, len(ids)), dtype=torch.float32)
            kernels.change[(len(self.logits),)](
                *(self.logits, self.logits.stride(0), self.num_ids, self.first_id, starts, ids),
                *(c.bias_P, c.repetition_P, c.minus_P, values),
                BLOCK=128,
                num_warps=1,
            )
        if self.rows is not None and self.rows.masks is not None:
            of_row, words = self.rows.masks.of_row_N, self.rows.masks.words_GW
            num_words = words.stride(0)
        return Edits(starts, ids, values, of_row, words, num_words)

    def splits_for(self, num_rows: int) -> int:
        """Programs of a row: eight for each multiprocessor over so many rows, four tiles each at least."""
        num_tiles = -(-self.num_ids // self.tuning.block)
        if self.tuning.splits is not None:
            return min(self.tuning.splits, num_tiles)
        if not self.logits.is_cuda:
            return 1
        processors = torch.cuda.get_device_properties(self.logits.device).multi_processor_count
        return int(max(1, min(8 * processors // max(1, num_rows), triton.cdiv(num_tiles, 4))))

    def run(self) -> Part:
        """One shard's part; `settle` and `walk` make a verdict of one or several."""
        t, num_rows = self.tuning, self.num_rows
        num_tiles = triton.cdiv(self.num_ids, t.block)
        per_split = triton.cdiv(num_tiles, self.splits_for(num_rows))
        splits = triton.cdiv(num_tiles, per_split)
        num_groups = triton.cdiv(self.num_ids, t.group)
        scores = self._empty(splits, num_rows, dtype=torch.float32)
        ids, broken = self._empty(splits, num_rows), self._empty(splits, num_rows)
        held = num_rows if self.has_collected else 1
        maxima = self._empty(held, num_groups, dtype=torch.float32)
        raw_rows = ids if self.raw_rows is None else self.raw_rows
        stride = self.logits.stride(0)
        where = (self.logits, stride, self.num_ids, self.first_id, raw_rows, self.columns, self.edits)
        if num_rows:
            kernels.scan[(num_rows, splits)](
                *where,
                *(scores, ids, broken, maxima, num_groups, per_split),
                **self.flags,
                MODE=self.mode,
                HAS_FILTERS=self.has_collected,
                BLOCK=t.block,
                GROUP=t.group,
                num_warps=t.warps,
            )
        capacity = t.capacity if self.has_collected else 1
        tops, floors = self._empty(held, dtype=torch.float32), self._empty(held, dtype=torch.float32)
        masses, found = self._empty(held, dtype=torch.int64), self._empty(held)
        listed, listed_ids = self._empty(held, capacity, dtype=torch.float32), self._empty(held, capacity)
        if num_rows and self.has_collected:
            kernels.collect[(num_rows,)](
                *where,
                *(maxima, num_groups, tops, masses, listed, listed_ids, found, floors),
                t.wanted,
                t.wanted if self.rows is None else 1,
                **self.flags,
                MODE=self.mode,
                BLOCK=t.row_block,
                GROUPS=triton.next_power_of_2(num_groups),
                CAPACITY=capacity,
                num_warps=t.row_warps,
            )
        return Part(scores, ids, broken, tops, masses, listed, listed_ids, found, floors)


@dataclass(slots=True)
class Settled:
    """Of collected rows, all [N]: largest z, kept mass relative to it, boundary, score, token, whether the lists sufficed."""

    tops: Tensor
    masses: Tensor
    boundaries: Tensor
    scores: Tensor
    ids: Tensor
    is_settled: Tensor


def columns_of(rows: Rows) -> Columns:
    """The parameters as kernels take them."""
    log_min_ps = rows.min_ps_N.log()
    keys = (rows.seeds_N, rows.positions_N, rows.choices_N, rows.prompts_N)
    return Columns(rows.temperatures_N, rows.top_ks_N, rows.top_ps_N, log_min_ps, *keys)


def settle(parts: list[Part], columns: Columns, mode: int, tuning: Tuning = DEFAULT) -> Settled:
    """Join the lists of all shards."""
    joined = (
        parts[0] if len(parts) == 1 else Part(*(torch.cat(column) for column in zip(*parts, strict=True)))
    )
    num_rows, capacity = parts[0].listed_NC.shape
    device = joined.tops_N.device
    tops, boundaries, scores = (torch.empty(num_rows, dtype=torch.float32, device=device) for _ in range(3))
    masses = torch.empty(num_rows, dtype=torch.int64, device=device)
    ids, settled = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    if num_rows:
        kernels.settle[(num_rows,)](
            *(columns, joined.tops_N, joined.masses_N, joined.listed_NC, joined.listed_ids_NC),
            *(joined.found_N, joined.floors_N, tops, masses, boundaries, scores, ids, settled, len(parts)),
            MODE=mode,
            CAPACITY=capacity,
            LISTED=triton.next_power_of_2(capacity * len(parts)),
            num_warps=tuning.row_warps,
        )
    return Settled(tops, masses, boundaries, scores, ids, settled)


def settle_whole(scan: RowScan, part: Part) -> Settled:
    """`settle` for a part that is the whole vocabulary: rows that the list does not settle are searched in memory."""
    settled = settle([part], scan.columns, scan.mode, scan.tuning)
    if scan.num_rows:
        kernels.settle_wide[(scan.num_rows,)](
            *(scan.logits, scan.logits.stride(0), scan.num_ids, scan.first_id, scan.columns, scan.edits),
            *(settled.is_settled, settled.tops, part.masses_N),
            *(settled.masses, settled.boundaries, settled.scores, settled.ids),
            **scan.flags,
            MODE=scan.mode,
            BLOCK=scan.tuning.row_block,
            num_warps=scan.tuning.row_warps,
        )
    return settled


def walk_trees(
    parts: list[Part], settled: Settled | None, columns: Columns, trees: Trees, num_rows: int
) -> Verified:
    """Parts, and what filtered rows decided -> the verdict."""
    pieces = [part[:3] for part in parts]
    scores, ids, broken = pieces[0] if len(parts) == 1 else (torch.cat(c) for c in zip(*pieces, strict=True))
    num_streams, width = len(trees.starts_S1) - 1, trees.max_depth + 1
    device = scores.device
    decided = torch.empty(num_rows, dtype=torch.int32, device=device)
    decided_usable = torch.empty(num_rows, dtype=torch.bool, device=device)
    tokens, rows = (torch.empty(num_streams, width, dtype=torch.int32, device=device) for _ in range(2))
    num = torch.empty(num_streams, dtype=torch.int32, device=device)
    usable = torch.empty(num_streams, dtype=torch.bool, device=device)
    nodes = triton.next_power_of_2(trees.max_nodes)
    num_pieces = triton.next_power_of_2(len(scores))
    if num_streams:
        walk[(num_streams,)](
            *(columns, trees.starts_S1, trees.tokens_N, trees.parents_N, scores, ids, broken, len(scores)),
            *((scores, ids) if settled is None else (settled.scores, settled.ids)),
            *(num_rows, decided, decided_usable, tokens, rows, num, usable),
            HAS_FILTERS=settled is not None,
            PIECES=num_pieces,
            NODES=nodes,
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            num_warps=1 if nodes * num_pieces <= 512 else 4,
        )
    return Verified(tokens, rows, num, usable, decided, decided_usable)


def verify(logits_NV: Tensor, rows: Rows, trees: Trees, tuning: Tuning = DEFAULT) -> Verified:
    """See `paceline.kernels.verify.verify`."""
    scan = RowScan(logits_NV, rows, tuning=tuning)
    part = scan.run()
    settled = settle_whole(scan, part) if rows.is_filtered else None
    return walk_trees([part], settled, scan.columns, trees, len(logits_NV))


def decide_rows(logits_NV: Tensor, rows: Rows, tuning: Tuning = DEFAULT) -> tuple[Tensor, Tensor]:
    """See `paceline.kernels.verify.decide_rows`."""
    num = len(logits_NV)
    roots = torch.full((num,), -1, dtype=torch.int32, device=logits_NV.device)
    starts = torch.arange(num + 1, dtype=torch.int32, device=logits_NV.device)
    verdict = verify(logits_NV, rows, Trees(starts, roots, roots, 1, 0), tuning)
    return verdict.decided_N, verdict.decided_usable_N


def part_of(
    logits_NV: Tensor, rows: Rows, first_id: int, capacity: int = 1024, tuning: Tuning = DEFAULT
) -> Part:
    """See `paceline.kernels.verify.part_of`."""
    fits = replace(tuning, capacity=capacity, wanted=capacity // 2)
    return RowScan(logits_NV, rows, first_id, fits).run()


def verify_parts(parts: list[Part], rows: Rows, trees: Trees) -> tuple[Verified, Tensor]:
    """See `paceline.kernels.verify.verify_parts`."""
    columns = columns_of(rows)
    settled = settle(parts, columns, MODES["plain"]) if rows.is_filtered else None
    verdict = walk_trees(parts, settled, columns, trees, len(rows.top_ks_N))
    if settled is None:
        return verdict, torch.zeros_like(rows.top_ks_N, dtype=torch.bool)
    has_filter = (rows.top_ks_N > 0) | (rows.top_ps_N < 1) | (rows.min_ps_N > 0)
    return verdict, has_filter & (rows.temperatures_N > 0) & (settled.is_settled == 0)
