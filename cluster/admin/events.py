"""The desk, once a second -> server-sent events for every dashboard that looks: state first, then what changed.

One task makes each event once for all of them, and only while somebody looks. What a slow client has not read is
replaced by what is newer; if even that is too much it gets all anew. An id names the process and the place in its list
of events, so that who comes back soon goes on where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec
import structlog
from fastapi import APIRouter, Request
from pydantic import BaseModel, TypeAdapter
from starlette.responses import Response

from paceline.cluster.admin import answers, desk_answers
from paceline.cluster.admin.audit import Audit
from paceline.cluster.admin.auth import API, Actor, Authority
from paceline.cluster.admin.desk import Desk
from paceline.cluster.admin.key_desk import KeyDesk
from paceline.cluster.admin.problems import AdminError
from paceline.cluster.admin.sessions import Session
from paceline.cluster.admin.settings import Settings
from paceline.cluster.gateway.sse import KEEPALIVE, EventStream

log = structlog.get_logger(__name__)

RESOURCES: tuple[answers.Resource, ...] = get_args(answers.Resource)
_KEPT: frozenset[answers.Resource] = frozenset({"versions", "runs", "ledger", "capture"})
"""Lists that come from the registry: whoever loads one must find there what changed."""
_STATE = ("overview", "workers")
"""Events of which only the newest counts."""
_MAX_CLIENTS = 32
_MAX_WAITING = 64
"""Other events for one client that it has not read."""
_REMEMBERED = 120
_HEARTBEAT_S = 15.0
_workers = TypeAdapter(list[desk_answers.Worker])


@dataclass(frozen=True, slots=True)
class _Event:
    number: int
    kind: str
    data: bytes


@dataclass(eq=False)
class _Client:
    """One stream: what it has not been sent yet."""

    session: Session | None
    newest: dict[str, _Event] = field(default_factory=dict)
    waiting: deque[_Event] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    is_behind: bool = False
    is_over: bool = False

    def put(self, event: _Event) -> None:
        if event.kind in _STATE:
            self.newest[event.kind] = event
        elif len(self.waiting) < _MAX_WAITING:
            self.waiting.append(event)
        else:
            self.waiting.clear()
            self.is_behind = True
        self.wake.set()

    def take(self) -> list[_Event]:
        """All that waits, oldest first."""
        events = sorted([*self.newest.values(), *self.waiting], key=lambda event: event.number)
        self.newest.clear()
        self.waiting.clear()
        self.wake.clear()
        return events


class Feed:
    """Events for all who look."""

    def __init__(
        self,
        desk: Desk,
        audit: Audit,
        settings: Settings,
        authority: Authority,
        *,
        keys: KeyDesk | None = None,
        period_s: float = 1.0,
    ) -> None:
        self._keys = keys
        self._desk = desk
        self._audit = audit
        self._settings = settings
        self._authority = authority
        self._period_s = period_s
        self._name = secrets.token_hex(4)
        self._number = 0
        self._past: deque[_Event] = deque(maxlen=_REMEMBERED)
        self._first = 0
        """Since this number nothing was missed: before it nobody looked, so nobody made events."""
        self._clients: set[_Client] = set()
        self._task: asyncio.Task[None] | None = None
        self._prints: dict[answers.Resource, bytes] = {}
        self._unsaid: dict[answers.Resource, tuple[int, int]] = {}
        """What changed and was not told yet: how many of the loop's writes must be done before the first and the last
        of its changes can be seen."""
        self._totals: dict[tuple[str, str], _Sums] = {}
        self._marked = time.time()

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    async def frames(self, session: Session | None, last_id: str) -> AsyncGenerator[bytes, None]:
        """What one client is sent, until it goes or its session ends."""
        if len(self._clients) >= _MAX_CLIENTS:
            raise AdminError(
                503, "too_many_streams", f"{_MAX_CLIENTS} streams of events are open", "close one",
                retry_after_s=10,
            )  # fmt: skip
        client = _Client(session)
        for event in (*self._missed(last_id), *self._snapshot()):
            client.put(event)
        self._clients.add(client)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            while not client.is_over:
                for event in client.take():
                    yield self._frame(event)
                if client.is_behind:
                    client.is_behind = False
                    yield self._frame(self._all_changed())
                try:
                    async with asyncio.timeout(_HEARTBEAT_S):
                        await client.wake.wait()
                except TimeoutError:
                    yield KEEPALIVE
            yield self._frame(_Event(self._number, "signed_out", b"{}"))
        finally:
            self._clients.discard(client)

    # -- what happens each second ------------------------------------------------------------------------

    async def _run(self) -> None:
        self._prints, self._totals = self._fingerprints(), self._sums()
        num_put, num_written = self._desk.writes()
        # Who has loaded a list just now may have come too early for what is still being written.
        self._unsaid = dict.fromkeys(_KEPT, (num_put, num_put)) if num_written < num_put else {}
        self._past.clear()
        self._first = self._number
        while self._clients:
            await asyncio.sleep(self._period_s)
            try:
                with self._desk.one_view():
                    events = [*self._snapshot(), *self._changes()]
            except Exception:  # the next second may be better, and nobody would make these events any more
                log.exception("admin_events_failed")
                continue
            for client in list(self._clients):
                if client.session is not None and not self._authority.sessions.is_alive(client.session):
                    client.is_over = True
                    client.wake.set()
                    continue
                for event in events:
                    client.put(event)

    def _snapshot(self) -> list[_Event]:
        return [
            self._event("overview", _json(self._desk.overview())),
            self._event("workers", _workers.dump_json(self._desk.workers(), by_alias=True)),
        ]

    def _changes(self) -> list[_Event]:
        events = []
        delta = self._delta()
        if delta.points or delta.marks:
            events.append(self._event("figures", _json(delta)))
        changed = self._changed()
        if changed:
            events.append(self._event("changed", _json(answers.Changed(what=changed))))
        self._past.extend(events)
        return events

    def _changed(self) -> list[answers.Resource]:
        """What to load again: what lists come from has what differs now, not only the loop's memory."""
        prints, (num_put, num_written) = self._fingerprints(), self._desk.writes()
        for name in RESOURCES:
            if prints[name] != self._prints.get(name):
                last = num_put if name in _KEPT else 0
                self._unsaid[name] = (self._unsaid.get(name, (last, last))[0], last)
        self._prints = prints
        found = [name for name in RESOURCES if name in self._unsaid and self._unsaid[name][0] <= num_written]
        for name in found:
            _, last = self._unsaid.pop(name)
            if last > num_written:
                self._unsaid[name] = (last, last)
        return found

    def _event(self, kind: str, data: bytes) -> _Event:
        self._number += 1
        return _Event(self._number, kind, data)

    def _all_changed(self) -> _Event:
        return self._event("changed", _json(answers.Changed(what=list(RESOURCES))))

    def _frame(self, event: _Event) -> bytes:
        return b"id: %b-%d\nevent: %b\ndata: %b\n\n" % (
            self._name.encode(),
            event.number,
            event.kind.encode(),
            event.data,
        )

    def _missed(self, last_id: str) -> list[_Event]:
        """What happened since then, or that all may have changed where nobody remembers."""
        if not last_id:
            return []
        name, _, digits = last_id.partition("-")
        if name == self._name and digits.isascii() and digits.isdecimal() and len(digits) < 16:
            number = int(digits)
            is_whole = len(self._past) < _REMEMBERED or self._past[0].number <= number
            if self._clients and is_whole and self._first <= number <= self._number:
                return [event for event in self._past if event.number > number]
        return [self._all_changed()]

    # -- differences -------------------------------------------------------------------------------------

    def _fingerprints(self) -> dict[answers.Resource, bytes]:
        """Of each list something that differs when it does."""
        view = self._desk.view()
        state: dict[answers.Resource, Any] = dict.fromkeys(RESOURCES)
        if view is not None:
            guard = view.guard
            state |= {
                "versions": [view.lanes, view.versions],
                "runs": [(r.run_id, r.state, r.step, r.error, r.candidate) for r in view.runs],
                "ledger": view.ledger,
                "drift": [(entry["domain"], entry["drifted"], entry.get("action")) for entry in view.drift],
                "guard": [guard.get("now"), len(guard.get("history", ()))],
                "capture": view.status.new_requests,
            }
        state["audit"] = self._audit.changes
        state["settings"] = self._settings.changes
        state["keys"] = self._keys.changes if self._keys is not None else 0
        return {name: _print(value) for name, value in state.items()}

    def _sums(self) -> dict[tuple[str, str], _Sums]:
        loop, view = self._desk.loop, self._desk.view()
        if loop is None or view is None:
            return {}
        found = {}
        for version in view.figures.get("versions", {}):
            for domain, cell in loop.figures.by_domain(version).items():
                depths = zip(cell.tested_by_depth, cell.accepted_by_depth, strict=False)
                found[version, domain] = _Sums(
                    cell.requests, cell.tokens, cell.steps, cell.tested, cell.accepted, cell.seconds, tuple(depths)
                )  # fmt: skip
        return found

    def _delta(self) -> desk_answers.FiguresDelta:
        """What the last second added to the figures."""
        sums, now = self._sums(), time.time()
        points, depths = [], []
        for (version, domain), new in sums.items():
            old = self._totals.get((version, domain), _Sums())
            if new.requests <= old.requests:
                continue
            points.append(
                desk_answers.DeltaPoint(
                    version=version,
                    domain=domain,
                    at=float(int(now)),
                    num_requests=new.requests - old.requests,
                    num_tokens=new.tokens - old.tokens,
                    num_steps=new.steps - old.steps,
                    num_tested=new.tested - old.tested,
                    num_accepted=new.accepted - old.accepted,
                    seconds=new.seconds - old.seconds,
                )
            )
            for index, (tested, accepted) in enumerate(new.depths):
                before = old.depths[index] if index < len(old.depths) else (0, 0)
                if tested > before[0]:
                    depths.append(
                        desk_answers.DepthRow(
                            version=version,
                            domain=domain,
                            depth=index + 1,
                            num_tested=tested - before[0],
                            num_accepted=accepted - before[1],
                        )
                    )
        self._totals = sums
        marks = [mark for mark in self._desk.marks(self._marked) if mark.at > self._marked]
        self._marked = max([self._marked, *(mark.at for mark in marks)])
        return desk_answers.FiguresDelta(points=points, depths=depths, marks=marks)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of one version and domain since it was first seen."""

    requests: int = 0
    tokens: int = 0
    steps: int = 0
    tested: int = 0
    accepted: int = 0
    seconds: float = 0.0
    depths: tuple[tuple[int, int], ...] = ()


def event_routes(feed: Feed) -> APIRouter:
    """The stream of events."""
    router = APIRouter()

    @router.get(f"{API}/events", include_in_schema=False)
    async def events(request: Request) -> Response:
        """Server-sent events; `api.ts` names them."""
        actor: Actor = request.state.actor
        last_id = request.headers.get("last-event-id", "")[:80]
        return EventStream(feed.frames(actor.session, last_id), {"cache-control": "no-store"})

    return router


def _json(value: BaseModel) -> bytes:
    return value.model_dump_json(by_alias=True).encode()


def _print(value: Any) -> bytes:
    encoded = msgspec.json.encode(value, enc_hook=repr, order="sorted")
    return hashlib.blake2b(encoded, digest_size=16).digest()
