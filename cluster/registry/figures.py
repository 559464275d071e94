"""Sums over streams -> rows by time, version and domain, that grow coarser with age."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import zip_longest

import sqlalchemy as sa

from paceline.cluster.registry import tables
from paceline.cluster.registry.database import Database
from paceline.cluster.registry.records import FigurePoint
from paceline.cluster.registry.store import as_record

Key = tuple[float, float, str, str]


def add(connection: sa.Connection, database: Database, points: Iterable[FigurePoint]) -> None:
    table = tables.figures
    for key, point in _by_key(points).items():
        row = connection.execute(sa.select(table).where(_is(key))).first()
        whole = point if row is None else merge(as_record(FigurePoint, row), point)
        connection.execute(database.upsert(table, vars(whole)))


def read(
    connection: sa.Connection, since: float, until: float, version: str | None, domain: str | None
) -> tuple[FigurePoint, ...]:
    table = tables.figures
    query = sa.select(table).where(table.c.time >= since, table.c.time < until)
    if version is not None:
        query = query.where(table.c.version == version)
    if domain is not None:
        query = query.where(table.c.domain == domain)
    order = (table.c.time, table.c.version, table.c.domain, table.c.width_s)
    return tuple(as_record(FigurePoint, row) for row in connection.execute(query.order_by(*order)))


def compact(
    connection: sa.Connection, database: Database, fine_until: float, width_s: float, keep_from: float
) -> None:
    """What began before `fine_until`, rounded down to a whole bucket so that none is merged by halves."""
    table = tables.figures
    horizon = math.floor(fine_until / width_s) * width_s
    connection.execute(sa.delete(table).where(table.c.time < keep_from))
    old = (table.c.time < horizon) & (table.c.width_s < width_s)
    points = [as_record(FigurePoint, row) for row in connection.execute(sa.select(table).where(old))]
    connection.execute(sa.delete(table).where(old))
    coarse = (
        replace(point, time=math.floor(point.time / width_s) * width_s, width_s=width_s) for point in points
    )
    add(connection, database, coarse)


def merge(one: FigurePoint, other: FigurePoint) -> FigurePoint:
    """The sum of two points of one key."""
    return replace(
        one,
        num_streams=one.num_streams + other.num_streams,
        num_tokens=one.num_tokens + other.num_tokens,
        num_steps=one.num_steps + other.num_steps,
        seconds=one.seconds + other.seconds,
        tested=_sums(one.tested, other.tested),
        accepted=_sums(one.accepted, other.accepted),
    )


def _sums(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


def _by_key(points: Iterable[FigurePoint]) -> dict[Key, FigurePoint]:
    found: dict[Key, FigurePoint] = {}
    for point in points:
        key = (point.time, point.width_s, point.version, point.domain)
        found[key] = merge(found[key], point) if key in found else point
    return found


def _is(key: Key) -> sa.ColumnElement[bool]:
    table = tables.figures
    columns = (table.c.time, table.c.width_s, table.c.version, table.c.domain)
    return sa.and_(*(column == value for column, value in zip(columns, key, strict=True)))
