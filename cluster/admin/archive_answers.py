"""Versions, runs, gates, ledger and audit as the registry keeps them -> the values that the admin API answers with."""

from __future__ import annotations

from typing import Any, Literal

from paceline.cluster.admin.answers import Answer, Interval, RunSummary, VersionState

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


# --- runs and audit -------------------------------------------------------------------------------------


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
