"""Events (streams served, statuses, metrics, the operator, the clock) -> plans for draft workers and the trainer.

What is in force is decided here, in memory, and the registry follows. A restart takes its state from the registry; while that
does not answer nothing new begins, and workers keep what they have. Nothing in here waits for anything.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import structlog

from paceline.cluster.config import ClusterConfig
from paceline.cluster.learning import restoring, writes
from paceline.cluster.learning.config import LearningConfig
from paceline.cluster.learning.cycle import Cycle
from paceline.cluster.learning.drift import Drift
from paceline.cluster.learning.figures import Figures
from paceline.cluster.learning.guard import Guard
from paceline.cluster.learning.keeper import Keeper
from paceline.cluster.learning.ledger import Ledger
from paceline.cluster.learning.operator import Operator
from paceline.cluster.learning.rollout import Change, Rollout
from paceline.cluster.learning.runs import Runs
from paceline.cluster.learning.scrape import DecodeFigures
from paceline.cluster.learning.storing import Storing
from paceline.cluster.learning.views import Action, Alarm, Result, StatusView, VersionView, View
from paceline.cluster.metrics import Metrics
from paceline.cluster.registry.records import Version
from paceline.cluster.registry.registry import Registry
from paceline.cluster.types import (
    Directory,
    DraftPlan,
    DraftRef,
    DraftStatus,
    Served,
    Snapshot,
    TrainerPlan,
    TrainerStatus,
)

log = structlog.get_logger(__name__)

_GONE_S = 5.0
"""A worker that said nothing for so long is not there."""
_SECOND = 0.9
"""Between two looks at metrics."""
_SAVE_S = 10.0
_MAX_MARKS = 500
_POOL = 4
"""Versions that are compared when traffic drifts, and kept in memory where there is room."""


class LearningLoop:
    """Holds figures, drift, guard, ledger and rollout, and the registry. `Control.loop`; None where learning is off.

    All methods on the event loop's thread.
    """

    def __init__(
        self,
        config: ClusterConfig,
        registry: Registry,
        *,
        clock: Callable[[], float] = time.time,
        on_plan: Callable[[], None] = lambda: None,
        metrics: Metrics | None = None,
    ) -> None:
        """`clock` gives Unix seconds. `on_plan` is called when a plan changed: workers should hear of it at once."""
        self.metrics = metrics or Metrics("control")
        self.config = config
        self.learning = config.learning
        self.registry = registry
        self.clock = clock
        self._on_plan = on_plan
        self.keeper = Keeper(registry)
        self.figures = Figures()
        self.drifts: dict[str, Drift] = {"": Drift()}
        """By tag of a lane: of the streams that its live version drafts for."""
        self.guard = Guard(self.learning.guard, max_streams=config.decode.max_streams)
        self.decodes = DecodeFigures()
        self.ledger = Ledger(
            horizon_h=self.learning.horizon_h,
            margin=self.learning.min_return,
            max_steps=self.learning.train.max_steps,
            depth=config.speculation.depth,
        )
        self.runs = Runs()
        self.rollout: Rollout | None = None
        """None until the state of before is known."""
        self.target = self.base = ""
        """Versions of the target, and of the configuration's draft."""
        self.versions: dict[str, Version] = {}
        """All that could serve this target, by name."""
        self.is_paused = False
        self.marks: deque[dict[str, Any]] = deque(maxlen=_MAX_MARKS)
        self.alarms: dict[str, Alarm] = {}
        self.storing = Storing(self)
        self.cycle = Cycle(self)
        self._operator = Operator(self)
        self._directory = Directory(0, ())
        self._drafts: dict[str, tuple[float, DraftStatus]] = {}
        self._trainer: tuple[float, TrainerStatus] | None = None
        self._steps = 0
        """Of streams that ended since metrics were last looked at."""
        self._looked_at = self._saved_at = 0.0
        self._revision = 0
        self._plan: DraftPlan | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # -- life --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to restore what was, and to write what will be."""
        self.keeper.start()
        self._tasks = [
            asyncio.create_task(restoring.restore(self)),
            asyncio.create_task(self.storing.sweep_for_ever()),
        ]

    async def close(self) -> None:
        """Leave: what was decided is written first, if the registry answers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.rollout is not None:
            self.save()
        await self.keeper.close()

    def configure(self, learning: LearningConfig) -> None:
        """An operator changed settings: they count from now on."""
        self.learning = learning
        self.guard.configure(learning.guard)
        self.ledger.horizon_h, self.ledger.margin = learning.horizon_h, learning.min_return
        self.ledger.max_steps = learning.train.max_steps
        if self.rollout is not None:
            self.rollout.config = learning.rollout
            self.replan()

    # -- what others say ---------------------------------------------------------------------------------

    def on_served(self, message: Served) -> None:
        """Streams that ended. What they make certain is done at once."""
        now = self.clock()
        self.figures.add(message.items, now, message.num_left_out)
        self._steps += sum(stream.num_steps for stream in message.items)
        self.cycle.served(message.items)
        rollout = self.rollout
        if rollout is None or self._plan is None:
            return
        before = {lane.live: lane.previous for lane in rollout.lanes.values() if lane.previous}
        self.ledger.served(
            ((s.draft_version, s.domain, s.num_tokens, s.num_steps) for s in message.items),
            self.figures,
            before,
        )
        for tag, lane in rollout.lanes.items():
            mine = [
                s
                for s in message.items
                if s.draft_version == lane.live and self._is_in(tag, s.tenant, s.domain)
            ]
            drift = self.drifts.setdefault(tag, Drift())
            for found in drift.add(mine, now):
                since = time.strftime("%H:%M:%S", time.gmtime(found.since))
                text = f"acceptance in {found.domain or 'traffic without a domain'} fell by {found.by:.3f} since {since} UTC"
                log.info("drift", tag=tag, domain=found.domain, by=found.by)
                self.metrics.drifts.inc()
                self.mark("drift", lane.live, tag, text)
        self.apply(rollout.served(message.items, self._plan, now))

    def _is_in(self, tag: str, tenant: str, domain: str) -> bool:
        """Whether streams of these get their version from the tag's lane."""
        assert self.rollout is not None
        mine = (f"tenant:{tenant}", f"domain:{domain}")
        own = [t for t in mine if t in self.rollout.lanes and self.rollout.lanes[t].has_own]
        return tag == (own[0] if own else "")

    def on_draft_status(self, status: DraftStatus) -> None:
        """What a draft worker holds; the last one to hold a candidate lets it go on."""
        self._drafts[status.worker_id] = (self.clock(), status)
        if status.revision > self._revision and self._plan is not None:
            self._revision = status.revision  # another control was here, whose clock was ahead
            self.replan()
        self.advance()

    def on_trainer_status(self, status: TrainerStatus) -> None:
        """How far the trainer is."""
        self._trainer = (self.clock(), status)
        if self.rollout is not None:
            self.cycle.take(status)

    def on_directory(self, directory: Directory) -> None:
        """Who is there. All decode workers with another target than before: what was trained is for nobody."""
        self._directory = directory
        found = {
            w.version for w in directory.workers if w.role == "decode" and w.state == "ready" and w.version
        }
        if self.rollout is not None and len(found) == 1 and self.target not in found:
            self._retarget(found.pop())

    def on_worker_lost(self, worker_id: str) -> None:
        self._drafts.pop(worker_id, None)
        if self._trainer is not None and self._trainer[1].worker_id == worker_id:
            self._trainer = None

    def tick(self, snapshots: Sequence[Snapshot]) -> None:
        """Several times a second; `snapshots` are those of workers that still push."""
        now = self.clock()
        if now - self._looked_at >= _SECOND:
            self._looked_at = now
            level = self.guard.level
            self.guard.observe(snapshots, now)
            if self.guard.level != level:
                log.info("guard", level=self.guard.level, reason=self.guard.reason)
                self._on_plan()
            self.decodes.observe(snapshots)
            self.ledger.observe(self.decodes.engine_s, self._steps, now)
            self._steps = 0
            self.cycle.captured(self.decodes.captured)
            drafting = self.decodes.speculation(is_enabled=True)
            if self.config.speculation.enabled and drafting["num_workers"]:
                self.cycle.drafting(drafting["on"], drafting["reason"], now)
            self._look_for_alarms(now)
        self.advance()
        if self.rollout is None:
            return
        self.cycle.schedule(now)
        if now - self._saved_at >= _SAVE_S:
            self._saved_at = now
            self.save()
            self.cycle.keep_ledger()
            writes.figures(self.keeper, self.figures.finished(now))

    # -- rollout -----------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Let the rollout look at what draft workers hold now."""
        if self.rollout is None:
            return
        now = self.clock()
        holders = self.draft_workers(now)
        resident = [set(status.resident) for status in holders if status is not None]
        is_complete = bool(holders) and len(resident) == len(holders)
        loaded = set.intersection(*resident) if is_complete else set()
        refused = {v: f"{s.worker_id}: {why}" for s in holders if s is not None for v, why in s.refused}
        self.apply(self.rollout.advance(loaded, refused, now))

    def draft_workers(self, now: float) -> list[DraftStatus | None]:
        """Of each that is ready: what it said last; None if it said nothing lately."""
        ready = [w.worker_id for w in self._directory.workers if w.role == "draft" and w.state == "ready"]
        found = (self._drafts.get(worker_id) for worker_id in ready)
        return [entry[1] if entry is not None and now - entry[0] <= _GONE_S else None for entry in found]

    def apply(self, changes: Sequence[Change]) -> None:
        """Put changes of the rollout in force, tell the registry, mark the charts."""
        for change in changes:
            log.info(f"draft_{change.kind}", tag=change.tag, version=change.version, reason=change.reason)
            self._follow(change)
            self.metrics.draft_changes.labels(change.kind).inc()
            writes.change(self.keeper, change, self.clock())
        if changes:
            self.save()
            self.replan()

    def _follow(self, change: Change) -> None:
        marks = {"canary": "canary", "promoted": "promote", "rolled_back": "rollback", "dropped": "rollback"}
        if change.kind in marks:
            by = "" if change.actor == "loop" else f"by {change.actor}: "
            self.mark(marks[change.kind], change.version, change.tag, f"{by}{change.reason}")
        if change.kind in ("promoted", "rolled_back", "dropped"):
            live = change.version if change.kind == "promoted" else change.other
            self.ledger.serving(change.other if live == change.version else change.version, False)
            self.ledger.serving(live, True)
            if change.kind == "promoted" or change.was_live or change.kind == "dropped":
                self.mark("swap", live, change.tag, f"{live} drafts now")
                self.drifts[change.tag] = Drift()
        states = {
            "canary": "canary",
            "promoted": "live",
            "rolled_back": "rolled_back",
            "aborted": "candidate",
        }
        if change.kind in states:
            self.note(change.version, states[change.kind], change.reason)
        if change.kind == "promoted" and change.other and not self._serves(change.other):
            self.note(change.other, "retired", f"{change.version} took over")
        if change.kind in ("rolled_back", "dropped") and change.other:
            self.note(change.other, "live", f"{change.version} was taken back")

    def _serves(self, version: str) -> bool:
        assert self.rollout is not None
        return any(lane.live == version for lane in self.rollout.lanes.values())

    def note(self, version: str, state: Any, reason: str) -> None:
        """A version's state, as it is shown here."""
        if version in self.versions:
            known = self.versions[version]
            self.versions[version] = replace(known, state=state, reason=reason, changed=self.clock())

    def _retarget(self, target: str) -> None:
        assert self.rollout is not None
        log.warning("target_changed", before=self.target, now=target)
        before, self.target = self.target, target
        reason = f"the target is {target} now, not {before}"
        changes = self.rollout.restart(self.base, self.clock(), reason)
        self.versions = {
            v: known for v, known in self.versions.items() if v == self.base or known.target == target
        }
        self.drifts = {"": Drift()}
        base = replace(self.versions[self.base], target=target, state="live", reason=reason)
        self.versions[self.base] = base
        for change in changes:
            self.mark("rollback", change.version, change.tag, reason)
        writes.retarget(self.keeper, target, base)
        self.save()
        self.replan()

    def plan_changed(self) -> None:
        """The trainer should hear of it at once."""
        self._on_plan()

    # -- plans -------------------------------------------------------------------------------------------

    def replan(self) -> None:
        """Make the draft workers' plan anew; a larger revision only if something in it changed."""
        if self.rollout is None:
            return
        revision = max(self._revision + 1, round(self.clock() * 1000))
        new = self.rollout.plan(revision, self.target, self.refs(), self.pool())
        old = self._plan
        is_known = old is not None and old.revision >= self._revision
        if is_known and old == msgspec.structs.replace(new, revision=old.revision if old else 0):
            return
        self._plan, self._revision = new, revision
        self._on_plan()

    def refs(self) -> dict[str, DraftRef]:
        """Where each version's weights lie."""
        return {
            name: DraftRef(
                name, "" if name == self.base else known.url, "" if name == self.base else known.sha256
            )
            for name, known in self.versions.items()
        }

    def pool(self) -> list[str]:
        """Versions that drafted before, the newest first, and the configuration's."""
        served = sorted(
            (
                v
                for v in self.versions.values()
                if v.state in ("live", "retired") and (v.url or v.version == self.base)
            ),
            key=lambda known: -known.changed,
        )
        return list(dict.fromkeys([*(known.version for known in served[:_POOL]), self.base]))

    @property
    def draft_plan(self) -> DraftPlan | None:
        """For every draft worker, each second and whenever it changes; None: nobody knows yet, keep what you have."""
        return self._plan

    @property
    def trainer_plan(self) -> TrainerPlan | None:
        """For the trainer, in the same way."""
        if self.rollout is None:
            return None
        return TrainerPlan(self.cycle.revision(self.guard.level), self.guard.level, self.runs.order)

    # -- alarms, marks, memory ---------------------------------------------------------------------------

    def alarm(self, name: str, message: str) -> None:
        """Shown from now until it is called off with an empty message."""
        if not message:
            self.alarms.pop(name, None)
        elif name not in self.alarms or self.alarms[name].message != message:
            since = self.alarms[name].since if name in self.alarms else self.clock()
            self.alarms[name] = Alarm(name, since, message)

    def _look_for_alarms(self, now: float) -> None:
        trouble = self.keeper.trouble
        self.alarm(
            "registry",
            f"the registry does not answer; the last plans stay in force: {trouble}" if trouble else "",
        )
        self.alarm("storage", self.storing.trouble or self._capture_trouble())
        refused = sorted(
            {
                f"{s.worker_id} refused {v}: {why}"
                for s in self.draft_workers(now)
                if s is not None
                for v, why in s.refused
            }
        )
        self.alarm("draft_workers", "; ".join(refused)[:500])
        is_gone = self.config.trainer.replicas > 0 and self.trainer is None and self.runs.is_busy()
        self.alarm("trainer", "a run waits, and there is no trainer" if is_gone else self.cycle.trouble)

    def _capture_trouble(self) -> str:
        return "decode workers keep nothing: storage fails" if self.decodes.is_capture_off else ""

    def mark(self, kind: str, version: str, tag: str, text: str) -> None:
        """Something that charts over time show."""
        self.marks.append(
            {"at": self.clock(), "kind": kind, "version": version, "tag": tag, "text": text[:300]}
        )

    def save(self) -> None:
        """What a restart needs beside the registry's own records."""
        if self.rollout is not None:
            lanes = {tag: lane.save() for tag, lane in self.rollout.lanes.items()}
            state = {"lanes": lanes, "target": self.target, "is_paused": self.is_paused, **self.cycle.save()}
            writes.state(self.keeper, state)

    @property
    def trainer(self) -> TrainerStatus | None:
        """What it said last, if it is there."""
        if self._trainer is None or self.clock() - self._trainer[0] > _GONE_S:
            return None
        return self._trainer[1]

    # -- operators ---------------------------------------------------------------------------------------

    async def act(
        self, action: Action, subject: str, actor: str, arguments: dict[str, Any] | None = None
    ) -> Result:
        """An operator's button, command or JSON call; `views.Action` says what there is. The registry keeps who did it.

        Never raises for what an operator asked: `Result.is_done` is False and the message says why.
        """
        return await self._operator.act(action, subject, actor, arguments or {})

    def revoke(self, version: str, reason: str, actor: str) -> None:
        """A version never serves again, and nothing is made of it."""
        self._operator.revoke(version, reason, actor)

    def view(self) -> View:
        """What the API and the dashboard show, from memory: it costs no call of the registry."""
        now = self.clock()
        lanes = self.rollout.views(now) if self.rollout is not None else []
        holders = [status for _, status in self._drafts.values()]
        return View(
            is_enabled=True,
            status=self._status(now),
            lanes=lanes,
            versions=[self._version(known, holders) for known in self._shown()],
            runs=self.runs.views(),
            figures=self.figures.view(now),
            ledger=self.ledger.view(now),
            guard=self.guard.view(now),
            drift=self._drift_view(),
            speculation=self.decodes.speculation(is_enabled=self.config.speculation.enabled),
            trainer=_plain(self.trainer),
            workers=[_plain(status) or {} for status in holders],
            alarms=list(self.alarms.values()),
            marks=list(self.marks),
        )

    def series(self, *, since: float, step_s: float, tag: str = "") -> dict[str, Any]:
        """Figures over time for the charts: by version and domain, one row per bucket (see `Figures.series`)."""
        tenant = tag.partition(":")[2] if tag.startswith("tenant:") else None
        return self.figures.series(since=since, step_s=step_s, tenant=tenant)

    def _status(self, now: float) -> StatusView:
        state, reason = self.cycle.state(now)
        rollout = self.rollout
        shared = rollout.shared if rollout is not None else None
        return StatusView(
            state=state,
            reason=reason,
            live=rollout.default.live if rollout is not None else "",
            canary=shared.candidate if shared is not None else "",
            revision=self._plan.revision if self._plan is not None else 0,
            target=self.target,
            new_requests=self.cycle.num_new(""),
            is_paused=self.is_paused,
        )

    def _shown(self) -> Iterable[Version]:
        return sorted(self.versions.values(), key=lambda known: -known.created)[:200]

    def _version(self, known: Version, holders: Sequence[DraftStatus]) -> VersionView:
        return VersionView(
            version=known.version,
            state=known.state,
            parent=known.base,
            tag=known.tag,
            created=known.created,
            url=known.url,
            reason=known.reason,
            resident_in=[s.worker_id for s in holders if known.version in s.resident],
            refused_by={s.worker_id: why for s in holders for v, why in s.refused if v == known.version},
        )

    def _drift_view(self) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for tag, drift in self.drifts.items():
            for entry in drift.view():
                entry["action"] = self.cycle.drift_action(tag, entry)
                found.setdefault(entry["domain"], entry)
        return list(found.values())


def _plain(status: DraftStatus | TrainerStatus | None) -> dict[str, Any] | None:
    """A status as plain values; bytes and references left out."""
    if status is None:
        return None
    names = [n for n in status.__struct_fields__ if n not in ("report", "result")]
    found = {name: getattr(status, name) for name in names}
    if isinstance(status, DraftStatus):
        found["refused"] = dict(status.refused)
        found["resident"] = list(status.resident)
    return found
