"""Control, its learning loop and its directory -> what the admin API shows of the state of now, all from memory.

Learning may be off: then there is no loop and no registry, and workers and metrics are shown all the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from paceline.cluster.admin import answers, desk_answers
from paceline.cluster.admin.archive import Archive, finite, interval
from paceline.cluster.admin.problems import AdminError
from paceline.cluster.config import ClusterConfig
from paceline.cluster.learning.views import LaneView, RunView, View
from paceline.cluster.registry.records import FigurePoint
from paceline.cluster.registry.registry import Registry

if TYPE_CHECKING:
    from paceline.cluster.control import Control
    from paceline.cluster.learning.loop import LearningLoop

_OFF = "learning.enabled is false: nothing is kept and nothing is trained"
_MAX_BUCKETS = 600
_MEMORY_S = 286 * 300.0
"""What the loop's figures surely reach back; what is older is in the registry."""
_ENDED = ("done", "failed", "stopped", "cancelled")
_RUN_STATES: dict[str, answers.RunState] = {"queued": "pending", "cancelled": "stopped", "evicted": "paused"}
_CRITICAL = frozenset({"registry", "storage", "draft_workers"})
_HINTS = {
    "registry": "look at learning.registry and its database; serving goes on with the versions it has",
    "storage": "look at learning.storage: free space and permissions; nothing is captured meanwhile",
    "trainer": "see the run's error; `train` tries again",
    "guard": "training waits until serving has room again",
    "rollout": "see the version's page; promote or roll back by hand",
    "draft_workers": "see the workers' page for what they refused",
}


