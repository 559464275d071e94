"""A database's URL -> transactions on it, its tables brought up to date, its failures in our words.

SQLite: one file that only its owner may read, in WAL mode, so that readers never wait. PostgreSQL: by psycopg 3.
Nothing waits for long: a lock, a statement and a connection each have a limit, after which the call is `Unavailable`.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.dialects import postgresql, sqlite

from paceline.cluster.errors import ConfigError, PacelineError, RegistryError, Unavailable
from paceline.cluster.registry.tables import metadata

_SQLITE, _POSTGRES = "sqlite", "postgresql+psycopg"
_LOCK_KEY = 0x7061_6365
"""PostgreSQL's advisory locks are numbers: "pace"."""
_CONNECT_WAIT_S = 3
_STATEMENT_WAIT_S = 15.0
_USE_S = 20.0
"""Of a connection, for one transaction."""
_PING_WAIT_S = 3.0
_MIGRATION_WAIT_S, _MIGRATION_S = 60.0, 600.0
_migrating = threading.Lock()
"""Alembic keeps what it works on in module globals."""


def resolve_url(text: str, home: Path) -> sa.URL:
    """`learning.registry` -> a URL with its driver. auto is registry.db in `home`.

    Raises:
        ConfigError: it is no URL, of another database, or a needed package is missing.
    """
    if text == "auto":
        return sa.URL.create(_SQLITE, database=str(home / "registry.db"))
    try:
        url = sa.make_url(text)
    except sa.exc.ArgumentError:
        raise ConfigError(
            f"learning.registry={_hidden(text)!r}: expected auto, sqlite:////absolute/path or postgresql://user@host/name"
        ) from None
    shown = url.render_as_string(hide_password=True)
    if url.get_backend_name() == "sqlite":
        if (
            not url.database or not Path(url.database).is_absolute()
        ):  # each process has its own working directory
            raise ConfigError(
                f"learning.registry={shown!r}: expected an absolute path: sqlite:////srv/registry.db"
            )
        return url.set(drivername=_SQLITE)
    if url.get_backend_name() in ("postgresql", "postgres"):
        if find_spec("psycopg") is None:
            raise ConfigError(f"learning.registry={shown!r}: needs psycopg; pip install 'paceline[postgres]'")
        return url.set(drivername=_POSTGRES)
    raise ConfigError(f"learning.registry={shown!r}: expected a SQLite or PostgreSQL URL, or auto")


def _hidden(text: str) -> str:
    """What may be shown of something that is not even a URL, but may hold a password."""
    return text if "@" not in text else "...@" + text.rpartition("@")[2]


