"""Draft workers that die, hang, slow down, come, leave or run out of memory -> the same text, and hardly a step lost."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import harness as h
import processes
from paceline.cluster.gateway.streams import StreamReport
from paceline.cluster.router import sticky
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import DraftPatience, SpareCore
from paceline.cluster.types import Request
from paceline.workers.base import Worker
from paceline.workers.decode import DecodeWorker
from paceline.workers.draft import DraftWorker
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.drafters.remote import RemoteDrafter

NUM = 200
PROMPT = h.prompt(60, seed=4)
SHALLOW = ("speculation.depth=2", "speculation.width=1")
HOW = {"temperature": 0.9, "top_p": 0.9, "seed": 12}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft equal to its target: every draft that comes in time is accepted."""
    folder = tmp_path_factory.mktemp("models")
    h.tiny_model(folder / "target", seed=0)
    h.tiny_model(folder / "draft", seed=0)
    return folder


may_step = threading.Event()
"""Cleared while something is done to the cluster: however long that takes, the stream is where it was."""


@pytest.fixture(autouse=True)
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a few milliseconds: a stream is still under way when its gateway has seen its first tokens."""
    step, has_work = DecodeWorker.step, DecodeWorker.has_work

    def paced_step(self: DecodeWorker) -> bool:
        time.sleep(0.003)
        return step(self)

    monkeypatch.setattr(DecodeWorker, "step", paced_step)
    monkeypatch.setattr(DecodeWorker, "has_work", lambda self: may_step.is_set() and has_work(self))
    may_step.set()


@pytest.fixture
def homes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Request -> incarnations of the draft workers that it was opened with, in turn."""
    found: dict[str, list[int]] = {}
    original = RemoteDrafter._open

    def opened(self: RemoteDrafter, stream: Stream, *, is_wanted: bool) -> None:
        original(self, stream, is_wanted=is_wanted)
        if stream.key in self._streams:
            worker = self._streams[stream.key].source.worker
            found.setdefault(stream.request.id.split("@")[0], []).append(worker.incarnation)

    monkeypatch.setattr(RemoteDrafter, "_open", opened)
    return found


@pytest.fixture
def misses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When a step waited for a draft worker in vain."""
    found: list[float] = []
    original = DraftPatience.missed

    def missed(self: DraftPatience) -> None:
        found.append(time.monotonic())
        original(self)

    monkeypatch.setattr(DraftPatience, "missed", missed)
    return found


async def plain(cluster: h.Harness, what: Request) -> list[int]:
    """Its text without drafts."""
    silent = h.request(f"{what.id}-plain", what.prompt_ids, what.max_tokens, speculate=False, **HOW)
    return (await cluster.run(silent))[0]


async def run_with(
    cluster: h.Harness, what: Request, acts: dict[int, Callable[[], Awaitable[None]]]
) -> tuple[list[int], StreamReport]:
    """Generate, and do something when so many tokens have come, between two steps."""
    report = StreamReport()
    tokens: list[int] = []
    async for event in cluster.streams.run(what, report):
        assert event.finish != "error", event.error
        tokens.extend(event.tokens)
        for at in [at for at in acts if at <= len(tokens)]:
            may_step.clear()
            await acts.pop(at)()
            may_step.set()
    assert not acts
    return tokens, report


def replies(decode: Worker, outcome: str) -> float:
    value: float = decode.metrics.draft_replies.labels(outcome)._value.get()
    return value


async def test_streams_of_a_killed_draft_worker_draft_elsewhere(
    models: Path, misses: list[float], homes: dict[str, list[int]]
) -> None:
    """SIGKILL in mid-stream: at most one step waits in vain, and drafts of the other worker are accepted."""
    async with h.cluster(models, *SHALLOW) as cluster:
        decode = await cluster.add(DecodeWorker, "0")
        other = await cluster.add(DraftWorker, "b")
        async with processes.start(cluster, "draft", "a") as victim:
            drafts = [w for w in cluster.gateway.directory.workers if w.role == "draft"]
            there = f"@{cluster.gateway.me.incarnation:x}.2"  # a gateway makes its ids its own; the plain run is 1
            first = {n: sticky(n + there, drafts) for n in "pqrstuvwxyz"}
            name = next(
                n for n, worker in first.items() if worker is not None and worker.worker_id == "draft-a"
            )
            what = h.request(name, PROMPT, NUM, **HOW)
            expected = await plain(cluster, what)
            used: list[float] = []

            async def kill() -> None:
                misses.clear()
                used.append(replies(decode, "used"))
                victim.signal(signal.SIGKILL)

            tokens, report = await run_with(cluster, what, {NUM // 4: kill})

            assert tokens == expected
            assert report.num_recoveries == 0 and report.tokens_by_source["draft"] > NUM // 4
            assert homes[name] == [victim.incarnation, other.member.me.incarnation]
            assert replies(decode, "used") > used[0] + 10
            # One for the worker that died, one for the other's first answer, with the whole text to compute before it.
            assert len(misses) <= 2


async def test_a_stopped_draft_worker_costs_one_wait_and_comes_back(
    models: Path, misses: list[float]
) -> None:
    """SIGSTOP for some hundred steps: one of them waits. After SIGCONT its drafts are used again."""
    what = h.request("r", PROMPT, NUM + 200, **HOW)
    async with h.cluster(models, *SHALLOW, "link.dead_s=60") as cluster:
        decode = await cluster.add(DecodeWorker, "0")
        async with processes.start(cluster, "draft", "a") as draft:
            expected = await plain(cluster, what)
            seen: dict[str, float] = {}

            async def stop() -> None:
                draft.signal(signal.SIGSTOP)
                misses.clear()

            async def resume() -> None:
                seen.update(misses=len(misses), used=replies(decode, "used"))
                draft.signal(signal.SIGCONT)

            tokens, _ = await run_with(cluster, what, {50: stop, 250: resume})

            assert tokens == expected
            assert seen["misses"] == 1
            assert replies(decode, "used") > seen["used"] + 10


@pytest.mark.parametrize("seconds", [0.03, 0.2])
async def test_a_draft_worker_that_became_slow_costs_one_wait(
    models: Path, misses: list[float], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Within the limit it is waited for as long as it takes; past it, not at all. The text stays."""
    what = h.request("r", PROMPT, NUM // 2, **HOW)
    original = DraftEngine.propose
    slow: list[float] = []

    def propose(self: DraftEngine, *args: object) -> object:
        time.sleep(sum(slow))
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DraftEngine, "propose", propose)
    async with h.cluster(models, *SHALLOW, "speculation.max_wait_ms=120") as cluster:
        decode = await cluster.add(DecodeWorker, "0")
        await cluster.add(DraftWorker, "0")
        expected = await plain(cluster, what)

        async def slow_down() -> None:
            slow.append(seconds)
            misses.clear()

        tokens, _ = await run_with(cluster, what, {40: slow_down})

        assert tokens == expected
        assert len(misses) <= 2  # the one before it was slow may still have been under way
        assert replies(decode, "used") > 0


