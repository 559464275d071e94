"""Plans for the trainer -> its process is started, slowed, stopped, killed and started again; statuses say so."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from harness import tiny_model
from paceline.cluster import wire
from paceline.cluster.config import Secrets, load_config
from paceline.cluster.learning.publish import verify
from paceline.cluster.membership import Member, new_incarnation
from paceline.cluster.router import Router
from paceline.cluster.types import (
    Directory,
    DraftRef,
    Message,
    TrainerPlan,
    TrainerStatus,
    TrainLevel,
    TrainOrder,
    WorkerInfo,
)
from paceline.workers.trainer import TrainerWorker
from paceline.workers.training.folder import RunFolder, trainer_home
from paceline.workers.training.state import load_state
from training_data import captured, load, write_shards

pytestmark = pytest.mark.timeout(900)


class Control:
    """Says the same plan again and again, as control does, and keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[TrainerStatus] = []
        self.trainer: WorkerInfo | None = None

    def describe(self, info: WorkerInfo) -> WorkerInfo:
        return info

    def metrics_text(self) -> bytes:
        return b""

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        if isinstance(message, TrainerStatus):
            self.heard.append(message)

    def on_peer_lost(self, peer: wire.Peer) -> None:
        return

    def on_directory(self, directory: Directory) -> None:
        self.trainer = next((w for w in directory.workers if w.role == "trainer"), None)

    def reports(self) -> tuple[Message, ...]:
        return ()


class Scene:
    """A router, control and a trainer."""

    def __init__(self, control: Control, member: Member, worker: TrainerWorker) -> None:
        self.control, self.member, self.worker = control, member, worker
        self.revision = 0

    async def plan(self, order: TrainOrder | None, level: TrainLevel = "normal") -> None:
        """Say a new plan, once."""
        self.revision += 1
        assert self.control.trainer is not None
        peer = await self.member.peer_to(self.control.trainer)
        peer.send(TrainerPlan(self.revision, level, order))

    async def until(self, what, limit_s: float = 240.0) -> TrainerStatus:  # type: ignore[no-untyped-def]
        """The first status from now on of which `what` holds."""
        start = len(self.control.heard)
        async with asyncio.timeout(limit_s):
            while True:
                for status in self.control.heard[start:]:
                    if what(status):
                        return status
                await asyncio.sleep(0.01)

    @property
    def pid(self) -> int:
        assert self.worker._run is not None
        assert self.worker._run.pid is not None
        return self.worker._run.pid


@asynccontextmanager
async def scene(folder: Path, *settings: str) -> AsyncIterator[Scene]:
    """A cluster of three members with shards on storage; nothing of the run is left behind."""
    config = load_config(
        None,
        [
            f"model.target={folder / 'target'}",
            f"model.draft={folder / 'draft'}",
            f"learning.storage={folder / 'storage'}",
            "learning.enabled=true",
            "learning.train.batch_tokens=128",
            "learning.train.save_steps=5",
            "learning.train.max_steps=4000",
            "trainer.priority=normal",  # else these tests would wait for whatever else this machine does
            *settings,
        ],
    )
    secrets = Secrets.create()
    router = Router(config, wire.Identity("router-0", new_incarnation()))
    address = await router.start(secrets.link)

    async def resolve() -> tuple[str, int]:
        return address

    control = Control()
    member = Member(
        wire.Identity("control-0", new_incarnation()), "control", config.link, secrets.link, control, resolve
    )
    await member.start()
    worker = TrainerWorker(config, secrets, name="0", resolve=resolve)
    await worker.setup()
    async with asyncio.timeout(10):
        while control.trainer is None or control.trainer.state != "ready":
            await asyncio.sleep(0.01)
    try:
        yield Scene(control, member, worker)
        worker.check()
    finally:
        await worker.close()
        await member.close()
        await router.close()


@contextmanager
def all_cores_busy() -> Iterator[None]:
    """Two processes for each core, at normal priority, that never wait."""
    num = 2 * len(os.sched_getaffinity(0))
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny pair and what was captured of its target."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    tiny_model(tmp_path / "target", seed=1)
    tiny_model(tmp_path / "draft", seed=2, layers=2, hidden=32)
    write_shards(tmp_path / "storage", captured(load(tmp_path / "target"), 40))
    return tmp_path


def order(run_id: str = "run-1", **settings: object) -> TrainOrder:
    return TrainOrder(run_id, "train", DraftRef("", ""), settings=json.dumps({"train": settings}).encode())


@pytest.mark.slow
async def test_follows_its_plan_from_normal_to_evict_and_back(folder: Path) -> None:
    """Each level takes effect and is answered; evicted, its memory is free and its state on disk; then it goes on."""
    async with scene(folder) as it:
        await it.plan(order())
        begun = await it.until(lambda s: s.state == "training" and s.step >= 5)
        child = psutil.Process(it.pid)
        assert begun.num_steps == 4000
        await it.plan(order(), "throttle")
        await it.until(lambda s: s.level == "throttle" and s.state == "training")
        await it.plan(order(), "pause")
        paused = await it.until(lambda s: s.level == "pause" and s.state == "paused")
        before = child.cpu_times().user
        await asyncio.sleep(1.0)
        assert child.cpu_times().user - before < 0.1
        assert it.control.heard[-1].step == paused.step
        assert it.control.heard[-1].seconds < paused.seconds + 0.3

        began = asyncio.get_running_loop().time()
        await it.plan(order(), "evict")
        evicted = await it.until(
            lambda s: s.level == "evict" and s.revision == it.revision and s.state == "paused"
        )
        while psutil.pid_exists(child.pid):
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - began < 5.0
        saved = load_state(RunFolder(trainer_home(), "run-1"))
        assert saved is not None
        assert saved[1]["step"] == evicted.step

        await it.plan(order())
        resumed = await it.until(lambda s: s.state == "training" and s.level == "normal")
        assert resumed.step >= evicted.step
        assert resumed.revision == it.revision

        await it.plan(None)
        await it.until(lambda s: s.state == "idle" and s.run_id == "")
        assert not RunFolder(trainer_home(), "run-1").path.exists()


