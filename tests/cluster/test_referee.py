"""The referee against simulated steps: what drafting in vain may cost, and what is lost where it helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from paceline.cluster.referee import Asked, PlainTimes, Referee


class AlwaysDraft(Referee):
    """Believes in drafts whatever the clock says."""

    def may_ask(self, num_streams: int) -> Asked:
        """Everybody."""
        return Asked.EVERYBODY


PLAIN_S = 0.004
Rate = Callable[[int], float]
"""Step -> tokens a second with drafts over tokens a second without."""


def share_of_plain(
    gain: Rate,
    num_steps: int,
    *,
    streams: int = 4,
    noise: float = 0.05,
    outliers: float = 0.005,
    seed: int = 0,
    make: type[Referee] = Referee,
) -> float:
    """Tokens a second that the referee's decisions reach, over those of plain steps alone."""
    dice = np.random.default_rng(seed)
    referee = make()
    tokens, seconds = 0.0, 0.0
    for step in range(num_steps):
        drafted = referee.may_ask(streams)
        num = int(dice.integers(1, 4)) * streams if drafted else streams
        step_s = PLAIN_S * (num / streams / gain(step) if drafted else 1.0)
        step_s *= float(np.exp(dice.normal(0, noise)))
        if dice.random() < outliers:
            step_s += 0.05  # somebody else had the core
        referee.stepped(streams, num, step_s, drafted)
        tokens, seconds = tokens + num, seconds + step_s
    return tokens / seconds * PLAIN_S / streams * (1 + outliers * 0.05 / PLAIN_S)


@pytest.mark.parametrize("gain", [0.3, 0.6, 0.8, 0.9, 0.95])
def test_drafting_in_vain_costs_three_percent_at_most(gain: float) -> None:
    """P2, whatever the figures behind the drafts say."""
    shares = [share_of_plain(lambda step: gain, 20_000, seed=seed) for seed in range(3)]

    assert min(shares) >= 0.97


def test_without_the_referee_it_costs_all_of_it() -> None:
    """The simulation shows a loss where there is one."""
    share = share_of_plain(lambda step: 0.8, 5_000, outliers=0, make=AlwaysDraft)

    assert share == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("gain", [1.1, 1.3, 1.8, 3.0])
def test_drafts_that_help_keep_nearly_all_they_bring(gain: float) -> None:
    """Plain steps in between are the price of knowing."""
    shares = [share_of_plain(lambda step: gain, 5_000, outliers=0, seed=seed) for seed in range(3)]

    assert min(shares) >= gain * 0.96


def test_drafts_that_become_good_are_found_again() -> None:
    """Off for a long time, then four thousand steps later at most they are on."""
    late = share_of_plain(lambda step: 0.7 if step < 20_000 else 1.6, 60_000)

    assert late > 1.3


def test_drafts_that_become_bad_are_switched_off() -> None:
    """A long good time does not make up for a bad one."""
    referee = Referee()
    for _ in range(5_000):
        drafted = referee.may_ask(1)
        referee.stepped(1, 2 if drafted else 1, PLAIN_S, drafted)
    num_drafted = 0
    for _ in range(5_000):
        drafted = referee.may_ask(1)
        num_drafted += drafted != Asked.NOBODY
        referee.stepped(1, 1, PLAIN_S * (1.25 if drafted else 1.0), drafted)

    assert num_drafted < 600


def test_numbers_of_streams_are_judged_apart() -> None:
    """What loses with sixteen streams goes on with one."""
    referee = Referee()
    for _ in range(4_000):
        for streams, gain in ((1, 1.8), (16, 0.8)):
            drafted = referee.may_ask(streams)
            num = 2 * streams if drafted else streams
            seconds = PLAIN_S * streams * (num / streams / gain if drafted else 1.0)
            referee.stepped(streams, num, seconds, drafted)

    assert referee.gains()[1] == (pytest.approx(1.8, rel=0.01), Asked.EVERYBODY)
    assert referee.gains()[16][0] == pytest.approx(0.8, rel=0.05)


def test_other_weights_are_tried_at_once() -> None:
    """A better draft is not kept waiting for the old one's sake."""
    referee = Referee()
    for _ in range(3_000):
        drafted = referee.may_ask(4)
        referee.stepped(4, 4, PLAIN_S * (2.0 if drafted else 1.0), drafted)
    assert not any(referee.may_ask(4) for _ in range(20))

    referee.reset()

    assert sum(bool(referee.may_ask(4)) for _ in range(20)) >= 15


def test_what_lost_is_tried_again_when_somebody_says_so() -> None:
    """A canary drafts for some streams: it cannot be judged while nobody is asked."""
    referee = Referee()
    for _ in range(3_000):
        asked = referee.may_ask(4)
        referee.stepped(4, 4, PLAIN_S * (2.0 if asked else 1.0), asked)
    assert not any(referee.may_ask(4) for _ in range(20))

    referee.retry()

    tried = 0
    for _ in range(40):
        asked = referee.may_ask(4)
        tried += bool(asked)
        referee.stepped(4, 4, PLAIN_S * (2.0 if asked else 1.0), asked)
    assert 5 <= tried <= 24  # and given up again


