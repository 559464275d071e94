"""A request that ended -> one log line and, where they are wanted, one trace."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from paceline.cluster.gateway.session import Session

log = structlog.get_logger(__name__)

_GONE = "client_gone"


@dataclass(slots=True)
class Record:
    """One HTTP request, filled while it is served."""

    request_id: str
    method: str
    route: str
    """One of few: not the path, which clients make up."""
    received: float
    """Monotonic seconds."""
    traceparent: str = ""
    tracestate: str = ""
    """These two as they came: who traces it already."""
    key_id: str = ""
    session: Session | None = None
    """Set once it was found good: its streams, and what served them."""
    status: int = 0
    error: str = ""
    """A short code of what went wrong."""
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.received

    @property
    def is_failure(self) -> bool:
        """Ours: neither a request that was wrong, nor a client that went away."""
        return self.status >= 500 or self.status == 200 and self.error not in ("", _GONE)


class Traces(Protocol):
    """Where traces go."""

    def send(self, record: Record) -> str:
        """Hand the trace of a request over, without waiting; its trace id, "" if it is not traced."""
        ...


class Journal:
    """What remains of requests in the eyes of an operator. Nothing of their text."""

    def __init__(self, traces: Traces | None = None) -> None:
        self._traces = traces

    def ended(self, record: Record) -> None:
        """Call once, when the last byte was sent or the client was gone."""
        record.ended = time.monotonic()
        if not record.error and record.session is not None and _broke_off(record.session):
            record.error = "stream_failed"  # its headers were out: the status cannot tell
        facts: dict[str, Any] = {}
        if record.session is not None and self._traces is not None:
            trace_id = self._traces.send(record)
            facts = {"trace": trace_id} if trace_id else {}
        if record.method == "POST" or record.status >= 500:  # not probes
            log.info("request_done", **_facts(record), **facts)


def _broke_off(session: Session) -> bool:
    """Some choice began and has no end. One that the client had all of already never began."""
    return any(c.finish is None and len(c.report.timeline.stamps) > 1 for c in session.choices)


def _facts(record: Record) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "request": record.request_id,
        "route": record.route,
        "status": record.status,
        "ms": round(1e3 * record.seconds, 1),
    }
    if record.error:
        facts["error"] = record.error
    if record.key_id:
        facts["key"] = record.key_id
    if record.session is None:
        return facts
    choices = record.session.choices
    reports = [choice.report for choice in choices]
    first = [s for r in reports if (s := r.timeline.seconds("received", "first_token")) is not None]
    return facts | {
        "prompt_tokens": record.session.num_prompt,
        "tokens": sum(choice.num_tokens for choice in choices),
        "choices": len(choices),
        "ttft_ms": round(1e3 * min(first), 1) if first else None,
        "finish": [choice.finish or "" for choice in choices],
        "prefill": sorted({r.prefill_worker for r in reports if r.prefill_worker}),
        "decode": sorted({name for r in reports for name in r.decode_workers}),
        "kv_source": sorted({source for r in reports for source in r.kv_sources}),
        "draft_version": sorted({r.draft_version for r in reports if r.draft_version}),
        "recoveries": sum(r.num_recoveries for r in reports),
    }
