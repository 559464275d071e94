"""Several drafters' trees -> one tree for each stream, cut to what pays; acceptance -> whom to ask next.

Without a controller this is the plain twin: everybody is asked in every step and all of it is verified. With one, a
step in which nobody is asked costs a few comparisons.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.cluster.controller import Controller
from paceline.cluster.metrics import Metrics
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree, fuse
from paceline.cluster.types import SOURCE_NAMES
from paceline.workers.drafters.base import Drafter, Outcome


class FusedDrafter(Drafter):
    """A drafter made of drafters, in the order in which they are asked: free ones first, waiting ones last."""

    name = "fused"

    def __init__(
        self,
        drafters: Sequence[Drafter],
        controller: Controller | None = None,
        *,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafters = list(drafters)
        self._controller = controller
        self._clock = clock
        metrics = metrics or Metrics()
        self._drafted = {drafter.name: metrics.drafted.labels(drafter.name) for drafter in drafters}
        self._seconds = {drafter.name: metrics.draft_seconds.labels(drafter.name) for drafter in drafters}
        self._weights = {drafter.name: drafter.weights for drafter in drafters}
        self._asked = {drafter.name for drafter in drafters}
        self._waited: dict[str, float] = {}
        self._num_drafting = 0
        """Streams that were asked for in this step."""
        self._num_others = 0
        """Streams of the last step that wanted no drafts; the next will have about as many."""

    def open(self, stream: Stream) -> None:
        for drafter in self._drafters:
            drafter.open(stream)

    def close(self, stream: Stream) -> None:
        for drafter in self._drafters:
            drafter.close(stream)

    def version(self, stream: Stream) -> str:
        return next((v for d in self._drafters if (v := d.version(stream))), "")

    def observe(self, streams: Sequence[Stream]) -> None:
        """Decide who drafts for the next step; only they are told what is new (the others catch up later)."""
        if self._controller is not None:
            self._notice(self._controller)
            controller, num, others = self._controller, len(streams), self._num_others
            self._asked = {d.name for d in self._drafters if controller.should_ask(d.name, num, others)}
        for drafter in self._drafters:
            if drafter.name in self._asked:
                drafter.observe(streams)

    def _notice(self, controller: Controller) -> None:
        """Drafters whose weights changed begin anew: a better draft is not kept waiting for the old one's sake."""
        for drafter in self._drafters:
            if (weights := drafter.weights) != self._weights[drafter.name]:
                self._weights[drafter.name] = weights
                controller.reset(drafter.name, drafter.source)

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        self._waited = {}
        self._num_drafting = len(streams)
        if not self._asked:
            return [None] * len(streams)
        found: list[list[Tree]] = [[] for _ in streams]
        for drafter in self._drafters:
            if drafter.name in self._asked:
                self._ask(drafter, streams, found)
        fused = [fuse(trees) if trees else None for trees in found]
        return fused if self._controller is None else self._controller.choose(fused, self._num_others)

    def _ask(self, drafter: Drafter, streams: Sequence[Stream], found: list[list[Tree]]) -> None:
        """Add one drafter's trees to those of each stream."""
        began = self._clock()
        num_drafted = 0
        for index, tree in enumerate(drafter.propose(streams)):
            if tree is not None and len(tree) > 1:
                found[index].append(tree)
                num_drafted += tree.num_drafted
        self._waited[drafter.name] = seconds = self._clock() - began
        self._seconds[drafter.name].inc(seconds)
        if num_drafted:
            self._drafted[drafter.name].inc(num_drafted)

    def learn(self, outcomes: Sequence[Outcome], num_rows: int, seconds: float) -> None:
        if self._controller is None or not outcomes:
            return
        self._controller.cost.observe(num_rows, seconds)
        num_drafting, self._num_drafting = self._num_drafting, 0
        self._num_others = len(outcomes) - num_drafting
        if not self._waited:
            return
        gained = [0] * len(SOURCE_NAMES)
        trees: list[Tree] = []
        paths: list[tuple[int, ...]] = []
        for outcome in outcomes:
            if outcome.tree is not None:
                trees.append(outcome.tree)
                paths.append(outcome.path)
                for node in outcome.path:
                    gained[outcome.tree.sources[node]] += 1
        self._controller.verified(trees, paths)
        for drafter in self._drafters:
            if drafter.name in self._waited:
                waited, share = self._waited[drafter.name], float(gained[drafter.source])
                self._controller.asked(drafter.name, waited, share, num_drafting, self._num_others)
        self._waited = {}
