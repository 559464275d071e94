"""A Python loop over arrays -> the same loop compiled for this machine, on its first call (CPU, numba).

Compiled loops are kept beside their source or in the user's cache; where neither can be written they are compiled
again in each process. The cache knows the file a loop stands in and the modules that the loop says it uses, no other:
without that an old copy of what it calls would live on unseen.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numba

FLAGS = frozenset({"reassoc", "contract", "arcp", "nsz"})
"""What the compiler may do with floats: reorder sums inside a loop, never assume away NaN or infinity."""


def compiled(function: Any, *, uses: Sequence[ModuleType] = (), flags: Collection[str] = FLAGS) -> Any:
    """Compile a loop; it runs without Python's lock. Its bits depend on its arguments and on the machine alone.

    `uses`: modules whose loops or intrinsics are compiled into it. Where they changed, it is compiled again.
    `flags`: those of its own arithmetic; none makes it numpy's, operation by operation.
    """
    how: dict[str, Any] = {"nogil": True, "fastmath": set(flags), "error_model": "numpy"}
    try:
        made = numba.njit(cache=True, **how)(function)
        if uses:
            # numba has no setting for it: what it compares is the stamp of the loop's own file.
            index = made._cache._cache_file
            index._source_stamp = (index._source_stamp, *(_stamp(module) for module in uses))
        return made
    except RuntimeError:  # numba: no place to keep it
        logging.getLogger(__name__).warning(
            "no folder for compiled loops can be written: set NUMBA_CACHE_DIR, or each start takes seconds longer"
        )
        return numba.njit(**how)(function)


@contextmanager
def one_at_a_time(loop: Any, name: str) -> Iterator[None]:
    """Processes that may all compile a loop take turns, by `name`: the first does, the others find what it kept.

    Without a folder to keep it in each compiles its own, and nobody waits.
    """
    folder = Path(getattr(loop._cache, "_cache_path", None) or "")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"{loop.__name__}.{name}.lock").open("w") if folder.name else None
    except OSError:
        file = None
    if file is None:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process that holds it
        yield


def _stamp(module: ModuleType) -> tuple[float, int]:
    """When a module's file was changed, and its size."""
    assert module.__file__ is not None
    found = Path(module.__file__).stat()
    return found.st_mtime, found.st_size
