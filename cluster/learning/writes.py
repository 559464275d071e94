"""Changes of the loop -> what the registry is told, in its own terms. Each function runs one job of the keeper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.cluster.learning.figures import Cell
from paceline.cluster.learning.keeper import Keeper
from paceline.cluster.learning.ledger import Decision, Entry
from paceline.cluster.learning.rollout import Change
from paceline.cluster.learning.runs import Run
from paceline.cluster.registry import records
from paceline.cluster.registry.records import (
    FigurePoint,
    GateRecord,
    LedgerEntry,
    RolloutEvent,
    Source,
    Version,
)
from paceline.cluster.registry.registry import Registry

STATE = "loop.state"
"""Key of the setting that holds what has no table of its own."""


def change(keeper: Keeper, change: Change, now: float) -> None:
    """A step of the rollout: states, routes, pins and events."""
    if change.kind in ("preparing", "kept"):
        return
    keeper.put(f"rollout {change.kind}", lambda registry: _change(registry, change, now))


def _change(registry: Registry, change: Change, now: float) -> None:
    version = registry.version(change.version)
    if version is None:
        return
    why, actor = change.reason, change.actor
    match change.kind:
        case "canary":
            _again(registry, version, actor)
            registry.move(change.version, "canary", reason=why, actor=actor)
        case "promoted":
            _again(registry, version, actor)
            if version.tag == change.tag:
                registry.promote(change.version, reason=why, actor=actor, force=True)
            if change.tag:
                registry.put_route(change.tag, change.version, reason=why, actor=actor)
        case "rolled_back" | "dropped":
            _taken_back(registry, version, change)
        case "aborted":
            if version.state == "candidate" and "refused it" in why:
                registry.move(change.version, "rejected", reason=why, actor=actor)
            elif version.state == "canary":
                registry.move(change.version, "candidate", reason=why, actor=actor)
            else:
                registry.add_event(RolloutEvent(now, change.version, "candidate", why, actor, change.tag))
        case "pinned":
            registry.pin(change.version, reason=why, actor=actor)
        case "unpinned":
            registry.unpin(change.version, reason=why, actor=actor)


def _again(registry: Registry, version: Version, actor: str) -> None:
    """What was refused once becomes a candidate before anything else."""
    if version.state in ("rejected", "rolled_back", "stale"):
        registry.move(version.version, "candidate", reason="asked for again", actor=actor)


def _taken_back(registry: Registry, version: Version, change: Change) -> None:
    why, actor = change.reason, change.actor
    if version.state == "canary":
        registry.move(change.version, "rolled_back", reason=why, actor=actor)
        return
    other = registry.version(change.other) if change.other else None
    if (
        version.state == "live"
        and other is not None
        and other.tag == version.tag
        and version.tag == change.tag
    ):
        _again(registry, other, actor)
        registry.roll_back(change.tag, to=change.other, reason=why, actor=actor)
    elif version.state == "live" and version.tag == change.tag:
        registry.move(change.version, "rolled_back", reason=why, actor=actor)
    if change.tag and change.other and other is not None and other.tag == change.tag:
        registry.put_route(change.tag, change.other, reason=why, actor=actor)
    elif change.tag:
        registry.drop_route(change.tag, reason=why, actor=actor)


def new_version(keeper: Keeper, version: Version, sources: Sequence[Source] = ()) -> None:
    keeper.put("version", lambda registry: registry.add_version(version, sources=sources))


def move(keeper: Keeper, version: str, state: records.VersionState, reason: str, actor: str = "loop") -> None:
    keeper.put(f"version {state}", lambda registry: registry.move(version, state, reason=reason, actor=actor))


def drop_weights(keeper: Keeper, version: str) -> None:
    keeper.put("weights", lambda registry: registry.drop_weights(version))


def retarget(keeper: Keeper, target: str, base: Version) -> None:
    """Another target: all are stale but the configuration's draft, which serves."""

    def job(registry: Registry) -> None:
        registry.retarget(target)
        known = registry.add_version(base)
        if known.state != "live":
            _again(registry, known, "loop")
            registry.promote(base.version, reason=base.reason, force=True)

    keeper.put("retarget", job)


def state(keeper: Keeper, state: Mapping[str, Any]) -> None:
    keeper.put("state", lambda registry: registry.put_settings({STATE: dict(state)}), is_figure=True)


