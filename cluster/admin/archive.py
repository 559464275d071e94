"""The registry's records -> the values that the admin API answers with: versions, runs, gates, ledger, audit.

All methods ask the registry and block: they are called from threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from paceline.cluster.admin import answers, archive_answers
from paceline.cluster.admin.problems import AdminError
from paceline.cluster.registry import records
from paceline.cluster.registry.registry import Registry

T = TypeVar("T")
R = TypeVar("R")
ALL = 1000
"""Enough of a list that is shown whole; the registry's longest page."""
_MAX_CURVE = 600
_RUN_STATES: dict[str, answers.RunState] = {
    "queued": "pending",
    "cancelled": "stopped",
    "running": "training",
}
"""Where the registry has another word for it."""
_STATES: dict[str, answers.VersionState] = {
    "promoted": "live",
    "candidate": "candidate",
    "rejected": "rejected",
    "canary": "canary",
    "retired": "retired",
    "rolled_back": "rolled_back",
    "stale": "stale",
    "revoked": "revoked",
}
"""Events that bring a version into a state."""
_SKIPS = ("skip", "stop_speculating")


class Archive:
    """What the registry keeps, as the API shows it."""

    def __init__(
        self,
        registry: Registry,
        served: Mapping[str, Mapping[str, Any]],
        earned: Mapping[str, Mapping[str, Any]],
        canary_share: Mapping[str, float],
    ) -> None:
        """
        Args:
            served: by version, what `Figures.view` says of it.
            earned: by run, what `Ledger.view` says of it: newer than what was written down.
            canary_share: by version, of those in canary.
        """
        self._registry = registry
        self._earned = earned
        self._served = served
        self._canary_share = canary_share

    # -- versions ----------------------------------------------------------------------------------------

    def versions(
        self, *, states: Sequence[answers.VersionState], tag: str | None, query: str, cursor: str, limit: int
    ) -> answers.Page[archive_answers.Version]:
        """Newest first."""
        page = self._registry.versions(states=states, tag=tag, query=query, cursor=place(cursor), limit=limit)
        return _page(page, lambda v: archive_answers.Version(**self._version(v, self._gate(v.version))))

    def version(self, name: str) -> archive_answers.VersionDetail:
        """All about one.

        Raises:
            AdminError: 404.
        """
        version = self._registry.version(name)
        if version is None:
            raise no_such("version", name)
        gate = self._gate(name)
        lineage = self._registry.lineage(name)
        runs = [] if not version.run_id else [self._registry.run(version.run_id)]
        sizes = next((run.report for run in runs if run is not None), {})
        events = reversed(self._registry.events(version=name, limit=ALL).items)
        return archive_answers.VersionDetail(
            **self._version(version, gate),
            target=version.target,
            url=version.url,
            sha256=version.sha256,
            num_bytes=int(getattr(version, "num_bytes", 0) or sizes.get("num_bytes", 0)),
            num_parameters=int(getattr(version, "num_parameters", 0) or sizes.get("num_parameters", 0)),
            trained_on=[
                archive_answers.TrainedOn(
                    tenant=t.tenant, num_requests=t.num_requests, num_tokens=t.num_tokens
                )
                for t in lineage.tenants
            ],
            num_shards=lineage.num_shards,
            data_from=lineage.data_from,
            data_to=lineage.data_to,
            report=None if gate is None else report_of(gate),
            history=[
                archive_answers.HistoryEntry(at=e.time, state=_STATES[e.event], who=e.actor, reason=e.reason)
                for e in events
                if e.event in _STATES
            ],
        )

    def lineage(self) -> archive_answers.Lineage:
        """All versions, oldest first."""
        savings = {gate.candidate: gate.report for gate in reversed(self._registry.gates(limit=ALL).items)}
        nodes = []
        for version in reversed(_all(lambda c: self._registry.versions(cursor=c, limit=ALL))):
            served = self._served.get(version.version, {})
            saving = savings.get(version.version, {}).get("saving")
            nodes.append(
                archive_answers.LineageNode(
                    version=version.version,
                    parent=version.base,
                    state=version.state,
                    tag=version.tag,
                    created=version.created,
                    run_id=version.run_id,
                    num_requests=int(served.get("requests", 0)),
                    saving=finite(saving["mean"]) if isinstance(saving, dict) else None,
                    pinned=version.pinned,
                )
            )
        return archive_answers.Lineage(nodes=nodes)

    def report(self, version: str) -> archive_answers.GateReport:
        """What the gate said of a candidate last.

        Raises:
            AdminError: 404.
        """
        gate = self._gate(version)
        if gate is None:
            raise no_such("gate report of version", version)
        return report_of(gate)

    def known(self, version: str) -> bool:
        """Whether there is such a version."""
        return self._registry.version(version) is not None

    def _gate(self, version: str) -> records.GateRecord | None:
        return self._registry.gate(candidate=version)

    def _version(self, version: records.Version, gate: records.GateRecord | None) -> dict[str, Any]:
        served = self._served.get(version.version, {})
        report = None if gate is None else report_of(gate)
        return {
            "version": version.version,
            "state": version.state,
            "reason": version.reason,
            "parent": version.base,
            "tag": version.tag,
            "created": version.created,
            "run_id": version.run_id,
            "pinned": version.pinned,
            "canary_share": self._canary_share.get(version.version, 0.0),
            "gate": None
            if report is None
            else archive_answers.GateSummary(passed=report.passed, saving=report.saving),
            "acceptance": finite(served.get("acceptance")),
            "tokens_per_step": finite(served.get("tokens_per_step")),
            "num_requests": int(served.get("requests", 0)),
        }

    # -- runs --------------------------------------------------------------------------------------------

    def runs(
        self, *, states: Sequence[answers.RunState], cursor: str, limit: int
    ) -> answers.Page[answers.RunSummary]:
        """Newest first."""
        named = [name for name, shown in _RUN_STATES.items() if shown in states]
        wanted: Any = [*states, *named]
        page = self._registry.runs(states=wanted, cursor=place(cursor), limit=limit)
        return _page(page, lambda run: answers.RunSummary(**_run(run)))

    def run(self, run_id: str) -> archive_answers.RunDetail:
        """All about one.

        Raises:
            AdminError: 404.
        """
        run = self._registry.run(run_id)
        if run is None:
            raise no_such("run", run_id)
        rows = self._registry.ledger(decisions=("train",), run_id=run_id).items
        return archive_answers.RunDetail(
            **_run(run),
            loss_curve=curve(run.loss),
            settings=_settings(run.settings),
            ledger=self._ledger_row(rows[0]) if rows else None,
        )

    # -- ledger ------------------------------------------------------------------------------------------

    def ledger(self, *, cursor: str, limit: int) -> archive_answers.Ledger:
        """What runs promised, brought and cost, and what was not done."""
        page = self._registry.ledger(decisions=("train",), cursor=place(cursor), limit=limit)
        skipped = self._registry.ledger(decisions=_SKIPS, limit=50).items
        predicted, realised, spent, num = self._registry.ledger_totals()
        return archive_answers.Ledger(
            runs=[self._ledger_row(row) for row in page.items],
            total=archive_answers.LedgerTotal(
                predicted_s=predicted,
                realised_s=realised,
                spent_s=spent,
                net_s=realised - spent,
                num_runs=num,
            ),
            decisions=[_decision(row) for row in skipped],
            next=None if page.next is None else str(page.next),
        )

    def _ledger_row(self, row: records.LedgerEntry) -> archive_answers.LedgerRow:
        version = self._registry.version(row.version) if row.version else None
        newer = self._earned.get(row.run_id, {})
        return archive_answers.LedgerRow(
            run_id=row.run_id,
            version=row.version,
            tag=row.tag,
            at=row.decided_at,
            predicted_s=finite(row.predicted_s),
            realised_s=finite(newer.get("realised_s", row.realised_s)),
            spent_s=finite(newer.get("spent_s")) or row.spent_s,
            still_serving=version is not None and version.state in ("live", "canary"),
        )

    # -- audit and deletions -----------------------------------------------------------------------------

    def audit(self, *, cursor: str, **filters: Any) -> answers.Page[archive_answers.AuditRow]:
        """Newest first."""
        return _page(self._registry.audit(cursor=place(cursor), **filters), audit_row)

    def deletions(self, limit: int) -> list[answers.Deletion]:
        """Newest first."""
        return [
            answers.Deletion(
                id=d.id,
                at=d.created,
                who=d.actor,
                what=d.what,
                state=d.state,
                num_requests=d.num_requests,
                versions=list(d.versions),
            )
            for d in self._registry.deletions(limit=limit).items
        ]


