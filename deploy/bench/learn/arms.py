"""Texts of the shift's last quarter -> the arms that were not run live: no drafts, copies only, a draft retrained offline.

By P1 the texts are the same in all arms, so what each would have taken follows from replaying them through the
deployed drafters and controller, timed by tables. What no table has, the way of a request through the cluster and what
a step costs beside its forward, is measured on the live static arm's quarter before the last:

    seconds = requests * a + replayed seconds with b more for each step

Replay has to tell first what both live arms took for the last quarter, the learning one with another draft than a and b
were measured with: their steps within 1 % and their time within 3 %; otherwise what it says of other arms is told as
a note, not as a figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.cluster.config import SpeculationConfig
from paceline.cluster.learning.counterfactual import Costs, Policy
from paceline.deploy.bench.inprocess import load
from paceline.deploy.bench.learn.candidates import Workshop
from paceline.deploy.bench.learn.shift import Arm, ShiftReport
from paceline.deploy.bench.learn.traffic import Window, total
from paceline.workers.model_runner import ModelRunner
from paceline.workers.profile import measure_step_cost
from paceline.workers.replay import Text, replay_policy
from paceline.workers.scoring import load_draft, measure_draft_cost

Say = Callable[[str], None]

_STEPS_OFF, _TIME_OFF = 0.01, 0.03
_SUFFIX_S = 30e-6
_OFFLINE = "offline"
_WARM = 50
"""Texts before those that count: drafters and controller have met such traffic when they come."""


@dataclass(frozen=True, slots=True)
class Told:
    """What an arm takes for some requests."""

    num_steps: int
    seconds: float

    def error(self, seen: Window) -> tuple[float, float]:
        """How far it is from what was measured, steps and time, as shares of that."""
        return abs(self.num_steps / seen.num_steps - 1), abs(self.seconds / seen.seconds - 1)


@dataclass(slots=True)
class ArmsReport:
    """Steps and seconds of each arm by replay, and how far replay is from the live arms."""

    arms: dict[str, Told]
    errors: dict[str, tuple[float, float]]
    """By live arm: of steps and of time."""

    @property
    def steps_error(self) -> float:
        return max(steps for steps, _ in self.errors.values())

    @property
    def time_error(self) -> float:
        return max(seconds for _, seconds in self.errors.values())

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
        texts = list(report.learning.texts.values())
        seen = {"static": _quarter(report.static, 0), "learnt": _quarter(report.learning, 0)}
        num_late = seen["static"].num_requests
        late = texts[-num_late - _WARM :]
        runner = load(self._target)
        size = runner.vocab_size
        static, live = load_draft(self._draft), load_draft(learnt or self._draft)
        costs, request_s = self._served(report.static, texts, static, self._costs(runner), size)
        offline = load_draft(self._train(texts[:-num_late], steps, seed))
        arms: dict[str, Told] = {}
        for name, draft, sources in (
            ("nothing", None, ()),
            ("suffix", None, ("suffix",)),
            ("static", static, ("suffix", "draft")),
            ("offline", offline, ("suffix", "draft")),
            ("learnt", live, ("suffix", "draft")),
        ):
            self._say(f"replay: {name}")
            told = self._replay(late, num_late, draft, sources, costs, size)
            arms[name] = Told(told.num_steps, told.seconds + num_late * request_s)
        return ArmsReport(arms, {name: arms[name].error(window) for name, window in seen.items()})

    def _served(
        self, static: Arm, texts: Sequence[Text], draft: ModelRunner, costs: Costs, size: int
    ) -> tuple[Costs, float]:
        """The same costs of a step in a cluster, and the seconds of a request beside its steps."""
        window, last = _quarter(static, 1), _quarter(static, 0)
        num = window.num_requests
        some = texts[: len(texts) - last.num_requests][-num - _WARM :]
        alone = self._replay(some, num, draft, ("suffix", "draft"), costs, size)
        num_behind = max(1, window.num_steps - num)  # first tokens: a request's time until then is measured
        share = num_behind / window.num_steps
        step_s = (window.seconds - window.ttft_s - share * alone.seconds) / num_behind
        served = msgspec.structs.replace(costs, step_s=max(0.0, step_s))
        replayed = self._replay(some, num, draft, ("suffix", "draft"), served, size)
        request_s = (window.seconds - replayed.seconds) / num
        self._say(
            f"replay: in the cluster {1e3 * step_s:.2f} ms a step more, {1e3 * request_s:.1f} ms a request"
        )
        return served, request_s

    def _replay(
        self,
        texts: Sequence[Text],
        num: int,
        draft: ModelRunner | None,
        sources: tuple[str, ...],
        costs: Costs,
        size: int,
    ) -> Told:
        """What the last `num` texts take."""
        shape = SpeculationConfig()
        policy = Policy(shape.depth, shape.width, shape.floor, "measured", sources, self._streams)
        taken = replay_policy(texts, draft, policy=policy, costs=costs, vocab_size=size).texts[-num:]
        return Told(sum(text.num_steps for text in taken), sum(text.seconds for text in taken))

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


def _quarter(arm: Arm, before: int) -> Window:
    """What a live arm took for the last quarter of its windows, or for the one `before` it."""
    num = max(1, len(arm.windows) // 4)
    end = len(arm.windows) - before * num
    return total(arm.windows[max(0, end - num) : end])
