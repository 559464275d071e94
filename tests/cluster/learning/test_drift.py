"""Simulated streams -> which domain has drifted; the mix of domains and temperatures may change as it likes."""

from collections.abc import Mapping

import numpy as np
import pytest

from paceline.cluster.learning.drift import Drift, Drifted
from paceline.cluster.types import ServedStream

Levels = Mapping[str, float]
DEPTHS = np.arange(6)


def stream(
    rng: np.random.Generator, domain: str, level: float, *, temperature: float = 1.0, spread: float = 0.1
) -> ServedStream:
    """One stream: its own acceptance scatters about the level, and sinks with depth and temperature."""
    own = float(np.clip(level + rng.normal(0, spread) - 0.1 * temperature, 0.02, 0.98))
    right = rng.random((int(rng.integers(4, 16)), len(DEPTHS))) < own - 0.02 * DEPTHS
    whole = (
        np.logical_and.accumulate(right, axis=1).sum(axis=0).tolist()
    )  # steps whose first d + 1 places stand
    tested, accepted = (len(right), *whole[:-1]), tuple(whole)
    return ServedStream(
        "r", "t", domain, "v", sum(accepted) + 10, 10, tested, accepted, temperature=temperature
    )


def feed(
    drift: Drift,
    rng: np.random.Generator,
    num: int,
    levels: Levels,
    mix: Levels,
    *,
    temperatures: tuple[float, ...] = (0.0, 1.0),
    odds: tuple[float, ...] = (0.5, 0.5),
    at: int = 0,
) -> tuple[int, list[Drifted]]:
    """Streams one by one, a second apart, until something drifts -> (how many it took, what drifted)."""
    names = rng.choice(list(mix), num, p=list(mix.values())).tolist()
    heats = rng.choice(temperatures, num, p=odds).tolist()
    for i, (name, temperature) in enumerate(zip(names, heats, strict=True)):
        found = drift.add([stream(rng, name, levels[name], temperature=temperature)], float(at + i))
        if found:
            return i + 1, found
    return num, []


LEVELS = {"chat": 0.8, "code": 0.55}
EVEN = {"chat": 0.5, "code": 0.5}


@pytest.mark.parametrize("seed", range(3))
def test_a_changed_mix_is_no_drift(seed: int) -> None:
    """From mostly plain to mostly hard domains, from cold to hot: the average falls by 0.15, no domain does."""
    rng = np.random.default_rng(seed)
    drift = Drift()
    feed(drift, rng, 1000, LEVELS, {"chat": 0.9, "code": 0.1}, odds=(0.9, 0.1))

    _, found = feed(drift, rng, 1500, LEVELS, {"chat": 0.1, "code": 0.9}, odds=(0.1, 0.9))

    assert found == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("fall", "limit"), [(0.1, 300), (0.25, 100)])
def test_a_real_fall_is_seen_soon(seed: int, fall: float, limit: int) -> None:
    """In the domain that fell and no other; since about when it fell, and by about how much."""
    rng = np.random.default_rng(seed)
    drift = Drift()
    began, found = feed(drift, rng, 1500, LEVELS, EVEN)
    assert found == []

    took, (item,) = feed(drift, rng, 3000, {**LEVELS, "chat": 0.8 - fall}, EVEN, at=began)

    assert item.domain == "chat" and not item.is_new
    assert took / 2 <= limit  # every other stream is of that domain
    assert abs(item.since - began) < max(400, took)
    assert item.by > 0.02


def test_a_small_fall_is_seen_most_times() -> None:
    """By 0.05, a quarter of how much streams scatter: what is slow to notice it soon takes it for normal."""
    took = []
    for seed in range(10):
        rng, drift = np.random.default_rng(seed), Drift()
        began, _ = feed(drift, rng, 1500, LEVELS, EVEN)
        num, found = feed(drift, rng, 4000, {**LEVELS, "chat": 0.75}, EVEN, at=began)
        took += [num / 2] * len(found)

    assert len(took) >= 7 and max(took) <= 900