def no_such(what: str, name: str) -> AdminError:
    """A 404 that says of what."""
    message = f"there is no {what} {name[:80]!r}"
    return AdminError(404, "not_found", message, "the lists of versions and runs have what there is")


def place(cursor: str) -> int:
    """Where a page begins.

    Raises:
        AdminError: it is no cursor of ours.
    """
    if not cursor:
        return 0
    if not cursor.isascii() or not cursor.isdecimal() or len(cursor) > 15:
        message = f"cursor={cursor[:40]!r}: expected what `next` of the page before says"
        raise AdminError(422, "invalid_value", message, "begin without a cursor", field="cursor")
    return int(cursor)


def finite(value: Any) -> float | None:
    """A number that JSON can hold; what is none is not known."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def interval(value: Any) -> answers.Interval:
    """A figure of the gate with its interval; all of 0 where there is none."""
    given = value if isinstance(value, dict) else {}
    mean = finite(given.get("mean")) or 0.0
    lo, hi = finite(given.get("lo")), finite(given.get("hi"))
    return answers.Interval(mean=mean, lo=mean if lo is None else lo, hi=mean if hi is None else hi)


def report_of(gate: records.GateRecord) -> archive_answers.GateReport:
    """The gate's report, whose further figures stay in the registry."""
    report = gate.report
    domains = [
        archive_answers.GateDomain(
            domain=str(domain.get("domain", "")),
            num_requests=int(domain.get("num_requests", 0)),
            saving=interval(domain.get("saving")),
            passed=bool(domain.get("passed", False)),
        )
        for domain in report.get("domains", [])
    ]
    return archive_answers.GateReport(
        version=gate.candidate,
        champion=gate.champion,
        at=gate.created,
        passed=gate.passed,
        reason=gate.reason,
        num_requests=int(report.get("num_requests", 0)),
        num_tokens=int(report.get("num_tokens", 0)),
        saving=interval(report.get("saving")),
        min_saving=finite(report.get("min_saving")) or 0.0,
        domain_floor=finite(report.get("domain_floor")) or 0.0,
        domains=domains,
        slowdown=finite(report.get("slowdown")),
        max_slowdown=finite(report.get("max_slowdown")) or 1.0,
        champion_tokens_per_step=finite(report.get("champion_tokens_per_step")),
        candidate_tokens_per_step=finite(report.get("candidate_tokens_per_step")),
        champion_acceptance=finite(report.get("champion_acceptance")),
        candidate_acceptance=finite(report.get("candidate_acceptance")),
    )


