"""A request's stamps and reports -> OpenTelemetry spans with gen_ai.* attributes, sent over OTLP by a thread of their own.

Spans are made when the request has ended, of stamps that are there anyway: while it runs, a trace costs it nothing. They
hold counts, times and names, and nothing of its text. Names of attributes: OpenTelemetry's conventions for generative AI
(in development when this was written), gen_ai.latency.* as other engines have them, and our own under paceline.*.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import structlog

from paceline.cluster.config import TelemetryConfig
from paceline.cluster.errors import ConfigError
from paceline.cluster.gateway.choices import Choice
from paceline.cluster.gateway.journal import Record
from paceline.cluster.metrics import Metrics

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

    from paceline.cluster.gateway.session import Session

log = structlog.get_logger(__name__)

_TIMEOUT_S = 5.0
"""Of one attempt to send. Whoever waits is a thread that nobody waits for."""
_CLOSE_S = 2.0

Attributes = dict[str, Any]


def open_traces(config: TelemetryConfig, metrics: Metrics, *, instance: str) -> OtlpTraces | None:
    """Where traces go, if anywhere. `instance` names this gateway.

    Raises:
        ConfigError: traces are wanted, and what sends them is not installed.
    """
    if config.otlp_endpoint == "none":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"telemetry.otlp_endpoint={config.otlp_endpoint}: expected the package that sends traces: "
            f"pip install 'paceline[otel]' ({error})"
        ) from None
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # one line an attempt; ours is one a change
    url = config.otlp_endpoint.rstrip("/")
    exporter = OTLPSpanExporter(url if url.endswith("/v1/traces") else f"{url}/v1/traces", timeout=_TIMEOUT_S)
    return OtlpTraces(exporter, metrics, instance=instance, share=config.trace_share)


class OtlpTraces:
    """Traces of one gateway. All calls on any thread; none waits for the network."""

    def __init__(
        self, exporter: SpanExporter, metrics: Metrics, *, instance: str = "", share: float = 1.0
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = {"service.name": "paceline", "service.version": version("paceline")}
        resource = Resource.create({**about, "service.instance.id": instance})
        self._provider = TracerProvider(
            resource=resource, sampler=ParentBased(TraceIdRatioBased(share)), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(_counted(exporter, metrics)))
        self._tracer = self._provider.get_tracer("paceline")
        self._propagator = TraceContextTextMapPropagator()

    def send(self, record: Record) -> str:
        """See `journal.Traces`."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context

        session = record.session
        assert session is not None
        clock = _Clock()
        attributes = {**_of_request(record, session), **_of_answer(record, session)}
        root = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {session.model}",
            context=self._parent(record),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=clock.ns(record.received),
        )
        if not root.is_recording():
            return ""
        inside = set_span_in_context(root)
        for choice in session.choices:
            for name, begin, end, facts in _phases(choice, record):
                child = self._tracer.start_span(
                    name, context=inside, attributes=facts, start_time=clock.ns(begin)
                )
                child.end(clock.ns(end))
        if record.is_failure:
            root.set_status(Status(StatusCode.ERROR))
        if record.error or record.is_failure:
            root.set_attribute("error.type", record.error or str(record.status))
        root.end(clock.ns(record.ended))
        return format_trace_id(root.get_span_context().trace_id)

    def _parent(self, record: Record) -> Context | None:
        if not record.traceparent:
            return None
        carrier = {"traceparent": record.traceparent, "tracestate": record.tracestate}
        return self._propagator.extract({name: value for name, value in carrier.items() if value})

    def close(self) -> None:
        """Send what is there, for so long and no longer."""
        # The library's own end waits for as long as a collector that does not answer keeps it.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_CLOSE_S)


