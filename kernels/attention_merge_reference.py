"""Partial attention outputs -> the rows' outputs, row by row in plain torch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def attention_merge(
    partial_EHD: Tensor,
    lse_EH: Tensor,
    starts: Tensor,
    entries_M: Tensor,
    out_THD: Tensor,
    sinks_H: Tensor | None,
) -> None:
    """See `paceline.kernels.attention_merge.attention_merge`."""
    bounds = starts.tolist()
    for row, (first, stop) in enumerate(pairwise(bounds)):
        if stop > first:
            which = entries_M[first:stop].long()
            logs_NH = lse_EH[which]
            total_H = logs_NH if sinks_H is None else torch.cat([logs_NH, sinks_H.float()[None]])
            weights_NH = (logs_NH - total_H.logsumexp(0)).exp()
            out_THD[row] = (weights_NH[..., None] * partial_EHD[which]).sum(0).to(out_THD.dtype)
