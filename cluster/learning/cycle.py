"""New requests and drift -> runs, one at a time; their results -> candidates that passed the gate, or the reason why not.

enough new requests, or drift with some -> does it pay? -> train -> score -> offered to the rollout
drift, and other drafts in the pool     -> rank them    -> the best is scored, or train as above
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from paceline.cluster.learning import writes
from paceline.cluster.learning.config import GateConfig, TrainConfig
from paceline.cluster.learning.orders import OrderSettings
from paceline.cluster.learning.rollout import Refused
from paceline.cluster.learning.runs import Kind, Run, best_of
from paceline.cluster.registry.records import LedgerEntry, Source, Version
from paceline.cluster.types import DraftRef, ServedStream, TrainerStatus, TrainLevel

if TYPE_CHECKING:
    from paceline.cluster.learning.loop import LearningLoop

log = structlog.get_logger(__name__)

_RECENT_S = 900.0
"""Traffic of so long is what a decision looks at."""
_DRIFT_SHARE = 0.25
"""Of `min_requests`: new ones that are enough where acceptance fell."""
_LASTS_S = 60.0
"""Decode workers try drafts again and again where they are off: only what lasts so long is a decision."""
_DECIDE_S = 5.0
"""Between two looks at whether a run pays."""


@dataclass(slots=True)
class _Tag:
    """What is known of one tag besides its lane."""

    new: int = 0
    """Streams captured since its last run began."""
    since: float = 0.0
    """When that was."""
    rest_until: float = 0.0
    """After a run that failed."""
    ranked: tuple[str, ...] = ()
    """Domains whose drift the pool was ranked for already."""
    waits_for: int = 0
    """Captured streams at which a candidate is scored again: there were too few that were held out."""
    candidate: str = ""
    """That one."""
    decided_at: float = -math.inf
    looks: int = 0
    """Candidates that were scored on about the same held-out set."""
    looked_at: int = 0
    """Captured streams when that set was first looked at."""


class Cycle:
    """Decides what the trainer does. All state that a restart needs is in `save`."""

    def __init__(self, loop: LearningLoop) -> None:
        self._loop = loop
        self._tags: dict[str, _Tag] = {}
        self._captured = 0
        self.trouble = ""
        """Why the last run failed; "" if it did not."""
        self._reason = "the state of before is being read"
        self._rows = writes.LedgerRows(loop.keeper)
        self._revision = 0
        self._last_plan: tuple[Any, ...] = ()
        self._is_drafting, self._same_since = True, -math.inf
        """What the ledger says of decode workers, and since when they do so too."""
        self._told: dict[str, tuple[str, int]] = {}
        """By run: the state and step that the registry knows."""

    # -- counting ----------------------------------------------------------------------------------------

    def tag(self, name: str) -> _Tag:
        return self._tags.setdefault(name, _Tag())

    def waiting(self) -> list[str]:
        """Candidates that are to be scored again."""
        return [tag.candidate for tag in self._tags.values() if tag.candidate]

    def num_new(self, tag: str) -> int:
        return self._tags[tag].new if tag in self._tags else 0

    def captured(self, num: int) -> None:
        """So many streams were written to shards since the last call."""
        self._captured += num
        self.tag("").new += num

    def served(self, streams: Iterable[ServedStream]) -> None:
        """Of tags of their own, what was served stands for what was captured."""
        tags = self._loop.learning.tags
        if not tags:
            return
        for stream in streams:
            for name in (f"tenant:{stream.tenant}", f"domain:{stream.domain}"):
                if name in tags:
                    self.tag(name).new += 1

    # -- what begins -------------------------------------------------------------------------------------

    def schedule(self, now: float) -> None:
        """Begin what should begin, or say why nothing does."""
        self._reason = self._why_not(now)
        if self._reason:
            return
        reasons = []
        for tag in ("", *self._loop.learning.tags):
            why = self._consider(tag, now)
            if not why:
                return
            reasons.append(f"{tag}: {why}" if tag else why)
        self._reason = "; ".join(reasons)

    def _why_not(self, now: float) -> str:
        """What stands against any run; "" if nothing does."""
        loop = self._loop
        if loop.runs.is_busy():
            return ""  # `state` says what is on
        if loop.is_paused:
            return "paused by an operator"
        if loop.keeper.trouble:
            return "the registry does not answer: nothing new begins"
        if loop.config.trainer.replicas == 0:
            return "trainer.replicas=0: nothing is trained here"
        speculation = loop.config.speculation
        if not (speculation.enabled and "draft" in speculation.sources and loop.config.draft.replicas):
            return "no draft model is asked for drafts: there is nothing to train"
        if loop.trainer is None:
            return "there is no trainer yet"
        if loop.guard.level in ("pause", "evict"):
            return f"serving comes first: {loop.guard.reason}"
        return ""

    def _consider(self, tag: str, now: float) -> str:
        """ "" if a run is on or begins now, else why none does."""
        loop, state = self._loop, self.tag(tag)
        if loop.runs.is_busy():
            return ""
        assert loop.rollout is not None
        lane = loop.rollout.lane(tag)
        if lane.stage != "steady":
            return f"{lane.candidate or lane.live} is in {lane.stage}"
        if now < lane.frozen_until:
            return f"frozen for {lane.frozen_until - now:.0f} s more, after a roll-back"
        if state.candidate:
            known = loop.versions.get(state.candidate)
            if known is None or known.state == "revoked":
                state.candidate = ""
            elif self._captured < state.waits_for:
                return f"{state.candidate} waits for more requests that are held out"
            else:
                self.score(tag, state.candidate, f"{state.candidate} waited for requests", "loop")
                return ""
        if not loop.learning.train_automatically:
            return "learning.train_automatically=false: only operators begin runs"
        if now < state.rest_until:
            return f"after a run that failed, for {state.rest_until - now:.0f} s more"
        return self._trigger(tag, state, now)

    def _trigger(self, tag: str, state: _Tag, now: float) -> str:
        loop = self._loop
        drifted = {found.domain: found.by for found in self._drifted(tag)}
        least = loop.learning.train.min_requests
        wanted = max(1, round(least * _DRIFT_SHARE)) if drifted else least
        if state.new < wanted:
            return f"{state.new} of {wanted} new requests"
        if drifted and not set(drifted) <= set(state.ranked) and self._rank(tag, drifted):
            state.ranked = tuple(drifted)
            return ""
        if now - state.decided_at < _DECIDE_S:
            known = loop.ledger.decisions.get(tag)
            return known.reason if known is not None else "nothing is decided yet"
        state.decided_at = now
        decision = loop.ledger.decide(tag, self._cells(tag, now), drifted, now)
        if not decision.train:
            self._rows.skip(decision, now)
            return decision.reason
        self.train(tag, decision.reason, "loop", now)
        return ""

    def _drifted(self, tag: str) -> list[Any]:
        drift = self._loop.drifts.get(tag)
        return drift.drifted if drift is not None else []

    def _cells(self, tag: str, now: float) -> dict[str, Any]:
        """By domain, what the tag's streams were like lately, whatever drafted."""
        cells = self._loop.figures.recent(_RECENT_S, now)
        kind, _, name = tag.partition(":")
        if kind == "domain":
            return {name: cells[name]} if name in cells else {}
        if kind == "tenant":
            return self._loop.figures.recent(_RECENT_S, now, tenant=name)
        return cells

    def _rank(self, tag: str, drifted: dict[str, float]) -> bool:
        """Ask which draft of the pool is best on the latest texts; False if there is no other."""
        loop = self._loop
        assert loop.rollout is not None
        live, refs = loop.rollout.lane(tag).live, loop.refs()
        others = [refs[v] for v in loop.pool() if v != live]
        if not others:
            return False
        names = ", ".join(name or "traffic without a domain" for name in drifted)
        run = self._run("rank", tag, f"acceptance fell in {names}: is another draft better?", "loop")
        run.settings = self._settings(tag, rank=tuple(others))
        self._add(run)
        return True

    def train(self, tag: str, reason: str, actor: str, now: float) -> Run:
        """Begin a run with what was captured since the last one."""
        state = self.tag(tag)
        run = self._run("train", tag, reason, actor)
        run.settings = self._settings(tag, since=state.since)
        state.new, state.since, state.ranked = 0, now, ()
        self._loop.ledger.begin(run.run_id, tag, now)
        self._rows.end_skip(tag, now)
        self._add(run)
        self._row(run.run_id, reason)
        assert self._loop.rollout is not None
        self._loop.mark("train", self._loop.rollout.lane(tag).live, tag, reason)
        return run

    def score(self, tag: str, version: str, reason: str, actor: str, *, family: str = "") -> Run:
        """Compare a version with the live one on what was held out."""
        state, learning = self.tag(tag), self._loop.learning
        renewed = learning.gate.max_requests / max(learning.capture.holdout, 1e-3)
        if self._captured - state.looked_at >= renewed or not state.looks:
            state.looks, state.looked_at = 0, self._captured
        state.looks += 1
        state.candidate = ""
        run = self._run("score", tag, reason, actor)
        run.candidate = self._loop.refs()[version]
        run.family = family
        run.settings = self._settings(tag, look=state.looks)
        self._add(run)
        return run

    def _run(self, kind: Kind, tag: str, reason: str, actor: str) -> Run:
        loop = self._loop
        assert loop.rollout is not None
        base = loop.refs()[loop.rollout.lane(tag).live]
        now = loop.clock()
        run_id = f"{kind}-{round(now)}-{secrets.token_hex(3)}"
        return Run(run_id, kind, tag, base, None, OrderSettings(), reason, actor, now)

    def _settings(self, tag: str, *, look: int = 1, since: float = 0.0, rank: tuple[DraftRef, ...] = ()) -> OrderSettings:  # fmt: skip
        loop = self._loop
        rows, seconds = loop.decodes.step_cost
        streams = min(loop.decodes.streams, loop.config.decode.max_streams)
        configured, now = loop.config.learning, loop.learning
        train, gate = _changed(configured.train, now.train), _changed(configured.gate, now.gate)
        return OrderSettings(loop.target, look, rows, seconds, streams, rank, since, train, gate)

    def _add(self, run: Run) -> None:
        log.info("run_begins", run=run.run_id, tag=run.tag, reason=run.reason)
        self._loop.runs.add(run)
        writes.run(self._loop.keeper, run)
        self._loop.save()
        self._loop.plan_changed()

    def drafting(self, is_on: bool, reason: str, now: float) -> None:
        """Whether decode workers leave drafting off because it does not pay: what lasts is said in the ledger."""
        if is_on == self._is_drafting or self._same_since == -math.inf:
            self._same_since = now
        elif now - self._same_since >= _LASTS_S:
            self._is_drafting = is_on
            if is_on:
                self._rows.end_stop_speculating(now)
            else:
                self._rows.stop_speculating(reason, now)

    # -- what ends ---------------------------------------------------------------------------------------

    def take(self, status: TrainerStatus) -> None:
        """How far the trainer is; a run that ended leads to the next step, or to the end."""
        loop = self._loop
        now = loop.clock()
        run, is_over = loop.runs.take(status, now)
        if run is None:
            return
        if not is_over:
            self._tell(run)
            return
        writes.run(loop.keeper, run)
        self._told.pop(run.run_id, None)
        loop.metrics.training_runs.labels(run.kind, run.state).inc()
        log.info("run_ends", run=run.run_id, state=run.state, error=run.error[:300], cpu_s=run.cpu_s)
        self._pay(run)
        if run.state == "failed":
            self._failed(run, now)
        elif run.kind == "train":
            self._trained(run, now)
        elif run.kind == "rank":
            self._ranked(run, now)
        else:
            self._scored(run, now)
        loop.save()
        loop.plan_changed()

    def _tell(self, run: Run) -> None:
        """The registry hears of changes of state, and of each twentieth of the steps."""
        known, step = self._told.get(run.run_id, ("", -1))
        if run.state != known or run.step - step >= max(1, run.num_steps // 20):
            self._told[run.run_id] = (run.state, run.step)
            writes.run(self._loop.keeper, run)

    def _pay(self, run: Run) -> None:
        """What it took is spent, whatever came of it."""
        family = run.run_id if run.kind == "train" else run.family
        entry = self._loop.ledger.find(family)
        if entry is None:
            return
        own = {"steps": run.step, "trained_cpu_s": run.cpu_s} if run.kind == "train" else {}
        self._loop.ledger.update(family, spent_s=entry.spent_s + run.cpu_s, **own)
        self._row(family)

    def _row(self, run_id: str, reason: str = "") -> None:
        entry = self._loop.ledger.find(run_id)
        run = next((r for r in self._loop.runs.views() if r.run_id == run_id), None)
        if entry is not None:
            self._rows.put(entry, reason or (run.reason if run is not None else ""))

    def _failed(self, run: Run, now: float) -> None:
        self.trouble = f"run {run.run_id} failed: {run.error}"
        self.tag(run.tag).rest_until = now + self._loop.learning.rollout.backoff_s

    def _trained(self, run: Run, now: float) -> None:
        loop, result = self._loop, run.result
        self.trouble = ""
        if result is None:
            self._failed(run, now)
            return
        if result.version == run.base.version or loop.versions.get(result.version) is not None:
            log.info("run_changed_nothing", run=run.run_id, version=result.version)
            return
        version = Version(
            result.version,
            result.url,
            result.sha256,
            base=run.base.version,
            run_id=run.run_id,
            tag=run.tag,
            target=loop.target,
            created=now,
            changed=now,
            reason=f"made by {run.run_id}",
            card={name: run.report[name] for name in ("steps", "tokens", "loss", "acceptance") if name in run.report},
        )  # fmt: skip
        sources = _sources(run.report, now)
        loop.versions[result.version] = version
        writes.new_version(loop.keeper, version, sources)
        loop.ledger.update(run.run_id, version=result.version)
        deletion = loop.storing.deleting.covering(sources, run.began)
        if deletion is not None and loop.learning.revoke_deleted:
            loop.revoke(
                result.version, f"{deletion.what} was deleted, and it had learned from that", deletion.actor
            )
            return
        self.score(run.tag, result.version, f"made by {run.run_id}", run.actor, family=run.run_id)

    def _ranked(self, run: Run, now: float) -> None:
        loop = self._loop
        best = best_of(run.report, run.base.version, loop.learning.gate.min_saving)
        if best is not None and best in loop.versions:
            self.score(run.tag, best, f"best of the pool since acceptance fell: {best}", "loop")
        else:
            log.info("pool_does_not_help", run=run.run_id)
            self.tag(run.tag).decided_at = -math.inf

    def _scored(self, run: Run, now: float) -> None:
        loop, report = self._loop, run.report
        assert run.candidate is not None
        version, state = run.candidate.version, self.tag(run.tag)
        passed = bool(report.get("passed"))
        reason = str(report.get("reason", "no report"))
        writes.gate(loop.keeper, run, passed=passed, reason=reason, now=now)
        loop.mark("gate", version, run.tag, ("passed: " if passed else "refused: ") + reason)
        num, least = int(report.get("num_requests", 0)), loop.learning.gate.min_requests
        self._count_gate(report, "passed" if passed else "undecided" if num < least else "refused")
        if not passed and num < least:
            state.candidate = version
            more = max(5, least - num) / max(loop.learning.capture.holdout, 1e-3)
            state.waits_for = self._captured + math.ceil(more)
            state.looks -= 1  # nothing was decided
            loop.note(version, "candidate", reason)
            return
        saving = report.get("saving", {})
        found = loop.ledger.update(run.family, gate_saving=float(saving.get("mean", 0.0)), passed=passed)
        if found is not None and passed:
            hourly = loop.ledger.decode_s_per_hour(now)
            gate_s = float(saving.get("mean", 0.0)) * hourly * loop.ledger.horizon_h
            loop.ledger.update(run.family, predicted_s=gate_s)
        self._row(run.family)
        if passed:
            self.offer(version, run.tag, reason, now)
            return
        loop.note(version, "rejected", reason)
        writes.move(loop.keeper, version, "rejected", reason)
        drift = loop.drifts.get(run.tag)
        for found_drift in self._drifted(run.tag):
            if drift is not None:
                drift.restart(found_drift.domain)  # no draft that could be made is better: this is how it is

    def _count_gate(self, report: dict[str, Any], result: str) -> None:
        metrics, saving = self._loop.metrics, report.get("saving", {})
        metrics.gate_results.labels(result).inc()
        for bound in ("mean", "lo", "hi"):
            metrics.gate_saving.labels(bound).set(float(saving.get(bound, 0.0)))

    def offer(self, version: str, tag: str, reason: str, now: float) -> None:
        """It passed the gate: on to the canary, if that may begin by itself."""
        loop = self._loop
        assert loop.rollout is not None
        if not loop.learning.rollout.automatic or loop.is_paused:
            why = "paused" if loop.is_paused else "learning.rollout.automatic=false"
            loop.note(version, "candidate", f"{why}: waits for somebody to promote it; {reason}")
            return
        try:
            loop.apply(loop.rollout.offer(version, tag, now))
            loop.note(version, "candidate", reason)
        except Refused as error:
            loop.note(version, "candidate", f"waits: {error}; {reason}")

    # -- what is shown and kept --------------------------------------------------------------------------

    def revision(self, level: TrainLevel) -> int:
        """Of the trainer's plan: larger after each change."""
        plan = (level, self._loop.runs.order)
        if plan != self._last_plan:
            self._last_plan = plan
            self._revision = max(self._revision + 1, round(self._loop.clock() * 1000))
        return self._revision

    def state(self, now: float) -> tuple[str, str]:
        """What the loop does, in one word, and why in one sentence."""
        loop = self._loop
        if loop.rollout is None:
            return "waiting", self._reason
        run = loop.runs.current
        if run is not None:
            word = "training" if run.kind == "train" else "scoring"
            return word, f"{run.run_id}: {run.reason}"
        lanes = loop.rollout.lanes.values()
        for stage, word in (("canary", "canary"), ("preparing", "preparing"), ("watch", "watching")):
            lane = next((lane for lane in lanes if lane.stage == stage), None)
            if lane is not None:
                return word, f"{lane.candidate or lane.live}: {lane.reason}"
        if loop.is_paused:
            return "paused", "by an operator"
        if now < loop.rollout.default.frozen_until:
            return "frozen", loop.rollout.default.reason
        is_blocked = self._reason.startswith(("do not train", "trainer.replicas", "there is no trainer"))
        return ("blocked" if is_blocked else "waiting"), self._reason

    def drift_action(self, tag: str, entry: dict[str, Any]) -> str:
        """What was or will be done about a domain that drifted."""
        if not entry["drifted"]:
            return ""
        run = self._loop.runs.current
        if run is not None and run.tag == tag:
            return f"{run.kind}: {run.run_id}"
        return self._reason

    def save(self) -> dict[str, Any]:
        """For the registry."""
        return {
            "captured": self._captured,
            "tags": {
                name: {field: getattr(tag, field) for field in _KEPT} for name, tag in self._tags.items()
            },
        }

    def load(self, saved: dict[str, Any]) -> None:
        self._captured += int(saved.get("captured", 0))
        for name, fields in saved.get("tags", {}).items():
            tag = self.tag(name)
            counted = tag.new
            for field in _KEPT:
                setattr(tag, field, fields.get(field, getattr(tag, field)))
            tag.new += counted

    def know_row(self, run_id: str, row_id: int) -> None:
        """The ledger's row of a run, from before a restart."""
        self._rows.know(run_id, row_id)

    def know_held(self, rows: Sequence[LedgerEntry]) -> None:
        """What was decided against before a restart, newest first."""
        self._rows.know_held(rows)
        self._is_drafting = not self._rows.is_held("stop_speculating")

    def keep_ledger(self) -> None:
        """Runs whose versions serve: what they saved so far."""
        for entry in self._loop.ledger.entries:
            if entry.is_serving:
                self._row(entry.run_id)


_KEPT = ("new", "since", "rest_until", "waits_for", "candidate", "looks", "looked_at")


def _changed(configured: TrainConfig | GateConfig, now: TrainConfig | GateConfig) -> dict[str, Any]:
    """Fields that are not as configured."""
    before = configured.model_dump()
    return {name: value for name, value in now.model_dump().items() if value != before[name]}


def _sources(report: dict[str, Any], now: float) -> list[Source]:
    """What a run learned from, as the trainer says: requests where it names them, else shards and tenants."""
    if report.get("requests"):
        return [
            Source(str(tenant), str(request_id), str(shard), int(num), float(created))
            for tenant, request_id, shard, num, created in report["requests"]
        ]
    lineage = report.get("lineage", {})
    tenants = list(lineage.get("requests_by_tenant", {})) or [""]
    found = [Source(tenant, created=now) for tenant in tenants]
    return [
        *found,
        *(Source(tenants[0], shard=str(shard), created=now) for shard in lineage.get("shards", ())),
    ]
