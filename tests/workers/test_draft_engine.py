"""A draft engine that is its own target -> exactly the target's tokens, kept in step or found out of step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paceline.cluster.speculation import is_tree, prefix_hash
from paceline.cluster.types import DraftOpen, DraftTree, Request, Sampling
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner

VOCAB = 211
LENGTH = 24
SAMPLINGS = {
    "greedy": Sampling(1, 0.0),
    "sampled": Sampling(2, 1.0),
    "filtered": Sampling(3, 0.8, 20, 0.95, 0.02, choice=2, prompt_index=1),
}
PROMPTS = {"greedy": tuple(range(3, 12)), "sampled": (77,), "filtered": tuple(range(100, 141))}
RunnerFactory = Callable[..., ModelRunner]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def family(request: pytest.FixtureRequest) -> str:
    """One plain family, one with sliding windows."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def texts(family: str, make_runner: RunnerFactory) -> dict[str, list[int]]:
    """Prompt and output of each stream, as the target alone decides."""
    engine = Engine(make_runner(family), token_budget=64, max_streams=4)
    outputs = engine.run([Request(name, PROMPTS[name], how, LENGTH) for name, how in SAMPLINGS.items()])
    return {name: [*PROMPTS[name], *outputs[name]] for name in SAMPLINGS}


def opened(name: str, tokens: list[int]) -> DraftOpen:
    """A stream's first message."""
    return DraftOpen(name, tuple(tokens), SAMPLINGS[name], len(PROMPTS[name]))


def spine(tree: DraftTree) -> list[int]:
    """Tokens of the path that follows the first child of every node."""
    path, at = [], -1
    while at in tree.parents:
        at = tree.parents.index(at)
        path.append(tree.tokens[at])
    return path


def only(engine: DraftEngine, key: str, depth: int = 4, width: int = 3) -> DraftTree:
    """The tree of one stream."""
    trees, dropped = engine.propose([key], depth, width)
    assert not dropped
    return trees[0]


