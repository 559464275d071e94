"""What the loop and operators decide -> frozen records, which the registry keeps and gives back.

Times are seconds since 1970 in UTC. A *tag* says whom a draft is for: "" is everybody, else tenant:NAME or domain:NAME.
All records but `Version` are only ever added or, where a method says so, replaced by a newer one with the same key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")

VersionState = Literal[
    "candidate", "rejected", "canary", "live", "retired", "rolled_back", "stale", "revoked"
]

MOVES: dict[VersionState, frozenset[VersionState]] = {
    "candidate": frozenset({"rejected", "canary", "live", "stale", "revoked"}),
    "rejected": frozenset({"candidate", "stale", "revoked"}),
    "canary": frozenset({"candidate", "rejected", "live", "rolled_back", "stale", "revoked"}),
    "live": frozenset({"retired", "rolled_back", "stale", "revoked"}),
    "retired": frozenset({"candidate", "canary", "live", "stale", "revoked"}),
    "rolled_back": frozenset({"candidate", "stale", "revoked"}),
    "stale": frozenset({"candidate", "revoked"}),
    "revoked": frozenset(),
}
"""From each state to those that may follow. What was refused once becomes a candidate again before anything else;
what was revoked, because data it was trained on was deleted, never comes back."""


@dataclass(frozen=True)
class Version:
    """A draft: where its weights lie and what has become of it."""

    version: str
    """Content hash (12 hex digits) of its weights."""
    url: str = ""
    """fsspec URL of its folder; "" is the draft of the configuration, or one whose weights are on storage no more."""
    sha256: str = ""
    """Of model.safetensors, hex."""
    base: str = ""
    """The version it was trained from; "" for one that was not trained here."""
    run_id: str = ""
    tag: str = ""
    target: str = ""
    """Version of the target it was trained for."""
    state: VersionState = "candidate"
    created: float = 0.0
    changed: float = 0.0
    """When it came into this state."""
    reason: str = ""
    """Why it is in this state, in words for operators."""
    pinned: bool = False
    """Live, and nothing replaces it by itself."""
    card: dict[str, Any] = field(default_factory=dict)
    """What its card.json says: parameters, bytes, how it was trained."""


RunKind = Literal["train", "score"]
RunState = Literal["pending", "loading", "training", "scoring", "paused", "done", "failed", "stopped"]


@dataclass(frozen=True)
class Run:
    """One run of the trainer, replaced as it goes on."""

    run_id: str
    kind: RunKind = "train"
    trigger: str = ""
    """What began it: drift, new data, or an operator's name."""
    base: str = ""
    tag: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """What of the configuration was different for it."""
    state: RunState = "pending"
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    steps: int = 0
    num_steps: int = 0
    """Planned."""
    tokens: int = 0
    seconds: float = 0.0
    """Of wall time, pauses left out."""
    cpu_s: float = 0.0
    loss: tuple[tuple[float | None, ...], ...] = ()
    """(step, loss) or (step, loss, acceptance), in order; None where it was not a number."""
    report: dict[str, Any] = field(default_factory=dict)
    """What the trainer said at the end."""
    error: str = ""
    result: str = ""
    """The version it made."""


@dataclass(frozen=True)
class GateRecord:
    """A candidate was compared with the champion."""

    run_id: str
    """Of the run that scored them."""
    champion: str
    candidate: str
    passed: bool
    reason: str
    created: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    """The gate's figures, with intervals and domains."""


Decision = Literal["train", "skip", "deploy", "refuse", "speculate", "stop_speculating", "roll_back"]


@dataclass(frozen=True)
class LedgerEntry:
    """What the loop decided, what it promised itself of that, and what came of it."""

    decision: Decision
    reason: str
    decided_at: float
    run_id: str = ""
    version: str = ""
    tag: str = ""
    predicted_s: float | None = None
    """Seconds of serving it should save; None where nothing was predicted."""
    predicted_cost_s: float | None = None
    """Seconds it should cost."""
    realised_s: float | None = None
    """Seconds it did save; None while nobody knows."""
    spent_s: float = 0.0
    """Seconds it cost."""
    until: float | None = None
    """When the decision ceased to hold; None while it does."""
    id: int = 0
    """Given by the registry."""


Event = Literal["canary", "promoted", "rolled_back", "rejected", "retired", "pinned", "unpinned", "stale", "revoked",
                "candidate", "route", "no_route", "frozen", "swapped"]  # fmt: skip


@dataclass(frozen=True)
class RolloutEvent:
    """Something happened to a version: a mark on the charts."""

    time: float
    version: str
    event: Event
    reason: str = ""
    actor: str = "loop"
    """The loop itself, or an operator's name."""
    tag: str = ""
    id: int = 0
    """Given by the registry."""


@dataclass(frozen=True)
class AuditRow:
    """An operator did something, or tried to. Never changed and never deleted."""

    time: float
    actor: str
    action: str
    """In words of the API: promote, pin, delete_data, sign_in, ..."""
    subject: str = ""
    """What it was done to: a version, run, tenant or request."""
    detail: dict[str, Any] = field(default_factory=dict)
    outcome: str = "done"
    """done, refused or failed, and why."""
    address: str = ""
    """Where the request came from."""
    id: int = 0
    """Given by the registry."""


@dataclass(frozen=True)
class Setting:
    """A switch that operators turn while the cluster runs, such as `paused`."""

    key: str
    value: Any
    """JSON."""
    changed: float = 0.0


@dataclass(frozen=True)
class Source:
    """What a version was trained on: a request, or a whole shard, of a tenant."""

    tenant: str
    request_id: str = ""
    shard: str = ""
    num_tokens: int = 0
    created: float = 0.0


@dataclass(frozen=True)
class TenantShare:
    """What a version was trained on, of one tenant."""

    tenant: str
    num_requests: int
    num_tokens: int


@dataclass(frozen=True)
class Lineage:
    """Where a version comes from."""

    version: str
    parents: tuple[str, ...]
    """The versions whose weights it was trained from, its base first."""
    children: tuple[str, ...]
    tenants: tuple[TenantShare, ...]
    """Whose requests it learned from itself, most first."""
    num_shards: int
    data_from: float | None
    data_to: float | None


@dataclass(frozen=True)
class Route:
    """All streams that carry a tag get this version, whoever it was trained for."""

    tag: str
    version: str
    reason: str = ""
    created: float = 0.0


@dataclass(frozen=True)
class FigurePoint:
    """Sums over the streams of one version and domain that ended in [time, time + width_s)."""

    time: float
    width_s: float
    version: str
    """"" counts streams that nobody drafted for."""
    domain: str = ""
    num_streams: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    """Of decoding, summed over streams."""
    tested: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    """These two by depth from 1, as in `ServedStream`."""


DeletionState = Literal["pending", "done", "failed"]


@dataclass(frozen=True)
class Deletion:
    """Captured data of a tenant, or one request, that had to go; replaced as it goes on."""

    id: str
    created: float
    actor: str
    what: str
    """tenant:NAME or request:ID"""
    state: DeletionState = "pending"
    num_requests: int = 0
    versions: tuple[str, ...] = ()
    """That had learned from it, or from one that had."""
    error: str = ""


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some of a long list, newest first."""

    items: tuple[T, ...]
    total: int
    """Of all that match."""
    next: int | None
    """Pass as `cursor` for what follows; None at the end."""
