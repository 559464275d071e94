"""Request and a script -> the events a cluster would send: `Streams` without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from paceline.cluster.gateway.streams import StreamEvent, StreamReport
from paceline.cluster.types import SOURCE_TARGET, FinishReason, Request

Act = StreamEvent | Exception | float
"""An event to send, an error to raise, or seconds to wait."""
Script = Iterable[Act]

WAITING = StreamEvent(())
"""The stream lives, but has no worker."""


def say(
    *groups: Iterable[int], finish: FinishReason | None = "stop", source: int = SOURCE_TARGET
) -> list[Act]:
    """A script with one event a group of tokens; the last carries the finish."""
    events = [tuple(group) for group in groups] or [()]
    last = len(events) - 1
    return [
        StreamEvent(tokens, bytes([source]) * len(tokens), finish if at == last else None)
        for at, tokens in enumerate(events)
    ]


class ScriptedStreams:
    """Plays a script for each request and remembers what it was asked, what it finished and what was cancelled."""

    def __init__(self, script: Script | Callable[[Request], Script], *, is_ready: bool = True) -> None:
        self._script = script if callable(script) else (lambda request: script)
        self._is_ready = is_ready
        self.requests: list[Request] = []
        self.finished: list[str] = []
        self.cancelled: list[str] = []
        self.num_open = 0

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    async def run(self, request: Request, report: StreamReport) -> AsyncIterator[StreamEvent]:
        """One stream, as the script has it."""
        self.requests.append(request)
        self.num_open += 1
        report.prefill_worker, report.draft_worker = "prefill-0", "draft-0"
        report.decode_workers.append("decode-0")
        report.kv_sources.append("link")
        report.timeline.stamp("routed")
        try:
            for act in self._script(request):
                if isinstance(act, Exception):
                    raise act
                if isinstance(act, StreamEvent):
                    self._count(act, report)
                    yield act
                else:
                    await asyncio.sleep(act)
            self.finished.append(request.id)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled.append(request.id)
            raise
        finally:
            self.num_open -= 1

    def _count(self, act: StreamEvent, report: StreamReport) -> None:
        if act.tokens:
            report.count_step(act.sources, len(act.sources) - act.sources.count(SOURCE_TARGET))
