"""Chunks and trees over a paged pool -> plain masked softmax attention, row by row in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels.attention_pieces import Cut, Pieces, plan_pieces
from paceline.kernels.tree_attention import AttentionPlan, tree_attention
from paceline.kernels.varlen_context import why_not_varlen

TOLERANCE = 2e-5  # float32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPLIT = Cut(rows_per_tile=8, block_keys=32, num_programs=3, split=32, min_shared=8)
SHARES = Cut(rows_per_tile=16, block_keys=16, num_programs=5, split=None, min_shared=8)
NUM_BLOCKS, BLOCK_SIZE = 80, 4
MIXED = [("chunk", 0, 5), ("tree", 9, 7), ("chunk", 13, 3), ("tree", 0, 1), ("tree", 30, 1), ("tree", 3, 17)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to this one."""
    return [*path_to(parents, parents[node]), node] if node >= 0 else []


def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, *, backend: str = "jit", **how: Any
) -> Tensor:
    """The op, where its back-end runs: Triton's on the GPU if there is one."""
    device = DEVICE if backend == "triton" else "cpu"
    if how.get("sinks_H") is not None:
        how["sinks_H"] = how["sinks_H"].to(device)
    return tree_attention(q.to(device), k.to(device), v.to(device), plan, backend=backend, **how).cpu()


