"""Rows of a Llama-like decoder -> logits: layers and head in one compiled loop that threads enter together (CPU, numba).

What a small model's step is made of: weights read once from memory, arithmetic for a few rows, and the gaps between
operations. Here there are no gaps: nothing is called between a token and its logits, and threads share the work of each
phase by taking chunks from a counter until none is left, so that one that comes late, or that the system stops, holds
up nothing but its own chunk.

Weights lie in panels: for 32 outputs, side by side in two vectors, all inputs one after the other. An output is a lane
of a vector and its sum runs over the inputs in their order, so the bits of a row depend neither on the other rows nor on
the threads. Two kinds of arithmetic, chosen by the machine and never by the batch:

    vectors  float32 multiply-adds; weights are float32, or bfloat16 or int8 and widened where they are used
    tiles    Intel AMX: x = hi + mid + lo, three bfloat16 that sum to x exactly; products with bfloat16 are exact in
             float32, and sums are float32: hi in one, mid and lo in another, then both. As accurate as vectors.
             Source: Henry, Tang, Heinecke 1904.06376 (higher precision from bfloat16 units).

The plain twin is `paceline.workers.lean`.

Legend: T rows, L layers, E hidden size, I intermediate size, H query heads, G KV heads, D head size, V vocabulary,
P pairs of panels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from paceline.kernels import vectors_jit as v
from paceline.kernels.compiled import FLAGS, compiled
from paceline.kernels.vectors_jit import PAIR

LINE = 8
"""int64 of a cache line: counters of threads lie apart."""
BLOCK = 8
TILE = 16
"""Rows of a block, at most, of vectors and of tiles."""
_STEPS = 127 << 14
"""From zero to the largest of a row of three int8."""
_HAS_WIDE_REGISTERS = v.HAS_WIDE_REGISTERS
_looped = partial(compiled, uses=(v,))
_JIT: Any = {"jit_options": {"nogil": True, "fastmath": set(FLAGS), "error_model": "numpy"}}


# --- rows of inputs, one of:
#     float32 [T, K]
#     three bfloat16 whose sum they are, [T / 16, K / 32, 3, 16, 32]
#     three int8, 2^14 a + 2^7 b + c times the row's scale, [T / 16, K / 64, 3, 16, 64]


def _space(x):
    """Rows that can be multiplied together: a block."""


@overload(_space, inline="always", **_JIT)
def _space_of_either(x):
    num = BLOCK if x.dtype == types.float32 else TILE
    return lambda x: num


def _outputs(x):
    """Outputs that are computed together."""


@overload(_outputs, inline="always", **_JIT)
def _outputs_of_either(x):
    num = 4 * 16 if x.dtype == types.uint16 else PAIR
    return lambda x: num


def _multiply(x, scales, first, num, w, w_at, num_in, out, products):
    """products[r, 0:32] of rows first .. first + num - 1, at most a block, with the pair of panels at w_at."""


@overload(_multiply, **_JIT)
def _multiply_either(x, scales, first, num, w, w_at, num_in, out, products):
    if x.dtype == types.float32:

        def multiply(x, scales, first, num, w, w_at, num_in, out, products):
            stride = x.shape[1]
            at = first * stride
            if num == 1:
                v.vectors(1, 1, x, at, stride, w, w_at, num_in, products)
            elif num == 2:
                v.vectors(2, 1, x, at, stride, w, w_at, num_in, products)
            elif num == 3:
                v.vectors(3, 1, x, at, stride, w, w_at, num_in, products)
            elif num == 4:
                v.vectors(4, 1, x, at, stride, w, w_at, num_in, products)
            elif num <= 6:
                v.vectors(6, 1, x, at, stride, w, w_at, num_in, products)
            elif first == 0:
                v.vectors(8, 1, x, at, stride, w, w_at, num_in, products)
            else:
                v.vectors(8, 0, x, at, stride, w, w_at, num_in, products)

    elif x.dtype == types.uint16:

        def multiply(x, scales, first, num, w, w_at, num_in, out, products):
            if first == 0:
                v.tiles(1, x, 0, w, w_at, num_in, products)
            else:
                v.tiles(0, x, first * x.shape[1] * 96, w, w_at, num_in, products)

    else:

        def multiply(x, scales, first, num, w, w_at, num_in, out, products):
            v.byte_tiles(x, first * x.shape[1] * 192, w, w_at, num_in, out)
            for panel in range(2):
                for r in range(num):
                    scale = scales[first + r]
                    for i in range(16):
                        high, low = np.float32(out[3 * panel, r, i]), np.float32(out[3 * panel + 1, r, i])
                        most = high * np.float32(16384) + low * np.float32(128)
                        products[r, 16 * panel + i] = (most + np.float32(out[3 * panel + 2, r, i])) * scale

    return multiply


def _give(values, row, size, x, scales, to):
    """x[to] = values[row, :size]: rows of inputs from rows of float32."""


@overload(_give, **_JIT)
def _give_either(values, row, size, x, scales, to):
    if x.dtype != types.int8:

        def give(values, row, size, x, scales, to):
            for i in range(0, size, 16):
                v.put(x, to, i, values, row * values.shape[1] + i)

    else:

        def give(values, row, size, x, scales, to):
            top, nothing = np.float32(0), np.float32(0)
            for i in range(size):
                top = max(top, abs(values[row, i]))
                nothing += values[row, i] * np.float32(0)  # or NaN, if a value is
            scales[to] = top * np.float32(1 / _STEPS) + nothing
            factor = np.float32(_STEPS) / max(top, np.float32(1e-30))
            block, place = to // 16, to % 16
            for start in range(0, size, 64):
                step = start // 64
                for i in range(min(64, size - start)):
                    whole = np.int32(np.rint(values[row, start + i] * factor))
                    high = (whole + np.int32(8192)) >> np.int32(14)
                    rest = whole - (high << np.int32(14))
                    low = (rest + np.int32(64)) >> np.int32(7)
                    x[block, step, 0, place, i] = high
                    x[block, step, 1, place, i] = low
                    x[block, step, 2, place, i] = rest - (low << np.int32(7))

    return give


def _whole_rows(values, num, block, size, x, scales, tickets, phase):
    """A phase that makes inputs of rows of float32 where they must be whole for it; the next phase's number."""


