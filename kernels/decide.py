"""Scores of rows -> the best token of each row, or the best few and what speaks for them (CPU, numba).

argmax with ties to the lowest id; a row with NaN, or whose best score is not finite, is not usable.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paceline.kernels.compiled import compiled


@compiled
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


@partial(compiled, flags=())
def _decide_drawn(logits, temperatures, which, drawn, best, usable):
    for row in range(len(logits)):
        noise, temperature = which[row], temperatures[row]
        top, at, has_nan = np.float32(-np.inf), 0, False
        for i in range(logits.shape[1]):
            x = logits[row, i]
            if noise >= 0:
                x = x / temperature + drawn[noise, i]
            if not x <= top:
                if x > top:
                    top, at = x, i
                else:
                    has_nan = True
        best[row] = at
        usable[row] = not has_nan and np.isfinite(top)


def decide_drawn(
    logits_RV: Tensor,
    temperatures_R: npt.NDArray[np.float32],
    which_R: npt.NDArray[np.int64],
    drawn_KV: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """`decide` of logits / temperature + noise, in one pass: row r has row which[r] of the noise, or none if that is -1.

    The plain twin is `decide` of the sum, bit for bit.
    """
    ids = np.empty(len(logits_RV), np.int64)
    usable = np.empty(len(logits_RV), np.bool_)
    _decide_drawn(logits_RV.contiguous().numpy(), temperatures_R, which_R, drawn_KV, ids, usable)
    return ids, usable


@compiled
def best_of(scores, ids, chances):
    width = ids.shape[1]
    parts = np.empty(scores.shape[1], np.float32)
    exponents = np.empty(scores.shape[1], np.int32)
    powers = exponents.view(np.float32)
    for row in range(len(scores)):
        for k in range(width):
            ids[row, k], chances[row, k] = 0, -np.inf
        for i in range(scores.shape[1]):
            x = scores[row, i]
            if x > chances[row, width - 1]:  # not >=: of equal ones the lowest id stands first
                k = width - 1
                while k > 0 and x > chances[row, k - 1]:
                    ids[row, k], chances[row, k] = ids[row, k - 1], chances[row, k - 1]
                    k -= 1
                ids[row, k], chances[row, k] = i, x
        top = chances[row, 0]
        for i in range(scores.shape[1]):
            # exp(x - top), as in tree_attention_jit.
            y = scores[row, i] - top
            y = max(y, np.float32(-87.0))
            n = np.floor(y * np.float32(1.44269504) + np.float32(0.5))
            r = y - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
            p = np.float32(1.9875691500e-4)
            p = p * r + np.float32(1.3981999507e-3)
            p = p * r + np.float32(8.3334519073e-3)
            p = p * r + np.float32(4.1665795894e-2)
            p = p * r + np.float32(1.6666665459e-1)
            p = p * r + np.float32(5.0000001201e-1)
            parts[i] = p * r * r + r + np.float32(1)
            exponents[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
        total = np.float32(0)
        for i in range(scores.shape[1]):
            total += parts[i] * powers[i]
        for k in range(width):
            chances[row, k] = np.exp(chances[row, k] - top) / total


def best(
    scores_RV: Tensor, width: int, *, backend: str = "jit"
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """float32 [R, V] -> int64 [R, width], best first, and float32 [R, width], the softmax of the row at them.

    A token at minus infinity has chance 0; a row with NaN, or with nothing left, has NaN. `backend` as in `decide`.
    """
    width = min(width, scores_RV.shape[-1])
    if backend == "reference":
        top = scores_RV.topk(width, dim=-1)
        return top.indices.numpy(), scores_RV.softmax(-1).gather(-1, top.indices).numpy()
    ids = np.empty((len(scores_RV), width), np.int64)
    chances = np.empty((len(scores_RV), width), np.float32)
    best_of(scores_RV.contiguous().numpy(), ids, chances)
    return ids, chances
