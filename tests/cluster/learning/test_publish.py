"""A draft's folder -> a published version -> a folder elsewhere: the same bytes, or words that say what is wrong."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from paceline.cluster.errors import ConfigError, ModelError, StorageError
from paceline.cluster.learning import publish as publishing
from paceline.cluster.learning.publish import MANIFEST, fetch, publish, published, remove, sweep, verify
from paceline.cluster.model_files import WEIGHTS, weights_version
from paceline.cluster.types import DraftRef

Store = tuple[Any, str]


def safetensors(*numbers: float) -> bytes:
    """A whole file with one tensor."""
    data = struct.pack(f"<{len(numbers)}f", *numbers)
    entry = {"dtype": "F32", "shape": [len(numbers)], "data_offsets": [0, len(data)]}
    header = json.dumps({"w": entry}).encode()
    return struct.pack("<Q", len(header)) + header + data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A draft, as a trainer leaves it."""
    made = tmp_path / "made"
    made.mkdir()
    (made / "config.json").write_text('{"hidden_size": 4}')
    (made / WEIGHTS).write_bytes(safetensors(1.0, 2.0, 3.0))
    (made / "tokenizer.json").write_text("{}")
    (made / "card.json").write_text('{"base": "aaaa"}')
    return made


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """File system and root of an empty storage."""
    url = str(tmp_path / "learning") if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    fs, root = url_to_fs(url)
    yield fs, root
    if isinstance(fs, MemoryFileSystem):
        fs.rm(root, recursive=True) if fs.exists(root) else None


def overwrite(store: Store, ref: DraftRef, name: str, data: bytes | None) -> None:
    """Damage what lies on storage."""
    path = f"{store[1]}/drafts/{ref.version}/{name}"
    store[0].rm_file(path) if data is None else store[0].pipe_file(path, data)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}


def test_a_version_comes_back_byte_for_byte(store: Store, folder: Path, tmp_path: Path) -> None:
    """Under its content's hash; publishing and fetching again does nothing."""
    ref = publish(*store, folder)
    assert ref.version == weights_version(folder)
    assert ref.url.startswith(("file://", "memory://"))
    assert publish(*store, folder) == ref

    place = fetch(ref, tmp_path / "cache")
    assert place == tmp_path / "cache" / ref.version
    assert contents(place) == contents(folder)
    before = (place / WEIGHTS).stat().st_mtime_ns, (place / WEIGHTS).stat().st_ino
    assert fetch(ref, tmp_path / "cache") == place
    assert ((place / WEIGHTS).stat().st_mtime_ns, (place / WEIGHTS).stat().st_ino) == before
    assert published(*store) == [ref.version]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [ref.version]


def test_a_damaged_copy_in_the_cache_is_fetched_again(store: Store, folder: Path, tmp_path: Path) -> None:
    """Weights, and files that the reference's hash does not cover."""
    ref = publish(*store, folder)
    place = fetch(ref, tmp_path)
    for name in (WEIGHTS, "tokenizer.json", "config.json"):
        (place / name).write_bytes(b"junk")
        with pytest.raises(ModelError):
            verify(place, ref)
        fetch(ref, tmp_path)
        assert contents(place) == contents(folder)


