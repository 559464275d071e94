"""Streams of a candidate and of its champion at the same time -> better, worse, or not yet known, and why.

Streams are drawn by their request id, so both arms have the same mix; a stream belongs to the arm it was drawn for,
drafted or not, so a candidate cannot win by leaving hard streams without drafts. But while drafting is off both arms are
alike and show nothing: streams count from the first one on in which a draft was tried, of either arm, and a trial that has
next to none is weak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.cluster.learning.sequential import Comparison, Interval
from paceline.cluster.types import ServedStream

Verdict = Literal["better", "worse", "open"]

_ALPHA = 0.05
"""Of tokens per step, both sides together: a candidate of no gain is promoted, or taken back, early with this chance."""
_ALPHA_TIME = 0.01
SLOWER = 0.1
"""Time per token may be so much longer: what wins steps must not lose more in drafting."""
LONGER_GAP = 0.5
"""The same of the longest gap in a stream, which scatters widely."""
NOT_WORSE = -0.02
"""At the end of its time a candidate's tokens per step must not lie further below the champion's."""
FEW_STREAMS = 10
"""Of the candidate's, drafted: with fewer nothing was shown, however long it took."""


@dataclass(slots=True)
class Trial:
    """One candidate against one control."""

    candidate: str
    control: str
    began: float
    steps: Comparison = field(default_factory=lambda: Comparison(_ALPHA))
    times: Comparison = field(default_factory=lambda: Comparison(_ALPHA_TIME))
    gaps: Comparison = field(default_factory=lambda: Comparison(_ALPHA_TIME))
    num: int = 0
    """The candidate's streams, counted or not."""
    drafted_since: float | None = None
    """When the first stream ended in which a draft was tried, of either arm: what was before is not compared."""
    num_drafted: int = 0
    """The candidate's streams in which a draft was tried ..."""
    num_drafted_control: int = 0
    """... and the control's."""

    def add(self, stream: ServedStream, now: float, *, is_candidate: bool) -> None:
        """A stream that was drawn for one of the two and ended now; not one that another version drafted for."""
        if stream.draft_version not in ("", self.candidate if is_candidate else self.control):
            return  # it began before the trial, or its draft worker had not taken up the plan
        if stream.num_steps < 1:
            return
        arm = is_candidate
        self.num += arm
        if sum(stream.tested) > 0:
            self.num_drafted += arm
            self.num_drafted_control += not arm
            self.drafted_since = now if self.drafted_since is None else self.drafted_since
        if self.drafted_since is None:
            return
        self.steps.add(is_candidate=arm, y=float(stream.num_tokens), x=float(stream.num_steps))
        if stream.num_tokens > 1 and stream.seconds > 0:
            self.times.add(is_candidate=arm, y=stream.seconds, x=float(stream.num_tokens - 1))
            self.gaps.add(is_candidate=arm, y=stream.max_gap_s, x=1.0)

    @property
    def is_weak(self) -> bool:
        """Drafts were hardly tried: that the arms are alike says nothing of the candidate."""
        return self.num_drafted < FEW_STREAMS

    @property
    def evidence(self) -> str:
        """How much was tried, in words."""
        return f"drafts were tried in {self.num_drafted or 'none'} of its {self.num} streams"

    @property
    def mean(self) -> float:
        """Of tokens per step, candidate / control - 1; NaN while there is nothing to compare."""
        return self.steps.candidate.value / self.steps.control.value - 1 if self.steps.control.y else math.nan

    @property
    def gain(self) -> Interval | None:
        """Of tokens per step."""
        return self.steps.interval()

    def verdict(self) -> tuple[Verdict, str]:
        """What is certain by now."""
        times, gaps, gain = self.times.interval(), self.gaps.interval(), self.gain
        if times is not None and times.lo > SLOWER:
            return "worse", f"its tokens take {times.mean:.1%} longer, surely more than {SLOWER:.0%}"
        if gaps is not None and gaps.lo > LONGER_GAP:
            return "worse", f"its longest gaps are {gaps.mean:.0%} longer, surely more than {LONGER_GAP:.0%}"
        if gain is not None and gain.hi < 0:
            return "worse", f"its tokens per step are {-gain.mean:.1%} fewer, surely {-gain.hi:.1%}"
        if gain is not None and gain.lo > 0:
            return "better", f"its tokens per step are {gain.mean:.1%} more, surely {gain.lo:.1%}"
        return "open", f"{self.num} streams do not tell yet"

    def view(self) -> dict[str, Any]:
        """All three comparisons, and how much of them drafts had a part in."""
        return {
            "candidate": self.candidate,
            "control": self.control,
            "began": self.began,
            "num_requests": self.num,
            "num_drafted": self.num_drafted,
            "num_drafted_control": self.num_drafted_control,
            "is_weak": self.is_weak,
            "saving": self.gain.view() if self.gain else None,
            "tokens_per_step": self.steps.view(),
            "seconds_per_token": self.times.view(),
            "longest_gap_s": self.gaps.view(),
        }
