"""Scores of rows -> the best token of each row and whether the row is usable (CPU, numba).

argmax with ties to the lowest id; a row with NaN, or whose best score is not finite, is not usable.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from torch import Tensor


def _compiled(function: Any) -> Any:
    return numba.njit(nogil=True, cache=True)(function)


@_compiled
def _decide(scores, best, usable):
    for row in range(len(scores)):
        top, at, has_nan = scores[row, 0], 0, False
        for i in range(scores.shape[1]):
            x = scores[row, i]
            if not x <= top:  # larger, or one of the two is NaN
                if x > top:
                    top, at = x, i
                else:
                    has_nan = True
        best[row] = at
        usable[row] = not has_nan and np.isfinite(top)


def decide(scores_RV: Tensor, *, backend: str = "jit") -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """float32 [R, V] -> int64 [R], bool [R]. `backend` is "jit" or "reference"; the best of an unusable row is any id."""
    if backend == "reference":
        best = scores_RV.max(dim=-1)
        return best.indices.numpy(), best.values.isfinite().numpy()
    ids = np.empty(len(scores_RV), np.int64)
    usable = np.empty(len(scores_RV), np.bool_)
    _decide(scores_RV.contiguous().numpy(), ids, usable)
    return ids, usable
