"""Who is signed in, what is kept, changed and done -> the values that the admin API answers with.

All answers, these and those of `desk_answers` and `archive_answers`, are the same as `dashboard/src/api.ts`, field by field; a
test compares them. Times are Unix seconds, shares 0 to 1, and None is "not known yet", never 0.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

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
Resource = Literal["versions", "runs", "ledger", "drift", "guard", "capture", "audit", "settings", "keys"]
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


# --- common ---------------------------------------------------------------------------------------------


class Interval(Answer):
    """A mean with its 95 % interval."""

    mean: float
    lo: float
    hi: float


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


# --- API keys -------------------------------------------------------------------------------------------

KeyScope = Literal["user", "admin"]
CaptureRule = Literal["never", "asked", "default"]


class KeyLimits(Answer):
    """What a key may use; 0 is no limit, or in a key the configuration's."""

    requests_per_minute: int
    tokens_per_minute: int
    concurrency: int


class ApiKey(Answer):
    """What is kept of an API key."""

    id: str
    """Part of its text, and all of it that is ever shown."""
    name: str
    tenant: str
    scope: KeyScope
    """user opens the API at gateways, admin opens Control."""
    capture: CaptureRule
    """What of its requests may be kept for training."""
    created: float
    revoked: float | None
    limits: KeyLimits


class CreatedKey(Answer):
    """A new key."""

    key: ApiKey
    secret: str
    """Its text: it is kept nowhere and never shown again."""


class Keys(Answer):
    """All keys, the latest first."""

    keys: list[ApiKey]
    asked: bool
    """Whether gateways let nobody in without one."""
    defaults: KeyLimits
    """Of keys without limits of their own."""
    trouble: str
    """Why the key file cannot be read; empty if it can."""


# --- settings, actions, events --------------------------------------------------------------------------


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
