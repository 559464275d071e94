"""Requests -> one text, the oracle's, in every mode of the engine and for every family of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import oracle
from paceline.cluster.errors import RequestError
from paceline.cluster.scheduler import Plan, Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_DRAFT, FinishReason, Request, Sampling
from paceline.workers.drafters.base import Drafter
from paceline.workers.engine import Emission, Engine
from paceline.workers.model_runner import BatchBuilder, ModelRunner, load_model, load_model_config

VOCAB = 211
LENGTH = 24
FAMILIES = ["llama", "qwen3", "gemma3", "mistral", "mixtral"]
Texts = dict[str, list[int]]
RunnerFactory = Callable[..., ModelRunner]


def request(name: str, num_prompt: int, sampling: Sampling, **how: object) -> Request:
    """A request with a random prompt of its own."""
    ids = np.random.default_rng(num_prompt).integers(3, VOCAB, num_prompt)
    return Request(name, tuple(ids.tolist()), sampling, LENGTH, **how)  # type: ignore[arg-type]


REQUESTS = [
    request("greedy", 5, Sampling(1, 0.0)),
    request("plain", 17, Sampling(2)),
    request("one token", 1, Sampling(3, 1.3, 0, 0.9)),
    request("long", 33, Sampling(2**64 - 1, 0.6, 20)),
    request("choice", 9, Sampling(5, 1.0, 0, 1.0, 0.05, choice=3, prompt_index=2)),
    request("all filters", 2, Sampling(6, 0.9, 50, 0.95, 0.01)),
]


class NoisyDrafter(Drafter):
    """Knows the text and errs: wrong siblings come first, so an accepted path is never the first nodes."""

    name = "noisy"

    def __init__(
        self, texts: Texts, *, error: float = 0.15, depth: int = 4, distractors: int = 2, never: int = -1
    ) -> None:
        self.texts, self.error, self.depth, self.distractors = texts, error, depth, distractors
        self.never = never
        self.opened: list[str] = []
        self.closed: list[str] = []
        self._random = np.random.default_rng(3)

    def open(self, stream: Stream) -> None:
        self.opened.append(stream.key)

    def observe(self, streams: Sequence[Stream]) -> None:
        pass

    def close(self, stream: Stream) -> None:
        self.closed.append(stream.key)

    def version(self, stream: Stream) -> str:
        return "noisy-1"

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        return [self._tree(stream) for stream in streams]

    def _tree(self, stream: Stream) -> Tree | None:
        future = self.texts[stream.request.id][stream.num_output : stream.num_output + self.depth]
        tokens: list[int] = []
        parents: list[int] = []
        spine = -1
        for token in future:
            above = spine
            for _ in range(int(self._random.integers(0, self.distractors + 1))):
                wrong = int((token + self._random.integers(1, VOCAB)) % VOCAB)
                tokens += [wrong, int(self._random.integers(VOCAB))]  # a wrong sibling and a child of it
                parents += [above, len(tokens) - 2]
            is_wrong = self._random.random() < self.error
            tokens.append((token + 1) % VOCAB if is_wrong else token)
            parents.append(above)
            spine = len(tokens) - 1
        tokens = [0 if token == self.never else token for token in tokens]
        return Tree.build(int(stream.token_ids[-1]), tokens, parents) if tokens else None


@dataclass
class Outcome:
    """What a run produced, and how."""

    texts: Texts = field(default_factory=dict)
    ends: dict[str, FinishReason | None] = field(default_factory=dict)
    emissions: list[Emission] = field(default_factory=list)
    num_steps: int = 0
    num_moved: int = 0
    num_preempted: int = 0

    @property
    def num_accepted(self) -> int:
        return sum(emission.sources.count(SOURCE_DRAFT) for emission in self.emissions)


def drive(engine: Engine, requests: Sequence[Request] = (), *, limit: int = 5000) -> Outcome:
    """Add requests and step to the end; books are checked after every step and must be empty at the end."""
    outcome = Outcome()
    move = engine.runner.cache.move

    def counted(source: torch.Tensor, destination: torch.Tensor) -> None:
        outcome.num_moved += len(source)
        move(source, destination)

    engine.runner.cache.move = counted  # type: ignore[method-assign]
    for one in requests:
        engine.add(one)
    while len(engine.scheduler):
        result = engine.step()
        outcome.num_steps += 1
        outcome.emissions.extend(result.emissions)
        engine.scheduler.check_integrity()
        assert outcome.num_steps < limit, "no progress"
        for emission in result.emissions:
            text = outcome.texts.setdefault(emission.stream.request.id, [])
            text.extend(emission.tokens)
            if emission.finish is not None:
                outcome.ends[emission.stream.request.id] = emission.finish
                outcome.num_preempted += emission.stream.num_preempted
    assert engine.pool.num_used == 0
    engine.runner.cache.move = move  # type: ignore[method-assign]
    return outcome


@pytest.fixture(scope="session")
def plain_texts(make_runner: RunnerFactory) -> Callable[[str], Texts]:
    """Family -> texts without speculation, all requests in one batch."""
    made: dict[str, Texts] = {}

    def texts(family: str) -> Texts:
        if family not in made:
            engine = Engine(make_runner(family), token_budget=256, max_streams=8)
            made[family] = drive(engine, REQUESTS).texts
        return made[family]

    return texts


# --- one text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_says_what_the_oracle_says(
    family: str,
    plain_texts: Callable[[str], Texts],
    oracle_model: Callable[[str], PreTrainedModel],
    record_property,  # type: ignore[no-untyped-def]
) -> None:
    """Each token of each request equals transformers' full recompute and a float64 sampler."""
    near_ties = 0
    for one in REQUESTS:
        names = ("seed", "temperature", "top_k", "top_p", "min_p", "choice", "prompt_index")
        params = oracle.Params(**{name: getattr(one.sampling, name) for name in names})
        text = plain_texts(family)[one.id]
        near_ties += oracle.assert_same_text(text, oracle_model(family), list(one.prompt_ids), params, LENGTH)
    record_property("near_ties", near_ties)

    assert near_ties == 0
    assert len({token for text in plain_texts(family).values() for token in text}) > 30  # not a stuck model


