"""TrainerPlan -> TrainerStatus: one training process at idle priority, started, slowed, stopped and restarted.

The process that is a member of the cluster trains nothing itself. Training runs in a child at SCHED_IDLE: what waits
for the interpreter's lock here would make control believe that the trainer is dead, and memory of a child that ended
is free at once. The child keeps its state on disk, so that a kill at any moment costs a few steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog

from paceline.cluster import wire
from paceline.cluster.config import ClusterConfig, Secrets
from paceline.cluster.membership import Member, ResolveRouter, new_incarnation
from paceline.cluster.metrics import TRAIN_LEVELS, TRAIN_STATES, Metrics, set_one
from paceline.cluster.types import (
    Directory,
    Message,
    State,
    TrainerPlan,
    TrainerStatus,
    TrainLevel,
    TrainOrder,
    WorkerInfo,
)
from paceline.workers.training.ending import hurry, release
from paceline.workers.training.folder import RunFolder, trainer_home
from paceline.workers.training.protocol import FINAL, Progress, Set, Start, decode_progress, encode

log = structlog.get_logger(__name__)

_MAX_STARTS = 4
"""Of one run's process that ended without a word and brought the run no further. Others would meet the same end."""
_EVICT_S = 3.0
"""For the child to save its state; then it is killed, and what it saved before counts."""


class TrainerWorker:
    """A member of the cluster that keeps one run's process as control says. All on the event loop's thread."""

    role = "trainer"

    def __init__(
        self, config: ClusterConfig, secrets: Secrets, *, name: str, resolve: ResolveRouter, node: str = ""
    ) -> None:
        self.config = config
        self.metrics = Metrics("trainer")
        self.state: State = "starting"
        self.failure: BaseException | None = None
        me = wire.Identity(f"trainer-{name}", new_incarnation())
        self.member = Member(me, "trainer", config.link, secrets.link, self, resolve, node=node)
        self._plan = TrainerPlan(-1, "normal")
        self._run: _Run | None = None
        self._control: wire.Peer | None = None
        self._changed = asyncio.Event()
        self._tender: asyncio.Task[None] | None = None

    # -- life --------------------------------------------------------------------------------------------

    async def setup(self) -> None:
        """Listen, register and wait for a plan."""
        await self.member.start()
        self._tender = asyncio.create_task(self._tend())
        self.state = "ready"
        self.member.announce()
        log.info("worker_ready", worker=self.member.me.worker_id, pid=os.getpid())

    async def drain(self) -> None:
        """Save what runs and end it."""
        self.state = "draining"
        self.member.announce()
        self._plan = TrainerPlan(self._plan.revision, "evict", self._plan.order)
        if self._run is not None:
            await self._run.evict()

    async def close(self) -> None:
        """End the run's process and leave the cluster; its state stays on disk."""
        if self._tender is not None:
            self._tender.cancel()
            await asyncio.gather(self._tender, return_exceptions=True)
        if self._run is not None:
            await self._run.end()
        await self.member.close()

    def check(self) -> None:
        """Raise if this process can no longer do what it is told; Serve then replaces the replica."""
        if self.failure is not None:
            raise RuntimeError(f"{self.member.me.worker_id} lost its plan") from self.failure

    # -- plan -> process ---------------------------------------------------------------------------------

    async def _tend(self) -> None:
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self._follow(self._plan)
                self._tell()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            log.exception("trainer_died", worker=self.member.me.worker_id)
            self.failure = error

    async def _follow(self, plan: TrainerPlan) -> None:
        """Bring the process to what the plan says; doing so twice changes nothing."""
        if self._run is not None and (plan.order is None or plan.order.run_id != self._run.order.run_id):
            await self._run.end()
            self._run.folder.remove()
            self._run = None
        if plan.order is None:
            RunFolder(trainer_home(), "").remove_others()  # of lives of this process before
            return
        if self._run is None:
            self._run = _Run(
                plan.order, self.config, self._changed, self._tell, self.metrics.training_deaths.inc
            )
            self._run.folder.remove_others()
        await self._run.set_level(plan.level)

    def _status(self) -> TrainerStatus:
        me, plan, run = self.member.me.worker_id, self._plan, self._run
        if run is None:
            return TrainerStatus(me, plan.revision, level=plan.level)
        done = run.progress
        return TrainerStatus(
            me,
            plan.revision,
            run.order.run_id,
            done.state,
            done.level,
            done.step,
            done.num_steps,
            done.num_tokens,
            done.loss,
            done.seconds,
            done.cpu_s,
            done.result,
            done.report,
            done.error,
        )

    def _tell(self) -> None:
        if self._control is not None and self._control.is_open:
            self._control.send(self._status())

    # -- Resident ----------------------------------------------------------------------------------------

    def describe(self, info: WorkerInfo) -> WorkerInfo:
        return msgspec.structs.replace(info, state=self.state)

    def metrics_text(self) -> bytes:
        now, metrics = self._status(), self.metrics
        set_one(metrics.trainer_state, TRAIN_STATES, now.state)
        set_one(metrics.trainer_level, TRAIN_LEVELS, now.level)
        metrics.trainer_step.set(now.step)
        metrics.trainer_steps.set(now.num_steps)
        metrics.trainer_tokens.set(now.num_tokens)
        metrics.trainer_loss.set(now.loss)
        metrics.trainer_cpu_seconds.set(now.cpu_s)
        metrics.trainer_yielded_seconds.set(self._run.progress.yielded_s if self._run is not None else 0.0)
        return metrics.text()

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        if not isinstance(message, TrainerPlan) or self.state == "draining":
            return
        if message.revision < self._plan.revision and peer is self._control:
            return  # overtaken by a later one of the same control
        self._control = peer
        is_new = message != self._plan
        self._plan = message
        if is_new or self._run is not None and not self._run.is_settled(message.level):
            self._changed.set()

    def on_peer_lost(self, peer: wire.Peer) -> None:
        if peer is self._control:
            self._control = None

    def on_directory(self, directory: Directory) -> None:
        return

    def reports(self) -> Sequence[Message]:
        return (self._status(),)