def test_a_hung_source_is_seen_in_a_few_dozen_steps() -> None:
    """Steps that wait fifty times as long as they work count as no more than what is plainly bad."""
    referee = Referee()
    drafted = [Asked.NOBODY]
    for _ in range(200):
        drafted.append(referee.may_ask(2))
        referee.stepped(2, 2, PLAIN_S * (50.0 if drafted[-1] else 1.0), drafted[-1])

    assert drafted.count(Asked.EVERYBODY) <= 40


def test_plain_times_lie_between_those_that_were_seen() -> None:
    times = PlainTimes()
    for _ in range(5):
        times.observe(2, 0.002)
        times.observe(6, 0.006)

    assert times(4) == pytest.approx(0.004) and times(1) == 0.002 and times(9) == 0.006
    assert times.count(2) == 5 and times.count(4) == 0 and times.count(5) == 5


# --- free sources alone, or everybody -------------------------------------------------------------------


def share_of_best(gains: Mapping[Asked, float], num_steps: int, *, seed: int, noise: float = 0.4) -> float:
    """Tokens a second that the referee's decisions reach over those of the best choice; plain steps have 1."""
    dice = np.random.default_rng(seed)
    referee = Referee(list(gains))
    rates = {Asked.NOBODY: 1.0, **gains}
    tokens, seconds = 0.0, 0.0
    for _ in range(num_steps):
        asked = referee.may_ask(1)
        num = 1 if asked == Asked.NOBODY else int(dice.integers(1, 6))
        spread = noise if asked else 0.05
        step_s = PLAIN_S * num / rates[asked] * float(np.exp(dice.normal(0, spread) - spread**2 / 2))
        referee.stepped(1, num, step_s, asked)
        tokens, seconds = tokens + num, seconds + step_s
    return tokens / seconds * PLAIN_S / max(rates.values())


@pytest.mark.parametrize(
    ("free", "everybody"), [(1.9, 1.55), (1.1, 1.8), (1.3, 0.7), (0.99, 2.5), (2.0, 0.3)]
)
def test_the_faster_of_two_choices_is_found(free: float, everybody: float) -> None:
    """And kept nearly all the time."""
    shares = [
        share_of_best({Asked.FREE: free, Asked.EVERYBODY: everybody}, 6_000, seed=seed) for seed in range(3)
    ]

    assert np.mean(shares) >= 0.93 and min(shares) >= 0.9


@pytest.mark.parametrize(("free", "everybody"), [(0.98, 0.7), (0.9, 0.9), (0.6, 0.8), (0.97, 0.3)])
def test_two_kinds_in_vain_cost_three_percent_at_most(free: float, everybody: float) -> None:
    """P2 holds for both together."""
    shares = [
        share_of_best({Asked.FREE: free, Asked.EVERYBODY: everybody}, 20_000, seed=seed) for seed in range(3)
    ]

    assert min(shares) >= 0.97


# --- models alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "everybody", "models"),
    [(0.97, 0.94, 1.2), (1.05, 1.55, 1.9), (2.0, 1.95, 1.5), (0.9, 1.3, 0.8), (1.02, 1.6, 1.6)],
)
def test_the_fastest_of_three_choices_is_found(free: float, everybody: float, models: float) -> None:
    """Also where everybody loses and models alone win: the first is no verdict on the second."""
    gains = {Asked.FREE: free, Asked.EVERYBODY: everybody, Asked.MODELS: models}
    shares = [share_of_best(gains, 8_000, seed=seed) for seed in range(3)]

    assert np.mean(shares) >= 0.93 and min(shares) >= 0.9


@pytest.mark.parametrize(
    ("free", "everybody", "models"), [(0.98, 0.9, 0.7), (0.9, 0.9, 0.9), (0.97, 0.5, 0.4), (0.6, 0.8, 0.97)]
)
def test_three_kinds_in_vain_cost_three_percent_at_most(free: float, everybody: float, models: float) -> None:
    """P2 holds for all of them together: the two with models take turns."""
    gains = {Asked.FREE: free, Asked.EVERYBODY: everybody, Asked.MODELS: models}
    shares = [share_of_best(gains, 20_000, seed=seed) for seed in range(3)]

    assert min(shares) >= 0.97


def test_without_free_sources_there_is_nothing_between() -> None:
    """Nobody or everybody."""
    referee = Referee()
    seen = set()
    for _ in range(1_000):
        seen.add(asked := referee.may_ask(1))
        referee.stepped(1, 1, PLAIN_S * (2.0 if asked else 1.0), asked)

    assert seen == {Asked.NOBODY, Asked.EVERYBODY}
