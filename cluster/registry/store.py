"""A URL -> transactions on prepared tables, rows as records, pages of long lists: what all of the registry needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import sqlalchemy as sa

from paceline.cluster.registry.database import Database, make_private, resolve_url
from paceline.cluster.registry.records import Page

T = TypeVar("T")
MAX_LIMIT = 1000
"""Rows of one page."""


class Store:
    """Opens the database when it is first needed, and again as long as that failed."""

    def __init__(
        self, url: str, home: Path, *, clock: Callable[[], float] = time.time, wait_s: float = 5.0
    ) -> None:
        """Nothing is opened yet: the first call does that, and each one after it as long as that failed.

        Args:
            url: `learning.registry`.
            home: PACELINE_HOME, where "auto" is.
            wait_s: for other writers and for a free connection.

        Raises:
            ConfigError: the URL cannot be used.
        """
        self._url = resolve_url(url, home)
        self._database = Database(self._url, wait_s=wait_s)
        self._clock = clock
        self._is_prepared = False
        self._preparing = threading.Lock()

    @classmethod
    def open(cls, url: str, home: Path, *, clock: Callable[[], float] = time.time) -> Self:
        """A registry whose tables are there and up to date.

        Raises:
            ConfigError: the URL cannot be used.
            RegistryError: a newer program has written this database.
            Unavailable: the database cannot be reached.
        """
        registry = cls(url, home, clock=clock)
        try:
            registry.prepare()
        except BaseException:
            registry.close()
            raise
        return registry

    def prepare(self) -> None:
        """Make the tables or bring them up to date, once. See `open` for what it raises."""
        with self._preparing:
            if self._is_prepared:
                return
            if self._database.is_sqlite:
                make_private(Path(self._url.database or ""))
            self._database.prepare()
            self._is_prepared = True

    def close(self) -> None:
        self._database.close()

    @property
    def shown_url(self) -> str:
        """For people: without a password."""
        return self._database.shown

    def check(self) -> None:
        """Raises Unavailable if the database does not answer now."""
        with self._reading() as connection:
            connection.execute(sa.select(1))

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        self.prepare()
        with self._database.reading() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        self.prepare()
        with self._database.writing() as connection:
            yield connection

    def _append(self, connection: sa.Connection, table: sa.Table, record: Any) -> int:
        key = connection.execute(sa.insert(table).values(**as_row(record))).inserted_primary_key
        assert key is not None
        return int(key[0])

    def _one(
        self, connection: sa.Connection, kind: type[T], table: sa.Table, where: Any, *order: Any
    ) -> T | None:
        row = connection.execute(sa.select(table).where(where).order_by(*order).limit(1)).first()
        return None if row is None else as_record(kind, row)

    def _page(
        self,
        kind: type[T],
        table: sa.Table,
        where: Sequence[sa.ColumnElement[bool]],
        order: Sequence[Any],
        cursor: int,
        limit: int,
    ) -> Page[T]:
        """By place in the list, or, where rows have numbers, by those: new rows in front then move nothing."""
        limit, cursor = max(1, min(limit, MAX_LIMIT)), max(0, cursor)
        number = table.c.get("id")
        is_numbered = number is not None and isinstance(number.type, sa.BigInteger)
        query = sa.select(table).where(*where).order_by(*order).limit(limit + 1)
        if not is_numbered:
            query = query.offset(cursor)
        elif cursor:
            query = query.where(table.c.id < cursor)
        with self._reading() as connection:
            total = connection.execute(
                sa.select(sa.func.count()).select_from(table).where(*where)
            ).scalar_one()
            rows = connection.execute(query).all()
        items = tuple(as_record(kind, row) for row in rows[:limit])
        last = rows[limit - 1].id if is_numbered and len(rows) > limit else cursor + limit
        return Page(items, int(total), last if len(rows) > limit else None)


def as_row(record: Any) -> dict[str, Any]:
    """A record's fields by column; the database gives ids of its own."""
    return {name: value for name, value in vars(record).items() if name != "id" or isinstance(value, str)}


def as_record(kind: type[T], row: sa.Row[Any]) -> T:
    values = row._mapping
    return msgspec.convert({name: values[name] for name in kind.__dataclass_fields__}, kind)  # type: ignore[attr-defined]
