"""Messages and a step function -> a worker process: one engine thread, one event loop for I/O and health.

Every worker lives the same life: `setup` (load, listen, register), then its engine thread handles messages and
steps, then `drain` (accept nothing new, finish what runs), then `close`.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import structlog
import torch

from paceline.cluster import failpoints, wire
from paceline.cluster.config import ClusterConfig, EngineConfig, Secrets, model_folder
from paceline.cluster.errors import GangLost
from paceline.cluster.membership import Member, ResolveRouter, new_incarnation
from paceline.cluster.metrics import Metrics
from paceline.cluster.types import Directory, Message, Role, State, WorkerInfo
from paceline.workers.model_runner import ModelRunner, load_runner
from paceline.workers.parallel.gang import Launch, load_parallel_runner, spawn
from paceline.workers.parallel.links import LinkSetup, RankLinks
from paceline.workers.parallel.runner import ParallelRunner

log = structlog.get_logger(__name__)

Job = Callable[[], object]

_IDLE_S = 0.05
"""How long an engine thread without work sleeps before it looks at its deadlines."""
_STUCK_S = 0.002
"""The same with work that cannot go on: its blocks are held by streams that wait for their KV."""
_HEARD_S = 0.2
"""What was sent to a worker before all gateways knew that it leaves has arrived by then."""


class Worker:
    """Base of prefill, decode and draft workers. Subclasses fill in the engine thread's four methods."""

    role: Role

    def __init__(
        self,
        config: ClusterConfig,
        secrets: Secrets,
        *,
        name: str,
        resolve: ResolveRouter,
        node: str = "",
        launch: Launch = spawn,
    ) -> None:
        """`launch` starts the other ranks of a tensor-parallel worker on this node."""
        self.config = config
        self.secrets = secrets
        self.metrics = Metrics(self.role)
        self.state: State = "starting"
        self.failure: BaseException | None = None
        me = wire.Identity(f"{self.role}-{name}", new_incarnation())
        self.member = Member(me, self.role, config.link, secrets.link, self, resolve, node=node)
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{self.role}-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stuck = False
        self._spawned: set[asyncio.Future[None]] = set()
        self._launch = launch
        self.ranks = RankLinks(self._rank_lost)
        """Connections to the other ranks, if there are any."""
        self._runner: ModelRunner | None = None

    # -- what a subclass provides (engine thread) --------------------------------------------------------

    def load(self) -> None:
        """Load weights and build the engine. Called once, before the first message."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Whether `step` would do something now."""
        raise NotImplementedError

    def step(self) -> bool:
        """Do one step's worth of work; False if nothing could be done now (no free blocks)."""
        raise NotImplementedError

    def tick(self) -> None:
        """Look at deadlines; called between steps and when idle."""

    def num_streams(self) -> int:
        """Streams in this worker. Called from the event loop's thread."""
        return 0

    def load_share(self) -> float:
        """How much there is to do: 1 is as much as this worker can do, more waits. From the event loop's thread."""
        engine: EngineConfig = getattr(self.config, self.role)
        return self.num_streams() / engine.max_streams

    def num_waiting(self) -> int:
        """Streams that no step has computed for yet. Called from the event loop's thread."""
        return 0

    def blocks(self) -> tuple[int, int]:
        """(used, free) KV blocks. Called from the event loop's thread."""
        return 0, 0

    def version(self) -> str:
        """Content hash of the weights."""
        return ""

    def versions_beside(self) -> tuple[str, ...]:
        """Hashes of weights that serve some streams instead."""
        return ()

    def handle(self, peer: wire.Peer, message: Message) -> None:
        """A message for the engine thread."""
        raise NotImplementedError

    def peer_lost(self, peer: wire.Peer) -> None:
        """A connection closed (engine thread)."""

    def hand_over(self) -> None:
        """Give up what still runs at the end of the grace period, and say so to whom it matters (engine thread)."""

    def load_model(
        self, name: str, engine: EngineConfig, *, int8_weights: bool = False, tp: int = 1
    ) -> ModelRunner:
        """A model with its pool, as this role's part of the configuration says; its path goes to log and figures."""
        torch.set_num_threads(engine.threads)
        folder, memory, block_size = model_folder(name), engine.kv_memory_mb, self.config.kv.block_size
        runner: ModelRunner
        if tp > 1:
            runner, reason = load_parallel_runner(
                folder,
                tp=tp,
                kv_memory_mb=memory,
                block_size=block_size,
                threads=engine.threads,
                device="cuda" if engine.num_gpus > 0 else "cpu",
                launch=self._launch,
                links=self._rank_setup(),
            )
            self.ranks.wait(tp)
        else:
            runner, reason = load_runner(
                folder,
                kv_memory_mb=memory,
                block_size=block_size,
                int8_weights=int8_weights,
                device="cuda" if engine.num_gpus > 0 else "cpu",
            )
        self._runner = runner
        log.info(
            "model_ready",
            worker=self.member.me.worker_id,
            forward=runner.path,
            num_blocks=runner.cache.num_blocks,
            reason=reason,
        )
        self.metrics.forward.labels(runner.path).set(1)
        return runner

    def _rank_setup(self) -> LinkSetup:
        """What the other ranks must know of this worker."""
        me, link = self.member.info, self.config.link
        return LinkSetup(
            me.host,
            me.port,
            me.worker_id,
            me.incarnation,
            self.secrets.link,
            link.interface,
            link.backend,
            link.timeout_s,
            link.overlap,
            link.ping_s,
            link.dead_s,
            self.config.kv.codec,
        )

    def _rank_lost(self, reason: str) -> None:
        """Without one rank the others are of no use: the worker ends, and is replaced as a whole (event loop's thread)."""
        if self.failure is None and self.state != "draining":
            log.error("rank_lost", worker=self.member.me.worker_id, reason=reason)
            self._fail(GangLost(reason))

    def _fail(self, error: BaseException) -> None:
        """This worker is done for. Peers must notice now, not at the next health check: streams move when connections close."""
        self.failure = error
        self.state = "draining"
        self._inbox.put(None)
        self.soon(lambda: self.spawn(self.member.close()))

    # -- life --------------------------------------------------------------------------------------------

    async def setup(self) -> None:
        """Listen and register as starting, load in a thread, then be ready."""
        self._loop = asyncio.get_running_loop()
        # Short switch interval: the event loop must answer while the engine thread runs Python.
        sys.setswitchinterval(0.001)
        await self.member.start()
        began = time.monotonic()
        await asyncio.to_thread(self.load)
        self._thread.start()
        self.state = "ready"
        self.member.announce()
        log.info(
            "worker_ready", worker=self.member.me.worker_id, pid=os.getpid(), seconds=time.monotonic() - began
        )

    async def drain(self) -> None:
        """Be routed nothing new, finish what runs within the grace period, hand the rest over."""
        self.state = "draining"
        self.member.announce()
        limit = time.monotonic() + self.config.gateway.drain_s
        await asyncio.sleep(_HEARD_S)
        while self.failure is None and self.num_streams() > 0 and time.monotonic() < limit:
            await asyncio.sleep(0.05)
        self.post(self.hand_over)
        log.info("worker_drained", worker=self.member.me.worker_id)

    async def close(self) -> None:
        """Stop the engine thread and leave the cluster."""
        self._inbox.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 5.0)
        if isinstance(self._runner, ParallelRunner):
            self.state = "draining"
            await asyncio.to_thread(self._runner.close)
        await self.member.close()

    def check(self) -> None:
        """Raise if the engine thread or a rank died; Serve then replaces this replica."""
        gang = self._runner.gang if isinstance(self._runner, ParallelRunner) else None
        if gang is not None and (lost := gang.lost()):
            self._rank_lost(lost)
        if self.failure is not None:
            raise RuntimeError(f"engine thread of {self.member.me.worker_id} died") from self.failure

    # -- engine thread -----------------------------------------------------------------------------------

    def post(self, job: Job) -> None:
        """Run `job` on the engine thread, in order. From any thread."""
        self._inbox.put(job)

    def soon(self, job: Job) -> None:
        """Run `job` on the event loop. From any thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(job)
        except RuntimeError:  # the loop closed: the process is on its way out
            return

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the event loop (its thread only); held until it is done, as asyncio does not."""
        task = asyncio.ensure_future(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    def _run(self) -> None:
        try:
            while self._drain_inbox():
                self.tick()
                self._is_stuck = self.has_work() and not self.step()
        except BaseException as error:
            log.exception("engine_died", worker=self.member.me.worker_id)
            self._fail(error)

    def _drain_inbox(self) -> bool:
        """Run all waiting jobs; wait for one if there is no other work. False when told to stop."""
        wait = self._is_stuck or not self.has_work()
        while True:
            try:
                job = (
                    self._inbox.get(timeout=_STUCK_S if self._is_stuck else _IDLE_S)
                    if wait
                    else self._inbox.get_nowait()
                )
            except queue.Empty:
                if failpoints.enabled and wait and not self._is_stuck:
                    failpoints.hit("idle")
                return True
            if job is None:
                return False
            job()
            wait = False

    # -- Resident ----------------------------------------------------------------------------------------

    def describe(self, info: WorkerInfo) -> WorkerInfo:
        used, free = self.blocks()
        return msgspec.structs.replace(
            info,
            state=self.state,
            version=self.version(),
            beside=self.versions_beside(),
            kv_blocks_used=used,
            kv_blocks_free=free,
            num_streams=self.num_streams(),
        )

    def metrics_text(self) -> bytes:
        used, free = self.blocks()
        self.metrics.blocks.labels("used").set(used)
        self.metrics.blocks.labels("free").set(free)
        self.metrics.streams.set(self.num_streams())
        self.metrics.waiting.set(self.num_waiting())
        return self.metrics.text()

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        if not self.ranks.take(peer, message):
            self.on_others(peer, message)

    def on_others(self, peer: wire.Peer, message: Message) -> None:
        """A message from another worker or a gateway (event loop's thread)."""
        self.post(lambda: self.handle(peer, message))

    def on_peer_lost(self, peer: wire.Peer) -> None:
        if not self.ranks.lost(peer):
            self.post(lambda: self.peer_lost(peer))

    def on_directory(self, directory: Directory) -> None:
        return

    def reports(self) -> Sequence[Message]:
        return ()
