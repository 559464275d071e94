"""Texts of the shift's last quarter -> the arms that were not run live: no drafts, copies only, a draft retrained offline.

By P1 the texts are the same in all arms, so what each would have taken follows from replaying them through the
deployed drafters and controller, timed by tables. Replay has to tell what the live static arm took first: its steps
within 1 % and its time within 3 %; otherwise what it says of other arms is told as a note, not as a figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.config import SpeculationConfig
from paceline.cluster.learning.counterfactual import Costs, Policy
from paceline.deploy.bench.inprocess import load
from paceline.deploy.bench.learn.candidates import Workshop
from paceline.deploy.bench.learn.shift import ShiftReport
from paceline.deploy.bench.learn.traffic import Window, total
from paceline.workers.model_runner import ModelRunner
from paceline.workers.profile import measure_step_cost
from paceline.workers.replay import Replay, Text, replay_policy
from paceline.workers.scoring import load_draft, measure_draft_cost

Say = Callable[[str], None]

_STEPS_OFF, _TIME_OFF = 0.01, 0.03
_SUFFIX_S = 30e-6
_OFFLINE = "offline"


@dataclass(slots=True)
class ArmsReport:
    """Seconds and steps of each arm by replay, and how far replay is from the live static arm."""

    arms: dict[str, Replay]
    steps_error: float
    time_error: float

    @property
    def is_trusted(self) -> bool:
        return self.steps_error <= _STEPS_OFF and self.time_error <= _TIME_OFF

    def figures(self) -> dict[str, float]:
        """By the names of the bench; ratios only where replay has shown that it can tell."""
        found = {"replay.steps_error": self.steps_error, "replay.time_error": self.time_error}
        return found | (self.ratios() if self.is_trusted else {})

    def ratios(self) -> dict[str, float]:
        """Time of each arm over that of the draft that was learnt live."""
        learnt = self.arms["learnt"].seconds
        return {
            f"replay.net_vs_{name}": arm.seconds / learnt
            for name, arm in self.arms.items()
            if name != "learnt"
        }


class ArmsBench:
    """Works on what the live arms left."""

    def __init__(self, target: Path, draft: Path, work: Path, streams: int, say: Say) -> None:
        self._target, self._draft, self._work = target, draft, work
        self._streams = streams
        self._say = say

    def run(self, report: ShiftReport, learnt: Path | None, *, steps: int = 240, seed: int = 0) -> ArmsReport:
        """`learnt`: folder of the version that served in the end; None if none was promoted. `steps`: of offline training."""
        seen = _last_quarter(report)
        texts = list(report.learning.texts.values())
        late = texts[-seen.num_requests :]
        runner = load(self._target)
        costs = self._costs(runner)
        static, live = load_draft(self._draft), load_draft(learnt or self._draft)
        offline = load_draft(self._train(texts[: -len(late)], steps, seed))
        arms: dict[str, Replay] = {}
        for name, draft, sources in (
            ("nothing", None, ()),
            ("suffix", None, ("suffix",)),
            ("static", static, ("suffix", "draft")),
            ("offline", offline, ("suffix", "draft")),
            ("learnt", live, ("suffix", "draft")),
        ):
            self._say(f"replay: {name}")
            arms[name] = self._replay(late, draft, sources, costs, runner.vocab_size)
        replayed = sum(taken.num_steps for taken in arms["static"].texts)
        return ArmsReport(
            arms, abs(replayed / seen.num_steps - 1), abs(arms["static"].seconds / seen.seconds - 1)
        )

    def _replay(
        self,
        texts: Sequence[Text],
        draft: ModelRunner | None,
        sources: tuple[str, ...],
        costs: Costs,
        size: int,
    ) -> Replay:
        shape = SpeculationConfig()
        policy = Policy(shape.depth, shape.width, shape.floor, "measured", sources, self._streams)
        return replay_policy(texts, draft, policy=policy, costs=costs, vocab_size=size)

    def _costs(self, runner: ModelRunner) -> Costs:
        tables = [measure_step_cost(runner) for _ in range(3)]
        seconds = [
            statistics.median(column) for column in zip(*(t.seconds.tolist() for t in tables), strict=True)
        ]
        draft_rows, draft_seconds = measure_draft_cost(load_draft(self._draft))
        return Costs(tuple(tables[0].rows.tolist()), tuple(seconds), draft_rows, draft_seconds, _SUFFIX_S)

    def _train(self, texts: Sequence[Text], steps: int, seed: int) -> Path:
        """The shipped draft, trained on all that the live one could have learnt from, with the clock stopped."""
        shop = Workshop(self._work, self._target, self._draft, self._say)
        shop.train(_OFFLINE, "", texts, steps=steps, snapshots={}, seed=seed)
        return shop.folder(_OFFLINE)


def _last_quarter(report: ShiftReport) -> Window:
    """What the live static arm took for the last windows, a quarter of them."""
    return total(report.static.windows[-max(1, len(report.static.windows) // 4) :])