class _Run:
    """One order's process and what it said last."""

    def __init__(
        self,
        order: TrainOrder,
        config: ClusterConfig,
        changed: asyncio.Event,
        tell: Callable[[], None],
        died: Callable[[], None],
    ) -> None:
        """`changed` is set when its process ends, `tell` called when it says something, `died` if it ended without a word."""
        self.order = order
        self.folder = RunFolder(trainer_home(), order.run_id)
        self.progress = Progress()
        self._config = config
        self._changed = changed
        self._tell = tell
        self._died = died
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._num_starts = 0
        """Since the run last got further."""
        self._furthest = 0
        self._level: TrainLevel | None = None
        """That its process was told last."""

    @property
    def pid(self) -> int | None:
        """Of its process, while there is one."""
        return self._process.pid if self._process is not None else None

    def is_settled(self, level: TrainLevel) -> bool:
        """Nothing has to be done about it at this level."""
        if self.progress.state in FINAL:
            return self._process is None
        return (
            self._process is None if level == "evict" else self._process is not None and level == self._level
        )

    async def set_level(self, level: TrainLevel) -> None:
        """Start, tell or end its process; one that ended without a word is started again, a few times."""
        if self._process is not None and self._process.returncode is not None:
            await self._collect()
        if self.is_settled(level):
            if level == "evict" and self.progress.state not in FINAL and self.progress.level != "evict":
                self._note(level="evict", state="paused")  # it never began, or died by itself
            return
        if self.progress.state in FINAL:
            await self.end()
        elif level == "evict":
            await self.evict()
        elif self._process is None:
            await self._start(level)
        else:
            self._say(Set(level))
            self._level = level

    async def evict(self) -> None:
        """Its state on disk and its memory free, within seconds."""
        if self._process is None:
            self._note(level="evict", state="paused")
            return
        hurry(self._process.pid)
        self._say(Set("evict"))
        try:
            await asyncio.wait_for(self._process.wait(), _EVICT_S)
        except TimeoutError:
            log.info(
                "trainer_killed",
                run=self.order.run_id,
                reason="it had no time to save; its last state counts",
            )
        await self.end()
        if self.progress.state not in FINAL:
            self._num_starts = 0  # it did not crash
            self._note(level="evict", state="paused")

    async def end(self) -> None:
        """Kill its process, if there is one; what it saved stays."""
        if self._process is not None:
            if self._process.returncode is None:
                hurry(self._process.pid)
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                release(self._process.pid)
            await self._process.wait()
            await self._forget_process()

    async def _start(self, level: TrainLevel) -> None:
        if self._num_starts == _MAX_STARTS:
            return
        self._num_starts += 1
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self._config.trainer.threads),
            "OMP_WAIT_POLICY": "passive",
        }
        try:
            # Not a session of its own: Linux may share cores by session first, and SCHED_IDLE counts inside one only.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "paceline.workers.training.process", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], env=environment, stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 26)
        is_idle = self._config.trainer.priority == "idle"
        self._say(Start(self._config.model_dump_json(), self.order, level, str(self.folder.root), is_idle))
        self._level = level
        self._reading = asyncio.create_task(self._read(reader))
        log.info("run_started", run=self.order.run_id, kind=self.order.kind, pid=self._process.pid)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                said = decode_progress(line)
                if said.level == "evict":  # is said when its memory is free
                    said = msgspec.structs.replace(said, level=self.progress.level, state=self.progress.state)
                self.progress = said
                self._tell()
                if self.progress.state in FINAL:
                    self._changed.set()  # its memory is wanted back now, not when it gets around to ending
        assert self._process is not None
        await self._process.wait()
        self._changed.set()

    async def _collect(self) -> None:
        """Its process ended by itself."""
        assert self._process is not None
        code = self._process.returncode
        await self._forget_process()
        if self.progress.state in FINAL or self._level == "evict":
            return
        if self.progress.step > self._furthest:
            self._furthest, self._num_starts = self.progress.step, 1
        self._died()
        log.error("training_process_died", run=self.order.run_id, code=code, starts=self._num_starts)
        if self._num_starts == _MAX_STARTS:
            how = f"signal {-code}" if code is not None and code < 0 else f"status {code}"
            self._note(
                state="failed",
                error=f"the training process ended {_MAX_STARTS} times without a word and no further, "
                f"the last time with {how}; "
                "signal 9 is mostly the kernel's, for want of memory: lower learning.train.memory_mb",
            )

    async def _forget_process(self) -> None:
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        self._process = self._writer = self._reading = None
        self._level = None

    def _say(self, message: Start | Set) -> None:
        assert self._writer is not None
        self._writer.write(encode(message))

    def _note(self, **facts: Any) -> None:
        self.progress = msgspec.structs.replace(self.progress, **facts)
        self._tell()
