"""The registry after a restart -> the loop as it was: versions, lanes, what was counted, and the run that was on."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from paceline.cluster.config import model_folder
from paceline.cluster.errors import ConfigError, PacelineError
from paceline.cluster.learning import overrides, writes
from paceline.cluster.learning.deleting import KEPT
from paceline.cluster.learning.ledger import Entry
from paceline.cluster.learning.orders import OrderSettings
from paceline.cluster.learning.rollout import Lane, Rollout
from paceline.cluster.learning.runs import Run
from paceline.cluster.model_files import served_version, weights_version
from paceline.cluster.registry import records
from paceline.cluster.registry.records import Deletion, GateRecord, LedgerEntry, RolloutEvent, Version
from paceline.cluster.registry.registry import Registry
from paceline.cluster.types import DraftRef

if TYPE_CHECKING:
    from paceline.cluster.learning.loop import LearningLoop

log = structlog.get_logger(__name__)

_RETRY_S = (0.5, 5.0)
_OPEN: tuple[records.RunState, ...] = ("pending", "loading", "training", "scoring", "paused")
_MARKS = {"canary": "canary", "promoted": "promote", "rolled_back": "rollback", "swapped": "swap"}


@dataclass(frozen=True, slots=True)
class _Before:
    """What the registry knows."""

    versions: tuple[Version, ...]
    stale: tuple[Version, ...]
    state: dict[str, Any]
    runs: tuple[records.Run, ...]
    ledger: tuple[LedgerEntry, ...]
    held: tuple[LedgerEntry, ...]
    """Decisions not to do something."""
    gates: tuple[GateRecord, ...]
    events: tuple[RolloutEvent, ...]
    deletions: tuple[Deletion, ...]
    changed: dict[str, Any]
    """Settings that operators changed."""


async def restore(loop: LearningLoop) -> None:
    """Until the registry has answered once; then the loop has plans."""
    pause = _RETRY_S[0]
    while True:
        try:
            if not loop.base:
                loop.target, loop.base = await asyncio.to_thread(_own_versions, loop)
            before = await loop.keeper.ask(lambda registry: _read(registry, loop.target))
            break
        except PacelineError as error:
            log.warning("learning_not_restored", error=str(error)[:300])
            loop.alarm("registry", f"the registry does not answer; the last plans stay in force: {error}")
        except Exception as error:  # a defect of ours: said, and tried again
            log.exception("learning_not_restored")
            loop.alarm("registry", f"what was learned cannot be read: {type(error).__name__}: {error}")
        await asyncio.sleep(pause)
        pause = min(_RETRY_S[1], pause * 2)
    take_up(loop, before)
    loop.alarm("registry", "")


def _own_versions(loop: LearningLoop) -> tuple[str, str]:
    model = loop.config.model
    return served_version(model_folder(model.target), int8_weights=model.int8_weights), weights_version(
        model_folder(model.draft)
    )


def _read(registry: Registry, target: str) -> _Before:
    registry.prepare()
    settings = registry.settings()
    setting = settings.get(writes.STATE)
    return _Before(
        registry.versions(target=target, limit=500).items,
        registry.retarget(target),
        dict(setting.value) if setting is not None else {},
        registry.runs(limit=50).items,
        registry.ledger(decisions=("train",), limit=100).items,
        registry.ledger(decisions=("skip", "stop_speculating"), limit=100).items,
        registry.gates(limit=100).items,
        registry.events(limit=200).items,
        registry.deletions(limit=KEPT).items,
        overrides.changed({key: kept.value for key, kept in settings.items()}),
    )


def take_up(loop: LearningLoop, before: _Before) -> None:
    """From here on there are plans."""
    now = loop.clock()
    try:
        loop.configure(overrides.apply(loop.learning, before.changed))
    except ConfigError as error:  # legal values have changed since: the configuration counts
        log.warning("settings_not_restored", error=str(error))
    loop.versions = {known.version: known for known in before.versions if known.state != "revoked"}
    _add_base(loop, now)
    loop.storing.deleting.know(before.deletions)
    loop.is_paused = bool(before.state.get("is_paused"))
    loop.cycle.load(before.state)
    loop.rollout = Rollout(loop.learning.rollout, loop.base, now)
    if before.state.get("target") == loop.target:
        _lanes(loop, before.state.get("lanes", {}), now)
    elif before.state.get("target"):
        log.warning("target_changed", before=before.state["target"], now=loop.target, stale=len(before.stale))
    _ledger(loop, before)
    loop.cycle.know_held(before.held)
    for event in reversed(before.events):
        if event.event in _MARKS:
            loop.marks.append(
                {"at": event.time, "kind": _MARKS[event.event], "version": event.version, "tag": event.tag,
                 "text": event.reason[:300]}
            )  # fmt: skip
    _runs(loop, before.runs, now)
    loop.replan()
    loop.save()
    log.info("learning_restored", versions=len(loop.versions), live=loop.rollout.default.live)


def _add_base(loop: LearningLoop, now: float) -> None:
    """The configuration's draft is a version like the others, and always there."""
    known = loop.versions.get(loop.base)
    if known is None or known.target != loop.target:
        reason = "the draft of the configuration"
        base = Version(
            loop.base, target=loop.target, state="candidate", created=now, changed=now, reason=reason
        )
        loop.versions[loop.base] = base

        def job(registry: Registry) -> None:
            found = registry.add_version(base)
            if found.state == "stale":
                registry.move(base.version, "candidate", reason=reason)
            if registry.live("") is None:
                registry.promote(base.version, reason=reason)

        loop.keeper.put("base", job)


