"""Queries and a paged pool -> attention output, each row in one compiled loop of its own (CPU, numba).

A row's result must be the same whether it is computed alone, inside a prompt chunk or as a node of a draft tree: then
chunking, speculation and hand-off cannot change a token. Here a row is a loop over its keys in the order of their
positions, and nothing else of the batch is in that loop: the bits follow from the row and its keys alone. A path
through a tree, side branches too, is the same sequence of keys as plain decoding, so it has the same bits.

    s_i = scale * q . k_i                         float32; one code path for all keys
    p_i = exp(s_i - max)                          polynomial of degree 7 (Cephes' expf)
    o   = sum_i p_i v_i / sum_i p_i               float32 within 64 keys, float64 across them

Long work is cut into rows for several threads, which changes no bit.

Measured on one core of an AMD EPYC (Zen 4), 8 heads, 2 KV heads, D = 64, context 300: 19 us a layer for one row, 139 us
for 8 rows of one stream, 285 us for 16 streams of one row, 2.1 ms for 16 streams of 8: about 37 GFLOP/s.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.kernels.compiled import compiled

if TYPE_CHECKING:
    from paceline.kernels.tree_attention import AttentionPlan

_KEYS_OF_A_SUM = 64
_WORTH_A_THREAD = 30_000
"""Pairs of query head and key from which a second thread pays for its wake-up of about 50 us."""

_pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="attention")
"""Idle threads sleep; how many work is `torch.get_num_threads()`, one thread budget for all operations."""

FloatArray = npt.NDArray[np.float32]


def tree_attention(
    q_THD: Tensor,
    k_pool_GSD: Tensor,
    v_pool_GSD: Tensor,
    plan: AttentionPlan,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `paceline.kernels.tree_attention.tree_attention`."""
    out = torch.empty(q_THD.shape[0], q_THD.shape[1], v_pool_GSD.shape[-1])
    attend(
        q_THD.contiguous().numpy(),
        k_pool_GSD.numpy(),
        v_pool_GSD.numpy(),
        plan,
        out.numpy(),
        scaling=scaling,
        window=window,
        softcap=softcap,
        sinks_H=None if sinks_H is None else sinks_H.float().numpy(),
    )
    return out


def attend(
    q_THD: FloatArray,
    k_pool_GSD: FloatArray,
    v_pool_GSD: FloatArray,
    plan: AttentionPlan,
    out_THD: FloatArray,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks_H: FloatArray | None = None,
) -> None:
    """The same on arrays, C-contiguous, into `out_THD`."""
    parts = _parts(plan, q_THD.shape[1])
    settings = (np.float32(scaling), np.int64(window or 0), np.float32(softcap or 0.0))
    sinks = np.empty(0, np.float32) if sinks_H is None else sinks_H

    def run(rows: tuple[int, int]) -> None:
        _attend_rows(
            *rows,
            q_THD,
            k_pool_GSD,
            v_pool_GSD,
            plan.row_segment,
            plan.positions,
            plan.num_leading,
            plan.own_start,
            plan.own,
            plan.tables,
            plan.block_size,
            *settings,
            sinks,
            out_THD,
        )

    others = [_pool.submit(run, part) for part in parts[1:]]
    run(parts[0])
    for other in others:
        other.result()


