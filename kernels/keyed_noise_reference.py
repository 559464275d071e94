"""Philox counters and keys -> 32-bit words -> Gumbel noise, in plain torch integer arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(
    counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10.

    Args:
        counter: four int64 tensors holding 32-bit words, broadcastable with each other and the key.
        key: two of the same.
    Returns:
        Four int64 tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # 32 x 32 -> 64 bits: int64 wraps around, which keeps all 64 bits; the shift is arithmetic, hence the mask.
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def noise_from_words(words: Tensor) -> Tensor:
    """32-bit words (int64) -> float32 Gumbel noise of the same shape."""
    u = (words.to(torch.float64) + 0.5) * 2.0**-32  # in (0, 1), exact
    e = -torch.log1p(-u)  # E = -log(1 - u) <= 22.9; in float32 u would round to 1 and E to infinity
    return -torch.log(e.to(torch.float32))


def _key(seeds_R: Tensor) -> tuple[Tensor, Tensor]:
    return (seeds_R & _MASK)[:, None], ((seeds_R >> 32) & _MASK)[:, None]


def gumbel(
    seeds_R: Tensor, positions_R: Tensor, choices_R: Tensor, prompts_R: Tensor, ids_K: Tensor
) -> Tensor:
    """See `paceline.kernels.keyed_noise.gumbel`."""
    counter = ((ids_K >> 2)[None, :], positions_R[:, None], choices_R[:, None], prompts_R[:, None])
    words = torch.stack(philox4x32(counter, _key(seeds_R)))  # [4, R, K]
    lane = (ids_K & 3)[None, None, :].expand(1, words.shape[1], -1)
    return noise_from_words(words.gather(0, lane)[0])


def gumbel_vocabulary(
    seeds_R: Tensor,
    positions_R: Tensor,
    choices_R: Tensor,
    prompts_R: Tensor,
    num_ids: int,
    first_id: int = 0,
) -> Tensor:
    """See `paceline.kernels.keyed_noise.gumbel_vocabulary`."""
    groups = first_id // 4 + torch.arange((num_ids + 3) // 4, device=seeds_R.device)
    counter = (groups[None, :], positions_R[:, None], choices_R[:, None], prompts_R[:, None])
    words = torch.stack(philox4x32(counter, _key(seeds_R)), dim=-1)  # [R, groups, 4]
    return noise_from_words(words.reshape(len(seeds_R), -1)[:, :num_ids])
