"""A step, noise of its next positions -> the best tokens of level after level, each drafted behind the best before it.

One compiled loop (CPU, numba): a level of a small draft is a hundred microseconds of arithmetic, and what Python does
between two of them takes as long. The plain twin is `DraftEngine._extend`; both give the same bits.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from paceline.kernels import decide, step_jit, vectors_jit
from paceline.kernels.compiled import compiled


@partial(compiled, uses=(decide, step_jit, vectors_jit), flags=())
def levels(step, noise, temperatures, chances, floor, ids, shares):
    """Up to len(ids) levels behind B rows, one a stream, until the chance of a whole spine falls below `floor`; how many.

    step: the arguments of `step_jit.step`; its rows are those of the first level, and are changed in place.
    noise: float32 [levels, B, V], or nothing where all are greedy. temperatures: float32 [B]. chances: float64 [B], of
    the spines so far. ids: int64 [levels, B, width] and shares: float32 alike, written.
    """
    rows, positions, slots, num_leading, tables, size = step[2], step[3], step[4], step[7], step[10], step[11]
    logits, tickets = step[-4], step[-3]
    scores = np.empty((len(rows), noise.shape[2]), np.float32)
    for level in range(len(ids)):
        tickets[:] = 0
        step_jit.step(*step)
        for row in range(len(rows)):
            for i in range(scores.shape[1]):
                scores[row, i] = logits[row, i]
            if len(noise) > 0:
                for i in range(scores.shape[1]):
                    scores[row, i] = scores[row, i] / temperatures[row] + noise[level, row, i]
        decide.best_of(scores, ids[level], shares[level])
        goes_on = True
        for row in range(len(rows)):
            chances[row] *= shares[level, row, 0]
            goes_on = goes_on and chances[row] >= floor  # a NaN ends it as well
            at = positions[row] + 1
            rows[row], positions[row] = ids[level, row, 0], at
            num_leading[row] += 1
            if at // size < tables.shape[1]:
                slots[row] = np.int64(tables[row, at // size]) * size + at % size
        if not goes_on:
            return level + 1
    return len(ids)
