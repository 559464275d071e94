"""Latencies, queues and KV of each second -> the level at which training goes on, with hysteresis."""

import math

import pytest

from paceline.cluster.learning.config import GuardConfig
from paceline.cluster.learning.guard import Guard, Latency, quantile, read_histogram
from paceline.cluster.metrics import Metrics
from paceline.cluster.types import Role, Snapshot, TrainLevel, WorkerInfo

CONFIG = GuardConfig(ttft_p99_ms=1000, inter_token_p99_ms=100, max_kv_use=0.9, resume_s=20)


def worker(
    role: Role, *, incarnation: int = 1, used: int = 0, free: int = 100, streams: int = 0
) -> WorkerInfo:
    return WorkerInfo(
        f"{role}-a", role, incarnation, "h", 1, 1, "n", "ready", "v", used, free, streams
    )  # fmt: skip


class Cluster:
    """One gateway and one decode worker, pushed to a guard each second."""

    def __init__(self, config: GuardConfig = CONFIG) -> None:
        self.guard = Guard(config, max_streams=10)
        self.metrics = Metrics()
        self.now = 1000.0

    def second(self, *, gap_s: float = 0.01, events: int = 50, ttft_s: float = 0.1, used: int = 0, streams: int = 0) -> TrainLevel:  # fmt: skip
        for _ in range(events):
            self.metrics.inter_token.observe(gap_s)
        for _ in range(min(events, 5)):
            self.metrics.ttft.observe(ttft_s)
        self.now += 1.0
        return self.guard.observe(
            [
                Snapshot(worker("gateway"), self.metrics.text()),
                Snapshot(worker("decode", used=used, free=100 - used, streams=streams), b""),
            ],
            self.now,
        )

    def seconds(self, num: int, **how: float) -> list[TrainLevel]:
        return [self.second(**how) for _ in range(num)]  # type: ignore[arg-type]


@pytest.fixture
def cluster() -> Cluster:
    """Quiet for a while."""
    cluster = Cluster()
    cluster.seconds(15)
    return cluster


def test_quiet_traffic_lets_training_run(cluster: Cluster) -> None:
    """No hysteresis at the start: it is normal as soon as there are figures."""
    fresh = Cluster()
    assert fresh.guard.level == "pause"

    assert fresh.second() == "normal" and cluster.guard.level == "normal"


@pytest.mark.parametrize(
    ("how", "level"),
    [
        ({"gap_s": 0.02}, "normal"),
        ({"gap_s": 0.3}, "pause"),
        ({"ttft_s": 4.0}, "pause"),
        ({"used": 70}, "throttle"),
        ({"used": 82}, "pause"),
        ({"streams": 7}, "throttle"),
        ({"streams": 9}, "pause"),
    ],
)
def test_each_figure_alone_makes_it_yield(cluster: Cluster, how: dict[str, float], level: TrainLevel) -> None:
    """At 90 % of a limit it pauses, from 70 % on it is throttled; latencies need a few seconds to be seen."""
    assert cluster.seconds(5, **how)[-1] == level


def test_what_lasts_above_the_limit_evicts(cluster: Cluster) -> None:
    """Paused was not enough for ten seconds: memory goes back too."""
    levels = cluster.seconds(15, used=95)

    assert levels[0] == "pause" and levels[-1] == "evict" and levels.index("evict") == 10


def test_it_comes_back_step_by_step_after_quiet(cluster: Cluster) -> None:
    """Twenty quiet seconds each; a busy one in between starts them anew, one under 90 % is not quiet."""
    assert cluster.second(streams=9) == "pause"
    assert set(cluster.seconds(30, streams=8)) == {"pause"}
    assert set(cluster.seconds(15)) == {"pause"}
    cluster.second(streams=8)
    levels = cluster.seconds(45)

    assert levels.count("pause") == 20 and levels.count("throttle") == 20
    assert levels == sorted(levels, key=["pause", "throttle", "normal"].index)


def test_a_level_does_not_flap(cluster: Cluster) -> None:
    """Load that swings between the two thresholds changes nothing any more."""
    levels = [cluster.second(streams=9 if i % 5 == 0 else 6) for i in range(100)]

    assert set(levels) == {"pause"}


def test_without_figures_it_pauses_and_then_goes_on_at_once(cluster: Cluster) -> None:
    """Nobody could say that training does no harm; control that began anew knows nothing either."""
    for _ in range(11):
        cluster.now += 1
        cluster.guard.observe([], cluster.now)
    assert cluster.guard.level == "pause" and "no figures" in cluster.guard.reason

    assert cluster.second() == "normal"


def test_few_events_make_no_percentile(cluster: Cluster) -> None:
    """One slow token in an idle minute is no violation."""
    cluster.seconds(20, events=0)

    assert cluster.seconds(5, gap_s=5.0, events=1)[-1] == "normal"


def test_a_gateway_that_began_anew_counts_from_zero() -> None:
    """Its counters are smaller than before; that must be no negative latency, nor its whole past one second."""
    latency = Latency("paceline_inter_token_seconds")
    old, new = Metrics(), Metrics()
    for _ in range(1000):
        old.inter_token.observe(3.0)
    latency.observe([Snapshot(worker("gateway"), old.text())], 1.0)
    for _ in range(30):
        new.inter_token.observe(0.003)
    latency.observe([Snapshot(worker("gateway", incarnation=2), new.text())], 2.0)
    for _ in range(30):
        new.inter_token.observe(0.003)
    latency.observe([Snapshot(worker("gateway", incarnation=2), new.text())], 3.0)

    value = latency.quantile()
    assert value is not None and 0.0025 <= value <= 0.005


def test_quantiles_of_buckets() -> None:
    """Linear within a bucket; in the last, open one its lower end is all that is known."""
    counts = {0.1: 90.0, 0.2: 98.0, math.inf: 100.0}

    assert quantile(counts, 0.45) == pytest.approx(0.05)
    assert quantile(counts, 0.94) == pytest.approx(0.15)
    assert quantile(counts, 0.99) == pytest.approx(0.2)


def test_histograms_are_read_from_real_text() -> None:
    """What prometheus_client writes, among all other figures."""
    metrics = Metrics()
    metrics.ttft.observe(0.3)

    counts = read_histogram(metrics.text(), "paceline_ttft_seconds")

    assert counts[0.25] == 0 and counts[0.5] == 1 and counts[math.inf] == 1
    assert read_histogram(metrics.text(), "paceline_nothing") == {}


def test_the_view_names_the_figure_that_decides(cluster: Cluster) -> None:
    """An operator sees at a glance why training stands still, when it began, and for how long it did."""
    cluster.seconds(5, streams=10)
    view = cluster.guard.view(cluster.now)

    assert view["now"]["level"] == "pause" and "queue" in view["now"]["reason"]
    names = [r["name"] for r in view["readings"]]
    assert names == ["ttft_p99_ms", "inter_token_p99_ms", "kv_use", "queue"]
    assert [(c["from"], c["to"]) for c in view["history"]] == [("normal", "pause"), ("pause", "normal")]
    assert view["time_at"]["pause"] == 4 and view["time_at"]["normal"] == 15
