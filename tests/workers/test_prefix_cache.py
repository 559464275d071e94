"""Requests that begin alike -> the text of an engine without a prefix cache, with less computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

import harness as h
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import DraftOpen, Request, Sampling
from paceline.workers.decode import DecodeWorker
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.drafters.base import Drafter
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner, load_model, load_model_config
from paceline.workers.prefill import PrefillWorker

VOCAB = 211
LENGTH = 16
RunnerFactory = Callable[..., ModelRunner]
SYSTEM = tuple(np.random.default_rng(9).integers(3, VOCAB, 38).tolist())


def ask(name: str, *tail: int, temperature: float = 0.0, **how: object) -> Request:
    """The common beginning and a tail of one's own."""
    return Request(name, (*SYSTEM, *tail), Sampling(5, temperature), LENGTH, **how)  # type: ignore[arg-type]


ASKED = [
    ask("a", 7, 8, 9),
    ask("b", 7, 8, 10, 11, 12, temperature=0.8),
    ask("c", *range(20, 50)),
    ask("a again", 7, 8, 9, temperature=0.8),
    ask("nothing"),
    Request("other", tuple(range(60, 75)), Sampling(1, 0.0), LENGTH),
]


def one_by_one(engine: Engine, requests: Sequence[Request] = ASKED) -> dict[str, list[int]]:
    """Each request when the one before has ended: the cache is all that they share."""
    texts: dict[str, list[int]] = {}
    for request in requests:
        texts |= engine.run([request])
        engine.scheduler.check_integrity()
        assert engine.pool.num_used == 0
    return texts


def hits(engine: Engine | DraftEngine) -> int:
    return int(engine._metrics.prefix_hit_tokens._value.get())


