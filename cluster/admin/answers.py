"""the loop's state, the registry's records and workers' snapshots -> the values that the admin API answers with.

The same as `dashboard/src/api.ts`, field by field; a test compares them. Times are Unix seconds, shares 0 to 1, and None
is "not known yet", never 0.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")

VersionState = Literal[
    "candidate", "rejected", "canary", "live", "retired", "rolled_back", "stale", "revoked"
]
RunState = Literal["pending", "loading", "training", "scoring", "paused", "done", "failed", "stopped"]
GuardLevel = Literal["normal", "throttle", "pause", "evict"]
LearningState = Literal[
    "off", "paused", "waiting", "blocked", "training", "scoring", "preparing", "canary", "watching", "frozen"
]
ActionName = Literal[
    "train", "forget", "pause", "resume", "canary", "promote", "pin", "unpin", "roll_back", "revoke", "delete"
]
Resource = Literal["versions", "runs", "ledger", "drift", "guard", "capture", "audit", "settings"]
Scalar = bool | int | float | str


class Answer(BaseModel):
    """Base of all: every field is always there."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Page(Answer, Generic[T]):
    """One page of a long list."""

    items: list[T]
    total: int
    """Of all that match the filter."""
    next: str | None
    """Pass as `cursor` for what follows; null at the end."""


# --- session --------------------------------------------------------------------------------------------


class Session(Answer):
    """Who is signed in."""

    who: str
    csrf: str
    """To be sent as X-CSRF-Token with whatever changes something."""
    expires: float
    model: str
    build: str
    """Version of Paceline."""


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


class Interval(Answer):
    """A mean with its 95 % interval."""

    mean: float
    lo: float
    hi: float


class Canary(Answer):
    """A candidate that serves a share of the streams."""

    version: str
    tag: str
    share: float
    since: float
    num_requests: int
    min_requests: int
    saving: Interval | None


class Route(Answer):
    """A tag and the version its streams get."""

    tag: str
    version: str


class Recent(Answer):
    """A figure over the last minute and hour."""

    now: float | None
    hour: float | None
    without_learning: float | None
    """The hour's value if the shipped draft had served, where replay knows it."""


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


class RunSummary(Answer):
    """One run of the trainer."""

    run_id: str
    kind: Literal["train", "score"]
    state: RunState
    tag: str
    base: str
    result: str
    """The version it made; empty until it is published."""
    why: str
    created: float
    started: float | None
    ended: float | None
    step: int
    num_steps: int
    num_tokens: int
    loss: float | None
    tokens_per_s: float | None
    seconds: float
    """Of wall time, pauses left out."""
    cpu_s: float
    eta_s: float | None
    level: GuardLevel
    error: str


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


# --- gate -----------------------------------------------------------------------------------------------


class GateDomain(Answer):
    """The gate's figures for one domain."""

    domain: str
    num_requests: int
    saving: Interval
    passed: bool


class GateReport(Answer):
    """A candidate against the champion, on requests that were held out."""

    version: str
    champion: str
    at: float
    passed: bool
    reason: str
    num_requests: int
    num_tokens: int
    saving: Interval
    """Of decode time."""
    min_saving: float
    domain_floor: float
    domains: list[GateDomain]
    slowdown: float | None
    """The candidate's forward against the champion's."""
    max_slowdown: float
    champion_tokens_per_step: float | None
    candidate_tokens_per_step: float | None
    champion_acceptance: float | None
    candidate_acceptance: float | None


# --- versions -------------------------------------------------------------------------------------------


class GateSummary(Answer):
    """The gate's answer in short."""

    passed: bool
    saving: Interval


class Version(Answer):
    """A draft."""

    version: str
    state: VersionState
    reason: str
    parent: str
    tag: str
    created: float
    run_id: str
    pinned: bool
    canary_share: float
    gate: GateSummary | None
    acceptance: float | None
    tokens_per_step: float | None
    num_requests: int


