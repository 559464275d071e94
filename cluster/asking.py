"""What a drafter brought each stream, and what waiting for it cost -> for which streams to ask it next.

Asking costs before its outcome is known, so the decision is made from what asking brought lately. How good drafts are
depends on the text more than on anything else, so each stream is judged by itself: it is tried for two steps when it
is new, and again after 16, 32 ... 512 steps as long as asking does not pay for it. Two steps, since a source that was
not asked has to catch up first and only then shows what it can do. What streams have of a source in their first steps
is believed of those that come: where it pays for most, a new one is asked for at once.

Trials are paid from a budget: 2 % of the time that is served, and a tenth of what asking saves. Each is charged what
it took, and so is asking that was expected to pay and did not. So asking in vain takes 2 % of the time at most,
however many streams there are and however short, and where drafts help every new stream is tried. What nodes cost in the
forward is not in that budget: it is as well known as the table of step costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class Cost(Protocol):
    """Rows of a step -> seconds."""

    @overload
    def __call__(self, rows: float) -> float | FloatArray: ...
    @overload
    def __call__(self, rows: npt.NDArray[Any]) -> FloatArray: ...


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
_USUAL_COUNTS = 3.0
"""Steps that what is usual counts for in a new stream's figures."""
_FIRST_STEPS = 8
"""Of each stream, which tell what is usual: later ones are those of streams that are worth asking for."""
_USUAL_DECAY = 0.99
_FEW = 4
_STAY = 16
"""Steps that a stream is asked for once it has caught up, which pay for that."""
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
        self._seen = 0
        """Usual steps that were observed."""

    @property
    def is_known(self) -> bool:
        """A usual step was observed."""
        return self._seen > 0

    def __call__(self, num: int) -> float:
        """Seconds for so many streams; 0 for none, and until something was measured."""
        return max(0.0, self._seconds + self._slope * (num - self._num)) if num else 0.0

    def observe(self, num: int, seconds: float, *, is_usual: bool = True) -> None:
        """Asking for `num` streams together took so long.

        `is_usual`: nobody had to catch up. What else it takes counts only until that is known, and then no more: a first
        step that read whole prompts would be believed for dozens.
        """
        if not is_usual and self.is_known:
            return
        self._seen += is_usual
        if self._seen <= 1:  # nothing usual before it
            self._num, self._seconds = float(num), seconds
            self._slope = _FURTHER_STREAM * seconds / (1 - _FURTHER_STREAM + _FURTHER_STREAM * num)
            return
        weight = max(0.1, 1.0 / self._seen)
        further = num - self._num
        error = seconds - self(num)
        self._slope += 0.3 * error * further / (further**2 + 4)
        self._num += weight * further
        self._seconds += weight * (seconds - self._seconds)
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
    is_gift: bool = False
    """It is tried at nobody's cost: whoever wants to know pays."""
    asked_at: int = -1
    """Step in which it was last asked for."""
    had_caught_up: bool = False
    """It was asked for in the step before as well."""
    num_seen: int = 0
    """Steps that told what the source brings it."""

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
        self._usual_tokens = self._usual_steps = 0.0
        """Of streams in their first steps of asking, decayed."""
        self._catch_up_s = 0.0
        """What asking takes longer for a stream that was not asked for in the step before ..."""
        self._num_late = 0
        """... and from how many steps that is known."""
        self._num_plain = 1
        """Streams of the step that was decided last."""

    def is_trial(self, stream: str) -> bool:
        """Whether the stream's next step is one of a trial."""
        return stream in self._streams and self._streams[stream].trial > 0

    def _stream(self, key: str) -> _Stream:
        """Until it is known better, a new one is believed to be like others were at first."""
        stream = self._streams.get(key)
        if stream is None:
            usual = self._usual_tokens / self._usual_steps if self._usual_steps else 0.0
            stream = self._streams[key] = _Stream(_USUAL_COUNTS * usual, _USUAL_COUNTS if usual else 0.0)
        return stream

    # -- before a step -----------------------------------------------------------------------------------

    def ask_for(
        self, streams: Sequence[str], found: Sequence[float], num_others: int = 0, *, is_gift: bool = False
    ) -> list[int]:
        """Indices of the streams to ask for in the next step.

        Args:
            streams: keys of those that may be asked for.
            found: tokens that each one's step will accept as it is, by what free sources proposed.
            num_others: streams of the same step that want no drafts; they wait for them all the same.
            is_gift: somebody wants to know what these streams' drafts are worth; their trials need no budget.
        """
        known = [self._stream(key) for key in streams]
        self._step += 1
        self._num_plain = max(1, len(streams) + num_others)
        step_s = float(self._cost(self._num_plain))
        most = _LARGEST_BUDGET * (self._wait_s(1) or step_s)
        self._budget_s = min(most, self._budget_s + _SHARE_OF_TIME * step_s)
        # So deep in debt, what was expected to pay has not: the figures are wrong, until time has paid it back.
        is_believed = self._budget_s > -_LARGEST_BUDGET * step_s
        gains = [stream.gain for stream in known]
        late_s = self._catch_up_s / _STAY
        late = [0.0 if stream.asked_at == self._step - 1 else late_s for stream in known]
        worth = self._worth(gains, found, late, num_others) if is_believed else []
        for index in worth:
            stream = known[index]
            stream.next_pause, stream.pause = _FIRST_PAUSE, 0
        asked, waiting = set(worth), []
        for index, stream in enumerate(known):
            stream.is_worth, stream.is_gift = index in asked, is_gift
            stream.trial = max(0, stream.trial - 1)
            if stream.is_worth or found[index] >= 1 + gains[index] and stream.trial == 0:
                continue  # nothing to find out, or no time to: enough is there without it
            if stream.trial > 0:
                asked.add(index)
            elif stream.pause > 0:
                stream.pause -= 1
            else:
                waiting.append(index)
        left_s = self._budget_s - (len(asked) - len(worth)) * self._added_s(len(asked))
        waiting.sort(key=lambda index: known[index].tried_at)
        for index in waiting:
            price_s = self._price_s(len(asked) + 1)
            if not is_gift and (left_s <= 0 or price_s > left_s):
                break
            left_s -= price_s
            self._begin_trial(known[index])
            asked.add(index)
        for index in asked:
            stream = known[index]
            stream.had_caught_up, stream.asked_at = stream.asked_at == self._step - 1, self._step
        return sorted(asked)

    def _begin_trial(self, stream: _Stream) -> None:
        stream.trial, stream.tried_at = _TRIAL, self._step
        if stream.steps > 1:  # what was known is old: it counts for one step
            stream.tokens, stream.steps = stream.gain, 1.0
        stream.pause = 0 if self._is_free else stream.next_pause
        stream.next_pause = min(_LONGEST_PAUSE, stream.next_pause * 2)

    def _price_s(self, num: int) -> float:
        """Of a trial with so many streams asked for; nothing as long as only catching up was measured."""
        return _TRIAL * self._added_s(num) + self._catch_up_s if self._wait_s.is_known else 0.0

    def _added_s(self, num: int) -> float:
        """What the last of `num` streams adds to asking."""
        return self._wait_s(num) - self._wait_s(num - 1)

    def _worth(
        self, gains: Sequence[float], found: Sequence[float], late: Sequence[float], num_others: int
    ) -> list[int]:
        """The streams for which asking gives the best rate of all; none if that is not better than not asking.

        Streams in descending order of what asking adds; the rate of the first k of them is

            (plain + sum found + sum added) / (T(plain + sum found + nodes) + wait(k) + late),   nodes = sum max(1, gain);

        late: [streams], seconds of a step for which each has to catch up.
        """
        added = [
            (gain - had, index)
            for index, (gain, had) in enumerate(zip(gains, found, strict=True))
            if gain > had
        ]
        if not added:
            return []
        added.sort(key=lambda one: -one[0])  # the earlier stream first among equals
        plain = len(gains) + num_others + sum(found)
        tokens, rows, late_s = plain, plain, 0.0
        firsts: list[tuple[float, float, float]] = []
        """Of the first k streams: tokens, rows, seconds beside the forward."""
        for num, (more, index) in enumerate(added, 1):
            tokens, rows, late_s = tokens + more, rows + max(1.0, gains[index]), late_s + late[index]
            firsts.append((tokens, rows, self._wait_s(num) + late_s))
        forward_s = self._forwards_s([rows for _, rows, _ in firsts])
        rates = [tokens / (cost + more) for (tokens, _, more), cost in zip(firsts, forward_s, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] <= _MARGIN * plain / float(self._cost(plain)):
            return []
        return [index for _, index in added[: best + 1]]

    def _forwards_s(self, rows: Sequence[float]) -> list[float]:
        """A few numbers at a time are looked up one by one: a pass of numpy takes as long as five of them."""
        if len(rows) > _FEW:
            found: list[float] = np.asarray(self._cost(np.asarray(rows))).tolist()
            return found
        return [float(self._cost(num)) for num in rows]

    # -- after it ----------------------------------------------------------------------------------------

    def asked(self, wait_s: float, gained: Mapping[str, float]) -> None:
        """What asking cost in a step, and each stream's accepted tokens of the source, whoever had them too.

        Nothing gained says nothing in the first step of asking: the source may still be catching up.
        """
        streams = {key: self._stream(key) for key in gained}
        for key, tokens in gained.items():
            stream = streams[key]
            if not tokens and not stream.had_caught_up:
                continue
            stream.tokens = _DECAY * stream.tokens + tokens
            stream.steps = _DECAY * stream.steps + 1
            stream.num_seen += stream.had_caught_up
            if stream.had_caught_up and stream.num_seen <= _FIRST_STEPS:
                self._usual_tokens = _USUAL_DECAY * self._usual_tokens + tokens
                self._usual_steps = _USUAL_DECAY * self._usual_steps + 1
        if not gained:  # all who were asked for have ended
            self._budget_s -= wait_s
            return
        # Trials are charged their share at once; where asking should pay, single steps say little.
        token_s = float(self._cost(self._num_plain)) / self._num_plain
        share_s = wait_s / len(gained)
        tried = [n for key, n in gained.items() if not streams[key].is_worth and not streams[key].is_gift]
        self._budget_s += min(0.0, token_s * sum(tried) - share_s * len(tried))
        paying = [n for key, n in gained.items() if streams[key].is_worth]
        if paying:
            net_s = token_s * sum(paying) - share_s * len(paying)
            self._net_s += _NET_SHARE * (net_s - self._net_s)
            self._budget_s += _SHARE_OF_SAVINGS * self._net_s if self._net_s > 0 else self._net_s
        self._learn_wait(wait_s, len(gained), sum(not stream.had_caught_up for stream in streams.values()))

    def _learn_wait(self, wait_s: float, num: int, num_late: int) -> None:
        """A step in which `num` streams were asked for, `num_late` of which had to catch up."""
        if num_late and self._wait_s.is_known:
            late_s = max(0.0, wait_s - self._wait_s(num)) / num_late
            self._num_late += 1
            self._catch_up_s += max(0.1, 1.0 / self._num_late) * (late_s - self._catch_up_s)
        self._wait_s.observe(num, wait_s, is_usual=not num_late)

    def close(self, stream: str) -> None:
        """The stream ended."""
        self._streams.pop(stream, None)
