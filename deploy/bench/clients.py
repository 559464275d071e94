"""Requests as bytes -> whole answers of a gateway with their times, at next to no cost; read when the clock has stopped.

Clients share the machine with the cluster they measure. So a connection only keeps what arrives and looks for the end;
chunks, events and JSON are taken apart behind the measurement.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from paceline.cluster.errors import PacelineError
from paceline.cluster.types import Request

_END = b"\r\n0\r\n\r\n"
"""The empty chunk behind an answer. No event has a bare carriage return in it."""
_OK = b"HTTP/1.1 200"
_LIMIT_S = 150.0
"""For one request."""
_IDLE_S = 2.0
"""After which a connection is not used again: the gateway closes those that nobody uses."""


@dataclass(frozen=True, slots=True)
class Raw:
    """One answer as it came."""

    data: bytes
    ttft_s: float
    """Request sent to first bytes here."""
    times: tuple[float, ...] = ()
    """When its parts came, by `time.perf_counter`."""


@dataclass(slots=True)
class Answer:
    """What an answer said."""

    text: str = ""
    num_tokens: int = -1
    """As the usage said; -1 if it never came."""
    finish: str = ""
    num_events: int = 0
    """Chunks with text."""
    metrics: dict[str, Any] = field(default_factory=dict)
    ttft_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    """Of the output, if the request asked for them."""


def post(request: Request, *, model: str, salt: str, more: Mapping[str, Any] | None = None) -> bytes:
    """A streaming completion as it goes on the wire. A salt of its own keeps a prompt out of every prefix cache.

    `more`: further fields of the body.
    """
    sampling = request.sampling
    body = json.dumps(
        {
            "model": model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "stop_token_ids": list(request.stop_ids),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
            **(more or {}),
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class _Connection(asyncio.Protocol):
    """One request after the other on one connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._tail = b""
        self._times: list[float] = []
        self._whole: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class

    def data_received(self, data: bytes) -> None:
        self._times.append(time.perf_counter())
        self._parts.append(data)
        self._tail = (self._tail + data)[-len(_END) :]
        if self._whole is None or self._whole.done():
            return
        if self._tail == _END:
            self._whole.set_result(None)
        elif len(self._parts) == 1 and not data.startswith(_OK):
            self._fail(data[:400].decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc) if exc else "the gateway closed the connection")

    def _fail(self, reason: str) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_exception(PacelineError(f"a request failed: {reason}"))

    async def ask(self, request: bytes) -> Raw:
        """Send one request and keep all of its answer.

        Raises:
            PacelineError: it was refused, or the connection broke.
        """
        assert self._transport is not None
        if self._transport.is_closing():
            raise PacelineError("the gateway closed the connection")
        self._parts, self._times, self._tail = [], [], b""
        self._whole = asyncio.get_running_loop().create_future()
        sent_at = time.perf_counter()
        self._transport.write(request)
        await self._whole
        return Raw(b"".join(self._parts), self._times[0] - sent_at, tuple(self._times))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@dataclass(frozen=True, slots=True)
class Spent:
    """What a block of requests took."""

    seconds: float
    cpu_s: float
    """Of this process: the clients' own cost."""


async def run(host: str, port: int, requests: Sequence[bytes], streams: int) -> tuple[list[Raw], Spent]:
    """All requests to their ends, `streams` at a time: when one ends, the next begins. Connections are made before.

    Raises:
        PacelineError: a request failed; the others are dropped.
    """
    loop = asyncio.get_running_loop()
    num = min(streams, len(requests))
    made = await asyncio.gather(*(loop.create_connection(_Connection, host, port) for _ in range(num)))
    connections = [connection for _, connection in made]
    answers: dict[int, Raw] = {}
    waiting = iter(enumerate(requests))

    async def follow(connection: _Connection) -> None:
        for index, request in waiting:
            answers[index] = await asyncio.wait_for(connection.ask(request), _LIMIT_S)

    try:
        began, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for connection in connections:
                group.create_task(follow(connection))
        spent = Spent(time.perf_counter() - began, time.process_time() - cpu)
    except* (PacelineError, TimeoutError) as errors:
        raise PacelineError(str(errors.exceptions[0]) or f"no answer within {_LIMIT_S:g} s") from None
    finally:
        for connection in connections:
            connection.close()
    return [answers[index] for index in range(len(requests))], spent


async def run_open(host: str, port: int, requests: Sequence[bytes], starts: Sequence[float]) -> list[Raw]:
    """All requests to their ends, each begun so many seconds from now, however many are on their way already.

    Raises:
        PacelineError: a request failed; the others are dropped.
    """
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    idle: list[tuple[float, _Connection]] = []

    async def follow(request: bytes, start: float) -> Raw:
        await asyncio.sleep(max(0.0, began + start - time.perf_counter()))
        if idle and loop.time() - idle[-1][0] < _IDLE_S:
            _, connection = idle.pop()
        else:
            _, connection = await loop.create_connection(_Connection, host, port)
        try:
            return await asyncio.wait_for(connection.ask(request), _LIMIT_S)
        finally:
            idle.append((loop.time(), connection))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(follow(*one)) for one in zip(requests, starts, strict=True)]
    except* (PacelineError, TimeoutError) as errors:
        raise PacelineError(str(errors.exceptions[0]) or f"no answer within {_LIMIT_S:g} s") from None
    finally:
        for _, connection in idle:
            connection.close()
    return [task.result() for task in tasks]


def read(raw: Raw) -> Answer:
    """Take an answer apart.

    Raises:
        PacelineError: it holds an error.
    """
    answer = Answer(ttft_s=raw.ttft_s)
    for event in _body(raw.data).split(b"\n\n"):
        name, _, value = event.partition(b": ")
        if name != b"data" or value == b"[DONE]":
            continue
        found = json.loads(value)
        if "error" in found:
            raise PacelineError(f"a stream failed: {found['error'].get('message', found['error'])}")
        for choice in found["choices"]:
            answer.text += choice["text"]
            answer.token_ids += choice.get("token_ids") or []
            answer.num_events += bool(choice["text"])
            answer.finish = choice["finish_reason"] or answer.finish
        if found.get("usage"):
            answer.num_tokens = found["usage"]["completion_tokens"]
        answer.metrics = found.get("metrics") or answer.metrics
    return answer


def _body(data: bytes) -> bytes:
    """The chunks of a response, joined."""
    at = data.index(b"\r\n\r\n") + 4
    parts: list[bytes] = []
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
