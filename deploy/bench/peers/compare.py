"""Two greedy texts of one request -> the same, first different at a near-tie, or different, and by how much.

Two implementations of one float32 model add in different orders, so their logits differ in the last digits. Where the
two best tokens are closer than that, either may come first, and what follows differs as a matter of course. Hence only
the first difference counts, and the judge says how far apart the two tokens were there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.cluster.types import Request
from paceline.deploy.bench.check import Judge

NEAR_TIE = 1e-3
"""Of logits: what the order of additions, and another's exponential, move in models of this size; ours stay within 1e-5."""


@dataclass(slots=True)
class Agreement:
    """Counts over one contest."""

    num_requests: int = 0
    num_same: int = 0
    num_near_ties: int = 0
    widest_near_tie: float = 0.0
    different: list[str] = field(default_factory=list)
    """Requests whose first difference is no near-tie, with position and gap."""

    def compare(self, judge: Judge, request: Request, ours: Sequence[int], theirs: Sequence[int]) -> None:
        """One request; the judge is asked only if the texts differ."""
        self.num_requests += 1
        if list(ours) == list(theirs):
            self.num_same += 1
            return
        at = first_difference(ours, theirs)
        if at >= min(len(ours), len(theirs)):
            self.different.append(f"{request.id}: {len(theirs)} tokens for {len(ours)}")
            return
        scores = judge.scores(request, list(ours[: at + 1]))[at]
        gap = abs(float(scores[ours[at]] - scores[theirs[at]]))
        if gap < NEAR_TIE:
            self.num_near_ties += 1
            self.widest_near_tie = max(self.widest_near_tie, gap)
        else:
            self.different.append(f"{request.id}: token {at}, {gap:.2g} apart")


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length if one begins the other."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
