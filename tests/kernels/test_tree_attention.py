"""Chunks and trees over a paged pool -> plain masked softmax attention, row by row in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels.tree_attention import AttentionPlan, tree_attention

TOLERANCE = 2e-5  # float32
NUM_BLOCKS, BLOCK_SIZE = 80, 4
MIXED = [("chunk", 0, 5), ("tree", 9, 7), ("chunk", 13, 3), ("tree", 0, 1), ("tree", 30, 1), ("tree", 3, 17)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to this one."""
    return [*path_to(parents, parents[node]), node] if node >= 0 else []


class Packed:
    """Random segments over a shuffled pool, kept beside a plain description of what each row may see.

    `shuffled` trees give their nodes random places, so that hardly any path is a run of keys.
    """

    def __init__(
        self, seed: int, specs: list[tuple[str, int, int]], heads: int = 4, groups: int = 2, dim: int = 8
    ) -> None:
        generator = np.random.default_rng(seed)
        free = list(generator.permutation(NUM_BLOCKS))
        self.seen: list[list[int]] = []
        """Slots of the keys of each row, in order of position."""
        tables, segment, positions, leading, own_start, own = [], [], [], [], [0], []
        for kind, context, num in specs:
            table = [int(free.pop()) for _ in range(-(-(context + num) // BLOCK_SIZE))]
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

    def run(self, window: int | None = None, softcap: float | None = None, backend: str = "jit") -> Tensor:
        """The op itself."""
        how = {"scaling": self.scaling, "window": window, "softcap": softcap}
        return tree_attention(self.q, self.k, self.v, self.plan, backend=backend, **how)

    def expected(self, window: int | None = None, softcap: float | None = None) -> np.ndarray:
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
                out[row, head] = weight / weight.sum() @ v[head // share, slots]
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
