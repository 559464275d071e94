"""ASGI request -> the same with an id, a known caller and a bounded body; its response -> the same with that id, counted."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.cluster.errors import RequestError
from paceline.cluster.gateway.auth import OPEN_PATHS, authenticate, check_host
from paceline.cluster.gateway.cors import Cors
from paceline.cluster.gateway.journal import Journal, Record
from paceline.cluster.gateway.problems import problem_of
from paceline.cluster.keys import Key, KeyStore
from paceline.cluster.metrics import Metrics

_SANE_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CLIENT_GONE = 499


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, and under which names it runs."""

    request_id: str
    """The client's own, if it is a sane one."""
    stream_id: str
    """The same, unless another open request has it: it names this one's streams throughout the cluster."""
    received: float
    """Monotonic seconds."""
    key: Key | None = None
    record: Record = field(kw_only=True)
    """What its log line and its trace are made of."""

    def salt(self, salt: str) -> str:
        """Who shares computed prefixes: with keys, only requests of one tenant. Others could tell from the time it takes.

        No tenant has a control character in its name, so none can choose a salt that makes it another.
        """
        return salt if self.key is None else f"{self.key.owner}\0{salt}"


class Envelope:
    """Middleware around every route. Leaves `caller` in the request's state.

    An error that no handler knew becomes a 500 here.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        journal: Journal,
        keys: KeyStore | None,
        only_local: bool,
        max_body_bytes: int,
        body_timeout_s: float,
        routes: Collection[str],
        cors: Cors,
    ) -> None:
        self._app = app
        self._cors = cors
        self._metrics = metrics
        self._journal = journal
        self._keys = keys
        self._only_local = only_local
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._routes = sorted(routes, key=len, reverse=True)
        self._open: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if _SANE_ID.fullmatch(asked) else uuid.uuid4().hex
        stream_id = request_id
        while stream_id in self._open:  # the client tried again before we saw that its connection broke
            stream_id = f"{request_id}.{secrets.token_hex(4)}"
        self._open.add(stream_id)
        record = Record(
            request_id,
            scope["method"],
            self._route(scope["path"]),
            time.monotonic(),
            headers.get("traceparent", ""),
            headers.get("tracestate", ""),
        )
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
                self._cors.mark(message, headers)
            await send(message)

        try:
            if self._cors.is_preflight(scope["method"], headers):
                if self._only_local:
                    check_host(headers)
                await self._cors.answer_preflight(send_with_id)
                return
            key = self._admit(scope["path"], headers)
            record.key_id = key.id if key is not None else ""
            caller = Caller(request_id, stream_id, record.received, key, record=record)
            scope.setdefault("state", {})["caller"] = caller
            with structlog.contextvars.bound_contextvars(request=request_id):
                await self._app(scope, self._bounded(receive), send_with_id)
        except ClientDisconnect:
            record.error = "client_gone"
        except Exception as error:  # noqa: BLE001 - the last handler there is
            problem = problem_of(error)
            record.error = problem.code
            if not status:
                await problem.response()(scope, receive, send_with_id)
        finally:
            self._open.discard(stream_id)
            record.status = status or _CLIENT_GONE
            self._metrics.requests.labels(record.route, str(record.status)).inc()
            self._journal.ended(record)

    def _admit(self, path: str, headers: Headers) -> Key | None:
        """What can be told from the headers alone."""
        key = None
        if path not in OPEN_PATHS:
            if self._keys is not None:
                key = authenticate(headers, self._keys)
            if self._only_local:
                check_host(headers)
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._max_body_bytes):
            raise self._too_large()
        return key

    def _route(self, path: str) -> str:
        """A label with few values, whatever paths clients try."""
        for route in self._routes:
            if path == route or (route.endswith("/") and path.startswith(route)):
                return route
        return "other"

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` that reads a body no longer than this many bytes, declared or not, and this many seconds."""
        num_bytes = 0
        is_whole = False
        deadline = asyncio.get_running_loop().time() + self._body_timeout_s

        async def bounded() -> Message:
            nonlocal num_bytes, is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else deadline):
                    message = await receive()
            except TimeoutError:
                complaint = f"the body did not arrive within {self._body_timeout_s:g} s"
                raise RequestError(complaint, code="request_timeout", status=408) from None
            num_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> RequestError:
        message = f"the body is larger than {self._max_body_bytes} bytes"
        return RequestError(message, code="body_too_large", status=413)
