"""The loop's state and workers' snapshots -> the values that the admin API answers with: how things are now, and lately."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.cluster.admin.answers import Answer, GuardLevel, Interval, LearningState, RunSummary

# --- overview -------------------------------------------------------------------------------------------


class Learning(Answer):
    """What the loop does now, and why."""

    state: LearningState
    reason: str
    until: float | None
    is_paused: bool


class LiveVersion(Answer):
    """The version for everything that no route or canary takes."""

    version: str
    since: float
    by: str
    pinned: bool


class Canary(Answer):
    """A candidate that serves a share of the streams."""

    version: str
    tag: str
    share: float
    since: float
    num_requests: int
    num_drafted: int
    """Of these, requests in which a draft was tried: only they show anything of it."""
    min_requests: int
    """Of those."""
    is_weak: bool
    """Next to nothing was drafted so far, for example because drafting is off: the comparison says nothing yet."""
    saving: Interval | None


class Route(Answer):
    """A tag and the version its streams get."""

    tag: str
    version: str


class Recent(Answer):
    """A figure over the last minute and hour."""

    now: float | None
    hour: float | None


class Speculation(Answer):
    """Whether decode workers speculate."""

    on: bool
    reason: str
    num_on: int
    num_workers: int


class GuardNow(Answer):
    """How much the trainer may take."""

    level: GuardLevel
    reason: str
    since: float


class Alarm(Answer):
    """Something an operator should know, until it is over."""

    id: str
    severity: Literal["warning", "critical"]
    message: str
    hint: str
    since: float


class Trigger(Answer):
    """What makes the next run begin."""

    name: str
    label: str
    fires_at: float
    now: float
    unit: str
    direction: Literal["above", "below"]
    tag: str


class Overview(Answer):
    """The first page."""

    at: float
    model: str
    learning: Learning
    live: LiveVersion | None
    canary: Canary | None
    routes: list[Route]
    acceptance: Recent
    tokens_per_step: Recent
    tokens_per_s: Recent
    ttft_p99_ms: float | None
    inter_token_p99_ms: float | None
    num_streams: int
    speculation: Speculation
    guard: GuardNow
    alarms: list[Alarm]
    triggers: list[Trigger]
    run: RunSummary | None


# --- workers --------------------------------------------------------------------------------------------


class RefusedVersion(Answer):
    """A version that a draft worker will not serve."""

    version: str
    reason: str


class DraftWorker(Answer):
    """What a draft worker holds."""

    live: str
    canary: str
    resident: list[str]
    is_current: bool
    """False while it has not taken up the plan in force."""
    swap_ms: float
    refused: list[RefusedVersion]


class TrainerWorker(Answer):
    """What the trainer does."""

    run_id: str
    state: str
    level: GuardLevel
    cpu_s: float


class Worker(Answer):
    """One process of the cluster."""

    id: str
    role: Literal["gateway", "router", "prefill", "decode", "draft", "trainer", "control"]
    state: str
    version: str
    node: str
    pid: int
    incarnation: str
    """A string, since JavaScript would round the number."""
    kv_blocks_used: int
    kv_blocks_free: int
    num_streams: int
    seen: float
    draft: DraftWorker | None
    trainer: TrainerWorker | None


# --- drift and guard ------------------------------------------------------------------------------------


class DriftDomain(Answer):
    """Whether a domain's acceptance has fallen."""

    domain: str
    num_requests: int
    short: float | None
    long: float | None
    epsilon: float
    page_hinkley: float
    page_hinkley_threshold: float
    drifted: bool
    since: float | None
    action: str


class GuardReading(Answer):
    """A figure that training must not harm."""

    name: Literal["ttft_p99_ms", "inter_token_p99_ms", "queue", "kv_use"]
    now: float | None
    limit: float
    pause_at: float
    resume_at: float


class GuardChange(Answer):
    """The guard's level changed."""

    at: float
    from_: GuardLevel = Field(serialization_alias="from")
    to: GuardLevel
    reason: str


class Guard(Answer):
    """The guard, its readings and what it did."""

    now: GuardNow
    readings: list[GuardReading]
    history: list[GuardChange]
    time_at: dict[GuardLevel, float]
    """Seconds at each level in the last 24 h."""


# --- figures over time ----------------------------------------------------------------------------------


class FigurePoint(Answer):
    """Counts of a bucket, so that any sum of buckets gives the right ratio."""

    at: float
    num_requests: int
    num_tokens: int
    num_steps: int
    num_tested: int
    num_accepted: int
    seconds: float


class FigureSeries(Answer):
    """Of one version and one domain, oldest first; buckets with nothing are left out."""

    version: str
    domain: str
    points: list[FigurePoint]


class DepthRow(Answer):
    """Acceptance at a depth of the draft, from 1, over the whole window."""

    version: str
    domain: str
    depth: int
    num_tested: int
    num_accepted: int


class Mark(Answer):
    """Something that happened, for the charts."""

    at: float
    kind: Literal["swap", "canary", "promote", "rollback", "drift", "train", "gate"]
    version: str
    tag: str
    text: str


class Figures(Answer):
    """Figures over time."""

    from_: float = Field(serialization_alias="from")
    to: float
    step_s: float
    series: list[FigureSeries]
    depths: list[DepthRow]
    marks: list[Mark]
    domains: list[str]


class DeltaPoint(FigurePoint):
    """A bucket of one second of one version and domain."""

    version: str
    domain: str


class FiguresDelta(Answer):
    """What the last second added."""

    points: list[DeltaPoint]
    depths: list[DepthRow]
    marks: list[Mark]
