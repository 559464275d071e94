"""Candidates, what draft workers hold, streams served -> which version drafts for whom, and every change with its reason.

    offered -> preparing -> canary -> live, watched -> kept
                  |            |           `-> rolled back, frozen
                  |            `-> rolled back, frozen
                  `-> aborted: a draft worker refused it, or its canary showed nothing

Each tag has a lane of its own with one live version; "" is the lane of all streams whose tags have none. A version
takes part only when every draft worker holds it. One lane at a time shares its streams between two versions: with the
candidate a small share, while a promoted version is watched the same share stays with its predecessor. So both
comparisons are between streams of the same time, and a changed mix of traffic moves neither.

Both count from the first stream on in which a draft was tried. While drafting is off they wait, up to `PATIENCE` times as
long; then a candidate that passed the gate goes live on the gate's word, and what is said of it says so.

Nothing here reads a clock, draws a number or sends a message; time is an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.cluster.learning.config import RolloutConfig
from paceline.cluster.learning.routing import place, version_for
from paceline.cluster.learning.trial import FEW_STREAMS, NOT_WORSE, Trial
from paceline.cluster.learning.views import LaneView
from paceline.cluster.types import DraftPlan, DraftRef, ServedStream

Stage = Literal["steady", "preparing", "canary", "watch"]
ChangeKind = Literal[
    "preparing",
    "canary",
    "promoted",
    "kept",
    "rolled_back",
    "rejected",
    "aborted",
    "pinned",
    "unpinned",
    "dropped",
]

PREPARE_S = 120.0
"""For all draft workers to load a version."""
_LONGEST_BACKOFF = 64.0
"""In times of `backoff_s`."""
PATIENCE = 3.0
"""Times the configured length that a canary or a watch may last while there is next to no evidence."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something happened to a version; what the registry keeps and charts mark."""

    kind: ChangeKind
    tag: str
    version: str
    reason: str
    other: str = ""
    """The version it took over from, or that is live instead."""
    actor: str = "loop"
    was_live: bool = False
    """When it was rolled back: not out of a canary."""


@dataclass(slots=True)
class Lane:
    """One tag's version and what is being tried in its place."""

    tag: str
    live: str
    live_since: float = 0.0
    live_by: str = "loop"
    previous: str = ""
    """That was live before; what a roll-back goes to."""
    stage: Stage = "steady"
    candidate: str = ""
    goal: Literal["canary", "live"] = "canary"
    """What the candidate is prepared for."""
    actor: str = "loop"
    """Who asked for it."""
    since: float = 0.0
    """Of the stage."""
    is_pinned: bool = False
    frozen_until: float = 0.0
    num_rollbacks: int = 0
    """In a row."""
    trial: Trial | None = None
    reason: str = ""
    has_own: bool = True
    """False: its streams get everybody's version so far, which `live` is then."""
    had_own: bool = True
    """The same of `previous`."""

    def settle(self, now: float, reason: str) -> None:
        self.stage, self.candidate, self.trial, self.since, self.reason = "steady", "", None, now, reason

    def save(self) -> dict[str, Any]:
        """What the registry's versions do not say."""
        return {
            "live": self.live,
            "live_since": self.live_since,
            "live_by": self.live_by,
            "previous": self.previous,
            "candidate": self.candidate,
            "goal": self.goal,
            "actor": self.actor,
            "watch_since": self.since if self.stage == "watch" else 0.0,
            "is_pinned": self.is_pinned,
            "frozen_until": self.frozen_until,
            "num_rollbacks": self.num_rollbacks,
            "has_own": self.has_own,
            "had_own": self.had_own,
        }

    @classmethod
    def load(cls, tag: str, saved: Mapping[str, Any], now: float) -> Lane:
        """A canary and a watch begin anew: what was counted is gone. A candidate is prepared again."""
        lane = cls(tag, str(saved["live"]))
        for name in _SAVED:
            setattr(lane, name, saved.get(name, getattr(lane, name)))
        lane.since = now
        if saved.get("candidate"):
            lane.stage, lane.candidate = "preparing", str(saved["candidate"])
        elif saved.get("watch_since") and lane.previous:
            lane.stage, lane.since = "watch", float(saved["watch_since"])
            lane.trial = Trial(lane.live, lane.previous, now)
        return lane


