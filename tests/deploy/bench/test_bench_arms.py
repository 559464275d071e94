"""Replayed arms work on the very requests of the live arms' last windows, and are timed as a cluster serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster.learning.counterfactual import Costs
from paceline.cluster.types import Request, Sampling
from paceline.deploy.bench.learn import arms
from paceline.deploy.bench.learn.shift import Arm, ShiftReport
from paceline.deploy.bench.learn.traffic import Window
from paceline.workers.replay import Replay, Taken, Text

STEPS, STEP_S, MORE_S, REQUEST_S = 40, 2e-3, 1e-3, 0.01
"""Of a request: its steps, what a table says of one, what a cluster adds to it, and to the request."""


class Runner:
    vocab_size = 16


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Requests of each replay, whose learnt draft takes a quarter of the steps."""
    asked: list[list[str]] = []
    drafts = iter([Runner(), Runner(), Runner()])  # static, learnt, offline
    loaded: list[Runner] = []

    def load_draft(folder: Path) -> Runner:
        loaded.append(next(drafts))
        return loaded[-1]

    def replay(texts: list[Text], draft: object, *, costs: Costs, **rest: object) -> Replay:
        asked.append([text.request.id for text in texts])
        num = STEPS // 4 if len(loaded) > 1 and draft is loaded[1] else STEPS
        seconds = num * (STEP_S + costs.step_s)
        taken = tuple(Taken(text.request.id, "", STEPS, num, seconds) for text in texts)
        return Replay(taken, num * len(texts), seconds * len(texts))

    monkeypatch.setattr(arms, "load", lambda folder: Runner())
    monkeypatch.setattr(arms, "load_draft", load_draft)
    monkeypatch.setattr(arms, "replay_policy", replay)
    monkeypatch.setattr(arms.ArmsBench, "_costs", lambda bench, runner: Costs((1.0,), (1.0,), (1.0,), (0.0,)))
    return asked


def live(steps: int, slower: float = 1.0) -> Arm:
    """Nine windows of a hundred requests; a quarter are two of them."""
    texts = {f"r{i}": Text(Request(f"r{i}", (1,), Sampling(i), 4), (5, 6)) for i in range(900)}
    step_s = STEP_S + MORE_S
    seconds = slower * 100 * (REQUEST_S + steps * step_s)
    window = Window(100, 200, 100 * steps, 0, seconds, 100 * (REQUEST_S + step_s))
    return Arm([window] * 9, texts)


def report(monkeypatch: pytest.MonkeyPatch, learning: Arm, static: Arm) -> tuple[arms.ArmsReport, list[int]]:
    trained: list[int] = []

    def train(bench: object, given: list[Text], steps: int, seed: int) -> Path:
        trained.append(len(given))
        return Path()

    monkeypatch.setattr(arms.ArmsBench, "_train", train)
    bench = arms.ArmsBench(Path(), Path(), Path(), 1, lambda line: None)
    return bench.run(ShiftReport(learning, static, (0.1, 0.2)), None), trained


def test_replay_is_timed_as_the_cluster_serves(
    monkeypatch: pytest.MonkeyPatch, asked: list[list[str]]
) -> None:
    """From the static arm it learns what a step and a request cost more, which tells the learning arm's time."""
    found, trained = report(monkeypatch, live(STEPS // 4), live(STEPS))

    before, late = [f"r{i}" for i in range(450, 700)], [f"r{i}" for i in range(650, 900)]
    assert asked == [before] * 2 + [late] * 5 and trained == [700]
    assert found.steps_error == pytest.approx(0) and found.time_error == pytest.approx(0, abs=1e-9)
    ratio = (REQUEST_S + STEPS * (STEP_S + MORE_S)) / (REQUEST_S + STEPS // 4 * (STEP_S + MORE_S))
    assert found.figures()["replay.net_vs_static"] == pytest.approx(ratio)


@pytest.mark.parametrize(("steps", "slower"), [(STEPS // 4, 1.05), (STEPS // 4 + 1, 1.0)])
@pytest.mark.usefixtures("asked")
def test_where_replay_is_off_it_says_nothing_of_other_arms(
    monkeypatch: pytest.MonkeyPatch, steps: int, slower: float
) -> None:
    found, _ = report(monkeypatch, live(steps, slower), live(STEPS))

    assert set(found.figures()) == {"replay.steps_error", "replay.time_error"}
    assert "replay.net_vs_offline" in found.ratios()
