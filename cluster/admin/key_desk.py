"""An operator's wish about API keys -> the key file, and a row of the audit trail for each change, whoever made it.

Commands on Control's machine write to the same file, also while Control is away. The file carries its latest changes with
it: they are copied into the audit trail from there, each once, those made here too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
import structlog
from fastapi import APIRouter, Depends, Path, Request

from paceline.cluster.admin import answers
from paceline.cluster.admin.audit import Audit
from paceline.cluster.admin.auth import API, Actor
from paceline.cluster.admin.desk import Desk
from paceline.cluster.admin.document import check_fields, refusals
from paceline.cluster.admin.problems import AdminError, as_admin_error
from paceline.cluster.admin.requests import KeyCreate, KeyUpdate
from paceline.cluster.errors import PacelineError
from paceline.cluster.key_watch import KeyWatch
from paceline.cluster.keys import Editor, Key, KeyContent, KeyFileError, needs_keys
from paceline.cluster.rates import Limits

log = structlog.get_logger(__name__)

T = TypeVar("T")
Id = Annotated[str, Path(max_length=128)]
_AUDITED = "keys.audited"
"""The registry's setting that says which of the file's changes are in the audit trail."""


class KeyDesk:
    """API keys, as operators see and change them."""

    def __init__(self, watch: KeyWatch, desk: Desk, audit: Audit) -> None:
        self._watch = watch
        self._desk = desk
        self._audit = audit
        self._noted = -1
        """The last change of the file that is in the audit trail; -1 until that is known."""
        self._lock = asyncio.Lock()
        self._noting: asyncio.Task[None] | None = None
        watch.subscribe(self._on_change)

    @property
    def changes(self) -> int:
        """Grows with each change."""
        return self._watch.changes

    def all(self) -> answers.Keys:
        """Every key, the latest first, and whether gateways ask for one."""
        self._watch.look()
        gateway, limits = self._desk.config.gateway, self._desk.config.limits
        return answers.Keys(
            keys=[_shown(key) for key in reversed(self._watch.content.keys)],
            asked=needs_keys(gateway.auth, gateway.host),
            defaults=_shown_limits(limits.of_a_key),
            trouble=self._watch.trouble,
        )

    async def create(self, body: KeyCreate, actor: Actor) -> answers.CreatedKey:
        """A new key; its text is in this answer and nowhere else."""
        limits = Limits(body.requests_per_minute, body.tokens_per_minute, body.concurrency)

        def make(by: Editor) -> tuple[Key, str]:
            return self._watch.file.create(
                body.name, tenant=body.tenant, capture=body.capture, scope=body.scope, limits=limits, by=by
            )

        key, text = await self._done("key_create", body.name, make, actor)
        return answers.CreatedKey(key=_shown(key), secret=text)

    async def update(self, id: str, body: KeyUpdate, actor: Actor) -> answers.ApiKey:
        """Change a key's limits, or what may be kept of its requests."""
        given = body.model_dump(exclude_none=True, exclude={"capture"})

        def change(by: Editor) -> Key:
            limits = msgspec.structs.replace(self._known(id).limits, **given) if given else None
            return self._watch.file.change(id, capture=body.capture, limits=limits, by=by)

        return _shown(await self._done("key_change", id, change, actor))

    async def revoke(self, id: str, actor: Actor) -> answers.ApiKey:
        """Make a key invalid, for good."""

        def revoke(by: Editor) -> Key:
            self._known(id)
            return self._watch.file.revoke(id, by=by)

        return _shown(await self._done("key_revoke", id, revoke, actor))

    def _known(self, id: str) -> Key:
        for key in self._watch.file.read():
            if key.id == id:
                return key
        raise AdminError(
            404, "not_found", f"there is no key {id[:80]!r}", f"GET {API}/keys has what there is"
        )

    async def _done(self, action: str, subject: str, work: Callable[[Editor], T], actor: Actor) -> T:
        """Do it, tell everybody, and note it; a refusal is noted here, since the file knows nothing of it."""
        try:
            done = await asyncio.to_thread(work, Editor(actor.name, actor.address))
        except PacelineError as error:
            found = _told(error)
            self._audit.note(actor, action, subject[:80], f"refused: {found}", code=found.code)
            await self._audit.flush()
            raise found from None
        self._watch.look()
        if self._noting is not None:
            await asyncio.wait({self._noting}, timeout=2.0)
        await self._audit.flush()
        return done

    # -- audit -------------------------------------------------------------------------------------------

    def _on_change(self, content: KeyContent) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # nothing runs yet: the next look tells
        self._noting = loop.create_task(self._note(content))

    async def _note(self, content: KeyContent) -> None:
        """Copy the file's changes that are not in the audit trail yet."""
        async with self._lock:
            try:
                if self._noted < 0:
                    self._noted = await self._read_mark()
                newest = content.changes[-1].number if content.changes else 0
                if newest < self._noted:  # another file
                    self._noted = 0
                for change in content.changes:
                    if change.number > self._noted:
                        actor = Actor(change.actor, change.address)
                        self._audit.note(actor, change.action, change.id, at=change.time, **change.detail)
                if newest != self._noted:
                    self._noted = newest
                    await self._write_mark(newest)
            except (
                PacelineError
            ) as error:  # the registry is away: rows wait in memory, the mark for the next change
                log.warning("key_audit_waits", error=str(error))

    async def _read_mark(self) -> int:
        registry = self._desk.registry
        if registry is None:
            return 0
        found = (await asyncio.to_thread(registry.settings)).get(_AUDITED)
        return int(found.value) if found is not None else 0

    async def _write_mark(self, number: int) -> None:
        registry = self._desk.registry
        if registry is not None:
            await self._audit.flush()
            await asyncio.to_thread(registry.put_settings, {_AUDITED: number})


