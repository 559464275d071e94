"""New versions, and what the loop and operators decide about them -> states that only ever change as `MOVES` allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from paceline.cluster.errors import RegistryError
from paceline.cluster.registry import lineage, tables
from paceline.cluster.registry.records import (
    MOVES,
    Event,
    Lineage,
    Page,
    RolloutEvent,
    Source,
    Version,
    VersionState,
)
from paceline.cluster.registry.store import Store, as_record, as_row

_EVENTS: dict[VersionState, Event] = {
    "candidate": "candidate",
    "rejected": "rejected",
    "canary": "canary",
    "live": "promoted",
    "retired": "retired",
    "rolled_back": "rolled_back",
    "stale": "stale",
    "revoked": "revoked",
}


class Versions(Store):
    """The part of the registry that knows drafts."""

    # -- versions ----------------------------------------------------------------------------------------

    def add_version(
        self, version: Version, *, parents: Sequence[str] = (), sources: Iterable[Source] = ()
    ) -> Version:
        """Keep a new version and where it comes from. One that is there already stays as it is, and is returned.

        `parents` defaults to its base, if that is known; unknown parents are left out.

        Raises:
            RegistryError: illegal_move: it is to be live or canary, and its tag has such a version.
        """
        now = self._clock()
        new = replace(version, created=version.created or now, changed=version.changed or now)
        with self._writing() as connection:
            known = self._find(connection, new.version)
            if known is None:
                self._check_place(connection, new, new.state)
                connection.execute(sa.insert(tables.versions).values(**as_row(new)))
            lineage.add_parents(connection, self._database, new.version, parents or (new.base,))
            lineage.add_sources(connection, self._database, new.version, sources)
        return known or new

    def version(self, version: str) -> Version | None:
        """None if there is none of that name."""
        with self._reading() as connection:
            return self._find(connection, version)

    def versions(
        self,
        *,
        states: Sequence[VersionState] = (),
        tag: str | None = None,
        target: str | None = None,
        query: str = "",
        cursor: int = 0,
        limit: int = 100,
    ) -> Page[Version]:
        """Newest first. `query` is looked for in version, tag and reason."""
        table = tables.versions
        where: list[sa.ColumnElement[bool]] = []
        if states:
            where.append(table.c.state.in_(states))
        if tag is not None:
            where.append(table.c.tag == tag)
        if target is not None:
            where.append(table.c.target == target)
        if query:
            columns = (table.c.version, table.c.tag, table.c.reason)
            where.append(sa.or_(*(sa.cast(c, sa.Text).icontains(query, autoescape=True) for c in columns)))
        order = (table.c.created.desc(), table.c.version)
        return self._page(Version, table, where, order, cursor, limit)

    def live(self, tag: str = "") -> Version | None:
        """The version that serves a tag."""
        with self._reading() as connection:
            return self._in_state(connection, tag, "live")

    def canary(self, tag: str = "") -> Version | None:
        """The version that some of a tag's streams try."""
        with self._reading() as connection:
            return self._in_state(connection, tag, "canary")

    def move(self, version: str, state: VersionState, *, reason: str, actor: str = "loop") -> Version:
        """Bring a version into another state, with an event. Where it is in it already, nothing happens.

        Raises:
            RegistryError: unknown_version; illegal_move: `MOVES` has no such step, or its tag has a live version or
                a canary already (`promote` and `roll_back` replace it).
        """
        with self._writing() as connection:
            return self._move(connection, self._known(connection, version), state, reason, actor)

    def promote(self, version: str, *, reason: str, actor: str = "loop", force: bool = False) -> Version:
        """Make a version live for its tag; the one that was is retired.

        Raises:
            RegistryError: unknown_version; illegal_move; pinned: the live version is, and `force` is not given.
        """
        with self._writing() as connection:
            new = self._known(connection, version)
            old = self._in_state(connection, new.tag, "live")
            if old is not None and old.version != version:
                if old.pinned and not force:
                    raise RegistryError(f"version {old.version} is pinned: unpin it first", "pinned")
                self._check_move(new, "live")
                self._move(connection, old, "retired", f"{version} took over: {reason}", actor)
            return self._move(connection, new, "live", reason, actor)

    def roll_back(
        self, tag: str = "", *, to: str = "", reason: str, actor: str = "loop"
    ) -> tuple[Version, Version]:
        """Take a tag's live version back; -> (it, the version that is live instead).

        `to` defaults to the one that was live before it, for the same target.

        Raises:
            RegistryError: unknown_version: there is no live version, or none before it; illegal_move.
        """
        with self._writing() as connection:
            bad = self._in_state(connection, tag, "live")
            if bad is None:
                raise RegistryError(f"tag {tag!r} has no live version to take back", "unknown_version")
            good = self._known(connection, to) if to else self._predecessor(connection, bad)
            if good is None:
                raise RegistryError(
                    f"version {bad.version} has no predecessor to go back to", "unknown_version"
                )
            if good.tag != tag:
                raise RegistryError(
                    f"version {good.version} is for tag {good.tag!r}, not {tag!r}", "illegal_move"
                )
            if good.version != bad.version:
                self._check_move(good, "live")
            bad = self._move(connection, bad, "rolled_back", reason, actor)
            return bad, self._move(connection, good, "live", f"{bad.version} was taken back", actor)

    def pin(self, version: str, *, reason: str, actor: str) -> Version:
        """A live version stays live until somebody says otherwise.

        Raises:
            RegistryError: unknown_version; illegal_move: it is not live.
        """
        return self._set_pinned(version, True, reason, actor)

    def unpin(self, version: str, *, reason: str, actor: str) -> Version:
        """See `pin`."""
        return self._set_pinned(version, False, reason, actor)

    def drop_weights(self, version: str) -> None:
        """Its weights are on storage no more; all else that is known of it stays.

        Raises:
            RegistryError: unknown_version.
        """
        with self._writing() as connection:
            self._known(connection, version)
            self._update(connection, version, url="")

    def retarget(self, target: str, *, actor: str = "loop") -> tuple[Version, ...]:
        """Another target is served: versions for others become stale; -> those."""
        table = tables.versions
        with self._writing() as connection:
            where = (table.c.target != target) & table.c.state.not_in(("stale", "revoked"))
            rows = connection.execute(sa.select(table).where(where)).all()
            old = [as_record(Version, row) for row in rows]
            reason = f"the target is {target} now"
            return tuple(self._move(connection, version, "stale", reason, actor) for version in old)

    def _set_pinned(self, version: str, pinned: bool, reason: str, actor: str) -> Version:
        with self._writing() as connection:
            found = self._known(connection, version)
            if found.pinned == pinned:
                return found
            if found.state != "live":
                raise RegistryError(
                    f"version {version} is {found.state}: only a live one is pinned", "illegal_move"
                )
            self._update(connection, version, pinned=pinned)
            self._note(connection, found, "pinned" if pinned else "unpinned", reason, actor)
            return replace(found, pinned=pinned)

    def _move(
        self, connection: sa.Connection, version: Version, state: VersionState, reason: str, actor: str
    ) -> Version:
        if version.state == state:
            return version
        self._check_move(version, state)
        self._check_place(connection, version, state)
        moved = replace(version, state=state, reason=reason, changed=self._clock(), pinned=False)
        self._update(
            connection, version.version, state=state, reason=reason, changed=moved.changed, pinned=False
        )
        self._note(connection, version, _EVENTS[state], reason, actor)
        return moved

    def _check_move(self, version: Version, state: VersionState) -> None:
        if state != version.state and state not in MOVES[version.state]:
            legal = ", ".join(sorted(MOVES[version.state])) or "nothing any more"
            raise RegistryError(
                f"version {version.version} is {version.state} and cannot become {state}; it can become {legal}",
                "illegal_move",
            )

    def _check_place(self, connection: sa.Connection, version: Version, state: VersionState) -> None:
        if state in ("live", "canary"):
            other = self._in_state(connection, version.tag, state)
            if other is not None and other.version != version.version:
                raise RegistryError(
                    f"version {version.version} cannot be {state}: {other.version} is, for tag {version.tag!r}",
                    "illegal_move",
                )

    def _predecessor(self, connection: sa.Connection, version: Version) -> Version | None:
        table = tables.versions
        where = (
            (table.c.tag == version.tag) & (table.c.target == version.target) & (table.c.state == "retired")
        )
        query = (
            sa.select(table).where(where).order_by(table.c.changed.desc(), table.c.created.desc()).limit(1)
        )
        row = connection.execute(query).first()
        return None if row is None else as_record(Version, row)

    def _find(self, connection: sa.Connection, version: str) -> Version | None:
        row = connection.execute(
            sa.select(tables.versions).where(tables.versions.c.version == version)
        ).first()
        return None if row is None else as_record(Version, row)

    def _known(self, connection: sa.Connection, version: str) -> Version:
        found = self._find(connection, version)
        if found is None:
            raise RegistryError(
                f"version {version[:80]!r}: the registry knows none of that name", "unknown_version"
            )
        return found

    def _in_state(self, connection: sa.Connection, tag: str, state: VersionState) -> Version | None:
        table = tables.versions
        row = connection.execute(sa.select(table).where(table.c.tag == tag, table.c.state == state)).first()
        return None if row is None else as_record(Version, row)

    def _update(self, connection: sa.Connection, version: str, **values: Any) -> None:
        table = tables.versions
        connection.execute(sa.update(table).where(table.c.version == version).values(**values))

    def _note(
        self, connection: sa.Connection, version: Version, event: Event, reason: str, actor: str
    ) -> None:
        note = RolloutEvent(self._clock(), version.version, event, reason, actor, version.tag)
        connection.execute(sa.insert(tables.events).values(**as_row(note)))

    # -- lineage -----------------------------------------------------------------------------------------

    def add_sources(self, version: str, sources: Iterable[Source]) -> None:
        """A version was trained on these too.

        Raises:
            RegistryError: unknown_version.
        """
        with self._writing() as connection:
            self._known(connection, version)
            lineage.add_sources(connection, self._database, version, sources)

    def lineage(self, version: str) -> Lineage:
        """Raises RegistryError: unknown_version."""
        with self._reading() as connection:
            self._known(connection, version)
            return lineage.of(connection, version)

    def edges(self) -> tuple[tuple[str, str], ...]:
        """All (version, parent)."""
        with self._reading() as connection:
            return lineage.edges(connection)

    def sources(self, version: str) -> tuple[Source, ...]:
        """All that a version itself was trained on."""
        with self._reading() as connection:
            return lineage.sources(connection, version)

    def requests_like(self, prefix: str) -> tuple[str, ...]:
        """Ids of requests that versions were trained on and that begin so."""
        with self._reading() as connection:
            return lineage.requests_like(connection, prefix)

    def trained_on(
        self,
        *,
        tenant: str = "",
        request_id: str = "",
        request_ids: Sequence[str] = (),
        shards: Sequence[str] = (),
    ) -> tuple[str, ...]:
        """Versions that learned from any of these, and those that were trained from such a one; oldest first."""
        requests = [request_id, *request_ids] if request_id else request_ids
        with self._reading() as connection:
            return lineage.trained_on(connection, tenant, requests, shards)

    def check_integrity(self) -> None:
        """One live version and one canary for a tag at most; only live ones are pinned; no cycle of parents.

        Raises:
            RegistryError: bad_value, with what was found.
        """
        table = tables.versions
        with self._reading() as connection:
            held = connection.execute(
                sa.select(table.c.tag, table.c.state).where(table.c.state.in_(("live", "canary")))
            ).all()
            pinned = connection.execute(
                sa.select(table.c.version).where(table.c.pinned, table.c.state != "live")
            ).all()
            cycle = lineage.cycle(connection)
        if len(held) != len(set(held)) or pinned or cycle:
            raise RegistryError(f"registry: held {held}, pinned {pinned}, cycle {cycle}", "bad_value")
