"""What a version was trained from and on -> who has to be looked at when data is deleted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sqlalchemy as sa

from paceline.cluster.registry import tables
from paceline.cluster.registry.database import Database
from paceline.cluster.registry.records import Lineage, Source, TenantShare

_AT_ONCE = 500
"""Values in one statement; both databases take more, not any number."""


def add_parents(connection: sa.Connection, database: Database, version: str, parents: Sequence[str]) -> None:
    """Those that are known, in this order."""
    table = tables.versions
    known = set(connection.execute(sa.select(table.c.version).where(table.c.version.in_(parents))).scalars())
    rows = [
        {"version": version, "parent": parent, "place": place}
        for place, parent in enumerate(parents)
        if parent in known and parent != version
    ]
    if rows:
        connection.execute(database.insert_missing(tables.parents), rows)


def add_sources(
    connection: sa.Connection, database: Database, version: str, sources: Iterable[Source]
) -> None:
    rows = [{"version": version, **vars(source)} for source in sources]
    for start in range(0, len(rows), _AT_ONCE):
        connection.execute(database.insert_missing(tables.sources), rows[start : start + _AT_ONCE])


def of(connection: sa.Connection, version: str) -> Lineage:
    parents, sources = tables.parents, tables.sources
    above = connection.execute(
        sa.select(parents.c.parent).where(parents.c.version == version).order_by(parents.c.place)
    ).scalars()
    below = connection.execute(
        sa.select(parents.c.version).where(parents.c.parent == version).order_by(parents.c.version)
    ).scalars()
    requests = sa.func.count(sa.distinct(sa.func.nullif(sources.c.request_id, "")))
    by_tenant = connection.execute(
        sa.select(sources.c.tenant, requests, sa.func.sum(sources.c.num_tokens))
        .where(sources.c.version == version)
        .group_by(sources.c.tenant)
        .order_by(requests.desc(), sources.c.tenant)
    ).all()
    shards, first, last = connection.execute(
        sa.select(
            sa.func.count(sa.distinct(sa.func.nullif(sources.c.shard, ""))),
            sa.func.min(sa.func.nullif(sources.c.created, 0.0)),
            sa.func.max(sa.func.nullif(sources.c.created, 0.0)),
        ).where(sources.c.version == version)
    ).one()
    tenants = tuple(TenantShare(tenant, int(num), int(tokens)) for tenant, num, tokens in by_tenant)
    return Lineage(version, tuple(above), tuple(below), tenants, int(shards), first, last)


def edges(connection: sa.Connection) -> tuple[tuple[str, str], ...]:
    table = tables.parents
    order = (table.c.version, table.c.place)
    rows = connection.execute(sa.select(table.c.version, table.c.parent).order_by(*order))
    return tuple((row.version, row.parent) for row in rows)


def sources(connection: sa.Connection, version: str) -> tuple[Source, ...]:
    table = tables.sources
    order = (table.c.tenant, table.c.request_id, table.c.shard)
    rows = connection.execute(sa.select(table).where(table.c.version == version).order_by(*order))
    return tuple(Source(row.tenant, row.request_id, row.shard, row.num_tokens, row.created) for row in rows)


def requests_like(connection: sa.Connection, prefix: str) -> tuple[str, ...]:
    column = tables.sources.c.request_id
    query = sa.select(column).distinct().where(column.startswith(prefix, autoescape=True)).order_by(column)
    return tuple(connection.execute(query).scalars())


def trained_on(
    connection: sa.Connection, tenant: str, request_ids: Sequence[str], shards: Sequence[str]
) -> tuple[str, ...]:
    """Weights remember: whoever was trained from a version that learned from it has learned from it too."""
    table, above, versions = tables.sources, tables.parents, tables.versions
    found: set[str] = set()
    conditions = [table.c.tenant == tenant] if tenant else []
    for column, names in ((table.c.request_id, request_ids), (table.c.shard, shards)):
        for start in range(0, len(names), _AT_ONCE):
            conditions.append(column.in_(names[start : start + _AT_ONCE]))
    for condition in conditions:
        found.update(connection.execute(sa.select(table.c.version).distinct().where(condition)).scalars())
    children: dict[str, list[str]] = {}
    for version, parent in connection.execute(sa.select(above.c.version, above.c.parent)):
        children.setdefault(parent, []).append(version)
    waiting = list(found)
    while waiting:
        new = [child for child in children.get(waiting.pop(), ()) if child not in found]
        found.update(new)
        waiting += new
    by_age = connection.execute(
        sa.select(versions.c.version).order_by(versions.c.created, versions.c.version)
    )
    return tuple(version for version in by_age.scalars() if version in found)


def cycle(connection: sa.Connection) -> list[str]:
    """Versions that are ancestors of themselves: there should be none."""
    left: dict[str, set[str]] = {}
    for version, parent in edges(connection):
        left.setdefault(version, set()).add(parent)
        left.setdefault(parent, set())
    while free := [version for version, parents in left.items() if not parents]:
        for version in free:
            del left[version]
        for parents in left.values():
            parents.difference_update(free)
    return sorted(left)
