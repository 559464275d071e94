"""Logits of nodes and how their streams are sampled -> the token each node's distribution and noise decide.

The token at position t is argmax(log p_t + gumbel(key, t)), p after temperature and filters; temperature 0 is plain
argmax. log p and the logits differ by a constant of the row, so the logits serve. Ties take the lowest id.

Legend: R rows (nodes), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.cluster.types import Sampling
from paceline.kernels.filter_logits import filter_logits
from paceline.kernels.keyed_noise import gumbel_vocabulary


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of R rows as flat tensors, and the position of the token each row decides."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    choices: Tensor
    prompts: Tensor
    positions: Tensor

    @property
    def is_greedy(self) -> bool:
        """No row needs noise."""
        return not bool((self.temperature > 0).any())

    @classmethod
    def build(
        cls, samplings: Sequence[Sampling], counts: Sequence[int], positions: npt.NDArray[np.int64]
    ) -> SamplingRows:
        """`counts[i]` consecutive rows for `samplings[i]`; positions int64 [R]."""
        index = np.repeat(np.arange(len(samplings)), np.asarray(counts))

        def column(name: str, dtype: type) -> Tensor:
            values = [getattr(s, name) for s in samplings]
            return torch.from_numpy(np.asarray(values, dtype)[index])

        seeds = np.asarray([s.seed for s in samplings], np.uint64).view(np.int64)[index]
        return cls(
            column("temperature", np.float32),
            column("top_k", np.int64),
            column("top_p", np.float32),
            column("min_p", np.float32),
            torch.from_numpy(seeds),
            column("choice", np.int64),
            column("prompt_index", np.int64),
            torch.from_numpy(np.asarray(positions, np.int64)),
        )


def perturb(logits_RV: Tensor, rows: SamplingRows) -> Tensor:
    """Scores whose argmax is the decided token: processed logits plus keyed noise (none at temperature 0).

    Target and draft both call this: with the same key they draw with the same noise, which is what couples them.

    Returns:
        float32 [R, V]; filtered tokens are at minus infinity.
    """
    if rows.is_greedy:
        return logits_RV
    scores = filter_logits(logits_RV, rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    return scores + _noise(rows, logits_RV.shape[-1])


def choose(logits_RV: Tensor, rows: SamplingRows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The decided token of each row, and whether the row was usable (no NaN, something left to draw)."""
    best = perturb(logits_RV, rows).max(dim=-1)
    return best.indices.numpy(), torch.isfinite(best.values).numpy()


def _noise(rows: SamplingRows, num_ids: int) -> Tensor:
    """Noise [R, V]; siblings share a row of noise, so each distinct (stream, position) is computed once."""
    keys = torch.stack([rows.seeds, rows.choices, rows.prompts, rows.positions], dim=1)
    distinct, inverse = torch.unique(keys, dim=0, return_inverse=True)
    noise = gumbel_vocabulary(distinct[:, 0], distinct[:, 3], distinct[:, 1], distinct[:, 2], num_ids)
    noise = noise[inverse]
    return torch.where((rows.temperature > 0)[:, None], noise, torch.zeros_like(noise))