def close_enough(a: DraftTree, b: DraftTree) -> bool:
    """The same tree; probabilities may differ by rounding."""
    same = (a.tokens, a.parents, a.base_len, a.prefix_hash) == (
        b.tokens,
        b.parents,
        b.base_len,
        b.prefix_hash,
    )
    return same and np.allclose(a.scores, b.scores, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("budget", [3, 256])
def test_a_draft_equal_to_the_target_proposes_what_the_target_decides(
    family: str, budget: int, make_runner: RunnerFactory, texts: dict[str, list[int]]
) -> None:
    """At any temperature the spine is the text itself: both draw with the same noise at the same positions."""
    engine = DraftEngine(make_runner(family), token_budget=budget)
    for num_output in (0, 1, 7, LENGTH - 5):
        for name, text in texts.items():
            engine.open(name, opened(name, text[: len(PROMPTS[name]) + num_output]))
        trees, dropped = engine.propose(list(texts), depth=5, width=3)

        assert not dropped and [tree.request_id for tree in trees] == list(texts)
        for tree in trees:
            text = texts[tree.request_id]
            base = len(PROMPTS[tree.request_id]) + num_output
            assert spine(tree) == text[base : base + 5] == list(tree.tokens[:5])
            assert (tree.base_len, tree.prefix_hash) == (base, prefix_hash(text[:base]))


def test_another_seed_is_drafted_differently(
    family: str, make_runner: RunnerFactory, texts: dict[str, list[int]]
) -> None:
    """Negative control: without the target's own noise a sampled spine is soon wrong."""
    engine = DraftEngine(make_runner(family), token_budget=64)
    engine.open("sampled", DraftOpen("sampled", PROMPTS["sampled"], Sampling(99), 1))

    assert spine(only(engine, "sampled", depth=8)) != texts["sampled"][1:9]


@pytest.mark.parametrize(("depth", "width"), [(1, 1), (1, 4), (4, 1), (5, 3), (3, 8)])
def test_a_tree_is_a_spine_with_alternatives(
    family: str, depth: int, width: int, make_runner: RunnerFactory, texts: dict[str, list[int]]
) -> None:
    """Topological, spine first, distinct siblings, probabilities in (0, 1] and never a filtered token."""
    engine = DraftEngine(make_runner(family), token_budget=64)
    for name in texts:
        engine.open(name, opened(name, list(PROMPTS[name])))
    for tree in engine.propose(list(texts), depth, width)[0]:
        children = list(zip(tree.parents, tree.tokens, strict=True))

        assert is_tree(tree.tokens, tree.parents, tree.scores, VOCAB)
        assert len(set(children)) == len(children) <= depth * width
        assert tree.parents[:depth] == tuple(range(-1, depth - 1))
        assert all(-1 <= parent < depth - 1 for parent in tree.parents)
        assert all(0 < score <= 1 for score in tree.scores)
        if tree.request_id != "filtered":
            assert len(children) == depth * width


@pytest.mark.parametrize("agree", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_an_advance_gives_the_same_proposals_as_a_fresh_open(
    family: str, name: str, agree: int, make_runner: RunnerFactory, texts: dict[str, list[int]]
) -> None:
    """Committed tokens that follow the spine for a while and then leave it: kept KV is the right KV."""
    engine, fresh = (DraftEngine(make_runner(family), token_budget=64) for _ in range(2))
    tokens = list(PROMPTS[name])
    engine.open(name, opened(name, tokens))
    for turn in range(4):
        path = spine(only(engine, name))
        new = [*path[:agree], (path[min(agree, 3)] + 1 + turn) % VOCAB]

        assert engine.advance(name, len(tokens), prefix_hash(tokens), tuple(new))
        held = engine._streams[name]
        assert held.num_computed == len(tokens) + min(agree, 3)  # the last spine token was never computed
        tokens += new
        fresh.open(name, opened(name, tokens))
        assert close_enough(only(engine, name), only(fresh, name))


def test_an_unasked_second_proposal_changes_nothing(
    family: str, make_runner: RunnerFactory, texts: dict[str, list[int]]
) -> None:
    """Proposing twice behind the same end gives the same tree, and the spine is not counted twice."""
    engine, fresh = (DraftEngine(make_runner(family), token_budget=64) for _ in range(2))
    tokens = list(PROMPTS["sampled"])
    engine.open("sampled", opened("sampled", tokens))
    first, second = only(engine, "sampled"), only(engine, "sampled")
    path = spine(first)
    new = [*path[:3], path[0], path[1]]  # as if the doubled spine went on
    engine.advance("sampled", len(tokens), prefix_hash(tokens), tuple(new))
    fresh.open("sampled", opened("sampled", [*tokens, *new]))

    assert close_enough(first, second)
    assert engine._streams["sampled"].num_computed == len(tokens) + 3
    assert close_enough(only(engine, "sampled"), only(fresh, "sampled"))


def test_two_advances_without_a_proposal_are_taken_in(
    family: str, make_runner: RunnerFactory, texts: dict[str, list[int]]
) -> None:
    """A step whose draft was not asked for in between: nothing stale is kept."""
    engine, fresh = (DraftEngine(make_runner(family), token_budget=64) for _ in range(2))
    tokens = list(PROMPTS["greedy"])
    engine.open("greedy", opened("greedy", tokens))
    path = spine(only(engine, "greedy"))
    for new in ((path[0],), (path[1], 9), (10,)):
        assert engine.advance("greedy", len(tokens), prefix_hash(tokens), new)
        tokens += new
    fresh.open("greedy", opened("greedy", tokens))

    assert close_enough(only(engine, "greedy"), only(fresh, "greedy"))


@pytest.mark.parametrize("what", ["base", "hash", "key"])
def test_a_mismatch_is_reported_and_the_stream_forgotten(
    family: str, what: str, make_runner: RunnerFactory, texts: dict[str, list[int]]
) -> None:
    """Wrong length, wrong prefix, unknown stream: False, and its blocks are free again."""
    engine = DraftEngine(make_runner(family), token_budget=64)
    tokens = list(PROMPTS["greedy"])
    engine.open("greedy", opened("greedy", tokens))
    only(engine, "greedy")
    base = len(tokens) + (1 if what == "base" else 0)
    known = prefix_hash(tokens) ^ (1 if what == "hash" else 0)
    key = "stranger" if what == "key" else "greedy"

    assert not engine.advance(key, base, known, (4,))
    assert engine.propose([key], 4, 3) == ([], [key])
    assert (len(engine) == 0) == (what != "key")
    if what != "key":
        assert engine.pool.num_used == 0


def test_eviction_drops_the_stream_that_drafted_longest_ago(family: str, make_runner: RunnerFactory) -> None:
    """A pool for two of three: who drafts stays, the oldest goes and is named when it asks again."""
    engine = DraftEngine(make_runner(family, num_blocks=8), token_budget=64)
    for index, name in enumerate(("a", "b", "c")):
        engine.open(name, DraftOpen(name, tuple(range(3 + index, 13 + index)), Sampling(index), 10))
        trees, dropped = engine.propose([name], 4, 2)

        assert len(trees) == 1 and not dropped
        engine.pool.check_integrity()

    assert len(engine) == 2 and engine.pool.owners() == {"b", "c"}
    assert engine.propose(["a"], 4, 2) == ([], ["a"])
    trees, dropped = engine.propose(["b", "c"], 4, 2)
    assert len(trees) == 2 and not dropped


def test_a_full_pool_drops_who_does_not_fit_and_drafts_for_the_rest(
    family: str, make_runner: RunnerFactory, texts: dict[str, list[int]]
) -> None:
    """All ask at once: those that fit get the tree they would get alone, the others are named."""
    tiny = DraftEngine(make_runner(family, num_blocks=9), token_budget=64)
    roomy = DraftEngine(make_runner(family), token_budget=64)
    names = ["a", "b", "c", "d"]
    for engine in (tiny, roomy):
        for index, name in enumerate(names):
            engine.open(name, DraftOpen(name, tuple(range(3 + index, 13 + index)), Sampling(index), 10))
    trees, dropped = tiny.propose(names, 4, 2)

    assert [tree.request_id for tree in trees] == ["a", "b"] and dropped == ["c", "d"]
    assert all(close_enough(tree, only(roomy, tree.request_id, 4, 2)) for tree in trees)
    assert tiny.pool.owners() == {"a", "b"}
    tiny.close_all("")
    tiny.pool.check_integrity()
    assert tiny.pool.num_used == 0 and len(tiny) == 0


def test_a_stream_past_the_drafts_context_is_dropped(family: str, make_runner: RunnerFactory) -> None:
    """A draft model may have a shorter context than its target."""
    engine = DraftEngine(make_runner(family), token_budget=256)
    engine.open("long", DraftOpen("long", tuple([5] * 254), Sampling(1), 254))

    assert engine.propose(["long"], 4, 2) == ([], ["long"])
    assert len(engine.propose(["long"], 2, 2)[0]) == 1


@pytest.mark.parametrize("wrong", [VOCAB, -1, 2**31, 2**40])
def test_tokens_out_of_the_vocabulary_are_refused(
    family: str, wrong: int, make_runner: RunnerFactory
) -> None:
    """In an open and in an advance (a target's vocabulary may be padded further than its draft's)."""
    engine = DraftEngine(make_runner(family), token_budget=64)
    engine.open("bad", DraftOpen("bad", (4, wrong, 5), Sampling(1), 3))
    engine.open("empty", DraftOpen("empty", (), Sampling(1), 0))

    assert engine.propose(["bad", "empty"], 4, 2) == ([], ["bad", "empty"])
    engine.open("good", DraftOpen("good", (4, 5), Sampling(1), 2))
    assert not engine.advance("good", 2, prefix_hash([4, 5]), (6, wrong))
    assert len(engine) == 0 and engine.pool.num_used == 0
    engine.open("good", DraftOpen("good", (4, 5), Sampling(1), 2))
    only(engine, "good")
    engine.open("good", DraftOpen("good", (4, wrong), Sampling(1), 2))  # refused, and the old state is gone
    assert len(engine) == 0 and engine.pool.num_used == 0


def test_streams_of_a_lost_peer_are_forgotten_together(family: str, make_runner: RunnerFactory) -> None:
    """By prefix, and only those."""
    engine = DraftEngine(make_runner(family), token_budget=64)
    for key in ("7/a", "7/b", "77/a"):
        engine.open(key, DraftOpen(key, (4, 5), Sampling(1), 2))
        only(engine, key)
    engine.close_all("7/")

    assert engine.pool.owners() == {"77/a"} and len(engine) == 1


def test_a_reopened_stream_starts_over(
    family: str, make_runner: RunnerFactory, texts: dict[str, list[int]]
) -> None:
    """Opening a known key drops what was computed for it: no token of the old stream is attended to."""
    engine, fresh = (DraftEngine(make_runner(family), token_budget=64) for _ in range(2))
    engine.open("greedy", DraftOpen("greedy", tuple(range(50, 80)), Sampling(8), 30))
    only(engine, "greedy")
    for one in (engine, fresh):
        one.open("greedy", opened("greedy", list(PROMPTS["greedy"])))

    assert close_enough(only(engine, "greedy"), only(fresh, "greedy"))


def test_streams_drafted_together_get_the_trees_they_get_alone(
    family: str, make_runner: RunnerFactory, texts: dict[str, list[int]]
) -> None:
    """Batching changes no proposal."""
    together, alone = (DraftEngine(make_runner(family), token_budget=64) for _ in range(2))
    for engine in (together, alone):
        for name in texts:
            engine.open(name, opened(name, list(PROMPTS[name])))
    trees, _ = together.propose(list(texts), 4, 3)

    assert all(close_enough(tree, only(alone, tree.request_id)) for tree in trees)