class Packed:
    """Random segments over a shuffled pool, kept beside a plain description of what each row may see.

    `shuffled` trees give their nodes random places, so that hardly any path is a run of keys. `prefix`: contexts of at
    least so many keys begin with the same blocks; half of those go on alike for as many keys again.
    """

    def __init__(
        self,
        seed: int,
        specs: list[tuple[str, int, int]],
        heads: int = 4,
        groups: int = 2,
        dim: int = 8,
        prefix: int = 0,
    ) -> None:
        generator = np.random.default_rng(seed)
        free = list(generator.permutation(NUM_BLOCKS))
        common = [int(free.pop()) for _ in range(2 * prefix // BLOCK_SIZE)]
        self.seen: list[list[int]] = []
        """Slots of the keys of each row, in order of position."""
        tables, segment, positions, leading, own_start, own = [], [], [], [], [0], []
        for kind, context, num in specs:
            level = 0 if context < prefix else 1 if context < 2 * prefix or len(tables) % 2 else 2
            table = common[: level * prefix // BLOCK_SIZE]
            table += [int(free.pop()) for _ in range(-(-(context + num) // BLOCK_SIZE) - len(table))]
            parents = [
                -1,
                *(int(generator.integers(0, n)) if kind == "tree" else n - 1 for n in range(1, num)),
            ]
            for node in range(num):
                behind = [context + other for other in path_to(parents, node)]
                keys = [*range(context), *behind]
                self.seen.append([table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in keys])
                is_run = keys == list(range(len(keys)))
                segment.append(len(tables))
                positions.append(len(keys) - 1)
                leading.append(len(keys) if is_run else context)
                own += [] if is_run else behind
                own_start.append(len(own))
            tables.append(table)
        padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        ints = (np.asarray(x, np.int32) for x in (segment, leading, own_start, own))
        segments, leads, starts, owns = ints
        self.plan = AttentionPlan(
            padded, BLOCK_SIZE, segments, np.asarray(positions, np.int64), leads, starts, owns
        )
        draw = torch.Generator().manual_seed(seed)
        self.q = torch.randn(len(positions), heads, dim, generator=draw) * 2
        self.k, self.v = (torch.randn(groups, NUM_BLOCKS * BLOCK_SIZE, dim, generator=draw) for _ in range(2))
        self.scaling = dim**-0.5

    def run(
        self,
        window: int | None = None,
        softcap: float | None = None,
        backend: str = "jit",
        sinks: Tensor | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        """The op itself."""
        how = {"scaling": self.scaling, "window": window, "softcap": softcap, "sinks_H": sinks, "cut": cut}
        return attention(self.q, self.k, self.v, self.plan, backend=backend, **how)

    def expected(
        self, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
    ) -> np.ndarray:
        """One row and one head at a time."""
        q, k, v = (tensor.double().numpy() for tensor in (self.q, self.k, self.v))
        share = q.shape[1] // k.shape[0]
        out = np.zeros((q.shape[0], q.shape[1], v.shape[-1]))
        for row, seen in enumerate(self.seen):
            slots = seen if window is None else seen[-window:]
            for head in range(q.shape[1]):
                scores = k[head // share, slots] @ q[row, head] * self.scaling
                if softcap is not None:
                    scores = np.tanh(scores / softcap) * softcap
                weight = np.exp(scores - scores.max())
                sink = 0.0 if sinks is None else np.exp(float(sinks[head]) - scores.max())
                out[row, head] = weight / (weight.sum() + sink) @ v[head // share, slots]
        return out


def worst(ours: Tensor, expected: np.ndarray) -> float:
    """Largest absolute difference."""
    return float(np.abs(ours.double().numpy() - expected).max())


@pytest.mark.parametrize(
    ("heads", "groups", "dim"),
    [(1, 1, 1), (4, 4, 8), (4, 2, 16), (6, 2, 5), (8, 1, 3), (3, 3, 33), (8, 2, 64)],
)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 4, 8])
@pytest.mark.parametrize("backend", ["jit", "reference"])
def test_attention_equals_plain_masked_softmax(
    heads: int, groups: int, dim: int, softcap: float | None, window: int | None, backend: str
) -> None:
    """Chunks and trees in one batch, odd shapes, grouped heads, windows and soft caps."""
    packed = Packed(heads * 100 + dim, MIXED, heads, groups, dim)

    assert worst(packed.run(window, softcap, backend), packed.expected(window, softcap)) < TOLERANCE


@pytest.mark.parametrize("seed", range(20))
def test_random_trees_see_their_ancestors_and_their_context_only(seed: int) -> None:
    """Random topological trees at random depths behind random contexts."""
    generator = np.random.default_rng(seed)
    specs = [("tree", int(generator.integers(0, 40)), int(generator.integers(1, 20))) for _ in range(3)]
    packed = Packed(seed, specs)
    window = [None, 3, 9][seed % 3]

    assert worst(packed.run(window), packed.expected(window)) < TOLERANCE


@pytest.mark.parametrize("wrong", ["another ancestor", "one leading key less", "another position"])
def test_one_wrong_key_is_noticed(wrong: str) -> None:
    """Negative control: the comparison above has the power to find a single wrong entry of the plan."""
    packed = Packed(3, [("tree", 6, 9)])
    assert len(packed.plan.own) > 2
    if wrong == "another ancestor":
        packed.plan.own[0] = next(i for i in range(6, 15) if i not in packed.plan.own[:2])
    elif wrong == "one leading key less":
        packed.plan.num_leading[-1] -= 1
    else:
        packed.plan.positions[-1] += 1

    assert worst(packed.run(window=5), packed.expected(window=5)) > 100 * TOLERANCE


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    """exp is ours: large negative and positive scores, and equal ones."""
    packed = Packed(5, MIXED)
    for factor in (0.0, 1e-6, 30.0, 1e4):
        packed.scaling = factor
        assert worst(packed.run(), packed.expected()) < 10 * TOLERANCE


def test_nan_of_a_row_stays_in_the_row() -> None:
    """A poisoned query gives NaN for itself alone, and a poisoned key for the rows that see it."""
    packed = Packed(6, MIXED)
    clean = packed.run()
    packed.q[2, 1] = torch.nan
    spoiled = packed.run()

    assert spoiled[2, 1].isnan().all()
    spoiled[2, 1] = clean[2, 1]
    assert torch.equal(spoiled, clean)

    packed.q[2, 1] = 0.0
    packed.k[:, packed.seen[9][-1]] = torch.nan
    sees = torch.tensor([packed.seen[9][-1] in seen for seen in packed.seen])
    assert torch.equal(packed.run().isnan().flatten(1).any(1), sees)


def test_slots_outside_a_segment_have_no_influence() -> None:
    """Garbage, even NaN, in slots of others never reaches a row."""
    packed = Packed(7, MIXED)
    clean = packed.run()
    others = torch.ones(packed.k.shape[1], dtype=torch.bool)
    others[[slot for seen in packed.seen for slot in seen]] = False
    packed.k[:, others] = torch.nan
    packed.v[:, others] = torch.nan

    assert others.any()
    assert torch.equal(packed.run(), clean)


def rows_of(packed: Packed, rows: slice) -> AttentionPlan:
    """The plan of some rows alone."""
    plan = packed.plan
    starts = plan.own_start[rows.start : rows.stop + 1]
    return AttentionPlan(
        plan.tables,
        plan.block_size,
        plan.row_segment[rows],
        plan.positions[rows],
        plan.num_leading[rows],
        starts - starts[0],
        plan.own[starts[0] : starts[-1]],
    )


@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 2, 32), (15, 3, 80), (8, 8, 64)])
@pytest.mark.parametrize("window", [None, 24])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    heads: int, groups: int, dim: int, window: int | None
) -> None:
    """The text must not depend on who else is in the step."""
    packed = Packed(dim, [*MIXED, ("chunk", 0, 100)], heads, groups, dim)
    together = packed.run(window)
    for start, stop in ((0, 1), (4, 9), (20, 21), (34, 100), (100, 134)):
        rows = slice(start, stop)
        how = {"scaling": packed.scaling, "window": window}
        alone = tree_attention(packed.q[rows], packed.k, packed.v, rows_of(packed, rows), **how)

        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("window", [None, 5])
def test_a_path_through_a_tree_has_the_bits_of_plain_decoding(window: int | None) -> None:
    """The same keys in the same order, wherever they lie and however the plan names them."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 8, 64, generator=generator).repeat_interleave(2, 0)  # rows 0, 1 and 2, 3 are twins
    k, v = (torch.randn(2, 64, 64, generator=generator) for _ in range(2))
    # Key i of the tree lies in slot i; keys 40 and 43 are an accepted branch, and stand at 36 and 37 when compacted.
    tables = np.asarray([list(range(16)), list(range(16))], np.int32)
    for pool in (k, v):
        pool[:, 36:38] = pool[:, [40, 43]]
    plan = AttentionPlan(
        tables,
        4,
        np.asarray([0, 1, 0, 1], np.int32),
        np.asarray([36, 36, 37, 37], np.int64),
        np.asarray([36, 37, 36, 38], np.int32),
        np.asarray([0, 1, 1, 3, 3], np.int32),
        np.asarray([40, 40, 43], np.int32),
    )
    out = tree_attention(q, k, v, plan, scaling=0.125, window=window)

    assert torch.equal(out[0], out[1]) and torch.equal(out[2], out[3])


def test_threads_change_no_bit() -> None:
    """Long work is cut into rows for several threads."""
    packed = Packed(11, [("chunk", 0, 120), ("chunk", 20, 60), ("tree", 40, 9)], 16, 2, 16)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(packed.run())
            assert packed.plan.parts is not None
            assert len(packed.plan.parts[1]) == (1 if threads == 1 else min(threads, 5))
    finally:
        torch.set_num_threads(before)

    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# --- cut for a GPU: the kernel in Triton's interpreter, and its plain twin ------------------------------

LARGE = [("tree", 69, 40), ("chunk", 75, 9), ("tree", 64, 3), ("chunk", 0, 3), ("tree", 2, 5)]
"""Some behind a prefix in two levels; a tree of more nodes than a mask word has bits."""
PREFIX = 32


def large(heads: int = 6, groups: int = 2, dim: int = 8, seed: int = 0) -> Packed:
    return Packed(seed, LARGE, heads, groups, dim, prefix=PREFIX)


@pytest.fixture(params=["pieces", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    return str(request.param)


@pytest.mark.parametrize("cut", [SPLIT, SHARES], ids=["split", "shares"])
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "window", "softcap", "has_sinks"),
    [
        (4, 1, 16, 7, None, True),
        pytest.param(6, 2, 8, None, None, False, marks=pytest.mark.slow),
        pytest.param(3, 3, 5, 30, 1.5, False, marks=pytest.mark.slow),
        pytest.param(8, 2, 20, 1, None, True, marks=pytest.mark.slow),
    ],
)
def test_pieces_equal_plain_masked_softmax(
    heads: int,
    groups: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    cut: Cut,
    backend: str,
) -> None:
    """Shared prefixes, long trees, windows that cut through them, caps and sinks; however the work is cut."""
    packed = large(heads, groups, dim)
    sinks = torch.linspace(-2, 4, heads) if has_sinks else None

    found = packed.run(window, softcap, backend, sinks, cut)
    assert worst(found, packed.expected(window, softcap, sinks)) < TOLERANCE


@pytest.mark.parametrize("name", ["jit", "reference"])
@pytest.mark.parametrize("window", [None, 5])
def test_sinks_take_their_share(name: str, window: int | None) -> None:
    """A sink is a key without a value; one far below every score changes nothing, one far above takes all."""
    packed = Packed(8, MIXED, 6, 2, 8)
    sinks = torch.tensor([0.0, 3.0, -1e4, 600.0, 10.0, -3.0])
    found = packed.run(window, None, name, sinks)

    assert worst(found, packed.expected(window, None, sinks)) < TOLERANCE
    assert torch.equal(found[:, 2], packed.run(window, None, name)[:, 2])
    assert float(found[:, 3].abs().max()) < 1e-30


@pytest.mark.slow
def test_a_half_precision_pool_is_read_by_the_kernel() -> None:
    """float16 in and out, float32 between: as near as its ten bits allow. (The interpreter has no bfloat16 products.)"""
    pytest.importorskip("triton")
    packed = large(8, 2, 16)
    packed.q, packed.k, packed.v = packed.q.half(), packed.k.half(), packed.v.half()
    found = packed.run(backend="triton", cut=SHARES)

    assert found.dtype == torch.float16
    assert TOLERANCE < worst(found, packed.expected()) < 4e-3


@pytest.mark.parametrize("wrong", ["bits", "ranks", "base", "leading", "merge_entry", "tables"])
def test_one_wrong_number_in_the_pieces_is_noticed(wrong: str) -> None:
    """Negative control: every array of the pieces matters, and a kernel that ignored one would be noticed."""
    packed = large()
    window = 3 if wrong == "ranks" else None
    assert worst(packed.run(window, backend="pieces", cut=SPLIT), packed.expected(window)) < TOLERANCE
    ((pieces, _),) = packed.plan.pieces.values()
    array = getattr(pieces, wrong)
    if wrong == "merge_entry":
        array[0] = array[-1]
    elif wrong == "ranks":
        array[:40, 1] -= 4
    elif wrong == "base":
        array[:40] -= 1
    elif wrong == "bits":
        array[30, 0] ^= 1 << 3
    elif wrong == "tables":
        array[0, 0] = array[1, -1]
    else:
        array[0] -= 1

    assert worst(packed.run(window, backend="pieces", cut=SPLIT), packed.expected(window)) > 10 * TOLERANCE


def test_a_common_prefix_is_read_once() -> None:
    """Keys that pieces read: those of both levels of the prefix once, not once for each of the streams."""
    packed = large()
    arrays = plan_pieces(packed.plan, SHARES)
    alone = plan_pieces(packed.plan, Cut(16, 16, 5, None, min_shared=1 << 20))

    def num_read(arrays: dict[str, np.ndarray]) -> int:
        return int((arrays["piece_stop"] - arrays["piece_start"]).sum())

    # 40, 9 and 3 rows share the first 32 keys, the 40 and the 3 the next 32; a tile holds 16 rows.
    assert num_read(alone) - num_read(arrays) == PREFIX * ((3 + 1 + 1) - 4) + PREFIX * ((3 + 1) - 3)


def test_work_is_dealt_in_equal_shares() -> None:
    """No program has more than one key tile above the average, however uneven the contexts."""
    specs = [("tree", 1, 3), ("tree", 120, 2), ("tree", 7, 1), ("chunk", 20, 30), ("tree", 60, 5)]
    packed = Packed(1, specs)
    cut = Cut(rows_per_tile=4, block_keys=4, num_programs=7, split=None, min_shared=1 << 20)
    arrays = plan_pieces(packed.plan, cut)
    tiles = -(-(arrays["piece_stop"] - arrays["piece_start"]) // cut.block_keys)
    bounds = arrays["program_start"]
    shares = [int(tiles[a:b].sum()) for a, b in pairwise(bounds)]

    assert sum(shares) == tiles.sum() and bounds[0] == 0 and bounds[-1] == len(tiles)
    assert max(shares) <= -(-sum(shares) // 7)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 9])
def test_with_fixed_cuts_a_row_has_the_same_bits_in_any_batch(window: int | None, backend: str) -> None:
    """Alone, and beside others with whom it shares its prefix or not; with shares of the batch it may differ."""
    packed = large(4, 2, 16)
    together = packed.run(window, backend=backend, cut=SPLIT)
    for start, stop in ((0, 40), (40, 49), (55, 60)):
        rows = slice(start, stop)
        alone = attention(
            packed.q[rows],
            packed.k,
            packed.v,
            rows_of(packed, rows),
            scaling=packed.scaling,
            window=window,
            backend=backend,
            cut=SPLIT,
        )

        assert torch.equal(alone, together[rows])


def test_nan_stays_in_its_stream(backend: str) -> None:
    """A poisoned key of one stream's tree spoils rows of that stream at most, those that see it in any case."""
    packed = large()
    clean = packed.run(backend=backend, cut=SPLIT)
    slot = packed.seen[20][-1]
    packed.v[:, slot] = torch.nan
    found = packed.run(backend=backend, cut=SPLIT)

    assert found[[slot in seen for seen in packed.seen]].isnan().all()
    assert torch.equal(found[40:], clean[40:])


def plain_context(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pieces: Pieces,
    context: Tensor,
    partial: Tensor,
    lse: Tensor,
    *,
    block_size: int,
    scaling: float,
) -> None:
    """What `varlen_context` does, which needs a GPU: the first keys of each segment, for all of its rows."""
    bounds = pieces.segment_start.tolist()
    for (start, stop), length, table in zip(
        pairwise(bounds), context.tolist(), pieces.tables.long(), strict=True
    ):
        keys = torch.arange(length)
        slots = table[keys // block_size] * block_size + keys % block_size
        rows = q[start:stop].unflatten(1, (k_pool.shape[0], -1))
        scores = torch.einsum("rghd,gcd->rghc", rows, k_pool[:, slots]) * scaling
        lse[start:stop] = scores.logsumexp(-1).flatten(1)
        partial[start:stop] = torch.einsum("rghc,gcd->rghd", scores.softmax(-1), v_pool[:, slots]).flatten(
            1, 2
        )


@pytest.mark.skipif(DEVICE == "cuda", reason="the real one is tested there")
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_context_read_by_others_is_merged_with_the_rest(
    has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention gives the part that all rows of a stream see, this kernel the chunks' and trees' own part."""
    kernel = pytest.importorskip("paceline.kernels.tree_attention_triton")
    monkeypatch.setattr(kernel, "varlen_context", plain_context)
    packed = large(6, 2, 8)
    sinks = torch.linspace(-2, 4, 6) if has_sinks else None
    how = {"scaling": packed.scaling, "sinks_H": sinks, "cut": SPLIT, "context": "varlen"}
    found = attention(packed.q, packed.k, packed.v, packed.plan, backend="triton", **how)
    ((pieces, _),) = packed.plan.pieces.values()

    assert worst(found, packed.expected(None, None, sinks)) < TOLERANCE
    assert int(pieces.piece_start[pieces.tile_segment[pieces.piece_tile] == 0].min()) == 69


def test_varlen_says_why_not() -> None:
    """On a CPU, first of all."""
    assert why_not_varlen(torch.zeros(1, 256, 64), 256, window=None, softcap=None) == "no CUDA device"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("context", ["triton", "varlen"])
def test_bfloat16_on_a_gpu(context: str) -> None:
    """Blocks of 256 keys, as FlashAttention wants them; long contexts behind a common one."""
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 256 * 40, 128, generator=draw) for _ in range(2))
    specs = [(700, 9), (3000, 5), (514, 1), (2049, 33)]
    tables = np.stack([np.concatenate([np.arange(2), np.arange(2 + 9 * i, 2 + 9 * i + 9)]) for i in range(4)])
    segment, positions, leading = [], [], []
    for at, (start, num) in enumerate(specs):
        segment += [at] * num
        positions += range(start, start + num)
        leading += range(start + 1, start + num + 1)
    num_rows = len(positions)
    plan = AttentionPlan(
        tables.astype(np.int32),
        256,
        np.asarray(segment, np.int32),
        np.asarray(positions, np.int64),
        np.asarray(leading, np.int32),
        np.zeros(num_rows + 1, np.int32),
        np.zeros(0, np.int32),
    )
    q = torch.randn(num_rows, 8, 128, generator=draw)
    q, k, v = (tensor.bfloat16() for tensor in (q, k, v))
    wanted = tree_attention(q.float(), k.float(), v.float(), plan, scaling=128**-0.5, backend="reference")
    found = attention(q, k, v, plan, backend="triton", scaling=128**-0.5, context=context)

    assert float((found.float() - wanted).abs().max()) < 0.02
