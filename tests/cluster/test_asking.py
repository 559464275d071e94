"""For which streams a drafter is asked: each by its own text, what was found already, and what asking costs."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.cluster.asking import WaitTime, Worth
from paceline.cluster.controller import StepCost

FLAT = StepCost([1, 64], [1.0, 1.2])


def run(worth: Worth, gains: dict[str, float], steps: int, *, wait_s: float = 0.5) -> dict[str, int]:
    """How often each stream was asked for in so many steps, each bringing its gain whenever it is asked."""
    streams = list(gains)
    times = dict.fromkeys(streams, 0)
    for _ in range(steps):
        asked = [streams[index] for index in worth.ask_for(streams, [0.0] * len(streams))]
        for key in asked:
            times[key] += 1
        if asked:
            worth.asked(wait_s, {key: gains[key] for key in asked})
    return times


def test_streams_of_one_step_are_told_apart() -> None:
    """Those whose text can be drafted are asked for in every step, the others hardly ever."""
    worth = Worth(FLAT)
    gains = {"good": 4.0, "bad": 0.0, "fair": 2.5, "worse": 0.0}
    run(worth, gains, 40)
    times = run(worth, gains, 200)

    assert times["good"] == times["fair"] == 200
    assert times["bad"] < 30 and times["worse"] < 30


def test_a_new_stream_is_tried_where_others_did_well() -> None:
    """One bad text does not pause the source for the texts that follow it."""
    worth = Worth(FLAT)
    run(worth, {"a": 4.0}, 40)
    worth.close("a")
    bad = run(worth, {"b": 0.0}, 30)
    worth.close("b")

    assert bad["b"] < 15
    assert run(worth, {"c": 4.0}, 20)["c"] >= 18


def test_a_stream_whose_text_changes_is_found_within_its_own_time() -> None:
    """Bad for a while beside a neighbour that is good: it is asked for again once it may have changed."""
    worth = Worth(FLAT)
    run(worth, {"steady": 4.0, "fickle": 4.0}, 40)
    run(worth, {"steady": 4.0, "fickle": 0.0}, 60)
    run(worth, {"steady": 4.0, "fickle": 4.0}, 200)

    assert run(worth, {"steady": 4.0, "fickle": 4.0}, 20)["fickle"] >= 18


def test_where_enough_was_found_nobody_is_asked_and_no_trial_is_lost() -> None:
    """Free sources have the next tokens: asking would only cost. It is asked again as soon as they have not."""
    worth = Worth(FLAT)
    run(worth, {"a": 3.0}, 40)

    assert all(worth.ask_for(["a"], [8.0]) == [] for _ in range(100))
    assert worth.ask_for(["a"], [0.0]) == [0]


def test_only_streams_that_found_too_little_are_asked_for() -> None:
    """What is found already is taken off what asking promises."""
    worth = Worth(FLAT)
    run(worth, {"a": 3.0, "b": 3.0}, 40)

    assert worth.ask_for(["a", "b"], [5.0, 0.2]) == [1]


def test_nothing_gained_counts_from_the_second_step_on() -> None:
    """In the first a source may still be catching up; one that goes on bringing nothing is left alone."""
    worth = Worth(FLAT)
    run(worth, {"a": 3.0}, 40)
    assert worth.ask_for(["new"], [0.0]) == [0]
    worth.asked(0.5, {"new": 0.0})
    assert worth.ask_for(["new"], [0.0]) == [0], "the first step says nothing"
    for _ in range(12):
        if worth.ask_for(["new"], [0.0]):
            worth.asked(0.5, {"new": 0.0})

    assert worth.ask_for(["new"], [0.0]) == []


def test_a_stream_that_missed_a_step_catches_up_first() -> None:
    """It was preempted: what its next step takes says nothing about the source."""
    worth = Worth(FLAT)
    run(worth, {"a": 4.0, "b": 4.0}, 40)
    run(worth, {"b": 4.0}, 3)
    assert worth.ask_for(["a", "b"], [0.0, 0.0]) == [0, 1]
    worth.asked(100.0, {"a": 0.0, "b": 4.0})

    assert worth.ask_for(["a", "b"], [0.0, 0.0]) == [0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_mixed_texts_are_served_nearly_as_fast_as_by_one_who_knows_them(seed: int) -> None:
    """Requests one after the other, half of them hopeless: at least 0.93 of the best that any choice could reach."""
    generator = np.random.default_rng(seed)
    worth = Worth(FLAT)
    tokens = seconds = best_tokens = best_seconds = 0.0
    for number in range(200):
        gain = float(generator.choice([0.0, 4.0]))
        for _ in range(40):
            asked = bool(worth.ask_for([str(number)], [0.0]))
            spent = float(FLAT(1 + 4 * asked)) + 1.0 * asked
            got = 1 + gain * asked
            if asked:
                worth.asked(1.0, {str(number): gain})
            tokens, seconds = tokens + got, seconds + spent
            is_good = gain > 0
            best_tokens += 1 + gain * is_good
            best_seconds += float(FLAT(1 + 4 * is_good)) + 1.0 * is_good
        worth.close(str(number))

    assert tokens / seconds > 0.93 * best_tokens / best_seconds


# --- what asking takes, and what it may take ------------------------------------------------------------


@pytest.mark.parametrize(
    ("first_s", "further_s"), [(0.05, 0.05), (1.0, 0.02), (0.3, 0.1)], ids=["each alone", "flat", "between"]
)
def test_the_time_of_any_number_of_streams_is_learnt(first_s: float, further_s: float) -> None:
    """From steps with few and with many of them; and not forgotten in a long time with one."""
    wait = WaitTime()
    numbers = [1, 1, 4, 16, 12, 2, 3, 9, 1, 16] * 10
    for num in [*numbers, *[1] * 500]:
        wait.observe(num, first_s + further_s * (num - 1))

    for num in (1, 2, 8, 16):
        assert wait(num) == pytest.approx(first_s + further_s * (num - 1), rel=0.1)
    assert wait(0) == 0


@pytest.mark.parametrize("further_s", [0.05, 0.01], ids=["each alone", "flat"])
@pytest.mark.parametrize("num_streams", [1, 4, 16])
@pytest.mark.parametrize("length", [20, 1000])
@pytest.mark.parametrize("is_free", [True, False])
def test_hopeless_texts_cost_two_percent(
    num_streams: int, length: int, further_s: float, is_free: bool
) -> None:
    """However many streams, however short, whatever each adds: what asking takes is bounded by the time served."""
    cost = StepCost([1, 64], [1.0, 4.0])
    worth = Worth(cost, is_free=is_free)
    spent = served = 0.0
    tried: set[str] = set()
    for step in range(4000):
        streams = [f"{step // length}/{i}" for i in range(num_streams)]
        if step % length == 0:
            for old in range(num_streams):
                worth.close(f"{step // length - 1}/{old}")
        asked = [streams[index] for index in worth.ask_for(streams, [0.0] * num_streams)]
        served += float(cost(num_streams))
        if asked:
            wait_s = 0.05 + further_s * (len(asked) - 1)
            spent += wait_s
            tried.update(asked)
            worth.asked(wait_s, dict.fromkeys(asked, 0.0))

    assert spent <= 0.02 * served + 20 * float(cost(1))
    if length == 1000:
        assert len(tried) == 4 * num_streams, "somebody was never tried"


def test_asking_that_was_expected_to_pay_and_does_not_is_bounded_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Figures that say it is cheap, and it is not: once 160 steps are lost, then 2 % of the time, no more."""
    monkeypatch.setattr(WaitTime, "observe", lambda self, num, seconds, is_usual: None)
    cost = StepCost([1, 64], [1.0, 1.2])
    worth = Worth(cost)
    streams = [str(i) for i in range(8)]
    step_s = float(cost(8))
    lost = served = 0.0
    for _ in range(4000):
        asked = [streams[index] for index in worth.ask_for(streams, [0.0] * 8)]
        served += step_s
        if asked:
            wait_s = 0.5 * step_s * len(asked)
            lost += wait_s - step_s / 8 * len(asked)
            worth.asked(wait_s, dict.fromkeys(asked, 1.0))

    assert 0 < lost < 0.02 * served + 160 * step_s


