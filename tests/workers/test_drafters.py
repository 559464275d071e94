"""Every drafter there is, alone and among others under a controller -> the plain run's text and KV.

A drafter joins this suite by being registered. Beside those it holds some that no one would deploy: random trees,
proposals that are always wrong, and an oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from harness import Harness, cluster, request, tiny_model
from paceline.cluster import config as cluster_config
from paceline.cluster.config import DRAFT_SOURCES, SpeculationConfig, load_config
from paceline.cluster.controller import Controller, StepCost
from paceline.cluster.metrics import Metrics
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_NAMES, SOURCE_SUFFIX, Request, Sampling
from paceline.workers.decode import DecodeWorker
from paceline.workers.draft import DraftWorker
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.drafters import base
from paceline.workers.drafters.base import Context, Drafter, make, names, register
from paceline.workers.drafters.fused import FusedDrafter
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner
from paceline.workers.verifiers.base import Verdict

VOCAB = 211
LENGTH = 32
RunnerFactory = Callable[..., ModelRunner]
Texts = dict[str, list[int]]
KV = dict[str, torch.Tensor]


def requests(temperature: float) -> list[Request]:
    """Six of different lengths; their prompts repeat themselves, so copies of the past are sometimes right."""
    return [
        Request(
            f"r{i}",
            (*range(3 + i, 12 + i), *[50 + i, 51, 52] * (1 + i)),
            Sampling(i, temperature),
            LENGTH - i,
        )
        for i in range(6)
    ]


# --- drafters that no one would deploy ------------------------------------------------------------------


class Knowing(Drafter):
    """Base of those that know the text."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._random = np.random.default_rng(8)

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        return [
            self.tree(int(s.token_ids[-1]), self._texts[s.request.id][s.num_output : s.num_output + 4])
            for s in streams
        ]

    def tree(self, root: int, future: list[int]) -> Tree | None:
        raise NotImplementedError


class Oracle(Knowing):
    """Always right."""

    name = "oracle"

    def tree(self, root: int, future: list[int]) -> Tree | None:
        return Tree.build(root, future, list(range(-1, len(future) - 1)), scores=[0.9] * len(future))


class Wrong(Knowing):
    """Always wrong, and sure of itself."""

    name = "wrong"

    def tree(self, root: int, future: list[int]) -> Tree | None:
        tokens = [(token + 1) % VOCAB for token in future]
        return Tree.build(root, tokens, list(range(-1, len(tokens) - 1)), scores=[0.9] * len(tokens))


class Bushes(Knowing):
    """Random trees, with the text somewhere in them and duplicates among siblings."""

    name = "bushes"

    def tree(self, root: int, future: list[int]) -> Tree | None:
        tokens: list[int] = []
        parents: list[int] = []
        at, spine = -1, []
        for right in future:
            for _ in range(int(self._random.integers(0, 3))):
                parents.append(int(self._random.integers(-1, len(tokens))))
                tokens.append(int(self._random.integers(0, VOCAB)))
            tokens.append(right)
            parents.append(at)
            at = len(tokens) - 1
            spine.append(at)
        return Tree.build(root, tokens, parents, scores=self._random.uniform(0.05, 1, len(tokens)).tolist())


TEST_ONLY: dict[str, type[Knowing]] = {"oracle": Oracle, "wrong": Wrong, "bushes": Bushes}


# --- the plain run --------------------------------------------------------------------------------------


def kv_of(engine: Engine, stream: Stream) -> torch.Tensor:
    """[layers, 2, n, G, D]: what the pool holds of the stream's computed tokens."""
    cache = engine.runner.cache
    slots = cache.slots(engine.pool.table(stream.key), 0, stream.num_computed)
    return torch.stack([cache.gather(layer, slots) for layer in range(cache.layout.num_layers)])


@pytest.fixture(scope="module")
def plain(make_runner: RunnerFactory) -> Callable[[float], tuple[Texts, KV]]:
    """Temperature -> each request's text and the KV behind it, from an engine of its own without drafts or chunks."""
    made: dict[float, tuple[Texts, KV]] = {}

    def run(temperature: float) -> tuple[Texts, KV]:
        if temperature not in made:
            texts: Texts = {}
            kv: KV = {}
            for one in requests(temperature):
                engine = Engine(make_runner("llama"), token_budget=256, max_streams=1, prefix_cache=False)
                stream = engine.add(one)
                while len(engine.scheduler):
                    engine.step()
                    if len(engine.scheduler):
                        kv[one.id] = kv_of(engine, stream)
                texts[one.id] = stream.token_ids[stream.num_prompt :].tolist()
            made[temperature] = texts, kv
        return made[temperature]

    return run


