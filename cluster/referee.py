"""Tokens and seconds of steps with drafts and of plain ones -> whether to draft at all.

Everything else that decides about drafts trusts a table of step times. This does not: it compares what steps with
drafts really emitted in a second with what plain steps emit, measured beside them, and switches drafting off where it
loses. A plain step is taken now and then to know what it takes: often while drafts gain little, hardly ever while
they gain much. Switched off, drafting is tried again for a few dozen steps, after longer and longer pauses. Numbers of
streams are judged apart, by powers of two: what pays for one stream may not for eight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_WARM_UP = 2
"""Steps of a trial that are not counted: sources have to catch up."""
_LOSSES = ((6, 0.6), (24, 0.94), (96, 1.0))
"""After so many steps with drafts a gain below that ends them: the fewer steps, the clearer the loss must be."""
_SURE = _LOSSES[-1][0]
_WINDOW = 256
"""Steps with drafts that count, decaying."""
_GOOD = 1.15
"""A gain above which a comparison now and then is enough."""
_OFTEN, _SELDOM = 12, 96
"""Steps from one plain one to the next, where drafts gain little and where they gain much."""
_FEW_PLAIN = 4
"""Plain steps with about so many streams before anything is judged: every other step is one until then."""
_FIRST_PAUSE, _LONGEST_PAUSE = 128, 4096
_OUTLIER = 6.0
"""Times the plain steps for as many tokens: more is not the step's doing, or it is bad enough that way."""


class PlainTimes:
    """Seconds of plain steps by their number of streams."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def observe(self, num: int, seconds: float) -> None:
        """A plain step of `num` streams took so long: about the last ten count."""
        known = self._seconds.get(num)
        self._counts[num] = self._counts.get(num, 0) + 1
        if known is None:
            self._seconds[num] = seconds
        else:
            weight = max(0.1, 1.0 / self._counts[num])
            self._seconds[num] = known + weight * (min(seconds, 3.0 * known) - known)

    def count(self, num: int) -> int:
        """Steps that tell of `num` streams: those with up to a quarter more or less."""
        return sum(seen for other, seen in self._counts.items() if 4 * abs(other - num) <= num)

    def __call__(self, num: int) -> float:
        """Seconds of a plain step with `num` streams, between those that were seen."""
        known = sorted(self._seconds)
        return float(np.interp(num, known, [self._seconds[other] for other in known]))


@dataclass(slots=True)
class _Phase:
    """Drafting on or off, for numbers of streams that are about the same."""

    is_on: bool = True
    steps: int = 0
    """With drafts, since they were last switched on."""
    plain_s: float = 0.0
    """What the tokens of those steps would have taken without drafts, decayed ..."""
    seconds: float = 0.0
    """... and what they took."""
    since_plain: int = 0
    pause: int = 0
    next_pause: int = _FIRST_PAUSE

    @property
    def gain(self) -> float:
        """Tokens a second, drafts on against off; 1 until something is known."""
        return self.plain_s / self.seconds if self.seconds else 1.0


class Referee:
    """Decides step by step; one for each engine."""

    def __init__(self) -> None:
        self._plain = PlainTimes()
        self._phases: dict[int, _Phase] = {}

    def may_draft(self, num_streams: int) -> bool:
        """Whether the next step, of about so many streams, may ask anybody for drafts. Called once a step."""
        phase = self._phase(num_streams)
        if not phase.is_on:
            phase.pause -= 1
            if phase.pause > 0:
                return False
            phase.is_on, phase.steps, phase.plain_s, phase.seconds = True, 0, 0.0, 0.0
        phase.since_plain += 1
        if phase.since_plain >= self._interval(phase, num_streams):
            phase.since_plain = 0
            return False
        return True

    def _interval(self, phase: _Phase, num_streams: int) -> int:
        if self._plain.count(num_streams) < _FEW_PLAIN:
            return 2
        return _SELDOM if phase.steps >= _SURE and phase.gain > _GOOD else _OFTEN

    def stepped(self, num_streams: int, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """A step of so many streams emitted so many tokens; `seconds` are all of it, asking included."""
        if not drafted:
            self._plain.observe(num_streams, seconds)
            return
        phase = self._phase(num_streams)
        phase.steps += 1
        if phase.steps <= _WARM_UP or self._plain.count(num_streams) < _FEW_PLAIN:
            return
        plain_s = num_tokens / num_streams * self._plain(num_streams)
        keep = 1.0 - 1.0 / _WINDOW
        phase.plain_s = keep * phase.plain_s + plain_s
        phase.seconds = keep * phase.seconds + min(seconds, _OUTLIER * plain_s)
        if phase.steps >= _SURE and phase.gain >= 1.0:
            phase.next_pause = _FIRST_PAUSE
        elif any(phase.steps >= steps and phase.gain < least for steps, least in _LOSSES):
            phase.is_on, phase.pause = False, phase.next_pause
            phase.next_pause = min(_LONGEST_PAUSE, 2 * phase.next_pause)

    def _phase(self, num_streams: int) -> _Phase:
        return self._phases.setdefault(max(1, num_streams).bit_length(), _Phase())

    def reset(self) -> None:
        """Somebody drafts otherwise now: what was found of drafting no longer counts."""
        self._phases.clear()

    def gains(self) -> dict[int, tuple[float, bool]]:
        """Smallest number of streams -> (gain when drafting was last compared, whether it is on)."""
        return {1 << (size - 1): (phase.gain, phase.is_on) for size, phase in sorted(self._phases.items())}
