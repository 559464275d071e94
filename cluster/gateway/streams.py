"""Request -> events with its tokens, each position once, whatever happens to the workers behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from paceline.cluster.timeline import Timeline
from paceline.cluster.types import FinishReason, Logprobs, Request


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """New output tokens, or (no tokens, no finish) a sign that the stream is alive but waits for a worker."""

    tokens: tuple[int, ...]
    sources: bytes = b""
    """One of SOURCE_* for each token."""
    finish: FinishReason | None = None
    error: str = ""
    """Set with finish == "error"."""
    logprobs: Logprobs | None = None
    """Of the tokens, if the request asked."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt without its first token, with the first tokens, if the request asked."""

    @property
    def is_waiting(self) -> bool:
        return not self.tokens and self.finish is None

    def joined(self, later: StreamEvent) -> StreamEvent | None:
        """This and what came behind it as one event; None where both must be told for themselves."""
        is_plain = self.logprobs is None and later.logprobs is None and later.prompt_logprobs is None
        if not is_plain or self.finish is not None or later.finish == "error":
            return None
        return StreamEvent(
            self.tokens + later.tokens,
            self.sources + later.sources,
            later.finish,
            prompt_logprobs=self.prompt_logprobs,
        )


@dataclass(slots=True)
class StreamReport:
    """What served one stream; filled while it runs, complete at its end."""

    prefill_worker: str = ""
    decode_workers: list[str] = field(default_factory=list)
    """In order of use; more than one after a recovery."""
    draft_worker: str = ""
    draft_version: str = ""
    kv_sources: list[str] = field(default_factory=list)
    """One entry an attempt: "link" or "local:<reason>"."""
    kv_bytes: int = 0
    kv_skipped_tokens: int = 0
    """Prompt tokens whose KV was not sent, because the decode worker had it."""
    kv_exposed_s: float = 0.0
    """Time that hand-offs took behind the end of prefill, as the decode worker saw it."""
    queued_s: float = 0.0
    """Time it could have run in its decode workers before a step computed for it."""
    num_steps: int = 0
    num_drafted: int = 0
    tokens_by_source: dict[str, int] = field(default_factory=dict)
    num_recoveries: int = 0
    timeline: Timeline = field(default_factory=Timeline)


class Streams(Protocol):
    """What the HTTP side needs from the cluster."""

    @property
    def is_ready(self) -> bool:
        """At least one worker can generate."""
        ...

    def run(self, request: Request, report: StreamReport) -> AsyncIterator[StreamEvent]:
        """Generate one stream. Closing the iterator early cancels the work and frees its blocks.

        Raises:
            Unavailable: no worker came within the recovery limit.
        """
        ...
