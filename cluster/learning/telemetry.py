"""The learning loop as it is now -> control's gauges. What happens is counted where it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.cluster.metrics import ALARMS, TRAIN_LEVELS, Metrics, set_one

if TYPE_CHECKING:
    from paceline.cluster.learning.loop import LearningLoop


def report(loop: LearningLoop, metrics: Metrics) -> None:
    """Set what can be read off at any time."""
    total = loop.ledger.total()
    for kind in ("predicted", "realised", "spent"):
        metrics.ledger_seconds.labels(kind).set(total[f"{kind}_s"])
    metrics.ledger_runs.set(total["num_runs"])
    set_one(metrics.guard_level, TRAIN_LEVELS, loop.guard.level)
    for alarm in ALARMS:
        metrics.alarm.labels(alarm).set(alarm in loop.alarms)
    metrics.new_requests.set(loop.cycle.num_new(""))
