"""Raw logits and sampling parameters -> logits of the processed distribution, filtered tokens at minus infinity.

Order: temperature, top-k, top-p, min-p. Every filter keeps all tokens tied at its boundary, so that the kept set is a
function of the distribution alone. Rows with temperature 0 are returned as they came (argmax needs nothing else).

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def filter_logits(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor
) -> Tensor:
    """Apply the filters row by row.

    Args:
        logits_RV: float32.
        temperature_R: float32, >= 0.
        top_k_R: int64, 0 keeps all.
        top_p_R: float32 in (0, 1], 1 keeps all.
        min_p_R: float32 in [0, 1], 0 keeps all.
    Returns:
        float32 [R, V]; a new tensor unless nothing had to be done.
    """
    z = logits_RV
    if bool((temperature_R > 0).any() and (temperature_R != 1).any()):
        z = z / torch.where(temperature_R > 0, temperature_R, torch.ones_like(temperature_R))[:, None]
    sampled_R = temperature_R > 0
    if bool((sampled_R & (top_k_R > 0)).any()):
        z = _top_k(z, torch.where(sampled_R, top_k_R, torch.zeros_like(top_k_R)))
    if bool((sampled_R & (top_p_R < 1)).any()):
        z = _top_p(z, torch.where(sampled_R, top_p_R, torch.ones_like(top_p_R)))
    if bool((sampled_R & (min_p_R > 0)).any()):
        # p >= min_p * max p  <=>  z >= max z + log min_p
        floor_R = z.amax(-1) + torch.where(sampled_R, min_p_R, torch.zeros_like(min_p_R)).log()
        z = z.masked_fill(z < floor_R[:, None], -torch.inf)
    return z


def _top_k(z: Tensor, top_k_R: Tensor) -> Tensor:
    num_ids = z.shape[-1]
    wanted = int(top_k_R.clamp(max=num_ids).max())
    largest = z.topk(wanted, dim=-1).values
    last = (top_k_R.clamp(1, num_ids) - 1)[:, None]
    floor_R1 = largest.gather(-1, last.clamp(max=wanted - 1))
    floor_R1 = torch.where((top_k_R > 0)[:, None], floor_R1, torch.full_like(floor_R1, -torch.inf))
    return z.masked_fill(z < floor_R1, -torch.inf)


def _top_p(z: Tensor, top_p_R: Tensor) -> Tensor:
    ordered = z.sort(dim=-1, descending=True).values
    probs = ordered.to(torch.float64).softmax(-1)
    before = probs.cumsum(-1) - probs  # mass of what is strictly more probable, in sorted order
    # Keep the smallest prefix whose mass reaches top_p: all entries whose preceding mass is still below it.
    num_kept = (before < top_p_R.to(torch.float64)[:, None]).sum(-1).clamp(min=1)
    floor_R1 = ordered.gather(-1, (num_kept - 1)[:, None])
    floor_R1 = torch.where((top_p_R < 1)[:, None], floor_R1, torch.full_like(floor_R1, -torch.inf))
    return z.masked_fill(z < floor_R1, -torch.inf)
