"""The HTTP side over scripted streams: errors in-process, answers and streams over a socket with the openai client."""

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from typing import Any

import httpx
import openai
import pytest
import structlog.testing

from paceline.cluster.errors import Unavailable
from paceline.cluster.gateway.fakes import WAITING, Act, Script, ScriptedStreams
from paceline.cluster.gateway.streams import StreamEvent
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.metrics import Metrics
from paceline.cluster.types import SOURCE_DRAFT, Request
from scripted_gateway import (
    CHAT,
    END,
    EOS,
    JSON,
    NEVER,
    TEXT,
    error_of,
    events_of,
    inside,
    spell,
    until,
)

Serve = Callable[..., contextlib.AbstractAsyncContextManager[openai.AsyncOpenAI]]


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """What the gateway logs during a test."""
    with structlog.testing.capture_logs() as events:
        yield events


# --- whole answers --------------------------------------------------------------------------------------


async def test_a_chat_is_answered_with_usage_metrics_and_the_seed(serve: Serve, tokenizer: Tokenizer) -> None:
    """End of text is counted but not shown; the seed and the id come back in headers."""
    streams = ScriptedStreams(spell(tokenizer, "Hello", group=2, source=SOURCE_DRAFT))
    async with serve(streams) as client:
        raw = await client.chat.completions.with_raw_response.create(
            **CHAT, seed=-5, temperature=0, extra_headers={"x-request-id": "abc.1"}
        )

    answer, request = raw.parse(), streams.requests[0]
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id == "chatcmpl-abc.1"
    assert (raw.headers["x-request-id"], raw.headers["x-paceline-seed"]) == ("abc.1", "-5")
    assert (request.id, request.sampling.seed) == ("abc.1-0-0", 2**64 - 5)
    assert (request.stop_ids, request.max_tokens) == ((EOS, END), 200 - len(request.prompt_ids))
    assert list(request.prompt_ids) == tokenizer.encode("<|user|>hi<|end|><|assistant|>")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == 6 + len(request.prompt_ids)
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 6
    served = (answer.model_extra or {})["metrics"]
    assert served["speculative_decoding"] == {
        "num_spec_steps": 4,
        "num_draft_tokens": 6,
        "num_accepted_draft_tokens": 6,
        "draft_acceptance_rate": 1.0,
        "mean_acceptance_length": 2.5,
        "acceptance_histogram": [0, 2, 2],
    }
    assert served["num_steps"] == 4
    assert (served["decode_worker"], served["decode_workers"]) == ("decode-0", ["decode-0"])
    assert served["kv_source"] == ["link"]
    assert served["tokens_by_source"] == {"target": 0, "draft": 6, "suffix": 0}
    assert 0 <= served["ttft_ms"] <= served["total_ms"]
    assert streams.finished == ["abc.1-0-0"]
    assert not streams.cancelled


async def test_several_prompts_and_choices_are_streams_of_their_own(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    """Choice i of prompt p has index p * n + i, and its own noise under the one seed."""

    def script(request: Request) -> Script:
        return spell(tokenizer, f"{request.sampling.prompt_index}{request.sampling.choice}")

    streams = ScriptedStreams(script)
    async with serve(streams) as client:
        answer = await client.completions.create(model="paceline-small", prompt=["a", "bc"], n=2)

    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "00"),
        (1, "01"),
        (2, "10"),
        (3, "11"),
    ]
    assert len({request.sampling.seed for request in streams.requests}) == 1
    assert {request.max_tokens for request in streams.requests} == {16}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)
    assert (answer.model_extra or {})["metrics"]["decode_worker"] == ["decode-0"] * 4


async def test_token_ids_and_an_empty_prompt(serve: Serve, tokenizer: Tokenizer) -> None:
    """Ids go through as they are; nothing becomes the token that begins a text."""
    streams = ScriptedStreams(spell(tokenizer, "x"))
    async with serve(streams) as client:
        await client.completions.create(model="paceline-small", prompt=[[7, 8], [9]])
        await client.completions.create(model="paceline-small", prompt="")

    assert [request.prompt_ids for request in streams.requests] == [(7, 8), (9,), (0,)]


async def test_length_ignore_eos_and_own_stop_tokens(serve: Serve, tokenizer: Tokenizer) -> None:
    """A stop token of the request is left out of the text even where it is an ordinary one."""
    (dot,) = tokenizer.encode(".")
    streams = ScriptedStreams(
        lambda request: spell(tokenizer, "ab", end=[dot], finish="stop" if request.stop_ids else "length")
    )
    async with serve(streams) as client:
        stopped = await client.completions.create(
            **TEXT, extra_body={"stop_token_ids": [dot], "ignore_eos": True}
        )
        cut = await client.completions.create(**TEXT, extra_body={"ignore_eos": True})

    assert [request.stop_ids for request in streams.requests] == [(dot,), ()]
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("ab", "stop")
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("ab.", "length")


