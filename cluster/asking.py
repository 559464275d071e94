"""What a drafter brought each stream, and what waiting for it cost -> for which streams to ask it next.

Asking costs before its outcome is known, so the decision is made from what asking brought lately. How good drafts are
depends on the text more than on anything else, so each stream is judged by itself: it is tried for two steps when it
is new, and again after 16, 32 ... 512 steps as long as asking does not pay for it. Two steps, since a source that was
not asked has to catch up first and only then shows what it can do.

Trials are paid from a budget: 2 % of the time that is served, and a tenth of what asking saves. Each is charged what
it took, and so is asking that was expected to pay and did not. So text that nobody can draft is slower by 2 % at most,
however many its streams are and however short, and where drafts help every new stream is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Cost = Callable[[npt.ArrayLike], FloatArray]
"""Rows of a step -> seconds."""

_TRIAL = 2
_FIRST_PAUSE = 16
_LONGEST_PAUSE = 512
_SHARE_OF_TIME = 0.02
_SHARE_OF_SAVINGS = 0.1
_FIRST_BUDGET = 16
_LARGEST_BUDGET = 64
"""Both in steps of one stream."""
_MARGIN = 1.02
"""A source must promise to be this much faster: figures this close are noise, and being wrong costs."""
_FURTHER_STREAM = 0.4
"""What each further stream adds to the time of one, until it is measured."""
_DECAY = 0.85
"""Of a stream's figures in each step in which it was asked for."""
_NET_SHARE = 0.05
"""Of the latest step in what asking saves: some steps lose time with a source that gains it."""


class WaitTime:
    """Seconds that asking took for so many streams -> seconds for any number of them: a line through what was measured.

    One source's forward is nearly flat in its rows, another one looks at each stream by itself. The level follows what
    is measured last; the slope is learnt where the number of streams changes, and kept while it does not.
    """

    def __init__(self) -> None:
        self._num = 0.0
        self._seconds = 0.0
        self._slope = 0.0

    @property
    def is_known(self) -> bool:
        return self._num > 0

    def __call__(self, num: npt.ArrayLike) -> FloatArray:
        """Seconds for these numbers of streams; 0 for none, and until something was measured."""
        wanted = np.asarray(num, np.float64)
        line = self._seconds + self._slope * (wanted - self._num)
        return np.asarray(np.where(wanted > 0, np.maximum(0.0, line), 0.0))

    def observe(self, num: int, seconds: float) -> None:
        """Asking for `num` streams together took so long."""
        if not self.is_known:
            self._num, self._seconds = float(num), seconds
            self._slope = _FURTHER_STREAM * seconds / (1 - _FURTHER_STREAM + _FURTHER_STREAM * num)
            return
        further = num - self._num
        error = seconds - float(self(num))
        self._slope += 0.3 * error * further / (further**2 + 4)
        self._num += 0.1 * further
        self._seconds += 0.1 * (seconds - self._seconds)
        self._slope = min(max(0.0, self._slope), self._seconds / self._num)


@dataclass(slots=True)
class _Stream:
    """One stream's accepted tokens of the source, decayed, and the steps they came from."""

    tokens: float = 0.0
    steps: float = 0.0
    trial: int = 0
    """Steps left, this one included, of asking although it is not known to pay."""
    pause: int = 0
    next_pause: int = _FIRST_PAUSE
    tried_at: int = -1
    """Step in which its last trial began."""
    is_worth: bool = False
    """It was asked for because that was expected to pay."""
    was_asked: bool = False
    had_caught_up: bool = False
    """It was asked for in the step before as well."""

    @property
    def gain(self) -> float:
        """Accepted tokens a step."""
        return self.tokens / self.steps if self.steps else 0.0


