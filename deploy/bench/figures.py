"""Callables, alternated in blocks of one run -> a median ratio with its 95 % interval, and a verdict.

A machine's speed drifts; two runs one after the other measure the drift as well. Blocks that alternate (A B A B ...)
see the same machine, so each pair gives one ratio and the median of many pairs is the figure. Its interval is a
bootstrap over pairs, seeded: the same measurements always give the same figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Outcome = Literal["pass", "fail", "not resolved"]

SLACK = 0.01
"""How far below its floor the lower end of an interval may lie."""
WIDEST = 0.03
"""A wider interval decides nothing where the limit lies in it."""
_ROUNDING = 1e-9
"""Of the limits themselves: 0.99 - 0.96 is more than 0.03 in binary."""
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Count:
    """What one block did, whole requests or a fixed number of steps, and how long it took."""

    units: int
    """Tokens, or steps."""
    seconds: float

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.units / self.seconds


Block = Callable[[int], Count]
"""Round -> one block. All blocks of a round get the same index, so that they can do the same requests."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A median and the ends of its 95 % interval."""

    value: float
    lo: float
    hi: float

    def __str__(self) -> str:
        digits = 2 if abs(self.value) < 1000 else 0
        return f"{self.value:.{digits}f} [{self.lo:.{digits}f}, {self.hi:.{digits}f}]"

    @property
    def width(self) -> float:
        return self.hi - self.lo

    def times(self, factor: float) -> Figure:
        """In another unit; `factor` > 0."""
        return Figure(self.value * factor, self.lo * factor, self.hi * factor)

    @classmethod
    def exactly(cls, value: float) -> Figure:
        """Something counted, not estimated."""
        return cls(value, value, value)

    def entries(self, name: str) -> dict[str, float]:
        """name, name.lo and name.hi, as they stand in the JSON line."""
        return {name: self.value, f"{name}.lo": self.lo, f"{name}.hi": self.hi}


def alternate(blocks: Mapping[str, Block], rounds: int) -> dict[str, list[Count]]:
    """Run all blocks in turn, A B A B ...; what each counted, in the order of the rounds."""
    counts: dict[str, list[Count]] = {name: [] for name in blocks}
    for index in range(rounds):
        for name, block in blocks.items():
            counts[name].append(block(index))
    return counts


def ratio(ours: Sequence[Count], baseline: Sequence[Count]) -> Figure:
    """Our rate over the baseline's, round by round."""
    return median([a.rate / b.rate for a, b in zip(ours, baseline, strict=True)])


def unit_seconds(counts: Sequence[Count]) -> Figure:
    """Seconds a unit."""
    return median([count.seconds / count.units for count in counts])


def rate(counts: Sequence[Count]) -> Figure:
    """Units per second."""
    return median([count.rate for count in counts])


def median(values: Sequence[float], *, seed: int = 0) -> Figure:
    """Median and its 95 % percentile bootstrap.

    >>> median([1.0, 1.0, 1.0])
    Figure(value=1.0, lo=1.0, hi=1.0)
    """
    samples: FloatArray = np.asarray(values, np.float64)
    picks = np.random.default_rng(seed).integers(0, len(samples), (_RESAMPLES, len(samples)))
    lo, hi = np.quantile(np.median(samples[picks], axis=1), [0.025, 0.975])
    return Figure(float(np.median(samples)), float(lo), float(hi))


def verdict(figure: Figure, floor: float) -> Outcome:
    """Whether a figure reaches its floor.

    A wide interval decides nothing near the floor; one that lies wholly on a side of it decides, however wide.
    """
    if figure.width > WIDEST + _ROUNDING and figure.lo < floor <= figure.hi:
        return "not resolved"
    return "pass" if figure.lo >= floor - SLACK - _ROUNDING else "fail"


def ceiling_verdict(figure: Figure, ceiling: float) -> Outcome:
    """Whether a figure stays below its ceiling; the mirror of `verdict`."""
    if figure.width > WIDEST + _ROUNDING and figure.lo <= ceiling < figure.hi:
        return "not resolved"
    return "pass" if figure.hi <= ceiling + SLACK + _ROUNDING else "fail"


def timed(work: Callable[[], int]) -> Count:
    """One block: what `work` returns, and its duration."""
    began = time.perf_counter()
    units = work()
    return Count(units, time.perf_counter() - began)