async def test_a_draft_worker_that_comes_is_used_and_one_that_leaves_hands_over(
    models: Path, homes: dict[str, list[int]]
) -> None:
    """A stream begins without drafts, drafts once a worker joins, and elsewhere when that one is drained."""
    what = h.request("r", PROMPT, NUM + 200, **HOW)
    async with h.cluster(models, *SHALLOW) as cluster:
        decode = await cluster.add(DecodeWorker, "0")
        expected = await plain(cluster, what)
        drafts: list[Worker] = []
        seen: dict[str, float] = {}

        async def join() -> None:
            drafts.append(await cluster.add(DraftWorker, f"{len(drafts)}"))

        async def leave() -> None:
            await drafts[0].drain()
            seen.update(left=drafts[0].num_streams(), used=replies(decode, "used"))

        tokens, report = await run_with(cluster, what, {20: join, 200: join, 300: leave})

        assert tokens == expected and report.num_recoveries == 0
        assert homes["r"] == [draft.member.me.incarnation for draft in drafts]
        assert seen["left"] == 0
        assert replies(decode, "used") > seen["used"] + 5


async def test_streams_evicted_from_a_full_draft_worker_are_opened_again(models: Path) -> None:
    """A pool for a third of the streams: drafts go on being used, streams are named unknown, no text changes."""
    async with h.cluster(models, "draft.kv_memory_mb=1", "decode.max_streams=16") as cluster:
        decode = await cluster.add(DecodeWorker, "0")
        await cluster.add(DraftWorker, "0")
        asks = [h.request(f"r{i}", h.prompt(300, seed=i), 60, **HOW) for i in range(8)]
        expected = [await plain(cluster, ask) for ask in asks]

        got = await asyncio.gather(*(cluster.run(ask) for ask in asks))

        assert [tokens for tokens, _ in got] == expected
        assert replies(decode, "unknown") > 0 and replies(decode, "used") > 0


async def test_what_was_drafted_ahead_is_served(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a core to spare the draft worker works while the target does; with a perfect draft nothing is wasted."""
    monkeypatch.setattr(SpareCore, "may_work", lambda *_: True)
    monkeypatch.setattr("paceline.workers.draft_engine._AHEAD_FLOOR", 0.0)
    what = h.request("r", PROMPT, NUM, **HOW)
    async with h.cluster(models, *SHALLOW) as cluster:
        await cluster.add(DecodeWorker, "0")
        draft = await cluster.add(DraftWorker, "0")
        expected = await plain(cluster, what)
        tokens, report = await cluster.run(what)

        assert tokens == expected and report.tokens_by_source["draft"] > NUM // 2
        ahead = draft.metrics.draft_ahead
        assert ahead.labels("hit")._value.get() > ahead.labels("miss")._value.get()
        assert draft.metrics.draft_levels.labels("ahead")._value.get() > NUM // 10