def run(keeper: Keeper, run: Run) -> None:
    """How far a run is: a copy of what is known now."""
    candidate = run.candidate.version if run.candidate else run.result.version if run.result else ""
    record = records.Run(
        run_id=run.run_id,
        kind="train" if run.kind == "train" else "score",
        trigger=run.reason,
        base=run.base.version,
        tag=run.tag,
        settings={"order": run.settings.encode().decode(), "family": run.family, "kind": run.kind,
                  "candidate": run.candidate.version if run.candidate else ""},
        state=run.state,  # type: ignore[arg-type]  # `Run.take` leaves the trainer's "idle" out
        created=run.began,
        started=run.started or None,
        ended=run.ended or None,
        steps=run.step,
        num_steps=run.num_steps,
        tokens=run.num_tokens,
        seconds=run.seconds,
        cpu_s=run.cpu_s,
        loss=_curve(run),
        report={name: value for name, value in run.report.items() if name not in ("curve", "requests")},
        error=run.error,
        result=candidate,
    )  # fmt: skip
    keeper.put("run", lambda registry: registry.put_run(record))


def _curve(run: Run) -> tuple[tuple[float | None, ...], ...]:
    """(step, loss, acceptance) where the trainer told all of it at the end, else (step, loss)."""
    rows = run.report.get("curve") or run.losses
    return tuple(tuple(float(v) if v is not None and math.isfinite(v) else None for v in row) for row in rows)


def gate(keeper: Keeper, run: Run, *, passed: bool, reason: str, now: float) -> None:
    candidate = run.candidate.version if run.candidate else ""
    record = GateRecord(run.run_id, run.base.version, candidate, passed, reason, now, dict(run.report))
    keeper.put("gate", lambda registry: registry.put_gate(record))


class LedgerRows:
    """Entries of the ledger <-> rows of the registry, whose ids are known only when they are written."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._ids: dict[str, int] = {}
        self._held: dict[tuple[str, str], LedgerEntry] = {}
        """By decision and tag: what is decided against now."""

    def know(self, run_id: str, row_id: int) -> None:
        self._ids[run_id] = row_id

    def put(self, entry: Entry, reason: str) -> None:
        """A run's row: added at first, then replaced."""

        def job(registry: Registry) -> None:
            row = LedgerEntry(
                decision="train",
                reason=reason,
                decided_at=entry.at,
                run_id=entry.run_id,
                version=entry.version,
                tag=entry.tag,
                predicted_s=entry.predicted_s,
                predicted_cost_s=entry.cost_s,
                realised_s=entry.realised,
                spent_s=entry.spent_s,
                id=self._ids.get(entry.run_id, 0),
            )
            if row.id:
                registry.put_ledger(row)
            else:
                self._ids[entry.run_id] = registry.add_ledger(row).id

        self._keeper.put("ledger", job)

    def skip(self, decision: Decision, now: float) -> None:
        """Not to train: one row for as long as that holds."""
        self._hold(
            LedgerEntry(
                decision="skip",
                reason=decision.reason,
                decided_at=now,
                tag=decision.tag,
                predicted_s=decision.predicted_s,
                predicted_cost_s=decision.cost_s,
            )
        )

    def end_skip(self, tag: str, now: float) -> None:
        """It trains after all."""
        self._release(("skip", tag), now)

    def stop_speculating(self, reason: str, now: float) -> None:
        """Decode workers leave drafting off somewhere: one row for as long as that holds."""
        self._hold(LedgerEntry(decision="stop_speculating", reason=reason, decided_at=now))

    def end_stop_speculating(self, now: float) -> None:
        """They draft again."""
        self._release(("stop_speculating", ""), now)

    def know_held(self, rows: Iterable[LedgerEntry]) -> None:
        """Decisions that held when control ended, newest first."""
        for row in rows:
            if row.until is None:
                self._held.setdefault((row.decision, row.tag), row)

    def is_held(self, decision: records.Decision) -> bool:
        """Whether one of `know_held` is of this kind, of everybody's lane."""
        return (decision, "") in self._held

    def _hold(self, row: LedgerEntry) -> None:
        def job(registry: Registry) -> None:
            if (row.decision, row.tag) not in self._held:
                self._held[row.decision, row.tag] = registry.add_ledger(row)

        self._keeper.put("ledger", job)

    def _release(self, key: tuple[str, str], now: float) -> None:
        def job(registry: Registry) -> None:
            row = self._held.pop(key, None)
            if row is not None:
                registry.put_ledger(replace(row, until=now))

        self._keeper.put("ledger", job)


def figures(keeper: Keeper, finished: Iterable[tuple[float, float, str, str, Cell]]) -> None:
    points = [
        FigurePoint(
            time=at,
            width_s=width,
            version=version,
            domain=domain,
            num_streams=cell.requests,
            num_tokens=cell.tokens,
            num_steps=cell.steps,
            seconds=cell.seconds,
            tested=tuple(cell.tested_by_depth),
            accepted=tuple(cell.accepted_by_depth),
        )
        for at, width, version, domain, cell in finished
    ]
    if points:
        keeper.put("figures", lambda registry: registry.add_figures(points), is_figure=True)
