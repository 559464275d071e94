"""Step times, scores and acceptance -> how much is drafted: best by exhaustive search, bounded loss, found again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.calibration import Calibration, Forest
from paceline.cluster.controller import Controller, StepCost
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
    cost = StepCost([4, 1, 2], [3.0, 1.2, 1.0])

    assert cost([1, 2, 3, 4, 6]).tolist() == [1.0, 1.0, 2.0, 3.0, 5.0]
    for _ in range(200):
        cost.observe(2, 2.0)
    assert float(cost(2)) == pytest.approx(2.0, rel=0.01)


def test_interrupted_steps_do_not_inflate_what_is_not_seen() -> None:
    """Steps of three rows often find a neighbour on their core: sixty-four rows stay what they were."""
    cost = StepCost([1, 2, 4, 8, 16, 64], [5.0, 5.5, 6.0, 8.0, 12.0, 40.0])
    for step in range(20_000):
        cost.observe(*((3, 60.0 if step % 60 == 0 else 5.75) if step % 20 == 0 else (2, 5.5)))

    assert float(cost(2)) == pytest.approx(5.5, rel=0.05)
    assert float(cost(64)) < 1.5 * 40


def test_rows_that_are_not_seen_stay_what_they_were() -> None:
    """Nothing but steps of one and two rows, with noise and interruptions, for as long as an hour."""
    cost = StepCost([1, 2, 4, 8, 16, 64], [5.0, 5.2, 7.0, 8.5, 12.0, 40.0])
    dice = np.random.default_rng(0)
    for _ in range(100_000):
        rows = int(dice.integers(1, 3))
        cost.observe(rows, (4.9 + 0.1 * rows) * dice.lognormal(0, 0.15) * (6 if dice.random() < 0.02 else 1))

    assert 6.0 < float(cost(4)) < 9.0 and 34 < float(cost(64)) < 52


def test_one_slow_measurement_does_not_slow_all_larger_steps() -> None:
    """Whoever had the core while four rows were measured: eight rows took less, so four do."""
    cost = StepCost([1, 2, 4, 8, 16], [5.0, 5.5, 21.0, 8.0, 12.0])

    assert cost([1, 2, 4, 8, 16]).tolist() == [5.0, 5.5, 8.0, 8.0, 12.0]


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
        calibration.observe(Forest([tree]), [(1, 2) if accepted else ()])

    scores = calibration.estimate(Forest([tree]))
    assert scores[1] == pytest.approx(0.2, abs=0.08)
    assert scores[2] > 0.9, "its parent was accepted 600 times and it each time with it"


def simulate(controller: Controller, steps: int, *, gain: float, wait_s: float) -> float:
    """Tokens per second, relative to drafting nothing, of a source with this gain and wait; T(1) is 1 s."""
    tokens = seconds = 0.0
    for _ in range(steps):
        asked = bool(controller.ask_for("draft", ["s"]))
        tokens += 1 + (gain if asked else 0.0)
        seconds += float(FLAT(1 + (4 if asked and gain else 0))) + (wait_s if asked else 0.0)
        if asked:
            controller.asked("draft", wait_s, {"s": gain})
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


class Traffic:
    """One stream whose draft is a chain of four sure tokens, right with some chance; a step's time is its controller's."""

    def __init__(self, controller: Controller, seed: int = 0) -> None:
        self.controller = controller
        self.num_asked = self.num_nodes = 0
        self._random = np.random.default_rng(seed)

    def run(self, steps: int, chance: float, *, wait_s: float = 0.05) -> float:
        """Tokens per second, relative to drafting nothing."""
        tokens = seconds = 0.0
        for _ in range(steps):
            tree, path = None, ()
            asked = bool(self.controller.ask_for("draft", ["s"]))
            if asked:
                self.num_asked += 1
                raw = Tree.build(1, [2, 3, 4, 5], [-1, 0, 1, 2], scores=[0.9] * 4)
                (tree,) = self.controller.choose([raw], 0, [self.controller.is_trial("s")])
            num = 0 if tree is None else tree.num_drafted
            self.num_nodes += num
            if tree is not None:
                wrong = np.flatnonzero(self._random.random(num) >= chance)
                path = tuple(range(1, 1 + (int(wrong[0]) if len(wrong) else num)))
                self.controller.verified([tree], [path])
            if asked:
                self.controller.asked("draft", wait_s, {"s": len(path)})
            tokens += 1 + len(path)
            seconds += float(self.controller.cost(1 + num)) + (wait_s if asked else 0.0)
        return tokens / seconds


STEEP = StepCost([1, 64], [1.0, 20.0])


def test_a_table_that_was_measured_wrong_is_corrected_by_the_steps() -> None:
    """Flat at the start because a neighbour was busy: the rise is learnt from steps of two sizes, whatever the noise."""
    generator = np.random.default_rng(0)
    cost = StepCost([1, 2, 4, 8, 16, 32], [5.0] * 6)
    for _ in range(1500):
        rows = int(generator.choice([4, 12]))
        cost.observe(rows, (1.0 + 0.1 * rows) * float(generator.uniform(0.8, 1.25)))

    assert float(cost(12)) / float(cost(4)) == pytest.approx(2.2 / 1.4, rel=0.15)
    assert float(cost(4)) == pytest.approx(1.4, rel=0.2)
    assert (np.diff(cost(np.arange(1, 64))) >= 0).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cost, speed", [(FLAT, 1.8), (STEEP, 1.4)])
def test_a_draft_that_became_good_unannounced_is_found_within_two_of_the_longest_pauses(
    cost: StepCost, speed: float, seed: int
) -> None:
    """After a thousand steps of nothing right; calibration that says so does not keep it from being tried."""
    traffic = Traffic(Controller(cost), seed)
    traffic.run(3000, 0.0)
    traffic.run(2 * 512 + 20, 0.95)

    assert traffic.run(200, 0.95) > speed


def test_nodes_that_looked_bad_are_tried_again_though_their_source_is_never_paused() -> None:
    """Third and fourth tokens that begin to be right are verified again, without trial or notice."""
    controller = Controller(STEEP)
    raw = Tree.build(1, [2, 3, 4, 5], [-1, 0, 1, 2], scores=[0.9] * 4)

    def run(steps: int, num_right: int) -> int:
        """Nodes verified in the last step."""
        num = 0
        for _ in range(steps):
            (tree,) = controller.choose([raw])
            num = 0 if tree is None else tree.num_drafted
            if tree is not None:
                controller.verified([tree], [tuple(range(1, 1 + min(num, num_right)))])
        return num

    assert run(500, 4) == 4
    assert run(2000, 2) == 2
    assert run(2000, 4) == 4


@pytest.mark.parametrize("seed", range(5))
def test_a_draft_whose_weights_changed_is_used_at_once(seed: int) -> None:
    """Being told of it replaces the wait: nothing that was learnt of the old one counts."""
    traffic = Traffic(Controller(FLAT), seed)
    traffic.run(3000, 0.0)
    traffic.controller.reset("draft", SOURCE_DRAFT)

    assert traffic.run(30, 0.95) > 1.8


def test_a_reset_concerns_one_source() -> None:
    """What is known of the others stays."""
    controller = Controller(FLAT)
    draft = Tree.build(1, [2], [-1], SOURCE_DRAFT, [0.9])
    copied = Tree.build(1, [2], [-1], SOURCE_SUFFIX, [0.9])
    for _ in range(200):
        controller.verified([draft], [()])
        controller.verified([copied], [()])
    controller.reset("draft", SOURCE_DRAFT)

    assert controller._calibration.estimate(Forest([draft]))[1] == pytest.approx(0.9)
    assert controller._calibration.estimate(Forest([copied]))[1] < 0.1
    assert set(controller.calibration_errors()) == {"suffix"}


def test_a_draft_that_is_never_right_costs_three_percent_at_most() -> None:
    """Trials included, in which its claims are believed and verified."""
    traffic = Traffic(Controller(FLAT))
    traffic.run(300, 0.0)
    traffic.num_asked = 0

    assert traffic.run(3000, 0.0) >= 0.97
    assert traffic.num_asked <= 20


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_nothing_is_drafted_where_every_row_costs_a_step(wait_s: float) -> None:
    """T(n) = n: a node cannot bring more than it costs, and the source is soon left alone."""
    controller = Controller(StepCost([1, 64], [1.0, 64.0]))
    traffic = Traffic(controller)
    traffic.run(2000, 1.0, wait_s=wait_s)

    assert traffic.num_nodes == 0
    assert traffic.num_asked < 100


def test_a_trial_counts_the_step_in_which_the_source_had_caught_up() -> None:
    """The first step after a pause is spent on telling it what it missed."""
    controller = Controller(FLAT)
    simulate(controller, 3000, gain=0.0, wait_s=2.0)
    while not bool(controller.ask_for("draft", ["s"])):
        pass
    controller.asked("draft", 50.0, {"s": 0.0})
    assert bool(controller.ask_for("draft", ["s"]))
    controller.asked("draft", 0.2, {"s": 4.0})

    assert all(bool(controller.ask_for("draft", ["s"])) for _ in range(2))


def test_streams_that_want_no_drafts_count_among_those_that_wait() -> None:
    """A wait that pays for one stream does not pay if seven others share it."""
    alone, crowded = Controller(FLAT), Controller(FLAT)
    for controller, others in ((alone, 0), (crowded, 7)):
        for _ in range(100):
            controller.ask_for("draft", ["s"], (), others)
            controller.asked("draft", 0.6, {"s": 1.0})

    assert all(bool(alone.ask_for("draft", ["s"])) for _ in range(50))
    assert sum(bool(crowded.ask_for("draft", ["s"], (), 7)) for _ in range(50)) < 25


def test_calibration_error_is_the_distance_of_what_was_said_from_what_held() -> None:
    """Large while scores are believed that do not hold, small once they are known."""
    calibration = Calibration()
    generator = np.random.default_rng(0)
    tree = Tree.build(1, [2], [-1], scores=[0.9])
    for _ in range(8):
        calibration.observe(Forest([tree]), [()])
    assert calibration.errors()["draft"] > 0.4
    for _ in range(3000):
        calibration.observe(Forest([tree]), [(1,) if generator.random() < 0.5 else ()])

    assert calibration.errors()["draft"] < 0.1
    assert set(calibration.errors()) == {"draft"}


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


@given(st.integers(0, 10_000), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_a_forest_is_its_trees_one_by_one(seed: int, num: int) -> None:
    """Ranks and path products of all trees at once are those of each tree; roots bring nothing."""
    generator = np.random.default_rng(seed)
    trees = []
    for _ in range(num):
        size = int(generator.integers(1, 12))
        parents = [int(generator.integers(-1, node)) for node in range(size)]
        trees.append(Tree.build(0, list(range(size)), parents, scores=generator.random(size).tolist()))
    forest = Forest(trees)
    products = forest.products(forest.scores.astype(np.float64))

    for tree, first in zip(trees, forest.first, strict=True):
        part = slice(first, first + len(tree))
        assert products[part][1:] == pytest.approx(tree.path_products()[1:], rel=1e-6)
        assert products[first] == 0 and forest.is_root[first]
        assert (forest.parents[part][1:] - first).tolist() == tree.parents[1:].tolist()
        family = tree.parents.tolist()
        ranks = [family[:node].count(parent) for node, parent in enumerate(family)]
        assert forest._ranks()[part][1:].tolist() == ranks[1:]


@given(st.integers(0, 10_000), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_node_by_node_decides_as_passes_over_all_do(seed: int, num: int) -> None:
    """The same cuts and the same counters, step after step, whichever way a step's nodes are taken."""
    generator = np.random.default_rng(seed)
    cost = StepCost([1, 4, 16, 17, 64], [1.0, 1.1, 1.6, 2.4, 8.0])
    ways = [Controller(cost, few=few) for few in (0, 1000)]
    for _ in range(6):
        trees: list[Tree | None] = []
        for _ in range(num):
            size = int(generator.integers(1, 12))
            parents = [int(generator.integers(-1, node)) for node in range(size)]
            source = int(generator.integers(1, 3))
            tree = Tree.build(0, list(range(size)), parents, source, generator.random(size).tolist())
            trees.append(tree if generator.random() < 0.9 else None)
        believed = [bool(generator.random() < 0.3) for _ in trees]
        cuts = [way.choose(trees, 1, believed) for way in ways]
        for one, other in zip(*cuts, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or one.tokens.tolist() == other.tokens.tolist()
        chosen = [tree for tree in cuts[0] if tree is not None]
        paths = []
        for tree in chosen:
            path, at = [], 0
            while len(children := np.flatnonzero(tree.parents == at)) and generator.random() < 0.7:
                at = int(generator.choice(children))
                path.append(at)
            paths.append(path)
        for way in ways:
            way.verified(chosen, paths)
    assert ways[0].calibration_errors() == ways[1].calibration_errors()
    for name in ("_tries", "_hits"):
        assert np.array_equal(*(getattr(way._calibration, name) for way in ways))
