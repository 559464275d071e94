"""An object store -> model folders on this machine: whole, safe, and again after a failure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from paceline.cluster.errors import ConfigError, StorageError
from paceline.deploy import fetch as fetching
from paceline.deploy.fetch import fetch

FILES = {
    "target/config.json": b"{}",
    "target/tokenizer.json": b"{}",
    "target/model.safetensors": b"w" * 4096,
    "target/pytorch_model.bin": b"pickle",
    "target/modeling.py": b"import os",
    "draft/config.json": b"{}",
    "draft/model.safetensors": b"d" * 64,
}


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    fs = fsspec.filesystem("memory")
    for name, data in FILES.items():
        fs.pipe_file(f"/bucket/models/{name}", data)
    yield fs
    fs.rm("/bucket", recursive=True)


def copied(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("store")
def test_models_arrive_and_nothing_that_runs(tmp_path: Path) -> None:
    num = fetch("memory://bucket/models", tmp_path, say=lambda _: None)

    assert copied(tmp_path) == {name for name in FILES if not name.endswith((".bin", ".py"))}
    assert (tmp_path / "target/model.safetensors").read_bytes() == FILES["target/model.safetensors"]
    assert num == 5 and fetch("memory://bucket/models", tmp_path, say=lambda _: None) == 0


@pytest.mark.usefixtures("store")
def test_gateways_need_no_weights(tmp_path: Path) -> None:
    fetch("memory://bucket/models", tmp_path, weights=False, say=lambda _: None)

    assert copied(tmp_path) == {"target/config.json", "target/tokenizer.json", "draft/config.json"}


@pytest.mark.usefixtures("store")
def test_a_store_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each attempt; a file that arrives half is not there."""
    monkeypatch.setattr(fetching, "_FIRST_PAUSE_S", 0.0)
    kind, failures = type(fsspec.filesystem("memory")), ["half", "gone"]
    whole = kind.get_file

    def get_file(self: fsspec.AbstractFileSystem, source: str, target: str, **options: object) -> None:
        whole(self, source, target, **options)
        failure = failures.pop() if failures and source.endswith("target/model.safetensors") else ""
        if failure == "half":
            Path(target).write_bytes(b"w")
        elif failure:
            raise OSError("the bucket is away\nand more")

    monkeypatch.setattr(kind, "get_file", get_file)
    said: list[str] = []

    fetch("memory://bucket/models", tmp_path, say=said.append)

    trouble = [line for line in said if "trying again" in line]
    assert len(trouble) == 2 and "OSError: the bucket is away; trying again" in trouble[0]
    assert "1 of 4096 bytes arrived" in trouble[1]
    assert (tmp_path / "target/model.safetensors").stat().st_size == 4096


def test_a_store_that_stays_away_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_FIRST_PAUSE_S", 0.0)

    def find(self: object, *_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "find", find)

    with pytest.raises(StorageError, match="cannot be read: ConnectionError: no route"):
        fetch("memory://bucket/models", tmp_path, attempts=2, say=lambda _: None)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds no model"):
        fetch(str(tmp_path), tmp_path / "to")
    with pytest.raises(ConfigError, match="expected an fsspec URL"):
        fetch("nosuch://bucket", tmp_path)


def test_names_cannot_leave_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"/b/config.json": {"size": 2}, "/b/../../etc/config.json": {"size": 2}}
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "find", lambda *_, **__: names)

    with pytest.raises(StorageError, match="leaves the folder"):
        fetch("memory://b", tmp_path)


def test_as_a_pod_runs_it(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "config.json").write_text("{}")
    command = [sys.executable, "-m", "paceline.deploy.fetch"]

    good = subprocess.run(
        [*command, f"file://{tmp_path}/from", str(tmp_path / "to")],
        capture_output=True,
        text=True,
        check=False,
    )
    bad = subprocess.run([*command, "nosuch://x", str(tmp_path)], capture_output=True, text=True, check=False)

    assert good.returncode == 0 and copied(tmp_path / "to") == {"config.json"}
    assert (
        bad.returncode == 2 and bad.stderr.startswith("paceline: nosuch://x") and bad.stderr.count("\n") == 1
    )
