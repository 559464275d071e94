"""Logits of nodes and how their streams are sampled -> the token each node's distribution and noise decide.

The token at position t is argmax(log p_t + gumbel(key, t)), p after temperature and filters; temperature 0 is plain
argmax. log p and the logits differ by a constant of the row, so the logits serve. Ties take the lowest id.
Bias, penalties and minimum length are in the logits already: `paceline.workers.adjust`.

Legend: R rows (nodes), V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.cluster.types import Sampling
from paceline.kernels.decide import decide
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
    is_greedy: bool = False
    """Every row is plain argmax: the tensors are empty, for nothing reads them."""

    @classmethod
    def build(
        cls, samplings: Sequence[Sampling], counts: Sequence[int], positions: npt.NDArray[np.int64]
    ) -> SamplingRows:
        """`counts[i]` consecutive rows for `samplings[i]`; positions int64 [R]."""
        if all(sampling.temperature == 0 for sampling in samplings):
            return _GREEDY
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


_NONE = torch.empty(0)
_GREEDY = SamplingRows(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, is_greedy=True)


class NoiseSource(Protocol):
    """Where rows of noise come from. Whatever the source, the numbers are those of `keyed_noise`."""

    def rows(self, rows: SamplingRows, num_ids: int) -> Tensor:
        """float32 [R, num_ids]."""
        ...


class DirectNoise:
    """Computed when asked: the plain twin. Siblings share a row, so each distinct key is computed once."""

    def rows(self, rows: SamplingRows, num_ids: int) -> Tensor:
        keys = torch.stack([rows.seeds, rows.choices, rows.prompts, rows.positions], dim=1)
        distinct, inverse = torch.unique(keys, dim=0, return_inverse=True)
        noise = gumbel_vocabulary(distinct[:, 0], distinct[:, 3], distinct[:, 1], distinct[:, 2], num_ids)
        return noise[inverse]


class CachedNoise:
    """Computed for 16 positions of a stream at once: the counter arithmetic costs the same for one row or sixteen.

    A stream asks for most positions several times (siblings, redrafts, the verify step), and for the next ones soon.
    """

    def __init__(self, max_bytes: int = 32 << 20, span: int = 16) -> None:
        self._max_bytes = max_bytes
        self._span = span
        self._blocks: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._bytes = 0

    def rows(self, rows: SamplingRows, num_ids: int) -> Tensor:
        keys = torch.stack([rows.seeds, rows.choices, rows.prompts, rows.positions], dim=1).tolist()
        span = self._span_for(len({tuple(key[:3]) for key in keys}), num_ids)
        return torch.stack(
            [self._row((seed, choice, prompt), at, num_ids, span) for seed, choice, prompt, at in keys]
        )

    def _span_for(self, num_streams: int, num_ids: int) -> int:
        """Positions of a block, a power of two: two blocks of every stream fit, or each would push out the next."""
        room = self._max_bytes // (2 * 4 * num_ids * max(1, num_streams))
        return min(self._span, 1 << max(0, room.bit_length() - 1))

    def _row(self, stream: tuple[int, int, int], position: int, num_ids: int, span: int) -> Tensor:
        block, offset = divmod(position, span)
        key = (*stream, block, num_ids, span)
        noise = self._blocks.get(key)
        if noise is None:
            noise = self._compute(stream, range(block * span, (block + 1) * span), num_ids)
            self._blocks[key] = noise
            self._bytes += noise.nbytes
            while self._bytes > self._max_bytes and len(self._blocks) > 1:
                self._bytes -= self._blocks.popitem(last=False)[1].nbytes
        else:
            self._blocks.move_to_end(key)
        return noise[offset]

    @staticmethod
    def _compute(stream: tuple[int, int, int], span: range, num_ids: int) -> Tensor:
        positions = torch.arange(span.start, span.stop)
        same = [torch.full_like(positions, value) for value in stream]
        return gumbel_vocabulary(same[0], positions, same[1], same[2], num_ids)


def perturb(logits_RV: Tensor, rows: SamplingRows, noise: NoiseSource | None = None) -> Tensor:
    """Scores whose argmax is the decided token: processed logits plus keyed noise (none at temperature 0).

    Target and draft both call this: with the same key they draw with the same noise, which is what couples them.

    Returns:
        float32 [R, V]; filtered tokens are at minus infinity.
    """
    if rows.is_greedy:
        return logits_RV
    scores = filter_logits(logits_RV, rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    drawn = (noise or DirectNoise()).rows(rows, logits_RV.shape[-1])
    if bool((rows.temperature > 0).all()):
        return scores + drawn
    return torch.where((rows.temperature > 0)[:, None], scores + drawn, scores)


def choose(
    logits_RV: Tensor, rows: SamplingRows, noise: NoiseSource | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The decided token of each row, and whether the row was usable (no NaN, something left to draw)."""
    return decide(perturb(logits_RV, rows, noise))