_SAVED = ("live_since", "live_by", "previous", "goal", "actor", "is_pinned", "frozen_until", "num_rollbacks", "has_own", "had_own")  # fmt: skip


def _since(then: float | None, now: float) -> float:
    return 0.0 if then is None else now - then


class Refused(Exception):
    """What was asked for cannot be done now; the message says why."""


class Rollout:
    """All lanes. Methods return what changed, in order; nothing changed if the list is empty."""

    def __init__(self, config: RolloutConfig, live: str, now: float) -> None:
        """`live` drafts for everybody at first: the configuration's draft."""
        self.config = config
        self.lanes: dict[str, Lane] = {"": Lane("", live, live_since=now, since=now)}

    @property
    def default(self) -> Lane:
        return self.lanes[""]

    def lane(self, tag: str) -> Lane:
        """A tag's lane; where it has none, one like everybody's that is not kept yet."""
        found = self.lanes.get(tag)
        return found or Lane(tag, self.default.live, live_since=self.default.live_since, has_own=False)

    @property
    def shared(self) -> Lane | None:
        """The lane whose streams are shared between two versions now."""
        return next((ln for ln in self.lanes.values() if ln.stage == "canary" or self._holds_back(ln)), None)

    def _holds_back(self, lane: Lane) -> bool:
        return lane.stage == "watch" and lane.trial is not None and self.config.canary_share > 0

    # -- what the loop and operators ask for -------------------------------------------------------------

    def offer(self, version: str, tag: str, now: float, *, actor: str = "loop", goal: Literal["canary", "live"] = "canary") -> list[Change]:  # fmt: skip
        """Prepare a version: for a canary, or to be live as soon as all hold it.

        Raises:
            Refused: the lane is pinned or frozen (to the loop), or it already has a candidate; the version is live.
        """
        lane = self.lane(tag)
        if version == lane.live:
            raise Refused(f"{version} is live already")
        if actor == "loop":
            self._check_free(lane, now)
        if lane.stage in ("preparing", "canary") and (goal == "canary" or lane.candidate != version):
            raise Refused(f"{lane.candidate} is in {lane.stage}: roll it back first")
        changes = [] if lane.stage != "watch" else [self._keep(lane, now, "another candidate comes up")]
        self.lanes[tag] = lane
        lane.stage, lane.candidate, lane.goal, lane.actor = "preparing", version, goal, actor
        lane.since, lane.trial, lane.reason = now, None, "draft workers load it"
        return [*changes, Change("preparing", tag, version, lane.reason, lane.live, actor)]

    def _check_free(self, lane: Lane, now: float) -> None:
        if lane.is_pinned:
            raise Refused(f"{lane.live} is pinned: nothing automatic changes it")
        if now < lane.frozen_until:
            raise Refused(f"frozen for {lane.frozen_until - now:.0f} s more, after a roll-back")

    def roll_back(self, tag: str, now: float, *, reason: str, actor: str = "loop") -> list[Change]:
        """End a lane's candidate if it has one, else go back to the version before.

        Raises:
            Refused: there is neither; or it is pinned and it was the loop who asked.
        """
        lane = self.lanes.get(tag)
        if lane is None or not (lane.has_own or lane.candidate):
            raise Refused(f"tag {tag!r} has no version of its own")
        if lane.stage in ("preparing", "canary"):
            return [self._end_candidate(lane, now, reason, actor, is_bad=lane.stage == "canary")]
        if not lane.previous:
            raise Refused(f"{lane.live} has no version before it")
        if lane.is_pinned and actor == "loop":
            raise Refused(f"{lane.live} is pinned: nothing automatic changes it")
        return [self._take_back(lane, now, reason, actor)]

    def pin(self, tag: str, *, actor: str) -> list[Change]:
        """Nothing automatic changes the lane's version from now on; a candidate on its way ends."""
        lane = self._with_own(tag)
        lane.is_pinned = True
        return [Change("pinned", tag, lane.live, "pinned by an operator", actor=actor)]

    def unpin(self, tag: str, *, actor: str) -> list[Change]:
        lane = self._with_own(tag)
        lane.is_pinned = False
        return [Change("unpinned", tag, lane.live, "unpinned by an operator", actor=actor)]

    def _with_own(self, tag: str) -> Lane:
        lane = self.lanes.get(tag)
        if lane is None or not lane.has_own:
            raise Refused(f"tag {tag!r} has no version of its own")
        return lane

    def drop(self, version: str, base: str, now: float, *, reason: str, actor: str) -> list[Change]:
        """A version must not serve any more: whoever has it gets the one before, or the configuration's draft."""
        changes: list[Change] = []
        for lane in list(self.lanes.values()):
            if lane.candidate == version:
                changes.append(self._end_candidate(lane, now, reason, actor, is_bad=False))
            if lane.previous == version:
                lane.previous = base if lane.live != base else ""
                if lane.stage == "watch":
                    lane.settle(now, reason)
            if lane.live == version and lane.has_own:
                self._go_back(lane, lane.previous or base, now, reason, actor)
                changes.append(Change("dropped", lane.tag, version, reason, lane.live, actor))
        self._follow_default(now)
        return changes

    def restart(self, base: str, now: float, reason: str) -> list[Change]:
        """Another target is served: no version was trained for it but the configuration's draft."""
        changes = [
            Change("dropped", lane.tag, lane.live, reason, base)
            for lane in self.lanes.values()
            if lane.live != base and lane.has_own
        ]
        self.lanes = {"": Lane("", base, live_since=now, since=now, reason=reason)}
        return changes

    # -- what happens ------------------------------------------------------------------------------------

    def served(self, streams: Iterable[ServedStream], plan: DraftPlan, now: float) -> list[Change]:
        """Streams that ended, under the plan that is in force -> what is certain by now is done at once."""
        lane = self.shared
        if lane is not None and lane.trial is not None and plan.canary:
            trial = lane.trial
            for stream in streams:
                if self._tag_of(stream, plan) == lane.tag:
                    drawn = version_for(plan, stream.request_id, stream.tenant, stream.domain)
                    if drawn in (trial.candidate, trial.control):
                        trial.add(stream, now, is_candidate=drawn == trial.candidate)
        return [change for lane in list(self.lanes.values()) for change in self._judge(lane, now)]

    @staticmethod
    def _tag_of(stream: ServedStream, plan: DraftPlan) -> str:
        mine = (f"tenant:{stream.tenant}", f"domain:{stream.domain}")
        return next((tag for tag, _ in plan.routes if tag in mine), "")

    def advance(self, loaded: Collection[str], refused: Mapping[str, str], now: float) -> list[Change]:
        """`loaded`: versions that every draft worker holds; `refused`: by version, the reason of one that will not."""
        changes: list[Change] = []
        for lane in list(self.lanes.values()):
            version = lane.candidate
            if version and version in refused:
                why = f"a draft worker refused it: {refused[version]}"
                changes.append(self._end_candidate(lane, now, why, "loop", is_bad=lane.stage == "canary"))
            elif lane.stage == "preparing" and version in loaded:
                changes += self._begin(lane, now)
            elif (
                lane.stage == "preparing" and now - lane.since > PREPARE_S and lane.reason.startswith("draft")
            ):
                why = f"not all draft workers held it after {PREPARE_S:.0f} s"
                changes.append(self._end_candidate(lane, now, why, "loop", is_bad=False))
            else:
                changes += self._judge(lane, now)
        return changes

    def _begin(self, lane: Lane, now: float) -> list[Change]:
        if lane.goal == "live" or self.config.canary_share == 0:
            return [self._promote(lane, now, "all draft workers hold it", lane.actor)]
        shared = self.shared
        if shared is not None:
            lane.reason = f"waits for the {shared.stage} of {shared.tag or 'all other streams'}"
            return []
        lane.stage, lane.since = "canary", now
        lane.trial = Trial(lane.candidate, lane.live, now)
        lane.reason = f"{self.config.canary_share:.0%} of streams get it"
        return [Change("canary", lane.tag, lane.candidate, lane.reason, lane.live, lane.actor)]

    def _judge(self, lane: Lane, now: float) -> list[Change]:
        if lane.trial is None or lane.stage not in ("canary", "watch"):
            return []
        verdict, why = lane.trial.verdict()
        if lane.stage == "watch":
            if verdict == "worse" and not lane.is_pinned:
                return [self._take_back(lane, now, why, "loop")]
            return self._end_watch(lane, lane.trial, now)
        if verdict == "worse":
            return [self._end_candidate(lane, now, why, "loop", is_bad=True)]
        if lane.is_pinned and lane.actor == "loop":
            return [self._end_candidate(lane, now, f"{lane.live} was pinned", "loop", is_bad=False)]
        done = self._is_enough(lane, lane.trial, verdict == "better", now)
        if done is None:
            lane.reason = (
                f"{lane.trial.num_drafted} of {self.config.canary_min_requests} drafted streams; {why}"
            )
            if lane.trial.is_weak and lane.trial.num >= FEW_STREAMS:
                lane.reason += f": {lane.trial.evidence}, it waits for more"
            return []
        end, words = done
        if end == "promote":
            return [self._promote(lane, now, why if verdict == "better" else words, lane.actor)]
        change = self._end_candidate(lane, now, words, "loop", is_bad=end == "bad")
        return [change if end == "bad" else replace(change, kind="aborted")]

    def _end_watch(self, lane: Lane, trial: Trial, now: float) -> list[Change]:
        """A promoted version is kept when drafts were tried in it for long enough, or hardly at all for too long."""
        waited, proven = now - lane.since, _since(trial.drafted_since, now)
        if waited >= PATIENCE * self.config.watch_s and trial.is_weak:
            words = f"weak evidence: {trial.evidence} in {waited:.0f} s"
            return [self._keep(lane, now, f"{words}; kept on the gate's word")]
        if proven >= self.config.watch_s and not trial.is_weak:
            return [self._keep(lane, now, f"not worse than {lane.previous} for {proven:.0f} s")]
        if waited >= self.config.watch_s:
            lane.reason = f"{trial.evidence} since it went live: it is watched for longer"
        return []

    def _is_enough(
        self, lane: Lane, trial: Trial, is_better: bool, now: float
    ) -> tuple[Literal["promote", "bad", "open"], str] | None:
        """Whether a canary that is not certainly worse may end, how, and why; None: it goes on."""
        gain, waited, proven = trial.gain, now - lane.since, _since(trial.drafted_since, now)
        if is_better:
            return "promote", ""
        if trial.num_drafted >= self.config.canary_min_requests and gain is not None and gain.mean >= 0:
            return "promote", f"{trial.num_drafted} drafted streams: {gain.mean:+.1%} tokens per step"
        if trial.num < FEW_STREAMS:
            return None
        if not trial.is_weak and proven >= self.config.canary_max_s:
            end: Literal["promote", "bad"] = "promote" if trial.mean >= NOT_WORSE else "bad"
            words = f"after {proven:.0f} s and {trial.num_drafted} drafted streams"
            return end, f"{words}: {trial.mean:+.1%} tokens per step"
        if not trial.is_weak or waited < PATIENCE * self.config.canary_max_s:
            return None
        words = f"weak evidence: {trial.evidence} in {waited:.0f} s"
        if trial.mean < NOT_WORSE:
            return "bad", f"{words}, with {trial.mean:+.1%} tokens per step"
        if lane.actor != "loop":
            return "open", f"{words}; an operator began it, and it waits for one to promote it"
        return "promote", f"{words}; it goes live on the gate's word"

    # -- changes -----------------------------------------------------------------------------------------

    def _promote(self, lane: Lane, now: float, reason: str, actor: str) -> Change:
        lane.previous, lane.live = lane.live, lane.candidate
        lane.had_own, lane.has_own = lane.has_own, True
        lane.live_since, lane.live_by = now, actor
        lane.stage, lane.candidate, lane.since, lane.reason = "watch", "", now, reason
        shared = self.shared
        # Another lane shares its streams now: this one goes without a control, and ends its watch unjudged.
        lane.trial = Trial(lane.live, lane.previous, now) if shared is None or shared is lane else None
        if lane.trial is None:
            lane.stage = "steady"
        self._follow_default(now)
        return Change("promoted", lane.tag, lane.live, reason, lane.previous, actor)

    def _keep(self, lane: Lane, now: float, reason: str) -> Change:
        lane.num_rollbacks = 0
        lane.settle(now, reason)
        return Change("kept", lane.tag, lane.live, reason, lane.previous)

    def _take_back(self, lane: Lane, now: float, reason: str, actor: str) -> Change:
        bad = lane.live
        self._go_back(lane, lane.previous, now, reason, actor)
        self._freeze(lane, now)
        self._follow_default(now)
        return Change("rolled_back", lane.tag, bad, reason, lane.live, actor, was_live=True)

    @staticmethod
    def _go_back(lane: Lane, to: str, now: float, reason: str, actor: str) -> None:
        lane.live, lane.previous, lane.is_pinned = to, "", False
        lane.has_own, lane.had_own = lane.had_own or not lane.tag, True
        lane.live_since, lane.live_by = now, actor
        lane.settle(now, reason)

    def _follow_default(self, now: float) -> None:
        """What lanes have from everybody's lane is what that has now; what was counted against the old one is void."""
        default = self.default
        for lane in self.lanes.values():
            if not lane.has_own:
                lane.live, lane.live_since, lane.live_by = default.live, default.live_since, default.live_by
                if lane.trial is not None and lane.trial.control != lane.live:
                    lane.trial = Trial(lane.candidate, lane.live, now)
            elif not lane.had_own and lane.previous != default.live:
                lane.previous = default.live
                if lane.trial is not None:
                    lane.trial = Trial(lane.live, lane.previous, now)

    def _end_candidate(self, lane: Lane, now: float, reason: str, actor: str, *, is_bad: bool) -> Change:
        version, was = lane.candidate, lane.stage
        lane.settle(now, reason)
        if is_bad:
            self._freeze(lane, now)
        kind: ChangeKind = "rolled_back" if was == "canary" else "aborted"
        return Change(kind, lane.tag, version, reason, lane.live, actor)

    def _freeze(self, lane: Lane, now: float) -> None:
        """Twice as long after each further roll-back without a success in between."""
        lane.num_rollbacks += 1
        times = min(_LONGEST_BACKOFF, 2.0 ** (lane.num_rollbacks - 1))
        lane.frozen_until = now + times * self.config.backoff_s

    # -- what draft workers are told ---------------------------------------------------------------------

    def plan(
        self, revision: int, target: str, refs: Mapping[str, DraftRef], pool: Sequence[str] = ()
    ) -> DraftPlan:
        """Versions in use first, then as many of `pool` as there is room for.

        `refs` must know every version that a lane names.
        """
        needed = [v for lane in self.lanes.values() for v in (lane.live, lane.candidate)]
        needed += [lane.previous for lane in self.lanes.values()]
        wanted = list(dict.fromkeys(version for version in needed if version in refs))
        for version in pool:
            if len(wanted) < self.config.resident and version in refs and version not in wanted:
                wanted.append(version)
        shared = self.shared
        canary = canary_tag = ""
        if shared is not None:
            canary = shared.candidate if shared.stage == "canary" else shared.previous
            canary_tag = shared.tag
        routes = [
            (tag, lane.live) for tag, lane in self.lanes.items() if tag and (lane.has_own or lane is shared)
        ]
        # A tenant's own draft comes before one for what its requests are about.
        routes.sort(key=lambda route: (not route[0].startswith("tenant:"), route[0]))
        return DraftPlan(
            revision,
            target,
            tuple(refs[version] for version in wanted),
            self.default.live,
            canary,
            self.config.canary_share if canary else 0.0,
            tuple(routes),
            canary_tag,
        )

    def is_in_canary(self, request_id: str) -> bool:
        """Whether a request of the shared lane is drawn for the smaller share."""
        return place(request_id) < self.config.canary_share

    def views(self, now: float) -> list[LaneView]:
        """All lanes, everybody's first."""
        return [
            LaneView(
                tag=lane.tag,
                live=lane.live,
                live_since=lane.live_since,
                live_by=lane.live_by,
                previous=lane.previous,
                stage="frozen" if lane.stage == "steady" and now < lane.frozen_until else lane.stage,
                candidate=lane.candidate,
                since=lane.since,
                is_pinned=lane.is_pinned,
                frozen_until=lane.frozen_until,
                num_rollbacks=lane.num_rollbacks,
                test=lane.trial.view() if lane.trial else None,
                reason=lane.reason,
                has_own=lane.has_own,
            )
            for lane in self.lanes.values()
        ]
