"""Noise keys and token ids -> the same Philox words as on the CPU, and Gumbel noise in float32 (Triton).

The integers are bit for bit those of `keyed_noise`. The noise is computed in float32, each part of the range in a form
that keeps its relative precision, so that no float64 logarithm is needed for every token:

    u < 1/32    E = u + u^2/2 + u^3/3 + u^4/4 + u^5/5      (the rest is below 6e-9 of it)
    u < 1/2     E = -log(w) * u / (1 - w), w = 1 - u rounded: Kahan's log1p, the rounding of w cancels
    else        E = -log(1 - u), 1 - u from the complement of the word, which is exact to 2^-24

Within 1e-6 of the CPU's, which is why a near-tie is what design promise 1 calls one.

Versions: 1, tl.philox: 75 high and 79 low multiplications for 16 tokens; 2, wide ones. Not timed on a card yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def gumbel_of(words):
    """uint32 words of any shape -> float32 noise of that shape."""
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    w = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    kahan = tl.where((u < 0.5) & (u > 0.01), u / (1.0 - tl.minimum(w, 0.9999)), 1.0)
    e = tl.where(u < 0.03125, series, -tl.log(w) * kahan)
    return -tl.log(e)


@triton.jit
def words_of_groups(groups, position, choice, prompt, seed):
    """int32 [n] groups of four ids -> uint32 [n, 4] words, those of ids 4 g .. 4 g + 3."""
    w0, w1, w2, w3 = _philox(groups, position, choice, prompt, seed)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [groups.shape[0], 4])


@triton.jit
def words_of_ids(ids, position, choice, prompt, seed):
    """int32 ids of any shape -> the uint32 word of each, at four times the work of `words_of_groups`."""
    w0, w1, w2, w3 = _philox(ids >> 2, position, choice, prompt, seed)
    lane = ids & 3
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def _philox(groups, position, choice, prompt, seed):
    """Philox4x32-10 of counters (groups, position, choice, prompt), as in `keyed_noise_reference.philox4x32`."""
    c0 = groups.to(tl.uint32, bitcast=True)
    zero = c0 ^ c0
    c1 = zero + position.to(tl.uint32)
    c2 = zero + choice.to(tl.uint32)
    c3 = zero + prompt.to(tl.uint32)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        # One wide multiplication each; tl.philox asks for the high and the low half apart, which takes two.
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _write_rows(
    seeds, positions, choices, prompts, out, first_group, num_ids, BLOCK: tl.constexpr, AS_WORDS: tl.constexpr
):
    """A row's noise (or its words) for BLOCK ids."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    groups = first_group + start // 4 + tl.arange(0, BLOCK // 4)
    words = words_of_groups(
        groups,
        tl.load(positions + row),
        tl.load(choices + row),
        tl.load(prompts + row),
        tl.load(seeds + row),
    )
    ids = start + tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = out + row * num_ids + ids
    if AS_WORDS:
        tl.store(at, words.to(tl.int32, bitcast=True), mask=ids < num_ids)
    else:
        tl.store(at, gumbel_of(words), mask=ids < num_ids)


def gumbel_vocabulary(
    seeds_R: Tensor,
    positions_R: Tensor,
    choices_R: Tensor,
    prompts_R: Tensor,
    num_ids: int,
    first_id: int = 0,
    *,
    as_words: bool = False,
) -> Tensor:
    """See `paceline.kernels.keyed_noise.gumbel_vocabulary`; `as_words` gives the words' bits, int32, instead."""
    dtype = torch.int32 if as_words else torch.float32
    out = torch.empty(len(seeds_R), num_ids, dtype=dtype, device=seeds_R.device)
    if out.numel():
        _write_rows[(len(seeds_R), triton.cdiv(num_ids, _BLOCK))](
            *(seeds_R, positions_R, choices_R, prompts_R, out, first_id // 4, num_ids),
            BLOCK=_BLOCK,
            AS_WORDS=as_words,
            num_warps=4,
        )
    return out
