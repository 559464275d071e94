"""Logits, sampling parameters and trees -> the same verdict from the kernels and from their plain twin."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl

from paceline.cluster.speculation import Tree
from paceline.kernels import verify_reference as reference
from paceline.kernels import verify_rows_triton
from paceline.kernels import verify_triton as kernels
from paceline.kernels.verify import Changes, Masks, Rows, Trees, Verified, verify
from paceline.workers.verifiers.match import match

# The interpreter computes both sides of a choice, and NaN and infinity are among the cases.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = kernels.Tuning(block=256, row_block=512, splits=2, capacity=64, wanted=16, row_warps=4)
"""Several tiles, splits and searches in a small vocabulary."""
VOCAB = 1301


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(num: int, generator: torch.Generator, **columns: list[float]) -> Rows:
    """Rows with random keys; `columns` by name of the parameter, the rest without effect, temperature 1."""
    given = {"temperature": [1.0], "top_k": [0], "top_p": [1.0], "min_p": [0.0]} | columns
    t, k, p, m = (
        torch.tensor([values[i % len(values)] for i in range(num)]).float() for values in given.values()
    )
    keys = [torch.randint(-(2**63), 2**63 - 1, (num,), generator=generator)]
    keys += [torch.randint(0, 2**32, (num,), generator=generator) for _ in range(3)]
    is_filtered = bool(((t > 0) & ((k > 0) | (p < 1) | (m > 0))).any())
    whole = (x.to(DEVICE) for x in (t, k.int(), p, m, *keys))
    return Rows(*whole, is_filtered=is_filtered)


def logits_of(num: int, generator: torch.Generator, vocab: int = VOCAB, spread: float = 3.0) -> Tensor:
    return (torch.randn(num, vocab, generator=generator) * spread).to(DEVICE)


def assert_same(logits: Tensor, rows: Rows, tuning: kernels.Tuning = SMALL) -> tuple[Tensor, Tensor]:
    """Kernels and twin decide the same; also what they decided."""
    ids, usable = (x.cpu() for x in kernels.decide_rows(logits, rows, tuning))
    expected, expected_usable = (x.cpu() for x in reference.decide_rows(logits, rows))

    assert usable.tolist() == expected_usable.tolist()
    assert ids[usable].tolist() == expected[usable].tolist()
    return ids, usable


CASES: dict[str, dict[str, list[float]]] = {
    "greedy": {"temperature": [0]},
    "sampled": {"temperature": [1, 0.7, 1.9]},
    "mixed": {"temperature": [0, 1, 0.3], "top_k": [5, 0, 3]},
    "top_k": {"top_k": [1, 20, 5000, 300]},
    "top_p": {"top_p": [0.9, 0.05, 0.999, 1.0], "temperature": [1, 0.7, 2.0]},
    "min_p": {"min_p": [0.1, 0.9, 1e-5, 0]},
    "all": {"top_k": [3, 50, 1000, 0], "top_p": [0.9, 0.5, 0.95, 0.9], "min_p": [0.1, 0, 0, 0.2]},
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_decide_what_the_twin_decides(case: str) -> None:
    """Same noise, same tokens: every filter, with lists that suffice and lists that do not."""
    generator = draw(1)
    assert_same(logits_of(4, generator), rows_of(4, generator, **CASES[case]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [5, 41, 1024])
def test_odd_sizes_and_half_precision(vocab: int, dtype: torch.dtype) -> None:
    """A vocabulary smaller than a group or a whole number of tiles; coarse logits have many ties, all kept at a boundary."""
    generator = draw(vocab)
    columns = {"top_k": [0.0, 3], "top_p": [1, 1, 0.8], "temperature": [1, 0.5, 1, 0]}
    assert_same(logits_of(4, generator, vocab).to(dtype), rows_of(4, generator, **columns))


def test_flat_and_peaked_rows() -> None:
    """All alike: the lowest id, or a draw among all, whatever the filter. One far above: it, whatever the noise."""
    generator = draw(3)
    logits = torch.zeros(6, VOCAB, device=DEVICE)
    logits[3:, 700] = 90.0
    columns = {"temperature": [0.0, 1, 1], "top_k": [0.0, 7, 0], "top_p": [1.0, 1, 0.3]}
    ids, _ = assert_same(logits, rows_of(6, generator, **columns))

    assert ids[0] == 0 and ids[3:].tolist() == [700] * 3


def test_what_is_not_usable_is_said_to_be() -> None:
    """NaN anywhere, infinity, nothing left: plain and filtered, and a lone NaN that no tile's largest would show."""
    generator = draw(4)
    logits = logits_of(8, generator)
    logits[0:2, 900] = torch.nan
    logits[2:4] = -torch.inf
    logits[4:6, 17] = torch.inf
    logits[6:8, 0:1200] = -torch.inf  # enough is left
    ids, usable = assert_same(logits, rows_of(8, generator, top_p=[1, 0.9]))

    assert usable.tolist() == [False] * 6 + [True] * 2 and (ids[6:] >= 1200).all()


