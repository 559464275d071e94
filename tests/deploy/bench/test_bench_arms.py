"""Arms that are replayed work on the very requests that the live arm's last windows took."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster.types import Request, Sampling
from paceline.deploy.bench.learn import arms
from paceline.deploy.bench.learn.shift import Arm, ShiftReport
from paceline.deploy.bench.learn.traffic import Window
from paceline.workers.replay import Replay, Taken, Text


def test_the_last_quarter_is_that_of_the_live_arm_s_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six windows of ten requests: a quarter is one window, not fifteen requests."""
    texts = {f"r{i}": Text(Request(f"r{i}", (1,), Sampling(i), 4), (5, 6)) for i in range(60)}
    live = Arm([Window(10, 20, 20, 0, 1.0) for _ in range(6)], texts)
    asked: list[list[str]] = []
    trained: list[int] = []

    def replay(bench: object, late: list[Text], *rest: object) -> Replay:
        asked.append([text.request.id for text in late])
        return Replay(tuple(Taken(text.request.id, "", 2, num_steps=2) for text in late), 20, 1.0)

    def train(bench: object, given: list[Text], steps: int, seed: int) -> Path:
        trained.append(len(given))
        return Path()

    class Runner:
        vocab_size = 16

    monkeypatch.setattr(arms, "load", lambda folder: Runner())
    monkeypatch.setattr(arms, "load_draft", lambda folder: Runner())
    monkeypatch.setattr(arms.ArmsBench, "_costs", lambda bench, runner: None)
    monkeypatch.setattr(arms.ArmsBench, "_replay", replay)
    monkeypatch.setattr(arms.ArmsBench, "_train", train)
    bench = arms.ArmsBench(Path(), Path(), Path(), 1, lambda line: None)
    report = bench.run(ShiftReport(live, live, (0.1, 0.2)), None)

    assert all(ids == [f"r{i}" for i in range(50, 60)] for ids in asked)
    assert trained == [50]
    assert (report.steps_error, report.time_error) == (0, 0) and report.is_trusted