def _lanes(loop: LearningLoop, saved: dict[str, Any], now: float) -> None:
    """As they were; a version that is gone leaves its lane to the configuration's draft."""
    assert loop.rollout is not None
    for tag, fields in saved.items():
        lane = Lane.load(tag, fields, now)
        for name in ("live", "previous", "candidate"):
            if getattr(lane, name) and getattr(lane, name) not in loop.versions:
                log.warning("version_gone", tag=tag, version=getattr(lane, name), role=name)
                if name == "live":
                    lane.live, lane.live_by = loop.base, "loop"
                else:
                    setattr(lane, name, "")
                lane.settle(now, "a version that it named is gone")
        loop.rollout.lanes[tag] = lane
    for lane in loop.rollout.lanes.values():
        loop.note(lane.live, "live", loop.versions[lane.live].reason)


def _ledger(loop: LearningLoop, before: _Before) -> None:
    gates = {gate.candidate: gate for gate in reversed(before.gates)}
    runs = {run.run_id: run for run in before.runs}
    for row in reversed(before.ledger):
        gate, run = gates.get(row.version), runs.get(row.run_id)
        saving = gate.report.get("saving", {}).get("mean") if gate is not None else None
        loop.ledger.entries.append(
            Entry(
                row.run_id,
                row.tag,
                row.decided_at,
                row.predicted_s or 0.0,
                row.predicted_cost_s or 0.0,
                row.spent_s,
                float(saving) if saving is not None else None,
                gate is not None and gate.passed,
                row.version,
                row.realised_s or 0.0,
                steps=run.steps if run is not None else 0,
                trained_cpu_s=run.cpu_s if run is not None else 0.0,
                ledger_id=row.id,
            )
        )
        loop.cycle.know_row(row.run_id, row.id)
    assert loop.rollout is not None
    for lane in loop.rollout.lanes.values():
        loop.ledger.serving(lane.live, True)


def _runs(loop: LearningLoop, runs: tuple[records.Run, ...], now: float) -> None:
    """Ended ones are shown; one that was on is taken up again under its id, or has failed."""
    for record in reversed(runs):
        run = _run(loop, record)
        if record.state not in _OPEN:
            loop.runs.past.append(run)
        elif _can_go_on(loop, run):
            run.state = "pending"
            loop.runs.add(run)
            log.info("run_taken_up", run=run.run_id, state=record.state)
        else:
            run.state, run.ended = "failed", now
            run.error = "control began anew, and a version it was about is not known any more"
            loop.runs.past.append(run)
            writes.run(loop.keeper, run)


def _can_go_on(loop: LearningLoop, run: Run) -> bool:
    names = [run.base.version, *([run.candidate.version] if run.candidate else [])]
    is_whole = run.kind != "score" or run.candidate is not None
    return is_whole and all(name in loop.versions for name in names)


def _run(loop: LearningLoop, record: records.Run) -> Run:
    refs = loop.refs()
    settings = record.settings
    candidate = str(settings.get("candidate", ""))
    try:
        order = OrderSettings.decode(str(settings.get("order", "{}")).encode())
    except PacelineError:
        order = OrderSettings()
    kind = settings.get("kind", record.kind)
    losses = [(int(row[0] or 0), math.nan if row[1] is None else row[1]) for row in record.loss]
    return Run(
        record.run_id,
        kind if kind in ("train", "score", "rank") else "train",
        record.tag,
        refs.get(record.base, DraftRef(record.base, "")),
        refs.get(candidate, DraftRef(candidate, "")) if candidate else None,
        order,
        record.trigger,
        "loop",
        record.created,
        family=str(settings.get("family", "")),
        state=record.state,
        started=record.started or 0.0,
        ended=record.ended or 0.0,
        step=record.steps,
        num_steps=record.num_steps,
        num_tokens=record.tokens,
        loss=losses[-1][1] if losses else math.nan,
        losses=losses,
        cpu_s=record.cpu_s,
        seconds=record.seconds,
        report=dict(record.report),
        error=record.error,
        result=refs.get(record.result) if record.result else None,
    )
