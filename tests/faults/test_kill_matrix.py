"""Every role killed in every phase under running streams, and what judges it -> all texts whole, nothing left."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console

from paceline.cluster.gateway.text import Tokenizer
from paceline.deploy.bench import faults, soak
from paceline.deploy.bench.faults import Kill, Matrix, Row
from paceline.deploy.bench.traffic import Answer, Ask

NOWHERE = Console(quiet=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_death_is_seen_by_a_client() -> None:
    """The whole matrix, as `paceline bench faults` runs it."""
    result = faults.run(streams=16, kills=2, out=NOWHERE, say=print)

    assert result["complaints"] == []
    assert result["figures"]["faults.kills"] >= 40
    assert result["figures"]["faults.failed_streams"] == result["figures"]["faults.wrong_tokens"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_left_of_a_thousand_requests() -> None:
    """The same with more of everything, and after the end of the cluster."""
    result = soak.run(requests=1000, out=NOWHERE, say=print)

    assert result["complaints"] == []
    assert result["figures"]["soak.faults"] >= 5 and result["figures"]["soak.role_swaps"] >= 2


# --- the judge itself: it must see what is wrong --------------------------------------------------------


class _Tokens(Tokenizer):
    """One character for each token."""

    def __init__(self) -> None:
        pass

    def decode(self, ids: object) -> str:
        return "".join(chr(i) for i in ids)  # type: ignore[attr-defined]


WORD = Ask((1,), 0, 0.0, tuple(map(ord, "hello")), "hello")


@pytest.mark.parametrize(
    ("text", "num_tokens", "wrong"),
    [("hello", 5, 0), ("hellp", 5, 1), ("helhello", 8, 3), ("hel", 3, 2), ("jello", 5, 5), ("hello", 6, 1), ("hello", -1, 1)],
)  # fmt: skip
def test_wrong_missing_and_repeated_tokens_are_counted(text: str, num_tokens: int, wrong: int) -> None:
    answer = Answer("r", text=text, num_tokens=num_tokens)

    assert answer.wrong_tokens(WORD, _Tokens()) == wrong


def test_recovery_counts_from_the_fault() -> None:
    """Not waits that ended before it, nor the part of one before it."""
    answer = Answer("r", began=0.0, events=[9.0, 10.0, 12.5, 13.0])

    assert answer.wait_after(10.5) == 2.0
    assert answer.wait_after(9.5) == 2.5
    assert answer.wait_after(13.5) == 0.0


def test_a_fault_in_a_worker_that_served_nobody_does_not_count() -> None:
    """The point fired, but with no stream of ours, or in a worker that no stream names."""
    row = Row("decode.mid_step")
    fired = faults.Fired(row.point, "kill", "decode-a", 1, ("k1-0-0-0@ab",), 0.0)
    served = Answer("k1-0", metrics={"decode_workers": ["decode-a", "decode-b"]})

    for who, answers, complains in (
        (fired, [served], False),
        (fired, [Answer("k1-0", metrics={"decode_workers": ["decode-b"]})], True),
        (dataclasses.replace(fired, requests=("other-0-0-0@ab",)), [served], True),
        (dataclasses.replace(fired, requests=("k1-0-0-0@ab/1",)), [served], False),
    ):
        kill = Kill(row)
        Matrix.check_served(kill, who, answers)
        assert bool(kill.complaint) == complains, kill.complaint


def test_percentiles_are_values_that_were_measured() -> None:
    values = [4.0, 1.0, 3.0, 2.0]

    assert [faults.percentile(values, share) for share in (0.5, 0.99)] == [2.0, 4.0]
    assert faults.percentile([1.0, 9.0], 0.5) == 1.0 and faults.percentile([], 0.5) == 0.0
