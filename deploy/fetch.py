"""fsspec URL of models -> their files in a local folder, whole: what a pod does before it starts, if weights lie in an object store.

Run as `python -m paceline.deploy.fetch URL FOLDER [--no-weights]`. What is there already with the same size stays; a
file appears under its name only when all of it is there. Nothing that Python would execute is copied: safetensors, JSON
and text only.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from fsspec.core import url_to_fs

from paceline.cluster.errors import ConfigError, PacelineError, StorageError
from paceline.cluster.learning.storage import FileSystem

WEIGHTS = ".safetensors"
_OTHERS = {".json", ".txt", ".jinja", ".model"}
"""Configuration, tokenizers, chat templates."""
_FIRST_PAUSE_S = 2.0
Say = Callable[[str], None]


def fetch(url: str, folder: Path, *, weights: bool = True, attempts: int = 5, say: Say = print) -> int:
    """Copy a tree of model folders. Returns how many files were copied; others were there.

    Raises:
        ConfigError: no file system is known by this URL.
        StorageError: the store cannot be used, even after `attempts`, or has no model there.
    """
    try:
        fs, root = url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{url}: expected an fsspec URL such as s3://bucket/models: {error}") from error
    pause_s = _FIRST_PAUSE_S
    for attempt in range(1, attempts + 1):
        try:
            return _copy(fs, str(root).rstrip("/"), folder, weights, say)
        except PacelineError:
            raise
        except Exception as error:  # each file system has errors of its own
            reason = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
            )
            if attempt == attempts:
                raise StorageError(f"{url}: cannot be read: {reason}") from error
            say(f"{url}: {reason}; trying again in {pause_s:.0f} s ({attempt} of {attempts})")
            time.sleep(pause_s)
            pause_s *= 2
    raise AssertionError("attempts is at least 1")


def _copy(fs: FileSystem, root: str, folder: Path, weights: bool, say: Say) -> int:
    wanted = {**_wanted(fs, root, weights)}
    if not any(PurePosixPath(name).name == "config.json" for name in wanted):
        raise StorageError(f"{root}: holds no model: no config.json there, nor in a folder below")
    num = 0
    for name, size in sorted(wanted.items()):
        target = folder / name
        if target.is_file() and target.stat().st_size == size:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        fs.get_file(f"{root}/{name}", str(partial))
        if partial.stat().st_size != size:
            raise OSError(f"{name}: {partial.stat().st_size} of {size} bytes arrived")
        partial.replace(target)
        say(f"{name}: {size} bytes")
        num += 1
    return num


def _wanted(fs: FileSystem, root: str, weights: bool) -> dict[str, int]:
    """Paths below the root, with their sizes. The store's names are not trusted to stay below the folder."""
    found = {}
    for path, entry in fs.find(root, detail=True).items():
        name = str(path).removeprefix(root).lstrip("/")
        kind = PurePosixPath(name).suffix
        if ".." in PurePosixPath(name).parts:
            raise StorageError(f"{path}: a name that leaves the folder")
        if kind in _OTHERS or (weights and kind == WEIGHTS):
            found[name] = int(entry["size"])
    return found


def main() -> None:
    """One line on stderr and exit status 2 where it cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.deploy.fetch", description=__doc__.splitlines()[0]
    )
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-weights", action="store_true", help="tokenizers and shapes only")
    given = parser.parse_args()
    try:
        fetch(given.url, given.folder, weights=not given.no_weights, say=lambda text: print(text, flush=True))
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