class Desk:
    """What lies on the operator's desk."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._held: View | None = None
        self._started = time.time()

    @property
    def config(self) -> ClusterConfig:
        return self._control.config

    @property
    def loop(self) -> LearningLoop | None:
        return self._control.loop

    @property
    def registry(self) -> Registry | None:
        return None if self.loop is None else self.loop.registry

    def needed_loop(self) -> LearningLoop:
        """The loop.

        Raises:
            AdminError: 409, learning is off.
        """
        if self.loop is None:
            raise AdminError(409, "learning_off", _OFF, "start the cluster with learning.enabled=true")
        return self.loop

    def archive(self) -> Archive | None:
        """The registry with what the loop knows beside it; None where learning is off."""
        view, registry = self.view(), self.registry
        if view is None or registry is None:
            return None
        share = self.needed_loop().learning.rollout.canary_share
        return Archive(
            registry,
            view.figures.get("versions", {}),
            {row["run_id"]: row for row in view.ledger.get("runs", [])},
            {lane.candidate: share for lane in view.lanes if lane.stage == "canary"},
        )

    def writes(self) -> tuple[int, int]:
        """What the loop asked the registry to keep so far, and how many of the first of these writes are done."""
        return (0, 0) if self.loop is None else (self.loop.keeper.num_put, self.loop.keeper.num_written)

    def view(self) -> View | None:
        return self._held if self._held is not None or self.loop is None else self.loop.view()

    @contextmanager
    def one_view(self) -> Iterator[None]:
        """All that is shown inside is of one moment, which is looked at once. Nothing may be awaited inside."""
        before, self._held = self._held, self.view()
        try:
            yield
        finally:
            self._held = before

    # -- overview ----------------------------------------------------------------------------------------

    def overview(self) -> desk_answers.Overview:
        """The first page."""
        view, now = self.view(), time.time()
        workers = self._control.workers()
        num_streams = sum(info.num_streams for info, _ in workers if info.role == "decode")
        if view is None:
            return self._without_learning(now, num_streams)
        figures, readings = view.figures, {r.name: r.now for r in self.guard().readings}
        minute, hour = figures.get("last_minute", {}), figures.get("last_hour", {})
        runs = [run for run in view.runs if run.state not in _ENDED]
        return desk_answers.Overview(
            at=now,
            model=self.config.model.name,
            learning=_learning(view),
            live=_live(view),
            canary=self._canary(view),
            routes=[
                desk_answers.Route(tag=lane.tag, version=lane.live)
                for lane in view.lanes
                if lane.tag and lane.has_own
            ],
            acceptance=_recent(minute, hour, "acceptance"),
            tokens_per_step=_recent(minute, hour, "tokens_per_step"),
            tokens_per_s=desk_answers.Recent(
                now=minute.get("tokens", 0) / 60.0,
                hour=hour.get("tokens", 0) / min(3600.0, max(60.0, now - self._started)),
            ),
            ttft_p99_ms=readings.get("ttft_p99_ms"),
            inter_token_p99_ms=readings.get("inter_token_p99_ms"),
            num_streams=num_streams,
            speculation=_speculation(view.speculation),
            guard=_guard_now(view.guard),
            alarms=[_alarm(alarm.name, alarm.since, alarm.message) for alarm in view.alarms],
            triggers=self._triggers(view),
            run=_run(runs[0], view) if runs else None,
        )

    def _without_learning(self, now: float, num_streams: int) -> desk_answers.Overview:
        unknown = desk_answers.Recent(now=None, hour=None)
        drafts = [info for info, _ in self._control.workers() if info.role == "draft" and info.version]
        is_on = self.config.speculation.enabled
        num_decode = sum(info.role == "decode" for info, _ in self._control.workers())
        return desk_answers.Overview(
            at=now,
            model=self.config.model.name,
            learning=desk_answers.Learning(state="off", reason=_OFF, until=None, is_paused=False),
            live=desk_answers.LiveVersion(
                version=drafts[0].version, since=self._started, by="configuration", pinned=False
            )
            if drafts
            else None,
            canary=None,
            routes=[],
            acceptance=unknown,
            tokens_per_step=unknown,
            tokens_per_s=unknown,
            ttft_p99_ms=None,
            inter_token_p99_ms=None,
            num_streams=num_streams,
            speculation=desk_answers.Speculation(
                on=is_on,
                reason=f"speculation.enabled={str(is_on).lower()}",
                num_on=num_decode if is_on else 0,
                num_workers=num_decode,
            ),
            guard=_guard_now({}),
            alarms=[],
            triggers=[],
            run=None,
        )

    def _canary(self, view: View) -> desk_answers.Canary | None:
        lane = next((lane for lane in view.lanes if lane.stage == "canary"), None)
        if lane is None:
            return None
        test, rollout = lane.test or {}, self.needed_loop().learning.rollout
        has_saving = isinstance(test.get("saving"), dict)
        return desk_answers.Canary(
            version=lane.candidate,
            tag=lane.tag,
            share=rollout.canary_share,
            since=lane.since,
            num_requests=int(test.get("num_requests", 0)),
            num_drafted=int(test.get("num_drafted", 0)),
            min_requests=rollout.canary_min_requests,
            is_weak=bool(test.get("is_weak", True)),
            saving=interval(test["saving"]) if has_saving else None,
        )

    def _triggers(self, view: View) -> list[desk_answers.Trigger]:
        found = [
            desk_answers.Trigger(
                name="new_requests",
                label="New requests captured",
                fires_at=self.needed_loop().learning.train.min_requests,
                now=view.status.new_requests,
                unit="requests",
                direction="above",
                tag="",
            )
        ]
        for entry in view.drift:
            if entry["page_hinkley_threshold"] > 0:
                found.append(
                    desk_answers.Trigger(
                        name=f"drift:{entry['domain']}",
                        label=f"Drift in {entry['domain'] or 'traffic without a domain'}",
                        fires_at=entry["page_hinkley_threshold"],
                        now=entry["page_hinkley"],
                        unit="",
                        direction="above",
                        tag=f"domain:{entry['domain']}" if entry["domain"] else "",
                    )
                )
        return found

    # -- workers -----------------------------------------------------------------------------------------

    def workers(self) -> list[desk_answers.Worker]:
        """All processes, by role and id."""
        view, now = self.view(), time.time()
        drafts = {} if view is None else {str(entry["worker_id"]): entry for entry in view.workers}
        trainer = {} if view is None or view.trainer is None else view.trainer
        revision = 0 if view is None else view.status.revision
        return [
            desk_answers.Worker(
                id=info.worker_id,
                role=info.role,
                state=info.state,
                version=info.version,
                node=info.node,
                pid=info.pid,
                incarnation=str(info.incarnation),
                kv_blocks_used=info.kv_blocks_used,
                kv_blocks_free=info.kv_blocks_free,
                num_streams=info.num_streams,
                seen=0.0 if age is None else now - age,
                draft=_draft_worker(drafts[info.worker_id], revision) if info.worker_id in drafts else None,
                trainer=_trainer(trainer) if trainer.get("worker_id") == info.worker_id else None,
            )
            for info, age in sorted(self._control.workers(), key=lambda w: (w[0].role, w[0].worker_id))
        ]

    # -- drift and guard ---------------------------------------------------------------------------------

    def drift(self) -> list[desk_answers.DriftDomain]:
        """By domain, most requests first."""
        view = self.view()
        fields = desk_answers.DriftDomain.model_fields
        return [
            desk_answers.DriftDomain.model_validate(
                {"action": "", **{name: entry[name] for name in fields if name in entry}}
            )
            for entry in ([] if view is None else view.drift)
        ]

    def guard(self) -> desk_answers.Guard:
        """The guard and its readings."""
        view = self.view()
        given: Mapping[str, Any] = {} if view is None else view.guard
        return desk_answers.Guard(
            now=_guard_now(given),
            readings=[desk_answers.GuardReading(**reading) for reading in given.get("readings", [])],
            history=[
                desk_answers.GuardChange(from_=c["from"], to=c["to"], at=c["at"], reason=c["reason"])
                for c in given.get("history", [])
            ],
            time_at=given.get("time_at", {"normal": 0.0, "throttle": 0.0, "pause": 0.0, "evict": 0.0}),
        )

    # -- figures -----------------------------------------------------------------------------------------

    def figures(
        self, window_s: float, version: str | None, domain: str | None
    ) -> tuple[desk_answers.Figures, float]:
        """What is in memory, and the time before which the registry has to be asked."""
        now = time.time()
        since = now - window_s
        step_s = max(1.0, math.ceil(window_s / _MAX_BUCKETS))
        memory_from = max(math.floor(self._started / 10) * 10.0, now - _MEMORY_S)
        found: dict[str, Any] = {"step_s": step_s, "series": [], "depths": [], "domains": []}
        if self.loop is not None:
            found = self.loop.series(since=since, step_s=step_s)
        series = [
            desk_answers.FigureSeries(
                version=row["version"],
                domain=row["domain"],
                points=[
                    desk_answers.FigurePoint(**p)
                    for p in row["points"]
                    if p["at"] + found["step_s"] > memory_from
                ],
            )
            for row in found["series"]
            if version in (None, row["version"]) and domain in (None, row["domain"])
        ]
        figures = desk_answers.Figures(
            from_=since,
            to=now,
            step_s=found["step_s"],
            series=series,
            depths=[
                desk_answers.DepthRow(**row)
                for row in found["depths"]
                if version in (None, row["version"]) and domain in (None, row["domain"])
            ],
            marks=self.marks(since),
            domains=found["domains"],
        )
        return figures, memory_from

    def marks(self, since: float) -> list[desk_answers.Mark]:
        """What happened since then, oldest first."""
        view = self.view()
        marks = [] if view is None else [mark for mark in view.marks if mark["at"] >= since]
        return [desk_answers.Mark(**mark) for mark in sorted(marks, key=lambda mark: mark["at"])]


def with_older(figures: desk_answers.Figures, points: tuple[FigurePoint, ...]) -> desk_answers.Figures:
    """Figures with what the registry has from before; both are sums, so a bucket that both have is the sum."""
    series: dict[tuple[str, str], dict[float, dict[str, Any]]] = {}
    depths: dict[tuple[str, str, int], list[int]] = {}
    for row in figures.series:
        series[row.version, row.domain] = {point.at: point.model_dump() for point in row.points}
    for depth in figures.depths:
        depths[depth.version, depth.domain, depth.depth] = [depth.num_tested, depth.num_accepted]
    for point in points:
        at = math.floor(point.time / figures.step_s) * figures.step_s
        _add(series.setdefault((point.version, point.domain), {}), at, point)
        for index, (tested, accepted) in enumerate(zip(point.tested, point.accepted, strict=False), 1):
            sums = depths.setdefault((point.version, point.domain, index), [0, 0])
            sums[0] += tested
            sums[1] += accepted
    return desk_answers.Figures(
        from_=figures.from_,
        to=figures.to,
        step_s=figures.step_s,
        series=[
            desk_answers.FigureSeries(
                version=version,
                domain=domain,
                points=[desk_answers.FigurePoint(**row) for _, row in sorted(rows.items())],
            )
            for (version, domain), rows in series.items()
        ],
        depths=[
            desk_answers.DepthRow(version=v, domain=d, depth=i, num_tested=sums[0], num_accepted=sums[1])
            for (v, d, i), sums in sorted(depths.items())
        ],
        marks=figures.marks,
        domains=sorted({*figures.domains, *(domain for _, domain in series)}),
    )


def _add(rows: dict[float, dict[str, Any]], at: float, point: FigurePoint) -> None:
    row = rows.setdefault(
        at,
        {
            "at": at,
            "num_requests": 0,
            "num_tokens": 0,
            "num_steps": 0,
            "num_tested": 0,
            "num_accepted": 0,
            "seconds": 0.0,
        },
    )
    row["num_requests"] += point.num_streams
    row["num_tokens"] += point.num_tokens
    row["num_steps"] += point.num_steps
    row["num_tested"] += sum(point.tested)
    row["num_accepted"] += sum(point.accepted)
    row["seconds"] += point.seconds


def _learning(view: View) -> desk_answers.Learning:
    status = view.status
    until = max((lane.frozen_until for lane in view.lanes), default=0.0)
    return desk_answers.Learning(
        state=status.state,  # type: ignore[arg-type]  # pydantic checks it
        reason=status.reason,
        until=until if status.state == "frozen" and until > 0 else None,
        is_paused=status.is_paused,
    )


def _lane(view: View) -> LaneView | None:
    return next((lane for lane in view.lanes if not lane.tag), None)


def _live(view: View) -> desk_answers.LiveVersion | None:
    lane = _lane(view)
    if not view.status.live:
        return None
    return desk_answers.LiveVersion(
        version=view.status.live,
        since=0.0 if lane is None else lane.live_since,
        by="loop" if lane is None else lane.live_by,
        pinned=lane is not None and lane.is_pinned,
    )


def _recent(minute: Mapping[str, Any], hour: Mapping[str, Any], name: str) -> desk_answers.Recent:
    return desk_answers.Recent(
        now=finite(minute.get(name)),
        hour=finite(hour.get(name)),
    )


def _speculation(given: Mapping[str, Any]) -> desk_answers.Speculation:
    return desk_answers.Speculation(
        on=bool(given.get("on", True)),
        reason=str(given.get("reason", "")),
        num_on=int(given.get("num_on", 0)),
        num_workers=int(given.get("num_workers", 0)),
    )


def _guard_now(given: Mapping[str, Any]) -> desk_answers.GuardNow:
    now = given.get("now") or {}
    return desk_answers.GuardNow(
        level=now.get("level", "normal"),
        reason=str(now.get("reason", "" if given else _OFF)),
        since=float(now.get("since", 0.0)),
    )


def _alarm(name: str, since: float, message: str) -> desk_answers.Alarm:
    severity: Literal["warning", "critical"] = "critical" if name in _CRITICAL else "warning"
    return desk_answers.Alarm(
        id=name, severity=severity, message=message, hint=_HINTS.get(name, ""), since=since
    )


def _run(run: RunView, view: View) -> answers.RunSummary:
    trainer = view.trainer or {}
    is_mine = trainer.get("run_id") == run.run_id
    num_tokens = int(trainer.get("num_tokens", 0)) if is_mine else 0
    return answers.RunSummary(
        run_id=run.run_id,
        kind="train" if run.kind == "train" else "score",
        state=_RUN_STATES.get(run.state, run.state),  # type: ignore[arg-type]
        tag=run.tag,
        base=run.base,
        result=run.candidate,
        why=run.reason,
        created=run.began,
        started=run.began or None,
        ended=run.ended or None,
        step=run.step,
        num_steps=run.num_steps,
        num_tokens=num_tokens,
        loss=finite(run.loss) if run.losses else None,
        tokens_per_s=num_tokens / run.seconds if run.seconds > 0 and num_tokens else None,
        seconds=run.seconds,
        cpu_s=run.cpu_s,
        eta_s=run.seconds / run.step * (run.num_steps - run.step) if run.step else None,
        level=_guard_now(view.guard).level,
        error=run.error,
    )


def _draft_worker(entry: Mapping[str, Any], revision: int) -> desk_answers.DraftWorker:
    refused = entry.get("refused") or []
    pairs = refused.items() if isinstance(refused, Mapping) else refused
    return desk_answers.DraftWorker(
        live=str(entry.get("live", "")),
        canary=str(entry.get("canary", "")),
        resident=list(entry.get("resident", [])),
        is_current=int(entry.get("revision", 0)) >= revision,
        swap_ms=float(entry.get("swap_ms", 0.0)),
        refused=[desk_answers.RefusedVersion(version=str(v), reason=str(r)) for v, r in pairs],
    )


def _trainer(entry: Mapping[str, Any]) -> desk_answers.TrainerWorker:
    return desk_answers.TrainerWorker(
        run_id=str(entry.get("run_id", "")),
        state=str(entry.get("state", "idle")),
        level=entry.get("level", "normal"),
        cpu_s=float(entry.get("cpu_s", 0.0)),
    )
