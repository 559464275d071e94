"""Streams that ended -> by domain: has acceptance fallen, since when, by how much.

What is watched is the residual: accepted places less those expected at the stream's temperature and depths. So neither a
change of the mix of domains, temperatures or lengths looks like drift, nor a swap: each version has its own table.
Two signs must agree. A Page-Hinkley sum of residuals crosses a limit that noise alone would cross once in
`FALSE_ALARM_REQUESTS`, and the short moving average lies `eps` below the long one.

A domain that appears when the others are well known is measured against them at first: traffic that moves to what the
draft never saw is drift too, though that domain was never better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.cluster.learning.figures import OTHER
from paceline.cluster.types import ServedStream

SHORT_HALF_LIFE, LONG_HALF_LIFE = 200.0, 5000.0
"""Requests."""
FALSE_ALARM_REQUESTS = 100_000
_TEMPERATURES = (0.0, 0.5, 0.85)
"""Upper ends of the buckets; above the last is one more."""
_DEPTHS = 16
_MIN_REQUESTS = 50
"""Of a domain before anything is said about it."""
_KNOWN_REQUESTS = 300
"""Of all domains before a new one is measured against them."""
_ANCHORED_REQUESTS = 500
"""How long it is."""
_SHRINKAGE = 100.0
"""Tested places for which the table of all domains stands in that of one."""
_MAX_DOMAINS = 64


class _Table:
    """Expected acceptance by temperature and depth: float64 [temperatures, depths] of tested and accepted places."""

    def __init__(self) -> None:
        self.tested: npt.NDArray[np.float64] = np.zeros((len(_TEMPERATURES) + 1, _DEPTHS))
        self.accepted: npt.NDArray[np.float64] = np.zeros_like(self.tested)
        self.requests = 0.0

    def row(self, temperature: int, above: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Of one temperature, drawn towards `above` where little is known."""
        tested, accepted = self.tested[temperature], self.accepted[temperature]
        return np.asarray((accepted + _SHRINKAGE * above) / (tested + _SHRINKAGE))

    def all_temperatures(self) -> npt.NDArray[np.float64]:
        """By depth, drawn towards the average of all depths."""
        tested, accepted = self.tested.sum(axis=0), self.accepted.sum(axis=0)
        mean = accepted.sum() / tested.sum() if tested.sum() else 0.5
        return np.asarray((accepted + _SHRINKAGE * mean) / (tested + _SHRINKAGE))

    def add(
        self, temperature: int, tested: npt.NDArray[np.float64], accepted: npt.NDArray[np.float64]
    ) -> None:
        keep = 0.5 ** (1.0 / LONG_HALF_LIFE)
        self.tested *= keep
        self.accepted *= keep
        self.requests = self.requests * keep + 1.0
        self.tested[temperature] += tested
        self.accepted[temperature] += accepted


@dataclass(slots=True)
class _Average:
    """Of residuals by place; recent ones count more."""

    keep: float
    sum: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        self.sum = self.sum * self.keep + value
        self.weight = self.weight * self.keep + weight

    @property
    def value(self) -> float:
        return self.sum / self.weight if self.weight else 0.0


def _average(half_life: float) -> _Average:
    return _Average(0.5 ** (1.0 / half_life))


@dataclass(slots=True)
class _Domain:
    anchor: _Table | None
    """The table of all domains at the time it appeared, while it is measured against them."""
    is_new: bool
    table: _Table = field(default_factory=_Table)
    short: _Average = field(default_factory=lambda: _average(SHORT_HALF_LIFE))
    long: _Average = field(default_factory=lambda: _average(LONG_HALF_LIFE))
    level: _Average = field(default_factory=lambda: _average(SHORT_HALF_LIFE))
    """Of acceptance itself, to be shown."""
    num: int = 0
    mean_places: float = 0.0
    square: float = 0.0
    """Running mean of squared residuals by stream."""
    fallen: float = 0.0
    """The Page-Hinkley sum."""
    began: float = 0.0
    """When it last was zero."""
    drifted_since: float = 0.0
    """0: it has not."""
    fell_by: float = 0.0
    limit: float = 0.0
    """For `fallen`."""


@dataclass(frozen=True, slots=True)
class Drifted:
    """One domain that fell."""

    domain: str
    since: float
    by: float
    """Of acceptance."""
    is_new: bool
    """It appeared like this, measured against the other domains."""


