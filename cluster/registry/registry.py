"""Decisions of the loop and of operators -> one transaction each; questions of the dashboard -> records.

Control is the only writer. All methods block: call them from a thread. Any of them may raise `Unavailable` while the
database cannot be reached, and works again as soon as it can: nothing has to be opened anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from paceline.cluster.errors import RegistryError
from paceline.cluster.registry import figures, tables
from paceline.cluster.registry.records import (
    AuditRow,
    Deletion,
    FigurePoint,
    GateRecord,
    LedgerEntry,
    Page,
    RolloutEvent,
    Route,
    Run,
    RunState,
    Setting,
    Version,
)
from paceline.cluster.registry.store import as_record, as_row
from paceline.cluster.registry.versions import Versions


class Registry(Versions):
    """Versions, runs, gates, ledger, events, audit, settings and figures. Safe for any number of threads.

    `Registry.open(url, home)` is ready; `Registry(url, home)` opens nothing before it is first asked.
    """

    # -- runs, gates, ledger -----------------------------------------------------------------------------

    def put_run(self, run: Run) -> None:
        """Add a run, or replace what is known of it; it keeps the time at which it was first heard of."""
        row = as_row(replace(run, created=run.created or self._clock()))
        with self._writing() as connection:
            connection.execute(self._database.upsert(tables.runs, row, keep=frozenset({"created"})))

    def run(self, run_id: str) -> Run | None:
        with self._reading() as connection:
            return self._one(connection, Run, tables.runs, tables.runs.c.run_id == run_id)

    def runs(
        self,
        *,
        states: Sequence[RunState] = (),
        tag: str | None = None,
        cursor: int = 0,
        limit: int = 100,
    ) -> Page[Run]:
        """Newest first."""
        table = tables.runs
        where: list[sa.ColumnElement[bool]] = [table.c.state.in_(states)] if states else []
        if tag is not None:
            where.append(table.c.tag == tag)
        return self._page(Run, table, where, (table.c.created.desc(), table.c.run_id), cursor, limit)

    def put_gate(self, gate: GateRecord) -> None:
        """Keep a report; a second one of the same run replaces it."""
        with self._writing() as connection:
            row = as_row(replace(gate, created=gate.created or self._clock()))
            connection.execute(self._database.upsert(tables.gates, row))

    def gate(self, *, run_id: str = "", candidate: str = "") -> GateRecord | None:
        """The report of a run, or the newest of a candidate."""
        table = tables.gates
        where = table.c.run_id == run_id if run_id else table.c.candidate == candidate
        with self._reading() as connection:
            return self._one(connection, GateRecord, table, where, table.c.created.desc())

    def gates(self, *, cursor: int = 0, limit: int = 100) -> Page[GateRecord]:
        """Newest first."""
        table = tables.gates
        return self._page(GateRecord, table, [], (table.c.created.desc(), table.c.run_id), cursor, limit)

    def add_ledger(self, entry: LedgerEntry) -> LedgerEntry:
        """Keep a decision; -> it, with its id."""
        with self._writing() as connection:
            return replace(entry, id=self._append(connection, tables.ledger, entry))

    def put_ledger(self, entry: LedgerEntry) -> None:
        """Replace an entry that has an id: more is known of what came of it.

        Raises:
            RegistryError: bad_value: there is none with this id.
        """
        table = tables.ledger
        with self._writing() as connection:
            update = sa.update(table).where(table.c.id == entry.id).values(**as_row(entry))
            if connection.execute(update).rowcount != 1:
                raise RegistryError(f"ledger entry {entry.id}: there is none with this id", "bad_value")

    def ledger(
        self, *, decisions: Sequence[str] = (), run_id: str = "", cursor: int = 0, limit: int = 100
    ) -> Page[LedgerEntry]:
        """Newest first."""
        table = tables.ledger
        where: list[sa.ColumnElement[bool]] = [table.c.decision.in_(decisions)] if decisions else []
        if run_id:
            where.append(table.c.run_id == run_id)
        return self._page(LedgerEntry, table, where, (table.c.id.desc(),), cursor, limit)

    def ledger_totals(self) -> tuple[float, float, float, int]:
        """Seconds (predicted, realised, spent) and how many entries there are of runs."""
        table = tables.ledger
        sums = [sa.func.coalesce(sa.func.sum(c), 0.0) for c in (table.c.predicted_s, table.c.realised_s)]
        spent = sa.func.coalesce(sa.func.sum(table.c.spent_s), 0.0)
        query = sa.select(*sums, spent, sa.func.count()).where(table.c.run_id != "")
        with self._reading() as connection:
            row = connection.execute(query).one()
            return float(row[0]), float(row[1]), float(row[2]), int(row[3])

    # -- events and audit --------------------------------------------------------------------------------

    def add_event(self, event: RolloutEvent) -> RolloutEvent:
        """Keep a mark that no change of state has made."""
        with self._writing() as connection:
            return replace(event, id=self._append(connection, tables.events, event))

    def events(
        self, *, version: str = "", since: float = 0.0, cursor: int = 0, limit: int = 100
    ) -> Page[RolloutEvent]:
        """Newest first."""
        table = tables.events
        where: list[sa.ColumnElement[bool]] = [table.c.time >= since]
        if version:
            where.append(table.c.version == version)
        return self._page(RolloutEvent, table, where, (table.c.id.desc(),), cursor, limit)

    def add_audit(self, row: AuditRow) -> AuditRow:
        """Keep what an operator did, for good: there is no method, and in the database no way, to take it back."""
        with self._writing() as connection:
            return replace(row, id=self._append(connection, tables.audit, row))

    def audit(
        self,
        *,
        actor: str = "",
        action: str = "",
        query: str = "",
        since: float = 0.0,
        until: float | None = None,
        cursor: int = 0,
        limit: int = 100,
    ) -> Page[AuditRow]:
        """Newest first. `query` is looked for in subject, detail and outcome; until is exclusive."""
        table = tables.audit
        where: list[sa.ColumnElement[bool]] = [table.c.time >= since]
        if until is not None:
            where.append(table.c.time < until)
        if actor:
            where.append(table.c.actor == actor)
        if action:
            where.append(table.c.action == action)
        if query:
            columns = (table.c.subject, table.c.detail, table.c.outcome)
            where.append(sa.or_(*(sa.cast(c, sa.Text).icontains(query, autoescape=True) for c in columns)))
        return self._page(AuditRow, table, where, (table.c.id.desc(),), cursor, limit)

    # -- settings, routes, counters, deletions ----------------------------------------------------

    def settings(self) -> dict[str, Setting]:
        """All, by key."""
        with self._reading() as connection:
            rows = connection.execute(sa.select(tables.settings).order_by(tables.settings.c.key))
            return {row.key: as_record(Setting, row) for row in rows}

    def put_settings(self, values: dict[str, Any]) -> None:
        """Set some, all or none; None removes one."""
        table = tables.settings
        with self._writing() as connection:
            for key, value in values.items():
                if value is None:
                    connection.execute(sa.delete(table).where(table.c.key == key))
                else:
                    row = {"key": key, "value": value, "changed": self._clock()}
                    connection.execute(self._database.upsert(table, row))

    def routes(self) -> tuple[Route, ...]:
        """In the order in which they were made: the first that fits a stream counts."""
        table = tables.routes
        with self._reading() as connection:
            rows = connection.execute(sa.select(table).order_by(table.c.created, table.c.tag)).all()
            return tuple(as_record(Route, row) for row in rows)

    def put_route(self, tag: str, version: str, *, reason: str, actor: str = "loop") -> Route:
        """Give a tag's streams a version, whoever it was trained for.

        Raises:
            RegistryError: unknown_version; illegal_move: it was revoked, or is stale.
        """
        route = Route(tag, version, reason, self._clock())
        with self._writing() as connection:
            found = self._known(connection, version)
            if found.state in ("revoked", "stale"):
                raise RegistryError(f"version {version} is {found.state} and serves nobody", "illegal_move")
            connection.execute(
                self._database.upsert(tables.routes, as_row(route), keep=frozenset({"created"}))
            )
            self._note(connection, replace(found, tag=tag), "route", reason, actor)
        return route

    def drop_route(self, tag: str, *, reason: str, actor: str = "loop") -> None:
        """The tag's streams get what all others get; without a route nothing happens."""
        table = tables.routes
        with self._writing() as connection:
            row = connection.execute(sa.select(table.c.version).where(table.c.tag == tag)).first()
            if row is not None:
                connection.execute(sa.delete(table).where(table.c.tag == tag))
                self._note(connection, Version(row.version, tag=tag), "no_route", reason, actor)

    def next_revision(self, name: str = "draft_plan", *, at_least: int = 0) -> int:
        """A number above all that were given before, over restarts, and above `at_least`, which workers may know."""
        table = tables.counters
        with self._writing() as connection:
            row = connection.execute(sa.select(table.c.value).where(table.c.name == name)).first()
            value = max(row.value if row else 0, at_least) + 1
            connection.execute(self._database.upsert(table, {"name": name, "value": value}))
            return int(value)

    def put_deletion(self, deletion: Deletion) -> None:
        """Add a deletion, or replace what is known of it."""
        with self._writing() as connection:
            connection.execute(self._database.upsert(tables.deletions, as_row(deletion)))

    def deletions(self, *, cursor: int = 0, limit: int = 100) -> Page[Deletion]:
        """Newest first."""
        table = tables.deletions
        return self._page(Deletion, table, [], (table.c.created.desc(), table.c.id), cursor, limit)

    # -- figures -----------------------------------------------------------------------------------------

    def add_figures(self, points: Iterable[FigurePoint]) -> None:
        """Add these sums to what is there of the same time, width, version and domain."""
        with self._writing() as connection:
            figures.add(connection, self._database, points)

    def figures(
        self, *, since: float, until: float, version: str | None = None, domain: str | None = None
    ) -> tuple[FigurePoint, ...]:
        """Points that began in [since, until), oldest first."""
        with self._reading() as connection:
            return figures.read(connection, since, until, version, domain)

    def compact_figures(
        self, *, fine_s: float = 86400.0, width_s: float = 300.0, keep_s: float = 30 * 86400.0
    ) -> None:
        """Points older than `fine_s` are merged into buckets of `width_s`; those older than `keep_s` go."""
        now = self._clock()
        with self._writing() as connection:
            figures.compact(connection, self._database, now - fine_s, width_s, now - keep_s)
