"""Records -> tables: one for each record, a column for each field of the same name, alike on SQLite and PostgreSQL.

Whoever changes a table adds a step to `migrations` that does the same: a test compares the two.
"""

from __future__ import annotations

import json
import math
from typing import Any

import sqlalchemy as sa
from sqlalchemy.types import TypeDecorator

from paceline.cluster.errors import RegistryError

MAX_NAME = 256
"""Characters of what is looked up by: PostgreSQL indexes short values only."""


class Words(TypeDecorator[str]):
    """Text of any length. What a database cannot hold, a null byte or half a surrogate pair, becomes a mark."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        return None if value is None else _storable(value)


class Name(TypeDecorator[str]):
    """Text that is looked up by."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        if value is not None and len(value) > MAX_NAME:
            raise RegistryError(f"{value[:40]!r}...: expected at most {MAX_NAME} characters", "bad_value")
        return None if value is None else _storable(value)


class Number(TypeDecorator[float]):
    """A float64. Infinities and NaN are refused: SQLite would keep NaN as NULL and say nothing."""

    impl = sa.Double
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        if value is not None and not math.isfinite(value):
            raise RegistryError(f"{value}: expected a finite number", "bad_value")
        return value


class Json(TypeDecorator[Any]):
    """Anything JSON can say, as text: so both databases keep the same. Infinities and NaN become null."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        try:
            return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise RegistryError(f"{str(value)[:40]!r}: expected JSON: {error}", "bad_value") from None

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:
        return None if value is None else json.loads(value)


def _storable(text: str) -> str:
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _column(name: str, type_: Any, *, key: bool = False, null: bool = False) -> sa.Column[Any]:
    return sa.Column(name, type_, primary_key=key, nullable=null)


def _id() -> sa.Column[int]:
    """Grows, and is never used again: SQLite would give the id of a deleted last row to the next one."""
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    return sa.Column("id", number, primary_key=True, autoincrement=True)


metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)

versions = sa.Table(
    "versions",
    metadata,
    _column("version", Name(), key=True),
    _column("url", Words()),
    _column("sha256", Words()),
    _column("base", Name()),
    _column("run_id", Name()),
    _column("tag", Name()),
    _column("target", Name()),
    _column("state", Name()),
    _column("created", Number()),
    _column("changed", Number()),
    _column("reason", Words()),
    _column("pinned", sa.Boolean()),
    _column("card", Json()),
    sa.Index("ix_versions_created", "created"),
)
# The guard that even two programs, or a program and a hand, cannot get around.
for _state in ("live", "canary"):
    sa.Index(
        f"uq_versions_{_state}",
        versions.c.tag,
        unique=True,
        sqlite_where=sa.text(f"state = '{_state}'"),
        postgresql_where=sa.text(f"state = '{_state}'"),
    )

parents = sa.Table(
    "parents",
    metadata,
    _column("version", Name(), key=True),
    _column("parent", Name(), key=True),
    sa.Column("place", sa.Integer(), nullable=False),
    sa.Index("ix_parents_parent", "parent"),
    sa.ForeignKeyConstraint(["version"], ["versions.version"], name="fk_parents_version"),
)

sources = sa.Table(
    "sources",
    metadata,
    _column("version", Name(), key=True),
    _column("tenant", Name(), key=True),
    _column("request_id", Name(), key=True),
    _column("shard", Name(), key=True),
    sa.Column("num_tokens", sa.BigInteger(), nullable=False),
    _column("created", Number()),
    sa.Index("ix_sources_tenant", "tenant"),
    sa.Index("ix_sources_request_id", "request_id"),
    sa.Index("ix_sources_shard", "shard"),
    sa.ForeignKeyConstraint(["version"], ["versions.version"], name="fk_sources_version"),
)

runs = sa.Table(
    "runs",
    metadata,
    _column("run_id", Name(), key=True),
    _column("kind", Name()),
    _column("trigger", Words()),
    _column("base", Name()),
    _column("tag", Name()),
    _column("settings", Json()),
    _column("state", Name()),
    _column("created", Number()),
    _column("started", Number(), null=True),
    _column("ended", Number(), null=True),
    sa.Column("steps", sa.BigInteger(), nullable=False),
    sa.Column("num_steps", sa.BigInteger(), nullable=False),
    sa.Column("tokens", sa.BigInteger(), nullable=False),
    _column("seconds", Number()),
    _column("cpu_s", Number()),
    _column("loss", Json()),
    _column("report", Json()),
    _column("error", Words()),
    _column("result", Name()),
    sa.Index("ix_runs_created", "created"),
)

gates = sa.Table(
    "gates",
    metadata,
    _column("run_id", Name(), key=True),
    _column("champion", Name()),
    _column("candidate", Name()),
    _column("passed", sa.Boolean()),
    _column("reason", Words()),
    _column("created", Number()),
    _column("report", Json()),
    sa.Index("ix_gates_candidate", "candidate"),
)

ledger = sa.Table(
    "ledger",
    metadata,
    _id(),
    _column("decision", Name()),
    _column("reason", Words()),
    _column("decided_at", Number()),
    _column("run_id", Name()),
    _column("version", Name()),
    _column("tag", Name()),
    _column("predicted_s", Number(), null=True),
    _column("predicted_cost_s", Number(), null=True),
    _column("realised_s", Number(), null=True),
    _column("spent_s", Number()),
    _column("until", Number(), null=True),
    sa.Index("ix_ledger_run_id", "run_id"),
    sqlite_autoincrement=True,
)

events = sa.Table(
    "events",
    metadata,
    _id(),
    _column("time", Number()),
    _column("version", Name()),
    _column("event", Name()),
    _column("reason", Words()),
    _column("actor", Name()),
    _column("tag", Name()),
    sa.Index("ix_events_time", "time"),
    sa.Index("ix_events_version", "version"),
    sqlite_autoincrement=True,
)

audit = sa.Table(
    "audit",
    metadata,
    _id(),
    _column("time", Number()),
    _column("actor", Name()),
    _column("action", Name()),
    _column("subject", Words()),
    _column("detail", Json()),
    _column("outcome", Words()),
    _column("address", Words()),
    sa.Index("ix_audit_time", "time"),
    sqlite_autoincrement=True,
)

settings = sa.Table(
    "settings",
    metadata,
    _column("key", Name(), key=True),
    _column("value", Json()),
    _column("changed", Number()),
)

routes = sa.Table(
    "routes",
    metadata,
    _column("tag", Name(), key=True),
    _column("version", Name()),
    _column("reason", Words()),
    _column("created", Number()),
    sa.ForeignKeyConstraint(["version"], ["versions.version"], name="fk_routes_version"),
)

counters = sa.Table(
    "counters",
    metadata,
    _column("name", Name(), key=True),
    sa.Column("value", sa.BigInteger(), nullable=False),
)

figures = sa.Table(
    "figures",
    metadata,
    _column("time", Number(), key=True),
    _column("width_s", Number(), key=True),
    _column("version", Name(), key=True),
    _column("domain", Name(), key=True),
    sa.Column("num_streams", sa.BigInteger(), nullable=False),
    sa.Column("num_tokens", sa.BigInteger(), nullable=False),
    sa.Column("num_steps", sa.BigInteger(), nullable=False),
    _column("seconds", Number()),
    _column("tested", Json()),
    _column("accepted", Json()),
)

deletions = sa.Table(
    "deletions",
    metadata,
    _column("id", Name(), key=True),
    _column("created", Number()),
    _column("actor", Name()),
    _column("what", Words()),
    _column("state", Name()),
    sa.Column("num_requests", sa.BigInteger(), nullable=False),
    _column("versions", Json()),
    _column("error", Words()),
)
