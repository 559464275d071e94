"""The loop's state -> plain values for the API, the dashboard and `paceline drafts`: what each field means.

`LearningLoop.view()` returns a `View`; `dataclasses.asdict` makes JSON of it. Times are Unix seconds, durations seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Action = Literal[
    "train", "pause", "resume", "canary", "promote", "pin", "unpin", "roll_back", "forget", "delete", "revoke"
]
"""What an operator can ask for (`LearningLoop.act`), and what `subject` is then.

train: a tag ("" is everything): train now.       pause, resume: "": no run begins by itself.
canary, promote: a version, optionally `VERSION@TAG`.     pin, unpin: a tag: nothing automatic changes its version.
roll_back: a tag: to the version before.          forget: a run: stop it.
delete: tenant:NAME or request:ID: what was captured of it.      revoke: a version: never serve it again.
"""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of an action; `message` says it in words either way."""

    is_done: bool
    message: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something an operator should know: shown until it is over."""

    name: str
    """registry, storage, trainer, guard, rollout or draft_workers."""
    since: float
    message: str


@dataclass(frozen=True, slots=True)
class StatusView:
    """One line: what the loop does now, and why."""

    state: str
    """off, paused, waiting, training, scoring, preparing, canary, watching or frozen."""
    reason: str
    live: str
    """Version of all streams that nothing else is said of."""
    canary: str
    revision: int
    target: str
    new_requests: int
    """Captured since the last run began."""
    is_paused: bool


@dataclass(frozen=True, slots=True)
class LaneView:
    """One tag ("" is everything that has none) and its live version."""

    tag: str
    live: str
    live_since: float
    live_by: str
    """The loop, or an operator's name."""
    previous: str
    stage: str
    """steady, preparing, canary, watch or frozen."""
    candidate: str
    """Being prepared or in canary."""
    since: float
    is_pinned: bool
    frozen_until: float
    num_rollbacks: int
    """In a row."""
    has_own: bool
    """False: its streams get everybody's version; `live` is that one."""
    test: dict[str, Any] | None
    """The sequential test that runs (`Trial.view`): streams and figures of both arms, the interval, and whether drafts
    were tried often enough for it to be evidence."""
    reason: str


@dataclass(frozen=True, slots=True)
class VersionView:
    """A version as the loop sees it; the registry's record has the rest (card, lineage, gate report)."""

    version: str
    state: str
    parent: str
    tag: str
    created: float
    url: str
    reason: str
    resident_in: list[str]
    """Draft workers."""
    refused_by: dict[str, str]


@dataclass(frozen=True, slots=True)
class RunView:
    """One run of the trainer."""

    run_id: str
    kind: str
    state: str
    tag: str
    base: str
    candidate: str
    began: float
    ended: float
    reason: str
    """Why it began."""
    step: int
    num_steps: int
    loss: float
    losses: list[tuple[int, float]]
    """(step, loss) so far."""
    cpu_s: float
    seconds: float
    report: dict[str, Any]
    """What the trainer, or the gate, said at the end."""
    error: str


@dataclass(frozen=True, slots=True)
class View:
    """All of it."""

    is_enabled: bool
    status: StatusView
    lanes: list[LaneView]
    versions: list[VersionView]
    runs: list[RunView]
    """Newest first."""
    figures: dict[str, Any]
    """`Figures.view`: totals by version and domain, acceptance by depth, latest bucket."""
    ledger: dict[str, Any]
    """`Ledger.view`: the decision in words, prediction, entries by run, totals."""
    guard: dict[str, Any]
    """`Guard.view`: level, since, reason, each figure with its limit."""
    drift: list[dict[str, Any]]
    """`Drift.view`: one entry by domain."""
    speculation: dict[str, Any]
    """Whether decode workers speculate and, where they do not, why."""
    trainer: dict[str, Any] | None
    """The trainer's last status; None if there is none."""
    workers: list[dict[str, Any]] = field(default_factory=list)
    """Draft workers: revision, live, resident, refused, swap_ms."""
    alarms: list[Alarm] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    """Marks for charts over time: {at, kind: swap|canary|rollback|drift|train|gate, version, tag, text}."""
