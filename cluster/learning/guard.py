"""Gateways' latencies, decode workers' queues and KV, each second -> how much the trainer may take.

This is the slow loop: it sees what lasts for seconds. Bursts are yielded to at once by the machine itself, for the
trainer runs at idle scheduling priority.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster.learning.config import GuardConfig
from paceline.cluster.types import Snapshot, TrainLevel

LEVELS: tuple[TrainLevel, ...] = ("normal", "throttle", "pause", "evict")
PAUSE_AT, RESUME_UNDER = 0.9, 0.7
"""Of a limit."""
WINDOW_S = 10.0
"""Latencies of so long make a quantile."""
EVICT_AFTER_S = 10.0
"""Paused for so long and still above a limit: the trainer gives its memory back too."""
_MIN_EVENTS = 20
"""Fewer make no 99th percentile."""
_DAY_S = 86_400.0
_QUIET = "all figures are well under their limits"
_BLIND_S = 10.0
"""Without any figures for so long, training pauses: nobody could say that it does no harm."""

Histogram = Mapping[float, float]
"""Upper end of a bucket -> how many values were at most so large, since the process began."""


def read_histogram(text: bytes, name: str) -> Histogram:
    """The buckets of one histogram in Prometheus text; empty if it is not there.

    >>> read_histogram(b'paceline_x_seconds_bucket{le="0.1"} 3.0', "paceline_x_seconds")
    {0.1: 3.0}
    """
    prefix = f"{name}_bucket".encode()
    lines = b"\n".join(line for line in text.splitlines() if line.startswith(prefix)).decode()
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(lines + "\n")
        for sample in family.samples
    }


def quantile(counts: Histogram, share: float) -> float:
    """The value that `share` of those counted do not exceed; linear within a bucket.

    >>> quantile({1.0: 50, 2.0: 100, math.inf: 100}, 0.75)
    1.5
    """
    ends = sorted(counts)
    total = counts[ends[-1]]
    below, start = 0.0, 0.0
    for end in ends:
        if counts[end] >= share * total:
            inside = counts[end] - below
            if math.isinf(end) or inside <= 0:
                return start
            return start + (end - start) * (share * total - below) / inside
        below, start = counts[end], end
    return start


class Latency:
    """One histogram of all gateways -> a quantile over the last seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: dict[tuple[str, int], Histogram] = {}
        self._deltas: deque[tuple[float, dict[float, float]]] = deque()

    def observe(self, snapshots: Iterable[Snapshot], now: float) -> None:
        """The gateways' snapshots of now; a process that began anew counts from zero."""
        delta: dict[float, float] = {}
        seen: dict[tuple[str, int], Histogram] = {}
        for snapshot in snapshots:
            key = (snapshot.worker.worker_id, snapshot.worker.incarnation)
            counts = seen[key] = read_histogram(snapshot.metrics, self._name)
            before = self._last.get(key)
            if before is None:
                continue  # what it counted before it was known here is not of these seconds
            for end, count in counts.items():
                delta[end] = delta.get(end, 0.0) + count - before.get(end, 0.0)
        self._last = seen
        self._deltas.append((now, delta))
        while self._deltas and self._deltas[0][0] < now - WINDOW_S:
            self._deltas.popleft()

    def quantile(self, share: float = 0.99) -> float | None:
        """Seconds; None if too little happened."""
        total: dict[float, float] = {}
        for _, delta in self._deltas:
            for end, count in delta.items():
                total[end] = total.get(end, 0.0) + count
        if not total or total[max(total)] < _MIN_EVENTS:
            return None
        return quantile(total, share)


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure and what it must not exceed."""

    name: str
    value: float | None
    limit: float

    @property
    def load(self) -> float:
        """Share of the limit; 0 where nothing is known, for nothing happens there."""
        return self.value / self.limit if self.value is not None else 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """Of the level."""

    at: float
    before: TrainLevel
    after: TrainLevel
    reason: str


def _ms(seconds: float | None) -> float | None:
    return seconds * 1e3 if seconds is not None else None


class Guard:
    """The level rises at once and falls step by step, each after `resume_s` of quiet."""

    def __init__(self, config: GuardConfig, *, max_streams: int) -> None:
        """`max_streams` of one decode worker: more have to wait."""
        self._config = config
        self._max_streams = max_streams
        self._ttft = Latency("paceline_ttft_seconds")
        self._inter_token = Latency("paceline_inter_token_seconds")
        self.level: TrainLevel = "pause"
        self.reason = "no figures yet"
        self.since = 0.0
        self.readings: tuple[Reading, ...] = ()
        self._is_blind = True
        self._heard_at = -math.inf
        self._quiet_since: float | None = None
        self._above_since: float | None = None
        self.history: deque[Change] = deque(maxlen=200)

    def configure(self, config: GuardConfig) -> None:
        """Other limits from now on."""
        self._config = config

    def observe(self, snapshots: Sequence[Snapshot], now: float) -> TrainLevel:
        """Once a second: what gateways and decode workers pushed lately (Unix seconds)."""
        gateways = [s for s in snapshots if s.worker.role == "gateway"]
        decodes = [s.worker for s in snapshots if s.worker.role == "decode"]
        self._ttft.observe(gateways, now)
        self._inter_token.observe(gateways, now)
        if gateways and decodes:
            self._heard_at = now
        uses = [w.kv_blocks_used / (w.kv_blocks_used + w.kv_blocks_free) for w in decodes if w.kv_blocks_free]
        full = [1.0 for w in decodes if w.kv_blocks_used and not w.kv_blocks_free]
        limits = self._config
        self.readings = (
            Reading("ttft_p99_ms", _ms(self._ttft.quantile()), limits.ttft_p99_ms),
            Reading("inter_token_p99_ms", _ms(self._inter_token.quantile()), limits.inter_token_p99_ms),
            Reading("kv_use", max([*uses, *full], default=None), max(limits.max_kv_use, 1e-9)),
            Reading("queue", max((w.num_streams for w in decodes), default=None), float(self._max_streams)),
        )
        if now - self._heard_at > _BLIND_S:
            self._is_blind = True
            return self._set("pause", "no figures of gateways and decode workers", now)
        if self._is_blind:
            self._is_blind, self._quiet_since = False, None
            self._set("normal", "", now)
        return self._decide(now)

    def _decide(self, now: float) -> TrainLevel:
        worst = max(self.readings, key=lambda reading: reading.load)
        load = worst.load
        why = f"{worst.name} is at {load:.0%} of its limit" if load else ""
        self._above_since = (self._above_since or now) if load >= 1.0 else None
        if load >= PAUSE_AT:
            lasts = self._above_since is not None and now - self._above_since >= EVICT_AFTER_S
            wanted: TrainLevel = "evict" if lasts else "pause"
        else:
            wanted = "throttle" if load >= RESUME_UNDER else "normal"
        if LEVELS.index(wanted) > LEVELS.index(self.level):
            self._quiet_since = None
            return self._set(wanted, why, now)
        if load >= RESUME_UNDER or self.level == "normal":
            self._quiet_since = None
            return self.level
        self._quiet_since = now if self._quiet_since is None else self._quiet_since
        if now - self._quiet_since >= self._config.resume_s:
            self._quiet_since = now
            lower: TrainLevel = "normal" if self.level == "throttle" else "throttle"
            return self._set(lower, "", now)
        return self.level

    def _set(self, level: TrainLevel, reason: str, now: float) -> TrainLevel:
        if level != self.level:
            self.history.append(Change(now, self.level, level, reason or _QUIET))
            self.since = now
        self.level, self.reason = level, reason
        return level

    def view(self, now: float) -> dict[str, Any]:
        """{now: {level, reason, since}, readings, history (newest first), time_at}: as the dashboard wants it."""
        return {
            "now": {"level": self.level, "reason": self.reason, "since": self.since},
            "readings": [
                {
                    "name": r.name,
                    "now": r.value,
                    "limit": r.limit,
                    "pause_at": PAUSE_AT * r.limit,
                    "resume_at": RESUME_UNDER * r.limit,
                }
                for r in self.readings
            ],
            "history": [
                {"at": c.at, "from": c.before, "to": c.after, "reason": c.reason}
                for c in reversed(self.history)
            ],
            "time_at": self._seconds_at(now),
        }

    def _seconds_at(self, now: float) -> dict[str, float]:
        """Seconds at each level in the last day, as far as the history reaches."""
        found = dict.fromkeys(LEVELS, 0.0)
        end = now
        for change in reversed(self.history):
            begin = max(change.at, now - _DAY_S)
            found[change.after] += max(0.0, end - begin)
            end = begin
        return {str(level): seconds for level, seconds in found.items()}
