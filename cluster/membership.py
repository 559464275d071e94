"""Router address -> the live directory, one connection per other worker, and this worker's own heartbeat."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import structlog

from paceline.cluster import failpoints, wire
from paceline.cluster.config import LinkConfig
from paceline.cluster.errors import WireError
from paceline.cluster.types import Directory, Message, Register, Role, Snapshot, WorkerInfo

log = structlog.get_logger(__name__)

ResolveRouter = Callable[[], Awaitable[tuple[str, int]]]
"""Asks Ray Serve where the router listens now."""


class Resident(Protocol):
    """The part that lives in this process and uses the membership. All calls on the event loop's thread."""

    def describe(self, info: WorkerInfo) -> WorkerInfo:
        """Fill in state, version, blocks and streams."""
        ...

    def metrics_text(self) -> bytes:
        """Prometheus text of this process."""
        ...

    def on_message(self, peer: wire.Peer, message: Message) -> None: ...
    def on_peer_lost(self, peer: wire.Peer) -> None:
        """A connection ended: a worker's, a gateway's, or the router's."""
        ...

    def on_directory(self, directory: Directory) -> None: ...
    def reports(self) -> Sequence[Message]:
        """What control is told each second besides metrics."""
        ...


def _dialed(dial: asyncio.Task[wire.Peer] | None) -> wire.Peer | None:
    """What a dial came to; None if it did not, or not yet."""
    if dial is None or not dial.done() or dial.cancelled() or dial.exception() is not None:
        return None
    return dial.result()


def new_incarnation() -> int:
    """Names one life of a process; later lives have larger numbers."""
    return time.time_ns()


class Member:
    """Listens, registers, keeps peers. The directory outlives the router: the last one stays in use."""

    def __init__(
        self,
        me: wire.Identity,
        role: Role,
        link: LinkConfig,
        secret: bytes,
        resident: Resident,
        resolve: ResolveRouter,
        *,
        node: str = "",
    ) -> None:
        """`node` names the machine this process runs on; its host's name if not given."""
        self.me = me
        self.role = role
        self.directory = Directory(0, ())
        self._node = node or socket.gethostname()
        self._link = link
        self._liveness = wire.Liveness(link.ping_s, link.dead_s)
        self._secret = secret
        self._resident = resident
        self._resolve = resolve
        self._listener: wire.Listener | None = None
        self._router: wire.Peer | None = None
        self._dials: dict[int, asyncio.Task[wire.Peer]] = {}
        """Connections opened here, by the other side's incarnation."""
        self._tasks: list[asyncio.Task[None]] = []
        self._open: set[wire.Peer] = set()
        """Every connection, whichever side opened it."""

    async def start(self) -> None:
        """Listen and begin to register; returns at once, the router may come later."""
        link = self._link
        self._listener = await wire.listen(
            link.interface, 0, self.me, self._secret, self, liveness=self._liveness
        )
        self._tasks = [asyncio.create_task(self._follow_router()), asyncio.create_task(self._report())]

    async def close(self) -> None:
        """Leave: the router and all peers see the connections close."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for dial in self._dials.values():
            dial.cancel()
        for peer in list(self._open):
            peer.close()
        if self._listener is not None:
            self._listener.close()

    @property
    def info(self) -> WorkerInfo:
        """This worker's directory entry, now."""
        assert self._listener is not None
        bare = WorkerInfo(
            worker_id=self.me.worker_id,
            role=self.role,
            incarnation=self.me.incarnation,
            host=self._listener.host,
            port=self._listener.port,
            pid=os.getpid(),
            node=self._node,
        )
        return self._resident.describe(bare)

    @property
    def router(self) -> wire.Peer | None:
        """The connection to the router, None while there is none."""
        return self._router if self._router is not None and self._router.is_open else None

    def announce(self) -> None:
        """Tell the router at once, not with the next heartbeat."""
        if self.router is not None:
            self.router.send(Register(self.info))

    async def peer_to(self, worker: WorkerInfo) -> wire.Peer:
        """The one connection to a worker's incarnation, opened on first use.

        Raises:
            WireError: it cannot be reached, or is another incarnation by now.
        """
        dial = self._dials.get(worker.incarnation)
        peer = _dialed(dial)
        if peer is not None and peer.is_open:
            return peer
        if dial is None or dial.done():
            dial = asyncio.create_task(
                wire.connect(
                    worker.host,
                    worker.port,
                    self.me,
                    self._secret,
                    self,
                    expect_incarnation=worker.incarnation,
                    liveness=self._liveness,
                )
            )
            self._dials[worker.incarnation] = dial
            dial.add_done_callback(partial(self._forget_failed, worker.incarnation))
        return await asyncio.shield(dial)

    def _forget_failed(self, incarnation: int, dial: asyncio.Task[wire.Peer]) -> None:
        if _dialed(dial) is None and self._dials.get(incarnation) is dial:
            del self._dials[incarnation]

    # -- wire.Handler ------------------------------------------------------------------------------------

    def on_open(self, peer: wire.Peer) -> None:
        self._open.add(peer)

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        if isinstance(message, Directory):
            self.directory = message
            self._resident.on_directory(message)
        else:
            self._resident.on_message(peer, message)

    def on_close(self, peer: wire.Peer) -> None:
        self._open.discard(peer)
        assert peer.identity is not None
        if peer is self._router:
            log.warning("router_lost", reason=peer.close_reason)
        elif _dialed(self._dials.get(peer.identity.incarnation)) is peer:
            del self._dials[peer.identity.incarnation]
        self._resident.on_peer_lost(peer)

    # -- background --------------------------------------------------------------------------------------

    async def _follow_router(self) -> None:
        """Keep one connection to whichever router lives; register on it and each second."""
        pause = 0.1
        while True:
            if self.router is None:
                try:
                    host, port = await self._resolve()
                    self._router = await wire.connect(
                        host, port, self.me, self._secret, self, liveness=self._liveness
                    )
                    pause = 0.1
                except asyncio.CancelledError:
                    raise
                except Exception as error:  # noqa: BLE001  # whatever Serve raises while it restarts the router
                    log.info("router_not_reached", error=str(error)[:200])
                    await asyncio.sleep(pause)
                    pause = min(2.0, pause * 2)
                    continue
            try:
                self.announce()
            except (
                Exception
            ):  # whatever the resident's figures raise: a silent member would be taken for dead
                log.exception("announce_failed", worker=self.me.worker_id)
            await asyncio.sleep(1.0)

    async def _report(self) -> None:
        """Push a snapshot to control each second, wherever it is. Serving never waits for it."""
        while True:
            await asyncio.sleep(1.0)
            if failpoints.enabled:
                failpoints.hit("beat")
            control = next((w for w in self.directory.workers if w.role == "control"), None)
            if control is None or control.incarnation == self.me.incarnation:
                continue
            try:
                peer = await self.peer_to(control)
                peer.send(Snapshot(self.info, self._resident.metrics_text()))
                for report in self._resident.reports():
                    peer.send(report)
            except WireError:
                continue
            except Exception:  # one bad second must not end all later ones
                log.exception("report_failed", worker=self.me.worker_id)
