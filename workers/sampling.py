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
from paceline.kernels.decide import decide, decide_drawn
from paceline.kernels.filter_logits import filter_logits
from paceline.kernels.keyed_noise import gumbel_vocabulary
from paceline.workers import fused_sampling
from paceline.workers.adjust import Changes, apply_changes
from paceline.workers.raw_logits import RawLogits


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of R rows is sampled, and the position of the token it decides.

    Plain Python, because most steps have a row or a few, where a tensor costs more than its content.
    """

    samplings: list[Sampling]
    positions: list[int]

    @classmethod
    def build(
        cls, samplings: Sequence[Sampling], counts: Sequence[int], positions: npt.NDArray[np.int64]
    ) -> SamplingRows:
        """`counts[i]` consecutive rows for `samplings[i]`; positions int64 [R]."""
        rows = [s for s, num in zip(samplings, counts, strict=True) for _ in range(num)]
        return cls(rows, positions.tolist())

    @property
    def is_greedy(self) -> bool:
        """Every row is plain argmax."""
        return all(s.temperature == 0 for s in self.samplings)

    @property
    def is_filtered(self) -> bool:
        """Some row is drawn from less than the whole vocabulary."""
        return any(s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0) for s in self.samplings)

    @property
    def sampled(self) -> list[int]:
        """Rows that are drawn; the others need no noise."""
        return [row for row, s in enumerate(self.samplings) if s.temperature > 0]

    def select(self, rows: list[int]) -> SamplingRows:
        """These rows, in this order."""
        if len(rows) == len(self.samplings):
            return self
        return SamplingRows([self.samplings[row] for row in rows], [self.positions[row] for row in rows])

    @property
    def keys(self) -> list[tuple[int, int, int, int]]:
        """Noise key of each row: seed, choice, prompt, position."""
        return [
            (s.seed, s.choice, s.prompt_index, at)
            for s, at in zip(self.samplings, self.positions, strict=True)
        ]

    def column(self, name: str, dtype: torch.dtype) -> Tensor:
        """One sampling parameter of all rows, [R]."""
        return torch.tensor([getattr(s, name) for s in self.samplings], dtype=dtype)


FloatArray = npt.NDArray[np.float32]


class NoiseSource(Protocol):
    """Where rows of noise come from. Whatever the source, the numbers are those of `keyed_noise`."""

    def rows(self, rows: SamplingRows, num_ids: int) -> Tensor:
        """float32 [R, num_ids]."""
        ...


class DirectNoise:
    """Computed when asked: the plain twin. Siblings share a row, so each distinct key is computed once."""

    def rows(self, rows: SamplingRows, num_ids: int) -> Tensor:
        keys = torch.tensor([(_signed(seed), *rest) for seed, *rest in rows.keys])
        distinct, inverse = torch.unique(keys, dim=0, return_inverse=True)
        noise = gumbel_vocabulary(distinct[:, 0], distinct[:, 3], distinct[:, 1], distinct[:, 2], num_ids)
        return noise[inverse]


class CachedNoise:
    """Computed for 16 positions of a stream at once: the counter arithmetic costs the same for one row or sixteen.

    A stream asks for most positions several times (siblings, redrafts, the verify step), and for the next ones soon.
    """

    def __init__(self, max_bytes: int = 32 << 20, span: int = 16, first_id: int = 0) -> None:
        """`first_id`: where a shard of the vocabulary begins, a multiple of 4."""
        self._max_bytes = max_bytes
        self._span = span
        self._first_id = first_id
        self._blocks: OrderedDict[tuple[int, ...], FloatArray] = OrderedDict()
        self._bytes = 0

    def rows(self, rows: SamplingRows, num_ids: int) -> Tensor:
        keys = rows.keys
        span = self._span_for(len({key[:3] for key in keys}), num_ids)
        drawn = [self._row((seed, choice, prompt), at, num_ids, span) for seed, choice, prompt, at in keys]
        return torch.from_numpy(np.stack(drawn) if len(drawn) > 1 else drawn[0][None])

    def _span_for(self, num_streams: int, num_ids: int) -> int:
        """Positions of a block, a power of two: two blocks of every stream fit, or each would push out the next."""
        room = self._max_bytes // (2 * 4 * num_ids * max(1, num_streams))
        return min(self._span, 1 << max(0, room.bit_length() - 1))

    def _row(self, stream: tuple[int, int, int], position: int, num_ids: int, span: int) -> FloatArray:
        """float32 [num_ids], not to be written to."""
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
        row: FloatArray = noise[offset]
        return row

    def _compute(self, stream: tuple[int, int, int], span: range, num_ids: int) -> FloatArray:
        positions = torch.arange(span.start, span.stop)
        seed, choice, prompt = (
            torch.full_like(positions, value) for value in (_signed(stream[0]), *stream[1:])
        )
        noise: FloatArray = gumbel_vocabulary(
            seed, positions, choice, prompt, num_ids, first_id=self._first_id
        ).numpy()
        return noise


def _signed(seed: int) -> int:
    """The same 64 bits as torch can hold them."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def perturb(logits_RV: Tensor, rows: SamplingRows, noise: NoiseSource | None = None) -> Tensor:
    """Scores whose argmax is the decided token: processed logits plus keyed noise (none at temperature 0).

    Target and draft both call this: with the same key they draw with the same noise, which is what couples them.

    Returns:
        float32 [R, V]; filtered tokens are at minus infinity.
    """
    if rows.is_greedy:
        return logits_RV
    temperatures = [s.temperature for s in rows.samplings]
    if rows.is_filtered:
        scores = filter_logits(
            logits_RV,
            rows.column("temperature", torch.float32),
            rows.column("top_k", torch.int64),
            rows.column("top_p", torch.float32),
            rows.column("min_p", torch.float32),
        )
    elif all(temperature in {0, 1} for temperature in temperatures):
        scores = logits_RV
    else:  # what filter_logits does first
        scores = logits_RV / torch.tensor([[temperature or 1.0] for temperature in temperatures])
    sampled = rows.sampled
    drawn = (noise or DirectNoise()).rows(rows.select(sampled), logits_RV.shape[-1])
    if len(sampled) == len(temperatures):
        return scores + drawn
    perturbed = scores.clone()
    perturbed[torch.tensor(sampled)] += drawn
    return perturbed


