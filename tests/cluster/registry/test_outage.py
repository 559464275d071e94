"""A database that goes away and comes back -> `Unavailable` in between, soon, and nothing half written."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.errors import PacelineError, RegistryError, Unavailable
from paceline.cluster.registry.records import AuditRow, Version
from paceline.cluster.registry.registry import Registry


@pytest.mark.slow
def test_calls_fail_while_the_server_is_dead_and_work_when_it_is_back(
    own_server: Any, tmp_path: Path
) -> None:
    """Killed as by a crash; the same registry object goes on with what had been committed."""
    registry = Registry.open(own_server.create(), tmp_path)
    registry.add_version(Version("aaaa", target="t", state="live"))
    own_server.kill()
    for call in (registry.check, registry.versions, registry.next_revision):
        began = time.monotonic()
        with pytest.raises(Unavailable, match="registry postgresql"):
            call()
        assert time.monotonic() - began < 10.0

    own_server.start()
    registry.check()
    live = registry.live()
    assert live is not None and live.version == "aaaa"
    assert registry.next_revision() == 1
    registry.close()


@pytest.mark.slow
def test_a_server_killed_under_writers_loses_no_answered_call(own_server: Any, tmp_path: Path) -> None:
    """What returned is there, what raised is there or not, whole; all threads see words, never a driver's error."""
    registry = Registry.open(own_server.create(), tmp_path)
    answered: list[int] = []
    other: list[Exception] = []
    stop = threading.Event()

    def write(number: int) -> None:
        while not stop.is_set():
            try:
                answered.append(registry.add_audit(AuditRow(1.0, f"ops{number}", "pin")).id)
            except Unavailable:
                time.sleep(0.05)
            except Exception as error:  # noqa: BLE001
                other.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        time.sleep(0.5)
        own_server.kill()
        time.sleep(0.2)
        own_server.start()
    seen = len(answered)
    deadline = time.monotonic() + 20
    while len(answered) < seen + 20 and time.monotonic() < deadline:
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join()

    assert other == []
    assert len(answered) >= seen + 20  # it went on after the last start
    kept = set()
    page = registry.audit(limit=1000)
    while True:
        kept |= {row.id for row in page.items}
        if page.next is None:
            break
        page = registry.audit(limit=1000, cursor=page.next)
    assert set(answered) <= kept
    registry.close()


@pytest.mark.slow
def test_a_server_that_is_down_at_start_is_waited_for_by_nobody(own_server: Any, tmp_path: Path) -> None:
    """A registry can be made without it; the first call that finds it makes the tables."""
    url = own_server.create()
    own_server.kill()
    registry = Registry(url, tmp_path)
    with pytest.raises(Unavailable):
        registry.versions()
    with pytest.raises(Unavailable):
        Registry.open(url, tmp_path)

    own_server.start()
    assert registry.versions().total == 0
    registry.close()


@pytest.mark.slow
def test_a_frozen_server_is_given_up(own_server: Any, tmp_path: Path) -> None:
    """It holds the connection and says nothing: the call ends nevertheless."""
    registry = Registry.open(own_server.create(), tmp_path)
    registry.check()
    family = own_server.freeze()
    found: list[PacelineError] = []

    def ask() -> None:
        try:
            registry.check()
        except PacelineError as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout=15)
    is_stuck = thread.is_alive()
    own_server.thaw(family)
    thread.join(timeout=10)

    assert not is_stuck
    assert isinstance(found[0], Unavailable)
    registry.check()
    registry.close()


def test_a_locked_file_is_unavailable_until_it_is_free(tmp_path: Path) -> None:
    """Somebody holds SQLite's write lock: writers give up after a while, readers do not even notice."""
    registry = Registry("auto", tmp_path, wait_s=0.2)
    registry.add_version(Version("aaaa"))
    other = sqlite3.connect(tmp_path / "registry.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="locked"):
        registry.next_revision()
    assert registry.versions().total == 1

    other.execute("ROLLBACK")
    other.close()
    assert registry.next_revision() == 1
    registry.close()


def test_a_file_that_is_no_database_is_unavailable_in_words(tmp_path: Path) -> None:
    """And is left as it is."""
    (tmp_path / "registry.db").write_bytes(
        b"not a database, but long enough to look like a header of one" * 20
    )
    registry = Registry("auto", tmp_path)
    with pytest.raises(Unavailable, match="not a database"):
        registry.versions()

    assert (tmp_path / "registry.db").read_bytes().startswith(b"not a database")
    registry.close()


def test_a_transaction_that_fails_in_the_middle_writes_nothing(tmp_path: Path) -> None:
    """The version was inserted already when a source of it is refused."""
    from paceline.cluster.registry.records import Source

    registry = Registry.open("auto", tmp_path)
    with pytest.raises(RegistryError):
        registry.add_version(Version("aaaa"), sources=[Source("acme", "q1"), Source("x" * 300)])

    assert registry.version("aaaa") is None
    registry.close()
