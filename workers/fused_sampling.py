"""Sampling parameters, changes and trees of a step -> what `paceline.kernels.verify` takes, on the logits' device.

Two copies to the device for the parameters, whatever the number of rows, two for changes if there are any; none of them
is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.cluster.speculation import Tree
from paceline.cluster.types import Sampling
from paceline.kernels import verify
from paceline.workers.adjust import Changes

_FLOATS = ("temperature", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class Walk:
    """Trees that a device accepts and commits by itself: those of a step's S sampled segments, in order.

    trees: a root alone where nothing was drafted. tables: pool blocks of each stream. starts: positions of the roots.
    """

    trees: Sequence[Tree]
    tables: Sequence[Sequence[int]]
    starts: Sequence[int]


def rows_on(
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    device: torch.device,
    changes: Changes | None = None,
) -> verify.Rows:
    """How rows are sampled. `changes`: rows counted from the first; in any order, pairs of row and id distinct."""
    floats = np.asarray([[getattr(s, name) for s in samplings] for name in _FLOATS], np.float32)
    seeds = np.asarray([s.seed for s in samplings], np.uint64).astype(np.int64)
    others = [[s.choice, s.prompt_index, s.top_k] for s in samplings]
    whole = np.concatenate([[seeds], [np.asarray(positions, np.int64)], np.asarray(others, np.int64).T])
    temperatures, top_ps, min_ps = sent(floats, device)
    seeds_N, positions_N, choices_N, prompts_N, top_ks_N = sent(whole, device)
    return verify.Rows(
        temperatures,
        top_ks_N.int(),
        top_ps,
        min_ps,
        seeds_N,
        positions_N,
        choices_N,
        prompts_N,
        is_filtered=any(s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0) for s in samplings),
        changes=None if changes is None else changes_on(changes, len(samplings), device),
    )


def changes_on(changes: Changes, num_rows: int, device: torch.device) -> verify.Changes:
    """Sorted by row and id."""
    order = np.lexsort((changes.ids, changes.rows))
    starts = np.searchsorted(changes.rows[order], np.arange(num_rows + 1))
    whole = np.concatenate([starts, changes.ids[order]]).astype(np.int32)
    floats = np.stack([changes.bias, changes.repetition, changes.minus])[:, order]
    there = sent(whole, device)
    return verify.Changes(there[: num_rows + 1], there[num_rows + 1 :], *sent(floats, device))


def trees_on(trees: Sequence[Tree], device: torch.device) -> verify.Trees:
    """Trees whose nodes lie one behind the other. Depths are rounded up: a kernel is compiled for each that there is."""
    starts = np.cumsum([0, *(len(tree) for tree in trees)])
    tokens = np.concatenate([tree.tokens for tree in trees])
    parents = np.concatenate([tree.parents for tree in trees])
    there = sent(np.concatenate([starts, tokens, parents]).astype(np.int32), device)
    num, total = len(starts), len(tokens)
    return verify.Trees(
        there[:num],
        there[num : num + total],
        there[num + total :],
        max_nodes=max(len(tree) for tree in trees),
        max_depth=(1 << max(int(tree.depths.max()) for tree in trees).bit_length()) - 1,
    )


def sent(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """An array -> a tensor on the device, by a copy that nobody waits for."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from elsewhere would be waited for
    return tensor.to(device, non_blocking=True)


def choose(
    logits_RV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int], changes: Changes | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """`paceline.workers.sampling.choose` by the fused kernels: noise and filters never reach memory. Waits for the result.

    The noise is that of `keyed_noise` for the rows' keys; there is no other source of it on a device.
    """
    ids, usable = verify.decide_rows(logits_RV, rows_on(samplings, positions, logits_RV.device, changes))
    both = torch.stack([ids, usable.int()]).cpu().numpy()
    return both[0].astype(np.int64), both[1].astype(np.bool_)


def children(scores_BV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The best tokens of each row, int64 [B, width], of equal ones the lowest id; and the softmax of the row at them.

    The maximum again and again, because `topk` says nothing of equal ones, and bfloat16 logits often are equal.
    """
    left = scores_BV
    log_sums_B = scores_BV.logsumexp(-1)
    ids, shares = [], []
    for _ in range(width):
        best = left.max(dim=-1)
        ids.append(best.indices)
        shares.append((best.values - log_sums_B).exp())
        left = left.scatter(1, best.indices[:, None], -torch.inf)
    return torch.stack(ids, dim=1), torch.stack(shares, dim=1)
