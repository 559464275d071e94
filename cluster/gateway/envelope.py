"""ASGI request -> the same with an id and a bounded body; its response -> the same with that id, counted."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.cluster.errors import RequestError
from paceline.cluster.gateway.problems import problem_of
from paceline.cluster.metrics import Metrics

_SANE_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CLIENT_GONE = 499


class Envelope:
    """Middleware around every route. Leaves `request_id` and `received` (monotonic seconds) in the request's state.

    An error that no handler knew becomes a 500 here. A client's own request id must not be in use by another open
    request: it names the streams of this request throughout the cluster.
    """

    def __init__(
        self, app: ASGIApp, *, metrics: Metrics, max_body_bytes: int, routes: Collection[str]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._routes = sorted(routes, key=len, reverse=True)
        self._open: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if _SANE_ID.fullmatch(asked) else uuid.uuid4().hex
        is_taken = request_id in self._open
        self._open.add(request_id)
        scope.setdefault("state", {}).update(request_id=request_id, received=time.monotonic())
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._refuse_at_once(headers, request_id if is_taken else "")
            await self._app(scope, _bounded(receive, self._max_body_bytes), send_with_id)
        except ClientDisconnect:
            status = status or _CLIENT_GONE
        except Exception as error:  # noqa: BLE001 - the last handler there is
            problem = problem_of(error)
            if not status:
                await problem.response()(scope, receive, send_with_id)
        finally:
            if not is_taken:
                self._open.discard(request_id)
            self._metrics.requests.labels(self._route(scope["path"]), str(status or _CLIENT_GONE)).inc()

    def _refuse_at_once(self, headers: Headers, taken_id: str) -> None:
        """What can be told from the headers alone."""
        if taken_id:
            message = f"x-request-id {taken_id}: another open request has this id"
            raise RequestError(message, param="x-request-id", code="request_id_in_use", status=409)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)

    def _route(self, path: str) -> str:
        """A label with few values, whatever paths clients try."""
        for route in self._routes:
            if path == route or (route.endswith("/") and path.startswith(route)):
                return route
        return "other"


def _bounded(receive: Receive, max_bytes: int) -> Receive:
    """`receive` that refuses to read on past a body of `max_bytes`, declared or not."""
    num_bytes = 0

    async def bounded() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        return message

    return bounded


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"the body is larger than {max_bytes} bytes", code="body_too_large", status=413)
