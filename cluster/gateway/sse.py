"""frames of a stream -> a server-sent-events response that ends, and cancels the work, when its client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from paceline.cluster.gateway.problems import problem_of

KEEPALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()

T = TypeVar("T")


def frame(data: msgspec.Struct, event_id: str = "") -> bytes:
    """One event. JSON has no raw newline, so one data line is enough."""
    line = b"data: " + _encoder.encode(data) + b"\n\n"
    return b"id: " + event_id.encode() + b"\n" + line if event_id else line


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, but cancel it, and wait until it is gone, as soon as the client is.

    Raises:
        ClientDisconnect: nobody waits for the result.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends frames as they come.

    Headers wait for the first frame, so what fails before it gets a proper status. What fails later becomes an
    error event, without [DONE] behind it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end` is called once when nothing more is sent, whatever the reason."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._frames = frames
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._frames) as frames:
            data = await anext(frames)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                async for data in frames:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except OSError as error:
                raise ClientDisconnect from error
            except Exception as error:  # noqa: BLE001 - the headers are out: it can only be told in the stream
                data = frame(problem_of(error).body)
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
