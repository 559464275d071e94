"""What decoding costs, what runs brought and cost -> train or do not, with the reason in words; and what came of it.

    saves = engine seconds an hour x share of them that the next run should save x hours until traffic has changed
    costs = processor seconds of a run, as the last ones took
    train iff saves > margin x costs

The share comes from the last runs: each further one on the same traffic is expected to bring a part of what the last one
did, nothing where that was nothing. Drift adds what acceptance fell by. Before the first run nothing is known but how far
acceptance is from what drafts reach, of which half is hoped for. After two runs in a row that brought nothing, only drift,
or an operator, begins another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.cluster.learning.figures import Cell, Figures

REACHABLE = 0.85
"""Acceptance of good drafts on traffic they were trained on."""
_UNTESTED = 0.3
"""What is taken for it where drafts are so bad that nobody asks for them any more."""
_HOPE = 0.5
"""Of the way there, for the first run."""
_AGAIN = 0.5
"""Of what the last run brought, for the next on the same traffic."""
_FLAT_RUNS = 2
_FIRST_STEP_CPU_S = 0.5
"""Of one training step, until one was measured."""
_SCORING_SHARE = 0.2
"""What scoring adds to a run, until it was measured."""
_RATE_WINDOW_S = 600.0
_HOUR = 3600.0


def tokens_per_step(acceptance: float, depth: int) -> float:
    """(1 - a^(k+1)) / (1 - a), for independent acceptances.

    >>> round(tokens_per_step(0.8, 5), 2)
    3.69
    """
    if acceptance >= 1.0:
        return depth + 1.0
    return float((1 - acceptance ** (depth + 1)) / (1 - acceptance))


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a run pays, and the sum behind it."""

    train: bool
    reason: str
    predicted_s: float
    """Seconds of decoding that it should save over the horizon."""
    cost_s: float
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One run: what it promised, cost and brought."""

    run_id: str
    tag: str
    at: float
    predicted_s: float
    cost_s: float
    """Predicted."""
    spent_s: float = 0.0
    gate_saving: float | None = None
    """Share of decode time, as the gate found it; None: it was not scored, or failed."""
    passed: bool = False
    version: str = ""
    realised_s: float = 0.0
    is_serving: bool = False
    steps: int = 0
    """Of training."""
    trained_cpu_s: float = 0.0
    ledger_id: int = 0
    """The registry's."""

    @property
    def realised(self) -> float | None:
        """Seconds it brought: none where the gate refused what came of it; None while nobody knows."""
        if self.passed:
            return self.realised_s
        return 0.0 if self.gate_saving is not None else None


@dataclass(slots=True)
class _Engine:
    """Engine seconds and stream steps of the last minutes: what a stream's step costs where many share one."""

    samples: deque[tuple[float, float, int]] = field(default_factory=deque)
    """(when, seconds, steps)"""

    def add(self, now: float, seconds: float, steps: int) -> None:
        self.samples.append((now, seconds, steps))
        while self.samples and self.samples[0][0] < now - _RATE_WINDOW_S:
            self.samples.popleft()

    def share(self, now: float) -> float:
        """Engine seconds per second."""
        span = min(_RATE_WINDOW_S, now - self.samples[0][0]) if len(self.samples) > 1 else 0.0
        return sum(s for _, s, _ in self.samples) / span if span > 0 else 0.0

    @property
    def step_s(self) -> float:
        steps = sum(n for *_, n in self.samples)
        return sum(s for _, s, _ in self.samples) / steps if steps else 0.0