@overload(_whole_rows, **_JIT)
def _whole_rows_of_either(values, num, block, size, x, scales, tickets, phase):
    if x.dtype != types.int8:
        return lambda values, num, block, size, x, scales, tickets, phase: phase

    def whole(values, num, block, size, x, scales, tickets, phase):
        row = _next(tickets, phase)
        while row < num:
            seat = row // block * TILE + row % block
            _give(values, seat, size, x, scales, seat)
            _finish(tickets, phase, 1)
            row = _next(tickets, phase)
        _wait(tickets, phase, num)
        return phase + 1

    return whole


def _open(x, shapes):
    """Make this thread ready for products."""


@overload(_open, **_JIT)
def _open_either(x, shapes):
    if x.dtype == types.float32:
        return lambda x, shapes: None
    return lambda x, shapes: v.open_tiles(shapes)


def _close(x):
    """Undo `_open`."""


@overload(_close, **_JIT)
def _close_either(x):
    if x.dtype == types.float32:
        return lambda x: None
    return lambda x: v.close_tiles()


# --- threads --------------------------------------------------------------------------------------------


@_looped
def _next(tickets, phase):
    """A chunk of this phase that nobody has taken; past the last one if there is none."""
    return v.add(tickets, phase * 2 * LINE, 1)


@_looped
def _finish(tickets, phase, num):
    """Say that `num` chunks are done."""
    v.add(tickets, phase * 2 * LINE + LINE, num)


@_looped
def _wait(tickets, phase, num):
    """Until all chunks of a phase are done. Whoever holds one may have been stopped by the system: let it run."""
    tries = 0
    while v.look(tickets, phase * 2 * LINE + LINE) < num:
        tries += 1
        if tries > 2000:
            v.let_others()


# --- the step -------------------------------------------------------------------------------------------