def test_a_source_that_pays_on_average_leaves_enough_for_the_trials_of_others() -> None:
    """Some steps lose time with a source that gains it: after a long time of that new streams are still tried."""
    generator = np.random.default_rng(3)
    worth = Worth(FLAT)
    for _ in range(3000):
        if worth.ask_for(["long"], [0.0]):
            worth.asked(0.5, {"long": float(generator.choice([0.0, 0.0, 3.0]))})

    new = [f"new {i}" for i in range(4)]
    assert set(worth.ask_for(["long", *new], [0.0] * 5)) >= {1, 2, 3, 4}


def test_trials_that_somebody_else_pays_for_need_no_budget_and_take_none() -> None:
    """Streams that only have to be heard: each is tried at once, whatever was lost on others before, and costs nobody."""
    worth = Worth(FLAT)
    assert worth.ask_for(["first"], [0.0]) == [0]
    worth.asked(5.0, {"first": 0.0})
    worth._budget_s = -0.1
    assert worth.ask_for(["new"], [0.0]) == []
    for step in range(20):
        assert worth.ask_for([f"heard{step}"], [0.0], is_gift=True) == [0]
        worth.asked(5.0, {f"heard{step}": 0.0})

    assert worth._budget_s > 0


def test_a_stream_that_was_heard_goes_on_if_it_pays() -> None:
    worth = Worth(FLAT)
    for _ in range(20):
        assert worth.ask_for(["good"], [0.0], is_gift=True) == [0]
        worth.asked(0.1, {"good": 3.0})


