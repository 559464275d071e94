"""Workers killed at named points under running streams -> every client gets its whole text; then nothing is left.

On the session's cluster, behind the other tests; the whole matrix is in tests/faults.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bundled import MODEL
from paceline.cluster.gateway.text import Tokenizer
from paceline.deploy.bench import faults, soak
from paceline.deploy.bench.faults import ROWS, Kill, Matrix
from paceline.deploy.bench.traffic import Ask
from paceline.deploy.bench.victim import Victim

FAST = ("prefill.mid_transfer", "decode.mid_stream", "draft.mid_step")
ROLES = ("gateway", "router", "control", "prefill", "decode", "draft")


@pytest.fixture(scope="module")
def asks() -> tuple[list[Ask], Tokenizer]:
    """What every stream must say, from an engine in this process."""
    return faults.known_asks("bundled/target", 8, 64)


@pytest.fixture(scope="module")
def victim(cluster: Any) -> Victim:
    """One worker of each role, failpoints on."""
    wanted = dict.fromkeys(ROLES, 1)
    return Victim(
        cluster.home, cluster.failpoints, cluster.url, cluster.control, MODEL, wanted, cluster.run_id
    )


def found(kill: Kill) -> str:
    """Everything that must not be, in words."""
    wrong = f"{kill.wrong_tokens} wrong or repeated tokens" if kill.wrong_tokens else ""
    return "; ".join(text for text in [kill.complaint, *kill.failed, wrong] if text)


@pytest.mark.timeout(300)
def test_streams_survive_a_worker_of_each_kind(victim: Victim, asks: tuple[list[Ask], Tokenizer]) -> None:
    """The point fired in a worker that served one of the streams; all texts are whole and right."""

    async def kill_each() -> list[Kill]:
        matrix = Matrix(victim, *asks)
        await matrix.undisturbed(8)
        return [await matrix.kill(row, 8) for row in ROWS if row.name in FAST]

    kills = asyncio.run(kill_each())

    assert [kill.row.name for kill in kills] == list(FAST)
    assert [found(kill) for kill in kills] == [""] * len(FAST)
    assert all(kill.fired is not None and kill.fired.worker.startswith(kill.row.role) for kill in kills)
    assert kills[1].moved > 0 and all(kill.recovery_s < 30.0 for kill in kills)


@pytest.mark.timeout(300)
def test_nothing_is_left_of_mixed_requests_cancels_and_kills(
    victim: Victim, asks: tuple[list[Ask], Tokenizer]
) -> None:
    """Blocks, streams, sockets, processes and files are what they were; every answer is right."""

    async def soaked() -> soak.SoakReport:
        return await soak.soak(victim, *asks, requests=40, warm_up=20, say=lambda _: None)

    report = asyncio.run(soaked())

    assert report.requests == 40 and report.cancelled > 0
    assert report.complaints() == []
