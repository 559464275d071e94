"""Limits of API keys: never more in any minute than they say, and never less than was promised."""

import math
import random
from collections.abc import Hashable

import pytest

from paceline.cluster.rates import MEMORY_S, Limits, Rates

FREE = Limits()


def test_no_window_of_a_minute_ever_holds_more_than_the_limit() -> None:
    """Requests at random times, refused ones tried again when they were told to."""
    rng = random.Random(7)
    rates, limits = Rates(), Limits(10, 500, 0)
    let_in: list[tuple[float, int]] = []
    now, refused = 1000.3, 0
    for turn in range(2000):
        tokens = rng.randint(1, 120)
        standing = rates.admit("k", limits, turn, tokens, now)
        if standing.exceeded:
            refused += 1
            again = rates.admit("k", limits, turn, tokens, now + standing.retry_after_s)
            assert not again.exceeded, "it was told when to come again"
            now += standing.retry_after_s
        let_in.append((now, tokens))
        rates.settle("k", turn, tokens)
        now += rng.choice((0.0, 0.1, 3.0))

    assert refused > 100
    for at, _ in let_in:
        window = [tokens for when, tokens in let_in if at <= when < at + 60]
        assert len(window) <= 10 and sum(window) <= 500


def test_the_whole_limit_can_be_used_at_once() -> None:
    """And again when it left the window, a second late at most."""
    rates, limits = Rates(), Limits(3, 0, 0)
    standings = [rates.admit("k", limits, n, 1, 50.9) for n in range(4)]

    assert [s.exceeded for s in standings] == ["", "", "", "requests"]
    assert [s.remaining_requests for s in standings] == [2, 1, 0, 0]
    wait_s = standings[3].retry_after_s
    assert 60 <= wait_s <= MEMORY_S and standings[2].reset_requests_s == wait_s
    assert rates.admit("k", limits, 9, 1, 50.9 + wait_s - 0.01).exceeded == "requests"
    assert not rates.admit("k", limits, 9, 1, 50.9 + wait_s).exceeded


def test_what_was_reserved_and_not_used_is_given_back() -> None:
    """A request counts with all it may generate while it runs, and then with what it did."""
    rates, limits = Rates(), Limits(0, 100, 0)
    assert rates.admit("k", limits, "a", 90, 0.0).remaining_tokens == 10
    refused = rates.admit("k", limits, "b", 20, 1.0)
    assert (refused.exceeded, refused.remaining_tokens) == ("tokens", 10)
    rates.settle("k", "a", 30)
    rates.settle("k", "a", 0)  # once is enough

    assert rates.admit("k", limits, "b", 20, 1.0).remaining_tokens == 50
    assert math.isinf(rates.admit("k", limits, "c", 101, 1.0).retry_after_s)


def test_a_late_end_gives_nothing_back_twice() -> None:
    """Its tokens left the window long ago: nobody gets credit for them."""
    rates, limits = Rates(), Limits(0, 100, 0)
    rates.admit("k", limits, "a", 90, 0.0)
    assert rates.admit("k", limits, "b", 80, 70.0).remaining_tokens == 20
    rates.settle("k", "a", 0)

    assert rates.admit("k", limits, "c", 20, 70.5).remaining_tokens == 0
    assert rates.admit("k", limits, "d", 1, 70.5).exceeded == "tokens"


def test_only_so_many_at_once_and_a_lost_gateway_s_requests_are_over() -> None:
    """Whichever gateway they came through."""
    rates, limits = Rates(), Limits(0, 0, 2)
    who: list[Hashable] = [(1, "a"), (2, "a")]
    assert [rates.admit("k", limits, one, 1, 0.0).exceeded for one in who] == ["", ""]
    assert rates.admit("k", limits, (2, "b"), 1, 0.0).exceeded == "concurrency"
    assert not rates.admit("other", limits, (2, "b"), 1, 0.0).exceeded, "keys do not know each other"
    rates.drop(1)

    assert not rates.admit("k", limits, (2, "b"), 1, 0.0).exceeded
    assert rates.admit("k", limits, (2, "c"), 1, 0.0).exceeded == "concurrency"
    rates.settle("k", (2, "b"), 1)
    assert not rates.admit("k", limits, (2, "c"), 1, 0.0).exceeded


def test_what_is_refused_costs_nothing_and_what_runs_already_is_counted() -> None:
    """Clients repeat what was refused; a new router hears of what another let in."""
    rates, limits = Rates(), Limits(1, 10, 0)
    rates.admit("k", limits, "a", 10, 0.0, is_let_in=True)
    rates.admit("k", limits, "b", 10, 0.0, is_let_in=True)
    for turn in range(5):
        assert rates.admit("k", limits, f"c{turn}", 10, 1.0).exceeded == "requests"

    assert not rates.admit("k", limits, "d", 10, MEMORY_S).exceeded


def test_a_key_that_uses_nothing_is_forgotten() -> None:
    """Names of keys do not pile up."""
    rates = Rates()
    for turn in range(100):
        rates.admit(f"k{turn}", Limits(5, 5, 5), "a", 1, 0.0)
        rates.settle(f"k{turn}", "a", 1)
    rates.admit("k", Limits(5, 5, 5), "a", 1, 200.0)

    assert list(rates._uses) == ["k"]


@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_parts_together_are_the_limit_and_less_than_one_each_more(num: int) -> None:
    """What gateways allow without a router."""
    limits = Limits(60, 1001, 1)
    part = limits.part(num)

    for field in ("requests_per_minute", "tokens_per_minute", "concurrency"):
        whole = getattr(limits, field)
        assert whole <= getattr(part, field) * num < whole + num
    assert limits.over(FREE) == limits and FREE.over(limits) == limits
    assert Limits(5).over(limits) == Limits(5, 1001, 1)
    assert limits.is_any and not FREE.is_any
