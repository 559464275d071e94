"""The level that control allows -> waits between micro-steps: training is the first to give way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paceline.cluster.types import TrainLevel

_DUTY = 1.0
"""Sleep behind each throttled micro-step, as a multiple of what it took: half of the time is left to others."""


class Evicted(Exception):
    """Save and go: memory is wanted back."""


class Pace:
    """Set from a thread that listens, asked by the one that trains."""

    def __init__(
        self, level: TrainLevel = "normal", *, on_level: Callable[[TrainLevel], None] | None = None
    ) -> None:
        """`on_level` is called by the training thread when it begins to act on another level."""
        self.paused_s = 0.0
        self.in_force: TrainLevel = level
        self._level: TrainLevel = level
        self._changed = threading.Condition()
        self._on_level = on_level or (lambda level: None)

    def set(self, level: TrainLevel) -> None:
        """From any thread."""
        with self._changed:
            self._level = level
            self._changed.notify_all()

    def between(self, worked_s: float = 0.0) -> None:
        """Called between micro-steps of `worked_s`: returns when the next may begin.

        Raises:
            Evicted: there is no next one.
        """
        with self._changed:
            self._take_up()
            if self._level == "throttle":
                self._changed.wait_for(lambda: self._level != "throttle", _DUTY * worked_s)
                self._take_up()
            began = time.monotonic()
            while self._level == "pause":
                self._changed.wait()
                self._take_up()
            self.paused_s += time.monotonic() - began
        if self.in_force == "evict":
            raise Evicted

    def size(self, num_tokens: int) -> int:
        """How many tokens a micro-step may have that has `num_tokens` at normal level."""
        return max(1, num_tokens // 2) if self.in_force == "throttle" else num_tokens

    def _take_up(self) -> None:
        if self.in_force != self._level:
            self.in_force = self._level
            self._on_level(self._level)
