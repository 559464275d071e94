"""A few tokens of a small Llama-like decoder -> logits: every layer and the head in one compiled loop (CPU, numba).

A draft model of a million parameters is read from the cache in 0.1 ms, but each of its products costs 0.02 ms before
it begins, and its other operations as much again. Here nothing is called between the token and its logits, and the
weights are read as bfloat16, half the bytes. A product is a dot product for each output and row, so time grows with
the rows: for few of them only. The plain twin is `paceline.workers.lean`; sums run in another order, so the last bits
differ, which a draft may do and a target may not.

Measured on one core of a Xeon (AVX-512) that others use too, 192 -> 4096 in bfloat16: 50 us for one row, 73 for two, 135
for four, where oneDNN takes 140 us in float32 for any of them; 192 -> 320: 4 us for one row, where oneDNN takes 20.

Legend: R rows, L layers, E hidden size, I intermediate size, H query heads, G KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.kernels.compiled import compiled

FloatArray = npt.NDArray[np.float32]
HalfArray = npt.NDArray[np.uint16]
"""bfloat16 as its bits: the upper half of a float32."""


class Weights(NamedTuple):
    """A decoder's weights, stacked over layers; products as [out, in]. No biases."""

    embedding: FloatArray
    """[V, E]."""
    norm_in: FloatArray
    """[L, E]."""
    qkv: HalfArray
    """[L, (H + 2 G) D, E]."""
    out: HalfArray
    """[L, E, H D]."""
    norm_mlp: FloatArray
    """[L, E]."""
    gate_up: HalfArray
    """[L, 2 I, E]."""
    down: HalfArray
    """[L, E, I]."""
    norm: FloatArray
    """[E]."""
    head: HalfArray
    """[V, E]."""


def few_rows(
    ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    keep: npt.NDArray[np.int64],
    row_segment: npt.NDArray[np.int32],
    tables: npt.NDArray[np.int32],
    block_size: int,
    weights: Weights,
    pool: FloatArray,
    cos: FloatArray,
    sin: FloatArray,
    num_heads: int,
    eps: np.float32,
    scaling: np.float32,
) -> FloatArray:
    """Rows whose keys are all positions up to their own, as in `AttentionPlan` without nodes of trees.

    Args:
        ids, positions, slots: [R], each row's token, place and slot in the pool.
        keep: rows whose logits are wanted.
        row_segment, tables, block_size: as in `AttentionPlan`.
        pool: [L, 2, G, slots, D]; K and V of the rows are written here.
        cos, sin: [positions, D], the signs of rotate_half in sin.
    Returns:
        float32 [len(keep), V].
    """
    logits = np.empty((len(keep), len(weights.head)), np.float32)
    _few_rows(
        ids, positions, slots, keep, row_segment, tables, block_size, *weights, pool, cos, sin,
        num_heads, eps, scaling, logits,
    )  # fmt: skip
    return logits


@compiled
def _few_rows(
    ids, positions, slots, keep, row_segment, tables, block_size,
    embedding, norm_in, qkv, out, norm_mlp, gate_up, down, norm, head, pool, cos, sin,
    num_heads, eps, scaling, logits,
):  # fmt: skip
    num, size, wide = len(ids), embedding.shape[1], down.shape[2]
    num_kv, dim = pool.shape[2], pool.shape[4]
    x = np.empty((num, size), np.float32)
    normed = np.empty((num, size), np.float32)
    more = np.empty((num, size), np.float32)
    projected = np.empty((num, qkv.shape[1]), np.float32)
    attended = np.empty((num, num_heads * dim), np.float32)
    both = np.empty((num, 2 * wide), np.float32)
    gated = np.empty((num, wide), np.float32)
    scores = np.empty(max(positions) + 1, np.float32)
    for row in range(num):
        for i in range(size):
            x[row, i] = embedding[ids[row], i]
    for layer in range(len(qkv)):
        for row in range(num):
            _norm(x[row], norm_in[layer], eps, normed[row])
        _product(normed, qkv[layer], projected)
        for row in range(num):
            _rotate_and_store(
                projected[row], cos[positions[row]], sin[positions[row]], num_heads, num_kv, pool[layer],
                slots[row],
            )  # fmt: skip
        for row in range(num):
            _attend(
                projected[row], positions[row] + 1, tables[row_segment[row]], block_size, num_heads, scaling,
                pool[layer], scores, attended[row],
            )  # fmt: skip
        _product(attended, out[layer], more)
        _add(x, more)
        for row in range(num):
            _norm(x[row], norm_mlp[layer], eps, normed[row])
        _product(normed, gate_up[layer], both)
        for row in range(num):
            for i in range(wide):
                g = both[row, i]
                gated[row, i] = g / (np.float32(1) + np.exp(-g)) * both[row, wide + i]
        _product(gated, down[layer], more)
        _add(x, more)
    kept = np.empty((len(keep), size), np.float32)
    for row in range(len(keep)):
        _norm(x[keep[row]], norm, eps, kept[row])
    _product(kept, head, logits)


