"""Registrations and heartbeats -> the directory; a stream -> (decode, prefill, draft) worker.

`DirectoryState` and `choose` are plain data and a pure function: the router's process uses them, and so do
gateways with the last directory they saw while the router is away.
"""

from __future__ import annotations

import asyncio
import os
import socket
import zlib
from collections.abc import Iterable

import msgspec
import structlog

from paceline.cluster import wire
from paceline.cluster.config import ClusterConfig
from paceline.cluster.types import Assignment, Directory, Message, Register, Role, Route, WorkerInfo

log = structlog.get_logger(__name__)


def ready_workers(workers: Iterable[WorkerInfo], role: Role, avoid: Iterable[int] = ()) -> list[WorkerInfo]:
    """Ready workers of a role, least loaded first, ties by name."""
    shunned = set(avoid)
    found = [w for w in workers if w.role == role and w.state == "ready" and w.incarnation not in shunned]
    return sorted(found, key=lambda w: (w.num_streams, w.worker_id))


def choose(route: Route, workers: Iterable[WorkerInfo], *, min_remote_tokens: int) -> Assignment:
    """The routing policy: decode by load, prefill by load, draft sticky by id.

    No prefill worker for a prompt that is too short, or whose logits are wanted.

    Returns an assignment whose `decode` is None when no decode worker is ready.
    """
    everyone = list(workers)
    decodes = ready_workers(everyone, "decode", route.avoid)
    if not decodes:
        return Assignment(route.request_id, route.epoch, None, reason="no decode worker is ready")
    prefill: WorkerInfo | None = None
    reason = ""
    if route.num_tokens - 1 < min_remote_tokens:
        reason = "short"
    elif route.needs_prompt_logits:
        reason = "prompt_logits"
    else:
        prefills = ready_workers(everyone, "prefill", route.avoid)
        prefill = prefills[0] if prefills else None
        reason = "" if prefill else "no_prefill_worker"
    drafts = ready_workers(everyone, "draft") if route.speculate else []
    draft = None
    if drafts:
        drafts.sort(key=lambda w: w.worker_id)
        draft = drafts[zlib.crc32(route.request_id.encode()) % len(drafts)]
    return Assignment(route.request_id, route.epoch, decodes[0], prefill, draft, reason)


def _address(worker: WorkerInfo) -> tuple[int, str, int]:
    return worker.incarnation, worker.host, worker.port


class DirectoryState:
    """The last word of every worker. One entry per worker id; a new incarnation replaces the old one."""

    def __init__(self) -> None:
        self.revision = 0
        self._workers: dict[str, WorkerInfo] = {}

    def put(self, worker: WorkerInfo) -> bool:
        """Record a worker; True if its address, incarnation or state is news."""
        old = self._workers.get(worker.worker_id)
        if old is not None and old.incarnation > worker.incarnation:
            return False
        self._workers[worker.worker_id] = worker
        changed = old is None or _address(old) != _address(worker) or old.state != worker.state
        self.revision += changed
        return changed

    def drop(self, worker_id: str, incarnation: int) -> bool:
        """Forget a worker that is gone, unless a newer incarnation took its place."""
        old = self._workers.get(worker_id)
        if old is None or old.incarnation != incarnation:
            return False
        del self._workers[worker_id]
        self.revision += 1
        return True

    def snapshot(self) -> Directory:
        """Everything, sorted by role and name."""
        return Directory(
            self.revision, tuple(sorted(self._workers.values(), key=lambda w: (w.role, w.worker_id)))
        )


class Router:
    """The directory's process: listens, answers routes, tells everyone about changes."""

    def __init__(self, config: ClusterConfig, me: wire.Identity) -> None:
        self._config = config
        self._me = me
        self._peers: set[wire.Peer] = set()
        self._state = DirectoryState()
        self._listener: wire.Listener | None = None
        self._beat: asyncio.Task[None] | None = None
        # Streams sent to a worker since its last heartbeat: without them a burst would all go to one worker.
        self._in_flight: dict[int, int] = {}

    async def start(self, secret: bytes) -> tuple[str, int]:
        """Listen; the address workers and gateways connect to."""
        link = self._config.link
        liveness = wire.Liveness(link.ping_s, link.dead_s)
        self._listener = await wire.listen(link.interface, 0, self._me, secret, self, liveness=liveness)
        self._state.put(
            WorkerInfo(
                worker_id=self._me.worker_id,
                role="router",
                incarnation=self._me.incarnation,
                host=self._listener.host,
                port=self._listener.port,
                pid=os.getpid(),
                node=socket.gethostname(),
                state="ready",
            )
        )
        self._beat = asyncio.create_task(self._beat_forever())
        return self._listener.host, self._listener.port

    async def close(self) -> None:
        """Stop listening and close all connections."""
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
        for peer in list(self._peers):
            peer.close()
        if self._listener is not None:
            self._listener.close()

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._broadcast()

    def on_open(self, peer: wire.Peer) -> None:
        self._peers.add(peer)
        peer.send(self._state.snapshot())

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        match message:
            case Register(worker):
                self._in_flight.pop(worker.incarnation, None)
                if self._state.put(worker):
                    log.info("worker_state", worker=worker.worker_id, role=worker.role, state=worker.state)
                    self._broadcast()
            case Route():
                peer.send(self._route(message))
            case _:
                peer.close(f"a router has no use for {type(message).__name__}")

    def on_close(self, peer: wire.Peer) -> None:
        self._peers.discard(peer)
        identity = peer.identity
        if identity is not None:
            self._in_flight.pop(identity.incarnation, None)
        if identity is not None and self._state.drop(identity.worker_id, identity.incarnation):
            log.warning("worker_lost", worker=identity.worker_id, reason=peer.close_reason)
            self._broadcast()

    def _route(self, route: Route) -> Assignment:
        # Count the streams that the workers' next heartbeats will tell about.
        loaded = [
            msgspec.structs.replace(w, num_streams=w.num_streams + self._in_flight.get(w.incarnation, 0))
            for w in self._state.snapshot().workers
        ]
        assignment = choose(route, loaded, min_remote_tokens=self._config.kv.min_remote_tokens)
        for worker in (assignment.decode, assignment.prefill):
            if worker is not None:
                self._in_flight[worker.incarnation] = self._in_flight.get(worker.incarnation, 0) + 1
        return assignment

    def _broadcast(self) -> None:
        directory = self._state.snapshot()
        for peer in self._peers:
            peer.send(directory)

    @property
    def directory(self) -> Directory:
        """The current directory, for status."""
        return self._state.snapshot()