@pytest.mark.parametrize("group", [1, 3, 50])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_the_text_and_cancels_the_work(
    serve: Serve, tokenizer: Tokenizer, group: int, stream: bool
) -> None:
    """Text and token count are the same however the tokens were grouped."""
    script = [*spell(tokenizer, "one two THE END and more", group=group, finish=None), NEVER]
    streams = ScriptedStreams(script)
    async with serve(streams) as client:
        if stream:
            chunks = [
                chunk
                async for chunk in await client.completions.create(
                    **TEXT, stop=["END", "zz"], stream=True, stream_options={"include_usage": True}
                )
            ]
            text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
            finish, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
        else:
            answer = await client.completions.create(**TEXT, stop=["END", "zz"])
            text, finish, usage = answer.choices[0].text, answer.choices[0].finish_reason, answer.usage

    assert (text, finish) == ("one two THE ", "stop")
    assert usage is not None
    assert usage.completion_tokens == len("one two THE END")
    assert len(streams.cancelled) == 1


# --- streams --------------------------------------------------------------------------------------------


async def test_a_chat_stream_has_openais_order_of_chunks(serve: Serve, tokenizer: Tokenizer) -> None:
    """Role, contents, finish with the metrics, [DONE]; characters split over tokens arrive whole."""
    streams = ScriptedStreams(spell(tokenizer, "né 😀"))
    async with serve(streams) as client:
        events = await events_of(client, "chat/completions", CHAT)

    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "n"},
        {"content": "é"},
        {"content": " "},
        {"content": "😀"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]
    assert {(chunk["object"], chunk["id"]) for chunk in chunks} == {
        ("chat.completion.chunk", chunks[0]["id"])
    }
    assert chunks[-1]["metrics"]["tokens_by_source"] == {"target": 9, "draft": 0, "suffix": 0}
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_in_a_chunk_of_its_own_and_on_request_in_each(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    """The usage chunk has no choices and carries the metrics."""
    async with serve(ScriptedStreams(spell(tokenizer, "abc"))) as client:
        options = {"include_usage": True, "continuous_usage_stats": True}
        stream = await client.chat.completions.create(
            **CHAT, stream=True, extra_body={"stream_options": options}
        )
        chunks = [chunk async for chunk in stream]
        plain = await client.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        )
        usages = [chunk.usage async for chunk in plain]

    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4
    assert "metrics" in (chunks[-1].model_extra or {})
    assert all("metrics" not in (chunk.model_extra or {}) for chunk in chunks[:-1])
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts == [1, 1, 2, 3, 4, 4]
    assert usages[:-1] == [None] * (len(usages) - 1)


async def test_choices_of_one_stream_interleave(serve: Serve, tokenizer: Tokenizer) -> None:
    """Each has its own role chunk and finish; the metrics come with the very last."""
    streams = ScriptedStreams(lambda request: spell(tokenizer, "ab" * (1 + request.sampling.choice)))
    async with serve(streams) as client:
        chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT, n=3, stream=True)]

    texts, roles, finishes = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for chunk in chunks:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
        finishes[choice.index] += choice.finish_reason is not None
    assert (texts, roles, finishes) == (["ab", "abab", "ababab"], [1, 1, 1], [1, 1, 1])
    assert ["metrics" in (chunk.model_extra or {}) for chunk in chunks] == [False] * (len(chunks) - 1) + [
        True
    ]


async def test_a_waiting_stream_sends_comments(serve: Serve, tokenizer: Tokenizer) -> None:
    """When its worker is gone, and when nothing happened for a while; clients do not see them."""
    script: list[Act] = [WAITING, 0.11, *spell(tokenizer, "hi")]
    async with serve(ScriptedStreams(script), keepalive_s=0.05) as client:
        events = await events_of(client, "completions", TEXT)
        chunks = [chunk async for chunk in await client.completions.create(**TEXT, stream=True)]

    assert events[0] == ": keep-alive"
    assert events.count(": keep-alive") in (2, 3)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hi"