def test_catching_up_is_not_taken_for_what_asking_costs() -> None:
    """A first step reads whole prompts: what the second takes is believed at once, not after dozens of steps."""
    worth = Worth(FLAT)
    for wait_s in (10.0, 0.2):
        assert worth.ask_for(["one"], [0.0]) == [0]
        worth.asked(wait_s, {"one": 4.0})

    assert worth._wait_s(1) == pytest.approx(0.2)
    assert run(worth, {"one": 4.0}, 20, wait_s=0.2) == {"one": 20}


def test_one_that_only_ever_catches_up_is_bounded_as_well() -> None:
    """Streams of a step each: none shows what a source can do, and all of them together take their share of time."""
    worth, spent_s = Worth(FLAT), 0.0
    for step in range(5000):
        if worth.ask_for([f"short{step}"], [0.0]):
            worth.asked(10.0, {f"short{step}": 0.0})
            spent_s += 10.0
        worth.close(f"short{step}")

    assert 10.0 < spent_s <= 0.02 * 5000 + 2 * 16


def test_a_new_stream_is_believed_to_be_like_others() -> None:
    """Asked for at once where the source pays for most, even with nothing left for trials; not where it never did."""
    for gain, asked in ((4.0, [0]), (0.0, [])):
        worth = Worth(FLAT)
        for number in range(4):
            run(worth, {f"old{number}": gain}, 8, wait_s=0.2)
        worth._budget_s = -0.1
        assert worth.ask_for(["new"], [0.0]) == asked


def test_catching_up_has_to_pay_too() -> None:
    """What pays step by step does not yet pay for reading a prompt before."""
    worth = Worth(FLAT)
    for number in range(20):
        for wait_s in (8.0, 0.2, 0.2, 0.2):
            key = f"old{number}"
            if worth.ask_for([key], [0.0]):
                worth.asked(wait_s, {key: 0.5})
        worth.close(key)
    worth._budget_s = -0.1

    assert worth._catch_up_s > 5
    assert worth.ask_for(["new"], [0.0]) == []
    worth._catch_up_s = 0.0
    assert worth.ask_for(["newer"], [0.0]) == [0]