def test_a_removed_version_is_not_there(store: Store, folder: Path, tmp_path: Path) -> None:
    """Removing it again is fine; a name that is none is refused before it becomes part of a path."""
    ref = publish(*store, folder)
    remove(*store, ref.version)
    remove(*store, ref.version)

    assert published(*store) == []
    with pytest.raises(ModelError, match="not published"):
        fetch(ref, tmp_path)
    for name in ("../../etc", "", "AAAAAAAAAAAA", "*"):
        with pytest.raises(ModelError, match="12 hex digits"):
            remove(*store, name)
    assert publish(*store, folder) == ref
    assert contents(fetch(ref, tmp_path)) == contents(folder)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        (
            "pytorch_model.bin",
            pickle.dumps({"w": 1}),
            "pytorch_model.bin' is no file of a version; pickles are never",
        ),
        ("optimizer.pt", b"x", "optimizer.pt' is no file of a version; pickles"),
        ("modeling_draft.py", b"print()", "modeling_draft.py' is no file of a version"),
        ("adapters.safetensors", safetensors(1.0), "adapters.safetensors' is no file of a version"),
        (WEIGHTS, pickle.dumps(b"w" * 200), "found a pickle"),
        (WEIGHTS, b"PK\x03\x04" + b"z" * 200, "found a pickle"),
        (WEIGHTS, safetensors(1.0, 2.0)[:-3], "expected .* bytes as its header promises"),
        (WEIGHTS, safetensors(1.0) + b"more", "expected .* bytes as its header promises"),
        (WEIGHTS, b"", "found 0 bytes"),
        (WEIGHTS, None, "expected model.safetensors"),
        ("config.json", None, "no config.json"),
        ("config.json", b"[]", "expected a JSON object"),
    ],
)
def test_what_is_no_version_is_never_published(
    folder: Path, tmp_path: Path, name: str, data: bytes | None, words: str
) -> None:
    """Refused by name, and nothing of it reaches the storage."""
    (folder / name).unlink(missing_ok=True) if data is None else (folder / name).write_bytes(data)
    fs, root = url_to_fs(str(tmp_path / "learning"))
    with pytest.raises(ModelError, match=words):
        publish(fs, root, folder)

    assert not (tmp_path / "learning").exists()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        (WEIGHTS, safetensors(1.0, 2.0, 3.5), f"{WEIGHTS}: is not the file"),
        (WEIGHTS, safetensors(1.0), f"{WEIGHTS}: .* bytes, expected"),
        (WEIGHTS, None, f"{WEIGHTS}: no bytes, expected"),
        ("tokenizer.json", b"[]", "tokenizer.json: is not the file"),
        ("card.json", None, "card.json: no bytes"),
        ("training.pkl", b"x", "training.pkl' is no file of a version; pickles"),
        (MANIFEST, None, "not published"),
        (MANIFEST, b"{}", "expected a list of files"),
        (
            MANIFEST,
            b'{"version": "a", "files": {"../../x": {"bytes": 1, "sha256": "a"}}}',
            "'../../x' is no file",
        ),
        (MANIFEST, b'{"version": "a", "files": {"config.json": {"bytes": -1, "sha256": "a"}}}', "expected 0"),
        (MANIFEST, b'{"version": "a", "files": {}}', "names no config.json"),
    ],
)
def test_what_was_changed_on_storage_is_refused(
    store: Store, folder: Path, tmp_path: Path, name: str, data: bytes | None, words: str
) -> None:
    """With the file's name; the cache stays empty."""
    ref = publish(*store, folder)
    overwrite(store, ref, name, data)
    with pytest.raises(ModelError, match=words):
        fetch(ref, tmp_path / "cache")

    cache = tmp_path / "cache"
    assert not cache.exists() or list(cache.iterdir()) == []


def test_a_consistent_forgery_is_refused_by_the_reference(store: Store, folder: Path, tmp_path: Path) -> None:
    """Weights and manifest agree with each other, not with what control said."""
    ref = publish(*store, folder)
    (folder / WEIGHTS).write_bytes(safetensors(6.0, 6.0, 6.0))
    other = publish(*store, folder)
    data = store[0].cat_file(f"{store[1]}/drafts/{other.version}/{MANIFEST}")
    overwrite(store, ref, WEIGHTS, (folder / WEIGHTS).read_bytes())
    overwrite(store, ref, MANIFEST, data)
    with pytest.raises(ModelError, match="expected " + ref.sha256):
        fetch(ref, tmp_path / "cache")
    with pytest.raises(ModelError, match="are version"):  # and without a sha256, by the version itself
        fetch(DraftRef(ref.version, ref.url), tmp_path / "cache")


@pytest.mark.parametrize("version", ["../../../x", "abc", "A" * 12, "", "a" * 13])
def test_a_reference_with_an_odd_name_is_refused(version: str, tmp_path: Path) -> None:
    """It becomes the name of a folder."""
    with pytest.raises(ModelError, match="12 hex digits"):
        fetch(DraftRef(version, "memory://x"), tmp_path)