@pytest.mark.slow
async def test_runs_at_idle_priority_unless_told_otherwise(folder: Path) -> None:
    """The process that trains, and all its threads; not the one that answers control."""
    async with scene(folder, "trainer.priority=idle") as it:
        await it.plan(order())
        async with asyncio.timeout(120):
            while it.worker._run is None or it.worker._run.pid is None:
                await asyncio.sleep(0.01)
            while os.sched_getscheduler(it.pid) != os.SCHED_IDLE:
                await asyncio.sleep(0.01)
        child = psutil.Process(it.pid)

        assert child.nice() == 19
        assert all(os.sched_getscheduler(thread.id) == os.SCHED_IDLE for thread in child.threads())
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        assert os.getsid(it.pid) == os.getsid(
            0
        )  # else Linux would share the core by session, not by priority


@pytest.mark.slow
async def test_evicted_where_no_core_is_ever_idle(folder: Path) -> None:
    """Its process trains at idle priority, then others want all the time there is; memory is free all the same."""
    async with scene(folder, "trainer.priority=idle") as it:
        await it.plan(order())
        await it.until(lambda s: s.state == "training" and s.step >= 1, 600)
        pid = it.pid
        with all_cores_busy():
            await asyncio.sleep(1.0)
            began = asyncio.get_running_loop().time()
            await it.plan(order(), "evict")
            await it.until(lambda s: s.level == "evict" and s.revision == it.revision and s.state == "paused")
            assert not psutil.pid_exists(pid)
            assert asyncio.get_running_loop().time() - began < 5.0


@pytest.mark.slow
async def test_a_run_whose_process_is_killed_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9, for real, wherever it stands; the run is taken up by itself and ends in the version it would have made.

    However often, as long as it gets further each time.
    """
    monkeypatch.setattr("paceline.workers.trainer._MAX_STARTS", 2)
    async with scene(folder) as it:
        await it.plan(order("whole", max_steps=25))
        whole = await it.until(lambda s: s.state in ("done", "failed"))
        assert whole.state == "done", whole.error
        await it.plan(order("killed", max_steps=25))
        for at in (7, 16):
            await it.until(lambda s, at=at: s.run_id == "killed" and s.step >= at)
            os.kill(it.pid, signal.SIGKILL)
        done = await it.until(lambda s: s.run_id == "killed" and s.state in ("done", "failed"))

        assert done.state == "done", done.error
        assert done.result is not None
        assert whole.result is not None
        verify(Path(done.result.url.removeprefix("file://")), done.result)
        ours, theirs = (json.loads(status.report)["curve"] for status in (done, whole))
        assert [step for step, *_ in ours] == list(range(1, 26))
        assert all(abs(a[1] - b[1]) < 1e-3 for a, b in zip(ours, theirs, strict=True))
        steps = [s.step for s in it.control.heard if s.run_id == "killed" and s.state == "training"]
        assert sum(b < a for a, b in itertools.pairwise(steps)) >= 1  # some steps were done again
        assert all(b >= 5 for a, b in itertools.pairwise(steps) if b < a)  # but never from the beginning


async def test_a_process_that_dies_again_and_again_is_given_up(folder: Path) -> None:
    """Four lives; then the run has failed, and says so, and the trainer takes the next one."""
    async with scene(folder) as it:
        await it.plan(order())
        seen: set[int] = set()
        async with asyncio.timeout(240):
            while it.worker._status().state != "failed":
                run = it.worker._run
                if run is not None and run.pid is not None and run.pid not in seen:
                    seen.add(run.pid)
                    os.kill(run.pid, signal.SIGKILL)
                await asyncio.sleep(0.01)
        failed = it.worker._status()

        assert len(seen) == 4
        assert "signal 9" in failed.error
        await it.plan(order("next", max_steps=2))
        assert (
            await it.until(lambda s: s.run_id == "next" and s.state in ("done", "failed"))
        ).state == "done"


@pytest.mark.slow
async def test_a_trainer_that_is_replaced_takes_the_run_up(folder: Path) -> None:
    """Its successor is told the same plan, finds the state, and later the result."""
    async with scene(folder) as it:
        await it.plan(order(max_steps=30))
        seen = await it.until(lambda s: s.step >= 8)
        old = it.pid
    assert not psutil.pid_exists(old)
    async with scene(folder) as it:
        await it.plan(order(max_steps=30))
        first = await it.until(lambda s: s.state == "training")
        done = await it.until(lambda s: s.state in ("done", "failed"))
        assert first.step >= 5 <= seen.step
        assert done.state == "done", done.error
    async with scene(folder) as it:
        await it.plan(order(max_steps=30))
        again = await it.until(lambda s: s.state in ("done", "failed"))
        assert (again.result, again.report) == (done.result, done.report)


@pytest.mark.slow
async def test_a_failure_is_said_and_the_next_run_begins(folder: Path) -> None:
    """The process of what failed is gone; nothing else is."""
    async with scene(folder) as it:
        await it.plan(order("bad", learning_rate=0))
        failed = await it.until(lambda s: s.state == "failed")
        assert "learning_rate" in failed.error
        async with asyncio.timeout(10):
            while it.worker._run is None or it.worker._run.pid is not None:
                await asyncio.sleep(0.01)
        await it.plan(order("good", max_steps=3))
        assert (
            await it.until(lambda s: s.run_id == "good" and s.state in ("done", "failed"))
        ).state == "done"
