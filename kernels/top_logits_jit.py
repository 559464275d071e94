"""Rows of logits -> the ids and log-probabilities of the largest of each (CPU, numba).

Versions, microseconds for a row of 4,096 and the 128 largest, on one core of a Xeon that others shared (noisy):

    torch.topk and torch.logsumexp                    60
    numpy: argpartition, then a sort of what is left  25
    a histogram over the whole row                    13
    the largest of blocks as a threshold              10
    the same, blocks by vectors, no branches           9; of a trained model's rows, not in cache, 13
    whole vectors, what reaches put side by side       -; of such rows 8
    a threshold by halving, no branches, one exp       -; of such rows 4 (this)
"""

from __future__ import annotations

from functools import partial

import numpy as np

from paceline.kernels import vectors_jit as v
from paceline.kernels.compiled import compiled

_NUM_BUCKETS = 512
_HALVINGS = 24
"""Where values lie close together below one that does not."""


@partial(compiled, uses=(v,))
def top_rows(logits, chosen, ids, log_probs, log_sums):
    """Blocks' largest values tell how far down the wanted ones reach at most; only what reaches it is sorted."""
    num_wanted, size = ids.shape[1], logits.shape[1]
    num_vectors = (size + 15) // 16
    # A block is a lane of so many vectors; at least twice as many blocks as tokens are wanted, where there are.
    width = max(1, min(16, size // (2 * num_wanted)))
    num_groups = (num_vectors + width - 1) // width
    num_blocks = 16 * num_groups
    values = np.empty(16 * num_vectors, np.float32)
    peaks = np.empty(num_blocks, np.float32)
    found = np.empty(16 * num_vectors, np.int32)
    where = np.empty(16 * num_vectors, np.uint32)
    placed = np.empty(16 * num_vectors, np.int32)
    sorted_values = np.empty(16 * num_vectors, np.float32)
    counts = np.empty(_NUM_BUCKETS, np.uint32)
    low, lowest_bucket = np.float32(-np.inf), np.float32(_NUM_BUCKETS - 1)
    for place in range(len(chosen)):
        row = chosen[place]
        for i in range(size):
            values[i] = logits[row, i]
        values[size:] = low
        for group in range(num_groups):
            first = group * width
            v.maxima(values, 16 * first, min(width, num_vectors - first), peaks, 16 * group)
        top, least = _threshold(peaks, num_blocks, num_wanted)
        num_found = v.keep(values, num_vectors, least, found)
        while found[num_found - 1] >= size:  # behind the row's end
            num_found -= 1
        log_sum = top + np.log(v.exp_sum(values, num_vectors, top))
        log_sums[place] = log_sum

        # Into buckets, in order of ids; then as many as hold what is wanted are sorted, each in itself.
        scale = lowest_bucket / max(min(top - least, np.float32(1e6)), np.float32(1e-6))
        counts[:] = 0
        for k in range(num_found):
            where[k] = np.uint32(min((top - values[found[k]]) * scale, lowest_bucket))
            counts[where[k]] += np.uint32(1)
        start, num_sorted = np.uint32(0), 0
        for bucket in range(_NUM_BUCKETS):
            if start < num_wanted:
                num_sorted = start + counts[bucket]
            num = counts[bucket]
            counts[bucket] = start
            start += num
        for k in range(num_found):
            at = counts[where[k]]
            counts[where[k]] = at + np.uint32(1)
            placed[at] = found[k]
            sorted_values[at] = values[found[k]]
        if num_sorted <= 8 * num_wanted:
            _insert(sorted_values, placed, num_sorted)
        else:  # a row in order of size, or with hardly two different values
            order = np.argsort(-sorted_values[:num_sorted], kind="mergesort")
            sorted_values[:num_sorted] = sorted_values[:num_sorted][order]
            placed[:num_sorted] = placed[:num_sorted][order]
        for k in range(num_wanted):
            ids[place, k] = placed[k]
            log_probs[place, k] = sorted_values[k] - log_sum


@compiled
def _threshold(peaks, num, num_wanted):
    """The largest, and what as many as are wanted reach, not many more; minus infinity if only all together do."""
    top, low = peaks[0], np.float32(np.inf)
    for block in range(num):
        peak = peaks[block]
        top = max(top, peak)
        low = min(low, peak if peak > -np.inf else np.float32(np.inf))
    num_reach = _count(peaks, num, low)
    if num_reach < num_wanted:
        return top, np.float32(-np.inf)
    high, enough = top, num_wanted + num_wanted // 16
    for _ in range(_HALVINGS):
        if num_reach <= enough:
            break
        middle = np.float32(0.5) * low + np.float32(0.5) * high
        num_middle = _count(peaks, num, middle)
        if num_middle >= num_wanted:
            low, num_reach = middle, num_middle
        else:
            high = middle
    return top, low


@compiled
def _count(peaks, num, least):
    reach = np.int32(0)
    for block in range(num):
        reach += np.int32(peaks[block] >= least)
    return reach


@compiled
def _insert(values, ids, num):
    """Sort both by value, the largest first, equals as they stand; nearly sorted already."""
    for k in range(1, num):
        x = values[k]
        if x > values[k - 1]:
            own, j = ids[k], k
            while j > 0 and x > values[j - 1]:
                values[j] = values[j - 1]
                ids[j] = ids[j - 1]
                j -= 1
            values[j] = x
            ids[j] = own
