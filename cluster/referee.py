"""Tokens and seconds of steps with drafts and of plain ones -> who is asked: nobody, free sources, everybody, models.

Everything else that decides about drafts trusts a table of step times. This does not: it compares what steps with
drafts really emitted in a second with what plain steps emit, measured beside them, and holds to what is fastest by
the clock. Free sources alone are one choice, everybody where it should pay another: a draft model that pays in every
step where it is asked may still cost more than it brings, where the next steps' tokens would have come free. Models
alone, asked in every step without any estimate of what that brings, are the third: an estimate made of a dozen steps
misses small gains, a copy that was found takes the place of a longer draft, and merging both costs time.

A plain step is taken now and then to know what it takes: often while drafts gain little, hardly ever while they gain
much. A choice that is not the best is tried again for a few dozen steps in short runs, after longer and longer
pauses. Numbers of streams are judged apart, by powers of two: what pays for one stream may not for eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

_WARM_UP = 2
"""Steps of a run that tell nothing: sources have to catch up."""
_RUN = 16
"""Steps of a trial, then as many of what is best so far: both see the same texts."""
_LOSSES = ((6, 0.6), (24, 0.94), (96, 1.0))
"""After so many steps of a choice a gain below that share of the best one ends it: the fewer, the clearer."""
_SURE = _LOSSES[-1][0]
_WINDOW = 256
"""Steps of a choice that count, decaying."""
_GOOD = 1.15
"""A gain above which a comparison with plain steps now and then is enough."""
_OFTEN, _SELDOM = 12, 96
"""Steps from one plain one to the next, where drafts gain little and where they gain much."""
_FEW_PLAIN = 4
"""Plain steps with about so many streams before anything is judged: every other step is one until then."""
_FIRST_PAUSE, _LONGEST_PAUSE = 128, 4096
_OUTLIER = 6.0
"""Times the plain steps for as many tokens: more is not the step's doing, or it is bad enough that way."""


class Asked(IntEnum):
    """Who may be asked for drafts in a step."""

    NOBODY = 0
    FREE = 1
    """Sources that cost next to nothing."""
    EVERYBODY = 2
    """All of them, for the streams and in the steps where that should pay."""
    MODELS = 3
    """Draft models only, for every stream in every step."""


_MODELS = (Asked.EVERYBODY, Asked.MODELS)
"""Choices with draft models among them: where one of them loses to having none, the other hardly wins."""


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
class _Choice:
    """What asking these sources brings, for numbers of streams that are about the same."""

    steps: int = 0
    """Since its trial began."""
    plain_s: float = 0.0
    """What the tokens of those steps would have taken without drafts, decayed ..."""
    seconds: float = 0.0
    """... and what they took."""
    pause: int = 0
    """Steps until it is tried again."""
    next_pause: int = _FIRST_PAUSE
    tried: int = 0
    """Trials so far: of two that may be tried, the one with fewer is."""

    @property
    def gain(self) -> float:
        """Tokens a second over those of plain steps; 1 until something is known."""
        return self.plain_s / self.seconds if self.seconds else 1.0

    def add(self, plain_s: float, seconds: float) -> None:
        """A step whose tokens take `plain_s` without drafts took `seconds`."""
        keep = 1.0 - 1.0 / _WINDOW
        self.steps += 1
        self.plain_s = keep * self.plain_s + plain_s
        self.seconds = keep * self.seconds + min(seconds, _OUTLIER * plain_s)

    def loses_to(self, gain: float) -> bool:
        """Whether that gain is clearly more than this one's."""
        return any(self.steps >= steps and self.gain < least * gain for steps, least in _LOSSES)

    def rest(self) -> None:
        """It lost: not again for a while."""
        self.pause, self.next_pause = self.next_pause, min(_LONGEST_PAUSE, 2 * self.next_pause)


