"""Counts of several processes -> one text that Prometheus can parse, each sample once and labelled by its worker."""

from collections import Counter
from itertools import pairwise

import pytest
from prometheus_client import Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster.metrics import Metrics, merge


def families(text: bytes) -> dict[str, Metric]:
    """Parsed by prometheus_client; a family that comes twice is an error."""
    found: dict[str, Metric] = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.name not in found, f"{family.name} comes twice"
        found[family.name] = family
    return found


def touched(scale: int = 1) -> Metrics:
    """A process that reported something in every figure."""
    metrics = Metrics()
    for figure in vars(metrics).values():
        if not isinstance(figure, MetricWrapperBase):
            continue
        child = (
            figure.labels(*(f"some {label}" for label in figure._labelnames))
            if figure._labelnames
            else figure
        )
        if hasattr(child, "observe"):
            for value in (0.0007, 0.3, 100.0):
                child.observe(value * scale)
        elif hasattr(child, "set"):
            child.set(scale)
        else:
            child.inc(scale)
    return metrics


def series(family: Metric) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
    return [(s.name, tuple(sorted(s.labels.items())), s.value) for s in family.samples]


def test_every_metric_carries_the_prefix_and_a_help_text() -> None:
    """The names of one process parse, start with paceline_, and say what they count."""
    found = families(touched().text())

    assert len(found) > 15
    for name, family in found.items():
        assert name.startswith("paceline_"), name
        assert all(sample.name.startswith("paceline_") for sample in family.samples)
        assert family.documentation and family.samples


def test_merged_texts_hold_each_sample_of_each_worker_once() -> None:
    """The merged text is the sum of its parts: same values, two more labels, nothing lost or doubled."""
    texts = {
        ("decode", "decode-a"): touched(1).text(),
        ("decode", "decode-b"): touched(2).text(),
        ("draft", "draft-a"): touched(3).text(),
        ("control", "control"): Metrics().text(),
    }
    expected: Counter[tuple[object, ...]] = Counter()
    for (role, worker), text in texts.items():
        for family in families(text).values():
            for name, labels, value in series(family):
                all_labels = tuple(sorted([*labels, ("role", role), ("worker", worker)]))
                expected[(name, all_labels, value)] += 1

    found = Counter(s for family in families(merge(texts)).values() for s in series(family))

    assert found == expected
    assert set(found.values()) == {1}


def test_merging_keeps_types_and_help_texts() -> None:
    """Each family is announced once, as its processes announce it, quotes and all."""
    alone = families(touched().text())
    text = merge({("decode", name): touched().text() for name in ("a", "b")})
    merged = families(text)

    assert {n: (f.type, f.documentation) for n, f in merged.items()} == {
        n: (f.type, f.documentation) for n, f in alone.items()
    }
    assert '"link", or "local:<reason>"' in merged["paceline_kv_prompts"].documentation
    helps = [line.split()[2] for line in text.decode().splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps))


def test_histograms_stay_whole_for_each_worker() -> None:
    """Buckets of one worker stand together, rise to +Inf, and agree with count and sum."""
    merged = families(merge({("decode", n): touched(i).text() for i, n in enumerate("ab", 1)}))
    histograms = [f for f in merged.values() if f.type == "histogram"]

    assert len(histograms) == sum(isinstance(value, Histogram) for value in vars(Metrics()).values())
    for family in histograms:
        for worker, scale in (("a", 1), ("b", 2)):
            mine = [s for s in family.samples if s.labels["worker"] == worker]
            buckets = [(float(s.labels["le"]), s.value) for s in mine if s.name.endswith("_bucket")]
            (count,) = [s.value for s in mine if s.name.endswith("_count")]
            (total,) = [s.value for s in mine if s.name.endswith("_sum")]
            assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(buckets))
            assert buckets[-1] == (float("inf"), 3) and count == 3
            assert total == pytest.approx(100.3007 * scale)


def test_nothing_to_merge_is_an_empty_text() -> None:
    """A cluster without a snapshot yet answers with no samples rather than an error."""
    assert merge({}) == b""


def test_label_values_with_quotes_newlines_and_backslashes_survive() -> None:
    """What a label holds is data; merging must not break the line it stands in."""
    metrics = Metrics()
    odd = 'a "quoted"\nline\\n'
    metrics.kv_refused.labels(odd).inc()
    merged = families(merge({("decode", odd): metrics.text()}))

    (sample,) = [s for s in merged["paceline_kv_messages_refused"].samples if s.name.endswith("_total")]
    assert sample.labels == {"reason": odd, "role": "decode", "worker": odd}


def test_figures_by_source_keep_their_source_beside_the_worker() -> None:
    """Two workers' counts of two sources stay four series: they can be summed either way."""
    texts = {}
    for worker, num in (("decode-a", 1), ("decode-b", 2)):
        metrics = Metrics()
        metrics.drafted.labels("draft").inc(10 * num)
        metrics.drafted.labels("suffix").inc(num)
        metrics.calibration_error.labels("draft").set(0.25 * num)
        metrics.step_nodes.observe(3 * num)
        texts[("decode", worker)] = metrics.text()
    merged = families(merge(texts))

    found = {
        (s.labels["worker"], s.labels["source"]): s.value
        for s in merged["paceline_drafted_tokens"].samples
        if s.name.endswith("_total")
    }
    assert found == {
        ("decode-a", "draft"): 10,
        ("decode-a", "suffix"): 1,
        ("decode-b", "draft"): 20,
        ("decode-b", "suffix"): 2,
    }
    errors = {s.labels["worker"]: s.value for s in merged["paceline_draft_calibration_error"].samples}
    assert errors == {"decode-a": 0.25, "decode-b": 0.5}
    nodes = [s for s in merged["paceline_step_draft_nodes"].samples if s.labels.get("le") == "4.0"]
    assert {s.labels["worker"]: s.value for s in nodes} == {"decode-a": 1, "decode-b": 0}
