"""Several drafters' trees -> one tree for each stream, cut to what pays; acceptance -> whom to ask next.

Without a controller this is the plain twin: everybody is asked in every step and all of it is verified. With one, a
step in which nobody is asked costs a few comparisons.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.cluster.controller import Controller
from paceline.cluster.metrics import Metrics
from paceline.cluster.referee import Asked
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree, fuse
from paceline.cluster.types import SOURCE_DRAFT
from paceline.workers.drafters.base import Drafter, Outcome

_PLAIN_STEPS = 8
"""Of so many steps while drafting is off, one is told to the table of step costs."""


def choices(drafters: Sequence[Drafter]) -> tuple[Asked, ...]:
    """What a referee may choose from beside nobody."""
    is_free = {drafter.is_free for drafter in drafters}
    models = (Asked.MODELS,) if False in is_free else ()
    return (*((Asked.FREE,) if len(is_free) == 2 else ()), Asked.EVERYBODY, *models)


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
        self._weights = {drafter.name: (drafter.weights, drafter.beside) for drafter in drafters}
        self._found: dict[str, _Found] = {}
        """By stream: what was proposed for its next step."""
        self._asked: dict[str, set[str] | None] = {drafter.name: None for drafter in drafters}
        """Drafters to wait for in the next step, and the streams they were told of; None means all."""
        self._spent: dict[str, float] = {}
        """Seconds that each drafter asked for this step has taken."""
        self._trust: dict[str, _Trust] = {drafter.name: _Trust() for drafter in drafters if drafter.is_free}
        self._decided: set[str] = set()
        """Streams for which was decided whom to ask for the next step."""
        self._num_plain = 0
        """Steps since somebody might be asked."""
        self._num_drafting = 0
        """Streams of this step that want drafts."""
        self._num_others = 0
        """Streams of the last step that wanted no drafts; the next will have about as many."""
        self._may_ask = Asked.EVERYBODY
        """What the controller's referee said of the next step."""
        self._is_overruled = False
        """Somebody is asked in the next step of whom the referee said no: it says nothing of what the referee compares."""
        self._began = 0.0
        """When this step's drafts were asked for ..."""
        self._before_s = 0.0
        """... and the seconds that were spent on them before, at the end of the last one."""

    def open(self, stream: Stream) -> None:
        for drafter in self._drafters:
            drafter.open(stream)

    def close(self, stream: Stream) -> None:
        self._found.pop(stream.key, None)
        if self._controller is not None:
            self._controller.close(stream.key)
        for drafter in self._drafters:
            drafter.close(stream)

    def proposed(self, stream: Stream) -> Tree | None:
        """Before trees were merged and cut: a node that two sources propose carries the name of one."""
        trees = self._trees(stream)
        return next(
            (trees[d.name] for d in self._drafters if d.source == SOURCE_DRAFT and d.name in trees), None
        )

    def version(self, stream: Stream) -> str:
        return next((v for d in self._drafters if (v := d.version(stream))), "")

    # -- between two steps -------------------------------------------------------------------------------

    def observe(self, streams: Sequence[Stream]) -> None:
        """Decide who drafts for the next step; only they are told what is new (the others catch up later)."""
        self._spent, self._found = {}, {}
        if self._controller is None:
            for drafter in self._drafters:
                drafter.observe(streams)
            return
        began = self._clock()
        self._notice(self._controller)
        self._asked = {}
        self._decided = {stream.key for stream in streams}
        referee = self._controller.referee
        if referee is not None:
            self._may_ask = referee.may_ask(len(streams) + self._num_others)
        self._ask_early(self._controller, streams)
        self._before_s = self._clock() - began

    def _ask_early(self, controller: Controller, streams: Sequence[Stream]) -> None:
        """Decide for which streams each drafter is asked; free ones answer at once."""
        self._is_overruled = False
        if self._may_ask == Asked.MODELS:
            for drafter in self._drafters:
                if not drafter.is_free:
                    self._asked[drafter.name] = set(self._decided)
                    drafter.observe(streams)
            return
        for drafter in sorted(self._drafters, key=lambda drafter: not drafter.is_free):
            may_be_asked = self._may_ask >= (Asked.FREE if drafter.is_free else Asked.EVERYBODY)
            candidates = streams if may_be_asked else self._on_trial(drafter, streams)
            if not candidates:
                continue
            keys = [stream.key for stream in candidates]
            found = [self._expected(stream) for stream in candidates]
            num_others = self._num_others + len(streams) - len(candidates)
            asked = controller.ask_for(
                drafter.name, keys, found, num_others, is_free=drafter.is_free, is_gift=not may_be_asked
            )
            wanted = [candidates[index] for index in asked]
            if not wanted:
                continue
            self._is_overruled |= not may_be_asked
            self._asked[drafter.name] = {stream.key for stream in wanted}
            if drafter.is_free:
                self._ask(drafter, wanted)
            else:
                drafter.observe(wanted)

    def _on_trial(self, drafter: Drafter, streams: Sequence[Stream]) -> Sequence[Stream]:
        """Streams that a version beside the live one drafts for, or may: nobody has been told whose they are.

        What the clock says of drafting it says of the live version. A canary that nobody asks would never show that it
        is better, so its streams are judged by what they bring themselves.
        """
        if not drafter.beside:
            return ()
        beside = drafter.beside.split(",")
        return [s for s in streams if (version := drafter.version(s)) in beside or not version]

    def _notice(self, controller: Controller) -> None:
        """Drafters whose weights changed begin anew: a better draft is not kept waiting for the old one's sake."""
        for drafter in self._drafters:
            before, now = self._weights[drafter.name], (drafter.weights, drafter.beside)
            if now == before:
                continue
            self._weights[drafter.name] = now
            if now[0] != before[0]:
                controller.reset(drafter.name, drafter.source)
            elif controller.referee is not None:
                controller.referee.retry()

    def _expected(self, stream: Stream) -> float:
        """Tokens that the next step will accept by what is found so far."""
        found = self._found.get(stream.key)
        if found is None or found.num_tokens != stream.num_tokens:
            return 0.0
        return max(
            (self._trust[name].share * _chances(tree) for name, tree in found.trees.items()), default=0.0
        )

    # -- a step ------------------------------------------------------------------------------------------

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        self._num_drafting = len(streams)
        self._began = self._clock()
        if not self._asked:
            return [None] * len(streams)
        for drafter in self._drafters:
            if drafter.name not in self._asked:
                continue
            told = self._asked[drafter.name]
            wanted = [s for s in streams if told is None or s.key in told or s.key not in self._decided]
            self._ask(drafter, [s for s in wanted if not self._has_asked(drafter, s)])
        trees = [self._trees(stream) for stream in streams]
        fused = [fuse(list(found.values())) if found else None for found in trees]
        if self._controller is None or not any(trees):
            return fused
        began = self._clock()
        believed = [self._controller.is_trial(stream.key) for stream in streams]
        chosen = self._controller.choose(fused, self._num_others, believed)
        self._spend_on_all(self._clock() - began)
        return chosen

    def _ask(self, drafter: Drafter, streams: Sequence[Stream]) -> None:
        """Keep a drafter's trees for these streams."""
        if not streams:
            return
        began = self._clock()
        num_drafted = 0
        for stream, tree in zip(streams, drafter.propose(streams), strict=True):
            found = self._found.get(stream.key)
            if found is None or found.num_tokens != stream.num_tokens:
                found = self._found[stream.key] = _Found(stream.num_tokens)
            found.asked.add(drafter.name)
            if tree is not None and len(tree) > 1:
                found.trees[drafter.name] = tree
                num_drafted += tree.num_drafted
        seconds = self._clock() - began
        self._spent[drafter.name] = self._spent.get(drafter.name, 0.0) + seconds
        self._seconds[drafter.name].inc(seconds)
        if num_drafted:
            self._drafted[drafter.name].inc(num_drafted)

    def _has_asked(self, drafter: Drafter, stream: Stream) -> bool:
        found = self._found.get(stream.key)
        return found is not None and found.num_tokens == stream.num_tokens and drafter.name in found.asked

    def _trees(self, stream: Stream) -> dict[str, Tree]:
        found = self._found.get(stream.key)
        return found.trees if found is not None and found.num_tokens == stream.num_tokens else {}

    def _spend_on_all(self, seconds: float) -> None:
        """Time for which there is no reason but that somebody was asked: each of them must be worth it.

        Free ones only where nobody else was: they would be asked all the same.
        """
        waited_for = [name for name in self._spent if name not in self._trust]
        for name in waited_for or self._spent:
            self._spent[name] += seconds

    # -- what came of it ---------------------------------------------------------------------------------

    def learn(self, outcomes: Sequence[Outcome], num_rows: int, seconds: float) -> None:
        controller = self._controller
        if controller is None or not outcomes:
            return
        # Steps in which prompts were computed say nothing of others with as many rows.
        is_plain = num_rows == sum(1 if outcome.tree is None else len(outcome.tree) for outcome in outcomes)
        if is_plain and self._tells_cost():
            controller.cost.observe(num_rows, seconds)
        num_drafting, self._num_drafting = self._num_drafting, 0
        self._num_others = len(outcomes) - num_drafting
        if self._spent:
            self._settle(controller, outcomes)
        if num_drafting and is_plain and controller.referee is not None and not self._is_overruled:
            whole_s = self._before_s + self._clock() - self._began
            num_tokens = sum(1 + len(outcome.path) for outcome in outcomes)
            controller.referee.stepped(len(outcomes), num_tokens, whole_s, self._may_ask)
        self._before_s = 0.0

    def _tells_cost(self) -> bool:
        """Where drafting is off steps are all alike, and short: what is learnt of each must not cost a part of it."""
        self._num_plain = 0 if self._may_ask or self._asked else self._num_plain + 1
        return self._num_plain % _PLAIN_STEPS == 0

    def _settle(self, controller: Controller, outcomes: Sequence[Outcome]) -> None:
        """Each source's balance of the step."""
        began = self._clock()
        verified = [(outcome.tree, outcome.path) for outcome in outcomes if outcome.tree is not None]
        controller.verified([tree for tree, _ in verified], [path for _, path in verified])
        if self._may_ask == Asked.MODELS:  # nobody chose: there is no balance to keep
            self._spent = {}
            return
        gained: dict[str, dict[str, float]] = {name: {} for name in self._spent}
        for outcome in outcomes:
            found = self._found.get(outcome.stream.key)
            if found is None:
                continue
            accepted = [] if outcome.tree is None else outcome.tree.tokens[list(outcome.path)].tolist()
            for name in found.asked & gained.keys():
                tree = found.trees.get(name)
                covered = 0 if tree is None else tree.common(accepted)
                gained[name][outcome.stream.key] = covered
                if tree is not None and name in self._trust:
                    self._trust[name].learn(_chances(tree), covered)
        self._spend_on_all(self._clock() - began)
        for name, spent in self._spent.items():
            controller.asked(name, spent, gained[name], is_free=name in self._trust)
        self._spent = {}


@dataclass(slots=True)
class _Found:
    """What was proposed for the step behind a stream's first `num_tokens` tokens, and by whom; `asked` may be silent."""

    num_tokens: int
    trees: dict[str, Tree] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Trust:
    """How much of what a free source's scores promise comes true; half, until it is known."""

    promised: float = 8.0
    kept: float = 4.0

    @property
    def share(self) -> float:
        return self.kept / self.promised

    def learn(self, promised: float, kept: float) -> None:
        """The last few dozen drafts count."""
        self.promised += promised - 0.03 * (self.promised - 8.0)
        self.kept += kept - 0.03 * (self.kept - 4.0)


def _chances(tree: Tree) -> float:
    """Accepted tokens that a tree's own scores promise."""
    return float(tree.path_products()[1:].sum())
