"""The level that control allows, and how busy the machine is -> waits between micro-steps: training gives way first.

Idle priority alone does not keep training out of the way: where serving leaves a core, or the other thread of its own
core, training takes all of it, and what both share (caches, memory, the core's units) makes serving slower. So beside
others it takes a part of the cores they leave, next to nothing where they want all, and everything while they rest.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

import psutil

from paceline.cluster.types import TrainLevel

_THROTTLED = 0.5
"""Of the time, the most that throttled training works in."""
_QUIET = 0.3
"""Of all cores: others that use less do not count."""
_LEAST_CORES = 0.5
"""Where others leave less there is nothing to take, but for a micro-step now and then."""
_NAP_S = 0.02
_MOST_S = 5.0
"""A micro-step is due after so long however busy the machine is: a run that stood still could not end."""
_MOST_OWED_S = 0.5
"""However long a piece of work was."""
_WINDOW_S = 0.1
"""Of a reading: the system counts in hundredths of a second."""
_READINGS = 5
"""Their mean says how busy others are; that they rest, the last one says alone."""


class Evicted(Exception):
    """Save and go: memory is wanted back."""


class Neighbours:
    """What processes that do not run at low priority, as this one does, leave of the machine's cores."""

    def __init__(self, spare_share: float, threads: int) -> None:
        """`spare_share`: of what others leave, the part that is taken, by so many threads."""
        self._spare_share, self._threads = spare_share, threads
        self._at, self._worked, self._all = time.monotonic(), *_worked()
        self._readings = deque([0.0], _READINGS)

    def duty(self) -> float:
        """0 .. 1: the part of the time to work in."""
        share = self.share()
        left = (1 - share) * (os.cpu_count() or 1)
        if share < _QUIET:
            return 1.0
        return min(1.0, self._spare_share * left / self._threads) if left >= _LEAST_CORES else 0.0

    def share(self) -> float:
        """Of the machine that others use, 0 .. 1, over the last half of a second; over the last tenth if that is quiet."""
        now = time.monotonic()
        if now - self._at >= _WINDOW_S:
            worked, total = _worked()
            self._readings.append((worked - self._worked) / max(total - self._all, 1e-9))
            self._at, self._worked, self._all = now, worked, total
        last = self._readings[-1]
        return last if last < _QUIET else sum(self._readings) / len(self._readings)


def _worked() -> tuple[float, float]:
    """Seconds that others worked, and that there were, of all cores since the machine began.

    What runs "nice" is left out: this process does, and its like. The system works for this one too, unlike them.
    """
    times = psutil.cpu_times()
    others = times.user + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    unused = times.idle + times.nice + getattr(times, "iowait", 0.0)
    return others - os.times().system, others + unused


class Pace:
    """Set from a thread that listens, asked by the one that trains."""

    def __init__(
        self,
        level: TrainLevel = "normal",
        *,
        on_level: Callable[[TrainLevel], None] | None = None,
        duty: Callable[[], float] | None = None,
    ) -> None:
        """`on_level` is called by the training thread when it begins to act on another level.

        duty: part of the time to work in, as of now, 0 .. 1; None: all of it.
        """
        self.paused_s = 0.0
        self.yielded_s = 0.0
        """To others that were at work, seen or told of by control."""
        self._duty = duty or (lambda: 1.0)
        self._owed_s = 0.0
        self._resumed_at = time.monotonic()
        self.in_force: TrainLevel = level
        self._level: TrainLevel = level
        self._changed = threading.Condition()
        self._on_level = on_level or (lambda level: None)

    def set(self, level: TrainLevel) -> None:
        """From any thread."""
        with self._changed:
            self._level = level
            self._changed.notify_all()

    def between(self) -> None:
        """Called between pieces of work of tens of milliseconds: returns when the next may begin.

        Raises:
            Evicted: there is no next one.
        """
        with self._changed:
            worked_s = time.monotonic() - self._resumed_at
            self._take_up()
            self._give_way(worked_s)
            began = time.monotonic()
            while self._level == "pause":
                self._changed.wait()
                self._take_up()
            self._resumed_at = time.monotonic()
            self.paused_s += self._resumed_at - began
        if self.in_force == "evict":
            raise Evicted

    def size(self, num_tokens: int) -> int:
        """How many tokens a micro-step may have that has `num_tokens` at normal level."""
        return max(1, num_tokens // 2) if self.in_force == "throttle" else num_tokens

    def _give_way(self, worked_s: float) -> None:
        """Until what was worked is no more than its part of the time, or the level changes."""
        self._owed_s = min(self._owed_s + worked_s, _MOST_OWED_S)
        if self._owed_s < _NAP_S:
            return
        began, level, rested = time.monotonic(), self._level, 0.0
        most = _THROTTLED if level == "throttle" else 1.0
        while rested < _rest(self._owed_s, min(self._duty(), most)):
            if self._changed.wait_for(lambda: self._level != level, _NAP_S):
                self._take_up()
                break
            rested = time.monotonic() - began
        self._owed_s = 0.0
        self.yielded_s += rested

    def _take_up(self) -> None:
        if self.in_force != self._level:
            self.in_force = self._level
            self._on_level(self._level)


def _rest(worked_s: float, duty: float) -> float:
    """worked / (worked + rest) = duty."""
    return min(worked_s * (1 / duty - 1), _MOST_S) if duty > 0 else _MOST_S