def _parts(plan: AttentionPlan, num_heads: int) -> list[tuple[int, int]]:
    """Ranges of rows with about the same number of keys, one for each thread that pays; kept for all layers."""
    num_threads = torch.get_num_threads()
    if plan.parts is None or plan.parts[0] != num_threads:
        num_rows = len(plan.positions)
        work = np.cumsum(plan.num_leading, dtype=np.int64)
        num = int(min(num_threads, num_rows, max(1, work[-1] * num_heads // _WORTH_A_THREAD)))
        cuts = [0, *np.searchsorted(work, work[-1] * np.arange(1, num) / num).tolist(), num_rows]
        plan.parts = num_threads, [(a, b) for a, b in pairwise(cuts) if b > a]
    return plan.parts[1]


@compiled
def _attend_rows(
    first, stop, q, k_pool, v_pool, row_segment, positions, num_leading, own_start, own, tables, block_size,
    scaling, window, softcap, sinks, out,
):  # fmt: skip
    num_kv, num_heads, dim, dim_v = k_pool.shape[0], q.shape[1], q.shape[2], v_pool.shape[2]
    group = num_heads // num_kv
    most = 0
    for row in range(first, stop):
        most = max(most, num_leading[row] + own_start[row + 1] - own_start[row])
    slots = np.empty(most, np.int64)
    scores = np.empty((group, most), np.float32)
    exponents = np.empty(most, np.int32)
    powers = exponents.view(np.float32)
    lanes = np.empty(16, np.float32)
    part = np.empty((group, dim_v), np.float32)
    total = np.empty((group, dim_v), np.float64)
    weights = np.zeros(group, np.float64)
    for row in range(first, stop):
        num = _slots_of(
            row, row_segment, positions, num_leading, own_start, own, tables, block_size, window, slots
        )
        for g in range(num_kv):
            for i in range(num):
                slot = slots[i]
                for h in range(group):
                    s = np.float32(0)
                    for d in range(dim):
                        s += q[row, g * group + h, d] * k_pool[g, slot, d]
                    scores[h, i] = s * scaling
            for h in range(group):
                if softcap > 0:
                    for i in range(num):
                        scores[h, i] = np.tanh(scores[h, i] / softcap) * softcap
                if len(sinks) > 0:  # one more key, without a value
                    top = _largest(scores[h], num, lanes)
                    weights[h] = np.exp(np.float64(sinks[g * group + h]) - np.float64(top))
                _exp_less_max(scores[h], num, exponents, powers, lanes)
                for d in range(dim_v):
                    total[h, d] = 0.0
            start = 0
            while start < num:
                end = min(start + _KEYS_OF_A_SUM, num)
                for h in range(group):
                    for d in range(dim_v):
                        part[h, d] = 0
                i = start
                while i + 4 <= end:  # four keys for one pass over `part`
                    s0, s1, s2, s3 = slots[i], slots[i + 1], slots[i + 2], slots[i + 3]
                    for h in range(group):
                        p0, p1, p2, p3 = scores[h, i], scores[h, i + 1], scores[h, i + 2], scores[h, i + 3]
                        for d in range(dim_v):
                            part[h, d] += (p0 * v_pool[g, s0, d] + p1 * v_pool[g, s1, d]) + (
                                p2 * v_pool[g, s2, d] + p3 * v_pool[g, s3, d]
                            )
                    i += 4
                while i < end:
                    slot = slots[i]
                    for h in range(group):
                        p0 = scores[h, i]
                        for d in range(dim_v):
                            part[h, d] += p0 * v_pool[g, slot, d]
                    i += 1
                for h in range(group):
                    for d in range(dim_v):
                        total[h, d] += part[h, d]
                start = end
            for h in range(group):
                weight = weights[h]
                start = 0
                while start < num:
                    p_sum = np.float32(0)
                    for i in range(start, min(start + _KEYS_OF_A_SUM, num)):
                        p_sum += scores[h, i]
                    weight += p_sum
                    start += _KEYS_OF_A_SUM
                for d in range(dim_v):
                    out[row, g * group + h, d] = total[h, d] / weight


@compiled
def _slots_of(
    row, row_segment, positions, num_leading, own_start, own, tables, block_size, window, slots
):  # fmt: skip
    """Pool slots of the keys that a row sees, in order of position; how many."""
    segment, leading = row_segment[row], num_leading[row]
    low = max(0, positions[row] - window + 1) if window > 0 else 0
    num = 0
    for i in range(min(low, leading), leading):
        slots[num] = np.int64(tables[segment, i // block_size]) * block_size + i % block_size
        num += 1
    # The path's nodes behind the leading ones follow them in position.
    for at in range(own_start[row] + max(0, low - leading), own_start[row + 1]):
        i = own[at]
        slots[num] = np.int64(tables[segment, i // block_size]) * block_size + i % block_size
        num += 1
    return num


@compiled
def _largest(x, num, lanes):
    """max x[:num]. Sixteen maxima side by side: one alone cannot run in vectors, for comparisons mind NaN."""
    top = x[0]
    whole = num // 16 * 16
    for lane in range(min(16, whole)):
        lanes[lane] = x[lane]
    for i in range(16, whole, 16):
        for lane in range(16):
            lanes[lane] = max(lanes[lane], x[i + lane])
    for lane in range(min(16, whole)):
        top = max(top, lanes[lane])
    for i in range(whole, num):
        top = max(top, x[i])
    return top


@compiled
def _exp_less_max(x, num, exponents, powers, lanes):
    """x[:num] = exp(x - max x) in place; NaN stays NaN. `powers` is `exponents` seen as float32.

    exp(y) = 2^n exp(r), n = round(y / ln 2), |r| <= ln 2 / 2. Coefficients: Cephes 2.2, expf.c.
    """
    top = _largest(x, num, lanes)
    for i in range(num):
        y = x[i] - top
        y = max(y, np.float32(-87.0))
        n = np.floor(y * np.float32(1.44269504) + np.float32(0.5))
        r = y - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        x[i] = p * r * r + r + np.float32(1)
        exponents[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for i in range(num):
        x[i] *= powers[i]
