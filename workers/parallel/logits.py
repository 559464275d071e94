"""Each rank's logits of its token ids -> the tokens that the whole vocabulary and its noise decide, at the leader.

A rank sends a few numbers for each row: its best perturbed score, and for a row that is filtered its largest logits and
the sum of all its exponentials. Noise is keyed by global token id, so the parts' perturbed scores compare as they are.
The plain twin is `paceline.workers.sampling.choose` on whole rows; the filters here keep the same tokens:

    every filter keeps what is not below a floor, so together they keep what is not below the highest floor;
    top-k     the floor is the k-th largest of all parts' largest
    top-p     masses are exponentials over the sum of all parts' sums, in float64, added from the largest down
    min-p     the floor follows from the largest

All that lies above the highest of the parts' smallest sent logits was sent. If a floor is not above it, there may be
more tokens over the floor than were sent; then the leader fetches the row (`Undecided`). With 256 logits from each part
that is a row with top-k above 256, or top-p where the model knows next to nothing.

Legend: R rows, V this rank's ids, F filtered rows, M logits sent of each, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.cluster.types import Sampling
from paceline.kernels.decide import decide
from paceline.kernels.keyed_noise import gumbel
from paceline.kernels.penalties import penalise
from paceline.workers.adjust import joined_changes
from paceline.workers.parallel.frames import Draws
from paceline.workers.sampling import NoiseSource, Sample, SamplingRows

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

NUM_SENT = 256
"""M."""
_SEED = (1 << 64) - 1


def draws_of(sample: Sample, num_kept: int) -> Draws:
    """What ranks have to know of a sample."""
    params = sample.params
    keys = np.asarray(params.keys, np.uint64).astype(np.int64).reshape(-1, 4)
    filtered = [i for i, s in enumerate(params.samplings) if _is_filtered(s)]
    return Draws(
        np.arange(num_kept) if sample.rows is None else sample.rows,
        np.asarray([s.temperature for s in params.samplings], np.float64),
        keys,
        np.asarray(filtered, np.int64),
        *joined_changes(sample.changes, sample.starts),
    )


def _is_filtered(s: Sampling) -> bool:
    return s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)


# --- every rank -----------------------------------------------------------------------------------------


def rank_part(logits_KV: Tensor, draws: Draws, noise: NoiseSource, first_id: int) -> Tensor:
    """What a rank's logits say about the rows that are drawn.

    Args:
        logits_KV: float32, raw, of the kept rows and this rank's token ids.
        noise: of ids from `first_id` on.
    Returns:
        float64 [R * 3 + F * (2 * M + 2)]: of each row the best score, its token id and whether there is NaN; of each
        filtered one the largest logits over temperature, their ids (-1: there is none), the largest and the sum of
        exponentials relative to it.
    """
    num_ids = logits_KV.shape[-1]
    num_rows, num_filtered = len(draws.rows), len(draws.filtered)
    found = np.zeros(num_rows * 3 + num_filtered * (2 * NUM_SENT + 2))
    best = found[: num_rows * 3].reshape(num_rows, 3)
    sent = found[num_rows * 3 :].reshape(num_filtered, 2 * NUM_SENT + 2)
    best[:, 0] = sent[:, :NUM_SENT] = sent[:, -2] = -np.inf
    sent[:, NUM_SENT : 2 * NUM_SENT] = -1
    if num_ids:
        z = _scaled(_changed(logits_KV[torch.from_numpy(draws.rows)], draws, first_id), draws)
        scores = _perturbed(z, draws, noise)
        ids, usable = decide(scores)
        best[:, 0] = scores.numpy()[np.arange(num_rows), ids]
        best[:, 1] = ids + first_id
        for row in np.flatnonzero(~usable):
            best[row, 2] = bool(scores[row].isnan().any())
        _largest(z[torch.from_numpy(draws.filtered)], sent, first_id)
    return torch.from_numpy(found)


def _changed(z: Tensor, draws: Draws, first_id: int) -> Tensor:
    """Bias and penalties, where they touch this rank's ids."""
    ids = draws.change_ids - first_id
    mine = (ids >= 0) & (ids < z.shape[-1])
    if not mine.any():
        return z
    entries = (draws.change_rows, ids, draws.bias, draws.repetition, draws.minus)
    return penalise(z, *(torch.from_numpy(column[mine]) for column in entries))


def _scaled(z: Tensor, draws: Draws) -> Tensor:
    temperatures = draws.temperature
    if ((temperatures == 0) | (temperatures == 1)).all():
        return z
    return z / torch.tensor(np.where(temperatures > 0, temperatures, 1.0)[:, None], dtype=torch.float32)


def _perturbed(z: Tensor, draws: Draws, noise: NoiseSource) -> Tensor:
    drawn = draws.temperature > 0
    if not drawn.any():
        return z
    keys = draws.keys.tolist()
    samplings = [Sampling(key[0] & _SEED, choice=key[1], prompt_index=key[2]) for key in keys]
    rows = noise.rows(SamplingRows(samplings, [key[3] for key in keys]), z.shape[-1])
    if drawn.all():
        return z + rows
    return torch.where(torch.from_numpy(drawn)[:, None], z + rows, z)


