"""Workers killed at named points under running streams -> every client gets its whole text; then nothing is left."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import pytest
from rich.console import Console

from paceline.cluster.gateway.text import Tokenizer
from paceline.deploy.bench import faults, soak
from paceline.deploy.bench.faults import ROWS, Kill, Matrix, Row, Victim
from paceline.deploy.bench.traffic import Answer, Ask

NOWHERE = Console(quiet=True)
FAST = ("prefill.mid_transfer", "decode.mid_stream", "draft.mid_step")


@pytest.fixture(scope="module")
def asks() -> tuple[list[Ask], Tokenizer]:
    """What every stream must say, from an engine in this process."""
    return faults.known_asks("bundled/target", 8, 64)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Victim]:
    """Two workers of each role, failpoints on."""
    with faults.victim() as cluster:
        yield cluster


def found(kill: Kill) -> str:
    """Everything that must not be, in words."""
    wrong = f"{kill.wrong_tokens} wrong or repeated tokens" if kill.wrong_tokens else ""
    return "; ".join(text for text in [kill.complaint, *kill.failed, wrong] if text)


@pytest.mark.timeout(300)
def test_streams_survive_a_worker_of_each_kind(cluster: Victim, asks: tuple[list[Ask], Tokenizer]) -> None:
    """The point fired in a worker that served one of the streams; all texts are whole and right."""

    async def kill_each() -> list[Kill]:
        matrix = Matrix(cluster, *asks)
        await matrix.undisturbed(8)
        return [await matrix.kill(row, 8) for row in ROWS if row.name in FAST]

    kills = asyncio.run(kill_each())

    assert [kill.row.name for kill in kills] == list(FAST)
    assert [found(kill) for kill in kills] == [""] * len(FAST)
    assert all(kill.fired is not None and kill.fired.worker.startswith(kill.row.role) for kill in kills)
    assert kills[1].moved > 0 and all(kill.recovery_s < 10.0 for kill in kills)


@pytest.mark.timeout(300)
def test_nothing_is_left_of_mixed_requests_cancels_and_kills(
    cluster: Victim, asks: tuple[list[Ask], Tokenizer]
) -> None:
    """Blocks, streams, sockets, processes and files are what they were; every answer is right."""

    async def soaked() -> soak.SoakReport:
        return await soak.soak(cluster, *asks, requests=60, warm_up=30, say=lambda _: None)

    report = asyncio.run(soaked())

    assert report.requests == 60 and report.cancelled > 0
    assert report.complaints() == []


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
    assert result["figures"]["soak.faults"] >= 5


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
