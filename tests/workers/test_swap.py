"""Swaps of drafts at every moment of a step, canaries, routes, roll-backs -> the text that there is without drafts.

With negative controls: what would change the text if it could is shown to be caught by the same comparison.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

import harness as h
from draft_folders import TARGET, published
from paceline.cluster import wire
from paceline.cluster.config import ModelConfig
from paceline.cluster.config import model_folder as model_folder_of
from paceline.cluster.controller import Controller, StepCost
from paceline.cluster.learning.publish import fetch
from paceline.cluster.membership import new_incarnation
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import (
    DraftAsk,
    DraftOpen,
    DraftPlan,
    DraftRef,
    Drafts,
    DraftStatus,
    Message,
    Request,
    Sampling,
)
from paceline.deploy.bench.learn.swap import swap_figures
from paceline.workers.decode import DecodeWorker
from paceline.workers.draft import DraftWorker
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.draft_stream import DraftStream
from paceline.workers.draft_versions import Aside, DraftVersions, VersionLoader
from paceline.workers.drafters.base import Drafter
from paceline.workers.drafters.colocated import ColocatedDrafter
from paceline.workers.drafters.fused import FusedDrafter
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner, load_runner
from paceline.workers.verifiers.base import Verdict, Verifier
from paceline.workers.verifiers.match import Match

LENGTH = 40
BLOCK = 4
TENANTS = ("acme", "globex", "")
DOMAINS = ("sql", "", "chat")
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "adjusted": {
        "temperature": 0.7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": ((5, 2.0),),
        "min_tokens": 3,
    },
}
RunnerFactory = Callable[..., ModelRunner]
Texts = dict[str, list[int]]


def requests(how: str) -> list[Request]:
    return [
        Request(
            f"r{i}",
            tuple(range(3 + i, 14 + 2 * i)),
            Sampling(i, **SAMPLINGS[how]),  # type: ignore[arg-type]
            LENGTH - i,
            tenant=TENANTS[i % 3],
            domain=DOMAINS[i // 2],
        )
        for i in range(6)
    ]


@pytest.fixture(scope="module")
def plain(make_runner: RunnerFactory) -> Callable[[str], Texts]:
    """What the target says by itself."""
    made: dict[str, Texts] = {}

    def run(how: str) -> Texts:
        if how not in made:
            made[how] = Engine(make_runner("llama"), token_budget=64, max_streams=8).run(requests(how))
        return made[how]

    return run


@pytest.fixture(scope="module")
def refs(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[DraftRef]:
    """A version near the target, one far from it."""
    place, base = tmp_path_factory.mktemp("published"), model_folder("llama")
    return [published(base, place, seed=seed, noise=noise) for seed, noise in ((1, 0.05), (2, 0.6))]


class Swapping:
    """A draft engine whose base is the target itself, and plans that alternate each time `swap` is called."""

    def __init__(self, base: Path, refs: list[DraftRef], plans: str) -> None:
        runner, _ = load_runner(base, kv_memory_mb=1, block_size=BLOCK)
        self.engine = DraftEngine(runner, token_budget=64)
        load = VersionLoader(base, runner, fetch)
        self.versions = DraftVersions(
            self.engine, load, limit=3, aside=lambda job: job(), post=lambda job: job()
        )
        self._refs = (*refs, DraftRef(runner.version, ""))
        near, far, perfect = (ref.version for ref in self._refs)
        plain = {"live": perfect}
        self._kinds = itertools.cycle(
            {
                "forth and back": [{"live": far}, plain],
                "round": [{"live": near}, {"live": far}, plain],
                "canary": [{"live": perfect, "canary": far, "canary_share": 0.5}, plain, {"live": far}],
                "routes": [
                    {"live": near, "routes": (("tenant:acme", far), ("domain:sql", perfect))},
                    {"live": far, "routes": (("domain:chat", near),)},
                ],
            }[plans]
        )
        self.num_swaps = 0
        self.drafted_by: set[str] = set()

    def swap(self) -> None:
        self.num_swaps += 1
        plan = DraftPlan(self.num_swaps, TARGET, self._refs, "")
        self.versions.receive(msgspec.structs.replace(plan, **next(self._kinds)))
        status = self.versions.status()
        assert (status.revision, status.refused) == (self.num_swaps, ())

    def drafter(self) -> ColocatedDrafter:
        return ColocatedDrafter(self.engine, vocab_size=h.VOCAB, depth=4, width=2)


class Between(Drafter):
    """Another drafter; something happens between its proposal and the target's forward."""

    name = "draft"

    def __init__(self, inner: Drafter, then: Callable[[], None]) -> None:
        self._inner = inner
        self._then = then

    def open(self, stream: Stream) -> None:
        self._inner.open(stream)

    def observe(self, streams: Sequence[Stream]) -> None:
        self._inner.observe(streams)

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        trees = self._inner.propose(streams)
        self._then()
        return trees

    def close(self, stream: Stream) -> None:
        self._inner.close(stream)

    def version(self, stream: Stream) -> str:
        return self._inner.version(stream)


