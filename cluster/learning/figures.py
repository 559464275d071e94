"""Streams that ended -> acceptance and tokens per step by version, domain, tenant and depth, over time; bounded.

Acceptance is A / (A + R): of the places at which a draft model's node was tested (its parent was accepted), the share
that was filled by what it proposed. What lies behind a rejected node was never tested and counts for nothing:
accepted / proposed is biased low by it, the more so the deeper the draft.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.types import ServedStream

OTHER = "(other)"
"""Where a name is counted that comes when there is no room for more of its kind."""
MAX_DEPTH = 16
_MAX_VERSIONS, _MAX_DOMAINS, _MAX_TENANTS = 32, 32, 64
_RESOLUTIONS = ((10.0, 360), (300.0, 288))
"""(seconds of a bucket, how many are kept): an hour finely, a day coarsely."""


@dataclass(slots=True)
class Cell:
    """Sums over some streams."""

    requests: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    max_gap_s: float = 0.0
    tested_by_depth: list[int] = field(default_factory=list)
    """From depth 1."""
    accepted_by_depth: list[int] = field(default_factory=list)

    def add(self, stream: ServedStream) -> None:
        self.requests += 1
        self.tokens += stream.num_tokens
        self.steps += stream.num_steps
        self.seconds += stream.seconds
        self.max_gap_s = max(self.max_gap_s, stream.max_gap_s)
        _add_to(self.tested_by_depth, stream.tested)
        _add_to(self.accepted_by_depth, stream.accepted)

    def merge(self, other: Cell) -> None:
        self.requests += other.requests
        self.tokens += other.tokens
        self.steps += other.steps
        self.seconds += other.seconds
        self.max_gap_s = max(self.max_gap_s, other.max_gap_s)
        _add_to(self.tested_by_depth, other.tested_by_depth)
        _add_to(self.accepted_by_depth, other.accepted_by_depth)

    @property
    def tested(self) -> int:
        return sum(self.tested_by_depth)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_depth)

    @property
    def acceptance(self) -> float | None:
        """A / (A + R); None where nothing was tested."""
        return self.accepted / self.tested if self.tested else None

    @property
    def tokens_per_step(self) -> float | None:
        return self.tokens / self.steps if self.steps else None

    @property
    def tokens_s(self) -> float | None:
        """Of one stream, between its first and its last token."""
        return (self.tokens - self.requests) / self.seconds if self.seconds > 0 else None

    def view(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "steps": self.steps,
            "acceptance": self.acceptance,
            "tokens_per_step": self.tokens_per_step,
            "tokens_s": self.tokens_s,
            "max_gap_s": self.max_gap_s,
        }


def _add_to(sums: list[int], more: Sequence[int]) -> None:
    """By depth; what lies deeper than `MAX_DEPTH` counts for the last."""
    for depth, num in enumerate(more):
        if depth < len(sums):
            sums[depth] += num
        elif depth < MAX_DEPTH:
            sums.append(num)
        else:
            sums[-1] += num


class _Names:
    """The first `limit` names of a kind are themselves, later ones are `OTHER`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        if name not in self._known:
            if len(self._known) >= self._limit:
                return OTHER
            self._known.add(name)
        return name


@dataclass(slots=True)
class _Bucket:
    at: float
    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)
    """By (version, domain, tenant)."""


