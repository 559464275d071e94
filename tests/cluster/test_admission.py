"""Ends of streams and crashes -> when to come back, who runs alone, and what is kept out."""

from __future__ import annotations

import msgspec
import pytest

from paceline.cluster.admission import (
    MAX_QUARANTINED,
    MAX_RETRY_S,
    MIN_RETRY_S,
    QUARANTINE_S,
    DrainRate,
    Quarantine,
    request_digest,
)
from paceline.cluster.gateway.crashes import FORGIVEN_TOKENS, MAX_RETRIES, CrashRecord
from paceline.cluster.types import Request, Sampling


def test_those_turned_away_are_told_times_at_which_there_are_places() -> None:
    """Eight streams of four seconds each free two places a second: the twentieth outside is told ten seconds."""
    drain = DrainRate()
    for _ in range(200):
        drain.ended(4.0)
    waits = [drain.turn_away(100.0, 8) for _ in range(20)]

    assert waits == sorted(waits) and waits[0] == MIN_RETRY_S
    assert waits[-1] == pytest.approx(10.0)
    # Five seconds later ten places became free.
    assert drain.turn_away(105.0, 8) == pytest.approx(5.5)
    assert max(drain.turn_away(105.0, 8) for _ in range(500)) == MAX_RETRY_S


def test_before_anything_was_measured_the_wait_is_a_guess_within_the_limits() -> None:
    """The first second of a life under load."""
    assert MIN_RETRY_S <= DrainRate().turn_away(0.0, 0) <= MAX_RETRY_S
    assert MIN_RETRY_S <= DrainRate().turn_away(0.0, 64) <= MAX_RETRY_S


def test_a_quarantine_ends_and_is_bounded() -> None:
    """Ten minutes each; of too many, the oldest make way."""
    held = Quarantine()
    held.add(b"first", 0.0)
    assert held.holds(b"first", QUARANTINE_S - 1) and not held.holds(b"first", QUARANTINE_S + 1)
    assert not held.holds(b"other", 0.0)
    for index in range(MAX_QUARANTINED):
        held.add(str(index).encode(), 5.0)

    assert not held.holds(b"first", 6.0)
    assert len(held.living(6.0)) == MAX_QUARANTINED and held.living(QUARANTINE_S + 6) == ()


def test_a_digest_covers_what_is_asked_for_and_not_who_asks() -> None:
    """The client's own retry has another id and perhaps another seed; another prompt or temperature is another request."""

    def made(name: str = "a", prompt: tuple[int, ...] = (1, 2), seed: int = 1, **how: float) -> Request:
        return Request(name, prompt, Sampling(seed, **how), 5)  # type: ignore[arg-type]

    salted = msgspec.structs.replace(made(), cache_salt="somebody/")
    assert request_digest(made()) == request_digest(made("b", seed=9)) == request_digest(salted)
    different = {request_digest(r) for r in (made(), made(prompt=(1, 3)), made(temperature=0.5))}
    assert len(different) == 3


def test_two_crashes_make_a_suspect_and_three_an_end() -> None:
    """In flight at two crashes, a stream has to prove itself alone; there is no fourth attempt."""
    record = CrashRecord()
    record.crashed(5)
    assert not record.is_suspect
    record.crashed(5)
    assert record.is_suspect and not record.is_poison
    record.crashed(6)
    assert record.is_poison


def test_a_stream_that_got_well_past_a_crash_had_no_part_in_it() -> None:
    """Long streams live through many deaths of others, up to the budget of retries."""
    record = CrashRecord()
    for crash in range(1, MAX_RETRIES + 2):
        assert not record.is_spent
        record.crashed(crash * FORGIVEN_TOKENS)
        assert not record.is_suspect
    assert record.is_spent


def test_pauses_grow_and_differ() -> None:
    """Streams of one dead worker do not all come back in the same millisecond."""
    record = CrashRecord()
    record.crashed(0)
    first = [record.pause_s() for _ in range(50)]
    for _ in range(8):
        record.crashed(0)

    assert len(set(first)) > 40 and max(first) <= 0.025
    assert 0.1 < max(record.pause_s() for _ in range(50)) <= 1.0