@contextmanager
def watched(engine: Engine | DraftEngine) -> Iterator[list[int]]:
    """Fails on any write to a block that can be found by its hash; the sizes of the moves of side branches."""
    cache, pool = engine.runner.cache, engine.pool
    write, move, moved = cache.write, cache.move, []

    def check(slots: Tensor) -> None:
        touched = set((slots // cache.block_size).tolist())
        assert not touched & set(pool._hash_of), "a shared block is written"

    def checked_write(layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        check(slots)
        write(layer, slots, k, v)

    def checked_move(source: Tensor, destination: Tensor) -> None:
        check(destination)
        moved.append(len(source))
        move(source, destination)

    cache.write, cache.move = checked_write, checked_move  # type: ignore[method-assign]
    yield moved
    cache.write, cache.move = write, move  # type: ignore[method-assign]


class Sideways(Drafter):
    """Knows the text and puts a wrong sibling before each right token: what is accepted has to be moved."""

    name = "sideways"

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self.texts = texts

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        return [self._tree(stream) for stream in streams]

    def _tree(self, stream: Stream) -> Tree | None:
        future = self.texts[stream.request.id][stream.num_output : stream.num_output + 3]
        tokens = [token for right in future for token in ((right + 1) % VOCAB, right)]
        parents = [parent for depth in range(len(future)) for parent in (2 * depth - 1, 2 * depth - 1)]
        return Tree.build(int(stream.token_ids[-1]), tokens, parents) if tokens else None


@pytest.fixture(scope="module")
def plain(make_runner: RunnerFactory) -> Callable[[str], dict[str, list[int]]]:
    """Family -> texts of an engine that caches nothing."""
    made: dict[str, dict[str, list[int]]] = {}

    def texts(family: str) -> dict[str, list[int]]:
        if family not in made:
            engine = Engine(make_runner(family), token_budget=256, max_streams=8, prefix_cache=False)
            made[family] = one_by_one(engine)
            assert hits(engine) == engine.pool.num_findable == 0
        return made[family]

    return texts


Plain = Callable[[str], dict[str, list[int]]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mistral", "mixtral"])
@pytest.mark.parametrize("together", [False, True])
def test_cached_prefixes_leave_the_text_alone(
    family: str, together: bool, make_runner: RunnerFactory, plain: Plain
) -> None:
    """One after the other and all at once, in chunks; exactly the full blocks known by then are not computed."""
    engine = Engine(make_runner(family), token_budget=16 if together else 256, max_streams=8)
    with watched(engine):
        texts = engine.run(ASKED) if together else one_by_one(engine)

    assert texts == plain(family)
    # Blocks of 4 tokens: b shares 38 + 2 tokens with a, c 38, "a again" 41, "nothing" all but its last of 38.
    assert together or hits(engine) == 40 + 36 + 40 + 36
    assert hits(engine) > 36
    assert engine._metrics.prefix_query_tokens._value.get() >= sum(len(r.prompt_ids) for r in ASKED)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_findable_block_holds_what_a_plain_prefill_computes(
    family: str, make_runner: RunnerFactory, plain: Plain
) -> None:
    """Bit for bit, all layers, after trees whose side branches were accepted: those are never handed on."""
    engine = Engine(make_runner(family), token_budget=48, max_streams=3, drafter=Sideways(plain(family)))
    with watched(engine) as moved:
        texts = engine.run(ASKED)
    assert texts == plain(family) and sum(moved) > 20

    compared = 0
    for request in ASKED:
        tokens = [*request.prompt_ids, *texts[request.id]]
        fresh = Engine(make_runner(family), token_budget=256, max_streams=1, prefix_cache=False)
        stream = fresh.add_prefill(request, epoch=0, token_ids=tokens)
        fresh.step()
        hashes: list[bytes] = []
        salt = f"{engine.runner.version}\0"
        engine.pool.extend_hashes(hashes, len(tokens) // 4, np.asarray(tokens, np.int32), salt)
        known = engine.pool.adopt("check", hashes)
        assert bool((kv_of(engine, "check", known) == kv_of(fresh, stream.key, known)).all())
        engine.pool.free("check")
        compared += known
    assert compared > 200


def kv_of(engine: Engine, owner: str, num_tokens: int) -> Tensor:
    """[layers, 2, n, G, D]"""
    cache = engine.runner.cache
    slots = cache.slots(engine.pool.table(owner), 0, num_tokens)
    return torch.stack([cache.gather(layer, slots) for layer in range(cache.layout.num_layers)])


def test_a_block_that_was_tampered_with_changes_the_text(make_runner: RunnerFactory, plain: Plain) -> None:
    """Negative control: what was found in the cache is what attention reads."""
    engine = Engine(make_runner("llama"), token_budget=256, max_streams=8)
    before = one_by_one(engine, ASKED[:1])
    slots = engine.runner.cache.slots(sorted(engine.pool._hash_of)[:9], 0, 36)
    # Swapping rows would change nothing, attention does not mind their order: all become the first token's.
    engine.runner.cache.move(slots[:1].expand(36), slots)
    texts = one_by_one(engine, [ASKED[0], ASKED[2]])

    assert before["a"] == plain("llama")["a"]
    assert texts["a"] != plain("llama")["a"] and texts["c"] != plain("llama")["c"]


def test_answers_are_found_too(make_runner: RunnerFactory, plain: Plain) -> None:
    """The next turn of a conversation: prompt and answer are the beginning of the next prompt."""
    engine = Engine(make_runner("llama"), token_budget=256, max_streams=8)
    answer = one_by_one(engine, ASKED[:1])["a"]
    turn = ask("turn", 7, 8, 9, *answer, 30, 31)
    text = one_by_one(engine, [turn])
    alone = Engine(make_runner("llama"), token_budget=256, max_streams=8, prefix_cache=False)

    assert text == one_by_one(alone, [turn])
    assert hits(engine) == (38 + 3 + LENGTH - 1) // 4 * 4  # the last token of an answer is never computed


def test_tenants_do_not_share(make_runner: RunnerFactory, plain: Plain) -> None:
    """The same prompt under two salts is computed twice, under one salt once."""
    engine = Engine(make_runner("llama"), token_budget=256, max_streams=8)
    salted = [msgspec.structs.replace(ASKED[0], id=name, cache_salt=name[0]) for name in ("x1", "y1", "x2")]
    found = []
    for request in salted:
        assert one_by_one(engine, [request])[request.id] == plain("llama")["a"]
        found.append(hits(engine))

    assert found == [0, 0, 40]


def test_a_prompt_that_ends_at_once_stays_findable(make_runner: RunnerFactory) -> None:
    """One output token: prompt, answer and end are one step."""
    engine = Engine(make_runner("llama"), token_budget=256, max_streams=8)
    for name in ("first", "second"):
        one_by_one(engine, [msgspec.structs.replace(ask(name, 3), max_tokens=1)])

    assert hits(engine) == 36


def test_a_broken_stream_leaves_nothing_to_find(model_folder: Callable[[str], Path]) -> None:
    """NaN in the KV of a prompt: the blocks are not handed to the next one."""
    folder = model_folder("llama")
    model = load_model(folder, load_model_config(folder))
    model.get_input_embeddings().weight.data[100] = torch.nan
    engine = Engine(
        ModelRunner(model, "poisoned", num_blocks=64, block_size=4), token_budget=8, max_streams=8
    )
    engine.add(ask("broken", 100, 7, 7, 7, 7, 7, 7))
    finish = None
    while len(engine.scheduler):
        finish = [e.finish for e in engine.step().emissions]

    assert finish == ["error"] and engine.pool.num_findable == 0 and engine.pool.num_free == 64
    engine.scheduler.check_integrity()


def test_engines_that_take_turns_on_one_pool_do_not_read_each_others_blocks(
    make_runner: RunnerFactory, plain: Plain
) -> None:
    """Two engines, one runner: each starts its cache anew when the other has written."""
    runner = make_runner("llama", num_blocks=24)
    engines = [Engine(runner, token_budget=256, max_streams=1) for _ in range(2)]
    for index, request in enumerate(ASKED * 2):
        text = one_by_one(engines[index % 2], [request])
        assert text == {request.id: plain("llama")[request.id]}

    assert hits(engines[0]) == hits(engines[1]) == 0


def test_received_kv_is_shared_after_the_first_step(make_runner: RunnerFactory, plain: Plain) -> None:
    """A blocked stream's blocks are its own while rows arrive; once it runs, others begin with them."""
    source = Engine(make_runner("llama"), token_budget=256, max_streams=1, prefix_cache=False)
    sent = source.add_prefill(ASKED[0], epoch=0, token_ids=ASKED[0].prompt_ids[:-1])
    source.step()
    engine = Engine(make_runner("llama"), token_budget=256, max_streams=8)
    stream = engine.add(ASKED[0], blocked=True)
    assert engine.pool.try_extend(stream.key, sent.num_tokens)
    cache = engine.runner.cache
    slots = cache.slots(engine.pool.table(stream.key), 0, sent.num_tokens)
    for layer, rows in enumerate(kv_of(source, sent.key, sent.num_tokens)):
        cache.scatter(layer, slots, rows)
    assert not engine.has_work and engine.pool.num_findable == 0
    stream.num_computed, stream.is_blocked = sent.num_tokens, False
    first = [token for e in engine.step().emissions for token in e.tokens]
    assert engine.pool.num_findable == 10
    engine.remove(stream)
    texts = engine.run([ASKED[2]])

    assert texts["c"] == plain("llama")["c"] and hits(engine) == 36
    assert first == plain("llama")["a"][: len(first)]


def test_drafts_of_known_beginnings_are_the_same_and_cost_less(make_runner: RunnerFactory) -> None:
    """A draft engine with a cache proposes what one without proposes; what it found was not computed."""
    rows: dict[bool, int] = {}
    trees = {}
    for cached in (False, True):
        engine = DraftEngine(make_runner("llama"), token_budget=64, prefix_cache=cached)
        forward = engine.runner.forward
        rows[cached], trees[cached] = 0, []

        def counted(batch, cached=cached, forward=forward):  # type: ignore[no-untyped-def]
            rows[cached] += len(batch.input_ids)
            return forward(batch)

        engine.runner.forward = counted  # type: ignore[method-assign]
        with watched(engine):
            for index, salt in enumerate(["", "", "x", ""]):
                tokens = (*SYSTEM, 40 + index, 41)
                engine.open("s", DraftOpen("s", tokens, Sampling(1), len(tokens), cache_salt=salt))
                for _ in range(2):  # asked again, the last token is computed again
                    trees[cached] += engine.propose(["s"], 3, 2)[0]
                spine = trees[cached][-1].tokens[:3]
                assert engine.advance("s", len(tokens), trees[cached][-1].prefix_hash, spine)
                trees[cached] += engine.propose(["s"], 3, 2)[0]
                engine.pool.check_integrity()
                engine.close("s")
        assert hits(engine) == (72 if cached else 0)

    assert trees[True] == trees[False]
    assert rows[True] == rows[False] - 72


# --- between workers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    h.tiny_model(folder / "target", seed=0)
    h.tiny_model(folder / "draft", seed=0)
    return folder


@pytest.mark.parametrize("setting", ["true", "false"])
async def test_a_prefill_worker_sends_what_it_found_like_what_it_computed(models: Path, setting: str) -> None:
    """The second prompt is mostly adopted, arrives whole over the link in pieces, and gives the same text."""
    prompt = h.prompt(150, seed=3)
    asked = [h.request(f"r{i}", (*prompt, 9 + i), 12) for i in range(3)]
    config = [f"kv.prefix_cache={setting}", "prefill.token_budget=64", "speculation.enabled=false"]
    config.append("kv.min_remote_tokens=1")
    async with h.cluster(models, *config) as cluster:
        prefill = await cluster.add(PrefillWorker, "0")
        decode = await cluster.add(DecodeWorker, "0")
        outcomes = []
        for one in asked:
            decode.post(decode._engine.pool.forget_all)  # what it still holds would not be sent at all
            outcomes.append(await cluster.run(one))
        found = hits(prefill._engine)

    alone = Engine(prefill._engine.runner, token_budget=256, max_streams=1, prefix_cache=False)
    assert [tokens for tokens, _ in outcomes] == [alone.run([one])[one.id] for one in asked]
    assert [report.kv_sources for _, report in outcomes] == [["link"]] * 3
    assert len({report.kv_bytes for _, report in outcomes}) == 1
    assert found == (2 * 144 if setting == "true" else 0)
