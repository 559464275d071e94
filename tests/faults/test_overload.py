"""More than there is room for, requests that kill, workers that are told to go -> nobody else notices."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import harness as h
from paceline.cluster.errors import Overloaded, RequestError
from paceline.cluster.gateway.problems import problem_of
from paceline.cluster.gateway.streams import StreamReport
from paceline.cluster.types import Request
from paceline.workers.decode import DecodeWorker
from paceline.workers.engine import Engine, StepResult
from paceline.workers.prefill import PrefillWorker

QUIET = ("speculation.enabled=false", "kv.prefix_cache=false")
PACE_FACTOR = 3.0
"""How much slower running streams may be while ten times as many ask: the refusals take CPU from the same process here."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    h.tiny_model(folder / "target", seed=0)
    h.tiny_model(folder / "draft", seed=0)
    return folder


def slow_down(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten milliseconds more for each step, so that a stream lasts."""
    whole_step = worker._engine.step

    def slow_step(*args: Any) -> StepResult:
        time.sleep(0.01)
        return whole_step(*args)

    monkeypatch.setattr(worker._engine, "step", slow_step)


async def gaps(cluster: h.Harness, what: Request, into: list[float]) -> list[int]:
    """Run a stream, noting the seconds between its events."""
    tokens: list[int] = []
    last: float | None = None
    async for event in cluster.streams.run(what, StreamReport()):
        now = time.monotonic()
        if last is not None and event.tokens:
            into.append(now - last)
        last = now if event.tokens else last
        tokens.extend(event.tokens)
    return tokens


# --- overload -------------------------------------------------------------------------------------------


async def test_ten_times_too_many_are_turned_away_and_the_running_keep_their_pace(models: Path) -> None:
    """Four places and four to wait in: of 80 more, all that found no place are told a time, at once."""
    limits = ("decode.max_streams=4", "decode.max_queue=4")
    async with h.cluster(models, *QUIET, *limits) as cluster:
        await cluster.add(DecodeWorker, "0")
        alone: list[float] = []
        asked = [h.request(f"a{i}", h.prompt(40, seed=i), 100) for i in range(4)]
        expected = await asyncio.gather(*(gaps(cluster, what, alone) for what in asked))

        crowded: list[float] = []
        running = [asyncio.create_task(gaps(cluster, what, crowded)) for what in asked]
        await cluster.until(lambda: len(crowded) > 8)
        refused: list[tuple[float, Overloaded]] = []

        async def one_more(index: int) -> int:
            began = time.monotonic()
            try:
                tokens, _ = await cluster.run(h.request(f"b{index}", h.prompt(40, seed=50 + index), 4))
            except Overloaded as error:
                refused.append((time.monotonic() - began, error))
                return 0
            return len(tokens)

        lengths = await asyncio.gather(*(one_more(index) for index in range(80)))
        assert await asyncio.gather(*running) == expected

        assert [n for n in lengths if n] == [4] * (80 - len(refused)) and len(refused) >= 70
        assert max(seconds for seconds, _ in refused) < 1.0
        waits = [error.retry_after_s for _, error in refused]
        assert waits == sorted(waits) and 1 <= waits[0] and waits[-1] <= 60
        pace = statistics.median(crowded) / statistics.median(alone)
        print(f"pace under overload: {pace:.2f} times the calm one; {len(refused)} refused")
        assert pace < PACE_FACTOR
        answer = problem_of(refused[0][1]).response()
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1


# --- poison ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def replaced_when_dead(cluster: h.Harness) -> AsyncIterator[list[DecodeWorker]]:
    """New decode workers come for those that die, as Serve would see to. The dead, in order."""
    dead: list[DecodeWorker] = []

    async def replace() -> None:
        while True:
            await asyncio.sleep(0.02)
            for worker in [w for w in cluster.workers if w.failure is not None]:
                cluster.workers.remove(worker)
                assert isinstance(worker, DecodeWorker)
                dead.append(worker)
                await cluster.add(DecodeWorker, f"new{len(dead)}")

    task = asyncio.create_task(replace())
    try:
        yield dead
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_request_that_kills_is_found_by_running_alone_and_kept_out(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers die of it, the last one with nobody else in it; the others' texts are whole; it does not come back."""
    poison = h.prompt(30, seed=99)
    original = Engine.step
    victims: list[set[str]] = []

    def step(self: Engine, *hooks: Any, **named: Any) -> StepResult:
        streams = list(self.scheduler)
        if any(s.request.prompt_ids == poison and s.num_output >= 3 for s in streams):
            victims.append({s.request.id.partition("@")[0] for s in streams})
            raise MemoryError("poisoned")
        return original(self, *hooks, **named)

    async with h.cluster(models, *QUIET) as cluster:
        for name in "ab":
            await cluster.add(DecodeWorker, name)
        asked = [h.request(f"good{i}", h.prompt(30, seed=i), 120, temperature=0.9) for i in range(6)]
        expected = [(await cluster.run(what))[0] for what in asked]
        monkeypatch.setattr(Engine, "step", step)
        async with replaced_when_dead(cluster) as dead:
            good = [asyncio.create_task(cluster.run(what)) for what in asked]
            with pytest.raises(RequestError) as caught:
                await cluster.run(h.request("poison", poison, 50))
            texts = [tokens for tokens, _ in await asyncio.gather(*good)]
            with pytest.raises(RequestError) as again:
                await cluster.run(h.request("the client's own retry", poison, 50, seed=1234))
            await cluster.until(lambda: len(dead) == len(victims))

        assert texts == expected
        assert (caught.value.code, caught.value.status) == ("worker_crashed", 500)
        assert (again.value.code, again.value.status) == ("worker_crashed", 500)
        assert len(dead) == len(victims) == 3
        assert victims[-1] == {"poison"}
        # Other gateways hear it from the router.
        cluster.streams._quarantine._until.clear()
        with pytest.raises(RequestError, match="ended several workers"):
            await cluster.run(h.request("elsewhere", poison, 50))
        assert len(victims) == 3
        tokens, _ = await cluster.run(h.request("after", h.prompt(30, seed=0), 120, temperature=0.9))
        assert tokens == expected[0]


async def test_a_new_router_hears_what_runs_where_and_what_is_kept_out(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts streams that it never routed, until they end; streams do not notice that it is another."""
    async with h.cluster(models, *QUIET, "decode.max_streams=1", "decode.max_queue=0") as cluster:
        worker = await cluster.add(DecodeWorker, "0")
        slow_down(worker, monkeypatch)
        what = h.request("r", h.prompt(40, seed=1), 400)
        events = cluster.streams.run(what, StreamReport())
        tokens: list[int] = []
        async for event in events:
            tokens.extend(event.tokens)
            if len(tokens) >= 3:
                break
        cluster.streams._quarantine.add(b"d" * 16, time.monotonic())
        await cluster.restart_router()
        incarnation = worker.member.me.incarnation
        await cluster.until(lambda: cluster.router._load.streams == {incarnation: 1})
        await cluster.until(lambda: cluster.router._quarantine.holds(b"d" * 16, time.monotonic()))
        with pytest.raises(Overloaded):
            await cluster.run(h.request("one too many", h.prompt(40, seed=2), 4))
        async for event in events:
            tokens.extend(event.tokens)

        assert len(tokens) == 400
        await cluster.until(lambda: cluster.router._load.streams == {})


# --- going ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grace_s, finishes", [(30.0, True), (0.3, False)])
async def test_a_worker_that_is_told_to_go_finishes_or_hands_over(
    models: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float, finishes: bool
) -> None:
    """Nothing new is sent to it; within the grace period its streams end there, after it they end elsewhere."""
    async with h.cluster(models, *QUIET, f"gateway.drain_s={grace_s}") as cluster:
        await cluster.add(PrefillWorker, "0")
        leaving = await cluster.add(DecodeWorker, "a")
        slow_down(leaving, monkeypatch)  # four seconds for the whole stream
        what = h.request("r", h.prompt(60, seed=5), 400, temperature=0.8)
        expected, _ = await cluster.run(what)
        report = StreamReport()
        tokens: list[int] = []
        async for event in cluster.streams.run(what, report):
            if not tokens:
                await cluster.add(DecodeWorker, "b")
                going = asyncio.create_task(_leave(leaving))
                await cluster.until(lambda: _state_of(cluster, leaving) == "draining")
                _, other = await cluster.run(h.request("new", h.prompt(60, seed=6), 4))
                assert other.decode_workers == ["decode-b"]
            tokens.extend(event.tokens)
        await going
        cluster.workers.remove(leaving)

        assert tokens == expected
        assert report.decode_workers == (["decode-a"] if finishes else ["decode-a", "decode-b"])
        assert leaving.num_streams() == 0 and leaving.blocks()[0] == 0
        assert leaving.failure is None
        await cluster.until(lambda: cluster.router._load.streams == {})


async def _leave(worker: DecodeWorker | Any) -> None:
    await worker.drain()
    await worker.close()


def _state_of(cluster: h.Harness, worker: Any) -> str:
    found = [w for w in cluster.gateway.directory.workers if w.incarnation == worker.member.me.incarnation]
    return found[0].state if found else "gone"
