"""An operator's action -> the learning loop, once, and a row of the audit trail, whatever came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.cluster.admin.answers import ActionName, ActionResult
from paceline.cluster.admin.archive import no_such
from paceline.cluster.admin.audit import Audit
from paceline.cluster.admin.auth import Actor
from paceline.cluster.admin.desk import Desk
from paceline.cluster.admin.problems import AdminError, as_admin_error
from paceline.cluster.admin.requests import ActionBody

_DOUBLE_CLICK_S = 2.0
EVERYTHING = "everything"
"""What confirms an action on the tag ""."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an action needs."""

    needs: tuple[str, ...] = ()
    """Fields of which one has to be there, and only one."""
    takes: tuple[str, ...] = ()
    """Fields that may be there besides."""
    is_destructive: bool = False


_KINDS: dict[ActionName, _Kind] = {
    "train": _Kind(takes=("tag",)),
    "forget": _Kind(needs=("run_id",), is_destructive=True),
    "pause": _Kind(),
    "resume": _Kind(),
    "canary": _Kind(needs=("version",), takes=("tag", "force")),
    "promote": _Kind(needs=("version",), takes=("tag", "force")),
    "pin": _Kind(takes=("tag",)),
    "unpin": _Kind(takes=("tag",)),
    "roll_back": _Kind(takes=("tag",), is_destructive=True),
    "revoke": _Kind(needs=("version",), is_destructive=True),
    "delete": _Kind(needs=("tenant", "request_id"), is_destructive=True),
}
_ALWAYS = frozenset({"confirm", "reason"})


class Actions:
    """What operators can do."""

    def __init__(self, desk: Desk, audit: Audit, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._desk = desk
        self._audit = audit
        self._clock = clock
        self._recent: dict[tuple[str, str, str], tuple[float, asyncio.Task[ActionResult]]] = {}

    async def act(self, name: ActionName, body: ActionBody, actor: Actor) -> ActionResult:
        """Do it, and note it. The same again within two seconds is a double click: it is done once, and both are told.

        Raises:
            AdminError: it is not done; the message says why.
        """
        key = (actor.name, name, body.model_dump_json())
        now = self._clock()
        self._recent = {
            k: (at, task)
            for k, (at, task) in self._recent.items()
            if now - at < _DOUBLE_CLICK_S or not task.done()
        }
        if key not in self._recent:
            task = asyncio.create_task(self._noted(name, body, actor))
            task.add_done_callback(_retrieve)
            self._recent[key] = (now, task)
        return await asyncio.shield(self._recent[key][1])  # who goes away does not leave it half done

    async def _noted(self, name: ActionName, body: ActionBody, actor: Actor) -> ActionResult:
        subject = _subject(name, body)
        try:
            _check(name, body, subject)
            result = await self._done(name, body, subject, actor)
        except Exception as error:
            found = as_admin_error(error)
            word = "refused" if found.status < 500 else "failed"
            self._audit.note(
                actor,
                name,
                subject,
                f"{word}: {found}",
                code=found.code,
                force=body.force,
                reason=body.reason,
            )
            await self._audit.flush()
            raise
        self._audit.note(actor, name, subject, result=result.message, force=body.force, reason=body.reason)
        await self._audit.flush()
        return result

    async def _done(self, name: ActionName, body: ActionBody, subject: str, actor: Actor) -> ActionResult:
        loop = self._desk.needed_loop()
        await self._check_exists(body)
        arguments = {"force": bool(body.force), "reason": body.reason or ""}
        result = await loop.act(name, subject, actor.name, arguments)
        if not result.is_done:
            raise AdminError(409, "refused", result.message, "see the message")
        return ActionResult(message=result.message, id=body.version or body.run_id or "")

    async def _check_exists(self, body: ActionBody) -> None:
        view = self._desk.needed_loop().view()
        archive = self._desk.archive()
        version = body.version or ""
        is_known = not version or version in {known.version for known in view.versions}
        if not is_known and archive is not None:
            is_known = await asyncio.to_thread(archive.known, version)
        if not is_known:
            raise no_such("version", version)
        if body.run_id and body.run_id not in {run.run_id for run in view.runs}:
            raise no_such("run", body.run_id)


def _subject(name: ActionName, body: ActionBody) -> str:
    """As the loop wants it; see `learning.views.Action`."""
    if name == "delete":
        return f"request:{body.request_id}" if body.request_id else f"tenant:{body.tenant or ''}"
    if name in ("canary", "promote"):
        return f"{body.version or ''}@{body.tag}" if body.tag else body.version or ""
    return body.version or body.run_id or body.tag or ""


def _check(name: ActionName, body: ActionBody, subject: str) -> None:
    kind = _KINDS[name]
    given = {field for field in body.model_fields_set if getattr(body, field) is not None}
    extra = sorted(given - {*kind.needs, *kind.takes, *_ALWAYS})
    if extra:
        raise _wrong(extra[0], f"{extra[0]}: {name} takes no such field", "leave it out")
    found = [field for field in kind.needs if getattr(body, field)]
    if kind.needs and len(found) != 1:
        expected = " or ".join(kind.needs)
        raise _wrong(kind.needs[0], f"{name}: expected {expected}", f"say which {expected}")
    tag = body.tag or ""
    if tag and not (tag.startswith(("tenant:", "domain:")) and tag.partition(":")[2]):
        raise _wrong("tag", f"tag={tag[:80]!r}: expected tenant:NAME, domain:NAME or nothing", "correct it")
    if kind.is_destructive or body.force:
        expected = (body.version or subject) if name != "roll_back" else tag or EVERYTHING
        if body.confirm != expected:
            message = f"{name} cannot be undone by itself: confirm={(body.confirm or '')[:80]!r}"
            raise _wrong("confirm", message, f"send confirm: {expected[:80]!r}")


def _wrong(field: str, message: str, action: str) -> AdminError:
    return AdminError(422, "invalid_value", message, action, field=field)


def _retrieve(task: asyncio.Task[ActionResult]) -> None:
    """Nobody may be left to be told of an error."""
    if not task.cancelled():
        task.exception()
