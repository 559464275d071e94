"""Streams that ended -> acceptance by the unbiased estimator, sums over time, in bounded memory."""

import math

import numpy as np
import pytest

from paceline.cluster.learning.figures import OTHER, Figures, Ratio
from paceline.cluster.types import ServedStream


def stream(version: str = "v", domain: str = "d", tenant: str = "t", **how: object) -> ServedStream:
    values = {"num_tokens": 30, "num_steps": 10, "tested": (10, 6), "accepted": (6, 3), "seconds": 0.5}
    return ServedStream("r", tenant, domain, version, **{**values, **how})  # type: ignore[arg-type]


def test_acceptance_is_that_of_tested_places() -> None:
    """True rate 0.7, depth 5: A / (A + R) finds it; accepted / proposed would read 0.39."""
    rng = np.random.default_rng(0)
    figures = Figures()
    proposed = accepted_in_all = 0
    for _ in range(300):
        tested, accepted = [0] * 5, [0] * 5
        for _ in range(20):
            proposed += 5
            for depth in range(5):
                tested[depth] += 1
                if rng.random() > 0.7:
                    break
                accepted[depth] += 1
        accepted_in_all += sum(accepted)
        figures.add([stream(tested=tuple(tested), accepted=tuple(accepted))], 1000.0)

    cell = figures.of_version("v")
    assert cell.acceptance == pytest.approx(0.7, abs=0.01)
    assert accepted_in_all / proposed == pytest.approx(0.389, abs=0.01)  # negative control
    for tested_at, accepted_at in zip(cell.tested_by_depth, cell.accepted_by_depth, strict=True):
        assert accepted_at / tested_at == pytest.approx(0.7, abs=0.05)


def test_series_are_by_version_and_domain_in_order_of_time() -> None:
    """Counts, so that any sum of points gives the right ratio; buckets with nothing are left out."""
    figures = Figures()
    for at, version in ((1000.0, "a"), (1003.0, "a"), (1021.0, "b"), (1021.0, "a")):
        figures.add([stream(version)], at)

    found = figures.series(since=0.0, step_s=10.0)

    points = {(s["version"], s["domain"]): s["points"] for s in found["series"]}
    assert [p["at"] for p in points["a", "d"]] == [1000.0, 1020.0]
    first = points["a", "d"][0]
    assert (first["num_requests"], first["num_tokens"], first["num_tested"], first["num_accepted"]) == (
        2,
        60,
        32,
        18,
    )
    assert [p["at"] for p in points["b", "d"]] == [1020.0]
    assert {"version": "b", "domain": "d", "depth": 2, "num_tested": 6, "num_accepted": 3} in found["depths"]
    assert [s["version"] for s in figures.series(since=1015.0)["series"]] == ["b", "a"]


def test_a_day_is_kept_coarsely_and_an_hour_finely() -> None:
    """Bounded, however long it runs."""
    figures = Figures()
    for minute in range(3 * 24 * 60):
        figures.add([stream()], 60.0 * minute)
    now = 60.0 * 3 * 24 * 60

    day = figures.series(since=now - 86_400, step_s=10.0)
    hour = figures.series(since=now - 3_500, step_s=10.0)

    assert day["step_s"] == 300.0 and len(day["series"][0]["points"]) <= 289
    assert hour["step_s"] == 10.0 and len(hour["series"][0]["points"]) == 58
    assert figures.recent(600.0, now)["d"].requests == 10
    assert figures.of_version("v").requests == 3 * 24 * 60


def test_names_that_clients_choose_cannot_fill_memory() -> None:
    """Domains and tenants beyond a limit are counted together, versions that served long ago forgotten."""
    figures = Figures()
    for i in range(300):
        figures.add([stream(f"v{i}", f"d{i}", f"t{i}")], 1000.0)

    view = figures.view(1001.0)
    assert len(view["versions"]) == 32 and len(view["tenants"]) == 65
    assert OTHER in view["versions"]["v299"]["by_domain"]
    assert view["last_minute"]["requests"] == 300


def test_recent_tells_versions_apart() -> None:
    """What the ledger and the canary ask: one version's streams, by domain."""
    figures = Figures()
    figures.add([stream("a", "x"), stream("a", "y"), stream("b", "x", num_tokens=20)], 1000.0, left_out=2)

    assert figures.recent(60, 1001, version="b")["x"].tokens_per_step == 2.0
    assert set(figures.recent(60, 1001)) == {"x", "y"}
    assert figures.recent(60, 2000) == {}
    assert figures.span(1100) == 200 and figures.left_out == 2


def test_each_finished_bucket_is_given_away_once() -> None:
    """For the registry: sums over tenants, of buckets that nothing is added to any more."""
    figures = Figures()
    figures.add([stream(tenant="x"), stream(tenant="y")], 1000.0)
    figures.add([stream()], 1012.0)

    assert [(at, version, cell.requests) for at, _, version, _, cell in figures.finished(1013.0)] == [
        (1000.0, "v", 2)
    ]
    assert figures.finished(1014.0) == []
    assert [at for at, *_ in figures.finished(1030.0)] == [1010.0]


def test_streams_without_drafts_have_no_acceptance() -> None:
    """None, not zero: nothing was tested."""
    figures = Figures()
    figures.add([stream("", tested=(), accepted=())], 1000.0)

    cell = figures.of_version("")
    assert cell.acceptance is None and cell.tokens_per_step == 3.0
    assert figures.of_version("unknown").tokens_per_step is None


def test_the_variance_of_a_ratio_is_that_of_repeated_samples() -> None:
    """Delta method against the spread of 2,000 samples whose parts are correlated."""
    rng = np.random.default_rng(1)
    values, variances = [], []
    for _ in range(2000):
        ratio = Ratio()
        for steps in rng.integers(2, 30, 60):
            ratio.add(float(rng.binomial(int(steps), 0.5) + steps), float(steps))
        values.append(ratio.value)
        variances.append(ratio.variance)

    assert np.mean(variances) == pytest.approx(np.var(values), rel=0.1)
    assert math.isinf(Ratio().variance)
