"""For which streams a drafter is asked: each by its own text, what was found already, and what asking costs."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.cluster.asking import Worth
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