def choose(
    logits_RV: Tensor, rows: SamplingRows, noise: NoiseSource | None = None, *, fused: bool = True
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The decided token of each row, and whether the row was usable (no NaN, something left to draw).

    `fused=False` is the plain twin of rows that are drawn from all of the vocabulary: noise is added, then decided.
    """
    if logits_RV.is_cuda:
        return fused_sampling.choose(logits_RV, rows.samplings, rows.positions)
    if rows.is_filtered or rows.is_greedy or not fused:
        return decide(perturb(logits_RV, rows, noise))
    sampled = rows.sampled
    drawn = (noise or DirectNoise()).rows(rows.select(sampled), logits_RV.shape[-1])
    which = np.full(len(rows.samplings), -1, np.int64)
    which[sampled] = np.arange(len(sampled))
    temperatures = np.asarray([s.temperature for s in rows.samplings], np.float32)
    return decide_drawn(logits_RV, temperatures, which, drawn.numpy())


@dataclass(frozen=True, slots=True)
class Sample:
    """What is drawn from the rows of one step, known before it runs: R of the rows whose logits are kept."""

    rows: npt.NDArray[np.int64] | None
    """Which of the kept ones, int64 [R]; None: all of them."""
    params: SamplingRows
    changes: Sequence[Changes]
    starts: Sequence[int]
    """As `apply_changes` takes them, counted among the R."""
    walk: fused_sampling.Walk | None = None
    """The trees that these rows are the nodes of, for runners that accept and commit on their device."""

    def decide(
        self, logits: RawLogits, noise: NoiseSource
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """`choose` for these rows; where they are not here, that has been done where they are."""
        if not isinstance(logits, Tensor):
            assert logits.decided is not None
            return logits.decided
        rows = logits if self.rows is None else logits[torch.from_numpy(self.rows)]
        return choose(apply_changes(rows, self.changes, self.starts), self.params, noise)