class Ledger:
    """Runs of all tags, and what decoding costs now."""

    def __init__(self, *, horizon_h: float, margin: float, max_steps: int, depth: int) -> None:
        """`depth` of drafts and `max_steps` of a run, as configured."""
        self.horizon_h, self.margin = horizon_h, margin
        self.max_steps, self._depth = max_steps, depth
        self.entries: list[Entry] = []
        self.decisions: dict[str, Decision] = {}
        """The last one of each tag."""
        self._engine = _Engine()

    # -- what decoding costs -----------------------------------------------------------------------------

    def observe(self, engine_s: float, stream_steps: int, now: float) -> None:
        """Seconds that engines stepped since the last call, and the steps of the streams that ended."""
        self._engine.add(now, engine_s, stream_steps)

    def decode_s_per_hour(self, now: float) -> float:
        """Engine seconds an hour at the rate of the last minutes, all workers together."""
        return self._engine.share(now) * _HOUR

    # -- before a run ------------------------------------------------------------------------------------

    def decide(self, tag: str, cells: Mapping[str, Cell], drift: Mapping[str, float], now: float) -> Decision:
        """Does it pay to train for a tag?

        Args:
            cells: by domain, what its streams were like in the last minutes.
            drift: by domain, by how much acceptance fell.
        """
        steps = {name: cell.steps for name, cell in cells.items()}
        total = sum(steps.values())
        cost = self.cost_s(tag)
        if not total:
            return self._decided(Decision(False, "no traffic: nothing could be saved", 0.0, cost, tag))
        saving, why = self._saving(tag, cells, drift)
        hourly = self.decode_s_per_hour(now)
        predicted = saving * hourly * self.horizon_h
        sum_ = (
            f"{saving:.1%} of {hourly:.0f} s decoding an hour, over {self.horizon_h:g} h: {predicted:.0f} s saved "
            f"against {cost:.0f} s of training"
        )
        if self.margin == 0 or predicted > self.margin * cost:
            return self._decided(Decision(True, f"{why}; {sum_}", predicted, cost, tag))
        margin = f" x {self.margin:g}" if predicted > cost else ""
        return self._decided(Decision(False, f"do not train: {why}; {sum_}{margin}", predicted, cost, tag))

    def _decided(self, decision: Decision) -> Decision:
        self.decisions[decision.tag] = decision
        return decision

    def _saving(self, tag: str, cells: Mapping[str, Cell], drift: Mapping[str, float]) -> tuple[float, str]:
        """Share of decode time that the next run should save, and what makes one think so."""
        total = sum(cell.steps for cell in cells.values())
        drifted = sum(
            cell.steps / total * self._gain(cell.acceptance, cell.acceptance + drift[name])
            for name, cell in cells.items()
            if name in drift and cell.acceptance is not None
        )
        if drifted > 0:
            names = ", ".join(sorted(name or "traffic without a domain" for name in drift))
            return drifted, f"acceptance fell in {names}"
        runs = [entry for entry in self.entries if entry.tag == tag and entry.gate_saving is not None]
        if not runs:
            hoped = sum(
                _HOPE
                * cell.steps
                / total
                * self._gain(_UNTESTED if cell.acceptance is None else cell.acceptance, REACHABLE)
                for cell in cells.values()
            )
            return hoped, "never trained"
        flat = 0
        for entry in reversed(runs):
            if entry.passed:
                break
            flat += 1
        if flat >= _FLAT_RUNS:
            return 0.0, f"the last {flat} runs brought nothing, and there is no drift"
        last = runs[-1].gate_saving or 0.0
        return max(0.0, last * _AGAIN), f"the last run brought {last:.1%}"

    def _gain(self, acceptance: float | None, reached: float) -> float:
        """Share of steps saved if acceptance rose so far."""
        if acceptance is None or reached <= acceptance:
            return 0.0
        before = tokens_per_step(acceptance, self._depth)
        return 1.0 - before / tokens_per_step(min(reached, 0.99), self._depth)

    def cost_s(self, tag: str) -> float:
        """Processor seconds that a run and its scoring should take, by those before."""
        runs = [e for e in self.entries if e.spent_s > 0 and e.steps > 0][-5:]
        if not runs:
            return self.max_steps * _FIRST_STEP_CPU_S * (1 + _SCORING_SHARE)
        per_step = sum(e.trained_cpu_s for e in runs) / sum(e.steps for e in runs)
        scoring = sum(e.spent_s - e.trained_cpu_s for e in runs) / len(runs)
        return max(e.steps for e in runs) * per_step + scoring

    # -- a run and what came of it -----------------------------------------------------------------------

    def begin(self, run_id: str, tag: str, now: float) -> Entry:
        """A run begins, on the last decision for its tag or against it."""
        decision = self.decisions.get(tag)
        predicted = decision.predicted_s if decision else 0.0
        entry = Entry(run_id, tag, now, predicted, decision.cost_s if decision else self.cost_s(tag))
        self.entries.append(entry)
        return entry

    def find(self, run_id: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.run_id == run_id), None)

    def update(self, run_id: str, **what: Any) -> Entry | None:
        """More is known of a run: fields of `Entry`."""
        for index, entry in enumerate(self.entries):
            if entry.run_id == run_id:
                self.entries[index] = replace(entry, **what)
                return self.entries[index]
        return None

    def serving(self, version: str, is_serving: bool) -> None:
        """A run's version went live, or does not serve any more."""
        for index, entry in enumerate(self.entries):
            if entry.version == version:
                self.entries[index] = replace(entry, is_serving=is_serving)

    def served(
        self, cells: Iterable[tuple[str, str, int, int]], figures: Figures, before: Mapping[str, str]
    ) -> None:
        """Streams of (version, domain, tokens, steps): each version saved, or cost, steps against the one before it.

        `before`: by version, the one it is measured against, in the same domain; where that never served it, in all.
        """
        for version, domain, tokens, steps in cells:
            base = before.get(version)
            if base is None or not tokens:
                continue
            known = figures.by_domain(base).get(domain) or figures.of_version(base)
            rate = known.tokens_per_step
            if rate is None:
                continue
            saved = (tokens / rate - steps) * self._engine.step_s
            for index, entry in enumerate(self.entries):
                if entry.version == version:
                    self.entries[index] = replace(entry, realised_s=entry.realised_s + saved)

    # -- what is shown -----------------------------------------------------------------------------------

    def total(self) -> dict[str, float]:
        """Seconds of all runs together."""
        spent = math.fsum(e.spent_s for e in self.entries)
        realised = math.fsum(e.realised_s for e in self.entries)
        return {
            "predicted_s": math.fsum(e.predicted_s for e in self.entries),
            "realised_s": realised,
            "spent_s": spent,
            "net_s": realised - spent,
            "num_runs": len(self.entries),
        }

    def view(self, now: float) -> dict[str, Any]:
        """Runs newest first, totals, and the last decision of each tag."""
        return {
            "runs": [
                {
                    "run_id": e.run_id,
                    "version": e.version,
                    "tag": e.tag,
                    "at": e.at,
                    "predicted_s": e.predicted_s,
                    "realised_s": e.realised,
                    "spent_s": e.spent_s,
                    "gate_saving": e.gate_saving,
                    "still_serving": e.is_serving,
                }
                for e in reversed(self.entries)
            ],
            "total": self.total(),
            "decisions": {
                tag: {
                    "train": d.train,
                    "reason": d.reason,
                    "predicted_s": d.predicted_s,
                    "cost_s": d.cost_s,
                }
                for tag, d in self.decisions.items()
            },
            "decode_s_per_hour": self.decode_s_per_hour(now),
            "step_s": self._engine.step_s,
        }