def test_too_much_is_refused_before_it_is_read(store: Store, folder: Path, tmp_path: Path) -> None:
    """By what the manifest says, and by its end where a file is longer than that."""
    ref = publish(*store, folder)
    with pytest.raises(ModelError, match="expected at most 10"):
        fetch(ref, tmp_path, max_bytes=10)


def test_a_damaged_publication_is_replaced(store: Store, folder: Path, tmp_path: Path) -> None:
    """Publishing again repairs what a killed publisher, or anybody else, left."""
    ref = publish(*store, folder)
    for name, data in ((WEIGHTS, b"half"), (MANIFEST, None), ("tokenizer.json", None), (MANIFEST, b"{")):
        overwrite(store, ref, name, data)
        assert publish(*store, folder) == ref
        assert contents(fetch(ref, tmp_path / uuid.uuid4().hex)) == contents(folder)


def test_a_reader_never_sees_half_a_version(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher that is killed at any file leaves nothing that counts as published."""
    ref = DraftRef(
        weights_version(folder), f"{store[0].unstrip_protocol(store[1])}/drafts/{weights_version(folder)}"
    )
    for die_at in range(5):
        calls = iter(range(99))

        def dies(
            real: Callable[..., Any], calls: Iterator[int] = calls, at: int = die_at
        ) -> Callable[..., Any]:
            def call(*given: Any, **more: Any) -> Any:
                if next(calls) == at:
                    raise KeyboardInterrupt
                return real(*given, **more)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(publishing.shutil, "copyfile", dies(shutil.copyfile))
            patch.setattr(publishing, "_encoded", dies(publishing._encoded))
            patch.setattr(MemoryFileSystem, "open", dies(MemoryFileSystem.open))
            with pytest.raises(KeyboardInterrupt):
                publish(*store, folder)
        assert published(*store) == []
        with pytest.raises(ModelError, match="not published"):
            fetch(ref, tmp_path / "cache")

    publish(*store, folder)
    assert contents(fetch(ref, tmp_path / "cache")) == contents(folder)


def test_readers_and_a_publisher_at_once(folder: Path, tmp_path: Path) -> None:
    """Each fetch gets all of it or hears that it is not published; several into one cache end with one copy."""
    fs, root = url_to_fs(str(tmp_path / "learning"))
    ref = DraftRef(weights_version(folder), f"file://{root}/drafts/{weights_version(folder)}")
    found: list[Path] = []
    odd: list[Exception] = []

    def read() -> None:
        for _ in range(400):
            try:
                found.append(fetch(ref, tmp_path / "cache"))
                return
            except ModelError as error:
                if "not published" not in str(error):
                    odd.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    publish(fs, root, folder)
    for reader in readers:
        reader.join()

    assert odd == []
    assert contents(fetch(ref, tmp_path / "cache")) == contents(folder)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [ref.version]


def test_what_killed_publishers_left_is_swept(folder: Path, tmp_path: Path) -> None:
    """Not what is being written now."""
    fs, root = url_to_fs(str(tmp_path))
    publish(fs, root, folder)
    left = tmp_path / "drafts" / ".0123456789ab.dead.partial"
    left.mkdir()

    assert sweep(fs, root, older_than=left.stat().st_mtime - 1) == 0
    assert sweep(fs, root, older_than=left.stat().st_mtime + 1) == 1
    assert published(fs, root) == [weights_version(folder)]


def test_a_storage_that_fails_is_a_storage_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be there again later: nobody calls the version bad for that."""
    fs, root = url_to_fs(f"memory://{uuid.uuid4().hex}")
    ref = publish(fs, root, folder)

    def fail(*_: object, **__: object) -> None:
        raise ConnectionResetError("gone")

    for name in ("ls", "open", "cat_file"):
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, name, fail)
            with pytest.raises(StorageError, match="ConnectionResetError: gone"):
                fetch(ref, tmp_path / "cache")
    with pytest.raises(ConfigError, match="nosuch"):
        fetch(DraftRef(ref.version, "nosuch://x/y"), tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        publish(LocalFileSystem(), str(tmp_path / "file"), folder)