class _Clock:
    """Monotonic seconds -> Unix nanoseconds, by one reading of both: durations within a trace are exact."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def ns(self, monotonic: float) -> int:
        return int((monotonic + self._offset) * 1e9)


def _of_request(record: Record, session: Session) -> Attributes:
    sampling, body = session.choices[0].request.sampling, session.body
    is_chat = session.style.whole_object == "chat.completion"
    found: Attributes = {
        "gen_ai.operation.name": "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": session.model,
        "gen_ai.request.max_tokens": session.choices[0].request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": str(sampling.seed),  # 64 bits without a sign: more than an OTLP integer has
        "gen_ai.request.stream": body.stream,
        "http.request.method": record.method,
        "http.route": record.route,
        "paceline.request.id": record.request_id,
        "paceline.request.priority": session.choices[0].request.priority,
        "paceline.request.speculate": session.choices[0].request.speculate,
    }
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if sampling.frequency_penalty:
        found["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
    if sampling.presence_penalty:
        found["gen_ai.request.presence_penalty"] = sampling.presence_penalty
    if len(session.choices) > 1:
        found["gen_ai.request.choice.count"] = len(session.choices)
    return found


def _of_answer(record: Record, session: Session) -> Attributes:
    choices = session.choices
    reports = [choice.report for choice in choices]
    first = [s for r in reports if (s := r.timeline.seconds("received", "first_token")) is not None]
    found: Attributes = {
        "gen_ai.response.model": session.model,
        "gen_ai.response.id": session.answer_id,
        "gen_ai.response.finish_reasons": [choice.finish or "error" for choice in choices],
        "gen_ai.usage.input_tokens": session.num_prompt,
        "gen_ai.usage.output_tokens": sum(choice.num_tokens for choice in choices),
        "gen_ai.latency.e2e": record.seconds,
        "gen_ai.latency.time_in_queue": max(r.queued_s for r in reports),
        "http.response.status_code": record.status,
        "paceline.recoveries": sum(r.num_recoveries for r in reports),
    }
    if first:
        found["gen_ai.latency.time_to_first_token"] = min(first)
    return found


def _phases(choice: Choice, record: Record) -> Iterator[tuple[str, float, float, Attributes]]:
    """(name, begin, end, attributes) of what a choice went through, as far as it came."""
    report, stamps = choice.report, choice.report.timeline.stamps
    index = {"paceline.choice": choice.index}
    routed, first = stamps.get("routed"), stamps.get("first_token")
    yield "route", record.received, routed or record.ended, index
    if routed is None:
        return
    prefill = {
        "paceline.prefill.worker": report.prefill_worker,
        "paceline.kv.source": report.kv_sources,
        "paceline.kv.bytes": report.kv_bytes,
        "paceline.kv.skipped_tokens": report.kv_skipped_tokens,
        "paceline.kv.exposed_s": report.kv_exposed_s,
        "paceline.queued_s": report.queued_s,
    }
    yield "prefill", routed, first or record.ended, {**index, **prefill}
    if first is None:
        return
    decode = {
        "paceline.decode.workers": report.decode_workers,
        "paceline.draft.worker": report.draft_worker,
        "paceline.draft.version": report.draft_version,
        "paceline.steps": report.num_steps,
        "paceline.drafted_tokens": report.num_drafted,
        "paceline.recoveries": report.num_recoveries,
        **{f"paceline.tokens.{name}": num for name, num in report.tokens_by_source.items()},
    }
    yield "decode", first, stamps.get("done", record.ended), {**index, **decode}


def _counted(exporter: SpanExporter, metrics: Metrics) -> SpanExporter:
    """The same exporter, its spans counted; a collector that stops answering, or answers again, is one log line."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Counted(SpanExporter):
        is_well = True

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = exporter.export(spans)
            is_well = result is SpanExportResult.SUCCESS
            metrics.trace_spans.labels("sent" if is_well else "lost").inc(len(spans))
            if is_well != self.is_well:
                self.is_well = is_well
                event = "traces_are_sent_again" if is_well else "traces_are_lost"
                log.warning(
                    event, spans=len(spans), reason="" if is_well else "the collector does not take them"
                )
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return exporter.force_flush(timeout_millis)

    return Counted()
