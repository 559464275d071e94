"""TCP connections -> ASGI: uvicorn, with limits on time and headers, and with OpenAI's error shape where it has its own."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paceline.cluster.gateway.problems import ErrorBody, ErrorObject

MAX_HEADER_BYTES = 64 << 10
"""Of one request, its first line included."""


def server_config(app: ASGIApp, *, client_timeout_s: float, **options: Any) -> uvicorn.Config:
    """How a listener for `app` runs. Access logs would repeat our metrics; nothing here speaks WebSocket."""

    class Protocol(GuardedProtocol):
        timeout_s = client_timeout_s

    # Headers of proxies are not believed: whoever sits on this machine could send them and be anybody.
    defaults: dict[str, Any] = {
        "log_level": "warning", "access_log": False, "lifespan": "off", "ws": "none", "proxy_headers": False,
    }  # fmt: skip
    return uvicorn.Config(app, http=Protocol, **(defaults | options))


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Whoever keeps it waiting for `timeout_s` loses it: with a request's headers, or by not reading."""

    timeout_s: float = 30.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting_for_headers: asyncio.TimerHandle | None = None
        self._waiting_for_reader: asyncio.TimerHandle | None = None
        self._is_in_headers = False
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_header_bytes += len(data) if self._is_in_headers else 0
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes", "headers_too_large")
            return
        super().data_received(data)
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._waiting_for_headers is None:  # the rest of a refused body, or nothing at all
            self._wait_for_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers, self._num_header_bytes = True, 0
        if self._waiting_for_headers is None:
            self._wait_for_headers()

    def on_headers_complete(self) -> None:
        self._is_in_headers, self._num_header_bytes = False, 0
        if self._waiting_for_headers is not None:
            self._waiting_for_headers.cancel()
            self._waiting_for_headers = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._waiting_for_reader = self.loop.call_later(self.timeout_s, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._waiting_for_reader is not None:
            self._waiting_for_reader.cancel()
            self._waiting_for_reader = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the bytes received are not a valid HTTP request", "invalid_http")

    def _wait_for_headers(self) -> None:
        self._waiting_for_headers = self.loop.call_later(self.timeout_s, self._headers_too_late)

    def _stop_waiting(self) -> None:
        for timer in (self._waiting_for_headers, self._waiting_for_reader):
            if timer is not None:
                timer.cancel()

    def _headers_too_late(self) -> None:
        self._waiting_for_headers = None
        self._refuse(408, f"the headers did not arrive within {self.timeout_s:g} s", "request_timeout")

    def _give_up(self) -> None:
        """Nobody reads: what was written would otherwise be kept until the end of TCP's patience."""
        self.transport.abort()

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer without the application, unless an answer is under way, and close."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self.transport.is_closing():
            return
        if not (is_answering and self.cycle.response_started):
            body = msgspec.json.encode(ErrorBody(ErrorObject(message, "invalid_request_error", None, code)))
            lines = (
                STATUS_LINE[status],
                b"content-type: application/json\r\n",
                b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body),
                body,
            )
            self.transport.write(b"".join(lines))
        self.transport.close()