def curve(loss: Iterable[Sequence[Any]]) -> list[archive_answers.LossPoint]:
    """(step, loss) and perhaps acceptance, oldest first, thinned evenly with its last point kept."""
    points = [point for point in loss if finite(point[1]) is not None]
    every = max(1, math.ceil(len(points) / _MAX_CURVE))
    kept = points[::-1][::every][::-1]
    return [
        archive_answers.LossPoint(
            step=int(point[0]),
            loss=float(point[1]),
            acceptance=finite(point[2]) if len(point) > 2 else None,
        )
        for point in kept
    ]


def audit_row(row: records.AuditRow) -> archive_answers.AuditRow:
    """With its outcome and its detail in one line of words."""
    words = [row.outcome] if row.outcome != "done" else []
    words += [f"{name}={value}" for name, value in row.detail.items()]
    return archive_answers.AuditRow(
        id=row.id,
        at=row.time,
        who=row.actor,
        address=row.address,
        action=row.action,
        subject=row.subject,
        detail="; ".join(words),
        ok=row.outcome == "done",
    )


def _run(run: records.Run) -> dict[str, Any]:
    losses = [row[1] for row in run.loss if row[1] is not None]
    is_on = run.ended is None and run.steps > 0 and run.num_steps > run.steps
    return {
        "run_id": run.run_id,
        "kind": run.kind,
        "state": _RUN_STATES.get(run.state, run.state),
        "tag": run.tag,
        "base": run.base,
        "result": run.result,
        "why": run.trigger,
        "created": run.created,
        "started": run.started,
        "ended": run.ended,
        "step": run.steps,
        "num_steps": run.num_steps,
        "num_tokens": run.tokens,
        "loss": finite(losses[-1]) if losses else None,
        "tokens_per_s": run.tokens / run.seconds if run.seconds > 0 and run.tokens else None,
        "seconds": run.seconds,
        "cpu_s": run.cpu_s,
        "eta_s": run.seconds / run.steps * (run.num_steps - run.steps) if is_on else None,
        "level": "normal",
        "error": run.error,
    }


def _settings(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Of a run: what it was ordered, field by field; what is empty is left out."""
    try:
        order = msgspec.json.decode(str(kept.get("order", "{}")))
    except msgspec.DecodeError:
        order = {}
    given = {**order, **{name: value for name, value in kept.items() if name not in ("order", "kind")}}
    return {name: value for name, value in given.items() if value not in ("", None, [], {})}


def _decision(row: records.LedgerEntry) -> archive_answers.LedgerDecision:
    return archive_answers.LedgerDecision(
        at=row.decided_at,
        what="do_not_train" if row.decision == "skip" else "do_not_speculate",
        tag=row.tag,
        reason=row.reason,
        expected_saving_s=finite(row.predicted_s),
        expected_cost_s=finite(row.predicted_cost_s),
        until=row.until,
    )


def _page(page: records.Page[R], show: Callable[[R], T]) -> answers.Page[T]:
    items = [show(item) for item in page.items]
    return answers.Page[Any](
        items=items, total=page.total, next=None if page.next is None else str(page.next)
    )


def _all(load: Callable[[int], records.Page[R]]) -> list[R]:
    """Every page of a list."""
    found: list[R] = []
    cursor: int | None = 0
    while cursor is not None:
        page = load(cursor)
        found += page.items
        cursor = page.next
    return found
