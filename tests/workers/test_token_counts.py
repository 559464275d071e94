"""Emissions of steps -> accepted tokens per step by source and version, and no more series than versions that matter."""

from __future__ import annotations

from paceline.cluster.metrics import Metrics
from paceline.cluster.types import SOURCE_DRAFT, SOURCE_SUFFIX, SOURCE_TARGET
from paceline.workers.token_counts import TokenCounts

ONE, THREE = bytes([SOURCE_TARGET]), bytes([SOURCE_DRAFT, SOURCE_DRAFT, SOURCE_TARGET])


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"paceline_{name}_total", labels)


def test_tokens_and_steps_are_counted_by_version() -> None:
    metrics = Metrics("decode")
    counts = TokenCounts(metrics)
    counts.add([("aaa", THREE), ("aaa", ONE), ("bbb", bytes([SOURCE_SUFFIX, SOURCE_TARGET])), ("", ONE)])
    counts.add([("aaa", THREE)])

    assert value(metrics, "stream_steps", version="aaa") == 3
    assert value(metrics, "tokens", source="draft", version="aaa") == 4
    assert value(metrics, "tokens", source="target", version="aaa") == 3
    assert value(metrics, "tokens", source="suffix", version="bbb") == 1
    assert (
        value(metrics, "stream_steps", version="none")
        == value(metrics, "tokens", source="target", version="none")
        == 1
    )


def test_versions_that_nobody_drafts_with_any_more_are_forgotten() -> None:
    """A worker that lives for a year would else show every version it ever met."""
    metrics = Metrics("decode")
    counts = TokenCounts(metrics)
    for number in range(100):
        counts.add([(f"v{number}", ONE), ("steady", ONE)])
    versions = {
        s.labels["version"]
        for f in metrics.registry.collect()
        if f.name == "paceline_tokens"
        for s in f.samples
    }

    assert "steady" in versions and "v99" in versions and "v0" not in versions and len(versions) <= 16
    assert value(metrics, "stream_steps", version="steady") == 100