class _Phase:
    """The choices for numbers of streams that are about the same, and which of them is the best."""

    def __init__(self, kinds: Sequence[Asked]) -> None:
        self._choices = {kind: _Choice() for kind in kinds}
        self.best = Asked.EVERYBODY
        """Drafts are believed in, until they are found to lose."""
        self._trial = Asked.NOBODY
        """Compared with the best, in turns; nobody if there is no such trial."""
        self._turn = 0
        """Steps of this run so far."""
        self._is_trials_turn = False
        self._since_plain = 0
        for kind in kinds:
            if kind != self.best:
                self._choices[kind].pause = 1

    @property
    def gain(self) -> float:
        """Of the best choice; where all lose, of the one that loses least."""
        if self.best:
            return self._choices[self.best].gain
        return max((choice.gain for choice in self._choices.values() if choice.seconds), default=1.0)

    @property
    def _best_gain(self) -> float:
        return self._choices[self.best].gain if self.best else 1.0

    def next(self, num_plain: int) -> Asked:
        """Who may be asked in the next step; `num_plain` plain steps tell what one takes."""
        self._count_pauses()
        self._turn += 1
        if self._trial and self._turn > _RUN:
            self._turn, self._is_trials_turn = 1, not self._is_trials_turn
        kind = self._trial if self._is_trials_turn else self.best
        if kind == Asked.NOBODY:
            return kind
        self._since_plain += 1
        if self._since_plain >= self._interval(num_plain):
            self._since_plain = 0
            return Asked.NOBODY
        return kind

    def retry(self) -> None:
        """What rests, rests no longer."""
        for choice in self._choices.values():
            choice.pause, choice.next_pause = 0, _FIRST_PAUSE

    def _count_pauses(self) -> None:
        """One trial at a time, and none before the best is sure."""
        others = [kind for kind in self._choices if kind not in (self.best, self._trial)]
        for kind in others:
            self._choices[kind].pause = max(0, self._choices[kind].pause - 1)
        if self._trial or self.best and self._choices[self.best].steps < _SURE:
            return
        rested = [kind for kind in others if self._choices[kind].pause == 0]
        if rested:
            self._trial = min(rested, key=lambda kind: self._choices[kind].tried)
            self._turn, self._is_trials_turn = 0, True
            choice = self._choices[self._trial]
            choice.tried += 1
            choice.steps, choice.plain_s, choice.seconds = 0, 0.0, 0.0

    def _interval(self, num_plain: int) -> int:
        if num_plain < _FEW_PLAIN:
            return 2
        best = self._choices.get(self.best)
        return _SELDOM if best is not None and best.steps >= _SURE and best.gain > _GOOD else _OFTEN

    @property
    def is_warm(self) -> bool:
        """Whether a step of this run tells something already."""
        return self._turn > _WARM_UP

    def stepped(self, kind: Asked, plain_s: float, seconds: float) -> None:
        """A step in which `kind` might be asked, against the plain steps for as many tokens; zeros say nothing."""
        choice = self._choices[kind]
        choice.add(plain_s, seconds)
        if kind == self.best:
            self._judge_best(choice)
        elif kind == self._trial:
            self._judge_trial(choice)

    def _judge_best(self, choice: _Choice) -> None:
        if choice.steps >= _SURE and choice.gain >= 1.0:
            choice.next_pause = _FIRST_PAUSE
        elif choice.loses_to(1.0):
            lost, self.best = self.best, Asked.NOBODY
            self._rest(lost)
            self._end_trial()

    def _judge_trial(self, choice: _Choice) -> None:
        if choice.loses_to(self._best_gain):
            self._rest(self._trial)
            self._end_trial()
        elif choice.steps >= _SURE and choice.gain > self._best_gain:
            if self.best:
                self._choices[self.best].rest()
            self.best = self._trial
            choice.next_pause = _FIRST_PAUSE
            self._end_trial()

    def _rest(self, lost: Asked) -> None:
        """This choice lost. If it did to having no models, so does the other with models, until their next turn."""
        choice = self._choices[lost]
        choice.rest()
        if lost in _MODELS and self.best not in _MODELS:
            for kind in _MODELS:
                if kind in self._choices:
                    other = self._choices[kind]
                    other.pause, other.next_pause = choice.pause, choice.next_pause

    def _end_trial(self) -> None:
        self._trial, self._turn, self._is_trials_turn = Asked.NOBODY, 0, False


class Referee:
    """Decides step by step; one for each engine."""

    def __init__(self, kinds: Sequence[Asked] = (Asked.EVERYBODY,)) -> None:
        """`kinds`: the choices there are beside asking nobody; free sources only where there are others as well."""
        self._kinds = tuple(kinds)
        self._plain = PlainTimes()
        self._phases: dict[int, _Phase] = {}

    def may_ask(self, num_streams: int) -> Asked:
        """Who may be asked for drafts for the next step, of about so many streams. Called once a step."""
        return self._phase(num_streams).next(self._plain.count(num_streams))

    def stepped(self, num_streams: int, num_tokens: int, seconds: float, asked: Asked) -> None:
        """A step of so many streams emitted so many tokens; `seconds` are all of it, asking included."""
        if asked == Asked.NOBODY:
            self._plain.observe(num_streams, seconds)
            return
        phase = self._phase(num_streams)
        if phase.is_warm and self._plain.count(num_streams) >= _FEW_PLAIN:
            phase.stepped(asked, num_tokens / num_streams * self._plain(num_streams), seconds)
        else:
            phase.stepped(asked, 0.0, 0.0)

    def _phase(self, num_streams: int) -> _Phase:
        size = max(1, num_streams).bit_length()
        if size not in self._phases:
            self._phases[size] = _Phase(self._kinds)
        return self._phases[size]

    def reset(self) -> None:
        """Somebody drafts otherwise now: what was found of drafting no longer counts."""
        self._phases.clear()

    def retry(self) -> None:
        """Somebody drafts otherwise for some streams: what lost before is tried again at once."""
        for phase in self._phases.values():
            phase.retry()

    def gains(self) -> dict[int, tuple[float, Asked]]:
        """Smallest number of streams -> (gain of drafting when it was last compared, who may be asked now)."""
        return {1 << (size - 1): (phase.gain, phase.best) for size, phase in sorted(self._phases.items())}
