"""Steps of the tables -> what the program expects of them, from nothing, from each step, and by two starters at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from paceline.cluster.errors import RegistryError, Unavailable
from paceline.cluster.registry import database, tables
from paceline.cluster.registry.database import Database, resolve_url, scripts
from paceline.cluster.registry.records import AuditRow, Version
from paceline.cluster.registry.registry import Registry

STEPS = [step.revision for step in reversed(list(scripts().walk_revisions()))]


def differences(url: str, metadata: sa.MetaData = tables.metadata) -> list[object]:
    """Between the tables as the program knows them and as they are."""
    engine = sa.create_engine(resolve_url(url, Path("/")))
    with engine.connect() as connection:
        found = compare_metadata(MigrationContext.configure(connection), metadata)
    engine.dispose()
    return list(found)


def prepared(url: str, tmp_path: Path) -> Database:
    Registry.open(url, tmp_path).close()
    return Database(resolve_url(url, tmp_path))


def test_the_steps_make_what_the_program_expects(url: str, tmp_path: Path) -> None:
    """From an empty database to the head. Whoever changes tables.py without a step fails here."""
    opened = prepared(url, tmp_path)

    assert opened.revision() == STEPS[-1]
    assert differences(url) == []
    # Negative control: a column more and a type changed are seen.
    changed = sa.MetaData()
    for table in tables.metadata.tables.values():
        table.to_metadata(changed)
    changed.tables["runs"].append_column(sa.Column("more", sa.Text()))
    assert [entry[0] for entry in differences(url, changed)] == ["add_column"]  # type: ignore[index]
    opened.close()


def test_each_step_can_be_taken_back_and_made_again(url: str, tmp_path: Path) -> None:
    """One by one down to nothing, and up again: the same tables, rows of today's audit kept as far as they can."""
    opened = prepared(url, tmp_path)
    for step in reversed(STEPS):
        assert opened.revision() == step
        opened.downgrade("-1")
        opened.prepare()
        assert opened.revision() == STEPS[-1]
        assert differences(url) == []
        opened.downgrade(step)
        opened.downgrade("-1")

    assert opened.revision() is None
    left = {entry[1].name for entry in differences(url) if entry[0] == "add_table"}  # type: ignore[index]
    assert left == set(tables.metadata.tables)
    opened.prepare()
    assert differences(url) == []
    opened.close()


def test_a_step_that_fails_leaves_nothing_half_done(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are made in one transaction, on SQLite too; the next start does it again."""

    def fail(name: str, *_: object, **__: object) -> None:
        raise OSError("the machine stops here")

    monkeypatch.setattr("alembic.op.create_index", fail)  # the first table stands by then
    opened = Database(resolve_url(url, tmp_path))
    with pytest.raises(Unavailable, match="the machine stops here"):
        opened.prepare()
    monkeypatch.undo()
    engine = sa.create_engine(resolve_url(url, tmp_path))
    assert set(sa.inspect(engine).get_table_names()) - {"alembic_version"} == set()
    engine.dispose()

    opened.prepare()
    assert differences(url) == []
    opened.close()


def test_a_newer_database_is_refused_in_words(url: str, tmp_path: Path) -> None:
    """And not touched."""
    opened = prepared(url, tmp_path)
    with opened.writing() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))

    with pytest.raises(RegistryError, match="step 9999, which a newer Paceline has made") as caught:
        Registry.open(url, tmp_path)
    assert caught.value.code == "newer_schema"
    assert opened.revision() == "9999"
    opened.close()


def test_threads_that_start_at_once_share_one_set_of_tables(url: str, tmp_path: Path) -> None:
    """And none of them fails."""
    failures: list[Exception] = []
    ready = threading.Barrier(6)

    def start(number: int) -> None:
        try:
            ready.wait()
            registry = Registry.open(url, tmp_path)
            registry.add_version(Version(f"v{number}"))
            registry.close()
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    registry = Registry.open(url, tmp_path)
    assert registry.versions().total == 6
    registry.close()


@pytest.mark.slow
def test_processes_that_start_at_once_share_one_set_of_tables(url: str, tmp_path: Path) -> None:
    """As two controls would that overlap during a restart."""
    script = (
        "import sys, pathlib\n"
        "from paceline.cluster.registry.records import AuditRow\n"
        "from paceline.cluster.registry.registry import Registry\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        f"registry = Registry.open({url!r}, pathlib.Path({str(tmp_path)!r}))\n"
        "for i in range(20): registry.add_audit(AuditRow(1.0, 'ops', 'pin'))\n"
    )
    command = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    starters = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(4)]
    for starter in starters:
        assert starter.stdout is not None and starter.stdout.readline() == "ready\n"
    for starter in starters:
        assert starter.stdin is not None
        starter.stdin.write("go\n")
        starter.stdin.flush()
    results = [starter.communicate(timeout=60) for starter in starters]

    assert [starter.returncode for starter in starters] == [0] * 4, results
    registry = Registry.open(url, tmp_path)
    assert registry.audit().total == 80
    registry.close()


def test_the_steps_ship_with_the_package() -> None:
    """They are modules of a listed package, beside the code that looks for them."""
    folder = Path(database.__file__).with_name("migrations")

    assert len(list(folder.glob("r[0-9]*.py"))) == len(STEPS)
    assert AuditRow.__module__ == "paceline.cluster.registry.records"