class Worth:
    """One drafter's balance: tokens it brought against seconds it cost."""

    def __init__(self, cost: Cost, *, is_free: bool = False) -> None:
        """`is_free`: no pauses between trials; what the budget allows is enough for such a source."""
        self._cost = cost
        self._is_free = is_free
        self._wait_s = WaitTime()
        """What a step takes longer, its nodes in the forward left out."""
        self._budget_s = _FIRST_BUDGET * float(cost(1))
        self._net_s = 0.0
        """What a step of asking where it should pay saves, on average."""
        self._streams: dict[str, _Stream] = {}
        self._step = 0
        self._num_plain = 1
        """Streams of the step that was decided last."""

    def is_trial(self, stream: str) -> bool:
        """Whether the stream's next step is one of a trial."""
        return stream in self._streams and self._streams[stream].trial > 0

    # -- before a step -----------------------------------------------------------------------------------

    def ask_for(self, streams: Sequence[str], found: Sequence[float], num_others: int = 0) -> list[int]:
        """Indices of the streams to ask for in the next step.

        Args:
            streams: keys of those that may be asked for.
            found: tokens that each one's step will accept as it is, by what free sources proposed.
            num_others: streams of the same step that want no drafts; they wait for them all the same.
        """
        known = [self._streams.setdefault(key, _Stream()) for key in streams]
        self._step += 1
        self._num_plain = max(1, len(streams) + num_others)
        step_s = float(self._cost(self._num_plain))
        most = _LARGEST_BUDGET * (float(self._wait_s(1)) or step_s)
        self._budget_s = min(most, self._budget_s + _SHARE_OF_TIME * step_s)
        is_believed = self._budget_s > -_LARGEST_BUDGET * step_s
        worth = self._worth([stream.gain for stream in known], found, num_others) if is_believed else []
        for stream in known:
            stream.trial = max(0, stream.trial - 1)
            stream.is_worth = False
        for index in worth:
            stream = known[index]
            stream.next_pause, stream.pause, stream.is_worth = _FIRST_PAUSE, 0, True
        asked = {index for index, stream in enumerate(known) if stream.is_worth or stream.trial > 0}
        asked |= self._begin_trials(known, found, asked)
        for index, stream in enumerate(known):
            stream.had_caught_up, stream.was_asked = stream.was_asked, index in asked
        return sorted(asked)

    def _begin_trials(self, known: Sequence[_Stream], found: Sequence[float], asked: set[int]) -> set[int]:
        """Those of the others that begin a trial: the longest untried first, as many as the budget has for all of it."""
        num_tried = sum(known[index].trial > 0 and not known[index].is_worth for index in asked)
        left_s = self._budget_s - num_tried * self._added_s(len(asked))
        begun: set[int] = set()
        for index in sorted(set(range(len(known))) - asked, key=lambda index: known[index].tried_at):
            stream = known[index]
            if found[index] >= 1 + stream.gain:  # enough is there without it: no time to find out more
                continue
            if stream.pause > 0:
                stream.pause -= 1
                continue
            price_s = _TRIAL * self._added_s(len(asked) + len(begun) + 1)
            if price_s > left_s and self._wait_s.is_known:
                continue
            left_s -= price_s
            stream.trial, stream.tried_at = _TRIAL, self._step
            stream.tokens = stream.steps = 0.0  # what was known is old
            stream.pause = 0 if self._is_free else stream.next_pause
            stream.next_pause = min(_LONGEST_PAUSE, stream.next_pause * 2)
            begun.add(index)
        return begun

    def _added_s(self, num: int) -> float:
        """What the last of `num` streams adds to asking."""
        return float(self._wait_s(num) - self._wait_s(num - 1))

    def _worth(self, gains: Sequence[float], found: Sequence[float], num_others: int) -> list[int]:
        """The streams for which asking gives the best rate of all; none if that is not better than not asking.

        Streams in descending order of what asking adds; the rate of the first k of them is

            (plain + sum found + sum added) / (T(plain + sum found + nodes) + wait(k)),   nodes = sum max(1, gain).
        """
        gain, had = np.asarray(gains, np.float64), np.asarray(found, np.float64)
        added = gain - had
        order = np.argsort(-added, kind="stable")[: int((added > 0).sum())]
        if len(order) == 0:
            return []
        plain = len(gain) + num_others + float(had.sum())
        nodes = np.cumsum(np.maximum(1.0, gain[order]))
        wait_s = self._wait_s(np.arange(1, len(order) + 1))
        rates = (plain + np.cumsum(added[order])) / (self._cost(plain + nodes) + wait_s)
        best = int(np.argmax(rates))
        if rates[best] <= _MARGIN * plain / float(self._cost(plain)):
            return []
        chosen: list[int] = order[: best + 1].tolist()
        return chosen

    # -- after it ----------------------------------------------------------------------------------------

    def asked(self, wait_s: float, gained: Mapping[str, float]) -> None:
        """What asking cost in a step, and each stream's accepted tokens of the source, whoever had them too.

        Nothing gained says nothing in the first step of asking: the source may still be catching up.
        """
        streams = {key: self._streams.setdefault(key, _Stream()) for key in gained}
        for key, tokens in gained.items():
            stream = streams[key]
            if not tokens and not stream.had_caught_up:
                continue
            stream.tokens = _DECAY * stream.tokens + tokens
            stream.steps = _DECAY * stream.steps + 1
        # Trials are charged their share at once; where asking should pay, single steps say little.
        token_s = float(self._cost(self._num_plain)) / self._num_plain
        tried = [tokens for key, tokens in gained.items() if not streams[key].is_worth]
        spent_s = wait_s * len(tried) / max(1, len(gained))
        self._budget_s += min(0.0, token_s * sum(tried) - spent_s)
        if len(tried) < len(gained):
            net_s = token_s * (sum(gained.values()) - sum(tried)) - (wait_s - spent_s)
            self._net_s += _NET_SHARE * (net_s - self._net_s)
            self._budget_s += _SHARE_OF_SAVINGS * self._net_s if self._net_s > 0 else self._net_s
        if gained and (not self._wait_s.is_known or all(s.had_caught_up for s in streams.values())):
            self._wait_s.observe(len(gained), wait_s)

    def close(self, stream: str) -> None:
        """The stream ended."""
        self._streams.pop(stream, None)
