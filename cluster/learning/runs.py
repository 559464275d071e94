"""Triggers and the trainer's statuses -> one order at a time: select from the pool, train, score; and what came of it.

    drift, with other drafts in the pool -> rank them -> the best is scored, or none helps -> train
    train -> a candidate -> score it against the live version -> the gate's report

A run is what the trainer does under one id. What follows from its end is decided here as well, so that one trigger
leads from captured text to a candidate that passed the gate, or to a reason why there is none.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.cluster.learning.orders import OrderSettings
from paceline.cluster.learning.views import RunView
from paceline.cluster.types import DraftRef, TrainerStatus, TrainOrder

Kind = Literal["train", "score", "rank"]
_KEPT_RUNS = 50
_KEPT_LOSSES = 600


@dataclass(slots=True)
class Run:
    """One order of the trainer and how far it is."""

    run_id: str
    kind: Kind
    tag: str
    base: DraftRef
    candidate: DraftRef | None
    settings: OrderSettings
    reason: str
    actor: str
    began: float
    family: str = ""
    """Run id of the training that a scoring belongs to: the ledger counts both as one."""
    state: str = "pending"
    started: float = 0.0
    ended: float = 0.0
    step: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    loss: float = math.nan
    losses: list[tuple[int, float]] = field(default_factory=list)
    cpu_s: float = 0.0
    seconds: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    result: DraftRef | None = None

    @property
    def order(self) -> TrainOrder:
        kind: Literal["train", "score"] = "train" if self.kind == "train" else "score"
        return TrainOrder(self.run_id, kind, self.base, self.candidate, self.tag, self.settings.encode())

    @property
    def refs(self) -> tuple[DraftRef, ...]:
        """Versions that it reads."""
        return (self.base, *((self.candidate,) if self.candidate else ()), *self.settings.rank)

    def take(self, status: TrainerStatus, now: float) -> bool:
        """What the trainer says of it -> whether it ended just now."""
        self.started = self.started or now
        before = self.step
        self.state = "pending" if status.state == "idle" else status.state
        self.step, self.num_steps = status.step, status.num_steps
        self.num_tokens, self.cpu_s, self.seconds = status.num_tokens, status.cpu_s, status.seconds
        if self.kind == "train" and status.step > 0 and (status.step != before or not self.losses):
            self.loss = status.loss
            self.losses.append((status.step, status.loss))
            if len(self.losses) > _KEPT_LOSSES:
                self.losses = self.losses[::2]
        if status.state not in ("done", "failed"):
            return False
        self.ended, self.error, self.result = now, status.error, status.result
        self.report = _object(status.report)
        return True

    def view(self) -> RunView:
        candidate = self.candidate or self.result
        return RunView(
            run_id=self.run_id,
            kind="train" if self.kind == "train" else "score",
            state=self.state,
            tag=self.tag,
            base=self.base.version,
            candidate=candidate.version if candidate else "",
            began=self.began,
            ended=self.ended,
            reason=self.reason,
            step=self.step,
            num_steps=self.num_steps,
            loss=self.loss,
            losses=list(self.losses),
            cpu_s=self.cpu_s,
            seconds=self.seconds,
            report=self.report,
            error=self.error,
        )


def _object(text: bytes) -> dict[str, Any]:
    """A report as a dictionary; what is none is kept as text, for people."""
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {"text": text[:1000].decode("utf-8", "replace")}
    return found if isinstance(found, dict) else {"value": found}


class Runs:
    """The run that is on, what waits behind it, and those that ended."""

    def __init__(self) -> None:
        self.current: Run | None = None
        self.waiting: deque[Run] = deque()
        self.past: deque[Run] = deque(maxlen=_KEPT_RUNS)

    def add(self, run: Run) -> None:
        """After those that wait."""
        self.waiting.append(run)
        self._next()

    def _next(self) -> None:
        if self.current is None and self.waiting:
            self.current = self.waiting.popleft()

    def take(self, status: TrainerStatus, now: float) -> tuple[Run | None, bool]:
        """A status -> the run that it is about, if that is on, and whether it ended."""
        run = self.current
        if run is None or status.run_id != run.run_id:
            return None, False
        if not run.take(status, now):
            return run, False
        self._end(run)
        return run, True

    def stop(self, run_id: str, now: float, reason: str) -> Run | None:
        """End a run, or forget that it waits; the trainer drops what is not published."""
        found = next((r for r in (self.current, *self.waiting) if r is not None and r.run_id == run_id), None)
        if found is None:
            return None
        found.state, found.ended, found.error = "stopped", now, reason
        if found is self.current:
            self._end(found)
        else:
            self.waiting.remove(found)
            self.past.append(found)
        return found

    def _end(self, run: Run) -> None:
        self.past.append(run)
        self.current = None
        self._next()

    @property
    def order(self) -> TrainOrder | None:
        return self.current.order if self.current is not None else None

    def open(self) -> list[Run]:
        """The one that is on, and those that wait."""
        return [*([self.current] if self.current is not None else []), *self.waiting]

    def is_busy(self, tag: str | None = None) -> bool:
        """Whether a run of a tag, or any, is on or waits."""
        return any(tag in (None, run.tag) for run in self.open())

    def last(self, tag: str, kind: Kind) -> Run | None:
        """The latest of this kind that ended."""
        return next((r for r in reversed(self.past) if r.tag == tag and r.kind == kind), None)

    def views(self) -> list[RunView]:
        """Newest first."""
        runs = [*self.waiting, *([self.current] if self.current else []), *reversed(self.past)]
        return [run.view() for run in sorted(runs, key=lambda run: -run.began)]


def best_of(report: Mapping[str, Any], live: str, least: float) -> str | None:
    """The first of a ranking, if it is another version than the live one and surely saves more than this."""
    for row in report.get("ranked", ()):
        if row.get("version") == live:
            return None
        if float(row.get("saving", {}).get("lo", -1.0)) > least:
            return str(row["version"])
    return None