class Drift:
    """Of the streams of one version at a time; `restart` when another one goes live."""

    def __init__(self, *, eps: float = 0.02) -> None:
        self._eps = eps
        self._all = _Table()
        self._domains: dict[str, _Domain] = {}

    def restart(self, domain: str | None = None) -> None:
        """What was learnt of a domain, or of all, no longer holds: another version drafts, or this is how it is now."""
        if domain is None:
            self._all, self._domains = _Table(), {}
        elif domain in self._domains:
            self._domains[domain] = _Domain(anchor=None, is_new=False)

    def add(self, streams: Iterable[ServedStream], now: float) -> list[Drifted]:
        """Streams of the version that is live -> what drifted just now."""
        found = []
        for stream in streams:
            if sum(stream.tested) == 0:
                continue
            domain = stream.domain
            if domain not in self._domains and len(self._domains) >= _MAX_DOMAINS:
                domain = OTHER
            if self._one(domain, stream, now):
                state = self._domains[domain]
                found.append(Drifted(domain, state.drifted_since, state.fell_by, state.is_new))
        return found

    def _one(self, name: str, stream: ServedStream, now: float) -> bool:
        state = self._domains.get(name)
        if state is None:
            is_new = self._all.requests >= _KNOWN_REQUESTS
            state = self._domains[name] = _Domain(_copy(self._all) if is_new else None, is_new)
            state.began = now
        tested, accepted = _padded(stream.tested), _padded(stream.accepted)
        temperature = int(np.searchsorted(_TEMPERATURES, stream.temperature))
        above = self._all.row(temperature, self._all.all_temperatures())
        if state.anchor is not None:
            expected = state.anchor.row(temperature, state.anchor.all_temperatures())
        else:
            expected = state.table.row(temperature, above)
        places = float(tested.sum())
        residual = float(accepted.sum() - tested @ expected)
        state.num += 1
        state.short.add(residual, places)
        state.long.add(residual, places)
        state.level.add(float(accepted.sum()), places)
        fired = self._page_hinkley(state, residual, places, now)
        state.table.add(temperature, tested, accepted)
        self._all.add(temperature, tested, accepted)
        if state.anchor is not None and state.num >= _ANCHORED_REQUESTS and not state.drifted_since:
            state.anchor, state.fallen, state.began = (
                None,
                0.0,
                now,
            )  # as good as the others: its own from now on
            state.short, state.long = _average(SHORT_HALF_LIFE), _average(LONG_HALF_LIFE)
        return fired

    def _page_hinkley(self, state: _Domain, residual: float, places: float, now: float) -> bool:
        """Whether this stream makes it so: the sum of what residuals fell short, less what noise may."""
        share = 1.0 / min(state.num, 1000)
        state.mean_places += share * (places - state.mean_places)
        value = max(-1.0, min(1.0, residual / state.mean_places))
        state.square += share * (value * value - state.square)
        variance = max(state.square, 1e-4)
        known = state.anchor.requests if state.anchor is not None else state.table.requests
        # What is expected was itself estimated, from this many streams: its error is no drift.
        slack = self._eps / 2 + 2.0 * math.sqrt(variance / max(known, 1.0))
        if state.num < _MIN_REQUESTS and state.anchor is None:
            state.began = now
            return False
        state.fallen = max(0.0, state.fallen - value - slack)
        if state.fallen == 0.0:
            state.began = now
        # The sum of steps with mean -slack and this variance exceeds h once in about exp(2 slack h / variance) * ...
        limit = variance / (2 * slack) * math.log1p(2 * slack * slack * FALSE_ALARM_REQUESTS / variance)
        state.limit = limit
        below = state.long.value - state.short.value if state.anchor is None else -state.short.value
        if state.drifted_since:
            if below < self._eps / 2 and state.fallen < limit / 2:
                state.drifted_since = 0.0  # it came back by itself
            else:
                state.fell_by = below
            return False
        if state.fallen > limit and below > self._eps and state.num >= _MIN_REQUESTS:
            state.drifted_since, state.fell_by = state.began, below
            return True
        return False

    @property
    def drifted(self) -> list[Drifted]:
        """Domains that fell and have not come back, the deepest fall first."""
        found = [
            Drifted(name, s.drifted_since, s.fell_by, s.is_new)
            for name, s in self._domains.items()
            if s.drifted_since
        ]
        return sorted(found, key=lambda item: -item.by)

    def view(self) -> list[dict[str, Any]]:
        """One entry by domain, most streams first: its level, both averages, the sum and its limit, since when."""
        entries = []
        for name, state in sorted(self._domains.items(), key=lambda item: -item[1].num):
            level = state.level.value if state.level.weight else None
            above = level - state.short.value if level is not None else None
            entries.append(
                {
                    "domain": name,
                    "num_requests": state.num,
                    "short": level,
                    "long": above + state.long.value * (state.anchor is None) if above is not None else None,
                    "epsilon": self._eps,
                    "page_hinkley": state.fallen,
                    "page_hinkley_threshold": state.limit,
                    "drifted": bool(state.drifted_since),
                    "is_new": state.is_new,
                    "since": state.drifted_since or None,
                    "by": state.fell_by if state.drifted_since else 0.0,
                }
            )
        return entries


def _padded(counts: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """float64 [depths]; what lies deeper counts for the last."""
    padded = np.zeros(_DEPTHS)
    head = counts[:_DEPTHS]
    padded[: len(head)] = head
    padded[-1] += sum(counts[_DEPTHS:])
    return padded


def _copy(table: _Table) -> _Table:
    copy = _Table()
    copy.tested, copy.accepted, copy.requests = table.tested.copy(), table.accepted.copy(), table.requests
    return copy