def test_false_alarms_are_rare() -> None:
    """20 runs of 2,000 steady streams in two domains: at most one alarm among 40,000 streams."""
    alarms = 0
    for seed in range(20):
        _, found = feed(Drift(), np.random.default_rng(100 + seed), 2000, LEVELS, EVEN)
        alarms += len(found)

    assert alarms <= 1


def test_a_fall_without_residuals_would_be_seen_where_there_is_none() -> None:
    """Negative control: with all domains and temperatures in one pot, the changed mix does look like drift."""
    rng = np.random.default_rng(0)
    drift = Drift()
    pots = {name: level for name, level in LEVELS.items()}

    def pot(num: int, share: float) -> list[Drifted]:
        for i in range(num):
            name = "chat" if rng.random() < share else "code"
            one = stream(rng, "", pots[name], temperature=0.5)
            found = drift.add([one], float(i))
            if found:
                return found
        return []

    assert pot(1000, 0.9) == []
    assert pot(1500, 0.1) != []


def test_a_new_domain_is_measured_against_the_known_ones() -> None:
    """Traffic moves to what the draft never saw: that domain has drifted from its first streams on."""
    rng = np.random.default_rng(5)
    drift = Drift()
    feed(drift, rng, 800, {"chat": 0.8}, {"chat": 1.0})

    took, (item,) = feed(drift, rng, 300, {"law": 0.5}, {"law": 1.0}, at=800)

    assert item.domain == "law" and item.is_new and took <= 100
    assert 0.1 < item.by < 0.5
    assert [d.domain for d in drift.drifted] == ["law"]


def test_a_new_domain_that_is_as_good_is_not_drift() -> None:
    """And later it is measured against itself."""
    rng = np.random.default_rng(6)
    drift = Drift()
    levels = {"chat": 0.8, "law": 0.8}
    feed(drift, rng, 800, levels, {"chat": 1.0})

    _, found = feed(drift, rng, 1500, levels, {"chat": 0.3, "law": 0.7}, at=800)

    assert found == []
    took, (item,) = feed(drift, rng, 1500, {**levels, "law": 0.65}, {"chat": 0.3, "law": 0.7}, at=2300)
    assert item.domain == "law" and took < 600


def test_what_came_back_has_not_drifted_any_more() -> None:
    """No training for what is over."""
    rng = np.random.default_rng(7)
    drift = Drift()
    one = {"chat": 1.0}
    feed(drift, rng, 1000, {"chat": 0.8}, one)
    feed(drift, rng, 500, {"chat": 0.6}, one)
    assert drift.drifted

    feed(drift, rng, 3000, {"chat": 0.82}, one)

    assert drift.drifted == []


def test_restart_forgets_one_domain_or_all() -> None:
    """After a run that could not help, this is how the domain is: no alarm again and again."""
    rng = np.random.default_rng(8)
    drift = Drift()
    feed(drift, rng, 1000, LEVELS, EVEN)
    feed(drift, rng, 500, {**LEVELS, "chat": 0.5}, EVEN)
    assert drift.drifted

    drift.restart("chat")

    assert drift.drifted == []
    _, found = feed(drift, rng, 1500, {**LEVELS, "chat": 0.5}, EVEN)
    assert found == []
    drift.restart()
    assert drift.view() == []


def test_streams_without_drafts_say_nothing() -> None:
    """Where nothing was tested there is no acceptance to fall."""
    drift = Drift()

    assert drift.add([ServedStream("r", "t", "d", "", 10, 10)] * 100, 1.0) == []
    assert drift.view() == []


def test_memory_is_bounded_by_the_number_of_domains() -> None:
    """Clients choose the names of domains: late ones share one place."""
    rng = np.random.default_rng(9)
    drift = Drift()
    drift.add([stream(rng, f"d{i}", 0.7) for i in range(200)], 1.0)

    assert len(drift.view()) == 65
