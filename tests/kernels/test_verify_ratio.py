"""Target logits and what a draft was drawn from -> tokens that follow the target's law, from the kernels and their twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from paceline.kernels import verify_ratio_reference as reference
from paceline.kernels import verify_ratio_triton as kernels
from paceline.kernels.verify import Rows, Trees
from paceline.kernels.verify_ratio import Draws, RatioVerdict, verify_ratio
from paceline.kernels.verify_triton import Tuning

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tuning(block=256, row_block=512, splits=2, capacity=256, wanted=16, row_warps=4)
SHAPES = {"chain": [-1, 0, 1], "siblings": [-1, -1, 0], "fan": [-1, -1, -1], "root": []}


def case_of(
    seed: int, shape: str, vocab: int, num: int, kind: str, **columns: float
) -> tuple[Tensor, Rows, Trees, Draws]:
    """`num` streams of one tree shape. Children are drawn from a q near p, with or without replacement, or chosen."""
    draw = torch.Generator().manual_seed(seed)
    parents = [-1, *(p + 1 for p in SHAPES[shape])]
    size = len(parents)
    total = num * size
    logits = torch.randn(total, vocab, generator=draw) * 2
    width = min(vocab, 12)
    near = logits + torch.randn(total, vocab, generator=draw)
    top = near.topk(width, dim=-1)
    q = top.values.softmax(-1)
    ids, tokens = top.indices.int(), torch.full((total,), -1, dtype=torch.int32)
    is_drawn = torch.full((total,), kind != "chosen")
    for stream in range(num):
        for node in range(size):
            row = stream * size + node
            children = [stream * size + n for n in range(size) if parents[n] == node and n > 0]
            if kind == "chosen":
                ids[row] = -1
                ids[row, : len(children)] = top.indices[row, : len(children)].int()
                tokens[children] = ids[row, : len(children)]
            elif children:
                places = torch.multinomial(q[row], len(children), kind == "drawn again", generator=draw)
                tokens[children] = ids[row, places]
    depths = [0] * size
    for node in range(1, size):
        depths[node] = depths[parents[node]] + 1
    temperatures = torch.full((total,), columns.get("temperature", 1.0))
    top_ks = torch.full((total,), int(columns.get("top_k", 0)), dtype=torch.int32)
    top_ps = torch.full((total,), columns.get("top_p", 1.0))
    seeds = torch.randint(-(2**63), 2**63 - 1, (num,), generator=draw).repeat_interleave(size)
    positions = torch.tensor(depths).repeat(num) + 5
    zeros = torch.zeros(total, dtype=torch.int64)
    is_filtered = bool((top_ks > 0).any() or (top_ps < 1).any())
    rows = (temperatures, top_ks, top_ps, torch.zeros(total), seeds, positions, zeros, zeros)
    trees = (
        torch.arange(0, total + 1, size, dtype=torch.int32),
        tokens,
        torch.tensor(parents, dtype=torch.int32).repeat(num),
    )
    return (
        logits.to(DEVICE),
        Rows(*(x.to(DEVICE) for x in rows), is_filtered=is_filtered),
        Trees(*(x.to(DEVICE) for x in trees), max_nodes=size, max_depth=max(depths)),
        Draws(ids.to(DEVICE), q.to(DEVICE), is_drawn.to(DEVICE), kind == "drawn"),
    )


def lists_of(verdict: RatioVerdict) -> list[list[object]]:
    return [x.cpu().tolist() for x in verdict]


@pytest.mark.parametrize(
    ("shape", "kind", "columns"),
    [
        pytest.param("chain", "drawn", {}, marks=pytest.mark.slow),
        pytest.param("siblings", "drawn", {"temperature": 0.7, "top_p": 0.95}, marks=pytest.mark.slow),
        pytest.param("siblings", "drawn again", {"top_k": 30}, marks=pytest.mark.slow),
        ("siblings", "chosen", {"temperature": 1.3}),
        ("siblings", "drawn", {"temperature": 0}),
        ("root", "drawn", {}),
    ],
)
def test_kernels_accept_and_emit_what_the_twin_does(shape: str, kind: str, columns: dict[str, float]) -> None:
    """Same uniforms, same noise, same path and tokens; among them streams that keep all, some and nothing."""
    logits, rows, trees, draws = case_of(1, shape, 301, 3, kind, **columns)
    found = lists_of(kernels.verify_ratio(logits, rows, trees, draws, SMALL))

    assert found == lists_of(verify_ratio(logits, rows, trees, draws, backend="reference"))
    assert all(found[3])
    if shape == "chain":  # the one case whose three streams are known to fare differently
        assert len(set(map(str, found[2]))) > 1


def test_a_broken_row_on_the_path_makes_its_stream_unusable() -> None:
    """Of the root; the others are as they were."""
    logits, rows, trees, draws = case_of(2, "chain", 300, 3, "drawn")
    logits[4, 17] = torch.nan
    found = kernels.verify_ratio(logits, rows, trees, draws, SMALL)

    assert lists_of(found) == lists_of(reference.verify_ratio(logits, rows, trees, draws))
    assert found.usable_S.tolist() == [True, False, True] and found.tokens_SD[1, 0] == -1


# --- the law of what is emitted -------------------------------------------------------------------------

VOCAB = 5
NUM_STREAMS = 4000
Rule = Callable[[Tensor, Rows, Trees, Draws], RatioVerdict]


def chi_square(rule: Rule, kind: str, shape: str) -> float:
    """Of the first emitted token over many seeds with one p and a fresh draft each, against p."""
    _, rows, trees, draws = case_of(3, shape, VOCAB, NUM_STREAMS, kind)
    size = len(SHAPES[shape]) + 1
    target = torch.tensor([1.0, 0.2, -0.5, 0.7, -1.4])
    draft = torch.tensor([0.1, 0.9, 0.3, -0.6, 0.2])
    total = NUM_STREAMS * size
    logits = target.repeat(total, 1)
    order = draft.argsort(descending=True).int()
    q = draft.softmax(-1)[order.long()]
    tokens = torch.full((total,), -1, dtype=torch.int32)
    draw = torch.Generator().manual_seed(11)
    num_children = sum(parent == -1 for parent in SHAPES[shape])
    for stream in range(NUM_STREAMS):
        if kind == "chosen":
            chosen = order[:num_children]
        else:
            chosen = order[torch.multinomial(q, num_children, kind == "drawn again", generator=draw)]
        at = [stream * size + 1 + n for n, parent in enumerate(SHAPES[shape]) if parent == -1]
        tokens[at] = chosen
    ids = order.repeat(total, 1)
    if kind == "chosen":
        ids[:, num_children:] = -1
    cut = Trees(trees.starts_S1, tokens, trees.parents_N, trees.max_nodes, trees.max_depth)
    verdict = rule(logits, rows, cut, replace(draws, ids_NQ=ids, q_NQ=q.repeat(total, 1)))
    seen = torch.bincount(verdict.tokens_SD[:, 0].long(), minlength=VOCAB).double()
    expected = target.double().softmax(-1) * NUM_STREAMS
    return float(((seen - expected) ** 2 / expected).sum())


LIMIT = 23.5
"""Chi-square with 4 degrees of freedom, p = 1e-4."""


def plain(logits: Tensor, rows: Rows, trees: Trees, draws: Draws) -> RatioVerdict:
    return reference.verify_ratio(logits, rows, trees, draws)


def chosen_taken_for_drawn(logits: Tensor, rows: Rows, trees: Trees, draws: Draws) -> RatioVerdict:
    """The common mistake: most probable tokens accepted by min(1, p / q) as if they had been drawn from q."""
    ids = torch.arange(VOCAB, dtype=torch.int32).repeat(len(logits), 1)
    q = torch.tensor([0.1, 0.9, 0.3, -0.6, 0.2]).softmax(-1).repeat(len(logits), 1)
    drawn = torch.ones_like(draws.is_drawn_N)
    return reference.verify_ratio(logits, rows, trees, Draws(ids, q, drawn, False))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drawn", "drawn again", "chosen"])
def test_emitted_tokens_follow_the_target(kind: str) -> None:
    """Whatever the children were drawn from: three siblings at the root, the twin's first emitted token."""
    assert chi_square(plain, kind, "fan") < LIMIT


@pytest.mark.slow
def test_a_biased_rule_would_be_seen() -> None:
    """Negative control."""
    assert chi_square(chosen_taken_for_drawn, "chosen", "fan") > 10 * LIMIT
