"""Levels drafted while the target verifies -> the next tree, the same to the bit, or nothing that is ever seen again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from paceline.cluster.metrics import Metrics
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import prefix_hash
from paceline.cluster.types import DraftOpen, DraftTree, Request, Sampling
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.drafters.colocated import ColocatedDrafter
from paceline.workers.model_runner import ModelRunner

VOCAB = 211
DEPTH = 4
SAMPLINGS = {
    "greedy": Sampling(1, 0.0),
    "sampled": Sampling(2, 1.0),
    "filtered": Sampling(3, 0.8, 20, 0.95, 0.02, choice=2, prompt_index=1),
    "adjusted": Sampling(
        4, 0.7, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias=((5, 2.0),)
    ),
}
RunnerFactory = Callable[..., ModelRunner]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def family(request: pytest.FixtureRequest) -> str:
    """One plain family, one with sliding windows."""
    name: str = request.param
    return name


def engine_of(runner: ModelRunner, metrics: Metrics | None = None, **how: bool) -> DraftEngine:
    return DraftEngine(runner, token_budget=64, metrics=metrics, **how)


def opened(name: str, tokens: list[int], num_prompt: int) -> DraftOpen:
    return DraftOpen(name, tuple(tokens), SAMPLINGS[name.split("/")[0]], num_prompt)


def only(engine: DraftEngine, key: str, depth: int = DEPTH, width: int = 3, floor: float = 0.0) -> DraftTree:
    """The tree of one stream."""
    trees, dropped = engine.propose([key], depth, width, floor)
    assert not dropped
    return trees[0]


def go_ahead(engine: DraftEngine, levels: int = 100) -> int:
    """Draft ahead as long as there is something to draft, `levels` times at most; how many times."""
    done = 0
    while done < levels and engine.has_ahead and engine.draft_ahead():
        done += 1
    return done


def count(metrics: Metrics, name: str, label: str) -> float:
    return {"levels": metrics.draft_levels, "ahead": metrics.draft_ahead}[name].labels(label)._value.get()


@pytest.fixture
def sure(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Random models are never sure: they draft ahead all the same."""
    monkeypatch.setattr("paceline.workers.draft_engine._AHEAD_FLOOR", 0.0)
    yield


@pytest.mark.parametrize("name", list(SAMPLINGS))
@pytest.mark.parametrize("seed", range(2))
def test_a_tree_drafted_ahead_is_the_tree_drafted_fresh(
    sure: None, family: str, name: str, seed: int, make_runner: RunnerFactory
) -> None:
    """To the bit, however far it went ahead, and wherever the target leaves its spine; a shape may change on the way."""
    ahead, plain = engine_of(make_runner(family)), engine_of(make_runner(family), keep_levels=False)
    fresh = engine_of(make_runner(family), prefix_cache=False)
    draw = random.Random(f"{name}/{seed}")
    prompt = [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 40))]
    tokens = list(prompt)
    for engine in (ahead, plain):
        engine.open(name, opened(name, tokens, len(prompt)))
    for _ in range(12):
        depth, width = draw.choice([(DEPTH, 3)] * 4 + [(2, 3), (5, 2), (3, 4)])
        floor = draw.choice([0.0, 0.0, 0.02])
        fresh.open(name, opened(name, tokens, len(prompt)))
        expected = only(fresh, name, depth, width, floor)

        assert only(ahead, name, depth, width, floor) == expected
        assert only(plain, name, depth, width, floor) == expected
        go_ahead(ahead, draw.choice([0, 1, DEPTH, 100]))
        ahead.pool.check_integrity()
        foretold = ahead._streams[name].spine
        num = draw.randrange(1, len(foretold) + 1)
        new = foretold[:num]
        if draw.random() < 0.4:
            new[-1] = draw.randrange(3, VOCAB)
        for engine in (ahead, plain):
            assert engine.advance(name, len(tokens), prefix_hash(tokens), tuple(new))
        tokens += new


def test_many_streams_at_different_depths_share_the_forwards(
    sure: None, family: str, make_runner: RunnerFactory
) -> None:
    """Some were foretold, some not, some are new: each gets the tree that it gets alone."""
    ahead, fresh = engine_of(make_runner(family, num_blocks=200)), engine_of(make_runner(family))
    draw = random.Random(5)
    names = [f"{kind}/{i}" for kind in SAMPLINGS for i in range(2)]
    texts = {name: [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 30))] for name in names}
    prompts = {name: len(text) for name, text in texts.items()}
    for turn in range(6):
        for name in names:
            if turn == 0 or draw.random() < 0.1:
                ahead.open(name, opened(name, texts[name], prompts[name]))
        trees, dropped = ahead.propose(names, DEPTH, 3)
        assert not dropped
        for tree in trees:
            name = tree.request_id
            fresh.open(name, opened(name, texts[name], prompts[name]))
            assert tree == only(fresh, name)
        go_ahead(ahead, draw.randrange(2 * DEPTH))
        for name in names:
            spine = ahead._streams[name].spine
            new = spine[: draw.randrange(1, len(spine) + 1)]
            new[-1] = new[-1] if draw.random() < 0.7 else draw.randrange(3, VOCAB)
            assert ahead.advance(name, len(texts[name]), prefix_hash(texts[name]), tuple(new))
            texts[name] += new


