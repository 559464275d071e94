"""Workers' metrics of each second -> what the learning loop needs of them: work done, captured, and why drafting is off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster.types import Snapshot

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Name of a sample -> (labels, value)."""


def read(text: bytes, names: Sequence[str]) -> Samples:
    """The samples of these names; whole metrics texts are large, so other lines are not parsed.

    >>> read(b'a_total 2.0\\na_total_x 3.0\\nb{c="d"} 1.0', ["a_total", "b"])
    {'a_total': [({}, 2.0)], 'b': [({'c': 'd'}, 1.0)]}
    """
    heads = tuple(head for name in names for head in (f"{name} ".encode(), f"{name}{{".encode()))
    lines = b"\n".join(line for line in text.splitlines() if line.startswith(heads)).decode()
    found: Samples = {name: [] for name in names}
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            if sample.name in found:
                found[sample.name].append((dict(sample.labels), sample.value))
    return found


_ENGINE = "paceline_engine_step_seconds_sum"
_STEPS = "paceline_engine_steps_total"
_CAPTURED = "paceline_capture_requests_total"
_CAPTURE_OFF = "paceline_capture_off"
_COST = "paceline_step_cost_seconds"
_GAIN, _OFF = "paceline_draft_gain", "paceline_draft_off"
_STREAM_STEPS = "paceline_stream_steps_total"
_NAMES = (_ENGINE, _STEPS, _STREAM_STEPS, _CAPTURED, _CAPTURE_OFF, _COST, _GAIN, _OFF)
_KEEP = 0.5 ** (1 / 600)
"""Of what was counted, from one second to the next: half of it is of the last ten minutes."""


@dataclass(slots=True)
class _Worker:
    incarnation: int
    engine_s: float = 0.0
    captured: float = 0.0
    steps: float = 0.0
    stream_steps: float = 0.0
    samples: Samples = field(default_factory=dict)


class DecodeFigures:
    """Counters of all decode workers, of which some begin anew now and then."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self.engine_s = 0.0
        """Seconds that engines stepped since the last `observe`."""
        self.captured = 0
        """Streams written to shards since then."""
        self._steps = self._stream_steps = 0.0
        """Of engines, and of streams in them; recent ones count more."""

    def observe(self, snapshots: Iterable[Snapshot]) -> None:
        """What decode workers pushed lately. A worker that is new here counts from what it has now."""
        self.engine_s, captured = 0.0, 0.0
        self._steps, self._stream_steps = _KEEP * self._steps, _KEEP * self._stream_steps
        seen: dict[str, _Worker] = {}
        for snapshot in snapshots:
            info = snapshot.worker
            if info.role != "decode":
                continue
            samples = read(snapshot.metrics, _NAMES)
            now = _Worker(
                info.incarnation,
                _sum(samples[_ENGINE]),
                _sum(samples[_CAPTURED]),
                _sum(samples[_STEPS]),
                _sum(samples[_STREAM_STEPS]),
                samples,
            )
            before = self._workers.get(info.worker_id)
            if before is not None and before.incarnation == now.incarnation:
                self.engine_s += max(0.0, now.engine_s - before.engine_s)
                captured += max(0.0, now.captured - before.captured)
                self._steps += max(0.0, now.steps - before.steps)
                # A version that is forgotten takes its count along.
                self._stream_steps += max(0.0, now.stream_steps - before.stream_steps)
            elif before is None and self._workers or before is not None:
                captured += now.captured  # it began while we watched
            seen[info.worker_id] = now
        self._workers = seen
        self.captured = round(captured)

    @property
    def streams(self) -> int:
        """That share a step, on average; 1 where nothing is known."""
        return max(1, round(self._stream_steps / self._steps)) if self._steps > 0 else 1

    @property
    def step_cost(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Rows and seconds of a step, as one worker has them; empty where none has measured."""
        for worker in self._workers.values():
            rows = sorted((int(labels["rows"]), value) for labels, value in worker.samples[_COST])
            if rows:
                return tuple(num for num, _ in rows), tuple(seconds for _, seconds in rows)
        return (), ()

    @property
    def is_capture_off(self) -> bool:
        """Some worker keeps nothing because storage failed."""
        return any(_sum(w.samples[_CAPTURE_OFF]) > 0 for w in self._workers.values())

    def speculation(self, *, is_enabled: bool) -> dict[str, Any]:
        """{on, reason, num_on, num_workers}: what decode workers do, and why they do not draft where they do not."""
        num = len(self._workers)
        if not is_enabled:
            return {"on": False, "reason": "speculation.enabled=false", "num_on": 0, "num_workers": num}
        off: list[str] = []
        num_off = 0
        for worker in self._workers.values():
            gains = {labels["streams"]: value for labels, value in worker.samples[_GAIN]}
            found = [labels["streams"] for labels, value in worker.samples[_OFF] if value > 0]
            num_off += bool(found)
            off += [f"{gains.get(n, 0.0):.2f} times as fast with {n} or more streams" for n in found]
        if off:
            reason = f"do not speculate: measured, decoding with drafts is {', '.join(dict.fromkeys(off))}"
        else:
            reason = "drafts pay wherever they were compared with plain steps"
        return {"on": num_off < max(1, num), "reason": reason, "num_on": num - num_off, "num_workers": num}


def _sum(samples: Iterable[tuple[dict[str, str], float]]) -> float:
    return sum(value for _, value in samples)
