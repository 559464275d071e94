"""A Python loop over arrays -> the same loop compiled for this machine, on its first call (CPU, numba).

Compiled loops are kept beside their source or in the user's cache; where neither can be written they are compiled
again in each process. The cache knows the file a loop stands in and no other: a compiled loop never calls one of
another file, or an old copy of that would live on unseen.
"""

from __future__ import annotations

import logging
from typing import Any

import numba

FLAGS = frozenset({"reassoc", "contract", "arcp", "nsz"})
"""What the compiler may do with floats: reorder sums inside a loop, never assume away NaN or infinity."""


def compiled(function: Any) -> Any:
    """Compile a loop; it runs without Python's lock. Its bits depend on its arguments and on the machine alone."""
    how: dict[str, Any] = {"nogil": True, "fastmath": set(FLAGS), "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **how)(function)
    except RuntimeError:  # numba: no place to keep it
        logging.getLogger(__name__).warning(
            "no folder for compiled loops can be written: set NUMBA_CACHE_DIR, or each start takes seconds longer"
        )
        return numba.njit(**how)(function)
