"""YAML -> the `learning` section of the configuration, with its own sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.cluster.section import Seconds, Section, Share


class CaptureConfig(Section):
    """What is kept of requests whose operator, tenant and client agree."""

    local_consent: Literal["never", "asked", "default"] = "default"
    """Of requests without an API key (loopback). never: none is kept; asked: those with `"store": true`; default:
    those without `"store": false`."""
    top: Annotated[int, Field(ge=1, le=128)] = 128
    """Logits kept of each token, besides the log of their sum."""
    ttl_h: Annotated[float, Field(gt=0, le=24 * 365)] = 72.0
    """After so many hours it is deleted."""
    max_mb: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """Storage it may take; the oldest goes first."""
    queue_mb: Annotated[int, Field(ge=1, le=1 << 16)] = 16
    """Memory for what is not written yet, in each decode worker: half for what was taken in the last steps, half for
    what was put together of it. Requests that do not fit are dropped and counted."""
    flush_s: Seconds = 5.0
    """A request is on storage so long after its end, at most."""
    holdout: Share = 0.05
    """Of requests, by their id, that are kept for the gate and never trained on."""
    redact: str = "none"
    """package.module:function that is given a request's record before it is kept, and returns what to keep."""


class TrainConfig(Section):
    """How drafts are trained."""

    min_requests: Annotated[int, Field(ge=1, le=1 << 30)] = 500
    """New ones before a run begins by itself."""
    max_steps: Annotated[int, Field(ge=1, le=1 << 20)] = 200
    """Of one run."""
    batch_tokens: Annotated[int, Field(ge=64, le=1 << 24)] = 4096
    """Target tokens in one optimiser step."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """After 20 steps of warm-up, constant."""
    fresh_share: Share = 0.7
    """Of a batch, from what was captured since the last run; the rest from a reservoir of older requests."""
    max_tenant_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Of a batch that one tenant may have, if there are others."""
    loss: Literal["kl", "tv", "log_alpha", "hybrid", "adaspec"] = "hybrid"
    """kl: forward, with a rest bucket. tv: total variation. hybrid: from the first to the second as acceptance grows.
    adaspec: kl on the tokens that a reference still finds learnable; the reference takes half of the steps.
    log_alpha: -log of the overlap."""
    greedy_temperature: Annotated[float, Field(ge=0.05, le=1)] = 0.3
    """Requests under this temperature are trained at it: the gradient of a plain argmax says nothing of the runners-up."""
    method: Literal["full", "lora"] = "full"
    """What is trained: all weights, or low-rank adapters, which are merged before they are served."""
    lora_rank: Annotated[int, Field(ge=1, le=256)] = 16
    zero_stage: Annotated[int, Field(ge=0, le=2)] = 0
    """DeepSpeed's ZeRO stage; 0 trains with plain torch, 1 and 2 need `pip install paceline[train]`."""
    memory_mb: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    """For the captured requests of one run: the newest ones, and a uniform sample of the older."""
    save_steps: Annotated[int, Field(ge=1, le=1 << 20)] = 20
    """A run's state is written so often: a kill costs as many steps at most."""
    seed: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = 0
    """Of the order of requests and of new adapters."""


class GateConfig(Section):
    """What a candidate must show on requests that were held out."""

    min_requests: Annotated[int, Field(ge=10, le=1 << 20)] = 100
    """Held out; with fewer nothing is decided."""
    max_requests: Annotated[int, Field(ge=10, le=1 << 20)] = 400
    """The newest ones of each domain count."""
    min_saving: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Of decode time: the lower end of its 95 % interval must be above this."""
    domain_floor: Annotated[float, Field(ge=-1, le=0)] = -0.02
    """No domain's saving may be significantly below this."""
    max_slowdown: Annotated[float, Field(ge=1, le=10)] = 1.02
    """Of the candidate's own forward against the champion's."""


class RolloutConfig(Section):
    """How a candidate that passed the gate becomes the live draft."""

    automatic: bool = True
    """False: candidates wait for somebody to promote them."""
    canary_share: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Of streams that get the candidate first; 0 promotes at once."""
    canary_min_requests: Annotated[int, Field(ge=10, le=1 << 20)] = 200
    """With drafts, before it is promoted, unless it is significantly better or worse before."""
    canary_max_s: Seconds = 600.0
    """After so long with drafts it is promoted if it is not worse; while drafting is off it waits for up to three times
    this, and is then promoted on the gate's word."""
    watch_s: Seconds = 600.0
    """How long a promoted version is compared with its predecessor before that is forgotten; up to three times as long
    while drafting is off."""
    resident: Annotated[int, Field(ge=1, le=16)] = 3
    """Versions each draft worker keeps in memory."""
    kept: Annotated[int, Field(ge=0, le=10_000)] = 16
    """Versions that serve nobody whose weights stay on storage, the newest; those of revoked ones go at once."""
    backoff_s: Seconds = 600.0
    """No training for so long after a rollback, twice as long after each further one."""


class GuardConfig(Section):
    """When training yields."""

    ttft_p99_ms: Annotated[float, Field(gt=0, le=600_000)] = 2000.0
    inter_token_p99_ms: Annotated[float, Field(gt=0, le=600_000)] = 200.0
    """What requests must not exceed: at 90 % of either training pauses, under 70 % for `resume_s` it goes on."""
    max_kv_use: Share = 0.9
    """Of any decode worker's blocks."""
    resume_s: Seconds = 60.0


class LearningConfig(Section):
    """Drafts that learn from live traffic."""

    enabled: bool = False
    """Operators must ask for it: it keeps what consenting clients send, for a while."""
    storage: str = "auto"
    """fsspec URL or absolute path for captured shards and weights of versions, the same one for all nodes. auto:
    `learning` in PACELINE_HOME."""
    registry: str = "auto"
    """SQLAlchemy URL: SQLite or PostgreSQL. auto: registry.db in PACELINE_HOME."""
    train_automatically: bool = True
    """False: only when somebody asks."""
    tags: list[Annotated[str, Field(pattern=r"^(tenant|domain):.+")]] = Field(default=[])
    """Tenants and domains that get drafts of their own, trained on their requests alone: tenant:NAME, domain:NAME."""
    horizon_h: Annotated[float, Field(gt=0, le=24 * 365)] = 24.0
    """So long traffic is expected to stay as it is: what a run saves counts for so long."""
    min_return: Annotated[float, Field(ge=0, le=1000)] = 1.5
    """Seconds that a run must promise to save for each second it costs; 0 always trains when there is new traffic."""
    revoke_deleted: bool = True
    """Versions that learned from requests that were deleted serve no longer. False: they are marked only."""
    capture: CaptureConfig = CaptureConfig()
    train: TrainConfig = TrainConfig()
    gate: GateConfig = GateConfig()
    rollout: RolloutConfig = RolloutConfig()
    guard: GuardConfig = GuardConfig()
