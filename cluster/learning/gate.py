"""Two versions' steps on the same texts -> whether the candidate may serve, and every figure that decided it.

Both versions are scored on the same held-out texts, so texts that are long or easy for both cancel. The saving is
one minus the ratio of their seconds; its interval is a bootstrap over whole requests, since the positions of one text
have much in common. A candidate passes if the saving is surely above `min_saving`, no domain's is surely below
`domain_floor`, and its forward is not slower than `max_slowdown` times the champion's.

One held-out set may be looked at more than once, by each candidate that comes up while it is the newest. So that
many candidates of no worth do not get one lucky draw between them, look k has to show its saving with an error of
2.5 % / (k (k + 1)): over all looks together that is 2.5 %, however many there are. The interval that is
shown is that of 95 % all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.cluster.learning.config import GateConfig
from paceline.cluster.learning.counterfactual import Costs, Policy, Scores

FloatArray = npt.NDArray[np.float64]

_ERROR = 0.025
"""Of one end of a 95 % interval, and of all looks at one held-out set together."""
_RESAMPLES = 4000
_AT_ONCE = 500_000
"""Requests drawn together, of several resamples: bounds their memory, and how long they keep others waiting."""
_FEW_IN_TAIL = 10
"""Resamples that an end of an interval needs beyond it; with fewer it is taken from their spread."""
_SMALLER_MODEL = 0.8
_LEAST_OF_DOMAIN = 10
"""Requests of a domain without which nothing is said of it."""


class Interval(msgspec.Struct, frozen=True):
    """A figure and its 95 % interval."""

    mean: float
    lo: float
    hi: float


class DomainVerdict(msgspec.Struct, frozen=True):
    """One domain's share in the decision."""

    domain: str
    num_requests: int
    saving: Interval
    passed: bool
    champion_acceptance: float
    candidate_acceptance: float
    champion_tokens_per_step: float
    candidate_tokens_per_step: float


class DepthFigures(msgspec.Struct, frozen=True):
    """By depth of the chain, from 1: steps in which a node of each stood there behind an accepted one, and its hits."""

    champion_tested: tuple[int, ...]
    champion_accepted: tuple[int, ...]
    candidate_tested: tuple[int, ...]
    candidate_accepted: tuple[int, ...]


class GateReport(msgspec.Struct, frozen=True):
    """What the gate saw and decided; JSON by `encode`."""

    version: str
    """The candidate."""
    champion: str
    at: float
    """Unix seconds."""
    passed: bool
    reason: str
    """Which rule decided, its value and its limit."""
    num_requests: int
    num_tokens: int
    saving: Interval
    """Of decode time, candidate against champion, on these texts under the deployed policy."""
    min_saving: float
    domain_floor: float
    domains: tuple[DomainVerdict, ...]
    slowdown: float | None
    """Candidate's own forward against the champion's, measured in turn; None: not measured."""
    max_slowdown: float
    champion_tokens_per_step: float
    candidate_tokens_per_step: float
    champion_acceptance: float
    candidate_acceptance: float
    look: int
    """How many candidates were scored on this held-out set, this one included."""
    bound: float
    """Lower bound of the saving at this look: what has to be above `min_saving`."""
    champion_seconds: float
    candidate_seconds: float
    """Of decode time that the texts would have taken."""
    by_depth: DepthFigures
    policy: Policy
    costs: Costs | None = None
    """The frozen step times."""
    deployed_saving: Interval | None = None
    """The same by replay of the deployed code, all its sources included, on the newest of these texts. None: not asked."""

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, report: bytes) -> GateReport:
        """From JSON."""
        return msgspec.json.decode(report, type=cls)


# --- the decision ---------------------------------------------------------------------------------------


