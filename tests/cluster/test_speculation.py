"""Trees against a naive oracle; patience against workers that hang, slow down and come back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.cluster.speculation import DraftPatience, SpareCore, Tree, is_tree, prefix_hash, reroot
from paceline.cluster.types import SOURCE_DRAFT, SOURCE_TARGET


@st.composite
def proposals(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents as drafts travel."""
    num = draw(st.integers(0, 14))
    tokens = draw(st.lists(st.integers(0, 99), min_size=num, max_size=num))
    return tokens, [draw(st.integers(-1, node - 1)) for node in range(num)]


def changed(items: Sequence[float], at: int, item: float) -> list[Any]:
    """A copy with one item replaced."""
    return [*items[:at], item, *items[at + 1 :]]


def ancestry(parents: Sequence[int], node: int) -> list[int]:
    """The node and its ancestors up to the root, as indices of a Tree."""
    line = [node]
    while line[-1] != 0:
        line.append(parents[line[-1] - 1] + 1)
    return line


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """Each node's tokens from the root down: what a tree means, whatever its indices."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@settings(deadline=None)
@given(proposals())
def test_a_tree_knows_depths_and_ancestors_of_its_nodes(proposal: tuple[list[int], list[int]]) -> None:
    """Depths, shifted parents, sources and the mask are what walking up from each node gives."""
    tokens, parents = proposal
    tree = Tree.build(100, tokens, parents)
    lines = [ancestry(parents, node) for node in range(len(tokens) + 1)]

    assert tree.tokens.tolist() == [100, *tokens]
    assert tree.parents.tolist() == [-1, *(parent + 1 for parent in parents)]
    assert tree.depths.tolist() == [len(line) - 1 for line in lines]
    assert tree.scores.tolist() == [1.0] * len(tree)
    assert tree.sources.tolist() == [SOURCE_TARGET] + [SOURCE_DRAFT] * len(tokens)
    assert (len(tree), tree.num_drafted) == (len(tokens) + 1, len(tokens))
    expected = [[column in line for column in range(len(tree))] for line in lines]
    assert tree.ancestor_mask().tolist() == expected


@settings(max_examples=300, deadline=None)
@given(proposals(), st.integers(0, 16), st.integers(0, 3))
@example(([0, 0, 0, 0], [-1, 0, -1, 2]), 9, 1)
@example(([0, 0, 0, 0, 0], [-1, 0, 1, 0, -1]), 5, 2)
@example(([0, 0, 0, 0, 0, 0], [-1, 0, 1, -1, 3, 4]), 9, 2)
def test_a_trimmed_tree_holds_the_first_nodes_that_are_shallow_enough(
    proposal: tuple[list[int], list[int]], max_nodes: int, max_depth: int
) -> None:
    """Every kept node still hangs from the same tokens; the root always stays."""
    # Distinct tokens make each path name one node.
    num = len(proposal[0])
    scores = [1 / (node + 2) for node in range(num)]
    tree = Tree.build(100, range(num), proposal[1], scores=scores)
    score_of = dict(zip(paths(tree), tree.scores.tolist(), strict=True))
    trimmed = tree.trimmed(max_nodes, max_depth)

    expected = [path for path in paths(tree) if len(path) - 1 <= max_depth][: max(1, max_nodes)]
    assert paths(trimmed) == expected
    assert trimmed.depths.tolist() == [len(path) - 1 for path in expected]
    assert len(trimmed.sources) == len(trimmed)
    assert is_tree(
        trimmed.tokens[1:].tolist(), (trimmed.parents[1:] - 1).tolist(), trimmed.scores[1:].tolist(), 100
    )
    # A score stays with its node.
    assert trimmed.scores.tolist() == [score_of[path] for path in expected]


def test_a_tree_that_fits_is_not_copied() -> None:
    """Trimming to what is there already returns the same object."""
    tree = Tree.build(1, [2, 3], [-1, 0])

    assert tree.trimmed(3, 2) is tree
    assert Tree.root_only(5).trimmed(0, 0).tokens.tolist() == [5]


@pytest.mark.parametrize("max_depth", [-1, -5])
def test_the_root_survives_a_negative_depth(max_depth: int) -> None:
    """The root is decided already: no limit removes it."""
    assert len(Tree.build(1, [2], [-1]).trimmed(4, max_depth)) == 1


@settings(deadline=None)
@given(proposals())
def test_trees_as_they_travel_are_recognised(proposal: tuple[list[int], list[int]]) -> None:
    """Whatever can be built is accepted; with one wrong parent, token or score, or one too many, it is not."""
    tokens, parents = proposal
    scores = [0.5] * len(tokens)

    assert is_tree(tokens, parents, scores, 100)
    for node in range(len(tokens)):
        for wrong in (node, node + 1, -2):
            assert not is_tree(tokens, changed(parents, node, wrong), scores, 100)
        for wrong in (-1, 100):
            assert not is_tree(changed(tokens, node, wrong), parents, scores, 100)
        for score in (-0.1, 1.1, float("nan"), float("inf")):
            assert not is_tree(tokens, parents, changed(scores, node, score), 100)
    assert not is_tree([*tokens, 0], parents, scores, 100)
    assert not is_tree(tokens, [*parents, -1], scores, 100)
    assert not is_tree(tokens, parents, [*scores, 0.5], 100)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=80), st.integers(0, 79))
def test_a_prefix_hash_tells_the_last_tokens_apart(tokens: list[int], at: int) -> None:
    """Lists and arrays hash alike; one changed token among the last 64 is seen; the hash fits a signed word."""
    known = prefix_hash(tokens)

    assert known == prefix_hash(np.asarray(tokens, np.int32))
    assert 0 <= known < 2**63
    if at < min(64, len(tokens)):
        other = list(tokens)
        other[-1 - at] ^= 1
        assert prefix_hash(other) != known
    assert prefix_hash([5, *tokens]) != known or len(tokens) >= 64


def drive(patience: DraftPatience, round_trips_s: Sequence[float]) -> list[float]:
    """One step per round trip (inf: no reply at all) -> what each step waited. Late replies arrive before the next."""
    waited = []
    for round_trip in round_trips_s:
        wait = patience.wait_s()
        waited.append(min(wait, round_trip))
        if 0 < wait < round_trip:
            patience.missed()
        if round_trip < HANGS:
            patience.answered(round_trip)
    return waited


HANGS = float("inf")


@pytest.mark.parametrize("num_good", [0, 50])
def test_a_hung_worker_costs_one_wait(num_good: int) -> None:
    """However long it hangs, and that wait is no longer than the limit."""
    patience = DraftPatience(0.05)
    drive(patience, [0.004] * num_good)

    waited = drive(patience, [HANGS] * 1000)

    assert [wait > 0 for wait in waited] == [True] + [False] * 999
    assert waited[0] <= 0.05


def test_a_worker_is_trusted_again_at_its_first_answer() -> None:
    """The very next step waits, and so do all that follow; another miss ends that at once."""
    patience = DraftPatience(0.05)
    drive(patience, [HANGS] * 100)
    patience.answered(0.002)

    assert all(patience.wait_s() > 0 for _ in range(5))
    patience.missed()
    assert [patience.wait_s() > 0 for _ in range(2)] == [False, False]


def test_the_wait_follows_the_round_trip_and_never_passes_the_limit() -> None:
    """About twice a steady round trip; the limit for one that is always slow."""
    patience = DraftPatience(0.05)
    drive(patience, [0.004] * 60)
    assert patience.wait_s() == pytest.approx(0.009, rel=0.05)

    drive(patience, [0.009, 0.015, 0.025, 0.045] + [0.049] * 60)

    assert patience.wait_s() == 0.05


@pytest.mark.parametrize("slower", [0.020, 0.040, 0.050])
def test_a_worker_that_became_slower_for_good_costs_one_miss(slower: float) -> None:
    """Up to ten times as slow and within the limit: its first late answer says how long it takes now."""
    patience = DraftPatience(0.05)
    drive(patience, [0.004] * 60)

    assert drive(patience, [slower] * 300)[1:] == [slower] * 299


def test_a_worker_slower_than_the_limit_is_not_waited_for() -> None:
    """Its answers come, and none of them in time: one wait, then none, until it is fast again."""
    patience = DraftPatience(0.05)
    drive(patience, [0.004] * 60)

    assert sum(wait > 0 for wait in drive(patience, [0.051] * 300)) == 1
    assert drive(patience, [0.004] * 3)[1:] == [0.004] * 2


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ((), [(0, -1), (1, 0), (2, 1), (3, -1), (4, 1), (5, 3)]),
        ((7,), [(1, -1), (2, 0), (4, 0)]),
        ((7, 8), [(2, -1), (4, -1)]),
        ((5,), [(5, -1)]),
        ((7, 8, 9), []),
        ((7, 9), []),
        ((6,), []),
        ((7, 8, 9, 1), []),
    ],
)
def test_a_tree_is_rerooted_behind_what_was_committed(
    path: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    """What stands behind the path, still topological; nothing if the tree went another way or ends there."""
    tokens, parents = (7, 8, 9, 5, 4, 3), (-1, 0, 1, -1, 1, 3)

    nodes = reroot(tokens, parents, path)

    assert nodes == expected
    assert is_tree([tokens[i] for i, _ in nodes], [p for _, p in nodes], [1.0] * len(nodes), 10)


def test_spare_cores_are_used_and_wanted_ones_left_alone() -> None:
    """Work that is kept waiting pauses, longer each time; a trial after each pause; undisturbed work never pauses."""
    spare, now = SpareCore(), 0.0
    for _ in range(10_000):
        assert spare.may_work(now)
        spare.worked(now := now + 0.001, 0.001, 0.00099)

    worked = [0] * 200
    for millisecond in range(200_000):
        now += 0.001
        if spare.may_work(now):
            spare.worked(now, 0.001, 0.0008)
            worked[millisecond // 1000] += 1

    assert sum(worked) <= 9 * 21 and sum(count > 0 for count in worked) <= 9
    while not spare.may_work(now):
        now += 1
    for _ in range(100):
        spare.worked(now := now + 0.001, 0.001, 0.001)
        assert spare.may_work(now)
