"""Rows of logits -> the ids and log-probabilities of the largest of each (CPU, numba).

Versions, microseconds for a row of 4,096 and the 128 largest, on one core of a Xeon that others shared (noisy):

    torch.topk and torch.logsumexp                    60
    numpy: argpartition, then a sort of what is left  25
    a histogram over the whole row                    13
    the largest of blocks as a threshold              10
    the same, blocks by vectors, no branches (this)    9
"""

from __future__ import annotations

import numpy as np

from paceline.kernels.compiled import compiled


@compiled
def top_rows(logits, chosen, ids, log_probs, log_sums):
    """Blocks' largest values tell how far down the wanted ones reach at most; only what reaches it is sorted."""
    num_wanted = ids.shape[1]
    size = logits.shape[1]
    width = max(1, min(16, size // (2 * num_wanted)))
    num_blocks = (size + width - 1) // width
    keys = np.empty(size, np.int32)
    peaks = np.empty(num_blocks, np.int32)
    heads = peaks.view(np.float32)
    bits = logits.view(np.int32)
    parts = np.empty(size, np.float32)
    exponents = np.empty(size, np.int32)
    powers = exponents.view(np.float32)
    found = np.empty(size + 1, np.int32)
    where = np.empty(size, np.uint32)
    placed = np.empty(size, np.int32)
    values = np.empty(size, np.float32)
    num_buckets = 512
    counts = np.empty(num_buckets, np.int32)
    for place in range(len(chosen)):
        row = chosen[place]
        # As integers in the order of the floats: only of those does the compiler take several at a time.
        for i in range(size):
            key = bits[row, i]
            keys[i] = key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))
        for block in range(num_blocks):
            peak = np.int32(-0x80000000)
            if width == 16 and (block + 1) * 16 <= size:
                for i in range(block * 16, block * 16 + 16):
                    peak = max(peak, keys[i])
            else:
                for i in range(block * width, min(size, (block + 1) * width)):
                    peak = max(peak, keys[i])
            peaks[block] = peak ^ ((peak >> np.int32(31)) & np.int32(0x7FFFFFFF))  # its bits again
        top = heads[0]
        for block in range(num_blocks):
            top = max(top, heads[block])
        for i in range(size):
            # exp(x - top), as in tree_attention_jit.
            y = logits[row, i] - top
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
        for i in range(size):
            total += parts[i] * powers[i]
        log_sum = top + np.log(total)
        log_sums[place] = log_sum

        # As many blocks as tokens are wanted have their largest at `least` or above: so have the wanted tokens.
        lowest = heads[0]
        for block in range(num_blocks):
            lowest = min(lowest, heads[block])
        scale = np.float32(num_buckets - 1) / max(min(top - lowest, np.float32(1e6)), np.float32(1e-6))
        counts[:] = 0
        for block in range(num_blocks):
            counts[np.uint32(min((top - heads[block]) * scale, np.float32(num_buckets - 1)))] += 1
        last, num_found = np.uint32(0), counts[0]
        while num_found < num_wanted:
            last += np.uint32(1)
            num_found += counts[last]
        least = top
        for block in range(num_blocks):
            if np.uint32(min((top - heads[block]) * scale, np.float32(num_buckets - 1))) <= last:
                least = min(least, heads[block])
        # Each is put down, and stays if it counts; else the next one takes its place. No branch is guessed wrong.
        num_found, num_open = 0, 0
        for block in range(num_blocks):
            placed[num_open] = block
            num_open += heads[block] >= least
        for k in range(num_open):
            start = placed[k] * width
            for i in range(start, min(size, start + width)):
                found[num_found] = i
                num_found += logits[row, i] >= least
        counts[: last + 1] = 0
        for k in range(num_found):
            bucket = np.uint32(min((top - logits[row, found[k]]) * scale, np.float32(num_buckets - 1)))
            where[k] = bucket
            counts[bucket] += 1

        # Into their buckets, in order of ids; then each bucket is sorted in itself.
        start = 0
        for bucket in range(last + 1):
            num = counts[bucket]
            counts[bucket] = start
            start += num
        for k in range(num_found):
            at = counts[where[k]]
            counts[where[k]] = at + 1
            placed[at] = found[k]
            values[at] = logits[row, found[k]]
        if num_found <= 8 * num_wanted:
            for k in range(1, num_found):
                x = values[k]
                if x > values[k - 1]:
                    at = placed[k]
                    j = k
                    while j > 0 and x > values[j - 1]:
                        values[j] = values[j - 1]
                        placed[j] = placed[j - 1]
                        j -= 1
                    values[j] = x
                    placed[j] = at
        else:  # a row in order of size, or with hardly two different values
            order = np.argsort(-values[:num_found], kind="mergesort")
            values[:num_found] = values[:num_found][order]
            placed[:num_found] = placed[:num_found][order]
        for k in range(num_wanted):
            ids[place, k] = placed[k]
            log_probs[place, k] = values[k] - log_sum
