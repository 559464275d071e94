"""Bytes on a socket that no client library would send: OpenAI's error shape, and an end to every wait."""

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from paceline.cluster.gateway.fakes import ScriptedStreams
from paceline.cluster.gateway.listener import server_config
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.metrics import Metrics
from scripted_gateway import TEXT, listening, running, spell

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps(TEXT).encode()


async def exchange(url: str, *parts: bytes | float) -> tuple[int, dict[str, Any], float]:
    """Send bytes, wait seconds, and read until the server closes: status, body, seconds."""
    address = httpx.URL(url)
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    received = bytearray()
    reading = asyncio.create_task(
        collect(reader, received)
    )  # from the start: a late write may reset the connection
    try:
        for part in parts:
            if isinstance(part, bytes):
                writer.write(part)
            else:
                await asyncio.sleep(part)
        async with asyncio.timeout(20):
            await reading
    finally:
        writer.close()
    data = bytes(received)
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), data
    return int(head.split()[1]), json.loads(body), time.monotonic() - began


async def collect(reader: asyncio.StreamReader, received: bytearray) -> None:
    """All bytes until the server closes, however it does."""
    try:
        while data := await reader.read(1 << 16):
            received += data
    except ConnectionError:
        pass


def length(num: int) -> bytes:
    return b"Content-Length: %d\r\n" % num


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"NONSENSE\r\n\r\n",
        b"FOO /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nbad header: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nx: a\x00b\r\n\r\n",
        HEAD + length(len(BODY)) + length(len(BODY)) + b"\r\n" + BODY,
        HEAD + length(len(BODY)) + length(len(BODY) + 1) + b"\r\n" + BODY,
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1e3\r\n\r\n",
        HEAD + b"Content-Length: 99999999999999999999999999\r\n\r\n",
        HEAD + length(len(BODY)) + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_not_http_is_told_so(tokenizer: Tokenizer, metrics: Metrics, sent: bytes) -> None:
    """A 400 like any other, and the server lives on."""
    async with listening(tokenizer, metrics, ScriptedStreams(spell(tokenizer, "x"))) as url:
        status, body, _ = await exchange(url, sent)
        async with httpx.AsyncClient() as client:
            after = await client.post(f"{url}/v1/completions", json=TEXT)

    assert (status, body["error"]["code"]) == (400, "invalid_http")
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert after.json()["choices"][0]["text"] == "x"


async def test_headers_without_end_are_refused(tokenizer: Tokenizer, metrics: Metrics) -> None:
    """At 64 KiB, however they come."""
    async with listening(tokenizer, metrics, ScriptedStreams([])) as url:
        lines = b"".join(b"x-%d: %s\r\n" % (at, b"y" * 1000) for at in range(100))
        status, body, _ = await exchange(url, HEAD, 0.01, lines, 0.01, lines)

    assert (status, body["error"]["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (b"POST /v1/comp",),
        (HEAD, 0.2, b"x: y\r\n", 0.2, b"x: y\r\n", 0.2, b"x: y\r\n"),
        (HEAD + length(len(BODY)) + b"\r\n",),
        (HEAD + length(len(BODY)) + b"\r\n", 0.2, BODY[:1], 0.2, BODY[1:2], 0.2, BODY[2:3]),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",),
    ],
)
async def test_a_slow_client_gets_a_408_and_is_left(
    tokenizer: Tokenizer, metrics: Metrics, parts: tuple[bytes | float, ...]
) -> None:
    """Nobody holds a connection by sending a byte now and then."""
    async with listening(tokenizer, metrics, ScriptedStreams([]), client_timeout_s=0.5) as url:
        status, body, seconds = await exchange(url, *parts)

    assert (status, body["error"]["code"]) == (408, "request_timeout")
    assert seconds > 0.4


async def test_a_large_body_ends_its_connection(tokenizer: Tokenizer, metrics: Metrics) -> None:
    """What is still coming is not read."""
    async with listening(tokenizer, metrics, ScriptedStreams([]), max_body_bytes=2048) as url:
        declared, body, _ = await exchange(url, HEAD + length(10**12) + b"\r\n", b" " * 5000)
        chunked, _, _ = await exchange(
            url, HEAD + b"Transfer-Encoding: chunked\r\n\r\n1000\r\n" + b" " * 0x1000 + b"\r\n"
        )

    assert (declared, chunked, body["error"]["code"]) == (413, 413, "body_too_large")


@pytest.mark.parametrize("trickle", [b"\r\n", b"1\r\n \r\n"])
async def test_a_connection_without_a_request_is_not_kept_open(
    tokenizer: Tokenizer, metrics: Metrics, trickle: bytes
) -> None:
    """Behind an answer may come empty lines, or more of a body that nobody reads: neither is a request."""
    head = HEAD.replace(b"application/json", b"text/plain") + b"Transfer-Encoding: chunked\r\n\r\n"
    first = head + b"0\r\n\r\n" if trickle == b"\r\n" else head
    async with listening(tokenizer, metrics, ScriptedStreams([]), client_timeout_s=0.5) as url:
        address = httpx.URL(url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(first)
        received = bytearray()
        reading = asyncio.create_task(collect(reader, received))
        async with asyncio.timeout(5):
            while not reading.done():
                writer.write(trickle)
                await asyncio.sleep(0.05)
        writer.close()

    assert received.startswith(b"HTTP/1.1 415 ")


async def test_a_client_that_does_not_read_is_left() -> None:
    """Its answer is not kept for it until TCP gives up: the application hears that it is gone."""
    gone = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):  # more than the kernel keeps
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        gone.set()

    async with running(server_config(app, client_timeout_s=0.5, host="127.0.0.1", port=0)) as url:
        address = httpx.URL(url)
        with socket.socket() as deaf:
            deaf.connect((address.host, address.port))
            deaf.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(10):
                await gone.wait()


async def test_two_requests_on_one_connection_and_a_slow_one_between(
    tokenizer: Tokenizer, metrics: Metrics
) -> None:
    """Time limits are of a request, not of a connection; an answer may take longer than any of them."""
    streams = ScriptedStreams([0.7, *spell(tokenizer, "x")])
    async with (
        listening(tokenizer, metrics, streams, client_timeout_s=0.5) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        answers = [await client.post("/v1/completions", json=TEXT) for _ in range(2)]

    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["x", "x"]
