"""Rows of logits -> for each row the most probable tokens, their log-probabilities, and the log of the sum (CPU).

Legend: R rows, V vocabulary, M tokens wanted of each row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels.top_logits_jit import top_rows

FloatArray = npt.NDArray[np.float32]


def top_logits(
    logits_RV: FloatArray, num_wanted: int, *, backend: str = "jit"
) -> tuple[npt.NDArray[np.int32], FloatArray, FloatArray]:
    """The largest logits of each row, best first, the lower id first among equals.

    Args:
        logits_RV: float32, without NaN, at least one of each row finite.
        num_wanted: M; V if there are fewer.
        backend: "jit" runs without Python's lock; "reference" is its plain twin.

    Returns:
        ids int32 [R, M]; log-probabilities float32 [R, M]; log of the sum of the exponentials float32 [R].

    >>> ids, log_probs, log_sums = top_logits(np.log(np.array([[1, 5, 2]], np.float32)), 2)
    >>> ids, np.exp(log_probs).round(3), np.exp(log_sums).round(3)
    (array([[1, 2]], dtype=int32), array([[0.625, 0.25 ]], dtype=float32), array([8.], dtype=float32))
    """
    num_rows, size = logits_RV.shape
    num_wanted = min(num_wanted, size)
    if backend == "reference":
        rows = torch.from_numpy(logits_RV)
        ordered = rows.sort(dim=-1, descending=True, stable=True)
        log_sums = rows.double().logsumexp(-1).float()
        log_probs = ordered.values[:, :num_wanted] - log_sums[:, None]
        return ordered.indices[:, :num_wanted].int().numpy(), log_probs.numpy(), log_sums.numpy()
    ids = np.empty((num_rows, num_wanted), np.int32)
    found = np.empty((num_rows, num_wanted), np.float32)
    sums = np.empty(num_rows, np.float32)
    if num_rows:
        top_rows(logits_RV, ids, found, sums)
    return ids, found, sums