def context(make_runner: RunnerFactory, metrics: Metrics | None = None) -> Context:
    """With a draft model in this process that has the target's weights."""
    draft = DraftEngine(make_runner("llama", num_blocks=200), token_budget=64)
    return Context(make_runner("llama"), SpeculationConfig(depth=3), metrics or Metrics(), draft=draft)


def drafter_of(name: str, texts: Texts, made_for: Context) -> Drafter:
    return TEST_ONLY[name](texts) if name in TEST_ONLY else make(name, made_for)


def assert_exact(engine: Engine, temperature: float, plain: Callable[[float], tuple[Texts, KV]]) -> int:
    """Run the requests to their end; the text is the plain one, and at random steps so is the KV. Preemptions."""
    expected, kv = plain(temperature)
    random = np.random.default_rng(1)
    texts: Texts = {}
    num_preempted = num_checked = 0
    for one in requests(temperature):
        engine.add(one)
    for _ in range(2000):
        result = engine.step()
        engine.scheduler.check_integrity()
        for emission in result.emissions:
            texts.setdefault(emission.stream.request.id, []).extend(emission.tokens)
            num_preempted += emission.stream.num_preempted if emission.finish else 0
        for stream in engine.scheduler:
            if stream.num_computed and random.random() < 0.7:
                num = min(stream.num_computed, kv[stream.request.id].shape[2])
                assert torch.equal(kv_of(engine, stream)[:, :, :num], kv[stream.request.id][:, :, :num])
                num_checked += 1
        if not len(engine.scheduler):
            break
    assert texts == expected
    assert engine.pool.num_used == 0 and num_checked > 10
    return num_preempted


# --- exactness ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("budget, num_blocks", [(256, 200), (12, 200), (256, 24)])
@pytest.mark.parametrize("company", ["alone", "fused"])
@pytest.mark.parametrize("name", [*names(), *TEST_ONLY])
def test_every_drafter_gives_the_plain_text_and_kv(
    name: str,
    company: str,
    budget: int,
    num_blocks: int,
    temperature: float,
    make_runner: RunnerFactory,
    plain: Callable[[float], tuple[Texts, KV]],
) -> None:
    """Whole prompts, prompts in chunks, and a pool so small that streams lose their blocks."""
    texts, _ = plain(temperature)
    drafter = drafter_of(name, texts, context(make_runner))
    if company == "fused":
        others = [
            drafter_of(other, texts, context(make_runner)) for other in ("bushes", "suffix") if other != name
        ]
        ticks = iter(range(10**9))
        controller = Controller(StepCost([1, 64], [1.0, 1.5]))
        drafter = FusedDrafter([*others, drafter], controller, clock=lambda: next(ticks) * 1e-4)
    engine = Engine(
        make_runner("llama", num_blocks=num_blocks), token_budget=budget, max_streams=5, drafter=drafter
    )

    num_preempted = assert_exact(engine, temperature, plain)

    assert (num_preempted > 0) == (num_blocks == 24)
    figures = engine._metrics
    verified = sum(figures.verified.labels(source)._value.get() for source in SOURCE_NAMES)
    accepted = sum(figures.accepted.labels(source)._value.get() for source in SOURCE_NAMES)
    if (name, company) == ("wrong", "alone"):
        assert verified > accepted == 0
    elif (name, company, temperature) != ("suffix", "alone", 0.8):  # a random model's samples repeat nothing
        assert accepted > 0


def test_registered_names_are_those_that_a_configuration_may_ask_for() -> None:
    """A drafter has the name that it is registered under, and its tokens carry it."""
    assert sorted(DRAFT_SOURCES) == names()


@pytest.mark.parametrize("name", names())
def test_a_drafter_and_its_tokens_carry_the_name_it_is_registered_under(
    name: str, make_runner: RunnerFactory
) -> None:
    """Here and at a draft worker."""
    here = context(make_runner)
    remote = Context(here.target, here.speculation, here.metrics, lambda worker: None)
    for drafter in (make(name, here), make(name, remote)):
        assert (drafter.name, SOURCE_NAMES[drafter.source]) == (name, name)


def test_an_unknown_drafter_is_refused_by_name(make_runner: RunnerFactory) -> None:
    """With all that there are."""
    with pytest.raises(ValueError, match="drafter 'nobody': expected one of draft, suffix"):
        make("nobody", context(make_runner))


class Refusing:
    """Accepts nothing."""

    name = "refusing"

    def verify(self, tree: Tree, decided: np.ndarray) -> Verdict:
        return Verdict((), int(decided[0]))


