"""A gateway's keys: its own file and what Control says. Whoever says that a key is revoked is right."""

from pathlib import Path

import msgspec
import pytest

from paceline.cluster.errors import Unavailable
from paceline.cluster.gateway.known_keys import KnownKeys
from paceline.cluster.keys import KeyFile


@pytest.fixture
def mine(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "mine.json", recheck_s=0.0)


@pytest.fixture
def control(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "control.json", recheck_s=0.0)


def told(store: KeyFile) -> bytes:
    return msgspec.json.encode(store.read())


def test_before_anybody_said_anything_nobody_is_let_in(mine: KeyFile, control: KeyFile) -> None:
    """And nobody is told that a good key is a bad one: it is 503 until Control was heard or there is a file."""
    _, text = control.create("ci")
    known = KnownKeys(mine)
    with pytest.raises(Unavailable):
        known.find(text)
    known.tell(told(control))

    assert known.find(text) is not None
    assert known.find(text[:-1] + ("a" if text[-1] != "a" else "b")) is None
    assert known.find("") is None


def test_a_key_that_either_says_is_revoked_is_revoked(mine: KeyFile, control: KeyFile) -> None:
    """A mounted copy may be older than Control's file, or newer."""
    key, text = control.create("ci")
    mine.path.write_bytes(control.path.read_bytes())
    known = KnownKeys(mine)
    assert known.find(text) is not None, "its own file is enough"
    known.tell(told(control))
    assert known.find(text) is not None
    mine.revoke(key.id)
    assert known.find(text) is None
    mine.path.write_bytes(control.path.read_bytes())
    assert known.find(text) is not None
    control.revoke(key.id)
    known.tell(told(control))
    assert known.find(text) is None


def test_a_key_of_the_own_file_alone_counts(mine: KeyFile, control: KeyFile) -> None:
    _, text = mine.create("here")
    known = KnownKeys(mine)
    known.tell(told(control))

    assert known.find(text) is not None


def test_what_is_not_understood_changes_nothing_and_a_damaged_file_lets_nobody_in(
    mine: KeyFile, control: KeyFile
) -> None:
    _, text = control.create("ci")
    known = KnownKeys(mine)
    known.tell(told(control))
    for nonsense in (b"", b"{}", b"[1]", b"\xff"):
        known.tell(nonsense)
    assert known.find(text) is not None
    mine.path.write_bytes(b"{")
    with pytest.raises(Unavailable):
        known.find(text)


def test_a_forged_id_with_another_key_s_secret_is_refused(mine: KeyFile, control: KeyFile) -> None:
    key, _ = control.create("a")
    _, other = control.create("b")
    known = KnownKeys(mine)
    known.tell(told(control))

    assert known.find(f"pl_{key.id}_{other.partition('_')[2].partition('_')[2]}") is None
