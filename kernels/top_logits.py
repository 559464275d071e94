"""Rows of logits -> for each row the most probable tokens, their log-probabilities, and the log of the sum.

Legend: R rows, V vocabulary, M tokens wanted of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.kernels import top_logits_jit
from paceline.kernels.dispatch import Backend, backend_of

FloatArray = npt.NDArray[np.float32]


def top_logits(
    logits_RV: FloatArray, num_wanted: int, *, rows: Sequence[int] | None = None, backend: str = "jit"
) -> tuple[npt.NDArray[np.int32], FloatArray, FloatArray]:
    """The largest logits of each row, best first, the lower id first among equals.

    Args:
        logits_RV: float32, without NaN, at least one of each row finite.
        num_wanted: M; V if there are fewer.
        rows: those that are wanted, in this order; all if not given.
        backend: "jit" runs without Python's lock; "reference" is its plain twin.

    Returns:
        ids int32 [R, M]; log-probabilities float32 [R, M]; log of the sum of the exponentials float32 [R]; R is the number
        of rows wanted.

    >>> ids, log_probs, log_sums = top_logits(np.log(np.array([[1, 5, 2]], np.float32)), 2)
    >>> ids, np.exp(log_probs).round(3), np.exp(log_sums).round(3)
    (array([[1, 2]], dtype=int32), array([[0.625, 0.25 ]], dtype=float32), array([8.], dtype=float32))
    """
    num_wanted = min(num_wanted, logits_RV.shape[1])
    chosen = np.arange(len(logits_RV)) if rows is None else np.asarray(rows, np.int64)
    num_rows = len(chosen)
    if backend == "reference":
        logits = torch.from_numpy(logits_RV)[chosen]
        ordered = logits.sort(dim=-1, descending=True, stable=True)
        log_sums = logits.double().logsumexp(-1).float()
        log_probs = ordered.values[:, :num_wanted] - log_sums[:, None]
        return ordered.indices[:, :num_wanted].int().numpy(), log_probs.numpy(), log_sums.numpy()
    ids = np.empty((num_rows, num_wanted), np.int32)
    found = np.empty((num_rows, num_wanted), np.float32)
    sums = np.empty(num_rows, np.float32)
    if num_rows:
        top_logits_jit.top_rows(logits_RV, chosen, ids, found, sums)
    return ids, found, sums


class TopRows(NamedTuple):
    """ids: int32 [R, M], global. logits: float32 [R, M], best first, the lower id first among equals. log_sums, own:
    float32 [R]; own is the logit of the row's own token, minus infinity in the shards it is not in.

    Of rows that were not wanted nothing is promised.
    """

    ids_RM: Tensor
    logits_RM: Tensor
    log_sums_R: Tensor
    own_R: Tensor


def top_rows(
    logits_NV: Tensor,
    rows_R: Tensor,
    num_wanted: int,
    tokens_R: Tensor,
    *,
    first_id: int = 0,
    backend: Backend | None = None,
) -> TopRows:
    """`top_logits` of some rows where they lie, for capture and log-probabilities of the accepted path.

    Args:
        logits_NV: float32, bfloat16 or float16; the columns from `first_id` on, a multiple of 4. No NaN, and at least one
            finite logit in each wanted row.
        rows_R: int32 of any shape, which rows; -1 wants none: `Verified.rows_SD` will do as it is.
        num_wanted: M, at most 256; V if there are fewer.
        tokens_R: int32 like `rows_R`, the rows' own tokens, global ids.
        backend: "triton" or "reference".
    """
    if backend_of(logits_NV, backend) == "triton":
        from paceline.kernels import top_logits_triton as triton

        return triton.top_rows(logits_NV, rows_R, num_wanted, tokens_R, first_id=first_id)
    z = logits_NV[rows_R.reshape(-1).long().clamp_min(0)].float()
    ordered = z.sort(dim=-1, descending=True, stable=True)
    num_ids = z.shape[1]
    local = tokens_R.reshape(-1).long() - first_id
    own = z.gather(1, local.clamp(0, num_ids - 1)[:, None])[:, 0]
    own = torch.where((local >= 0) & (local < num_ids), own, -torch.inf)
    ids, values = ordered.indices[:, :num_wanted], ordered.values[:, :num_wanted]
    return TopRows(ids.int() + first_id, values, z.double().logsumexp(-1).float(), own)


def join_top_rows(shards: list[TopRows]) -> TopRows:
    """What the shards of a vocabulary found of the same rows -> the whole's; in the order of their ids."""
    if len(shards) == 1:
        return shards[0]
    num_wanted = max(shard.ids_RM.shape[1] for shard in shards)
    values = torch.cat([shard.logits_RM for shard in shards], dim=1)
    ids = torch.cat([shard.ids_RM for shard in shards], dim=1)
    best = values.sort(dim=1, descending=True, stable=True)  # among equals the earlier, whose id is lower
    chosen = best.indices[:, :num_wanted]
    log_sums = torch.stack([shard.log_sums_R for shard in shards]).logsumexp(0)
    own = torch.stack([shard.own_R for shard in shards]).amax(0)
    return TopRows(ids.gather(1, chosen), best.values[:, :num_wanted], log_sums, own)