def decide(
    champion: Scores,
    candidate: Scores,
    config: GateConfig,
    *,
    at: float,
    policy: Policy,
    costs: Costs | None = None,
    slowdown: Interval | None = None,
    look: int = 1,
    seed: int = 0,
    between: Callable[[], None] = lambda: None,
) -> GateReport:
    """The gate's report on two versions' steps on the same texts.

    Args:
        champion, candidate: of the same requests in the same order; the candidate's seconds with its own forward's time.
        at: unix seconds.
        slowdown: the candidate's forward against the champion's; None leaves that rule out. It counts where it is sure.
        look: 1 for the first candidate that is scored on this held-out set, 2 for the next ...
        seed: of the bootstrap.
        between: called after each piece of work, some ten milliseconds.
    """
    assert champion.request_ids == candidate.request_ids, "the versions were scored on different texts"
    saving, bound = saving_of(
        champion.seconds, candidate.seconds, seed=seed, error=_error_of(look), between=between
    )
    names = sorted(set(champion.domains))
    domains = tuple(
        _domain(
            champion, candidate, name, config.domain_floor, seed, between, saving if len(names) == 1 else None
        )
        for name in names
    )
    reason = _why_not(len(champion.request_ids), bound, saving, domains, slowdown, look, config)
    return GateReport(
        version=candidate.version,
        champion=champion.version,
        at=at,
        passed=not reason,
        reason=reason or f"saves {saving.mean:.1%} of decode time, surely more than {bound:.1%}",
        num_requests=len(champion.request_ids),
        num_tokens=int(champion.tokens.sum()),
        saving=saving,
        min_saving=config.min_saving,
        domain_floor=config.domain_floor,
        domains=domains,
        slowdown=slowdown.mean if slowdown is not None else None,
        max_slowdown=config.max_slowdown,
        champion_tokens_per_step=champion.tokens_per_step,
        candidate_tokens_per_step=candidate.tokens_per_step,
        champion_acceptance=champion.acceptance,
        candidate_acceptance=candidate.acceptance,
        look=look,
        bound=bound,
        champion_seconds=float(champion.seconds.sum()),
        candidate_seconds=float(candidate.seconds.sum()),
        by_depth=DepthFigures(
            *(tuple(by.sum(axis=0).tolist()) for s in (champion, candidate) for by in (s.tested, s.accepted))
        ),
        policy=policy,
        costs=costs,
    )


def confirmed(report: GateReport, champion: Scores, candidate: Scores, *, seed: int = 0) -> GateReport:
    """A report that passed, and what replay of the deployed code says of some of its texts: it must not say the contrary.

    One forward over a text knows nothing of other sources, nor of what the controller has learnt; where a better draft
    is of no use for that, this shows it.
    """
    saving, _ = saving_of(champion.seconds, candidate.seconds, seed=seed)
    replaced = msgspec.structs.replace(report, deployed_saving=saving)
    if saving.hi >= report.min_saving:
        return replaced
    reason = (
        f"saving {saving.mean:.1%} of decode time by the deployed code, at most {saving.hi:.1%}, the limit is "
        f"{report.min_saving:.1%}"
    )
    return msgspec.structs.replace(replaced, passed=False, reason=reason)


def _error_of(look: int) -> float:
    """Share of `_ERROR` that a look may spend; the shares of all looks add up to one."""
    assert look >= 1, "looks are counted from 1"
    return _ERROR / (look * (look + 1))


def _domain(
    champion: Scores,
    candidate: Scores,
    domain: str,
    floor: float,
    seed: int,
    between: Callable[[], None],
    saving: Interval | None,
) -> DomainVerdict:
    """`saving` None: still to be worked out; where there is one domain only, it is that of all."""
    mine = np.flatnonzero(np.asarray(champion.domains) == domain)
    if saving is None:
        saving, _ = saving_of(champion.seconds[mine], candidate.seconds[mine], seed=seed, between=between)
    one, other = subset(champion, mine), subset(candidate, mine)
    return DomainVerdict(
        domain,
        len(mine),
        saving,
        len(mine) < _LEAST_OF_DOMAIN or saving.hi >= floor,
        one.acceptance,
        other.acceptance,
        one.tokens_per_step,
        other.tokens_per_step,
    )


def _why_not(
    num_requests: int,
    bound: float,
    saving: Interval,
    domains: Sequence[DomainVerdict],
    slowdown: Interval | None,
    look: int,
    config: GateConfig,
) -> str:
    """The first rule that the candidate breaks; empty if it breaks none."""
    if num_requests < config.min_requests:
        return f"too few held-out requests: {num_requests}, expected at least {config.min_requests}"
    if slowdown is not None and not slowdown.lo <= config.max_slowdown:
        return (
            f"its forward takes {slowdown.mean:.3f} times the champion's, surely {slowdown.lo:.3f}, the limit is "
            f"{config.max_slowdown:g}"
        )
    for verdict in domains:
        if not verdict.passed:
            return (
                f"domain {verdict.domain or 'without a name'}: saving {verdict.saving.mean:.1%}, at most "
                f"{verdict.saving.hi:.1%}, the limit is {config.domain_floor:.1%}"
            )
    if not bound > config.min_saving:  # NaN is refused too
        looks = "" if look == 1 else f" at look {look}"
        return (
            f"saving {saving.mean:.1%} of decode time, surely only {bound:.1%}{looks}, the limit is "
            f"{config.min_saving:.1%}"
        )
    return ""


