"""Waiting and running streams -> the segments of one step: tokens computed catch up with tokens wanted.

There is no prefill phase and no decode phase. Every stream has tokens it wants in the KV pool and a count of
those that are. A step gives each stream some of its missing tokens. A stream that misses only its last token is
"caught up": its step computes that token (the root) and, behind it, draft nodes to verify.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.cluster.blocks import BlockPool
from paceline.cluster.errors import IntegrityError
from paceline.cluster.speculation import Tree
from paceline.cluster.types import Request


@dataclass(slots=True, eq=False)
class Stream:
    """One admitted attempt at a request. Facts are stored; everything else is derived."""

    request: Request
    epoch: int
    buffer: npt.NDArray[np.int32]
    """Prompt and output with room for the rest."""
    num_tokens: int
    """Filled part of `buffer`."""
    num_prompt: int
    arrival: int
    prefill_only: bool = False
    """Compute KV, never sample."""
    is_blocked: bool = False
    """Its KV is on the way from a prefill worker: not schedulable until it arrived whole or was given up."""
    num_computed: int = 0
    """Leading tokens whose KV is in the pool."""
    num_preempted: int = 0
    is_draft_banned: bool = False
    """Its last tree came back with NaN: the next step is plain."""

    @property
    def key(self) -> str:
        """Owner name of its blocks."""
        return f"{self.request.id}/{self.epoch}"

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """int32 [num_tokens], a view."""
        return self.buffer[: self.num_tokens]

    @property
    def num_missing(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_caught_up(self) -> bool:
        """Only the root is missing."""
        return not self.prefill_only and self.num_missing == 1

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def num_allowed(self) -> int:
        """Output tokens that may still follow."""
        return min(self.request.max_tokens - self.num_output, len(self.buffer) - self.num_tokens)

    @property
    def can_draft(self) -> bool:
        """A draft could help: it is wanted, and more than one token may still come."""
        return self.request.speculate and self.num_allowed > 1 and not self.is_draft_banned

    def append(self, token_ids: list[int]) -> None:
        """Add committed tokens."""
        self.buffer[self.num_tokens : self.num_tokens + len(token_ids)] = token_ids
        self.num_tokens += len(token_ids)


@dataclass(slots=True, eq=False)
class Segment:
    """What one stream computes in this step: tokens [start, start + num_rows) or, when caught up, a tree.

    A segment with a tree has start = position of the root. `samples` marks one whose logits are wanted.
    """

    stream: Stream
    start: int
    num_rows: int
    samples: bool
    tree: Tree | None = None


@dataclass(slots=True)
class Plan:
    """One step. Caught-up segments come first, then prefill chunks, each in arrival order."""

    segments: list[Segment] = field(default_factory=list)
    preempted: list[Stream] = field(default_factory=list)

    @property
    def caught_up(self) -> list[Segment]:
        """Segments that can carry draft nodes."""
        return [segment for segment in self.segments if segment.tree is not None]

    @property
    def num_rows(self) -> int:
        return sum(segment.num_rows for segment in self.segments)


class Scheduler:
    """Owns the streams of one engine. Not thread-safe: one engine thread calls it."""

    def __init__(self, pool: BlockPool, *, token_budget: int, max_streams: int) -> None:
        self._pool = pool
        self._token_budget = token_budget
        self._max_streams = max_streams
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._streams.values()))

    def add(self, stream: Stream) -> None:
        """Admit a stream. The key (request and epoch) must be new."""
        assert stream.key not in self._streams, f"{stream.key} is running already"
        self._streams[stream.key] = stream

    def get(self, request_id: str, epoch: int) -> Stream | None:
        """The running attempt, if there is one."""
        return self._streams.get(f"{request_id}/{epoch}")

    def remove(self, stream: Stream) -> None:
        """Forget a stream and return its blocks."""
        self._streams.pop(stream.key, None)
        self._pool.free(stream.key)

    @property
    def has_work(self) -> bool:
        """Some stream could be given a token now."""
        return any(not stream.is_blocked and stream.num_missing > 0 for stream in self._streams.values())

    def plan(self) -> Plan:
        """Choose the segments of the next step: caught-up streams first, then prefill chunks in order of arrival.

        Every stream that can run gets at least its root before any prompt gets a chunk, so a long prompt never
        stalls a running stream. Blocks are taken here; when none are left the youngest stream gives up its own.
        """
        plan = Plan()
        left = self._token_budget
        ready = sorted((s for s in self._streams.values() if not s.is_blocked), key=lambda s: s.arrival)
        for stream in [s for s in ready if s.is_caught_up][: self._max_streams]:
            if left < 1 or stream in plan.preempted:
                continue
            if self._take(stream, stream.num_tokens, plan):
                root = Tree.root_only(int(stream.buffer[stream.num_tokens - 1]))
                plan.segments.append(Segment(stream, stream.num_computed, 1, True, root))
                left -= 1
        for stream in ready:
            if left < 1 or len(plan.segments) >= self._max_streams:
                break
            if stream in plan.preempted:
                break  # younger streams must not take the blocks it gave up
            if stream.is_caught_up or stream.num_missing == 0:
                continue
            num_rows = min(left, stream.num_missing)
            if not self._take(stream, stream.num_computed + num_rows, plan):
                break
            samples = not stream.prefill_only and num_rows == stream.num_missing
            plan.segments.append(Segment(stream, stream.num_computed, num_rows, samples))
            left -= num_rows
        plan.segments = [s for s in plan.segments if s.stream not in plan.preempted]
        return plan

    def attach(self, plan: Plan, segment: Segment, tree: Tree) -> None:
        """Give a caught-up segment draft nodes, cut to the budget, the stream's length and the free blocks.

        Draft nodes never preempt anybody: what does not fit is not drafted.
        """
        stream = segment.stream
        room = self._token_budget - plan.num_rows + 1
        # Node at depth d decides output token d + 1 at most: deeper nodes could never be emitted.
        tree = tree.trimmed(room, stream.num_allowed - 1)
        while len(tree) > 1 and not self._pool.try_extend(stream.key, stream.num_computed + len(tree)):
            tree = tree.trimmed(len(tree) // 2, stream.num_allowed - 1)
        segment.tree = tree
        segment.num_rows = len(tree)

    def _take(self, stream: Stream, num_tokens: int, plan: Plan) -> bool:
        """Blocks for `num_tokens`, preempting younger streams if needed; False, preempting nobody, if in vain."""
        if self._pool.try_extend(stream.key, num_tokens):
            return True
        younger = [s for s in self._streams.values() if s.arrival > stream.arrival and not s.is_blocked]
        victims = sorted((s for s in younger if self._pool.table(s.key)), key=lambda s: s.arrival)
        missing = self._pool.blocks_for(num_tokens) - len(self._pool.table(stream.key))
        if missing > self._pool.num_free + sum(len(self._pool.table(s.key)) for s in victims):
            return False
        while not self._pool.try_extend(stream.key, num_tokens):
            victim = victims.pop()
            self._pool.free(victim.key)
            victim.num_computed = 0
            victim.num_preempted += 1
            plan.preempted.append(victim)
        return True

    def check_integrity(self) -> None:
        """No block is owned by a stream that is gone, and no stream claims KV it has no blocks for."""
        self._pool.check_integrity()
        for owner in self._pool.owners():
            if owner not in self._streams:
                raise IntegrityError(f"{owner} is gone and still owns blocks")
        for stream in self._streams.values():
            held = len(self._pool.table(stream.key)) * self._pool.block_size
            if stream.num_computed > held:
                raise IntegrityError(f"{stream.key}: {stream.num_computed} computed, room for {held}")