def _largest(z_FV: Tensor, sent: FloatArray, first_id: int) -> None:
    if not len(z_FV):
        return
    top = z_FV.topk(min(NUM_SENT, z_FV.shape[-1]), dim=-1)
    num = top.values.shape[-1]
    sent[:, :num] = top.values.numpy()
    sent[:, NUM_SENT : NUM_SENT + num] = top.indices.numpy() + first_id
    peak = z_FV.amax(-1).to(torch.float64)
    sent[:, -2] = peak.numpy()
    total = (z_FV.to(torch.float64) - peak[:, None]).exp_().sum(-1)
    sent[:, -1] = torch.where(peak.isfinite(), total, torch.zeros_like(total)).numpy()


# --- the leader -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decided:
    """tokens: int64 [R]. usable: bool [R]. undecided: which rows have to be fetched whole."""

    tokens: IntArray
    usable: npt.NDArray[np.bool_]
    undecided: list[int]


def merge(parts: list[Tensor], widths: list[int], draws: Draws, sample: Sample) -> Decided:
    """Every rank's `rank_part`, by rank -> the decisions. `widths`: ids of each rank."""
    num_rows = len(draws.rows)
    stacked = np.stack([part.numpy() for part in parts])
    best = stacked[:, : num_rows * 3].reshape(len(parts), num_rows, 3)
    winner = best[:, :, 0].argmax(axis=0)  # of equal ones the lowest rank, and its ids are the lowest
    rows = np.arange(num_rows)
    tokens = best[winner, rows, 1].astype(np.int64)
    has_nan: npt.NDArray[np.bool_] = np.any(best[:, :, 2] > 0, axis=0)
    usable = ~has_nan & np.isfinite(best[winner, rows, 0])
    sent = stacked[:, num_rows * 3 :].reshape(len(parts), len(draws.filtered), 2 * NUM_SENT + 2)
    undecided = []
    for index, row in enumerate(draws.filtered.tolist()):
        if has_nan[row]:
            continue
        token = _filtered(sent[:, index], widths, sample.params.samplings[row], draws.keys[row])
        if token is None:
            undecided.append(row)
        else:
            tokens[row], usable[row] = token
    return Decided(tokens, usable, undecided)


def _filtered(
    sent: FloatArray, widths: list[int], sampling: Sampling, key: IntArray
) -> tuple[int, bool] | None:
    """The token of one filtered row, and whether there is one; None if more may be kept than was sent."""
    last = [float(part[NUM_SENT - 1]) for part, width in zip(sent, widths, strict=True) if width > NUM_SENT]
    cut = max(last, default=-np.inf)
    values, ids = sent[:, :NUM_SENT].ravel(), sent[:, NUM_SENT : 2 * NUM_SENT].ravel()
    order = np.argsort(-values, kind="stable")
    order = order[ids[order] >= 0]
    values, ids = values[order], ids[order].astype(np.int64)
    if not np.isfinite(values[0]):
        return 0, False
    floor = _floor(values, sent[:, -2:], sampling, cut, sum(widths))
    if floor is None:
        return None
    kept = int((values >= floor).sum()) if np.isfinite(floor) else int(np.isfinite(values).sum())
    by_id = np.sort(ids[:kept])
    scores = values[:kept][np.argsort(ids[:kept])].astype(np.float32)
    seed, choice, prompt, position = (torch.tensor([number]) for number in key.tolist())
    scores = scores + gumbel(seed, position, choice, prompt, torch.from_numpy(by_id))[0].numpy()
    return int(by_id[scores.argmax()]), True


def _floor(
    values: FloatArray, sums: FloatArray, sampling: Sampling, cut: float, num_ids: int
) -> float | None:
    """The highest floor of a row's filters over its sent logits, largest first; None: it may be at or below `cut`."""
    floor = -np.inf
    peak = values[0]
    if sampling.top_k > 0:
        k = min(sampling.top_k, num_ids)
        if k > len(values):
            return None
        floor = values[k - 1]
        if floor <= cut and np.isfinite(cut):
            return None
        values = values[values >= floor]
        total = np.exp(values - peak).sum()
    else:
        total = float((sums[:, 1] * np.exp(sums[:, 0] - peak)).sum())
    if sampling.top_p < 1:
        chances = np.exp(values - peak) / total
        before = chances.cumsum() - chances
        floor = max(floor, values[max(1, int((before < float(np.float32(sampling.top_p))).sum())) - 1])
    if sampling.min_p > 0:
        lowest = np.float32(peak) + torch.tensor(sampling.min_p).log().numpy()
        floor = max(floor, float(lowest))
    return None if np.isfinite(cut) and floor <= cut else float(floor)
