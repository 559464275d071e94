"""Training gives way: to what control says, and to others on the same cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.workers.training.pace import Evicted, Neighbours, Pace


def test_levels_hold_training_back() -> None:
    """Throttled it sleeps as long as it worked; paused it waits until told, and the wait is not counted."""
    seen: list[str] = []
    pace = Pace(on_level=seen.append)
    pace.between()
    pace.set("throttle")
    assert waited(pace, 0.05) >= 0.045
    assert (pace.size(100), pace.in_force) == (50, "throttle")
    pace.set("pause")
    timer = threading.Timer(0.1, lambda: pace.set("normal"))
    timer.start()
    pace.between()
    assert pace.paused_s >= 0.09
    assert pace.size(100) == 100
    pace.set("evict")
    with pytest.raises(Evicted):
        pace.between()
    assert seen == ["throttle", "pause", "normal", "evict"]


def waited(pace: Pace, worked_s: float) -> float:
    """Seconds of a pause behind so much work."""
    pace.between()
    time.sleep(worked_s)
    began = time.monotonic()
    pace.between()
    return time.monotonic() - began


def test_alone_nobody_waits() -> None:
    pace = Pace(duty=lambda: 1.0)

    waited(pace, 0.05)
    assert pace.yielded_s == 0


@pytest.mark.parametrize(("duty", "rest"), [(0.5, 1.0), (0.25, 3.0)])
def test_it_works_in_its_part_of_the_time(duty: float, rest: float) -> None:
    pace = Pace(duty=lambda: duty)

    assert waited(pace, 0.05) >= rest * 0.05
    assert pace.yielded_s >= rest * 0.05


def test_small_pieces_of_work_are_made_up_for_together() -> None:
    """Each of less than a nap: as many naps as they are worth, not one for each."""
    pace = Pace(duty=lambda: 0.5)
    pace.between()
    for _ in range(20):
        time.sleep(0.002)
        pace.between()

    assert 0.03 <= pace.yielded_s < 0.3


@pytest.mark.parametrize("later", [1.0, 0.5])
def test_where_others_want_all_it_waits_until_they_want_less(later: float) -> None:
    readings = iter([0.0] * 10 + [later] * 100)
    pace = Pace(duty=lambda: next(readings))

    assert waited(pace, 0.02) >= 10 * 0.015
    assert 95 <= len(list(readings)) <= 100 - 1


def test_a_machine_that_is_always_full_holds_nothing_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.workers.training.pace._MOST_S", 0.2)
    pace = Pace(duty=lambda: 0.0)

    assert 0.2 <= waited(pace, 0.02) < 2


def test_what_control_says_is_heard_while_giving_way() -> None:
    pace = Pace(duty=lambda: 0.0)
    threading.Timer(0.1, lambda: pace.set("evict")).start()
    began = time.monotonic()
    time.sleep(0.02)
    with pytest.raises(Evicted):
        pace.between()

    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("cores", "used", "threads", "duty"),
    [
        (2, 0.1, 1, 1.0),
        (2, 0.5, 1, 0.5),
        (2, 0.7, 1, 0.3),
        (2, 0.8, 1, 0.0),
        (64, 0.8, 4, 1.0),
        (64, 0.95, 4, 0.4),
    ],
)
def test_of_the_cores_that_others_leave_it_takes_half(
    cores: int, used: float, threads: int, duty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    neighbours = Neighbours(0.5, threads)
    monkeypatch.setattr(neighbours, "share", lambda: used)

    assert neighbours.duty() == pytest.approx(duty)


@pytest.fixture
def spin() -> Iterator[Callable[[], None]]:
    """Makes a process that uses a core."""
    made: list[subprocess.Popen[bytes]] = []
    yield lambda: made.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
    for process in made:
        process.kill()
        process.wait()


def test_a_busy_neighbour_is_seen(spin: Callable[[], None]) -> None:
    """What others of this machine do beside it can only add to that."""
    neighbours = Neighbours(0.5, 1)
    spin()
    shares: list[float] = []
    for _ in range(10):
        time.sleep(0.12)
        shares.append(neighbours.share())

    assert max(shares) >= 0.7 / (os.cpu_count() or 1)
    assert max(shares) <= 1.05
