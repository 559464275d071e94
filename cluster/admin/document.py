"""The admin API's routes -> the OpenAPI document at /admin/api/openapi.json."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi

from paceline.cluster.admin.problems import AdminError, ErrorAnswer

PATH = "/admin/api/openapi.json"
_WORDS = {
    400: "The address holds what does not belong there, or the body is not JSON.",
    401: "No valid admin key, and no session.",
    403: "The request comes from a foreign page, or without the session's CSRF token.",
    404: "There is no such thing.",
    409: "It cannot be done in the state things are in; the message says why.",
    413: "The body is too large.",
    415: "The body is not announced as application/json.",
    421: "The Host header is no name of this machine for itself.",
    422: "A field is wrong; `field` names it.",
    429: "Too many wrong keys; Retry-After says when to come again.",
    500: "Control had an internal error.",
    503: "The registry or the storage does not answer.",
}
_DESCRIPTION = (
    "What the dashboard shows and does, and `paceline drafts` with it. Programs send the admin key as "
    "`Authorization: Bearer KEY`; browsers sign in at /admin. GET /admin/api/events is a stream of server-sent events."
)


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route answers besides what all do."""
    return {status: {"model": ErrorAnswer, "description": _WORDS[status]} for status in statuses}


async def check_fields(request: Request) -> None:
    """A field of the address that nobody reads is an error rather than a filter that silently does nothing."""
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    unknown = sorted(request.query_params.keys() - known)
    if unknown:
        name = unknown[0][:80]
        expected = ", ".join(sorted(known)) or "none"
        raise AdminError(
            422, "invalid_value", f"{name!r}: no such field; expected {expected}", "leave it out", field=name
        )


def describe(app: FastAPI) -> dict[str, Any]:
    """The document of this application."""
    document = get_openapi(title="Paceline admin", version="1", description=_DESCRIPTION, routes=app.routes)
    schemas = document["components"]["schemas"]
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            statuses = {400, 401, 421, 429} | ({403, 413, 415} if method != "get" else set())
            for status in sorted(statuses):
                operation["responses"].setdefault(str(status), _refusal(status))
            if (path, method) == ("/admin/api/session", "post"):
                operation["security"] = []
    return document


def _refusal(status: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/ErrorAnswer"}
    return {"description": _WORDS[status], "content": {"application/json": {"schema": schema}}}
