"""HTTP under /admin/api -> the desk, the archive, the settings, the actions: every figure and button as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request

from paceline.cluster.admin import answers, archive_answers, desk_answers
from paceline.cluster.admin.actions import Actions
from paceline.cluster.admin.archive import Archive, audit_row, place
from paceline.cluster.admin.audit import Audit
from paceline.cluster.admin.auth import API, Actor
from paceline.cluster.admin.desk import Desk, with_older
from paceline.cluster.admin.document import check_fields, refusals
from paceline.cluster.admin.holdings import Holdings
from paceline.cluster.admin.problems import AdminError
from paceline.cluster.admin.requests import ActionBody, SettingsChange
from paceline.cluster.admin.settings import Settings
from paceline.cluster.errors import Unavailable

T = TypeVar("T")
Text = Annotated[str, Query(max_length=256)]
Cursor = Annotated[str, Query(max_length=40, description="`next` of the page before.")]
Limit = Annotated[int, Query(ge=1, le=500)]
Id = Annotated[str, Path(max_length=128)]
_EMPTY: answers.Page[Any] = answers.Page(items=[], total=0, next=None)
_NO_LEDGER = archive_answers.Ledger(
    runs=[],
    total=archive_answers.LedgerTotal(predicted_s=0.0, realised_s=0.0, spent_s=0.0, net_s=0.0, num_runs=0),
    decisions=[],
    next=None,
)


def api_routes(
    desk: Desk, actions: Actions, settings: Settings, audit: Audit, holdings: Holdings
) -> APIRouter:
    """All routes but sessions and events."""
    router = APIRouter(prefix=API, dependencies=[Depends(check_fields)])
    _state_routes(router, desk, holdings)
    _archive_routes(router, desk)
    _audit_routes(router, desk, audit)
    _change_routes(router, actions, settings)
    return router


async def _asked(desk: Desk, ask: Callable[[Archive], T], otherwise: T) -> T:
    """What the registry says, in a thread; something else where learning is off."""
    archive = desk.archive()
    return otherwise if archive is None else await asyncio.to_thread(ask, archive)


async def _needed(desk: Desk, ask: Callable[[Archive], T]) -> T:
    """The same for one thing, which is nowhere where learning is off."""
    archive = desk.archive()
    if archive is None:
        raise AdminError(
            404, "not_found", "learning is off: there is no registry", "start with learning.enabled=true"
        )
    return await asyncio.to_thread(ask, archive)


def _state_routes(router: APIRouter, desk: Desk, holdings: Holdings) -> None:
    """What is now."""

    @router.get("/overview", tags=["state"], responses=refusals(422))
    async def overview() -> desk_answers.Overview:
        """What is served, what the loop does and why, and what an operator should know."""
        with desk.one_view():
            return desk.overview()

    @router.get("/workers", tags=["state"], responses=refusals(422))
    async def workers() -> list[desk_answers.Worker]:
        """Every process of the cluster, with its use of KV blocks."""
        return desk.workers()

    @router.get("/drift", tags=["state"], responses=refusals(422))
    async def drift() -> list[desk_answers.DriftDomain]:
        """By domain: whether acceptance has fallen."""
        return desk.drift()

    @router.get("/guard", tags=["state"], responses=refusals(422))
    async def guard() -> desk_answers.Guard:
        """How much the trainer may take, and why."""
        return desk.guard()

    @router.get("/figures", tags=["state"], responses=refusals(422, 503))
    async def figures(
        window_s: Annotated[float, Query(ge=10, le=90 * 86400)] = 3600.0,
        version: Annotated[str | None, Query(max_length=128)] = None,
        domain: Annotated[str | None, Query(max_length=128)] = None,
    ) -> desk_answers.Figures:
        """Counts over time by version and domain, by depth, and what happened meanwhile."""
        found, memory_from = desk.figures(window_s, version, domain)
        registry = desk.registry
        if registry is None or found.from_ >= memory_from:
            return found
        try:
            older = await asyncio.to_thread(
                registry.figures, since=found.from_, until=memory_from, version=version, domain=domain
            )
        except Unavailable:  # an alarm says so; what is in memory is better than nothing
            return found
        return with_older(found, older)

    @router.get("/capture", tags=["state"], responses=refusals(422, 503))
    async def capture() -> answers.Capture:
        """What is kept of requests, of whom, and what was deleted."""
        none: list[answers.Deletion] = []
        deletions = await _asked(desk, lambda archive: archive.deletions(50), none)
        return await holdings.capture(deletions)


def _archive_routes(router: APIRouter, desk: Desk) -> None:
    """What was."""

    @router.get("/versions", tags=["versions"], responses=refusals(422, 503))
    async def versions(
        state: Annotated[list[answers.VersionState], Query()] = [],  # noqa: B006 - FastAPI copies it
        tag: Annotated[str | None, Query(max_length=256)] = None,
        q: Text = "",
        cursor: Cursor = "",
        limit: Limit = 50,
    ) -> answers.Page[archive_answers.Version]:
        """Drafts, newest first."""
        place(cursor)
        return await _asked(
            desk,
            lambda archive: archive.versions(states=state, tag=tag, query=q, cursor=cursor, limit=limit),
            _EMPTY,
        )

    @router.get("/versions/{version}", tags=["versions"], responses=refusals(404, 422, 503))
    async def version(version: Id) -> archive_answers.VersionDetail:
        """All about one draft: what it was trained on, what the gate said, its life."""
        return await _needed(desk, lambda archive: archive.version(version))

    @router.get("/lineage", tags=["versions"], responses=refusals(422, 503))
    async def lineage() -> archive_answers.Lineage:
        """Which version was trained from which."""
        return await _asked(desk, lambda archive: archive.lineage(), archive_answers.Lineage(nodes=[]))

    @router.get("/reports/{version}", tags=["versions"], responses=refusals(404, 422, 503))
    async def report(version: Id) -> archive_answers.GateReport:
        """What the gate said of a candidate, with intervals and domains."""
        return await _needed(desk, lambda archive: archive.report(version))

    @router.get("/runs", tags=["runs"], responses=refusals(422, 503))
    async def runs(
        state: Annotated[list[answers.RunState], Query()] = [],  # noqa: B006
        cursor: Cursor = "",
        limit: Limit = 50,
    ) -> answers.Page[answers.RunSummary]:
        """Runs of the trainer, newest first."""
        place(cursor)
        return await _asked(
            desk, lambda archive: archive.runs(states=state, cursor=cursor, limit=limit), _EMPTY
        )

    @router.get("/runs/{run_id}", tags=["runs"], responses=refusals(404, 422, 503))
    async def run(run_id: Id) -> archive_answers.RunDetail:
        """All about one run, with its loss."""
        return await _needed(desk, lambda archive: archive.run(run_id))

    @router.get("/ledger", tags=["runs"], responses=refusals(422, 503))
    async def ledger(cursor: Cursor = "", limit: Limit = 50) -> archive_answers.Ledger:
        """What runs promised, brought and cost in seconds, and what was not done because it would not pay."""
        place(cursor)
        return await _asked(desk, lambda archive: archive.ledger(cursor=cursor, limit=limit), _NO_LEDGER)


def _audit_routes(router: APIRouter, desk: Desk, audit: Audit) -> None:
    @router.get("/audit", tags=["audit"], responses=refusals(422, 503))
    async def rows(
        who: Text = "",
        action: Text = "",
        q: Text = "",
        since: Annotated[float, Query(ge=0, le=1e11)] = 0.0,
        until: Annotated[float | None, Query(ge=0, le=1e11)] = None,
        cursor: Cursor = "",
        limit: Limit = 50,
    ) -> answers.Page[archive_answers.AuditRow]:
        """Who did what and when, also what was refused; newest first."""
        place(cursor)
        await audit.flush()
        if desk.registry is None:
            return _in_memory(audit, who, action, q, since, until, limit)
        return await _asked(
            desk,
            lambda archive: archive.audit(
                actor=who, action=action, query=q, since=since, until=until, cursor=cursor, limit=limit
            ),
            _EMPTY,
        )


def _in_memory(
    audit: Audit, who: str, action: str, q: str, since: float, until: float | None, limit: int
) -> answers.Page[archive_answers.AuditRow]:
    """Without learning there is no registry: the rows since Control started, the latest ones of them."""
    waiting = audit.waiting
    rows = [
        audit_row(row).model_copy(update={"id": len(waiting) - place})
        for place, row in enumerate(waiting)
        if who in ("", row.actor)
        and action in ("", row.action)
        and q.lower() in f"{row.subject} {row.detail} {row.outcome}".lower()
        and since <= row.time < (until or float("inf"))
    ]
    return answers.Page(items=rows[:limit], total=len(rows), next=None)


def _change_routes(router: APIRouter, actions: Actions, settings: Settings) -> None:
    """What changes something."""

    @router.get("/settings", tags=["settings"], responses=refusals(422, 503))
    async def all_settings() -> list[answers.Setting]:
        """The fields of the `learning` section, with what is in force."""
        return await settings.all()

    @router.patch("/settings", tags=["settings"], responses=refusals(409, 422, 503))
    async def change_settings(body: SettingsChange, request: Request) -> list[answers.Setting]:
        """Change thresholds while the cluster runs: all of these, or none."""
        actor: Actor = request.state.actor
        return await settings.change(body.values, actor)

    @router.post("/actions/{name}", tags=["actions"], responses=refusals(404, 409, 422, 503))
    async def act(name: answers.ActionName, body: ActionBody, request: Request) -> answers.ActionResult:
        """What the dashboard's buttons do. Each call is a row of the audit trail, also one that is refused."""
        actor: Actor = request.state.actor
        return await actions.act(name, body, actor)
