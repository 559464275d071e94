"""Phase stamps of one request -> durations for metrics, traces and benchmarks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timeline:
    """Monotonic stamps in seconds, first occurrence wins; `seconds("a", "b")` is None until both exist."""

    stamps: dict[str, float] = field(default_factory=dict)

    def stamp(self, phase: str) -> None:
        """Record that `phase` was reached now, unless it already was."""
        self.stamps.setdefault(phase, time.monotonic())

    def seconds(self, start: str, end: str) -> float | None:
        """Time between two phases."""
        if start in self.stamps and end in self.stamps:
            return self.stamps[end] - self.stamps[start]
        return None