@_looped
def step(
    layer, stop, ids, positions, slots, keep, row_segment, num_leading, own_start, own, tables, block_size,
    embedding, norm_in, qkv, qkv_affine, q_norm, k_norm, out, out_affine, norm_mlp, gate_up, gate_up_affine,
    down, down_affine, norm, head, head_affine, windows, pool, cos, sin, num_heads, eps, scaling,
    x, normed, normed_scales, projected, attended_rows, attended, attended_scales, gated_rows, gated, gated_scales,
    logits, tickets, shapes, block,
):  # fmt: skip
    """Layers `layer` to `stop` of rows, and the head behind the last one; every thread that shares the work calls it.

    `block`: rows that are multiplied together; the inputs of the next ones begin at the next multiple of a whole block.
    """
    num, num_layers, size = len(ids), len(qkv), embedding.shape[1]
    num_kv, dim, space = pool.shape[2], pool.shape[4], _space(normed)
    outputs = _outputs(normed)
    products = np.empty((TILE, outputs), np.float32)
    out_tiles = np.empty((6, 16, 16), np.int32)
    values = np.zeros((1, (size + 15) // 16 * 16), np.float32)
    most = 0
    for row in range(num):
        most = max(most, num_leading[row] + own_start[row + 1] - own_start[row])
    most = (most + 15) // 16 * 16
    key_slots = np.empty(most, np.int64)
    seen_row, seen_window, num_keys = -1, -1, 0
    scores = np.empty((num_heads // num_kv, most), np.float32)
    sums = np.empty(num_heads // num_kv, np.float32)
    turned = np.empty(dim + dim // 2, np.float32)
    _open(normed, shapes)
    phase = 0
    if layer == 0:
        row = _next(tickets, phase)
        while row < num:
            for i in range(size):
                x[row, i] = embedding[ids[row], i]
            _finish(tickets, phase, 1)
            row = _next(tickets, phase)
        _wait(tickets, phase, num)
        phase += 1
    while layer < stop:
        row = _next(tickets, phase)
        while row < num:
            seat = row // block * space + row % block
            _norm(x, row, size, norm_in, layer, eps, values, normed, normed_scales, seat)
            _finish(tickets, phase, 1)
            row = _next(tickets, phase)
        _wait(tickets, phase, num)
        phase += 1

        num_pairs, width = qkv.shape[1], qkv.shape[2]
        pair = _next(tickets, phase)
        while pair < num_pairs:
            at = (layer * num_pairs + pair) * width
            for first in range(0, num, block):
                rows, seat = min(block, num - first), first // block * space
                _multiply(normed, normed_scales, seat, rows, qkv, at, width // outputs, out_tiles, products)
                _scale(products, rows, qkv_affine, layer, pair)
                for r in range(rows):
                    for i in range(0, outputs, 16):
                        v.put(projected, first + r, pair * outputs + i, products, r * outputs + i)
            _finish(tickets, phase, 1)
            pair = _next(tickets, phase)
        _wait(tickets, phase, num_pairs)
        phase += 1

        row = _next(tickets, phase)
        while row < num:
            _rotate_and_store(
                projected, row, positions[row], cos, sin, q_norm, k_norm, layer, eps, num_heads, pool, slots[row],
                turned,
            )  # fmt: skip
            _finish(tickets, phase, 1)
            row = _next(tickets, phase)
        _wait(tickets, phase, num)
        phase += 1

        chunk = _next(tickets, phase)
        while chunk < num * num_kv:
            row, g = chunk // num_kv, chunk % num_kv
            if row != seen_row or windows[layer] != seen_window:  # all heads of a row see the same keys
                seen_row, seen_window = row, windows[layer]
                num_keys = _slots_of(
                    row, row_segment, positions, num_leading, own_start, own, tables, block_size, seen_window,
                    key_slots,
                )  # fmt: skip
            _attend(
                projected, row, g, layer, num_keys, key_slots, pool, scaling, scores, sums, attended_rows,
                row // block * space + row % block,
            )  # fmt: skip
            _finish(tickets, phase, 1)
            chunk = _next(tickets, phase)
        _wait(tickets, phase, num * num_kv)
        phase += 1

        size_of = out.shape[2] // outputs
        phase = _whole_rows(attended_rows, num, block, size_of, attended, attended_scales, tickets, phase)
        phase = _add_product(
            attended, attended_scales, num, block, out, layer, out_affine, x, tickets, phase, out_tiles, products
        )  # fmt: skip

        row = _next(tickets, phase)
        while row < num:
            seat = row // block * space + row % block
            _norm(x, row, size, norm_mlp, layer, eps, values, normed, normed_scales, seat)
            _finish(tickets, phase, 1)
            row = _next(tickets, phase)
        _wait(tickets, phase, num)
        phase += 1

        num_pairs, width = gate_up.shape[1], gate_up.shape[2]
        pair = _next(tickets, phase)
        while pair < num_pairs:
            at = (layer * num_pairs + pair) * width
            for first in range(0, num, block):
                rows, seat = min(block, num - first), first // block * space
                _multiply(
                    normed, normed_scales, seat, rows, gate_up, at, width // outputs, out_tiles, products
                )
                _scale(products, rows, gate_up_affine, layer, pair)
                for r in range(rows):
                    for part in range(outputs // PAIR):
                        to = (pair * outputs + part * PAIR) // 2
                        v.put_gated(gated_rows, seat + r, to, products, r * outputs + part * PAIR)
            _finish(tickets, phase, 1)
            pair = _next(tickets, phase)
        _wait(tickets, phase, num_pairs)
        phase += 1

        size_of = down.shape[2] // outputs
        phase = _whole_rows(gated_rows, num, block, size_of, gated, gated_scales, tickets, phase)
        phase = _add_product(
            gated, gated_scales, num, block, down, layer, down_affine, x, tickets, phase, out_tiles, products
        )
        layer += 1
    if layer == num_layers and len(keep) > 0:
        row = _next(tickets, phase)
        while row < len(keep):
            seat = row // block * space + row % block
            _norm(x, keep[row], size, norm, 0, eps, values, normed, normed_scales, seat)
            _finish(tickets, phase, 1)
            row = _next(tickets, phase)
        _wait(tickets, phase, len(keep))
        phase += 1

        num_pairs, width = head.shape[1], head.shape[2]
        pair = _next(tickets, phase)
        while pair < num_pairs:
            at = pair * width
            for first in range(0, len(keep), block):
                rows, seat = min(block, len(keep) - first), first // block * space
                _multiply(normed, normed_scales, seat, rows, head, at, width // outputs, out_tiles, products)
                _scale(products, rows, head_affine, 0, pair)
                for r in range(rows):
                    for i in range(0, outputs, 16):
                        v.put(logits, first + r, pair * outputs + i, products, r * outputs + i)
            _finish(tickets, phase, 1)
            pair = _next(tickets, phase)
        _wait(tickets, phase, num_pairs)
    _close(normed)


@_looped
def _add_product(x, scales, num, block, w, layer, affine, y, tickets, phase, out_tiles, products):
    """One phase: y [T, outputs] += x times w's layer; the next phase's number."""
    num_pairs, width, outputs = w.shape[1], w.shape[2], _outputs(x)
    pair = _next(tickets, phase)
    while pair < num_pairs:
        at = (layer * num_pairs + pair) * width
        for first in range(0, num, block):
            rows, seat = min(block, num - first), first // block * _space(x)
            _multiply(x, scales, seat, rows, w, at, width // outputs, out_tiles, products)
            _scale(products, rows, affine, layer, pair)
            for r in range(rows):
                for i in range(0, outputs, 16):
                    v.put_sum(y, first + r, pair * outputs + i, products, r * outputs + i)
        _finish(tickets, phase, 1)
        pair = _next(tickets, phase)
    _wait(tickets, phase, num_pairs)
    return phase + 1


@_looped
def _scale(products, rows, affine, layer, pair):
    """products * scale + bias, both of this pair's outputs: affine [L, 2, outputs], or [L, 0, outputs], nothing to do."""
    if affine.shape[1] == 0:
        return
    outputs = products.shape[1]
    for r in range(rows):
        for i in range(outputs):
            products[r, i] = (
                products[r, i] * affine[layer, 0, pair * outputs + i] + affine[layer, 1, pair * outputs + i]
            )


@_looped
def _norm(x, row, size, weight, layer, eps, values, out, scales, to):
    """out[to] = x[row] / sqrt(mean(x[row]^2) + eps) * weight[layer]."""
    total = np.float32(0)
    for i in range(size):
        total += x[row, i] * x[row, i]
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        values[0, i] = x[row, i] * scale * weight[layer, i]
    _give(values, 0, size, out, scales, to)


@_looped
def _rotate_and_store(rows, row, at, cos, sin, q_norm, k_norm, layer, eps, num_heads, pool, slot, turned):
    """Rotate a row's queries in place; its K, rotated, and V go to the pool's slot. `at` is the row's position.

    q_norm, k_norm: [L, D], RMS norm before the rotation, or [L, 0], none. `turned` has room for a head and a half.
    """
    num_kv, dim = pool.shape[2], pool.shape[4]
    half, first = dim // 2, row * rows.shape[1]
    for h in range(num_heads + num_kv):
        place = h * dim
        norm = q_norm if h < num_heads else k_norm
        if norm.shape[1] > 0:
            total = np.float32(0)
            for d in range(dim):
                total += rows[row, place + d] * rows[row, place + d]
            scale = np.float32(1) / np.sqrt(total / np.float32(dim) + eps)
            for d in range(dim):
                rows[row, place + d] *= scale * norm[layer, d]
        if dim % 32:
            for d in range(dim + half):
                turned[d] = rows[row, place + d % dim]
            for d in range(dim):
                rows[row, place + d] = turned[d] * cos[at, d] + turned[d + half] * sin[at, d]
        else:
            v.turn(rows, first + place, cos, sin, at * dim, dim, rows, first + place)
    for g in range(num_kv):
        for d in range(dim):
            pool[layer, 0, g, slot, d] = rows[row, (num_heads + g) * dim + d]
        for d in range(dim):
            pool[layer, 1, g, slot, d] = rows[row, (num_heads + num_kv + g) * dim + d]


@_looped
def _slots_of(
    row, row_segment, positions, num_leading, own_start, own, tables, block_size, window, slots
):  # fmt: skip
    """Pool slots of the keys that a row sees, in order of position, the last one repeated up to a multiple of 16; how many."""
    segment, leading = row_segment[row], num_leading[row]
    low = max(0, positions[row] - window + 1) if window > 0 else 0
    num, i = 0, min(low, leading)
    while i < leading:  # block by block: a division for each key would take longer than its product
        block = i // block_size
        first = (np.int64(tables[segment, block]) - block) * block_size
        stop = min(leading, (block + 1) * block_size)
        for at in range(i, stop):
            slots[num] = first + at
            num += 1
        i = stop
    for at in range(own_start[row] + max(0, low - leading), own_start[row + 1]):
        i = own[at]
        slots[num] = np.int64(tables[segment, i // block_size]) * block_size + i % block_size
        num += 1
    for i in range(num, (num + 15) // 16 * 16):
        slots[i] = slots[num - 1]
    return num


@_looped
def _attend(queries, row, g, layer, num, slots, pool, scaling, scores, sums, out, seat):
    """Softmax attention of a row's query heads over the keys of one KV head, to out[seat]."""
    num_kv, num_slots, dim = pool.shape[2], pool.shape[3], pool.shape[4]
    group, most = scores.shape
    keys = (layer * 2 * num_kv + g) * num_slots * dim
    values = keys + num_kv * num_slots * dim
    q_at = row * queries.shape[1] + g * group * dim
    for i in range(0, num, 16):
        for h in range(group):
            v.scores_of(queries, q_at + h * dim, pool, keys, slots, i, dim, scores, h * most + i)
    for h in range(group):
        sums[h] = v.softmax(scores, h * most, num, scaling)
    h = 0
    while h < group:
        rows, d = 4 if group - h >= 4 else 1, 0
        while d < dim:
            blocks = 4 if _HAS_WIDE_REGISTERS and dim - d >= 64 else 1
            at, to = h * most, (g * group + h) * dim
            if rows == 4 and blocks == 4:
                v.weighted(4, 4, scores, at, sums, h, pool, values, slots, num, dim, d, out, seat, to)
            elif rows == 4:
                v.weighted(4, 1, scores, at, sums, h, pool, values, slots, num, dim, d, out, seat, to)
            elif blocks == 4:
                v.weighted(1, 4, scores, at, sums, h, pool, values, slots, num, dim, d, out, seat, to)
            else:
                v.weighted(1, 1, scores, at, sums, h, pool, values, slots, num, dim, d, out, seat, to)
            d += 16 * blocks
        h += rows
