"""Raw logits and what changes at some of their entries -> adjusted logits; no other entry is touched.

Order: bias, repetition penalty, then everything that is taken away: frequency and presence penalty, and all of it
where a token must not be drawn. What temperature and filters do comes behind it.

Legend: R rows (nodes), V vocabulary, P entries that may change (a few hundred a row where V is a hundred thousand).
"""

from __future__ import annotations

import torch
from torch import Tensor


def penalise(
    logits_RV: Tensor, rows_P: Tensor, ids_P: Tensor, bias_P: Tensor, repetition_P: Tensor, minus_P: Tensor
) -> Tensor:
    """Adjust single entries of the rows of any number of streams.

    Args:
        logits_RV: float32.
        rows_P, ids_P: int64, distinct pairs.
        bias_P: float64, added to the logit.
        repetition_P: float64 > 0, divides a positive logit and multiplies a negative one; 1 does nothing.
        minus_P: float64, taken from the logit: frequency * count + presence * (count > 0); +inf for what must not be
            drawn.
    Returns:
        float32 [R, V], a new tensor. NaN stays NaN in every entry, so that a broken row is still found.
    Source:
        Keskar et al. 1909.05858 (repetition, in Hugging Face's form); OpenAI's API reference (the other two).

    >>> z = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    >>> rows, ids = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 3])
    >>> bias, repetition = torch.tensor([0.5, 0, 0]).double(), torch.tensor([2.0, 2, 1]).double()
    >>> penalise(z, rows, ids, bias, repetition, torch.tensor([0.25, 0, torch.inf]).double())
    tensor([[ 1., -4.,  1., -inf]])
    """
    # In float64, rounded once at the end: a bias of 100 alone would cost a float32 logit five bits.
    z = logits_RV[rows_P, ids_P].to(torch.float64) + bias_P
    z = torch.where(z > 0, z / repetition_P, z * repetition_P) - minus_P
    adjusted = logits_RV.clone()
    adjusted[rows_P, ids_P] = z.to(torch.float32)
    return adjusted
