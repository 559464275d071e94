"""Requests over a real socket -> spans at a real OTLP receiver: names, times, parents, attributes, and what is left out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import structlog.testing
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from otlp import Collector, attributes, collecting
from paceline.cluster.config import TelemetryConfig
from paceline.cluster.errors import ConfigError, Unavailable
from paceline.cluster.gateway.fakes import Script, ScriptedStreams
from paceline.cluster.gateway.journal import Journal
from paceline.cluster.gateway.streams import StreamEvent
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.gateway.traces import open_traces
from paceline.cluster.metrics import Metrics
from scripted_gateway import CHAT, JSON, TEXT, listening, spell

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@contextlib.asynccontextmanager
async def traced(
    tokenizer: Tokenizer, script: Script, url: str, metrics: Metrics | None = None, **telemetry: Any
) -> AsyncIterator[str]:
    """A gateway whose traces go there; at the end of the block all of them were sent."""
    metrics = metrics or Metrics()
    config = TelemetryConfig(otlp_endpoint=url, **telemetry)
    traces = open_traces(config, metrics, instance="gateway-1")
    assert traces is not None
    try:
        async with listening(tokenizer, metrics, ScriptedStreams(script), journal=Journal(traces)) as where:
            yield where
    finally:
        await asyncio.to_thread(traces.close)


async def post(url: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url) as client:
        return await client.post(path, json=body, headers={**JSON, **headers})


async def test_a_chat_is_one_trace_with_its_phases(tokenizer: Tokenizer, collector: Collector) -> None:
    """The request as a server's span of the caller's trace; route, prefill and decode one after the other inside."""
    async with traced(
        tokenizer,
        [
            0.02,
            *spell(tokenizer, "Hello"),
        ],
        collector.url,
    ) as url:
        body = {**CHAT, "seed": -5, "temperature": 0.5, "top_p": 0.9, "max_tokens": 50, "stream": True}
        answer = await post(
            url, "/v1/chat/completions", body,
            **{"x-request-id": "abc.1", "traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"},
        )  # fmt: skip
        assert answer.status_code == 200

    root = collector.named("chat paceline-small")
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, PARENT, "a=b")
    assert root.kind == Span.SPAN_KIND_SERVER and root.status.code != Status.STATUS_CODE_ERROR
    found = attributes(root)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": "paceline-small",
        "gen_ai.response.model": "paceline-small",
        "gen_ai.response.id": "chatcmpl-abc.1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.seed": str(2**64 - 5),
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.output_tokens": 6,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "paceline.request.id": "abc.1",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found["gen_ai.usage.input_tokens"] == len(tokenizer.encode("<|user|>hi<|end|><|assistant|>"))
    assert 0.02 <= found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"] < 5
    route, prefill, decode = (collector.named(name) for name in ("route", "prefill", "decode"))
    assert {child.parent_span_id for child in (route, prefill, decode)} == {root.span_id}
    edges = [root.start_time_unix_nano, route.end_time_unix_nano, prefill.end_time_unix_nano,
             decode.end_time_unix_nano, root.end_time_unix_nano]  # fmt: skip
    assert edges == sorted(edges) and route.start_time_unix_nano == edges[0]
    assert prefill.start_time_unix_nano == edges[1] and decode.start_time_unix_nano == edges[2]
    assert attributes(prefill)["paceline.kv.source"] == ["link"]
    assert attributes(decode)["paceline.decode.workers"] == ["decode-0"]
    (resource,) = collector.requests[0].resource_spans
    about = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert (about["service.name"], about["service.instance.id"]) == ("paceline", "gateway-1")


async def test_nothing_of_the_text_is_in_a_trace(tokenizer: Tokenizer, collector: Collector) -> None:
    async with traced(tokenizer, spell(tokenizer, "topsecret answer"), collector.url) as url:
        body = {"prompt": "very private prompt", "stop": ["hushhush"], "user": "someone"}
        assert "topsecret" in (await post(url, "/v1/completions", body)).text

    sent = b"".join(request.SerializeToString() for request in collector.requests)
    assert collector.named("text_completion paceline-small")
    for word in (b"topsecret", b"private", b"hushhush", b"someone"):
        assert word not in sent


async def test_every_choice_has_phases_of_its_own(tokenizer: Tokenizer, collector: Collector) -> None:
    async with traced(tokenizer, spell(tokenizer, "ab"), collector.url) as url:
        assert (await post(url, "/v1/completions", {**TEXT, "n": 2})).status_code == 200

    decodes = [span for span in collector.spans if span.name == "decode"]
    assert sorted(attributes(span)["paceline.choice"] for span in decodes) == [0, 1]
    assert attributes(collector.named("text_completion paceline-small"))["gen_ai.request.choice.count"] == 2


@pytest.mark.parametrize(
    ("script", "code", "status", "failed"),
    [
        ([Unavailable("no worker came")], "unavailable", 503, True),
        ([StreamEvent((5,)), RuntimeError("secret")], "stream_failed", 200, True),
    ],
)
async def test_a_failure_says_what_it_was(
    tokenizer: Tokenizer, collector: Collector, script: Script, code: str, status: int, failed: bool
) -> None:
    """Before the first byte by its status, and behind it although the status says 200."""
    async with traced(tokenizer, script, collector.url) as url:
        with structlog.testing.capture_logs() as logged:
            await post(url, "/v1/completions", {**TEXT, "stream": True})
            while not any(event["event"] == "request_done" for event in logged):
                await asyncio.sleep(0.005)

    root = collector.named("text_completion paceline-small")
    assert (root.status.code == Status.STATUS_CODE_ERROR) == failed
    assert attributes(root)["error.type"] == code
    assert attributes(root)["http.response.status_code"] == status


@pytest.mark.parametrize(
    ("share", "parent", "is_traced"),
    [(0.0, "", False), (1.0, "", True), (0.0, f"00-{TRACE}-{PARENT}-01", True), (1.0, f"00-{TRACE}-{PARENT}-00", False),
     (1.0, "nonsense", True)],
)  # fmt: skip
async def test_who_traces_already_decides(
    tokenizer: Tokenizer, collector: Collector, share: float, parent: str, is_traced: bool
) -> None:
    """A sampled parent is followed, one that is not sampled as well; without one the configuration counts."""
    async with traced(tokenizer, spell(tokenizer, "a"), collector.url, trace_share=share) as url:
        assert (
            await post(url, "/v1/completions", TEXT, **({"traceparent": parent} if parent else {}))
        ).is_success

    assert bool(collector.spans) == is_traced


async def test_the_log_line_names_the_trace(tokenizer: Tokenizer, collector: Collector) -> None:
    async with traced(tokenizer, spell(tokenizer, "a"), collector.url) as url:
        with structlog.testing.capture_logs() as logged:
            await post(url, "/v1/completions", TEXT, **{"x-request-id": "find.me"})

    (line,) = [event for event in logged if event["event"] == "request_done"]
    assert line["trace"] == collector.named("text_completion paceline-small").trace_id.hex()
    assert (line["request"], line["status"], line["tokens"], line["finish"]) == ("find.me", 200, 2, ["stop"])


async def test_a_collector_that_is_away_costs_requests_nothing(
    tokenizer: Tokenizer, collector: Collector
) -> None:
    """Spans are lost and counted, with one line in the log however many they are."""
    collector.status = 400
    metrics = Metrics()
    with structlog.testing.capture_logs() as logged:
        async with traced(tokenizer, spell(tokenizer, "a"), collector.url, metrics) as url:
            answers = await asyncio.gather(*(post(url, "/v1/completions", TEXT) for _ in range(4)))
    assert all(answer.is_success for answer in answers)

    lost = metrics.registry.get_sample_value("paceline_trace_spans_total", {"outcome": "lost"})
    assert lost == 16 and collector.spans == []
    assert [event["event"] for event in logged].count("traces_are_lost") == 1


async def test_keys_for_the_collector_come_from_the_environment(
    tokenizer: Tokenizer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=abc")
    async with traced(tokenizer, spell(tokenizer, "a"), f"{collector.url}/v1/traces") as url:
        await post(url, "/v1/completions", TEXT)

    assert collector.headers[0]["x-key"] == "abc"


def test_traces_are_off_unless_somebody_says_where_they_go() -> None:
    assert open_traces(TelemetryConfig(), Metrics(), instance="") is None


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are wanted and the package is not there: a start that fails says how to get it."""
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)

    with pytest.raises(ConfigError, match=r"paceline\[otel\]"):
        open_traces(TelemetryConfig(otlp_endpoint="http://x:1"), Metrics(), instance="")
