"""Requests that are wrong in every way we know of: a 4xx in OpenAI's shape that names the field, never a 500."""

import json
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import structlog.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.cluster.gateway.fakes import ScriptedStreams
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.metrics import Metrics
from scripted_gateway import CHAT, JSON, TEXT, error_of, inside, spell


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """Nothing here may be unexpected: that would be logged with a traceback."""
    with structlog.testing.capture_logs() as events:
        yield events
    assert [event for event in events if event["log_level"] != "info"] == []


def chat_with(text: str) -> bytes:
    """A chat whose message is written as given."""
    return b'{"messages":[{"role":"user","content":"hi"}],' + text.encode() + b"}"


@pytest.mark.parametrize(
    "content",
    [
        b"", b" ", b"null", b"[]", b'"x"', b"1", b"{", b"{]", b"{'a': 1}", b'{"a": 1,}', b"\x00", b"\xff\xfe{}",
        b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b'{"model": "\xff"}', b'{"model": "\\ud800"}', b'{"model": "\\x"}',
        b"[" * 100_000, b'{"a":' * 100_000, b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        chat_with('"temperature": NaN'), chat_with('"temperature": Infinity'), chat_with('"temperature": -Infinity'),
        chat_with('"temperature": 1e400'), chat_with('"seed": ' + "9" * 5000), chat_with('"n": 1e400'),
        chat_with('"user": "\\ud800"'), b"--x\r\nContent-Disposition: form-data\r\n\r\n{}\r\n--x--",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_is_no_json_object_is_a_400(
    tokenizer: Tokenizer, metrics: Metrics, path: str, content: bytes
) -> None:
    """Broken, of another encoding, endless numbers, endless nesting."""
    async with inside(tokenizer, metrics, ScriptedStreams([])) as client:
        refused = await client.post(path, content=content, headers=JSON)

    assert error_of(refused, 400)["code"] == "invalid_json"
    assert len(refused.content) < 1000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 10**30), ("n", -1), ("n", 1.5), ("n", True), ("n", "1"), ("n", []), ("seed", 10**30), ("seed", 1e300),
        ("max_tokens", 10**30), ("max_tokens", -1), ("max_completion_tokens", 0), ("temperature", "1"),
        ("temperature", -1e308), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("min_p", 2), ("stop", 1),
        ("stop", [1]), ("stop", [""]), ("stop", ["x"] * 99), ("stop", {"a": 1}), ("stop", "x" * 10_000),
        ("stop_token_ids", [10**30]), ("stop_token_ids", [-1]), ("stop_token_ids", [5000]), ("stream", "yes"),
        ("stream", 1), ("stream_options", []), ("stream_options", {"include_usage": 1}), ("logit_bias", []),
        ("logit_bias", {"x": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": "1"}), ("logit_bias", {"-1": 1}),
        ("logit_bias", {"99999999999999999999": 1}), ("logit_bias", {"5000": 1}), ("min_tokens", 10**9),
        ("model", 5), ("model", ["paceline-small"]), ("user", 5), ("store", "yes"), ("metadata", []),
        ("ignore_eos", "true"), ("priority", 2**31), ("cache_salt", "x" * 1000), ("cache_salt", 1),
        ("presence_penalty", 3), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("prompt_logprobs", 21),
        ("best_of", 3), ("best_of", "many"), ("best_of", True), ("suffix", "end"), ("prediction", {"type": "content"}),
        ("response_format", {"type": "json_object"}), ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", "json"), ("tools", [{"type": "function"}]), ("tools", {}), ("tools", "x"),
        ("functions", [{"name": "f"}]), ("tool_choice", "required"), ("tool_choice", {"type": "function"}),
        ("function_call", {"name": "f"}), ("guided_json", {}), ("structured_outputs", {"regex": "x"}),
        ("modalities", ["text", "audio"]), ("use_beam_search", True), ("bad_words", ["x"]),
        ("skip_special_tokens", False), ("truncate_prompt_tokens", 5), ("parallel_tool_calls", "no"),
        ("return_token_ids", 1), ("include_stop_str_in_output", "x"), ("logprobs", "x"), ("logprobs", -1),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
async def test_a_bad_value_is_a_400_that_names_its_field(
    tokenizer: Tokenizer, metrics: Metrics, path: str, body: dict[str, Any], field: str, value: Any
) -> None:
    """In `param`, and at the beginning of the message."""
    async with inside(tokenizer, metrics, ScriptedStreams([])) as client:
        refused = await client.post(path, json={**body, field: value})

    error = error_of(refused, 400)
    assert error["param"] == field
    assert field in error["message"][:60]
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    "prompt",
    [None, 1, 1.5, True, {}, [], [[]] * 65, ["x"] * 65, [1, "x"], [[1, "x"]], [[[1]]], [-1], [2**31], [1.5], [None],
     [[1], None], [10**30], [5000], [[5000]], [True], "x" * 201, [7] * 200, "x" * 100_000],
)  # fmt: skip
async def test_a_bad_prompt_is_a_400(tokenizer: Tokenizer, metrics: Metrics, prompt: Any) -> None:
    """Of the wrong shape, with ids there are not, or too long."""
    async with inside(tokenizer, metrics, ScriptedStreams([])) as client:
        refused = await client.post("/v1/completions", json={"prompt": prompt})

    assert error_of(refused, 400)["param"] == "prompt"


@pytest.mark.parametrize(
    "messages",
    [None, [], {}, "hi", [1], [[]], [{}], [{"role": "user"}], [{"content": "x"}], [{"role": "nobody", "content": "x"}],
     [{"role": "user", "content": None}], [{"role": "user", "content": 1}], [{"role": 1, "content": "x"}],
     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
     [{"role": "user", "content": [{"type": "text"}]}], [{"role": "tool", "content": "x", "tool_call_id": "1"}],
     [{"role": "user", "content": "x" * 300}], [{"role": "user", "content": "refuse"}]],
)  # fmt: skip
async def test_bad_messages_are_a_400(tokenizer: Tokenizer, metrics: Metrics, messages: Any) -> None:
    """Of the wrong shape, of a kind not served, or too long."""
    async with inside(tokenizer, metrics, ScriptedStreams([])) as client:
        refused = await client.post("/v1/chat/completions", json={"messages": messages})

    assert error_of(refused, 400)["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"}),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}),
        ("/v1/chat/completions", {"tools": None, "tool_choice": "auto", "parallel_tool_calls": True}),
        ("/v1/chat/completions", {"functions": [], "function_call": "none", "prediction": None, "modalities": ["text"]}),
        ("/v1/chat/completions", {"service_tier": "auto", "reasoning_effort": "low", "verbosity": "low", "x": [1]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "name": "ada", "unknown": {}}]}),
        ("/v1/chat/completions", {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]}),
        ("/v1/chat/completions", {"seed": -(2**63), "stop": None, "logit_bias": {}, "n": None, "stream": None}),
        ("/v1/chat/completions", {"chat_template_kwargs": {}, "add_generation_prompt": True, "documents": []}),
        ("/v1/completions", {"best_of": 1, "suffix": "", "echo": False, "logprobs": False}),
        ("/v1/completions", {"prompt": "\x00\ue000\U000f0000", "user": "", "metadata": {"a": "b"}, "store": True}),
        ("/v1/completions", {"prompt": [[7], "x", [8, 9]], "n": 2, "best_of": 2, "skip_special_tokens": True}),
        ("/v1/completions", {"prompt": ["x"] * 64, "model": None, "max_tokens": 1}),
    ],
)  # fmt: skip
async def test_what_clients_send_out_of_habit_is_served(
    tokenizer: Tokenizer, metrics: Metrics, path: str, fields: dict[str, Any]
) -> None:
    """Fields that change nothing, nulls, and fields nobody knows yet."""
    body = CHAT if "chat" in path else TEXT
    async with inside(tokenizer, metrics, ScriptedStreams(spell(tokenizer, "x"))) as client:
        answer = await client.post(path, json={**body, **fields})

    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": ""}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=application/json"}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-type": "Application/JSON; charset=utf-8", "content-encoding": "identity"}, 200),
        ({"x-request-id": "x" * 5000, "accept": "\xff", "last-event-id": ""}, 200),
        ({"accept": "text/event-stream", "last-event-id": "nonsense"}, 200),
        ({"content-length": "\u0663"}, 200),
    ],
)
async def test_headers_of_a_request(
    tokenizer: Tokenizer, metrics: Metrics, headers: dict[str, str], status: int
) -> None:
    """A body that is not announced as JSON is not read; what has no meaning here is ignored."""
    raw = [(key.encode(), value.encode("utf-8")) for key, value in ({**JSON, **headers}).items()]
    async with inside(tokenizer, metrics, ScriptedStreams(spell(tokenizer, "x"))) as client:
        answer = await client.post("/v1/completions", content=json.dumps(TEXT).encode(), headers=raw)

    if status == 200:
        assert answer.status_code == 200, answer.text
    else:
        assert error_of(answer, status)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404), ("GET", "/v1", 404), ("GET", "/v1/models/", 404), ("GET", "/v1/models/a/b", 404),
        ("GET", "/v1/models/%2e%2e%2f%00", 404), ("GET", "/v1/models/" + "x" * 5000, 404), ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models/paceline-small", 405), ("GET", "/v1/chat/completions", 405), ("PATCH", "/health", 405),
        ("POST", "/v1/chat/completions/", 404), ("POST", "/v1/responses", 404), ("POST", "/v1/embeddings", 404),
        ("OPTIONS", "/v1/completions", 405), ("TRACE", "/health", 405), ("GET", "/docs", 404), ("GET", "/metrics", 404),
    ],
)  # fmt: skip
async def test_other_paths_and_methods(
    tokenizer: Tokenizer, metrics: Metrics, method: str, path: str, status: int
) -> None:
    """In OpenAI's shape too."""
    async with inside(tokenizer, metrics, ScriptedStreams([])) as client:
        refused = await client.request(method, path)

    assert error_of(refused, status)["type"] == "invalid_request_error"
    assert ("allow" in refused.headers) == (status == 405)


numbers = st.integers() | st.floats() | st.integers(-(10**40), 10**40)
leaves = st.none() | st.booleans() | numbers | st.text(max_size=20)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
FIELDS = [
    "model", "n", "seed", "temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "logit_bias",
    "min_tokens", "prompt_logprobs", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "tools",
    "response_format", "best_of", "messages", "prompt", "metadata", "return_token_ids", "repetition_penalty",
]  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(FIELDS), trees, max_size=4), st.booleans())
async def test_no_tree_of_values_is_more_than_a_4xx(
    tokenizer: Tokenizer, fields: dict[str, Any], is_chat: bool
) -> None:
    """Whatever JSON can write, and Python's dialect of it."""
    path, body = ("/v1/chat/completions", CHAT) if is_chat else ("/v1/completions", TEXT)
    content = json.dumps({**body, **fields}).encode("utf-8", "surrogatepass")
    async with inside(tokenizer, Metrics(), ScriptedStreams(spell(tokenizer, "x", finish="stop"))) as client:
        answer = await client.post(path, content=content, headers=JSON)

    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        error_of(answer, answer.status_code)