@pytest.mark.parametrize("family", FAMILIES)
def test_draft_trees_leave_the_text_alone(
    family: str, make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """Right drafts, wrong drafts and distractors: same text, fewer steps, and KV really moved."""
    drafter = NoisyDrafter(plain_texts(family))
    outcome = drive(Engine(make_runner(family), token_budget=256, max_streams=8, drafter=drafter), REQUESTS)

    assert outcome.texts == plain_texts(family)
    assert outcome.num_steps < LENGTH
    assert outcome.num_accepted > LENGTH
    assert outcome.num_moved > 10
    assert sorted(drafter.opened) == sorted(drafter.closed)


@pytest.mark.parametrize("compares", [True, False])
def test_proposals_are_compared_with_the_text_where_somebody_asks(
    compares: bool, make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """What was accepted was right, and some of what was put to the test was wrong."""
    family = FAMILIES[0]
    drafter = NoisyDrafter(plain_texts(family))
    engine = Engine(
        make_runner(family), token_budget=256, max_streams=8, drafter=drafter, compares_drafts=compares
    )
    outcome = drive(engine, REQUESTS)
    tested = sum(emission.num_tested for emission in outcome.emissions)
    right = sum(emission.num_right for emission in outcome.emissions)

    assert outcome.num_accepted > 0
    assert tested > right >= outcome.num_accepted if compares else tested == right == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("draft", [False, True])
def test_preemption_leaves_the_text_alone(
    family: str, draft: bool, make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """A pool for a third of the streams: blocks are taken away and computed again."""
    drafter = NoisyDrafter(plain_texts(family)) if draft else None
    engine = Engine(make_runner(family, num_blocks=17), token_budget=64, max_streams=8, drafter=drafter)
    outcome = drive(engine, REQUESTS)

    assert outcome.texts == plain_texts(family)
    assert outcome.num_preempted > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("budget", "block_size"), [(5, 4), (7, 1), (16, 16)])
def test_chunked_prefill_leaves_the_text_alone(
    family: str, budget: int, block_size: int, make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """Few tokens a step: prompts come in pieces while others decode, and trees are cut to what is left."""
    runner = make_runner(family, num_blocks=256, block_size=block_size)
    engine = Engine(runner, token_budget=budget, max_streams=8, drafter=NoisyDrafter(plain_texts(family)))
    outcome = drive(engine, REQUESTS)

    assert outcome.texts == plain_texts(family)
    assert outcome.num_accepted > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_batch_leaves_the_text_alone(
    family: str, make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """One stream at a time, with and without trees; alone, acceptance shows in the steps."""
    for one in REQUESTS:
        plain = drive(Engine(make_runner(family), token_budget=64, max_streams=1), [one])
        drafter = NoisyDrafter(plain_texts(family))
        engine = Engine(make_runner(family), token_budget=64, max_streams=1, drafter=drafter)
        drafted = drive(engine, [one])

        assert plain.texts == drafted.texts == {one.id: plain_texts(family)[one.id]}
        assert plain.num_steps == LENGTH
        assert drafted.num_steps <= LENGTH // 2


def test_streams_beyond_the_limit_wait_and_keep_their_text(
    make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """Two at a time of six."""
    drafter = NoisyDrafter(plain_texts("llama"))
    outcome = drive(Engine(make_runner("llama"), token_budget=64, max_streams=2, drafter=drafter), REQUESTS)

    assert outcome.texts == plain_texts("llama")


def test_requests_that_opt_out_are_never_drafted_for(
    make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """`speculate=False` beside drafted streams: no draft node, no call to the drafter, the same text."""
    drafter = NoisyDrafter(plain_texts("llama"))
    mixed = [msgspec.structs.replace(one, speculate=i % 2 == 0) for i, one in enumerate(REQUESTS)]
    outcome = drive(Engine(make_runner("llama"), token_budget=256, max_streams=8, drafter=drafter), mixed)
    plain = [e for e in outcome.emissions if not e.stream.request.speculate]

    assert outcome.texts == plain_texts("llama")
    assert outcome.num_accepted > 0
    assert not any(e.num_drafted or SOURCE_DRAFT in e.sources or len(e.tokens) != 1 for e in plain)
    assert {key.split("/")[0] for key in drafter.opened} == {one.id for one in mixed if one.speculate}


def test_a_drafter_that_is_always_wrong_costs_no_token(
    make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """No draft is ever right: every step still emits one token."""
    drafter = NoisyDrafter(plain_texts("llama"), error=1.0)
    outcome = drive(Engine(make_runner("llama"), token_budget=256, max_streams=8, drafter=drafter), REQUESTS)

    assert outcome.texts == plain_texts("llama")
    assert outcome.num_steps <= LENGTH


def test_another_seed_gives_another_text(
    make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """Negative control: equal texts above are no accident of a model that knows only one."""
    others = [
        msgspec.structs.replace(
            one, sampling=msgspec.structs.replace(one.sampling, seed=one.sampling.seed ^ 1)
        )
        for one in REQUESTS
    ]
    texts = drive(Engine(make_runner("llama"), token_budget=256, max_streams=8), others).texts

    assert texts["greedy"] == plain_texts("llama")["greedy"]
    assert all(texts[one.id] != plain_texts("llama")[one.id] for one in others if one.id != "greedy")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_long_mixed_traffic_says_what_the_oracle_says(
    family: str,
    make_runner: RunnerFactory,
    oracle_model: Callable[[str], PreTrainedModel],
    record_property,  # type: ignore[no-untyped-def]
) -> None:
    """40 requests of 60 tokens, drafted, preempted and chunked at once, against the oracle."""
    generator = np.random.default_rng(77)
    requests = [
        Request(
            f"r{i}",
            tuple(generator.integers(3, VOCAB, int(generator.integers(1, 60))).tolist()),
            Sampling(i, float(generator.choice([0.0, 0.7, 1.0])), int(generator.choice([0, 30])), 0.95),
            60,
        )
        for i in range(40)
    ]
    plain = drive(Engine(make_runner(family, num_blocks=2000), token_budget=512, max_streams=40), requests)
    engine = Engine(
        make_runner(family, num_blocks=90), token_budget=48, max_streams=12, drafter=NoisyDrafter(plain.texts)
    )
    outcome = drive(engine, requests)
    near_ties = sum(
        oracle.assert_same_text(
            outcome.texts[one.id],
            oracle_model(family),
            list(one.prompt_ids),
            oracle.Params(
                one.sampling.seed, one.sampling.temperature, one.sampling.top_k, one.sampling.top_p
            ),
            60,
        )
        for one in requests
    )
    record_property("near_ties", near_ties)

    assert outcome.texts == plain.texts
    assert outcome.num_preempted > 0 and outcome.num_accepted > 0
    assert near_ties <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_depend_on_the_streams_beside_them(family: str, make_runner: RunnerFactory) -> None:
    """The whole model, bit for bit (but for experts): a prompt alone, and packed before or behind chunks and trees of others."""
    ids = np.arange(3, 19, dtype=np.int32)
    tree = Tree.build(9, [4, 5, 6, 7], [-1, 0, -1, 2])

    def logits(before: int, behind: int, *, with_tree: bool) -> torch.Tensor:
        runner = make_runner(family)
        builder = BatchBuilder(runner.cache)
        if before:
            builder.add_chunk(
                list(range(40, 60)), np.arange(50, 50 + before, dtype=np.int32), 0, keep_last=False
            )
        builder.add_chunk(list(range(20)), ids, 0, keep_last=True)
        if with_tree:
            builder.add_tree(list(range(60, 80)), tree, 0)
        if behind:
            builder.add_chunk(
                list(range(80, 100)), np.arange(90, 90 + behind, dtype=np.int32), 0, keep_last=True
            )
        return runner.forward(builder.build()[0])[0]

    alone = logits(0, 0, with_tree=False)
    # transformers computes experts by plain matrix products over the rows each was sent: not packed, not bitwise.
    tolerance = 1e-5 if family == "mixtral" else 0.0
    for before, behind, with_tree in [
        (1, 0, False),
        (0, 1, False),
        (5, 9, True),
        (0, 0, True),
        (20, 20, True),
    ]:
        assert float((logits(before, behind, with_tree=with_tree) - alone).abs().max()) <= tolerance


# --- KV -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_after_tree_commits_equals_kv_of_plain_decoding(
    family: str, make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """After every step, all layers, K and V: accepted rows stand where plain decoding would have put them."""
    one = REQUESTS[1]
    engine = Engine(make_runner(family), token_budget=64, max_streams=1)
    stream = engine.add(one)
    while stream.num_output < LENGTH - 1:
        engine.step()
    expected = kv_of(engine, stream)
    drafter = NoisyDrafter(plain_texts(family))
    drafted = Engine(make_runner(family), token_budget=64, max_streams=1, drafter=drafter)
    other = drafted.add(one)
    compared = []
    while len(drafted.scheduler):
        drafted.step()
        if other.num_output < LENGTH:
            ours = kv_of(drafted, other)
            num = min(ours.shape[2], expected.shape[2])
            assert float((ours[:, :, :num] - expected[:, :, :num]).abs().max()) <= 1e-5
            compared.append(num)

    assert len(compared) >= 4 and max(compared) > len(one.prompt_ids) + LENGTH // 2


def kv_of(engine: Engine, stream: Stream) -> torch.Tensor:
    """[layers, 2, num_computed, G, D]: the committed KV of a stream."""
    cache = engine.runner.cache
    slots = cache.slots(engine.pool.table(stream.key), 0, stream.num_computed)
    return torch.stack([cache.gather(layer, slots) for layer in range(cache.layout.num_layers)])


def test_a_prefill_stream_computes_the_same_kv_and_samples_nothing(make_runner: RunnerFactory) -> None:
    """Chunked, with the hook called once a layer and step, after which its rows are in the pool."""
    one = REQUESTS[3]
    engine = Engine(make_runner("gemma3"), token_budget=64, max_streams=2)
    stream = engine.add(one)
    engine.step()
    expected = kv_of(engine, stream)[:, :, : len(one.prompt_ids) - 1]
    other = Engine(make_runner("gemma3"), token_budget=7, max_streams=2)
    prefill = other.add_prefill(one, epoch=4, token_ids=one.prompt_ids[:-1])
    calls: list[tuple[int, int]] = []

    def hook(plan: Plan, layer: int) -> None:
        segment = plan.segments[0]
        calls.append((segment.start, layer))
        stop = segment.start + segment.num_rows
        slots = other.runner.cache.slots(other.pool.table(prefill.key), segment.start, stop)
        rows = other.runner.cache.gather(layer, slots)
        assert float((rows - expected[layer][:, segment.start : stop]).abs().max()) <= 1e-5

    computed: list[Stream] = []
    while not computed:
        result = other.step(hook)
        assert not result.emissions
        computed = result.computed

    assert computed == [prefill] and prefill.num_computed == len(one.prompt_ids) - 1
    assert calls == [(start, layer) for start in range(0, 32, 7) for layer in range(3)]
    assert float((kv_of(other, prefill) - expected).abs().max()) <= 1e-5
    other.remove(prefill)
    assert other.pool.num_used == 0


def test_a_blocked_stream_waits_for_its_kv(
    make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """While KV is on the way the stream is not run; given up, it computes its prompt itself."""
    engine = Engine(make_runner("llama"), token_budget=64, max_streams=2)
    stream = engine.add(REQUESTS[0], blocked=True)

    assert not engine.has_work and not engine.step().emissions
    stream.is_blocked = False
    assert drive(engine).texts == {"greedy": plain_texts("llama")["greedy"]}


# --- ends -----------------------------------------------------------------------------------------------


def first_seen(text: list[int], at: int) -> int:
    """The first index >= at whose token did not occur before."""
    return next(i for i in range(at, len(text)) if text[i] not in text[:i])


@pytest.mark.parametrize("name", ["plain", "long", "choice"])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 6, 11])
def test_a_stop_token_inside_an_accepted_path_cuts_it(
    name: str, at: int, make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """The path goes on behind the stop token; the text does not."""
    text = plain_texts("llama")[name]
    at = first_seen(text, at)
    one = next(r for r in REQUESTS if r.id == name)
    one = msgspec.structs.replace(one, stop_ids=(text[at], VOCAB - 1))
    drafter = NoisyDrafter(plain_texts("llama"), error=0.0, depth=20)
    drafted = drive(Engine(make_runner("llama"), token_budget=256, max_streams=8, drafter=drafter), [one])
    plain = drive(Engine(make_runner("llama"), token_budget=256, max_streams=8), [one])

    assert drafted.texts == plain.texts == {name: text[: at + 1]}
    assert drafted.ends == plain.ends == {name: "stop"}
    last = drafted.emissions[-1]
    assert len(last.sources) == len(last.tokens)
    if at > 0:  # the first token is the last prompt row's
        assert last.sources[-1] == SOURCE_DRAFT


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8, 13])
def test_max_tokens_ends_a_text_inside_a_path(
    max_tokens: int, make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """Drafts that reach past the limit change nothing; not one token more, and no KV past it."""
    drafter = NoisyDrafter(plain_texts("llama"), error=0.0, depth=20)
    requests = [msgspec.structs.replace(one, max_tokens=max_tokens) for one in REQUESTS]
    engine = Engine(make_runner("llama"), token_budget=512, max_streams=8, drafter=drafter)
    outcome = drive(engine, requests)

    assert outcome.texts == {name: text[:max_tokens] for name, text in plain_texts("llama").items()}
    assert set(outcome.ends.values()) == {"length"}
    assert outcome.num_steps <= 3


def test_a_drafter_that_ignores_the_trim_cannot_exceed_max_tokens(
    make_runner: RunnerFactory, plain_texts: Callable[[str], Texts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cut holds by itself, even were trees not cut to the stream's length."""
    drafter = NoisyDrafter(plain_texts("llama"), error=0.0, depth=20, distractors=0)
    engine = Engine(make_runner("llama"), token_budget=512, max_streams=8, drafter=drafter)

    def attach(plan: Plan, segment, tree: Tree) -> None:  # type: ignore[no-untyped-def]
        assert engine.pool.try_extend(segment.stream.key, segment.stream.num_computed + len(tree))
        segment.tree, segment.num_rows = tree, len(tree)

    monkeypatch.setattr(engine.scheduler, "attach", attach)
    requests = [msgspec.structs.replace(one, max_tokens=5) for one in REQUESTS]
    outcome = drive(engine, requests)

    assert outcome.texts == {name: text[:5] for name, text in plain_texts("llama").items()}
    assert all(e.sources[-1] == SOURCE_DRAFT for e in outcome.emissions if e.finish)


@pytest.mark.parametrize("known", [1, 2, 5, 23])
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_resumed_stream_goes_on_with_the_same_text(
    family: str, known: int, draft: bool, make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """Another worker takes over with the tokens already emitted, under a new epoch."""
    drafter = NoisyDrafter(plain_texts(family)) if draft else None
    engine = Engine(make_runner(family), token_budget=16, max_streams=8, drafter=drafter)
    for one in REQUESTS:
        engine.add(one, epoch=2, resumed=plain_texts(family)[one.id][:known])
    outcome = drive(engine)
    firsts = {e.stream.request.id: e.start for e in reversed(outcome.emissions)}

    assert outcome.texts == {name: text[known:] for name, text in plain_texts(family).items()}
    assert set(firsts.values()) == {known}
    assert set(outcome.ends.values()) == {"length"}


def test_a_cancelled_stream_leaves_nothing_behind(
    make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """Removed in the middle of a prompt and in the middle of a text; the others go on undisturbed."""
    drafter = NoisyDrafter(plain_texts("llama"))
    engine = Engine(make_runner("llama"), token_budget=16, max_streams=8, drafter=drafter)
    streams = [engine.add(one) for one in REQUESTS]
    first = [engine.step() for _ in range(3)]
    for index in (1, 3):
        engine.remove(streams[index])
        engine.scheduler.check_integrity()
    texts: Texts = {}
    for result in first:
        for emission in result.emissions:
            texts.setdefault(emission.stream.request.id, []).extend(emission.tokens)
    for name, text in drive(engine).texts.items():
        texts.setdefault(name, []).extend(text)

    assert all(texts[r.id] == plain_texts("llama")[r.id] for i, r in enumerate(REQUESTS) if i not in (1, 3))
    assert sorted(drafter.opened) == sorted(drafter.closed)


# --- faults ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned(
    model_folder: Callable[[str], Path], plain_texts: Callable[[str], Texts]
) -> tuple[ModelRunner, int]:
    """A Llama that gives NaN behind one token, and that token; no text above contains it."""
    used = {t for text in plain_texts("llama").values() for t in text} | {
        t for r in REQUESTS for t in r.prompt_ids
    }
    poison = next(token for token in range(3, VOCAB) if token not in used)
    folder = model_folder("llama")
    model = load_model(folder, load_model_config(folder))
    model.get_input_embeddings().weight.data[poison] = torch.nan
    return ModelRunner(model, "poisoned", num_blocks=64, block_size=4), poison


@pytest.mark.parametrize("draft", [False, True])
def test_nan_logits_end_their_own_stream_and_nothing_else(
    draft: bool, poisoned: tuple[ModelRunner, int], plain_texts: Callable[[str], Texts]
) -> None:
    """An error with a position for one; the same text as ever for the others, before and after in the pool."""
    runner, poison = poisoned
    texts = {**plain_texts("llama"), "broken": [5] * LENGTH}
    drafter = NoisyDrafter(texts, never=poison) if draft else None
    engine = Engine(runner, token_budget=64, max_streams=8, drafter=drafter)
    broken = Request("broken", (8, poison, 9, 10, 11, 12), Sampling(1), LENGTH)
    greedy = msgspec.structs.replace(broken, id="broken too", sampling=Sampling(1, 0.0), speculate=False)
    outcome = drive(engine, [REQUESTS[0], broken, *REQUESTS[1:3], greedy, *REQUESTS[3:]])
    again = drive(engine, REQUESTS)  # NaN rows of freed blocks are still in the pool
    ends = [e for e in outcome.emissions if e.finish == "error"]

    assert {e.stream.request.id for e in ends} == {"broken", "broken too"}
    assert all(e.tokens == () and e.error == "the model gave no usable logits at position 6" for e in ends)
    assert {n: t for n, t in outcome.texts.items() if t} == plain_texts("llama") == again.texts


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_unusable_rows_of_a_tree_cost_a_step_and_nothing_else(
    error: float,
    make_runner: RunnerFactory,
    plain_texts: Callable[[str], Texts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tree with unusable rows on its accepted path is computed again as a plain step."""
    drafter = NoisyDrafter(plain_texts("llama"), error=error, distractors=0)
    engine = Engine(make_runner("llama"), token_budget=64, max_streams=1, drafter=drafter)
    forward = engine._forward

    def all_but_the_root(plan: Plan, *hooks: Any) -> tuple[np.ndarray, np.ndarray]:
        decided, usable = forward(plan, *hooks)
        usable = usable.copy()
        usable[1:] = False
        return decided, usable

    monkeypatch.setattr(engine, "_forward", all_but_the_root)
    outcome = drive(engine, [REQUESTS[0]])

    assert outcome.ends == {"greedy": "length"}
    assert outcome.texts["greedy"] == plain_texts("llama")["greedy"]


def test_a_draft_node_with_nan_does_not_harm_its_stream(
    poisoned: tuple[ModelRunner, int], plain_texts: Callable[[str], Texts]
) -> None:
    """A proposed token the target cannot digest is wrong like any other wrong proposal."""
    runner, poison = poisoned

    class Poisoner(NoisyDrafter):
        def _tree(self, stream: Stream) -> Tree | None:
            return Tree.build(int(stream.token_ids[-1]), [poison], [-1])

    engine = Engine(runner, token_budget=64, max_streams=8, drafter=Poisoner({}))
    outcome = drive(engine, REQUESTS[:1])

    assert outcome.texts["greedy"] == plain_texts("llama")["greedy"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (range(3, 40), 28, r"37 prompt \+ 28 new tokens: expected 1\.\.64 together"),
        ((), 4, r"0 prompt \+ 4 new tokens: expected 1\.\.64 together"),
        ((5, VOCAB), 4, r"prompt: token ids must be in 0\.\.210"),
        ((-1, 5), 4, r"prompt: token ids must be in 0\.\.210"),
        ((5, 2**31), 4, r"prompt: token ids must be in 0\.\.210"),
        ((5, -(2**63)), 4, r"prompt: token ids must be in 0\.\.210"),
    ],
)
def test_an_impossible_request_is_refused_with_the_range(
    prompt: Sequence[int], max_tokens: int, message: str, make_runner: RunnerFactory
) -> None:
    """Nothing is admitted, and the message names what would have been possible."""
    engine = Engine(make_runner("llama", num_blocks=16), token_budget=64, max_streams=2)
    one = Request("r", tuple(prompt), Sampling(1), max_tokens)

    with pytest.raises(RequestError, match=message):
        engine.add(one)
    assert len(engine.scheduler) == 0 and engine.pool.num_used == 0


def test_resumed_tokens_are_checked_too(make_runner: RunnerFactory) -> None:
    """What an earlier attempt is said to have emitted comes from outside as well."""
    engine = Engine(make_runner("llama"), token_budget=64, max_streams=2)
    for wrong in (VOCAB, -1, 2**40):
        with pytest.raises(RequestError, match=r"0\.\.210"):
            engine.add(REQUESTS[0], resumed=[4, wrong])
    assert len(engine.scheduler) == 0


def test_the_longest_request_that_fits_runs_to_its_end(make_runner: RunnerFactory) -> None:
    """Exactly the pool, alone and beside another: preempted, never stuck."""
    engine = Engine(make_runner("llama", num_blocks=16), token_budget=16, max_streams=2)
    longest = Request("longest", tuple(range(3, 40)), Sampling(1), 27)
    outcome = drive(engine, [REQUESTS[0], longest])

    assert len(outcome.texts["longest"]) == 27 and len(outcome.texts["greedy"]) == LENGTH
    assert outcome.num_preempted > 0


def test_a_resumed_stream_that_had_all_its_tokens_ends_at_once(
    make_runner: RunnerFactory, plain_texts: Callable[[str], Texts]
) -> None:
    """The worker died between the last token and the end: nothing is emitted twice."""
    engine = Engine(make_runner("llama"), token_budget=64, max_streams=2)
    engine.add(REQUESTS[0], epoch=1, resumed=plain_texts("llama")["greedy"])
    outcome = drive(engine)

    assert outcome.texts == {"greedy": []} and outcome.ends == {"greedy": "length"}