def generate(
    target: ModelRunner,
    how: str,
    drafter: Drafter,
    each_step: Callable[[], None] = lambda: None,
    verifier: Verifier | None = None,
) -> tuple[Texts, int, set[str]]:
    """Texts, accepted draft tokens, and the versions that drafted."""
    engine = Engine(target, token_budget=64, max_streams=8, drafter=drafter, verifier=verifier)
    texts: Texts = {}
    versions: set[str] = set()
    accepted = 0
    for request in requests(how):
        engine.add(request)
        texts[request.id] = []
    while engine.has_work:
        each_step()
        for emission in engine.step().emissions:
            texts[emission.stream.request.id].extend(emission.tokens)
            versions.add(emission.draft_version)
            accepted += sum(map(bool, emission.sources))
    return texts, accepted, versions - {""}


PLANS = ("forth and back", "round", "canary", "routes")


@pytest.mark.parametrize(
    ("moment", "plans", "how"),
    [
        *(("between propose and verify", plans, how) for plans in PLANS for how in SAMPLINGS),
        *(("between steps", plans, "sampled") for plans in PLANS),
        *(("between steps", "round", how) for how in SAMPLINGS),
    ],
)
def test_swaps_change_no_text(
    moment: str,
    plans: str,
    how: str,
    make_runner: RunnerFactory,
    model_folder: Callable[[str], Path],
    refs: list[DraftRef],
    plain: Callable[[str], Texts],
) -> None:
    swapping = Swapping(model_folder("llama"), refs, plans)
    drafter: Drafter = swapping.drafter()
    if moment != "between steps":
        drafter = Between(drafter, swapping.swap)
    each = swapping.swap if moment == "between steps" else lambda: None
    texts, accepted, versions = generate(make_runner("llama"), how, drafter, each)

    assert texts == plain(how)
    assert accepted > 10 and len(versions) >= 2 and swapping.num_swaps > 10
    assert swapping.engine.pool.num_used == 0
    swapping.engine.pool.check_integrity()