class Figures:
    """What has been served lately. Memory is bounded by time, and by the number of names."""

    def __init__(self) -> None:
        self._domains, self._tenants = _Names(_MAX_DOMAINS), _Names(_MAX_TENANTS)
        self._buckets: tuple[deque[_Bucket], ...] = tuple(deque(maxlen=num) for _, num in _RESOLUTIONS)
        self._versions: OrderedDict[str, dict[str, Cell]] = OrderedDict()
        """By version and domain, since they were first seen."""
        self._num_flushed = 0
        self.left_out = 0
        """Streams that workers could not tell of."""

    def add(self, streams: Iterable[ServedStream], now: float, left_out: int = 0) -> None:
        """Count these, which ended at about `now` (Unix seconds)."""
        self.left_out += left_out
        for stream in streams:
            version = stream.draft_version
            domain, tenant = self._domains(stream.domain), self._tenants(stream.tenant)
            for buckets, (width, _) in zip(self._buckets, _RESOLUTIONS, strict=True):
                key = (version, domain, tenant)
                self._bucket(buckets, width, now).cells.setdefault(key, Cell()).add(stream)
            self._versions.setdefault(version, {}).setdefault(domain, Cell()).add(stream)
            self._versions.move_to_end(version)
            while len(self._versions) > _MAX_VERSIONS:
                self._versions.popitem(last=False)

    def _bucket(self, buckets: deque[_Bucket], width: float, now: float) -> _Bucket:
        at = math.floor(now / width) * width
        if not buckets or buckets[-1].at < at:
            buckets.append(_Bucket(at))
        return buckets[-1]  # a clock that went back counts where it was before

    # -- what others ask ---------------------------------------------------------------------------------

    def recent(
        self, seconds: float, now: float, *, version: str | None = None, tenant: str | None = None
    ) -> dict[str, Cell]:
        """By domain: sums over the last `seconds`, of one version's or tenant's streams or of all."""
        found: dict[str, Cell] = {}
        buckets, width = self._reaching(now - seconds)
        for bucket in buckets:
            if bucket.at + width > now - seconds:
                for (of, domain, whose), cell in bucket.cells.items():
                    if version in (None, of) and tenant in (None, whose):
                        found.setdefault(domain, Cell()).merge(cell)
        return found

    def span(self, now: float) -> float:
        """Seconds of which `recent` knows, a day at most."""
        return max(0.0, now - self._buckets[-1][0].at) if self._buckets[-1] else 0.0

    def of_version(self, version: str) -> Cell:
        """All that a version served, as far as is remembered."""
        total = Cell()
        for cell in self._versions.get(version, {}).values():
            total.merge(cell)
        return total

    def by_domain(self, version: str) -> dict[str, Cell]:
        """The same by domain."""
        return dict(self._versions.get(version, {}))

    def _reaching(self, since: float) -> tuple[deque[_Bucket], float]:
        """The finest buckets that reach back so far, and their width."""
        fine, coarse = self._buckets
        is_enough = bool(fine) and (len(fine) < _RESOLUTIONS[0][1] or fine[0].at <= since)
        return (fine, _RESOLUTIONS[0][0]) if is_enough else (coarse, _RESOLUTIONS[1][0])

    def series(self, *, since: float, step_s: float = 10.0, tenant: str | None = None) -> dict[str, Any]:
        """Points over time by version and domain, and sums by depth; of one tenant's streams or of all.

        {step_s, series: [{version, domain, points: [{at, num_requests, num_tokens, num_steps, num_tested, num_accepted,
        seconds}]}], depths: [{version, domain, depth, num_tested, num_accepted}], domains}. Oldest points first; `step_s`
        is rounded up to what there is: ten seconds within the last hour, else five minutes.
        """
        buckets, width = self._reaching(since)
        step_s = max(width, math.ceil(step_s / width) * width)
        rows: dict[tuple[str, str], OrderedDict[float, Cell]] = {}
        for bucket in buckets:
            if bucket.at + width <= since:
                continue
            at = math.floor(bucket.at / step_s) * step_s
            for (version, domain, of), cell in bucket.cells.items():
                if tenant is None or tenant == of:
                    points = rows.setdefault((version, domain), OrderedDict())
                    points.setdefault(at, Cell()).merge(cell)
        return {
            "step_s": step_s,
            "series": [
                {"version": version, "domain": domain, "points": [_point(at, c) for at, c in points.items()]}
                for (version, domain), points in rows.items()
            ],
            "depths": [
                row
                for (version, domain), points in rows.items()
                for row in _depth_rows(version, domain, points.values())
            ],
            "domains": sorted({domain for _, domain in rows}),
        }

    def finished(self, now: float) -> list[tuple[float, float, str, str, Cell]]:
        """(start, width, version, domain, sums) of the buckets that ended since the last call: what is kept for good."""
        width = _RESOLUTIONS[0][0]
        current = math.floor(now / width) * width
        done = [b for b in self._buckets[0] if self._num_flushed < b.at < current]
        found: list[tuple[float, float, str, str, Cell]] = []
        for bucket in done:
            sums: dict[tuple[str, str], Cell] = {}
            for (version, domain, _), cell in bucket.cells.items():
                sums.setdefault((version, domain), Cell()).merge(cell)
            found += [(bucket.at, width, *key, cell) for key, cell in sums.items()]
            self._num_flushed = max(self._num_flushed, int(bucket.at))
        return found

    def view(self, now: float) -> dict[str, Any]:
        """Totals by version and domain, by tenant, of the last minute and the last hour."""
        tenants: dict[str, Cell] = {}
        for bucket in self._buckets[1]:
            for (_, _, tenant), cell in bucket.cells.items():
                tenants.setdefault(tenant, Cell()).merge(cell)
        return {
            "versions": {
                version: {
                    **self.of_version(version).view(),
                    "by_domain": {name: cell.view() for name, cell in domains.items()},
                }
                for version, domains in self._versions.items()
            },
            "tenants": {name: cell.view() for name, cell in tenants.items()},
            "last_minute": self._total(60.0, now).view(),
            "last_hour": self._total(3600.0, now).view(),
            "left_out": self.left_out,
        }

    def _total(self, seconds: float, now: float) -> Cell:
        total = Cell()
        for cell in self.recent(seconds, now).values():
            total.merge(cell)
        return total


def _point(at: float, cell: Cell) -> dict[str, Any]:
    return {
        "at": at,
        "num_requests": cell.requests,
        "num_tokens": cell.tokens,
        "num_steps": cell.steps,
        "num_tested": cell.tested,
        "num_accepted": cell.accepted,
        "seconds": cell.seconds,
    }


def _depth_rows(version: str, domain: str, cells: Iterable[Cell]) -> Iterator[dict[str, Any]]:
    total = Cell()
    for cell in cells:
        total.merge(cell)
    pairs = zip(total.tested_by_depth, total.accepted_by_depth, strict=False)
    for depth, (tested, accepted) in enumerate(pairs, 1):
        yield {
            "version": version,
            "domain": domain,
            "depth": depth,
            "num_tested": tested,
            "num_accepted": accepted,
        }


@dataclass(slots=True)
class Ratio:
    """Running sums of pairs (y, x) by stream -> the ratio of means, and its variance by the delta method.

    Streams are the unit of randomisation: tokens of one stream resemble each other, so they are not counted as if they
    were independent.

    >>> r = Ratio(); [r.add(y, x) for y, x in ((4, 2), (9, 3), (2, 1))]; round(r.value, 3)
    2.5
    """

    num: int = 0
    y: float = 0.0
    x: float = 0.0
    yy: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, y: float, x: float) -> None:
        self.num += 1
        self.y += y
        self.x += x
        self.yy += y * y
        self.xx += x * x
        self.xy += x * y

    @property
    def value(self) -> float:
        return self.y / self.x if self.x else math.nan

    @property
    def variance(self) -> float:
        """Of `value`; infinite for fewer than two streams."""
        if self.num < 2 or self.x <= 0:
            return math.inf
        ratio = self.value
        residual = max(0.0, self.yy - 2 * ratio * self.xy + ratio * ratio * self.xx)
        return residual / (self.num - 1) * self.num / (self.x * self.x)
