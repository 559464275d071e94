"""Requests of an open loop -> every one answered, though servers close connections that nobody uses."""

from __future__ import annotations

import asyncio

import pytest

from paceline.cluster.errors import PacelineError
from paceline.deploy.bench import clients
from paceline.deploy.bench.clients import Raw

ANSWER = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
IDLE_S = 0.2
"""After which the server closes a connection."""


async def ask(starts: list[float]) -> tuple[list[Raw], int]:
    """Answers, and how many connections they took."""
    num = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num
        num += 1
        try:
            while await asyncio.wait_for(reader.read(1 << 16), IDLE_S):
                writer.write(ANSWER)
        except TimeoutError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        return await clients.run_open(host, port, [b"ask"] * len(starts), starts), num


def test_a_connection_is_used_again_unless_it_was_idle_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request goes over the first one's connection, the third over one of its own."""
    monkeypatch.setattr(clients, "_IDLE_S", IDLE_S / 2)

    answers, num = asyncio.run(ask([0.0, 0.05, 0.6]))

    assert [answer.data for answer in answers] == [ANSWER] * 3
    assert num == 2


def test_a_connection_that_was_closed_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without that limit the last request fails."""
    monkeypatch.setattr(clients, "_IDLE_S", 60.0)

    with pytest.raises(PacelineError, match="closed the connection"):
        asyncio.run(ask([0.0, 0.6]))
