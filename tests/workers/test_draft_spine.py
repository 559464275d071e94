"""Levels from one compiled loop against levels from a batch built for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.cluster.types import DraftOpen, DraftTree, Sampling
from paceline.workers import draft_spine
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.model_runner import ModelRunner

STREAMS = {
    "greedy": (Sampling(1, 0.0), range(3, 12)),
    "sampled": (Sampling(2, 1.0), [77]),
    "warm": (Sampling(5, 0.7, choice=3, prompt_index=2), range(20, 61)),
    "filtered": (Sampling(3, 0.8, 20, 0.95, 0.02), range(100, 141)),
    "penalised": (Sampling(4, 0.9, repetition_penalty=1.3), range(50, 70)),
}
WIDTH = 2
RunnerFactory = Callable[..., ModelRunner]


def proposals(runner: ModelRunner, floor: float, *, repeats: bool, rounds: int = 4) -> list[list[DraftTree]]:
    """What each of several rounds proposes, a few tokens of the first spine committed in between."""
    engine = DraftEngine(runner, token_budget=64, prefix_cache=False, repeats=repeats)
    texts = {name: tuple(tokens) for name, (_, tokens) in STREAMS.items()}
    for name, (sampling, _) in STREAMS.items():
        engine.open(name, DraftOpen(name, texts[name], sampling, len(texts[name])))
    found = []
    for index in range(rounds):
        trees, dropped = engine.propose(list(STREAMS), 6, WIDTH, floor)
        assert not dropped
        found.append(trees)
        for tree in trees:
            new = (*tree.tokens[: index % 3], 9)
            assert engine.advance(tree.request_id, tree.base_len, tree.prefix_hash, new)
    return found


@pytest.mark.parametrize("floor", [0.0, 0.004, 0.05])
def test_levels_in_one_loop_make_the_same_trees(make_runner: RunnerFactory, floor: float) -> None:
    """Bit for bit, also where streams end at different depths; and they were taken, for those that allow it."""
    runner = make_runner("llama")
    assert runner.path.startswith("whole step")
    taken: list[int] = []
    levels = runner.levels

    def counted(batch, spine):  # type: ignore[no-untyped-def]
        if spine.width == WIDTH:  # not the first one, which only compiles
            taken.append(len(batch.slots))
        return levels(batch, spine)

    runner.levels = counted  # type: ignore[method-assign]
    plain = proposals(runner, floor, repeats=False)
    assert taken == []
    quick = proposals(runner, floor, repeats=True)

    assert quick == plain
    assert taken and max(taken) == 3
    if floor:
        assert len({len(tree.tokens) for trees in plain for tree in trees}) > 1


def test_streams_whose_draw_is_not_plain_are_left_alone(make_runner: RunnerFactory) -> None:
    engine = DraftEngine(make_runner("llama"), token_budget=64)
    for name, (sampling, tokens) in STREAMS.items():
        engine.open(name, DraftOpen(name, tuple(tokens), sampling, 1))

    assert [draft_spine.is_plain(stream) for stream in engine.streams] == [True, True, True, False, False]


def test_a_model_without_such_a_step_drafts_all_the_same(make_runner: RunnerFactory) -> None:
    """One with sliding windows and another activation, say."""
    runner = make_runner("gemma3")
    assert not runner.path.startswith("whole step")

    assert proposals(runner, 0.0, repeats=True) == proposals(runner, 0.0, repeats=False)
