"""Waiting and running streams -> the segments of one step: tokens computed catch up with tokens wanted.

There is no prefill phase and no decode phase. Every stream has tokens it wants in the KV pool and a count of
those that are. A step gives each stream some of its missing tokens. A stream that misses only its last token is
"caught up": its step computes that token (the root) and, behind it, draft nodes to verify.

A stream that has nothing in the pool yet, or nothing any more, first adopts what the prefix cache holds of it.
Positions of a stream, half-open, with B = block size:

    [0, num_shared * B)           findable by others, or adopted from them: never written again
    [.., num_computed)            computed and committed, its own
    [num_computed, num_tokens)    wanted; draft nodes use these slots and those behind them

    num_shared * B <= num_computed <= num_tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

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
    waits_since: float | None = None
    """From when on it could run; None once a step has computed for it."""
    queued_s: float = 0.0
    """How long that was."""
    is_draft_banned: bool = False
    """Its last tree came back with NaN: the next step is plain."""
    hashes: list[bytes] = field(default_factory=list)
    """Of its leading full blocks, as far as they were needed."""
    num_shared: int = 0
    """Leading blocks that were adopted or offered to the prefix cache."""
    rank: tuple[int, int] = field(init=False)
    """(priority, arrival): the smaller runs earlier and is preempted later."""

    def __post_init__(self) -> None:
        self.rank = (self.request.priority, self.arrival)

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

    def restart(self) -> None:
        """Its blocks were given up: compute from the first token again."""
        self.num_computed = 0
        self.num_shared = 0


_rank = attrgetter("rank")


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
    """One step. Caught-up segments, then prefill chunks, then caught-up ones that made way for a chunk; each in order
    of rank."""

    segments: list[Segment] = field(default_factory=list)
    preempted: list[Stream] = field(default_factory=list)
    num_queried: int = 0
    """Tokens of the streams that looked for their prefix in the cache."""
    num_adopted: int = 0
    """Tokens they found."""

    @property
    def caught_up(self) -> list[Segment]:
        """Segments that can carry draft nodes."""
        return [segment for segment in self.segments if segment.tree is not None]

    @property
    def num_rows(self) -> int:
        return sum(segment.num_rows for segment in self.segments)


class Scheduler:
    """Owns the streams of one engine. Not thread-safe: one engine thread calls it."""

    def __init__(
        self, pool: BlockPool, *, token_budget: int, max_streams: int, cache_version: str | None = None
    ) -> None:
        """`cache_version` names what KV depends on besides the tokens: the weights. None: no prefix cache."""
        self._pool = pool
        self._token_budget = token_budget
        self._max_streams = max_streams
        self._cache_version = cache_version
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._streams.values()))

    def add(self, stream: Stream) -> None:
        """Admit a stream. The key (request and epoch) must be new."""
        assert stream.key not in self._streams, f"{stream.key} is running already"
        self._streams[stream.key] = stream

    def remove(self, stream: Stream) -> None:
        """Forget a stream and return its blocks."""
        self._streams.pop(stream.key, None)
        self._pool.free(stream.key)

    @property
    def has_work(self) -> bool:
        """Some stream could be given a token now."""
        return any(not stream.is_blocked and stream.num_missing > 0 for stream in self._streams.values())

    def plan(self) -> Plan:
        """Choose the segments of the next step: caught-up streams first, then prefill chunks, in order of rank.

        Every stream that can run gets at least its root before any prompt gets a chunk, so a long prompt never
        stalls a running stream. Blocks are taken here; when none are left the last stream by rank gives up its own.
        """
        plan = Plan()
        ready = sorted((s for s in self._streams.values() if not s.is_blocked), key=_rank)
        roots = [s for s in ready if s.is_caught_up]
        num_first = self._num_before_chunks(roots, ready)
        left = self._add_roots(plan, roots[:num_first], self._token_budget)
        left = self._add_chunks(plan, ready, left)
        if not plan.preempted:  # else the others must not take the blocks that were given up
            self._add_roots(plan, roots[num_first:], left)
        plan.segments = [s for s in plan.segments if s.stream not in plan.preempted]
        return plan

    def _num_before_chunks(self, roots: list[Stream], ready: list[Stream]) -> int:
        """How many caught-up streams come before any chunk: as many as the limits allow, or one less.

        One less if a prompt of better rank than the last of them would get nothing: prompts computed elsewhere arrive
        here caught up, and a flow of those, each younger than the last, could keep it waiting for ever.
        """
        limit = min(self._max_streams, self._token_budget)
        if len(roots) < limit:
            return len(roots)
        waiting = next((s for s in ready if s.num_missing > 0 and not s.is_caught_up), None)
        return limit - 1 if waiting is not None and waiting.rank < roots[limit - 1].rank else limit

    def _add_roots(self, plan: Plan, streams: list[Stream], left: int) -> int:
        """Segments of caught-up streams; the rest of the budget of `left` rows."""
        for stream in streams:
            if left < 1 or len(plan.segments) >= self._max_streams:
                break
            if stream not in plan.preempted and self._take(stream, stream.num_tokens, plan):
                root = Tree.root_only(int(stream.buffer[stream.num_tokens - 1]))
                plan.segments.append(Segment(stream, stream.num_computed, 1, True, root))
                left -= 1
        return left

    def _add_chunks(self, plan: Plan, ready: list[Stream], left: int) -> int:
        """Segments of the streams that are not caught up; the rest of the budget of `left` rows."""
        for stream in ready:
            if left < 1 or len(plan.segments) >= self._max_streams:
                break
            if stream in plan.preempted:
                break  # those behind it must not take the blocks it gave up
            if stream.is_caught_up or stream.num_missing == 0:
                continue
            is_new = self._adopt(stream)
            num_rows = min(left, stream.num_missing)
            if not self._take(stream, stream.num_computed + num_rows, plan):
                if is_new:
                    self._pool.shrink(stream.key, 0)
                    stream.restart()
                break
            if is_new:
                plan.num_queried += stream.num_tokens
                plan.num_adopted += stream.num_computed
            samples = not stream.prefill_only and num_rows == stream.num_missing
            plan.segments.append(Segment(stream, stream.num_computed, num_rows, samples))
            left -= num_rows
        return left

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
        """Blocks for `num_tokens`, preempting streams behind it if needed; False, preempting nobody, if in vain."""
        if self._pool.try_extend(stream.key, num_tokens):
            return True
        behind = [s for s in self._streams.values() if s.rank > stream.rank and not s.is_blocked]
        victims = sorted((s for s in behind if self._pool.table(s.key)), key=_rank)
        missing = self._pool.blocks_for(num_tokens) - len(self._pool.table(stream.key))
        if missing > self._pool.num_free + self._pool.num_reclaimable(s.key for s in victims):
            return False
        while not self._pool.try_extend(stream.key, num_tokens):
            victim = victims.pop()
            self._pool.free(victim.key)
            victim.restart()
            victim.num_preempted += 1
            plan.preempted.append(victim)
        return True

    # -- prefix cache ------------------------------------------------------------------------------------

    def _adopt(self, stream: Stream) -> bool:
        """Let a stream without blocks begin with what the cache holds of it; whether it looked there.

        The last token is left out: somebody has to compute its logits. Likewise all of a prompt whose own
        log-probabilities are wanted.
        """
        if self._cache_version is None or self._pool.table(stream.key) or stream.request.needs_prompt_logits:
            return False
        num_blocks = (stream.num_tokens - 1) // self._pool.block_size
        stream.num_computed = self._pool.adopt(stream.key, self._hashes(stream, num_blocks)[:num_blocks])
        stream.num_shared = stream.num_computed // self._pool.block_size
        return True

    def num_cached(self, stream: Stream) -> int:
        """Tokens of a stream without blocks that the cache holds now."""
        if self._cache_version is None or stream.request.needs_prompt_logits:
            return 0
        num_blocks = (stream.num_tokens - 1) // self._pool.block_size
        return self._pool.peek(self._hashes(stream, num_blocks)[:num_blocks]) * self._pool.block_size

    def reserve(self, stream: Stream, num_tokens: int) -> bool:
        """Blocks for a blocked stream's first tokens, those the cache holds among them; False, taking none, if full.

        `num_computed` says where its KV has to come from elsewhere.
        """
        assert stream.is_blocked
        self._adopt(stream)
        if self._pool.try_extend(stream.key, num_tokens):
            return True
        self._pool.free(stream.key)
        stream.restart()
        return False

    def share(self, stream: Stream) -> None:
        """Offer the blocks that the stream has completed since to the prefix cache. Call it after each commit.

        Only what is computed and committed counts, so no draft node is ever in an offered block.
        """
        size = self._pool.block_size
        if self._cache_version is None or stream.num_computed < (stream.num_shared + 1) * size:
            return
        num_full = stream.num_computed // size
        while stream.num_shared < num_full:
            index = stream.num_shared
            self._pool.register(stream.key, index, self._hashes(stream, index + 1)[index])
            stream.num_shared += 1

    def _hashes(self, stream: Stream, num_blocks: int) -> list[bytes]:
        """The stream's hashes, of `num_blocks` leading blocks at least. Each is computed once in its life."""
        if len(stream.hashes) < num_blocks:
            salt = f"{self._cache_version}\0{stream.request.cache_salt}"
            self._pool.extend_hashes(stream.hashes, num_blocks, stream.buffer, salt)
        return stream.hashes

    # -- integrity ---------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """No block is owned by a stream that is gone; no stream claims KV it has no blocks for, or shares any of that."""
        self._pool.check_integrity()
        for owner in self._pool.owners():
            if owner not in self._streams:
                raise IntegrityError(f"{owner} is gone and still owns blocks")
        for stream in self._streams.values():
            held = len(self._pool.table(stream.key)) * self._pool.block_size
            if stream.num_computed > held:
                raise IntegrityError(f"{stream.key}: {stream.num_computed} computed, room for {held}")
            if stream.num_shared * self._pool.block_size > stream.num_computed:
                raise IntegrityError(
                    f"{stream.key}: {stream.num_shared} blocks shared, {stream.num_computed} tokens computed"
                )
