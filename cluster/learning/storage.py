"""`learning.storage` -> a file system and a folder on it, and whole files read and written there.

A path or any fsspec URL. Files appear under their names whole or not at all: they are written under another name and
moved, and no reader looks at names that are not finished.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from paceline.cluster.errors import ConfigError, StorageError
from paceline.cluster.learning.config import LearningConfig

FileSystem: TypeAlias = fsspec.AbstractFileSystem
UNFINISHED = ".partial"
"""Ends the name of a file that is being written. A killed writer may leave one behind."""


def learning_folder(config: LearningConfig) -> tuple[FileSystem, str]:
    """The file system and the folder that hold captured shards, tombstones and drafts. Nothing is created yet.

    Raises:
        ConfigError: no file system is known by this URL, or the path is a relative one.
    """
    url = str(home() / "learning") if config.storage == "auto" else config.storage
    if (
        "://" not in url and not Path(url).is_absolute()
    ):  # each process of a cluster has its own working directory
        raise ConfigError(
            f"learning.storage={url!r}: expected auto, an absolute path, or a URL such as s3://bucket/folder"
        )
    try:
        fs, root = url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"learning.storage={url!r}: expected auto, an absolute path, or an fsspec URL: {error}"
        ) from error
    return fs, str(root).rstrip("/")


def home() -> Path:
    """Where this user's files of Paceline are: PACELINE_HOME, or ~/.paceline."""
    return Path(os.environ.get("PACELINE_HOME") or Path.home() / ".paceline")


def write_whole(fs: FileSystem, path: str, data: bytes) -> None:
    """A file that is there whole or not at all; one of that name is replaced. On a disk only its owner may read it.

    Raises:
        StorageError: the storage cannot be used.
    """
    try:
        if isinstance(fs, LocalFileSystem):
            _write_local(Path(path), data)
            return
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        partial = f"{path}.{secrets.token_hex(4)}{UNFINISHED}"
        fs.pipe_file(partial, data)
        fs.mv(partial, path)
    except Exception as error:  # each file system has errors of its own
        raise _storage_error("written", path, error) from error


def _write_local(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else a power cut could leave the name without the content
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def read_whole(fs: FileSystem, path: str) -> bytes | None:
    """A file's bytes; None if there is none.

    Raises:
        StorageError: the storage cannot be used.
    """
    try:
        data: bytes = fs.cat_file(path)
    except FileNotFoundError:
        return None
    except Exception as error:
        raise _storage_error("read", path, error) from error
    return data


def remove(fs: FileSystem, path: str) -> None:
    """Make sure that there is no such file.

    Raises:
        StorageError: the storage cannot be used.
    """
    try:
        fs.rm_file(path)
    except FileNotFoundError:
        return
    except Exception as error:
        raise _storage_error("removed", path, error) from error


def files(fs: FileSystem, folder: str, *, deep: bool = False) -> dict[str, int]:
    """Finished files of a folder (`deep`: and below), path -> bytes; none if it does not exist.

    Raises:
        StorageError: the storage cannot be used.
    """
    return {
        path: size for path, (size, _) in _list(fs, folder, deep).items() if not path.endswith(UNFINISHED)
    }


def unfinished(fs: FileSystem, folder: str) -> dict[str, float]:
    """What writers left behind or are at, path -> Unix seconds of its last change; 0 where the storage does not say.

    Raises:
        StorageError: the storage cannot be used.
    """
    return {path: at for path, (_, at) in _list(fs, folder, True).items() if path.endswith(UNFINISHED)}


def folders(fs: FileSystem, folder: str) -> list[str]:
    """Folders in a folder; none if it does not exist.

    Raises:
        StorageError: the storage cannot be used.
    """
    try:
        return [str(entry["name"]) for entry in fs.ls(folder, detail=True) if entry["type"] == "directory"]
    except FileNotFoundError:
        return []
    except Exception as error:
        raise _storage_error("listed", folder, error) from error


def remove_folder(fs: FileSystem, folder: str) -> None:
    """Remove a folder if it is empty."""
    try:
        fs.rmdir(folder)
    except Exception:  # noqa: BLE001  # it is not empty, or this storage knows no folders: both are fine
        return


def _list(fs: FileSystem, folder: str, deep: bool) -> dict[str, tuple[int, float]]:
    try:
        fs.invalidate_cache()  # other processes write here
        # Not `find` and not `exists`: they take any failure for "nothing there", and a tombstone must not be missed.
        entries: list[dict[str, Any]] = fs.ls(folder, detail=True)
    except FileNotFoundError:
        return {}
    except Exception as error:
        raise _storage_error("listed", folder, error) from error
    found: dict[str, tuple[int, float]] = {}
    for entry in entries:
        name = str(entry["name"])
        if entry["type"] == "directory":
            found |= _list(fs, name, deep) if deep else {}
        else:
            found[name] = (int(entry.get("size") or 0), _changed(entry))
    return found


def _changed(info: dict[str, Any]) -> float:
    at = info.get("mtime", info.get("created", 0))
    return float(at.timestamp() if hasattr(at, "timestamp") else at or 0)


def _storage_error(what: str, path: str, error: Exception) -> StorageError:
    return StorageError(f"{path}: cannot be {what}: {type(error).__name__}: {str(error)[:200]}")
