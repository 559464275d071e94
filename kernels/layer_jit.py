"""Rows of a decoder layer -> norms, rotations and gates, each one compiled loop (CPU, numba).

A layer's arithmetic beside its four products is small; as single tensor operations it costs more in calls than in
work. Each row is computed by itself, so its bits do not depend on the batch. The plain twins are the operations of
the Hugging Face model, which `ModelRunner` compares with at load.

Legend: T rows, E hidden size, I intermediate size, H query heads, G KV heads, D head size, S pool slots, P positions.
"""

from __future__ import annotations

import numpy as np

from paceline.kernels.compiled import compiled


@compiled
def rms_norm(x, weight, eps, out):
    """x [T, E], weight [E], out [T, E], all float32: out = x / sqrt(mean(x^2) + eps) * weight."""
    num, size = x.shape
    for t in range(num):
        total = np.float32(0)
        for i in range(size):
            total += x[t, i] * x[t, i]
        scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            out[t, i] = x[t, i] * scale * weight[i]


@compiled
def gate(gate_up, out):
    """gate_up [T, 2 I], out [T, I]: silu(first half) * second half, silu(g) = g / (1 + exp(-g))."""
    num, size = out.shape
    exponents = np.empty(size, np.int32)
    powers = exponents.view(np.float32)
    for t in range(num):
        for i in range(size):  # exp(-g) = p * 2^n, as in tree_attention_jit; the clamp keeps NaN
            y = -gate_up[t, i]
            y = max(y, np.float32(-87.0))
            y = min(y, np.float32(87.0))
            n = np.floor(y * np.float32(1.44269504) + np.float32(0.5))
            r = y - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
            p = np.float32(1.9875691500e-4)
            p = p * r + np.float32(1.3981999507e-3)
            p = p * r + np.float32(8.3334519073e-3)
            p = p * r + np.float32(4.1665795894e-2)
            p = p * r + np.float32(1.6666665459e-1)
            p = p * r + np.float32(5.0000001201e-1)
            out[t, i] = p * r * r + r + np.float32(1)
            exponents[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
        for i in range(size):
            out[t, i] = gate_up[t, i] * gate_up[t, size + i] / (np.float32(1) + out[t, i] * powers[i])


@compiled
def rotate_and_store(
    qkv, positions, slots, cos, sin, q_norm, k_norm, eps, num_heads, k_pool, v_pool, q_out
):  # fmt: skip
    """Rows of the fused projection -> rotated queries, and K and V in the pool.

    qkv float32 [T, (H + 2 G) * D]; positions, slots int64 [T]; cos, sin float32 [P, D], the signs of rotate_half in sin;
    q_norm, k_norm float32 [D] (RMS norm over D before the rotation) or [0] (none); k_pool, v_pool [G, S, D]; q_out
    [T, H, D].
    """
    num, num_kv, dim = qkv.shape[0], k_pool.shape[0], k_pool.shape[2]
    half = dim // 2
    head = np.empty(dim, np.float32)
    for t in range(num):
        at, slot = positions[t], slots[t]
        for h in range(num_heads + num_kv):
            norm = q_norm if h < num_heads else k_norm
            for d in range(dim):
                head[d] = qkv[t, h * dim + d]
            if len(norm) > 0:
                total = np.float32(0)
                for d in range(dim):
                    total += head[d] * head[d]
                scale = np.float32(1) / np.sqrt(total / np.float32(dim) + eps)
                for d in range(dim):
                    head[d] *= scale * norm[d]
            if h < num_heads:
                for d in range(half):
                    q_out[t, h, d] = head[d] * cos[at, d] + head[d + half] * sin[at, d]
                    q_out[t, h, d + half] = head[d + half] * cos[at, d + half] + head[d] * sin[at, d + half]
            else:
                g = h - num_heads
                for d in range(half):
                    k_pool[g, slot, d] = head[d] * cos[at, d] + head[d + half] * sin[at, d]
                    k_pool[g, slot, d + half] = (
                        head[d + half] * cos[at, d + half] + head[d] * sin[at, d + half]
                    )
        for g in range(num_kv):
            for d in range(dim):
                v_pool[g, slot, d] = qkv[t, (num_heads + num_kv + g) * dim + d]
