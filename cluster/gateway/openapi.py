"""the API's requests and replies -> the OpenAPI document at /openapi.json, which says no more and no less."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from paceline.cluster.gateway import replies
from paceline.cluster.gateway.problems import ErrorBody
from paceline.cluster.gateway.schemas import ChatRequest, CompletionRequest

Tree = dict[str, Any]

_REF = "#/components/schemas/{}"
_PROBLEMS = {
    400: "The request is not one that can be served; `param` names the field.",
    401: "No valid API key.",
    403: "The API key is an operator's.",
    404: "There is no such model or path.",
    408: "The body did not arrive in time.",
    409: "The answer that Last-Event-ID names cannot be continued.",
    413: "The body is too large.",
    415: "The body is not announced as plain application/json.",
    421: "The Host header is no name of this machine for itself.",
    429: "Too many requests; Retry-After says when to come again.",
    500: "The request failed through no fault of its own.",
    503: "No worker is ready.",
}
_REQUEST_ID = "Name of the request, [A-Za-z0-9_.-]{1,64}; any other value is replaced."
_LAST_EVENT_ID = (
    "Id of the last event that arrived before the connection broke. Send the same body again, with the seed of the "
    "x-paceline-seed header, and the stream goes on behind that event. Events have ids if the Accept header has "
    "text/event-stream, or if this one was sent."
)


_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "id": {"type": "string"}},
    "required": ["data"],
    "description": "`data` is a chunk as JSON, the body of an error, or [DONE].",
}


class ChatCompletion(msgspec.Struct):
    """The answer to a chat."""

    id: str
    object: str
    created: int
    model: str
    choices: list[replies.ChatChoice]
    usage: replies.Usage
    metrics: replies.RequestMetrics


class Completion(msgspec.Struct):
    """The answer to a prompt."""

    id: str
    object: str
    created: int
    model: str
    choices: list[replies.TextChoice]
    usage: replies.Usage
    metrics: replies.RequestMetrics


class Health(msgspec.Struct):
    """The answer to a probe."""

    status: str


def describe(model: str, *, max_context: int, vocab_size: int, refusals: list[int]) -> Tree:
    """The document for a gateway that serves this model, with this many tokens of context and in its vocabulary.

    `refusals`: statuses of requests that are not let in, on every path but the probes'.
    """
    _, requests = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")], ref_template=_REF.format("{model}")
    )
    kinds = (ChatCompletion, Completion, replies.Model, replies.ModelList, ErrorBody, Health)
    _, answers = msgspec.json.schema_components(kinds, ref_template=_REF.format("{name}"))
    assert not requests["$defs"].keys() & answers.keys(), "two schemas of one name"
    schemas: Tree = copy.deepcopy({**requests["$defs"], **answers})
    for kind in (ChatRequest, CompletionRequest):
        schema = schemas[kind.__name__]
        schema["properties"]["model"]["enum"] = [model, ""]
        for limit in ("max_tokens", "max_completion_tokens", "min_tokens"):
            _narrow(schema["properties"][limit], "maximum", max_context)
        for ids in ("stop_token_ids", "prompt"):
            _narrow(schema["properties"].get(ids, {}), "exclusiveMaximum", vocab_size)
    for name in requests["$defs"]:
        _allow_nulls(schemas[name])
    document: Tree = {
        "openapi": "3.1.0",
        "info": {
            "title": "Paceline",
            "version": "1",
            "description": "OpenAI's API for text, and a little more.",
        },
        "paths": _paths(refusals),
        "components": {"schemas": schemas},
    }
    if 401 in refusals:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _paths(refusals: list[int]) -> Tree:
    model_id = {
        "name": "model_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
    return {
        "/v1/chat/completions": {"post": _generate("chat", "ChatRequest", "ChatCompletion", refusals)},
        "/v1/completions": {"post": _generate("completion", "CompletionRequest", "Completion", refusals)},
        "/v1/models": {"get": _get("models", "ModelList", refusals)},
        "/v1/models/{model_id}": {
            "get": {**_get("model", "Model", [404, *refusals]), "parameters": [model_id]}
        },
        "/health": {"get": {**_get("health", "Health", []), "security": []}},
        "/ready": {"get": {**_get("ready", "Health", [503]), "security": []}},
    }


def _get(name: str, answer: str, problems: list[int]) -> Tree:
    return {"operationId": name, "responses": {"200": _ok(answer), **_errors(problems)}}


def _generate(name: str, request: str, answer: str, refusals: list[int]) -> Tree:
    ok = _ok(answer)
    ok["content"]["text/event-stream"] = {"itemSchema": _EVENT}
    seed = {"description": "The seed that gives this answer again.", "schema": {"type": "string"}}
    ok["headers"]["x-paceline-seed"] = seed
    problems = [400, 404, 408, 409, 413, 415, 429, 500, 503, *refusals]
    return {
        "operationId": name,
        "parameters": [_header("x-request-id", _REQUEST_ID), _header("last-event-id", _LAST_EVENT_ID)],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": ok, **_errors(problems)},
    }


def _header(name: str, description: str) -> Tree:
    schema = {"type": "string"}
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


def _ok(answer: str) -> Tree:
    headers = {"x-request-id": {"description": "Name of this request.", "schema": {"type": "string"}}}
    content = {"application/json": {"schema": _ref(answer)}}
    return {"description": "The answer.", "headers": headers, "content": content}


def _errors(statuses: list[int]) -> Tree:
    content = {"application/json": {"schema": _ref("ErrorBody")}}
    return {
        str(status): {"description": _PROBLEMS[status], "content": content} for status in sorted(statuses)
    }


def _ref(name: str) -> Tree:
    return {"$ref": _REF.format(name)}


def _narrow(field: Tree, bound: str, value: int) -> None:
    """Give every whole number in a schema an upper bound of this configuration."""
    if field.get("type") == "integer":
        field.pop("maximum", None)
        field.pop("exclusiveMaximum", None)
        field[bound] = value
    for option in [*field.get("anyOf", ()), field.get("items", {})]:
        if option:
            _narrow(option, bound, value)


def _allow_nulls(schema: Tree) -> None:
    """Null means "not given" wherever a field may be left out."""
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        if name not in required and not _takes_null(field):
            kept = {key: field.pop(key) for key in ("description", "default", "title") if key in field}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **kept}


def _takes_null(field: Mapping[str, Any]) -> bool:
    return any(option.get("type") == "null" for option in field.get("anyOf", ()))
