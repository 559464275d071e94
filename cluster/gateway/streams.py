"""Request -> events with its tokens, each position once, whatever happens to the workers behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from paceline.cluster.timeline import Timeline
from paceline.cluster.types import SOURCE_NAMES, SOURCE_TARGET, FinishReason, Logprobs, Request


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
    accepted_steps: dict[int, int] = field(default_factory=dict)
    """Accepted tokens -> steps that drafted and accepted so many."""
    num_recoveries: int = 0
    timeline: Timeline = field(default_factory=Timeline)

    def count_step(self, sources: bytes, num_drafted: int) -> None:
        """Take note of one step's tokens, one of SOURCE_* for each, and of how many were drafted in it."""
        self.num_steps += 1
        self.num_drafted += num_drafted
        for source in sources:
            name = SOURCE_NAMES[source]
            self.tokens_by_source[name] = self.tokens_by_source.get(name, 0) + 1
        if num_drafted:
            num_accepted = len(sources) - sources.count(SOURCE_TARGET)
            self.accepted_steps[num_accepted] = self.accepted_steps.get(num_accepted, 0) + 1

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that are part of the text, whoever drafted them."""
        return sum(num * steps for num, steps in self.accepted_steps.items())


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
