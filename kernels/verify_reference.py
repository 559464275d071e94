"""Logits of the nodes of draft trees -> the verdict of `verify`, row by row and tree by tree: the plain twin."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.kernels.filter_logits import filter_logits
from paceline.kernels.keyed_noise_reference import gumbel_vocabulary
from paceline.kernels.penalties import penalise

if TYPE_CHECKING:
    from paceline.kernels.verify import Rows, Trees, Verified


def greedy_rows(num: int, device: str = "cpu") -> Rows:
    """Rows that are plain argmax."""
    from paceline.kernels.verify import Rows

    zeros, whole = torch.zeros(num, device=device), torch.zeros(num, dtype=torch.int64, device=device)
    return Rows(zeros, whole.int(), zeros + 1, zeros, whole, whole, whole, whole, is_filtered=False)


def adjusted(logits_NV: Tensor, rows: Rows) -> Tensor:
    """Raw logits -> float32 logits after bias, penalties and mask, before temperature. NaN stays NaN."""
    z = logits_NV.float()
    if rows.changes is not None:
        c = rows.changes
        nums_N = c.starts_N1.diff().long()
        row_P = torch.repeat_interleave(torch.arange(len(nums_N), device=z.device), nums_N)
        num = len(row_P)  # what stands behind the last row is room for more
        entries = (c.ids_P.long(), c.bias_P, c.repetition_P, c.minus_P)
        z = penalise(z, row_P, *(column[:num] for column in entries))
    if rows.masks is not None:
        ids_V = torch.arange(z.shape[1], device=z.device)
        of_row_N = rows.masks.of_row_N.long()
        words_NV = rows.masks.words_GW[of_row_N.clamp_min(0)][:, ids_V >> 5]
        allowed_NV = ((words_NV >> (ids_V & 31)) & 1).bool() | (of_row_N < 0)[:, None]
        z = torch.where(allowed_NV, z, z - torch.inf)
    return z


def processed(logits_NV: Tensor, rows: Rows) -> Tensor:
    """Raw logits -> what the draws are from: filtered tokens at minus infinity."""
    return filter_logits(
        adjusted(logits_NV, rows), rows.temperatures_N, rows.top_ks_N.long(), rows.top_ps_N, rows.min_ps_N
    )


def decide_rows(logits_NV: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """See `paceline.kernels.verify.decide_rows`."""
    scores = processed(logits_NV, rows)
    keys = (rows.seeds_N, rows.positions_N, rows.choices_N, rows.prompts_N)
    noise = gumbel_vocabulary(*keys, scores.shape[1])
    scores = torch.where((rows.temperatures_N > 0)[:, None], scores + noise, scores)
    best = scores.max(dim=-1)
    return best.indices.int(), best.values.isfinite()


def verify(logits_NV: Tensor, rows: Rows, trees: Trees) -> Verified:
    """See `paceline.kernels.verify.verify`."""
    from paceline.kernels.verify import Verified

    decided_N, usable_N = decide_rows(logits_NV, rows)
    starts = trees.starts_S1.tolist()
    tokens, parents = trees.tokens_N.tolist(), trees.parents_N.tolist()
    decided, usable = decided_N.tolist(), usable_N.tolist()
    width = trees.max_depth + 1
    emitted, deciders, nums, usables = [], [], [], []
    for first, stop in pairwise(starts):
        path = [first]
        while True:
            at = path[-1]
            children = (n for n in range(first + 1, stop) if parents[n] == at - first)
            child = next((n for n in children if tokens[n] == decided[at]), None)
            if child is None:
                break
            path.append(child)
        pad = [-1] * (width - len(path))
        emitted.append([decided[row] for row in path] + pad)
        deciders.append(path + pad)
        nums.append(len(path))
        usables.append(all(usable[row] for row in path))
    device = logits_NV.device
    tokens_SD, rows_SD, num_S = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (emitted, deciders, nums)
    )
    usable_S = torch.tensor(usables, device=device)
    return Verified(tokens_SD, rows_SD, num_S, usable_S, decided_N, usable_N)