async def test_an_error_after_the_headers_is_an_event_without_done(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    """The text before it arrives; the client raises."""
    failed = StreamEvent((), finish="error", error="the worker is gone")
    text = ""
    async with serve(ScriptedStreams([*spell(tokenizer, "par", end=(), finish=None), failed])) as client:
        with pytest.raises(openai.APIError, match="the worker is gone"):
            async for chunk in await client.completions.create(**TEXT, stream=True):
                text += chunk.choices[0].text
        events = await events_of(client, "completions", TEXT)

    assert text == "par"
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "stream_failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_streams(
    serve: Serve, tokenizer: Tokenizer, stream: bool
) -> None:
    """At once, all choices, though nothing more was to be sent."""
    streams = ScriptedStreams([*spell(tokenizer, "ab", finish=None, end=()), NEVER])
    async with serve(streams) as client, httpx.AsyncClient(base_url=str(client.base_url)) as raw:
        call = asyncio.create_task(raw.post("completions", json={**TEXT, "n": 2, "stream": stream}))
        await until(lambda: len(streams.requests) == 2)
        call.cancel()
        await until(lambda: len(streams.cancelled) == 2)

    assert streams.num_open == 0


async def test_one_failing_choice_cancels_the_others(
    serve: Serve, logged: list[MutableMapping[str, Any]]
) -> None:
    """An answer is whole or an error; what nobody expected is logged with its traceback."""
    streams = ScriptedStreams(
        lambda request: [NEVER] if request.sampling.choice else [0.01, RuntimeError("secret")]
    )
    async with serve(streams) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(**TEXT, n=3)

    assert "secret" not in str(caught.value)
    assert [str(event["exc_info"]) for event in logged if "exc_info" in event] == ["secret"]
    assert len(streams.cancelled) == 2


# --- errors and the rest --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/chat/completions", b"{", 400, "invalid_json"),
        ("POST", "/v1/chat/completions", {**CHAT, "n": 99}, 400, "invalid_value"),
        ("POST", "/v1/chat/completions", {**CHAT, "tools": [1]}, 400, "unsupported_parameter"),
        ("POST", "/v1/chat/completions", {**CHAT, "model": "x"}, 404, "model_not_found"),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "refuse"}]}, 400, None),
        (
            "POST",
            "/v1/completions",
            {**TEXT, "prompt": "a" * 150, "max_tokens": 51},
            400,
            "context_length_exceeded",
        ),
        ("POST", "/v1/completions", {**TEXT, "prompt": "a" * 200}, 400, "context_length_exceeded"),
        ("POST", "/v1/completions", {**TEXT, "prompt": "a" * 60000}, 400, "context_length_exceeded"),
        ("POST", "/v1/completions", {**TEXT, "prompt": [5000]}, 400, None),
        ("POST", "/v1/completions", {**TEXT, "stop_token_ids": [5000]}, 400, None),
        ("GET", "/v1/models/nobody", None, 404, "model_not_found"),
        ("GET", "/nowhere", None, 404, "not_found"),
        ("GET", "/v1/completions", None, 405, "method_not_allowed"),
        ("GET", "/ready", None, 503, "unavailable"),
    ],
)
async def test_errors_have_openais_shape(
    tokenizer: Tokenizer, metrics: Metrics, method: str, path: str, body: Any, status: int, code: str | None
) -> None:
    """Whoever found them: the schema, the tokenizer, the router, the cluster."""
    async with inside(tokenizer, metrics, ScriptedStreams([], is_ready=False)) as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await client.request(method, path, content=content, headers=JSON)

    assert error_of(response, status)["code"] == code


async def test_a_prompt_without_max_tokens_gets_what_is_left(tokenizer: Tokenizer, metrics: Metrics) -> None:
    """The default is a wish, not a demand."""
    streams = ScriptedStreams(spell(tokenizer, "x"))
    async with inside(tokenizer, metrics, streams) as client:
        response = await client.post("/v1/completions", json={"prompt": "a" * 190})

    assert response.status_code == 200
    assert streams.requests[0].max_tokens == 10


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_large_body_is_refused_before_it_is_read(
    tokenizer: Tokenizer, metrics: Metrics, is_chunked: bool
) -> None:
    """By its declared length, or as soon as too much came."""
    num_read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_read
        for _ in range(100):
            num_read += 1
            yield b" " * 1000

    headers = JSON if is_chunked else {**JSON, "content-length": "100000"}
    async with inside(tokenizer, metrics, ScriptedStreams([]), max_body_bytes=2048) as client:
        response = await client.post("/v1/completions", content=body(), headers=headers)

    assert error_of(response, 413)["code"] == "body_too_large"
    assert num_read <= (3 if is_chunked else 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        ([Unavailable("no worker came")], 503, "unavailable"),
        ([RuntimeError("secret")], 500, "internal_error"),
        ([StreamEvent((), finish="error", error="lost")], 500, "stream_failed"),
        ([], 500, "stream_failed"),
    ],
)
async def test_what_fails_before_the_first_token_gets_a_status(
    tokenizer: Tokenizer, metrics: Metrics, stream: bool, script: Script, status: int, code: str
) -> None:
    """Streaming or not; what nobody expected is not told to clients."""
    async with inside(tokenizer, metrics, ScriptedStreams(script)) as client:
        response = await client.post("/v1/completions", json={**TEXT, "stream": stream})

    assert error_of(response, status)["code"] == code
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status == 503)