def changes_of(num: int, generator: torch.Generator, per_row: int) -> Changes:
    """`per_row` entries in each row but the first, ids ascending, room behind the last."""
    starts = torch.tensor([0, 0, *(per_row * (i + 1) for i in range(num - 1))], dtype=torch.int32)
    total = int(starts[-1])
    ids = [torch.randperm(VOCAB, generator=generator)[:per_row].sort().values for _ in range(num - 1)]
    ids = torch.cat([*ids, torch.zeros(5, dtype=torch.int64)]).int()
    bias, minus = (torch.randn(total + 5, generator=generator).double() * 4 for _ in range(2))
    minus[::7] = torch.inf
    repetition = torch.rand(total + 5, generator=generator).double() + 0.6
    return Changes(*(x.to(DEVICE) for x in (starts, ids, bias, repetition, minus.abs())))


def masks_of(num: int, generator: torch.Generator, share: float) -> Masks:
    """Two masks for all rows but every third."""
    allowed = torch.rand(2, (VOCAB + 31) // 32, 32, generator=generator) < share
    words = (allowed.long() << torch.arange(32)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    of_row = torch.tensor([i % 3 - 1 for i in range(num)], dtype=torch.int32)
    return Masks(words.to(DEVICE), of_row.to(DEVICE))


@pytest.mark.parametrize("columns", [{"temperature": [1.0, 0, 0.8]}, {"top_k": [9], "top_p": [0.9, 1]}])
def test_bias_penalties_and_masks(columns: dict[str, list[float]]) -> None:
    """As `penalise` and a dense mask would have it; a few rows without either."""
    generator = draw(5)
    rows = rows_of(6, generator, **columns)
    rows = replace(rows, changes=changes_of(6, generator, 150), masks=masks_of(6, generator, 0.1))
    logits = logits_of(6, generator)
    before = logits.clone()
    assert_same(logits, rows)

    assert torch.equal(logits, before)


@triton.jit
def _naive(words):  # type: ignore[no-untyped-def]
    """-log(-log(u)): the same law, another draw from the same words."""
    return -tl.log(-tl.log((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10))


@pytest.mark.skipif(DEVICE == "cuda", reason="a compiled kernel does not see the patch")
def test_another_noise_gives_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the naive transform of the same words the comparison above fails."""
    monkeypatch.setattr(verify_rows_triton, "gumbel_of", _naive)
    generator = draw(1)
    with pytest.raises(AssertionError):
        assert_same(logits_of(4, generator), rows_of(4, generator, **CASES["sampled"]))


# --- trees ----------------------------------------------------------------------------------------------


def trees_of(shapes: list[tuple[list[int], list[int]]]) -> Trees:
    """Trees from (tokens, parents) without the root, parents counted from -1."""
    built = [Tree.build(0, tokens, parents) for tokens, parents in shapes]
    starts = torch.tensor([0, *(len(t) for t in built)]).cumsum(0)
    tokens, parents = (
        torch.cat([torch.from_numpy(getattr(t, name)) for t in built]) for name in ("tokens", "parents")
    )
    depth = max(int(t.depths.max()) for t in built)
    whole = (x.int().to(DEVICE) for x in (starts, tokens, parents))
    return Trees(*whole, max_nodes=max(len(t) for t in built), max_depth=depth)


def case_of_trees(seed: int, **columns: Any) -> tuple[Tensor, Rows, Trees]:
    """Seven streams: no draft, all right, all wrong, siblings of which one is right, a broken path, two that look alike."""
    generator = draw(seed)
    shapes: list[tuple[list[int], list[int]]] = [
        ([], []),
        ([-9] * 4, [-1, 0, 1, 2]),
        ([3] * 4, [-1, 0, 1, 2]),
        ([1, 2, -9, 4, -9], [-1, -1, -1, 2, 2]),
        ([-9, 6, 7, 8, 9, 10], [-1, 0, 0, -1, 3, 3]),
        ([-9, -9], [-1, 0]),
        ([-9, -9, 3], [-1, -1, 0]),
    ]
    trees = trees_of(shapes)
    num = len(trees.tokens_N)
    rows = rows_of(num, generator, **columns)
    logits = logits_of(num, generator)
    decided = reference.decide_rows(logits, rows)[0]
    tokens, parents, starts = (t.clone() for t in (trees.tokens_N, trees.parents_N, trees.starts_S1))
    for stream in range(len(shapes)):
        for row in range(int(starts[stream]) + 1, int(starts[stream + 1])):
            if tokens[row] == -9:  # what its parent decides
                tokens[row] = decided[starts[stream] + parents[row]]
    logits[starts[5] + 1, 5] = torch.nan
    return logits, rows, replace(trees, tokens_N=tokens)


def lists_of(verdict: Verified) -> list[Any]:
    """Tokens, rows and number of each stream; None for one that is not usable, of which nothing else is promised."""
    columns = zip(*(x.cpu().tolist() for x in verdict[:4]), strict=True)
    return [(tokens, rows, num) if usable else None for tokens, rows, num, usable in columns]


FILTERED_TREES = pytest.param({"top_k": [9, 0, 0], "temperature": [0.8]}, marks=pytest.mark.slow)


@pytest.mark.parametrize("columns", [{"temperature": [0]}, FILTERED_TREES])
def test_trees_are_walked_as_match_walks_them(columns: dict[str, list[float]]) -> None:
    """The kernel, its twin, and the engine's verifier on each stream."""
    logits, rows, trees = case_of_trees(6, **columns)
    verdict = kernels.verify(logits, rows, trees, SMALL)
    found = lists_of(verdict)

    assert found == lists_of(reference.verify(logits, rows, trees))
    assert found == lists_of(verify(logits, rows, trees, backend="reference"))
    assert [of and of[2] for of in found[:6]] == [1, 5, 1, 3, 2, None] and found[6] is not None
    starts = trees.starts_S1.tolist()
    for stream, (first, stop) in enumerate(pairwise(starts)):
        parents = (trees.parents_N[first + 1 : stop] - 1).tolist()
        tree = Tree.build(0, trees.tokens_N[first + 1 : stop].tolist(), parents)
        expected = match(tree, verdict.decided_N[first:stop].cpu().numpy())
        path = [0, *expected.path]
        of_stream = found[stream]
        if of_stream is not None:
            tokens, deciders, num = of_stream
            assert deciders[:num] == [first + node for node in path]
            assert tokens[num - 1] == expected.emitted


# --- vocabulary shards ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[0, 652, VOCAB], pytest.param([0, 4, 900, VOCAB], marks=pytest.mark.slow)])
def test_shards_joined_decide_what_the_whole_decides(cuts: list[int]) -> None:
    """Plain and filtered rows, changes and masks by global id. Rows that keep more than the lists hold are named."""
    generator = draw(7)
    columns = {"temperature": [1.0, 0, 0.7, 1], "top_k": [0.0, 0, 12, 0, 900], "top_p": [1.0, 1, 1, 0.7, 1]}
    rows = rows_of(10, generator, **columns)
    rows = replace(rows, changes=changes_of(10, generator, 10), masks=masks_of(10, generator, 0.8))
    logits = logits_of(10, generator)
    roots = torch.full((10,), -1, dtype=torch.int32, device=DEVICE)
    trees = Trees(torch.arange(11, dtype=torch.int32, device=DEVICE), roots, roots, 1, 0)
    parts = [
        kernels.part_of(logits[:, first:stop], rows, first, 128, SMALL) for first, stop in pairwise(cuts)
    ]
    verdict, open_rows = kernels.verify_parts(parts, rows, trees)
    expected, usable = reference.decide_rows(logits, rows)
    settled = ~open_rows.cpu()

    assert usable.all() and verdict.decided_usable_N[settled].all()
    assert verdict.decided_N.cpu()[settled].tolist() == expected.cpu()[settled].tolist()
    assert open_rows[4] and not open_rows[[0, 1, 5, 6]].any()
    assert cuts[1] == 4 or open_rows.sum() == 1  # a shard of few tokens lists few