class TrainedOn(Answer):
    """How much of a tenant a version learned from."""

    tenant: str
    num_requests: int
    num_tokens: int


class HistoryEntry(Answer):
    """A version came into a state."""

    at: float
    state: VersionState
    who: str
    reason: str


class VersionDetail(Version):
    """All that is known of a draft."""

    target: str
    url: str
    sha256: str
    num_bytes: int
    num_parameters: int
    trained_on: list[TrainedOn]
    num_shards: int
    data_from: float | None
    data_to: float | None
    report: GateReport | None
    history: list[HistoryEntry]


class LineageNode(Answer):
    """A version in the tree of versions."""

    version: str
    parent: str
    state: VersionState
    tag: str
    created: float
    run_id: str
    num_requests: int
    saving: float | None
    pinned: bool


class Lineage(Answer):
    """All versions, oldest first: a parent stands before its children."""

    nodes: list[LineageNode]


# --- ledger ---------------------------------------------------------------------------------------------


class LedgerRow(Answer):
    """What a run promised, brought and cost."""

    run_id: str
    version: str
    tag: str
    at: float
    predicted_s: float | None
    realised_s: float | None
    spent_s: float
    still_serving: bool


class LedgerTotal(Answer):
    """Over all runs."""

    predicted_s: float
    realised_s: float
    spent_s: float
    net_s: float
    num_runs: int


class LedgerDecision(Answer):
    """Something was not done, for a reason."""

    at: float
    what: Literal["do_not_train", "do_not_speculate"]
    tag: str
    reason: str
    expected_saving_s: float | None
    expected_cost_s: float | None
    until: float | None


class Ledger(Answer):
    """Whether learning pays."""

    runs: list[LedgerRow]
    total: LedgerTotal
    decisions: list[LedgerDecision]
    next: str | None


class LossPoint(Answer):
    """The loss at a step."""

    step: int
    loss: float
    acceptance: float | None


class RunDetail(RunSummary):
    """All that is known of a run."""

    loss_curve: list[LossPoint]
    settings: dict[str, Any]
    ledger: LedgerRow | None


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


# --- capture and consent --------------------------------------------------------------------------------


class CaptureCounters(Answer):
    """Since the workers that count started."""

    num_seen: int
    num_kept: int
    num_opted_out: int
    num_no_consent: int
    num_dropped: int
    num_redacted: int
    num_expired: int
    num_deleted: int


class CaptureTenant(Answer):
    """What is kept of a tenant."""

    tenant: str
    default_consent: bool
    num_requests: int
    num_tokens: int
    num_bytes: int
    num_opted_out: int | None
    share: float | None


class Deletion(Answer):
    """Somebody asked for captured data to go."""

    id: str
    at: float
    who: str
    what: str
    state: Literal["pending", "done", "failed"]
    num_requests: int
    versions: list[str]


class Capture(Answer):
    """What is kept of requests, and of whom."""

    enabled: bool
    reason: str
    storage: str
    num_requests: int
    num_held_out: int
    num_tokens: int
    num_bytes: int
    max_bytes: int
    oldest: float | None
    newest: float | None
    ttl_s: float
    redact: str
    counters: CaptureCounters
    tenants: list[CaptureTenant]
    deletions: list[Deletion]


# --- audit, settings, actions, events -------------------------------------------------------------------


class AuditRow(Answer):
    """Somebody did something, or tried to."""

    id: int
    at: float
    who: str
    address: str
    action: str
    subject: str
    detail: str
    ok: bool


class Setting(Answer):
    """A field of the configuration, and what is in force now."""

    name: str
    section: str
    label: str
    help: str
    kind: Literal["number", "integer", "boolean", "choice", "text"]
    unit: str
    value: Scalar
    configured: Scalar
    min: float | None
    max: float | None
    choices: list[str]
    editable: bool


class ActionResult(Answer):
    """What was done or begun."""

    message: str
    id: str


class Changed(Answer):
    """What to load again."""

    what: list[Resource]