async def test_request_ids_are_sane_and_streams_never_share_one(
    tokenizer: Tokenizer, metrics: Metrics
) -> None:
    """An odd id is replaced. One in use is kept for the client, but names no second stream in the cluster."""
    streams = ScriptedStreams([0.05, *spell(tokenizer, "x")])
    async with inside(tokenizer, metrics, streams) as client:
        odd = await client.get("/health", headers={"x-request-id": "a b"})
        post = functools.partial(client.post, "/v1/completions", json=TEXT, headers={"x-request-id": "same"})
        answers = await asyncio.gather(post(), post())
        again = await post()

    assert len(odd.headers["x-request-id"]) == 32
    assert [answer.headers["x-request-id"] for answer in (*answers, again)] == ["same"] * 3
    assert {answer.json()["id"] for answer in answers} == {"cmpl-same"}
    ids = [request.id for request in streams.requests]
    assert ids[0] == ids[2] == "same-0-0"
    assert re.fullmatch(r"same\.[0-9a-f]{8}-0-0", ids[1])


async def test_models_health_and_ready(serve: Serve, tokenizer: Tokenizer) -> None:
    """What clients and probes ask first."""
    async with serve(ScriptedStreams([])) as client:
        listed = await client.models.list()
        one = await client.models.retrieve("paceline-small")
        async with httpx.AsyncClient() as raw:
            base = str(client.base_url).removesuffix("/v1/")
            probes = [await raw.get(f"{base}/{name}") for name in ("health", "ready", "openapi.json")]

    assert [model.id for model in listed.data] == ["paceline-small"]
    assert one.object == "model"
    assert [probe.status_code for probe in probes] == [200, 200, 200]
    assert probes[0].json() == {"status": "ok"}
    assert {"ChatRequest", "CompletionRequest"} <= set(probes[2].json()["components"]["schemas"])


async def test_requests_and_latencies_are_counted(
    serve: Serve, tokenizer: Tokenizer, metrics: Metrics
) -> None:
    """By route and status; paths that clients make up share one label."""
    async with serve(ScriptedStreams(spell(tokenizer, "abc"))) as client:
        await client.completions.create(**TEXT)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("x")
        with pytest.raises(openai.NotFoundError):
            await client.get("/elsewhere", cast_to=object)

    text = metrics.text().decode()
    assert 'paceline_requests_total{route="/v1/completions",status="200"} 1.0' in text
    assert 'paceline_requests_total{route="/v1/models/",status="404"} 1.0' in text
    assert 'paceline_requests_total{route="other",status="404"} 1.0' in text
    assert "paceline_ttft_seconds_count 1.0" in text
    assert "paceline_inter_token_seconds_count 3.0" in text


async def test_a_stop_string_at_the_very_end_is_cut_too(tokenizer: Tokenizer, metrics: Metrics) -> None:
    """What was withheld for a longer candidate still contains a shorter match."""
    async with inside(tokenizer, metrics, ScriptedStreams(spell(tokenizer, "xab"))) as client:
        response = await client.post("/v1/completions", json={**TEXT, "stop": ["abc", "b"]})

    assert response.json()["choices"][0] == {
        "index": 0,
        "text": "xa",
        "logprobs": None,
        "finish_reason": "stop",
    }


async def test_a_long_prompt_leaves_the_loop_free(tokenizer: Tokenizer, metrics: Metrics) -> None:
    """It is read and tokenised in a thread, with the same result."""
    streams = ScriptedStreams(spell(tokenizer, "x"))
    async with inside(tokenizer, metrics, streams) as client:
        content = json.dumps(TEXT).encode() + b" " * 9000
        response = await client.post("/v1/completions", content=content, headers=JSON)

    assert response.status_code == 200
    assert streams.requests[0].prompt_ids == tuple(tokenizer.encode("hi"))