@pytest.mark.parametrize("how", list(SAMPLINGS))
def test_a_swap_in_the_middle_of_a_proposal_changes_no_text(
    how: str,
    make_runner: RunnerFactory,
    model_folder: Callable[[str], Path],
    refs: list[DraftRef],
    plain: Callable[[str], Texts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It never falls there; if it did, a tree of two versions would be no more than a worse draft."""
    swapping = Swapping(model_folder("llama"), refs, "round")
    swapping.engine._repeats = False  # level by level, so that there is a middle
    runners = [
        swapping.engine.runner,
        *(
            load_runner(Path(r.url.removeprefix("file://")), kv_memory_mb=1, block_size=BLOCK)[0]
            for r in refs
        ),
    ]
    for runner in runners[1:]:
        swapping.engine.attach(runner)
    turn = itertools.count()
    extend = DraftEngine._extend
    mixed = 0

    def swap_first(self: DraftEngine, streams: list[DraftStream], width: int) -> None:
        nonlocal mixed
        for stream in streams:
            stream.weights = runners[next(turn) % 3]
            mixed += bool(stream.levels)
        extend(self, streams, width)

    monkeypatch.setattr(DraftEngine, "_extend", swap_first)
    texts, _, _ = generate(make_runner("llama"), how, swapping.drafter())

    assert texts == plain(how) and mixed > 50


class Gullible(Verifier):
    """Negative control: takes the first child of each node for right, as far as the tree goes."""

    name = "gullible"

    def verify(self, tree: Tree, decided: np.ndarray) -> Verdict:
        at, path = 0, []
        while len(children := np.flatnonzero(tree.parents == at)):
            at = int(children[0])
            path.append(at)
        return Verdict(tuple(path), int(decided[at]))


@pytest.mark.parametrize("how", list(SAMPLINGS))
def test_the_comparison_sees_drafts_that_nobody_verified(
    how: str,
    make_runner: RunnerFactory,
    model_folder: Callable[[str], Path],
    refs: list[DraftRef],
    plain: Callable[[str], Texts],
) -> None:
    """With a draft equal to its target nothing is seen; a swap to another is, at once."""
    alone = Swapping(model_folder("llama"), refs, "forth and back")
    texts, _, _ = generate(make_runner("llama"), how, alone.drafter(), verifier=Gullible())
    assert texts == plain(how)
    swapping = Swapping(model_folder("llama"), refs, "forth and back")
    texts, _, _ = generate(make_runner("llama"), how, swapping.drafter(), swapping.swap, Gullible())

    assert texts != plain(how)


def test_the_comparison_sees_one_token_too_many(
    make_runner: RunnerFactory,
    model_folder: Callable[[str], Path],
    refs: list[DraftRef],
    plain: Callable[[str], Texts],
) -> None:
    """Negative control: one draft in twenty is accepted for one node too long."""
    calls = itertools.count(1)

    class Hasty(Match):
        def verify(self, tree: Tree, decided: np.ndarray) -> Verdict:
            right = super().verify(tree, decided)
            end = right.path[-1] if right.path else 0
            wrong = np.flatnonzero(tree.parents == end)
            if len(wrong) == 0 or next(calls) % 20:
                return right
            return Verdict((*right.path, int(wrong[0])), int(decided[wrong[0]]))

    swapping = Swapping(model_folder("llama"), refs, "round")
    texts, _, _ = generate(make_runner("llama"), "sampled", swapping.drafter(), swapping.swap, Hasty())

    assert next(calls) > 40 and texts != plain("sampled")


def test_what_is_known_of_a_draft_is_forgotten_when_the_live_version_changes(
    make_runner: RunnerFactory, model_folder: Callable[[str], Path], refs: list[DraftRef]
) -> None:
    """Not by a canary or a route: most streams draft as before."""
    forgotten: list[str] = []

    class Watched(Controller):
        def reset(self, name: str, source: int) -> None:
            forgotten.append(name)
            super().reset(name, source)

    for plans, expected in (("forth and back", True), ("canary", True), ("only canary", False)):
        swapping = Swapping(model_folder("llama"), refs, "canary" if plans == "only canary" else plans)
        if plans == "only canary":
            perfect = swapping.versions.live
            swapping._kinds = itertools.cycle(
                [{"live": perfect, "canary": refs[1].version, "canary_share": 0.5}, {"live": perfect}]
            )
        forgotten.clear()
        drafter = FusedDrafter([swapping.drafter()], Watched(StepCost([1, 64], [1e-3, 2e-3])))
        generate(make_runner("llama"), "greedy", drafter, swapping.swap)

        assert bool(forgotten) is expected


# --- the draft worker -----------------------------------------------------------------------------------


class Control:
    """The other end of a connection: says a plan, keeps the answers."""

    def __init__(self) -> None:
        self.statuses: list[DraftStatus] = []

    def on_open(self, peer: wire.Peer) -> None: ...
    def on_close(self, peer: wire.Peer) -> None: ...
    def on_message(self, peer: wire.Peer, message: Message) -> None:
        if isinstance(message, DraftStatus):
            self.statuses.append(message)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    h.tiny_model(folder / "target", seed=0)
    h.tiny_model(folder / "draft", seed=0)
    return folder


async def test_a_draft_worker_follows_plans_while_streams_run(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statuses answer at once and each second; streams are told which weights drafted; the text stays what it is."""
    step = DecodeWorker.step
    monkeypatch.setattr(DecodeWorker, "step", lambda self: (time.sleep(0.003), step(self))[1])
    what = h.request("r", h.prompt(60, seed=4), 300, temperature=0.9, seed=12)
    async with h.cluster(
        models, "speculation.depth=2", "speculation.width=1", "speculation.control=fixed"
    ) as cluster:
        decode = await cluster.add(DecodeWorker, "0")
        draft = await cluster.add(DraftWorker, "0")
        assert isinstance(draft, DraftWorker)
        target = decode.version()
        ref = published(models / "draft", tmp_path, seed=5, target=target)
        base = DraftRef(draft.version(), "")
        expected = (await cluster.run(msgspec.structs.replace(what, id="plain", speculate=False)))[0]
        control = Control()
        info = draft.member.info
        peer = await wire.connect(
            info.host,
            info.port,
            wire.Identity("control-0", new_incarnation()),
            cluster.secrets.link,
            control,
            expect_incarnation=info.incarnation,
        )
        running = asyncio.create_task(cluster.run(what))
        seen: list[str] = []
        for revision in range(1, 7):
            live = ref if revision % 2 else base
            began = time.monotonic()
            peer.send(DraftPlan(revision, target, (ref, base), live.version))
            while not any(s.revision == revision for s in control.statuses):
                await asyncio.sleep(0.002)
                assert time.monotonic() - began < 10
            seen.append(draft.version())
            await asyncio.sleep(0.05)
        tokens, report = await running

        assert seen == [ref.version, base.version] * 3
        assert tokens == expected and report.num_recoveries == 0
        assert report.tokens_by_source["draft"] > 30
        status = control.statuses[-1]
        assert (status.live, status.worker_id) == (base.version, "draft-0") and not status.refused
        assert draft.reports() == (status,)

        def named() -> str:
            return next(w.version for w in decode.member.directory.workers if w.role == "draft")

        began = time.monotonic()
        while named() != base.version:  # the directory goes round a few times a second
            await asyncio.sleep(0.01)
            assert time.monotonic() - began < 10


async def test_loading_aside_does_not_keep_an_engine_waiting(models: Path) -> None:
    """Work aside stands still while the engine is busy, and goes on afterwards, or after a while."""
    aside = Aside()
    done: list[float] = []

    def work() -> None:
        for _ in range(200):
            sorted([3, 1, 2])
        done.append(time.monotonic())

    aside.busy()
    began = time.monotonic()
    aside(work)
    await asyncio.sleep(0.05)
    assert not done
    aside.idle()
    while not done:
        await asyncio.sleep(0.001)
    assert done[0] - began < 5.0
    aside(work)
    while len(done) < 2:
        await asyncio.sleep(0.001)


async def test_a_stream_with_a_long_text_keeps_no_other_waiting(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for in one frame with others it is answered behind them, in a frame of its own."""
    sent: list[tuple[str, ...]] = []

    class Asking:
        identity = wire.Identity("decode-0", 7)

        def send_threadsafe(self, message: Message) -> None:
            assert isinstance(message, Drafts)
            sent.append(tuple(tree.request_id for tree in message.trees))

    async with h.cluster(models) as cluster:
        worker = await cluster.add(DraftWorker, "0")
        assert isinstance(worker, DraftWorker)
        opens = tuple(
            DraftOpen(name, h.prompt(num), Sampling(1, 0.0), num)
            for name, num in (("long", 300), ("a", 9), ("b", 12), ("other", 200))
        )
        worker.on_message(Asking(), DraftAsk(1, opens, (), (), 4, 2))  # type: ignore[arg-type]
        await cluster.until(lambda: len(sent) == 2)
        closes = tuple(opened.request_id for opened in opens)
        worker.on_message(Asking(), DraftAsk(2, (), (), closes, 4, 2))  # type: ignore[arg-type]
        await cluster.until(lambda: worker.num_streams() == 0)

    assert sent == [("a", "b"), ("long", "other")]


@pytest.mark.slow
def test_the_benchmark_swaps_and_changes_nothing() -> None:
    """Its figures come from swaps that were seen in the trees."""
    figures = swap_figures(
        model_folder_of(ModelConfig().target),
        model_folder_of(ModelConfig().draft),
        num_swaps=6,
        num_streams=4,
    )

    assert (figures["swap.num"], figures["swap.changed"], figures["swap.dropped"]) == (6, 0, 0)
    assert 0 < figures["swap.stall_ms"] and 0 < figures["rollback.s"] < 60
