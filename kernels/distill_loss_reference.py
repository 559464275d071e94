"""Captured target rows and draft logits -> the divergences of `distill_loss`, token by token: the plain twin.

Legend: N rows, M kept target logits of each, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def divergences_reference(
    draft_logits_NV: Tensor,
    top_ids_NM: Tensor,
    top_logits_NM: Tensor,
    log_sums_N: Tensor,
    temperatures: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """(forward KL, total variation), each float64 [N], with a rest bucket.

    Args:
        draft_logits_NV: float32.
        top_ids_NM, top_logits_NM: the target's kept ids and logits, before temperature.
        log_sums_N: log of the sum over all of the target's logits at temperature 1.
        temperatures: one of each row.
    """
    vocab = draft_logits_NV.shape[1]
    kls, tvs = [], []
    for row, temperature in enumerate(temperatures):
        ids = top_ids_NM[row].tolist()
        kept_at_1 = [math.exp(z - log_sums_N[row].item()) for z in top_logits_NM[row].tolist()]
        num_rest = vocab - len(ids)
        rest_at_1 = max(0.0, 1 - sum(kept_at_1)) if num_rest else 0.0
        kept = [share ** (1 / temperature) for share in kept_at_1]
        # As if all the rest were as probable as the last kept token, and as if it were spread evenly.
        packed = rest_at_1 * min(kept_at_1) ** (1 / temperature - 1)
        spread = rest_at_1 * (rest_at_1 / num_rest) ** (1 / temperature - 1) if rest_at_1 else 0.0
        rest = math.sqrt(packed * spread)
        total = sum(kept) + rest
        p = [*(share / total for share in kept), rest / total]

        weights = [math.exp(z / temperature) for z in draft_logits_NV[row].double().tolist()]
        q = [weights[token] / sum(weights) for token in ids]
        q.append(sum(w for token, w in enumerate(weights) if token not in ids) / sum(weights))
        kls.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))
        tvs.append(1 - sum(min(a, b) for a, b in zip(p, q, strict=True)))
    return torch.tensor(kls, dtype=torch.float64), torch.tensor(tvs, dtype=torch.float64)
