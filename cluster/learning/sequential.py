"""Streams of two versions at the same time -> which one is better, at any moment, with a bounded chance of error.

A mixture sequential probability ratio test (mSPRT) on the ratio of the two versions' figures, for example tokens per
step. It may be looked at after every stream: over all looks together, two equal versions are told apart wrongly with
probability `alpha` at most (in the limit of many streams, hence `min_streams`). Its confidence interval holds at all times
at once: so what the dashboard shows is what decides.

Source: Johari, Pekelis, Walsh 2015 (always valid inference), with the delta method for ratios.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.learning.figures import Ratio

_TAU = 0.05
"""Scale of the differences that are expected, as a share: where the test is sharpest."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A share, and the interval that holds at all looks together."""

    mean: float
    lo: float
    hi: float

    def view(self) -> dict[str, float]:
        return {"mean": self.mean, "lo": self.lo, "hi": self.hi}


@dataclass(slots=True)
class Comparison:
    """One figure of two arms; what counts is candidate / control - 1."""

    alpha: float
    min_streams: int = 20
    """Of each arm before anything is said."""
    control: Ratio = field(default_factory=Ratio)
    candidate: Ratio = field(default_factory=Ratio)

    def add(self, *, is_candidate: bool, y: float, x: float) -> None:
        """One stream's share in the figure: sums of y over sums of x."""
        (self.candidate if is_candidate else self.control).add(y, x)

    @property
    def is_ready(self) -> bool:
        return min(self.control.num, self.candidate.num) >= self.min_streams and self.control.y > 0

    def interval(self) -> Interval | None:
        """None with too few streams."""
        if not self.is_ready:
            return None
        base = self.control.value
        ratio = self.candidate.value / base
        # Var(a / b) = (Var a + (a / b)^2 Var b) / b^2
        variance = (self.candidate.variance + ratio * ratio * self.control.variance) / (base * base)
        variance = max(variance, 1e-12)
        mixed = variance + _TAU * _TAU
        half = math.sqrt(
            2 * variance * mixed / (_TAU * _TAU) * math.log(math.sqrt(mixed / variance) / self.alpha)
        )
        return Interval(ratio - 1, ratio - 1 - half, ratio - 1 + half)

    def view(self) -> dict[str, Any]:
        """Both arms and the interval, where there is one."""
        interval = self.interval()
        return {
            "control": {"num": self.control.num, "value": _or_none(self.control.value)},
            "candidate": {"num": self.candidate.num, "value": _or_none(self.candidate.value)},
            "interval": interval.view() if interval else None,
        }


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