def key_routes(keys: KeyDesk) -> APIRouter:
    """The routes at /admin/api/keys."""
    router = APIRouter(prefix=f"{API}/keys", tags=["keys"], dependencies=[Depends(check_fields)])

    @router.get("", responses=refusals(422))
    async def all_keys() -> answers.Keys:
        """Every key that was ever made, without its text."""
        return keys.all()

    @router.post("", status_code=201, responses=refusals(409, 422))
    async def create(body: KeyCreate, request: Request) -> answers.CreatedKey:
        """Make a key. `secret` is shown this once: only its hash is kept."""
        return await keys.create(body, request.state.actor)

    @router.patch("/{id}", responses=refusals(404, 409, 422))
    async def update(id: Id, body: KeyUpdate, request: Request) -> answers.ApiKey:
        """Change limits or consent; gateways follow within seconds."""
        return await keys.update(id, body, request.state.actor)

    @router.delete("/{id}", responses=refusals(404, 409, 422))
    async def revoke(id: Id, request: Request) -> answers.ApiKey:
        """Make a key invalid; gateways refuse it within seconds, and sessions opened with it end."""
        return await keys.revoke(id, request.state.actor)

    return router


def _told(error: PacelineError) -> AdminError:
    if isinstance(error, KeyFileError):
        action = (
            "set gateway.keys_file to a file that Control can write, or change that file where it comes from"
        )
        return AdminError(409, "key_file", str(error), action)
    return as_admin_error(error)


def _shown(key: Key) -> answers.ApiKey:
    return answers.ApiKey(
        id=key.id,
        name=key.name,
        tenant=key.owner,
        scope=key.scope,
        capture=key.capture,
        created=_seconds(key.created) or 0.0,
        revoked=_seconds(key.revoked),
        limits=_shown_limits(key.limits),
    )


def _shown_limits(limits: Limits) -> answers.KeyLimits:
    values: dict[str, Any] = msgspec.structs.asdict(limits)
    return answers.KeyLimits(**values)


def _seconds(stamp: str | None) -> float | None:
    """ISO 8601 -> Unix seconds; None if it is none: files are also written by others."""
    try:
        return datetime.fromisoformat(stamp).timestamp() if stamp else None
    except ValueError:
        return None