class Database:
    """A pool of connections. Safe for any number of threads."""

    def __init__(self, url: sa.URL, *, wait_s: float = 5.0) -> None:
        """`wait_s`: for a lock that another writer holds, and for a free connection."""
        self._wait_s = wait_s
        self.shown = url.render_as_string(hide_password=True)
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self._url = url
        self._use_s = _USE_S
        self._engine = sa.create_engine(url, **self._options())
        if self.is_sqlite:
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
            sa.event.listen(self._engine, "begin", _begin_sqlite)
        else:
            sa.event.listen(self._engine, "checkout", self._watch)
            sa.event.listen(self._engine, "checkin", _unwatch)
            sa.event.listen(self._engine, "invalidate", _unwatch)

    def _options(self) -> dict[str, Any]:
        if self.is_sqlite:
            return {"connect_args": {"timeout": self._wait_s}}
        settings = (
            f"-c lock_timeout={self._wait_s * 1000:.0f} -c statement_timeout={_STATEMENT_WAIT_S * 1000:.0f} "
            "-c idle_in_transaction_session_timeout=60000 -c timezone=UTC"
        )
        arguments = {
            "connect_timeout": _CONNECT_WAIT_S,
            "application_name": "paceline",
            "options": settings,
            "keepalives_idle": 10,
            "tcp_user_timeout": 10_000,
        }
        return {
            "connect_args": arguments,
            "pool_timeout": self._wait_s,
            "pool_size": 4,
            "max_overflow": 4,
        }

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """One transaction that sees one state of everything.

        Raises:
            Unavailable: the database does not answer, or not in time.
        """
        with self._failures(), self._engine.connect() as connection:
            if not self.is_sqlite:
                connection = connection.execution_options(
                    isolation_level="REPEATABLE READ", postgresql_readonly=True
                )
            with connection.begin():
                yield connection

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """One transaction: all of it is kept, or none. Writers go one after the other.

        Raises:
            Unavailable: the database does not answer, or not in time. Should the connection have broken at the very
                end, what was written may be there nevertheless.
            RegistryError: a rule of the tables forbids it.
        """
        with self._failures(), self._engine.connect() as connection:
            connection = connection.execution_options(paceline_writes=True)
            with connection.begin():
                if not self.is_sqlite:
                    connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
                yield connection

    def upsert(
        self, table: sa.Table, row: dict[str, Any], *, keep: frozenset[str] = frozenset()
    ) -> sa.Executable:
        """Insert a row, or replace all but the key and the columns to `keep` of the one there is."""
        keys = [column.name for column in table.primary_key]
        rest = [name for name in row if name not in keys and name not in keep]
        insert: Any = (sqlite.insert if self.is_sqlite else postgresql.insert)(table).values(**row)
        if not rest:
            return insert.on_conflict_do_nothing(index_elements=keys)  # type: ignore[no-any-return]
        changes = {name: insert.excluded[name] for name in rest}
        return insert.on_conflict_do_update(index_elements=keys, set_=changes)  # type: ignore[no-any-return]

    def insert_missing(self, table: sa.Table) -> sa.Executable:
        """Insert rows, without those whose key is there."""
        keys = [column.name for column in table.primary_key]
        insert: Any = (sqlite.insert if self.is_sqlite else postgresql.insert)(table)
        return insert.on_conflict_do_nothing(index_elements=keys)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """What SQLAlchemy and the drivers raise -> our errors."""
        try:
            yield
        except sa.exc.StatementError as error:
            if isinstance(error.orig, PacelineError):  # a value was refused on its way in
                raise error.orig from None
            if isinstance(error, sa.exc.IntegrityError):
                raise RegistryError(f"registry: {_reason(error)}", "illegal_move") from error
            if isinstance(error, sa.exc.DataError):
                raise RegistryError(f"registry: {_reason(error)}", "bad_value") from error
            raise Unavailable(f"registry {self.shown}: {_reason(error)}") from error
        except sa.exc.SQLAlchemyError as error:  # no connection became free
            raise Unavailable(f"registry {self.shown}: {_reason(error)}") from error
        except self._engine.dialect.loaded_dbapi.Error as error:  # while a new connection was prepared
            raise Unavailable(f"registry {self.shown}: {_reason(error)}") from error
        except OSError as error:
            raise Unavailable(f"registry {self.shown}: {error.strerror or error}") from error

    # -- tables ------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the tables, or bring them up to date. Of several that start at once, one does it and the others wait.

        Raises:
            RegistryError: a newer program has written this database.
            Unavailable: as above.
        """
        with self._changing_tables():
            if self.is_sqlite:
                with _file_lock(Path(self._url.database or "")):
                    self._enter_wal()
                    self._migrate("head")
            else:
                self._migrate("head")

    def downgrade(self, revision: str) -> None:
        """Go back to an older step, such as "-1" or "base". What its tables cannot hold is lost."""
        with self._changing_tables():
            self._migrate(revision, is_down=True)

    @contextmanager
    def _changing_tables(self) -> Iterator[None]:
        with _migrating, self._failures():
            self._use_s = _MIGRATION_S
            try:
                yield
            finally:
                self._use_s = _USE_S

    def revision(self) -> str | None:
        """Of the tables as they are; None where there are none."""
        with self.reading() as connection:
            return MigrationContext.configure(connection).get_current_revision()

    def _enter_wal(self) -> None:
        """Once for the file: it remembers. Outside of a transaction, hence by the driver's own connection."""
        raw = self._engine.raw_connection()
        try:
            raw.cursor().execute("PRAGMA journal_mode=WAL")
        finally:
            raw.close()

    def _watch(self, connection: Any, record: Any, _: Any) -> None:
        """A connection is taken from the pool: see that somebody is at its other end, and that its use has an end.

        The server's own limits do not help if it is the server that hangs, nor TCP's while its kernel lives.
        """
        try:
            watch = _Watch(connection, _PING_WAIT_S)
            try:
                connection.execute("SELECT 1")
                connection.rollback()
            finally:
                watch.end()
        except self._engine.dialect.loaded_dbapi.Error as error:
            raise sa.exc.DisconnectionError(str(error)) from error  # the pool takes a new one
        record.info["watch"] = _Watch(connection, self._use_s)

    def _migrate(self, revision: str, *, is_down: bool = False) -> None:
        script = scripts()

        def steps(current: Any, _: MigrationContext) -> Any:
            if is_down:
                return script._downgrade_revs(revision, current)
            return script._upgrade_revs(revision, current)

        with self._engine.connect() as connection:
            connection = connection.execution_options(paceline_writes=True)
            with connection.begin():
                if not self.is_sqlite:
                    limit = f"SET LOCAL lock_timeout = '{_MIGRATION_WAIT_S:.0f}s'"
                    connection.execute(sa.text(limit))
                    connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
                    connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
                self._check_known(script, MigrationContext.configure(connection).get_current_revision())
                with EnvironmentContext(Config(), script, fn=steps) as environment:
                    environment.configure(
                        connection=connection, target_metadata=metadata, transactional_ddl=True
                    )
                    environment.run_migrations()

    def _check_known(self, script: ScriptDirectory, current: str | None) -> None:
        known = [step.revision for step in script.walk_revisions()]
        if current is not None and current not in known:
            raise RegistryError(
                f"registry {self.shown}: its tables are those of step {current}, which a newer Paceline has made; "
                f"this one knows up to {known[0]}. Start the newer one, or point learning.registry at another database",
                "newer_schema",
            )


class _Watch:
    """Shuts a connection's socket after a while: whoever waits for an answer then gets an error instead."""

    def __init__(self, connection: Any, limit_s: float) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._timer = threading.Timer(limit_s, self._shut)
        self._timer.daemon = True
        self._timer.start()

    def _shut(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self._timer.cancel()
        self._timer.join()  # before the descriptor goes, which the next connection may get
        self._socket.close()


def _unwatch(_: Any, record: Any, *__: Any) -> None:
    if (watch := record.info.pop("watch", None)) is not None:
        watch.end()


def scripts() -> ScriptDirectory:
    """The steps in `migrations`, for Alembic."""
    folder = str(Path(__file__).with_name("migrations"))
    return ScriptDirectory(folder, version_locations=[folder])


def make_private(path: Path) -> None:
    """The database file is there, and only its owner may read it; SQLite gives what it puts beside it the same mode.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(f"learning.registry: {path}: {error.strerror}") from error


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Entering WAL mode does not wait for others that do the same; this does."""
    descriptor = os.open(f"{path}.lock", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # transactions begin where we say, not where the driver thinks
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    """A writer takes the lock at once: one that began by reading could not wait for it any more."""
    writes = connection.get_execution_options().get("paceline_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _reason(error: Exception) -> str:
    """The driver's own words, on one line; never the statement, which may hold anything."""
    cause = getattr(error, "orig", None) or error
    return " ".join(str(cause).split())[:300]
