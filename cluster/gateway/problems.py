"""exception -> status, headers and body of an HTTP answer in OpenAI's error shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import structlog
from fastapi import Response
from starlette.exceptions import HTTPException

from paceline.cluster.errors import Overloaded, PacelineError, RateLimited, RequestError, Unavailable

log = structlog.get_logger()

_RETRY_AFTER_S = 2
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
_CLOSE = {"connection": "close"}
_HEADERS = {401: {"www-authenticate": "Bearer"}, 408: _CLOSE, 413: _CLOSE}
"""What goes with a status. A body that nobody reads on would keep its connection busy."""


class StreamFailed(PacelineError):
    """The cluster gave a stream up; the message says why in words meant for clients."""


class ErrorObject(msgspec.Struct, frozen=True):
    """OpenAI's spec requires all four."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and of an error event in a stream."""

    error: ErrorObject


@dataclass(frozen=True, slots=True)
class Problem:
    """One failed request, ready to be sent."""

    status: int
    body: ErrorBody
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """A word or two that say what it is."""
        return self.body.error.code or self.body.error.type

    def response(self) -> Response:
        return Response(
            msgspec.json.encode(self.body),
            self.status,
            headers=dict(self.headers),
            media_type="application/json",
        )


def problem_of(error: Exception) -> Problem:
    """What a client may know of an error. The unexpected is logged with its traceback and told in general words."""
    if isinstance(error, RequestError):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        body = ErrorBody(ErrorObject(str(error), kind, error.param, error.code))
        return Problem(error.status, body, _HEADERS.get(error.status, {}))
    if isinstance(error, Unavailable):
        body = ErrorBody(
            ErrorObject(f"{error}; try again later", "service_unavailable_error", None, "unavailable")
        )
        return Problem(503, body, {"retry-after": str(_RETRY_AFTER_S)})
    if isinstance(error, RateLimited):
        body = ErrorBody(ErrorObject(str(error), "rate_limit_error", None, "rate_limit_exceeded"))
        headers = {**error.headers, "retry-after": str(max(1, math.ceil(error.retry_after_s)))}
        return Problem(429, body, headers)
    if isinstance(error, Overloaded):
        body = ErrorBody(ErrorObject(f"{error}; try again later", "rate_limit_error", None, "overloaded"))
        return Problem(429, body, {"retry-after": str(math.ceil(error.retry_after_s))})
    if isinstance(error, StreamFailed):
        return Problem(500, ErrorBody(ErrorObject(str(error), "server_error", None, "stream_failed")))
    if isinstance(error, HTTPException):
        code = _CODES.get(error.status_code)
        body = ErrorBody(ErrorObject(str(error.detail), "invalid_request_error", None, code))
        return Problem(error.status_code, body, error.headers or {})
    log.error("request_failed", exc_info=error)
    return Problem(
        500,
        ErrorBody(ErrorObject("the server had an internal error", "server_error", None, "internal_error")),
    )