def test_what_the_target_agreed_with_costs_nothing_when_asked(
    sure: None, make_runner: RunnerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a spine and the token behind it stand: the next tree is there, and no forward is run for it."""
    metrics = Metrics()
    engine = engine_of(make_runner("llama"), metrics)
    tokens = [5, 6, 7]
    engine.open("sampled", opened("sampled", tokens, 3))
    first = only(engine, "sampled")
    assert go_ahead(engine) == DEPTH + 1
    new = engine._streams["sampled"].spine[: DEPTH + 1]
    assert new[:DEPTH] == list(first.tokens[:DEPTH])
    engine.advance("sampled", 3, prefix_hash(tokens), tuple(new))
    monkeypatch.setattr(engine.runner, "forward", lambda _: pytest.fail("a forward was run"))

    assert len(only(engine, "sampled").tokens) == 3 * DEPTH
    assert (count(metrics, "ahead", "hit"), count(metrics, "ahead", "miss")) == (1, 0)
    assert (count(metrics, "levels", "ahead"), count(metrics, "levels", "wasted")) == (DEPTH + 1, 0)


def test_what_it_did_not_agree_with_is_counted(sure: None, make_runner: RunnerFactory) -> None:
    """Another token than the one foretold, and a stream that ends: all that was drafted ahead was wasted."""
    metrics = Metrics()
    engine = engine_of(make_runner("llama"), metrics)
    tokens = [5, 6, 7]
    engine.open("sampled", opened("sampled", tokens, 3))
    path = only(engine, "sampled").tokens[:DEPTH]
    go_ahead(engine, 3)
    foretold = engine._streams["sampled"].spine[DEPTH]
    engine.advance("sampled", 3, prefix_hash(tokens), (*path, (foretold + 1) % VOCAB))
    assert (count(metrics, "ahead", "hit"), count(metrics, "ahead", "miss")) == (0, 1)
    assert count(metrics, "levels", "wasted") == 3

    only(engine, "sampled")
    go_ahead(engine, 2)
    engine.close("sampled")

    assert count(metrics, "levels", "wasted") == 5
    assert not engine.has_ahead and engine.draft_ahead() == 0
    assert engine.pool.num_used == 0


def test_an_unlikely_outcome_is_not_drafted_ahead(make_runner: RunnerFactory) -> None:
    """A model that is never sure drafts nothing that nobody asked for."""
    engine = engine_of(make_runner("llama"))
    engine.open("sampled", opened("sampled", [5, 6, 7], 3))
    only(engine, "sampled", floor=0.0)
    scores = [chances[0] for _, chances in engine._streams["sampled"].levels]

    assert scores[0] * scores[1] * scores[2] * scores[3] < 0.1
    assert go_ahead(engine) == 0 and not engine.has_ahead


def test_drafting_ahead_stops_at_the_drafts_context(sure: None, make_runner: RunnerFactory) -> None:
    """No position past the model's last is computed, and the tree that fits still comes."""
    engine = engine_of(make_runner("llama"))
    tokens = [5] * (256 - DEPTH - 2)
    engine.open("greedy", opened("greedy", tokens, 10))
    only(engine, "greedy")

    assert go_ahead(engine) == 3
    assert engine._streams["greedy"].num_computed == 256


def test_levels_with_too_few_alternatives_are_drafted_anew(make_runner: RunnerFactory) -> None:
    """Asked wide and short, narrow and long, then wide and long: as if it had been asked so from the start."""
    engine, fresh = (engine_of(make_runner("llama")) for _ in range(2))
    for one in (engine, fresh):
        one.open("sampled", opened("sampled", [5, 6, 7], 3))
    only(engine, "sampled", 2, 4)
    only(engine, "sampled", 4, 2)

    assert only(engine, "sampled", 4, 4) == only(fresh, "sampled", 4, 4)


def test_a_stream_too_long_for_the_draft_is_forgotten(make_runner: RunnerFactory) -> None:
    """A colocated one, once it is given up: neither its tokens nor its blocks are kept until it ends."""
    engine = engine_of(make_runner("llama"))
    drafter = ColocatedDrafter(engine, vocab_size=VOCAB, depth=DEPTH, width=3)
    request = Request("r", (5,) * 254, SAMPLINGS["greedy"], 20)
    stream = Stream(request, 0, np.full(274, 5, np.int32), 254, 254, 0)
    drafter.open(stream)

    assert [drafter.propose([stream]) for _ in range(4)] == [[None]] * 4
    assert len(engine) == 0 and engine.pool.num_used == 0


def test_drafting_ahead_takes_no_block_that_a_stream_holds(sure: None, make_runner: RunnerFactory) -> None:
    """In a full pool it stops; a stream that asks takes back what others drafted ahead before any is evicted."""
    engine = engine_of(make_runner("llama", num_blocks=9), prefix_cache=False)
    for name in ("greedy", "sampled"):
        engine.open(name, opened(name, list(range(3, 11)), 8))
        only(engine, name)
    assert engine.pool.num_used == 6
    go_ahead(engine)
    assert engine.pool.num_free < 3 and engine.pool.owners() == {"greedy", "sampled"}

    engine.open("filtered", opened("filtered", list(range(3, 11)), 8))
    trees, dropped = engine.propose(["filtered"], DEPTH, 3)

    assert len(trees) == 1 and not dropped
    assert engine.pool.owners() == {"greedy", "sampled", "filtered"} and engine.pool.num_free == 0
    assert go_ahead(engine) == 1  # the last place of the block it has
    fresh = engine_of(make_runner("llama"))
    for name in ("greedy", "sampled", "filtered"):
        fresh.open(name, opened(name, list(range(3, 11)), 8))
        assert only(engine, name) == only(fresh, name)
