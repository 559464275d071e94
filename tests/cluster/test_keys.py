"""API keys: hashed at rest, private to their owner, seen at once by whoever reads, refused when in doubt."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cluster.errors import ConfigError, Unavailable
from paceline.cluster.keys import KeyFile, check_guarded, is_loopback, needs_keys


@pytest.fixture
def store(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "home" / "keys.json", recheck_s=0.0)


def test_a_key_is_found_until_it_is_revoked(store: KeyFile) -> None:
    """By its whole text only; a reader that stays open sees both changes."""
    assert store.find("pl_0123456789ab_" + "x" * 43) is None
    key, text = store.create("ci")
    other, other_text = store.create("ci")

    assert store.find(text) == key
    assert store.find(other_text) == other
    assert [store.find(wrong) for wrong in ("", text[:-1], text + "x", text.upper(), key.id, "\udcff")] == [
        None
    ] * 6
    assert store.find(f"pl_{key.id}_{other_text.rpartition('_')[2]}"[:60]) is None
    revoked = store.revoke(key.id)
    assert revoked.revoked is not None
    assert store.revoke(key.id) == revoked
    assert store.find(text) is None
    assert store.find(other_text) == other
    assert [kept.id for kept in store.read()] == [key.id, other.id]


def test_the_file_holds_hashes_and_is_its_owners_alone(store: KeyFile) -> None:
    """Whoever reads it cannot use the API, and nobody else reads it, whatever the umask."""
    before = os.umask(0)
    try:
        _, text = store.create("ci")
        store.create("more")
    finally:
        os.umask(before)

    assert text[16:] not in store.path.read_text()
    for file in store.path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert {file.name for file in store.path.parent.iterdir()} == {"keys.json", "keys.json.lock"}


def test_writers_in_several_processes_lose_nothing(store: KeyFile) -> None:
    """Each of them replaces the whole file."""
    script = (
        "import sys; from pathlib import Path; from paceline.cluster.keys import KeyFile\n"
        "for at in range(10): KeyFile(Path(sys.argv[1])).create(f'{sys.argv[2]}-{at}')"
    )
    command = [sys.executable, "-c", script, str(store.path)]
    writers = [subprocess.Popen([*command, name]) for name in ("a", "b")]

    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert len({key.id for key in store.read()}) == 20


@pytest.mark.parametrize("content", [b"", b"{", b'{"keys": [1]}', b"\xff"])
def test_a_damaged_file_lets_nobody_in(store: KeyFile, content: bytes) -> None:
    """And works again once it is whole."""
    _, text = store.create("ci")
    whole = store.path.read_bytes()
    assert store.find(text)

    store.path.write_bytes(content)
    with pytest.raises(Unavailable):
        store.find(text)
    with pytest.raises(ConfigError, match="keys.json"):
        store.create("more")
    store.path.write_bytes(whole)
    assert store.find(text)
    store.path.unlink()
    assert store.find(text) is None


def test_odd_names_and_unknown_ids_are_named(store: KeyFile) -> None:
    """A name is one line that a table can show."""
    for name in ("", "x" * 81, "a\nb"):
        with pytest.raises(ConfigError, match="1 to 80 characters"):
            store.create(name)
    with pytest.raises(ConfigError, match="'nope': no such key"):
        store.revoke("nope")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("gateway.example", False)],
)  # fmt: skip
def test_keys_are_off_on_loopback_only(host: str, expected: bool) -> None:
    """Unless the configuration says otherwise."""
    assert is_loopback(host) is expected
    assert needs_keys("auto", host) is not expected
    assert needs_keys("keys", host)
    assert not needs_keys("none", host)


def test_a_listener_open_to_others_does_not_start_by_mistake(store: KeyFile) -> None:
    """A key, or a word in the configuration, shows that it was meant."""
    for auth, host in (("auto", "127.0.0.1"), ("keys", "0.0.0.0"), ("none", "0.0.0.0")):
        check_guarded(auth, host, store)
    with pytest.raises(ConfigError, match="gateway.host=0.0.0.0.*paceline keys create.*gateway.auth=none"):
        check_guarded("auto", "0.0.0.0", store)
    key, _ = store.create("ci")
    check_guarded("auto", "0.0.0.0", store)
    store.revoke(key.id)
    with pytest.raises(ConfigError, match="no API key"):
        check_guarded("auto", "0.0.0.0", store)


def test_a_key_says_whose_it_is_and_what_may_be_kept(store: KeyFile) -> None:
    """Nothing, if nobody said so; withdrawn consent is seen by whoever reads."""
    plain, _ = store.create("ci")
    key, text = store.create("team a", tenant="acme", capture="asked")

    assert (plain.owner, plain.capture) == ("ci", "never")
    assert (key.owner, key.capture) == ("acme", "asked")
    assert store.find(text) == key
    changed = store.change(key.id, capture="never")
    assert store.find(text) == changed and changed.capture == "never"
    for wrong in (lambda: store.create("x", capture="always"), lambda: store.change(key.id, capture="yes")):
        with pytest.raises(ConfigError, match="expected one of never, asked, default"):
            wrong()
    with pytest.raises(ConfigError, match="tenant"):
        store.create("x", tenant="a\nb")
    with pytest.raises(ConfigError, match="no such key"):
        store.change("nope", capture="never")
    assert len(store.read()) == 2


def test_key_files_of_earlier_versions_still_open_the_door(store: KeyFile) -> None:
    """Their keys consent to nothing."""
    key, text = store.create("ci")
    old = {name: getattr(key, name) for name in ("id", "name", "sha256", "created", "revoked")}
    store.path.write_text(json.dumps({"keys": [old], "version": 1}))

    found = store.find(text)
    assert found is not None
    assert (found.owner, found.capture) == ("ci", "never")
    store.create("another")
    assert store.find(text) == found
