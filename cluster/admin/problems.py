"""A refusal -> status and JSON of an answer that says what is wrong and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping

import structlog
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from paceline.cluster.errors import ConfigError, Overloaded, PacelineError, RequestError, Unavailable

log = structlog.get_logger(__name__)

_CODES = {404: "not_found", 405: "method_not_allowed"}
_ACTIONS = {
    404: "see /admin/api/openapi.json for what there is",
    405: "see /admin/api/openapi.json for the methods of this path",
}


class AdminError(PacelineError):
    """An operator's request that is not carried out."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        action: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.action = action
        self.field = field
        self.retry_after_s = retry_after_s


class ErrorDetail(BaseModel):
    """What is wrong."""

    code: str
    """For programs; does not change with the words."""
    message: str
    action: str
    """What to do about it."""
    field: str | None
    """Of the request, if one is to blame."""


class ErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


def as_admin_error(error: Exception) -> AdminError:
    """What an operator may know of an error. The unexpected is logged with its traceback and told in general words."""
    if isinstance(error, AdminError):
        return error
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        place = [str(part) for part in first["loc"]]
        field = ".".join(place[1:]) or place[0]
        return AdminError(422, "invalid_value", f"{field}: {first['msg']}", "correct this field", field=field)
    if isinstance(error, RequestError):
        return AdminError(
            error.status,
            error.code or "invalid_request",
            str(error),
            "correct the request",
            field=error.param,
        )
    if isinstance(error, ConfigError):
        return AdminError(422, "invalid_value", str(error), "correct the value")
    if isinstance(error, Unavailable):
        return AdminError(503, "unavailable", str(error), "try again in a while", retry_after_s=2)
    if isinstance(error, Overloaded):
        return AdminError(
            429, "overloaded", str(error), "try again in a while", retry_after_s=error.retry_after_s
        )
    if isinstance(error, HTTPException):
        status = error.status_code
        action = _ACTIONS.get(status, "correct the request")
        return AdminError(status, _CODES.get(status, "invalid_request"), str(error.detail), action)
    if isinstance(error, PacelineError):
        return AdminError(409, "refused", str(error), "see the message")
    log.error("admin_request_failed", exc_info=error)
    return AdminError(500, "internal_error", "control had an internal error", "its log says more")


def answer_of(error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    """The whole answer."""
    found = as_admin_error(error)
    detail = ErrorDetail(code=found.code, message=str(found), action=found.action, field=found.field)
    extra = dict(headers or {})
    if found.status == 401:
        extra["www-authenticate"] = "Bearer"
    if found.retry_after_s is not None:
        extra["retry-after"] = str(math.ceil(found.retry_after_s))
    if found.status in (408, 413):
        extra["connection"] = "close"
    return Response(
        ErrorAnswer(error=detail).model_dump_json(), found.status, extra, media_type="application/json"
    )
