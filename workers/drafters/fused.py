"""Several drafters' trees -> one tree for each stream, cut to what pays; acceptance -> whom to ask next.

Without a controller this is the plain twin: everybody is asked in every step and all of it is verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.cluster.controller import Controller
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree, fuse
from paceline.workers.drafters.base import Drafter, Outcome


class FusedDrafter(Drafter):
    """A drafter made of drafters, in the order in which they are asked: free ones first, waiting ones last."""

    name = "fused"

    def __init__(
        self,
        drafters: Sequence[Drafter],
        controller: Controller | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafters = list(drafters)
        self._controller = controller
        self._clock = clock
        self._asked = {drafter.name for drafter in drafters}
        self._waited: dict[str, float] = {}

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
            controller, num = self._controller, len(streams)
            self._asked = {d.name for d in self._drafters if controller.should_ask(d.name, num)}
        for drafter in self._drafters:
            if drafter.name in self._asked:
                drafter.observe(streams)

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        self._waited = {}
        found: list[list[Tree]] = [[] for _ in streams]
        for drafter in self._drafters:
            if drafter.name not in self._asked:
                continue
            began = self._clock()
            for index, tree in enumerate(drafter.propose(streams)):
                if tree is not None and len(tree) > 1:
                    found[index].append(tree)
            self._waited[drafter.name] = self._clock() - began
        fused = [fuse(trees) if trees else None for trees in found]
        return fused if self._controller is None else self._controller.choose(fused)

    def learn(self, outcomes: Sequence[Outcome], num_rows: int, seconds: float) -> None:
        if self._controller is None:
            return
        self._controller.cost.observe(num_rows, seconds)
        gained: dict[int, int] = {}
        for outcome in outcomes:
            if outcome.tree is not None:
                self._controller.verified(outcome.tree, outcome.path)
                for node in outcome.path:
                    source = int(outcome.tree.sources[node])
                    gained[source] = gained.get(source, 0) + 1
        for drafter in self._drafters:
            if drafter.name in self._waited:
                share = float(gained.get(drafter.source, 0))
                self._controller.asked(drafter.name, self._waited[drafter.name], share, len(outcomes))
        self._waited = {}
