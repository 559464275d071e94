"""Emissions of a stream -> figures of it when it ended -> what control is told each second. Counts and times, no text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.cluster.scheduler import Stream
from paceline.cluster.types import Served, ServedStream
from paceline.workers.engine import Emission

_MAX_DEPTHS = 32


@dataclass(slots=True)
class StreamFigures:
    """What this worker did for one stream; where it ran before or goes on is another's to tell."""

    num_tokens: int = 0
    num_steps: int = 0
    draft_version: str = ""
    tested: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    first: float = 0.0
    """Seconds of a monotonic clock, as is the next."""
    last: float = 0.0
    max_gap_s: float = 0.0

    def add(self, emission: Emission, now: float) -> None:
        """A step emitted tokens of it."""
        if not emission.tokens:
            return
        if self.num_steps:
            self.max_gap_s = max(self.max_gap_s, now - self.last)
        else:
            self.first = now
        self.last = now
        self.num_steps += 1
        self.num_tokens += len(emission.tokens)
        self.draft_version = emission.draft_version or self.draft_version
        if emission.num_tested:
            _count(self.tested, emission.num_tested)
            _count(self.right, emission.num_right)

    def summary(self, stream: Stream) -> ServedStream:
        """The stream is over, here."""
        request = stream.request
        return ServedStream(
            request.id,
            request.tenant,
            request.domain,
            self.draft_version,
            self.num_tokens,
            self.num_steps,
            tuple(self.tested),
            (*self.right, *[0] * (len(self.tested) - len(self.right))),
            self.last - self.first,
            self.max_gap_s,
            request.sampling.temperature,
        )


def _count(by_depth: list[int], depth: int) -> None:
    """One more at each of the first `depth` depths."""
    depth = min(depth, _MAX_DEPTHS)
    by_depth.extend([0] * (depth - len(by_depth)))
    for at in range(depth):
        by_depth[at] += 1


class ServedBook:
    """Streams that ended, until they are told of. One thread adds, another takes."""

    def __init__(self, max_items: int = 1024) -> None:
        """What does not fit until the next second is left out and counted."""
        self._max_items = max_items
        self._items: deque[ServedStream] = deque()
        self._left_out = 0
        self._told = 0
        """Of those left out."""

    def add(self, item: ServedStream) -> None:
        """A stream ended."""
        if len(self._items) < self._max_items:
            self._items.append(item)
        else:
            self._left_out += 1

    def take(self, worker_id: str) -> list[Served]:
        """The next report, if there is anything to say."""
        items = tuple(self._items.popleft() for _ in range(len(self._items)))
        left_out = self._left_out
        num_left_out, self._told = left_out - self._told, left_out
        return [Served(worker_id, items, num_left_out)] if items or num_left_out else []