# --- intervals ------------------------------------------------------------------------------------------


def saving_of(
    champion_s: FloatArray,
    candidate_s: FloatArray,
    *,
    seed: int,
    error: float = _ERROR,
    between: Callable[[], None] = lambda: None,
) -> tuple[Interval, float]:
    """1 - sum candidate / sum champion over requests, its 95 % interval, and its lower bound at `error`.

    Whole requests are drawn again, with both their times.
    """
    num = len(champion_s)
    if num == 0 or not champion_s.sum() > 0:
        return Interval(0.0, -1.0, 1.0), -1.0
    rng = np.random.default_rng(seed)
    at_once = max(1, min(_RESAMPLES, _AT_ONCE // num))
    drawn: list[FloatArray] = []
    while sum(map(len, drawn)) < _RESAMPLES:
        # How often each request is in a resample, for many resamples in one product.
        picks = rng.integers(0, num, (at_once, num))
        picks += num * np.arange(at_once)[:, None]
        times = np.bincount(picks.ravel(), minlength=at_once * num).reshape(at_once, num)
        between()
        drawn.append(1.0 - (times @ candidate_s) / np.maximum(times @ champion_s, 1e-300))
    resampled = np.concatenate(drawn)
    mean = float(1.0 - candidate_s.sum() / champion_s.sum())
    lo, hi = np.quantile(resampled, [_ERROR, 1 - _ERROR])
    return Interval(mean, float(lo), float(hi)), _lower_bound(resampled, mean, error)


def _lower_bound(resampled: FloatArray, mean: float, error: float) -> float:
    """The saving is above this with such an error; as a normal tail where there are too few resamples for it."""
    if error * len(resampled) >= _FEW_IN_TAIL:
        return float(np.quantile(resampled, error))
    return mean + NormalDist().inv_cdf(error) * float(resampled.std())


def subset(scores: Scores, rows: npt.NDArray[np.int64]) -> Scores:
    """The same version on some of the texts."""
    return Scores(
        scores.version,
        tuple(scores.request_ids[row] for row in rows),
        tuple(scores.domains[row] for row in rows),
        scores.tokens[rows],
        scores.steps[rows],
        scores.seconds[rows],
        scores.tested[rows],
        scores.accepted[rows],
    )


def charged(slowdown: Interval) -> float:
    """The factor at which a candidate's forwards are charged: what is surely more than one, else one.

    A forward that seems to be faster is as a rule a busy machine's noise, and no reason to change drafts; only a much
    smaller model is believed.
    """
    if slowdown.hi < _SMALLER_MODEL:
        return slowdown.hi
    return max(1.0, slowdown.lo)


def median_of(ratios: Sequence[float], *, seed: int) -> Interval:
    """The median and its 95 % interval, whole ratios drawn again."""
    values: FloatArray = np.asarray(ratios, np.float64)
    picks = np.random.default_rng(seed).integers(0, len(values), (2000, len(values)))
    lo, hi = np.quantile(np.median(values[picks], axis=1), [_ERROR, 1 - _ERROR])
    return Interval(float(np.median(values)), float(lo), float(hi))


# --- several versions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ranked:
    """One version of the pool on the same few texts; savings are against the one that is live."""

    version: str
    saving: Interval
    acceptance: float
    tokens_per_step: float


def order(live: str, scores: Sequence[Scores], *, seed: int = 0) -> list[Ranked]:
    """Versions of the pool, the fastest first. `live` is one of them: its saving is 0."""
    base = next(one for one in scores if one.version == live)
    ranked = [
        Ranked(
            one.version,
            saving_of(base.seconds, one.seconds, seed=seed)[0],
            one.acceptance,
            one.tokens_per_step,
        )
        for one in scores
    ]
    return sorted(ranked, key=lambda one: -one.saving.mean)
