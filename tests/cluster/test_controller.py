"""Step times, scores and acceptance -> how much is drafted: best by exhaustive search, bounded loss, found again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.controller import Calibration, Controller, StepCost
from paceline.cluster.speculation import Tree, fuse
from paceline.cluster.types import SOURCE_DRAFT, SOURCE_SUFFIX

FLAT = StepCost([1, 8, 64], [1.0, 1.2, 3.0])


def trees(draw_seed: int, num: int) -> list[Tree]:
    """Random trees with random scores."""
    generator = np.random.default_rng(draw_seed)
    made = []
    for _ in range(num):
        size = int(generator.integers(1, 9))
        parents = [int(generator.integers(-1, node)) for node in range(size)]
        scores = generator.uniform(0.01, 1.0, size).tolist()
        made.append(Tree.build(1, generator.integers(0, 50, size).tolist(), parents, scores=scores))
    return made


def test_step_cost_follows_its_table_and_what_steps_take_now() -> None:
    """Interpolated inside, extended outside, never falling, scaled by observation."""
    cost = StepCost([4, 1, 2], [3.0, 1.0, 0.9])

    assert cost([1, 2, 3, 4, 6]).tolist() == [1.0, 1.0, 2.0, 3.0, 5.0]
    for _ in range(200):
        cost.observe(2, 2.0)
    assert float(cost(2)) == pytest.approx(2.0, rel=0.01)


@given(st.integers(0, 10_000), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_the_chosen_nodes_have_the_best_rate_of_all_cuts(seed: int, num: int) -> None:
    """No number of nodes, taken in order of their chances, yields more expected tokens per second."""
    candidates = trees(seed, num)
    chosen = Controller(FLAT).choose(candidates)

    def rate(cut: list[Tree | None]) -> float:
        gain = sum(float(t.path_products()[1:].sum()) for t in cut if t is not None)
        rows = num + sum(t.num_drafted for t in cut if t is not None)
        return (num + gain) / float(FLAT(rows))

    chances = np.sort(np.concatenate([t.path_products()[1:] for t in candidates]))[::-1]
    best = max((num + chances[:n].sum()) / float(FLAT(num + n)) for n in range(len(chances) + 1))
    assert rate(chosen) == pytest.approx(best, rel=1e-5)
    for tree in chosen:
        assert tree is None or all(tree.parents[node] < node for node in range(len(tree)))


def test_calibration_learns_how_often_a_score_is_right() -> None:
    """Scores of 0.9 that hold one time in five end near 0.2; nodes behind a rejected parent do not count."""
    calibration = Calibration()
    generator = np.random.default_rng(0)
    tree = Tree.build(1, [2, 3], [-1, 0], scores=[0.9, 0.6])
    for _ in range(3000):
        accepted = generator.random() < 0.2
        calibration.observe(tree, (1, 2) if accepted else ())

    scores = calibration.calibrated(tree).scores
    assert scores[1] == pytest.approx(0.2, abs=0.08)
    assert scores[2] > 0.9, "its parent was accepted 600 times and it each time with it"


def simulate(controller: Controller, steps: int, *, gain: float, wait_s: float) -> float:
    """Tokens per second, relative to drafting nothing, of a source with this gain and wait; T(1) is 1 s."""
    tokens = seconds = 0.0
    for _ in range(steps):
        asked = controller.should_ask("draft", 1)
        tokens += 1 + (gain if asked else 0.0)
        seconds += float(FLAT(1 + (4 if asked and gain else 0))) + (wait_s if asked else 0.0)
        if asked:
            controller.asked("draft", wait_s, gain, 1)
    return tokens / seconds


@pytest.mark.parametrize("wait_s", [0.1, 0.5, 2.0, 5.0])
def test_a_source_that_brings_nothing_costs_at_most_three_percent(wait_s: float) -> None:
    """Once the controller has had a few steps to find out, and over any window behind them."""
    controller = Controller(FLAT)
    simulate(controller, 200, gain=0.0, wait_s=wait_s)

    assert simulate(controller, 1000, gain=0.0, wait_s=wait_s) >= 0.97


def test_a_source_that_pays_is_used_in_every_step_and_found_again() -> None:
    """A good source is never paused; one that turns good after a bad time is back within 600 steps."""
    controller = Controller(FLAT)
    assert simulate(controller, 300, gain=2.0, wait_s=0.2) > 1.8
    simulate(controller, 2000, gain=0.0, wait_s=2.0)
    simulate(controller, 1200, gain=2.0, wait_s=0.2)

    assert simulate(controller, 300, gain=2.0, wait_s=0.2) > 1.8


@given(st.integers(0, 10_000), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_fusing_keeps_every_path_once_with_its_best_score(seed: int, num: int) -> None:
    """The fused tree has the paths of all sources and no other; the most likely path stands first."""

    def paths(tree: Tree) -> dict[tuple[int, ...], float]:
        found: dict[tuple[int, ...], float] = {}
        at: list[tuple[int, ...]] = []
        for node in range(len(tree)):
            path = (*at[tree.parents[node]], int(tree.tokens[node])) if node else ()
            at.append(path)
            found[path] = max(found.get(path, 0.0), float(tree.scores[node]))
        return found

    sources = trees(seed, num)
    fused = fuse(sources)
    expected: dict[tuple[int, ...], float] = {}
    for tree in sources:
        for path, score in paths(tree).items():
            expected[path] = max(expected.get(path, 0.0), score)

    assert num == 1 or (paths(fused) == pytest.approx(expected) and len(fused) == len(expected))
    assert all(fused.parents[node] < node for node in range(1, len(fused)))
    spine = 1
    while spine < len(fused) and num > 1 and (fused.parents[spine:] == spine - 1).any():
        children = np.flatnonzero(fused.parents == spine - 1)
        assert fused.scores[spine] == fused.scores[children].max() and fused.parents[spine] == spine - 1
        spine += 1


def test_a_node_keeps_the_source_that_was_surer_of_it() -> None:
    """Equal proposals merge; who gets the credit is the one with the better score."""
    draft = Tree.build(1, [2], [-1], SOURCE_DRAFT, [0.4])
    copied = Tree.build(1, [2, 3], [-1, 0], SOURCE_SUFFIX, [0.8, 0.7])

    fused = fuse([draft, copied])

    assert fused.tokens.tolist() == [1, 2, 3] and fused.sources.tolist()[1:] == [SOURCE_SUFFIX] * 2
    assert fused.scores[1] == pytest.approx(0.8)
