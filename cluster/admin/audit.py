"""Who did or tried what -> rows of the registry and lines of the log, also while the registry cannot be reached."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from paceline.cluster.admin.auth import Actor
from paceline.cluster.admin.problems import AdminError
from paceline.cluster.admin.sessions import Attempts
from paceline.cluster.errors import PacelineError, RegistryError
from paceline.cluster.registry.records import AuditRow

log = structlog.get_logger(__name__)

_MAX_WAITING = 2000
_FLUSH_WAIT_S = 2.0


class AuditStore(Protocol):
    """What is needed of the registry."""

    def add_audit(self, row: AuditRow) -> AuditRow:
        """Keep a row."""
        ...


class Audit:
    """Rows in the order in which things happened. Telling it costs nothing; it is written by a thread."""

    def __init__(
        self, store: Callable[[], AuditStore | None], *, clock: Callable[[], float] = time.time
    ) -> None:
        """`store`: where rows go now; None while there is none, and then they wait here, the oldest go first."""
        self._store = store
        self._clock = clock
        self._waiting: deque[AuditRow] = deque(maxlen=_MAX_WAITING)
        self._strangers = Attempts(clock, burst=30, every_s=10.0)
        self._writer: asyncio.Task[None] | None = None
        self.changes = 0
        """Grows with each row."""

    @property
    def waiting(self) -> list[AuditRow]:
        """What no store has yet, newest first."""
        return list(reversed(self._waiting))

    def note(
        self,
        actor: Actor,
        action: str,
        subject: str = "",
        outcome: str = "done",
        *,
        at: float | None = None,
        **detail: Any,
    ) -> None:
        """Something was done, refused or failed; `at`: if not now, in Unix seconds."""
        row = AuditRow(
            self._clock() if at is None else at,
            actor.name,
            action,
            subject,
            {name: value for name, value in detail.items() if value not in ("", None, False)},
            outcome,
            actor.address,
        )
        log.info(
            "admin", actor=row.actor, action=action, subject=subject, outcome=outcome, address=row.address
        )
        self._waiting.append(row)
        self.changes += 1
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write())

    def request_refused(self, actor: Actor, request: str, error: AdminError) -> None:
        """A request (`POST /path`) that would have changed something was not let in."""
        self.note_refusal(actor, _name_of(request), error)

    def note_refusal(self, actor: Actor, action: str, error: AdminError) -> None:
        """Somebody may not do this. Of strangers only so many rows are kept: they must not fill the disk."""
        if actor.session is None:
            if self._strangers.wait_s(actor.address) > 0:
                log.warning("admin_refused", address=actor.address, action=action, code=error.code)
                return
            self._strangers.take(actor.address)
        self.note(actor, action, "", f"refused: {error.code}")

    async def flush(self) -> None:
        """Write what waits, if there is a store that takes it; returns within seconds either way."""
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        await asyncio.wait({self._writer}, timeout=_FLUSH_WAIT_S)

    async def _write(self) -> None:
        """One writer at a time, so that rows stay in order and none is written twice."""
        while self._waiting and (store := self._store()) is not None:
            row = self._waiting[0]
            try:
                await asyncio.to_thread(store.add_audit, row)
            except RegistryError as error:  # it would be refused for ever, and hold up all behind it
                log.error("audit_row_refused", error=str(error), action=row.action)
            except PacelineError as error:
                log.warning("audit_waits", rows=len(self._waiting), error=str(error))
                return
            if self._waiting and self._waiting[0] is row:
                self._waiting.popleft()


def _name_of(request: str) -> str:
    """`POST /admin/api/actions/promote` -> promote: what it would have been."""
    method, _, path = request.partition(" ")
    last = path.rpartition("/")[2][:40] or "unknown"
    if last == "session":
        return "sign_in" if method == "POST" else "sign_out"
    if "/keys/" in path or last == "keys":
        return {"POST": "key_create", "DELETE": "key_revoke"}.get(method, "key_change")
    return last if last.replace("_", "").isalnum() else "unknown"
