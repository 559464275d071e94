"""Traffic that moves to what the draft has never seen, and traffic that stays -> what learning brings, net of training.

Two live arms, learning and static, send the same requests with the same seeds to a cluster of their own on the same
cores; the clock runs over training as well. By P1 both arms' texts are the same, which is checked. Acceptance is
A / (A + R) of the shipped draft and of the one that serves in the end, on the texts of the last quarter: by P1
again, those are what either arm's draft would have met, and no decision of who is asked stands in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cluster.config import SpeculationConfig
from paceline.cluster.learning.counterfactual import Costs, Policy
from paceline.cluster.types import Request
from paceline.deploy.bench.figures import Count, Figure, ratio
from paceline.deploy.bench.learn.traffic import Cluster, Window, changed, in_domain, learning_cluster, total
from paceline.deploy.bench.workload import Workload
from paceline.workers.replay import Text
from paceline.workers.scoring import load_draft, score_requests

Say = Callable[[str], None]

LEARNING = (
    "learning.capture.holdout=0.2",
    "learning.capture.flush_s=2",
    "learning.train.min_requests=100",
    "learning.train.batch_tokens=512",
    "learning.train.max_steps=90",
    "trainer.spare_share=1",
    "learning.train.learning_rate=0.0006",
    "learning.gate.min_requests=20",
    "learning.gate.max_requests=40",
    "learning.rollout.canary_share=0.3",
    "learning.rollout.canary_min_requests=30",
    "learning.rollout.canary_max_s=20",
    "learning.rollout.watch_s=20",
)
"""For two thousand requests: a cluster that serves millions waits for more before it does anything."""
STATIC = ("learning.train_automatically=false", "learning.capture.local_consent=never")
"""The same processes, idle; the trainer is there and has nothing to do."""
_KNOWN, _SHIFTED = "domains", "unseen"


@dataclass(frozen=True, slots=True)
class Size:
    """How much traffic."""

    num_known: int = 100
    """Requests of what the draft knows, before the traffic moves."""
    num_shifted: int = 2000
    window: int = 100
    streams: int = 1
    max_tokens: int = 128
    pairs: int = 30
    """Of windows, alternated, when traffic stays."""
    seed: int = 0


QUICK = Size(num_known=20, num_shifted=240, window=40, max_tokens=32, pairs=3)


@dataclass(slots=True)
class Arm:
    """What one cluster did with all the traffic."""

    windows: list[Window] = field(default_factory=list)
    """After the traffic moved."""
    texts: dict[str, Text] = field(default_factory=dict)
    versions: list[str] = field(default_factory=list)
    """That served, in order."""
    decisions: list[str] = field(default_factory=list)
    """What the loop decided not to do, and why."""


@dataclass(slots=True)
class ShiftReport:
    """Both arms, and what follows from them."""

    learning: Arm
    static: Arm
    acceptance: tuple[float, float]
    """Of the shipped draft, and of the one that served in the end, on the texts of the last quarter."""
    learnt: Path | None = None
    """The latter's folder; None if it is the shipped one."""

    def figures(self) -> dict[str, float]:
        """By the names of the bench."""
        num = max(1, len(self.learning.windows) // 4)
        late, before = total(self.learning.windows[-num:]), total(self.static.windows[-num:])
        return {
            "shift.acceptance_before": self.acceptance[0],
            "shift.acceptance_after": self.acceptance[1],
            "shift.acceptance_gain": self.acceptance[1] - self.acceptance[0],
            "shift.tokens_per_step_ratio": late.tokens_per_step / before.tokens_per_step,
            "shift.net_vs_static": total(self.learning.windows).rate / total(self.static.windows).rate,
            "shift.late_vs_static": late.rate / before.rate,
            "shift.changed": float(changed(self.learning.texts, self.static.texts)),
            "shift.versions": float(len(self.learning.versions)),
        }


@dataclass(frozen=True, slots=True)
class StationaryReport:
    """Traffic that the shipped draft knows, with learning on and off."""

    net: Figure
    num_changed: int
    num_runs: int
    """That the loop began: none would be best."""
    decisions: list[str]

    def figures(self) -> dict[str, float]:
        """By the names of the bench."""
        return {
            **self.net.entries("stationary.net_vs_static"),
            "stationary.changed": float(self.num_changed),
            "stationary.runs": float(self.num_runs),
        }


class ShiftBench:
    """Live arms of both kinds of traffic."""

    def __init__(
        self, target: Path, draft: Path, work: Path, size: Size, say: Say, settings: Sequence[str] = ()
    ) -> None:
        """`work`: where the draft that was learnt is kept. `settings`: `section.field=value` for both arms."""
        self._draft = draft
        self._work = work
        self._size = size
        self._say = say
        self._settings = [f"model.target={target}", f"model.draft={draft}", *settings]
        self._workload = Workload(target, seed=size.seed)

    # -- traffic that moves ------------------------------------------------------------------------------

    def shift(self) -> ShiftReport:
        """Both arms, one after the other; each learns, or not, from its own traffic only."""
        learning, folder = self._arm("learning", LEARNING)
        static, _ = self._arm("static", STATIC)
        return ShiftReport(learning, static, self._acceptance(learning, folder), folder)

    def _arm(self, name: str, settings: Sequence[str]) -> tuple[Arm, Path | None]:
        size, arm = self._size, Arm()
        with learning_cluster([*self._settings, *settings]) as cluster:
            known = self._requests(_KNOWN, 0, size.num_known)
            cluster.run(known, size.streams, name, {})
            for first in range(0, size.num_shifted, size.window):
                requests = self._requests(_SHIFTED, first, min(size.window, size.num_shifted - first))
                window = cluster.run(requests, size.streams, name, arm.texts)
                arm.windows.append(window)
                arm.versions += sorted(window.versions - set(arm.versions))
                self._say(
                    f"{name}: {first + len(requests)} of {size.num_shifted} requests, {window.rate:.0f} tokens/s, "
                    f"{window.tokens_per_step:.2f} a step, draft {', '.join(sorted(window.versions)) or 'none'}"
                )
            arm.decisions = decisions(cluster)
            folder = cluster.live_draft()
            if folder is not None:
                folder = folder.rename(self._kept(folder.name))
        return arm, folder

    def _kept(self, version: str) -> Path:
        """Where the last version goes: its cluster's storage ends with the cluster."""
        home = self._work / "drafts"
        home.mkdir(parents=True, exist_ok=True)
        return home / version

    def _acceptance(self, learning: Arm, folder: Path | None) -> tuple[float, float]:
        texts = list(learning.texts.values())[-len(learning.texts) // 4 :]
        runners = [load_draft(self._draft), load_draft(folder or self._draft)]
        shape = SpeculationConfig()
        policy = Policy(shape.depth, shape.width, shape.floor, "fixed", ("draft",))
        flat = Costs((1.0, 64.0), (1.0, 1.0), (1.0,), (0.0,))  # only steps are counted here
        scores = score_requests(texts, runners, policy=policy, costs=[flat, flat])
        return scores[0].acceptance, scores[1].acceptance

    # -- traffic that stays ------------------------------------------------------------------------------

    def stationary(self) -> StationaryReport:
        """Two clusters at once, one learning, one not, asked in turn about what the draft knows."""
        size = self._size
        waves = max(8, size.window // 4)
        with (
            learning_cluster([*self._settings, *LEARNING]) as learning,
            learning_cluster([*self._settings, *STATIC]) as static,
        ):
            arms = {"learning": learning, "static": static}
            texts: dict[str, dict[str, Text]] = {name: {} for name in arms}

            def block(name: str, index: int) -> Count:
                requests = self._requests(_KNOWN, 10_000 + index * waves, waves)
                window = arms[name].run(requests, size.streams, name, texts[name])
                if name == "static":
                    self._say(f"stationary: {index + 1} of {size.pairs} pairs")
                return Count(window.num_tokens, window.seconds)

            for name in arms:  # the first requests compile and measure
                block(name, -1)
            counts: dict[str, list[Count]] = {name: [] for name in arms}
            for index in range(size.pairs):
                order = list(arms) if index % 2 == 0 else list(arms)[::-1]
                for name in order:
                    counts[name].append(block(name, index))
            runs = learning.get("runs")["items"]
            found = decisions(learning)
        return StationaryReport(
            ratio(counts["learning"], counts["static"]),
            changed(texts["learning"], texts["static"]),
            len(runs),
            found,
        )

    def _requests(self, scenario: str, first: int, num: int) -> list[Request]:
        requests = self._workload.requests(scenario, first, num, max_tokens=self._size.max_tokens)
        return in_domain(requests, scenario)


def decisions(cluster: Cluster) -> list[str]:
    """What the loop decided against, newest first."""
    return [f"{row['what']}: {row['reason']}" for row in cluster.get("ledger")["decisions"]]