@compiled
def _norm(x, weight, eps, out):
    """out = x / sqrt(mean(x^2) + eps) * weight."""
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = x[i] * scale * weight[i]


@compiled
def _product(x, weight, out):
    """x [R, in] float32, weight [out, in] bfloat16 -> out [R, out]: sums of x * weight.

    The bits of a bfloat16 above 16 zeros are a float32. Rows go in pairs, for which a weight is read and widened once.
    """
    num, size = x.shape
    for o in range(len(weight)):
        for pair in range(num // 2):
            s0, s1 = np.float32(0), np.float32(0)
            for i in range(size):
                v = np.uint32(np.uint32(weight[o, i]) << np.uint32(16)).view(np.float32)
                s0 += x[2 * pair, i] * v
                s1 += x[2 * pair + 1, i] * v
            out[2 * pair, o], out[2 * pair + 1, o] = s0, s1
        if num % 2:
            s0 = np.float32(0)
            for i in range(size):
                s0 += x[num - 1, i] * np.uint32(np.uint32(weight[o, i]) << np.uint32(16)).view(np.float32)
            out[num - 1, o] = s0


@compiled
def _add(x, more):
    for row in range(len(x)):
        for i in range(x.shape[1]):
            x[row, i] += more[row, i]


@compiled
def _rotate_and_store(row, cos, sin, num_heads, num_kv, pool, slot):
    """Rotate the row's queries and keys in place; K and V go to the pool's slot."""
    dim = len(cos)
    half = dim // 2
    for h in range(num_heads + num_kv):
        for d in range(half):
            a, b = row[h * dim + d], row[h * dim + half + d]
            row[h * dim + d] = a * cos[d] + b * sin[d]
            row[h * dim + half + d] = b * cos[half + d] + a * sin[half + d]
    for g in range(num_kv):
        for d in range(dim):
            pool[0, g, slot, d] = row[(num_heads + g) * dim + d]
            pool[1, g, slot, d] = row[(num_heads + num_kv + g) * dim + d]


@compiled
def _attend(row, num_keys, table, block_size, num_heads, scaling, pool, scores, out):
    """Softmax attention of one row's queries over its stream's first keys."""
    num_kv, dim = pool.shape[1], pool.shape[3]
    group = num_heads // num_kv
    for h in range(num_heads):
        g = h // group
        top = np.float32(-np.inf)
        for i in range(num_keys):
            slot = np.int64(table[i // block_size]) * block_size + i % block_size
            s = np.float32(0)
            for d in range(dim):
                s += row[h * dim + d] * pool[0, g, slot, d]
            scores[i] = s * scaling
            top = max(top, scores[i])
        total = np.float32(0)
        for i in range(num_keys):
            scores[i] = np.exp(scores[i] - top)
            total += scores[i]
        for d in range(dim):
            out[h * dim + d] = 0
        for i in range(num_keys):
            slot = np.int64(table[i // block_size]) * block_size + i % block_size
            p = scores[i] / total
            for d in range(dim):
                out[h * dim + d] += p * pool[1, g, slot, d]
