"""Metrics that decode workers push -> work done and captured since the last look, and why drafting is off."""

from paceline.cluster.learning.scrape import DecodeFigures, read
from paceline.cluster.metrics import Metrics
from paceline.cluster.types import Snapshot, WorkerInfo


def push(metrics: Metrics, name: str = "a", incarnation: int = 1) -> Snapshot:
    info = WorkerInfo(f"decode-{name}", "decode", incarnation, "h", 1, 1, "n", "ready", "v")
    return Snapshot(info, metrics.text())


def test_only_what_happened_since_the_last_look_counts() -> None:
    """Control that begins anew must not count a worker's whole past; a worker that begins anew counts from zero."""
    figures, metrics = DecodeFigures(), Metrics()
    metrics.capture_requests.inc(100)
    metrics.step_seconds.observe(5.0)
    figures.observe([push(metrics)])
    assert (figures.captured, figures.engine_s) == (0, 0.0)

    metrics.capture_requests.inc(7)
    metrics.step_seconds.observe(0.25)
    figures.observe([push(metrics)])
    assert (figures.captured, figures.engine_s) == (7, 0.25)

    fresh = Metrics()
    fresh.capture_requests.inc(3)
    figures.observe([push(fresh, incarnation=2)])
    assert figures.captured == 3


def test_step_times_come_as_the_controller_has_them() -> None:
    """For the gate: rows in order, whatever order the text has."""
    figures, metrics = DecodeFigures(), Metrics()
    assert figures.step_cost == ((), ())
    for rows, seconds in ((16, 0.004), (1, 0.001), (2, 0.002)):
        metrics.step_cost.labels(rows).set(seconds)
    figures.observe([push(metrics)])

    assert figures.step_cost == ((1, 2, 16), (0.001, 0.002, 0.004))


def test_streams_that_share_a_step_are_those_of_the_last_minutes() -> None:
    """Of all workers and versions; what lies behind counts less and less, and a worker's past not at all."""
    figures, metrics = DecodeFigures(), Metrics()
    metrics.steps.inc(1000)
    metrics.stream_steps.labels("a").inc(8000)
    figures.observe([push(metrics)])
    assert figures.streams == 1

    metrics.steps.inc(100)
    metrics.stream_steps.labels("a").inc(250)
    metrics.stream_steps.labels("b").inc(150)
    figures.observe([push(metrics)])
    assert figures.streams == 4

    for _ in range(1500):
        figures.observe([])
    figures.observe([push(metrics)])
    metrics.steps.inc(100)
    metrics.stream_steps.labels("b").inc(800)
    figures.observe([push(metrics)])
    assert figures.streams in (7, 8)


def test_do_not_speculate_is_said_with_its_reason() -> None:
    """What was measured, by number of streams; and where the configuration says so, that."""
    figures, metrics = DecodeFigures(), Metrics()
    metrics.draft_gain.labels(1).set(1.8)
    metrics.draft_off.labels(1).set(0)
    figures.observe([push(metrics)])
    assert figures.speculation(is_enabled=True)["on"]

    metrics.draft_gain.labels(4).set(0.8)
    metrics.draft_off.labels(4).set(1)
    figures.observe([push(metrics)])
    found = figures.speculation(is_enabled=True)

    assert not found["on"] and "do not speculate" in found["reason"]
    assert "0.80 times as fast with 4 or more" in found["reason"]
    assert figures.speculation(is_enabled=False)["reason"] == "speculation.enabled=false"


def test_other_roles_and_other_samples_are_not_read() -> None:
    """A gateway captures nothing; a name that begins like another is another."""
    figures, metrics = DecodeFigures(), Metrics()
    figures.observe([])
    metrics.capture_requests.inc(5)
    gateway = WorkerInfo("gateway-a", "gateway", 1, "h", 1, 1, "n", "ready")
    figures.observe([Snapshot(gateway, metrics.text())])

    assert figures.captured == 0
    assert read(b"a_total 1.0\na_total_b 2.0\n", ["a_total"]) == {"a_total": [({}, 1.0)]}