def test_the_engine_accepts_what_its_verifier_does(
    make_runner: RunnerFactory, plain: Callable[[float], tuple[Texts, KV]]
) -> None:
    """One that accepts nothing of an oracle's drafts still gives the plain text, a token a step."""
    texts, _ = plain(0.8)
    (one, *_) = requests(0.8)
    runner = make_runner("llama")
    engine = Engine(runner, token_budget=256, max_streams=1, drafter=Oracle(texts), verifier=Refusing())

    assert engine.run([one])[one.id] == texts[one.id]
    assert engine._metrics.steps._value.get() == len(texts[one.id])
    assert engine._metrics.wasted.labels("draft")._value.get() > 0


# --- one more, in one file ------------------------------------------------------------------------------


class Echo(Drafter):
    """Proposes what followed the latest occurrence of the last token, as far as it was told."""

    name = "echo"
    source = SOURCE_SUFFIX

    def __init__(self, context: Context) -> None:
        self._next: dict[tuple[str, int], int] = {}

    def observe(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            tokens = stream.token_ids.tolist()
            self._next.update({(stream.key, a): b for a, b in pairwise(tokens)})

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        found = [(int(s.token_ids[-1]), self._next.get((s.key, int(s.token_ids[-1])))) for s in streams]
        return [
            None if after is None else Tree.build(last, [after], [-1], self.source) for last, after in found
        ]


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Echo is known for one test: to the registry and to configurations."""
    names()
    monkeypatch.setattr(base, "_FACTORIES", dict(base._FACTORIES))
    monkeypatch.setattr(cluster_config, "DRAFT_SOURCES", (*DRAFT_SOURCES, "echo"))
    register("echo")(Echo)


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_of_one_file_is_found_by_name_and_exact(
    temperature: float, make_runner: RunnerFactory, plain: Callable[[float], tuple[Texts, KV]]
) -> None:
    """`propose`, `observe` and `register`, nothing else."""
    asked = load_config(None, ["speculation.sources=[suffix, echo]"]).speculation.sources
    made_for = context(make_runner)
    drafter = FusedDrafter(
        [make(name, made_for) for name in asked], Controller(StepCost([1, 64], [1.0, 1.5]))
    )
    engine = Engine(make_runner("llama"), token_budget=256, max_streams=5, drafter=drafter)

    assert_exact(engine, temperature, plain)
    assert asked == ["suffix", "echo"]


# --- over real connections ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that is the target: what it proposes is right if it arrives."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "target", seed=0)
    tiny_model(folder / "draft", seed=0)
    return folder


async def first_draft(on: Harness) -> None:
    """The decode worker connects to a draft worker for its first stream, which may end sooner than that takes."""
    for number in range(200):
        _, report = await on.run(request(f"first-{number}", [5, 6, 7] * 8, 24, temperature=0.0))
        if report.tokens_by_source.get("draft"):
            return
    raise AssertionError("200 streams, and the draft worker's replies stood in none")


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize("control", ["fixed", "measured"])
@pytest.mark.parametrize("sources", ["[draft]", "[suffix]", "[suffix, draft]", "[echo, draft]"])
async def test_sources_of_a_decode_worker_change_no_text(models: Path, sources: str, control: str) -> None:
    """The remote drafter as deployed, alone and with others; a request that wants no drafts gets none."""
    wanted = [
        request("r", [5, 6, 7] * 8, 24, temperature=0.0),
        request("s", [5, 6, 7] * 8, 24, temperature=0.8),
        request("plain", [5, 6, 7] * 8, 24, temperature=0.8, speculate=False),
    ]
    async with cluster(models, "speculation.enabled=false") as off:
        await off.add(DecodeWorker, "0")
        expected = [(await off.run(one))[0] for one in wanted]

    settings = [
        f"speculation.sources={sources}",
        f"speculation.control={control}",
        "speculation.max_wait_ms=500",
    ]
    async with cluster(models, *settings) as on:
        await on.add(DraftWorker, "0")
        decode = await on.add(DecodeWorker, "0")
        if control == "fixed" and sources != "[suffix]":
            await first_draft(on)
        found = [await on.run(one) for one in wanted]
        text = decode.metrics_text().decode()

    assert [tokens for tokens, _ in found] == expected
    assert found[2][1].num_drafted == 0
    assert "paceline_step_draft_nodes_count" in text
    if control == "fixed":
        assert found[0][1].num_drafted > 0
        assert sources == "[suffix]" or 'paceline_accepted_tokens_total{source="draft"}' in text


async def test_a_stream_that_a_decode_worker_refuses_leaves_nothing_at_its_drafter(models: Path) -> None:
    """It was routed to a draft worker before it turned out to be too long."""
    async with cluster(models, "limits.max_context=64") as on:
        await on.add(DraftWorker, "0")
        decode = await on.add(DecodeWorker, "0")
        assert isinstance(decode, DecodeWorker) and decode._remote is not None
        with pytest.raises(AssertionError, match="expected 1..64 together"):
            await on.run(request("long", range(3, 60), 24))

        assert decode._remote._routes == {}
