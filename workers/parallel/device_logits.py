"""Each rank's logits on its GPU -> the tokens that the whole vocabulary and its noise decide, by the fused kernels.

The same as `paceline.workers.parallel.logits`, which is its plain twin: of every row a rank sends its best perturbed
score, that token, and whether there is NaN; of a filtered row also its largest logits and the mass of all. The logits
themselves, and noise for them, never leave the registers of the rank's kernels. What is sent goes over the gang's group
for frames, as 32-bit words; the leader joins it on its own device and reads the decisions.

Legend: R rows, F filtered ones, C logits sent of each, V this rank's ids.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.kernels import verify
from paceline.kernels.verify import Part
from paceline.workers.adjust import Changes
from paceline.workers.fused_sampling import changes_on, rows_on, sent
from paceline.workers.parallel.frames import Draws
from paceline.workers.parallel.logits import Decided
from paceline.workers.sampling import Sample

CAPACITY = 1024
"""C. A row that keeps more is fetched whole by the leader."""
_NEVER = -3.0e38
"""What kernels take for no score."""
_LAST_ID = 2**31 - 1


def rank_part(logits_KV: Tensor, draws: Draws, first_id: int, *, capacity: int = CAPACITY) -> Tensor:
    """What a rank's logits, where they lie, say about the rows that are drawn.

    Args:
        logits_KV: any float type, raw, of the kept rows and the ids from `first_id` on.
    Returns:
        int32 [R * 3 + F * (2 * C + 5)], on the host: columns of `Part`, those of filtered rows for these only.
    """
    device, num_rows = logits_KV.device, len(draws.rows)
    filtered = sent(draws.filtered, device)
    if logits_KV.shape[1] == 0:
        part = _nothing(num_rows, capacity, device)
    else:
        rows_RV = logits_KV.index_select(0, sent(draws.rows, device))
        part = verify.part_of(rows_RV, _rows(draws, device), first_id, capacity=capacity)
    scores_R = part.scores_N.amax(0)
    ids_R = torch.where(part.scores_N == scores_R, part.ids_N, _LAST_ID).amin(0)  # programs of a row to one
    columns = [scores_R, ids_R, part.broken_N.amax(0)]
    if len(filtered):
        columns += [column[filtered] for column in part[3:]]
    return torch.cat([column.contiguous().view(torch.int32).flatten() for column in columns]).cpu()


def _rows(draws: Draws, device: torch.device) -> verify.Rows:
    """As far as a rank knows them: that a row is filtered, not how."""
    num = len(draws.rows)
    is_filtered = np.zeros(num, np.int32)
    is_filtered[draws.filtered] = 1
    seeds, choices, prompts, positions = sent(np.ascontiguousarray(draws.keys.T), device)
    changes = None
    if len(draws.change_rows):
        found = (draws.change_rows, draws.change_ids, draws.bias, draws.repetition, draws.minus)
        changes = changes_on(Changes(*found), num, device)
    ones = torch.ones(num, device=device)
    return verify.Rows(
        sent(draws.temperature.astype(np.float32), device),
        sent(is_filtered, device),
        ones,
        torch.zeros_like(ones),
        seeds,
        positions,
        choices,
        prompts,
        is_filtered=len(draws.filtered) > 0,
        changes=changes,
    )


def _nothing(num_rows: int, capacity: int, device: torch.device) -> Part:
    """The part of a rank that has no ids."""

    def full(value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, device=device)

    whole = torch.zeros(num_rows, dtype=torch.int32, device=device)
    return Part(
        full(_NEVER, 1, num_rows),
        whole[None] + _LAST_ID,
        whole[None],
        full(_NEVER, num_rows),
        whole.long(),
        full(_NEVER, num_rows, capacity),
        torch.zeros(num_rows, capacity, dtype=torch.int32, device=device),
        whole,
        full(-torch.inf, num_rows),
    )


def merge(
    parts: list[Tensor], draws: Draws, sample: Sample, device: torch.device, *, capacity: int = CAPACITY
) -> Decided:
    """Every rank's `rank_part`, by rank -> the decisions, at the leader."""
    params, num_rows = sample.params, len(draws.rows)
    rows = rows_on(params.samplings, params.positions, device)  # what changes did is in the parts
    made = [_part(part.to(device, non_blocking=True), draws, capacity) for part in parts]
    alone = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    roots = torch.full_like(alone[1:], -1)
    found, is_open = verify.verify_parts(made, rows, verify.Trees(alone, roots, roots, 1, 0))
    host = torch.stack([found.decided_N, found.decided_usable_N.int(), is_open.int()]).cpu().numpy()
    return Decided(host[0].astype(np.int64), host[1].astype(np.bool_), np.flatnonzero(host[2]).tolist())


def _part(words: Tensor, draws: Draws, capacity: int) -> Part:
    """Inverse of what `rank_part` packs; rows that are not filtered have nothing in the columns of those."""
    num_rows, num = len(draws.rows), len(draws.filtered)
    sizes = [num_rows] * 3
    if num:
        sizes += [num, 2 * num, num * capacity, num * capacity, num, num]
    columns = list(torch.split(words, sizes))
    best = columns[0].view(torch.float32)[None], columns[1][None], columns[2][None]
    nothing = _nothing(num_rows, capacity if num else 1, words.device)
    if not num:
        return Part(*best, *nothing[3:])
    filtered = sent(draws.filtered, words.device)
    shapes = [(num,), (num,), (num, capacity), (num, capacity), (num,), (num,)]
    wide = [
        whole.index_copy(0, filtered, column.contiguous().view(whole.dtype).view(shape))
        for whole, column, shape in zip(nothing[3:], columns[3:], shapes, strict=True)
    ]
    return Part(*best, *wide)
