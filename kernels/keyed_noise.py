"""(request seed, choice, prompt index, position, token id) -> Gumbel noise: a pure function, no generator state.

    x = Philox4x32-10(counter = (id >> 2, position, choice, prompt), key = (seed low, seed high))[id & 3]
    u = (x + 0.5) * 2^-32        E = -log1p(-u)        G = -log(E)

Counted by global token id, so vocabulary shards agree. Large G, which decides the argmax, comes from small u, where
floating point is fine-grained; the naive -log(-log u) puts it at u near 1, where float32 has steps of 6e-8. E is
computed in float64: in float32 the largest words would round to u = 1.

Legend: R rows (one for each distinct stream and position), K token ids.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011) for Philox.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels import keyed_noise_jit as jit
from paceline.kernels import keyed_noise_reference as reference


def gumbel(
    seeds_R: Tensor, positions_R: Tensor, choices_R: Tensor, prompts_R: Tensor, ids_K: Tensor
) -> Tensor:
    """Gumbel noise of each row for each token id.

    Args:
        seeds_R: int64, the bits of an unsigned 64-bit seed.
        positions_R: int64, absolute position of the token to be drawn, < 2^32.
        choices_R, prompts_R: int64, < 2^32.
        ids_K: int64, global token ids, < 2^34.
    Returns:
        float32 [R, K], finite.
    """
    for name, tensor in (("positions_R", positions_R), ("choices_R", choices_R), ("prompts_R", prompts_R)):
        assert tensor.shape == seeds_R.shape and tensor.dtype == torch.int64, (
            f"{name} must be int64 like seeds_R"
        )
    return reference.gumbel(seeds_R, positions_R, choices_R, prompts_R, ids_K)


def gumbel_vocabulary(
    seeds_R: Tensor,
    positions_R: Tensor,
    choices_R: Tensor,
    prompts_R: Tensor,
    num_ids: int,
    *,
    first_id: int = 0,
    backend: str = "jit",
) -> Tensor:
    """`gumbel` for the ids first_id..first_id+num_ids-1, at a quarter of the work: four ids share a counter.

    `first_id`, a multiple of 4, is where a shard of the vocabulary begins. `backend` is "jit" or "reference"; both give
    the same bits. On a GPU it is Triton's: the same words, the noise of each within 1e-6.

    Returns:
        float32 [R, num_ids], equal to `gumbel(..., first_id + arange(num_ids))` bit for bit.
    """
    assert first_id % 4 == 0, "four ids share a counter"
    if seeds_R.is_cuda and backend != "reference":
        from paceline.kernels import keyed_noise_triton as triton

        return triton.gumbel_vocabulary(seeds_R, positions_R, choices_R, prompts_R, num_ids, first_id)
    run = jit.gumbel_vocabulary if backend == "jit" else reference.gumbel_vocabulary
    return run(seeds_R, positions_R, choices_R, prompts_R, num_ids, first_id)
