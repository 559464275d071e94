"""nothing -> the tables of the learning loop: versions, runs, gates, ledger, events, audit, figures and their kin."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_IN_ORDER = (
    "routes", "sources", "parents", "versions", "runs", "gates", "ledger", "events", "audit", "settings", "counters",
    "figures", "deletions",
)  # fmt: skip


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_time", "audit", ["time"])
    op.create_table(
        "counters",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_counters"),
    )
    op.create_table(
        "deletions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.Column("versions", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_deletions"),
    )
    op.create_table(
        "events",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_time", "events", ["time"])
    op.create_index("ix_events_version", "events", ["version"])
    op.create_table(
        "figures",
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("width_s", sa.Double(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("num_streams", sa.BigInteger(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_steps", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("tested", sa.Text(), nullable=False),
        sa.Column("accepted", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("time", "width_s", "version", "domain", name="pk_figures"),
    )
    op.create_table(
        "gates",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("champion", sa.Text(), nullable=False),
        sa.Column("candidate", sa.Text(), nullable=False),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_gates"),
    )
    op.create_index("ix_gates_candidate", "gates", ["candidate"])
    op.create_table(
        "ledger",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("decision", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("decided_at", sa.Double(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("predicted_s", sa.Double(), nullable=True),
        sa.Column("predicted_cost_s", sa.Double(), nullable=True),
        sa.Column("realised_s", sa.Double(), nullable=True),
        sa.Column("spent_s", sa.Double(), nullable=False),
        sa.Column("until", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_ledger"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_ledger_run_id", "ledger", ["run_id"])
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("trigger", sa.Text(), nullable=False),
        sa.Column("base", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("started", sa.Double(), nullable=True),
        sa.Column("ended", sa.Double(), nullable=True),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("num_steps", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("cpu_s", sa.Double(), nullable=False),
        sa.Column("loss", sa.Text(), nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_runs"),
    )
    op.create_index("ix_runs_created", "runs", ["created"])
    op.create_table(
        "settings",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("changed", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_settings"),
    )
    op.create_table(
        "versions",
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("base", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("changed", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("card", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_versions"),
    )
    op.create_index("ix_versions_created", "versions", ["created"])
    op.create_index(
        "uq_versions_canary",
        "versions",
        ["tag"],
        unique=True,
        sqlite_where=sa.text("state = 'canary'"),
        postgresql_where=sa.text("state = 'canary'"),
    )
    op.create_index(
        "uq_versions_live",
        "versions",
        ["tag"],
        unique=True,
        sqlite_where=sa.text("state = 'live'"),
        postgresql_where=sa.text("state = 'live'"),
    )
    op.create_table(
        "parents",
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("parent", sa.Text(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["version"], ["versions.version"], name="fk_parents_version"),
        sa.PrimaryKeyConstraint("version", "parent", name="pk_parents"),
    )
    op.create_index("ix_parents_parent", "parents", ["parent"])
    op.create_table(
        "routes",
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["version"], ["versions.version"], name="fk_routes_version"),
        sa.PrimaryKeyConstraint("tag", name="pk_routes"),
    )
    op.create_table(
        "sources",
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("shard", sa.Text(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["version"], ["versions.version"], name="fk_sources_version"),
        sa.PrimaryKeyConstraint("version", "tenant", "request_id", "shard", name="pk_sources"),
    )
    op.create_index("ix_sources_request_id", "sources", ["request_id"])
    op.create_index("ix_sources_shard", "sources", ["shard"])
    op.create_index("ix_sources_tenant", "sources", ["tenant"])

    _keep_audit_rows()


def downgrade() -> None:
    for name in _IN_ORDER:
        op.drop_table(name)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION audit_is_kept()")


def _keep_audit_rows() -> None:
    """The database itself refuses to change or delete what operators did."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION audit_is_kept() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'audit rows are kept'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_is_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_is_kept()"
        )
        return
    for change in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_no_{change.lower()} BEFORE {change} ON audit "
            "BEGIN SELECT RAISE(ABORT, 'audit rows are kept'); END"
        )
