"""Our answers against OpenAI's own document: every answer, chunk and error has to be one that it describes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing
import referencing.jsonschema
import yaml

from paceline.cluster.gateway.fakes import ScriptedStreams
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.metrics import Metrics
from scripted_gateway import CHAT, TEXT, inside, scored_spell, spell

DOCUMENT = Path(
    os.environ.get("OPENAI_OPENAPI")
    or Path(__file__).parents[3].parent / "shared" / "data" / "openai-openapi.yaml"
)
NAMES = (
    "CreateChatCompletionResponse", "CreateChatCompletionStreamResponse", "CreateCompletionResponse",
    "ErrorResponse", "ListModelsResponse", "Model",
)  # fmt: skip
Check = Callable[[str, Any], None]


@pytest.fixture(scope="module")
def check() -> Check:
    """(name of a schema, value): raises if the value is not one."""
    if not DOCUMENT.is_file():
        pytest.skip(
            f"OPENAI'S SCHEMAS ARE NOT CHECKED: no {DOCUMENT.name} at {DOCUMENT}; set OPENAI_OPENAPI to its path"
        )
    tree = with_nulls(yaml.load(DOCUMENT.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    resource = referencing.Resource(contents=tree, specification=referencing.jsonschema.DRAFT202012)
    registry = referencing.Registry().with_resource("urn:openai", resource)
    checkers = {
        name: jsonschema.Draft202012Validator(
            {"$ref": f"urn:openai#/components/schemas/{name}"}, registry=registry
        )
        for name in NAMES
    }

    def check(name: str, value: Any) -> None:
        problems = [
            f"{error.json_path}: {error.message[:200]}" for error in checkers[name].iter_errors(value)
        ]
        assert problems == []

    return check


def with_nulls(node: Any) -> Any:
    """The document says `nullable: true` in places, which was OpenAPI 3.0's way and no validator of 3.1 knows."""
    if isinstance(node, list):
        return [with_nulls(item) for item in node]
    if not isinstance(node, dict):
        return node
    tree = {key: with_nulls(value) for key, value in node.items() if key != "nullable"}
    return {"anyOf": [tree, {"type": "null"}]} if node.get("nullable") is True else tree


def test_the_check_can_fail(check: Check) -> None:
    """Otherwise it would say nothing."""
    with pytest.raises(AssertionError):
        check("CreateChatCompletionResponse", {"id": 1})
    with pytest.raises(AssertionError):
        check("ErrorResponse", {"detail": "x"})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "stop": "l"},
        {"max_tokens": 2},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": 1, "return_token_ids": True},
    ],
)
async def test_chats_are_what_openai_describes(
    tokenizer: Tokenizer, check: Check, fields: dict[str, Any]
) -> None:
    """Whole and in chunks."""
    streams = ScriptedStreams(lambda request: scored_spell(tokenizer, "Hello 😀", request))
    async with inside(tokenizer, Metrics(), streams) as client:
        whole = await client.post("/v1/chat/completions", json={**CHAT, **fields})
        fields = {name: value for name, value in fields.items() if name != "prompt_logprobs"}
        for options in (
            None,
            {"include_usage": True},
            {"include_usage": True, "continuous_usage_stats": True},
        ):
            body = {**CHAT, **fields, "stream": True, "stream_options": options}
            chunked = await client.post("/v1/chat/completions", json=body)
            for chunk in chunks_of(chunked.text):
                check("CreateChatCompletionStreamResponse", chunk)

    check("CreateChatCompletionResponse", whole.json())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "prompt": ["a", "b"]},
        {"logprobs": 2},
        {"logprobs": 1, "echo": True},
        {"max_tokens": 0, "echo": True},
        {"logprobs": 0, "prompt_logprobs": 2, "return_token_ids": True},
    ],
)
async def test_completions_are_what_openai_describes(
    tokenizer: Tokenizer, check: Check, fields: dict[str, Any]
) -> None:
    """Whole and in chunks. OpenAI's document has no nulls in lists of log-probabilities, though its API sends them."""
    streams = ScriptedStreams(lambda request: scored_spell(tokenizer, "Hello 😀", request))
    async with inside(tokenizer, Metrics(), streams) as client:
        whole = (await client.post("/v1/completions", json={**TEXT, **fields})).json()
        fields = {name: value for name, value in fields.items() if name != "prompt_logprobs"}
        chunked = await client.post("/v1/completions", json={**TEXT, **fields, "stream": True})

    for answer in (whole, *chunks_of(chunked.text)):
        for choice in answer["choices"]:
            is_echo = (
                fields.get("echo")
                and choice["logprobs"]
                and choice["logprobs"]["token_logprobs"][:1] == [None]
            )
            if is_echo:
                for name in ("token_logprobs", "top_logprobs"):
                    assert choice["logprobs"][name].pop(0) is None
            if answer is not whole and choice["finish_reason"] is None:
                choice["finish_reason"] = "stop"  # the document describes whole answers only
        check("CreateCompletionResponse", answer)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", {}),
        ("POST", "/v1/chat/completions", {**CHAT, "model": "x"}),
        ("POST", "/v1/completions", {**TEXT, "n": "x"}),
        ("GET", "/nowhere", None),
        ("DELETE", "/v1/models", None),
        ("GET", "/ready", None),
    ],
)
async def test_errors_are_what_openai_describes(
    tokenizer: Tokenizer, check: Check, method: str, path: str, body: Any
) -> None:
    """All of them have one shape."""
    async with inside(tokenizer, Metrics(), ScriptedStreams([], is_ready=False)) as client:
        refused = await client.request(method, path, json=body)

    assert refused.status_code >= 400
    check("ErrorResponse", refused.json())


async def test_models_are_what_openai_describes(tokenizer: Tokenizer, check: Check) -> None:
    """The list, and one of them."""
    async with inside(tokenizer, Metrics(), ScriptedStreams(spell(tokenizer, "x"))) as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/paceline-small")).json()

    check("ListModelsResponse", listed)
    check("Model", one)


def chunks_of(text: str) -> list[Any]:
    """The data of a stream's events, which has to end with [DONE]."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]
