"""Philox counters and keys -> Gumbel noise: the integers in one compiled loop (CPU, numba), the logarithms in torch.

The integers are exact, and u = (x + 0.5) * 2^-32 is too, so the noise is the reference's bit for bit: what rounds,
the logarithms, is the same code.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.compiled import compiled


@compiled
def _uniforms(seeds, positions, choices, prompts, num_ids, first_group, negative_u):
    """int64 [R] each -> negative_u float64 [R, >= num_ids, a multiple of 4]: -u of ids from 4 * first_group on."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    m0, m1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
    w0, w1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
    num_groups = (num_ids + 3) // 4
    words = np.empty((4, num_groups), np.uint64)  # apart, so that the loop over groups runs in vectors
    for r in range(len(seeds)):
        seed = np.uint64(seeds[r])
        position, choice, prompt = np.uint64(positions[r]), np.uint64(choices[r]), np.uint64(prompts[r])
        for group in range(num_groups):
            k0, k1 = seed & low, seed >> half
            c0, c1, c2, c3 = np.uint64(first_group + group), position, choice, prompt
            for _ in range(10):
                p0, p1 = c0 * m0, c2 * m1
                c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
                k0, k1 = (k0 + w0) & low, (k1 + w1) & low
            words[0, group], words[1, group], words[2, group], words[3, group] = c0, c1, c2, c3
        for lane in range(4):
            for group in range(num_groups):
                negative_u[r, 4 * group + lane] = -(np.float64(words[lane, group]) + 0.5) * 2.0**-32


def gumbel_vocabulary(
    seeds_R: Tensor,
    positions_R: Tensor,
    choices_R: Tensor,
    prompts_R: Tensor,
    num_ids: int,
    first_id: int = 0,
) -> Tensor:
    """See `paceline.kernels.keyed_noise.gumbel_vocabulary`."""
    negative_u = torch.empty(len(seeds_R), -(-num_ids // 4) * 4, dtype=torch.float64)
    keys = (tensor.contiguous().numpy() for tensor in (seeds_R, positions_R, choices_R, prompts_R))
    _uniforms(*keys, num_ids, first_id // 4, negative_u.numpy())
    e = negative_u[:, :num_ids].log1p().neg_()
    return e.to(torch.float32).log_().neg_()
