"""Committed tokens of many streams -> draft trees: a small model that runs ahead with the target's own noise.

At the position t behind a stream's end the children are the top `width` of log q_t + gumbel(key, t), the noise the
target will use for its own choice; the first child continues the spine. Alternatives cost this worker nothing, the
logits are there anyway. State lost (restart, eviction) is not an error: the stream is named unknown and opened again.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import structlog
from torch import Tensor

from paceline.cluster import failpoints, wire
from paceline.cluster.blocks import BlockPool
from paceline.cluster.metrics import Metrics
from paceline.cluster.speculation import SpareCore, prefix_hash
from paceline.cluster.types import DraftAsk, DraftOpen, Drafts, DraftTree, Message, Sampling
from paceline.kernels.decide import best
from paceline.workers.adjust import Changes, TokenCounts, apply_changes
from paceline.workers.base import Worker
from paceline.workers.model_batch import BatchBuilder
from paceline.workers.model_runner import ModelRunner
from paceline.workers.sampling import CachedNoise, SamplingRows, perturb

log = structlog.get_logger(__name__)

_AHEAD_FLOOR = 0.1
"""Nothing is drafted ahead whose use is less likely than this."""
_WITH_FIRST_LEVEL = 8
"""So many tokens that are not in the pool yet are cheaper beside the last one than in a forward of their own."""

Level = tuple[list[int], list[float]]
"""Tokens of one depth, best first, and their chances."""


@dataclass(slots=True, eq=False)
class DraftStream:
    """One stream as the draft worker knows it."""

    key: str
    request_id: str
    sampling: Sampling
    tokens: npt.NDArray[np.int32]
    cache_salt: str = ""
    num_computed: int = 0
    """Leading positions whose KV is in the pool, those of the spine included."""
    levels: list[Level] = field(default_factory=list)
    """What is drafted behind `tokens`; the first token of each level is the spine, all but its last have KV."""
    num_ahead: int = 0
    """How many of the last levels nobody has asked for yet."""
    asked: tuple[int, int, float] = (0, 0, 0.0)
    """Depth, width and floor of the last proposal."""
    last_used: int = 0
    hashes: list[bytes] = field(default_factory=list)
    """Of its leading full blocks, as far as they were needed."""
    num_shared: int = 0
    """Leading blocks that were adopted or offered to the prefix cache."""
    counts: TokenCounts | None = None
    """For bias, penalties and minimum length, if the stream has any."""

    @property
    def spine(self) -> list[int]:
        return [ids[0] for ids, _ in self.levels]

    def advance(self, new: tuple[int, ...]) -> bool:
        """Take over committed tokens; KV, and levels behind them, that turned out right stay valid.

        Returns whether the spine foretold all of them.
        """
        agree = 0
        while agree < min(len(self.levels), len(new)) and self.levels[agree][0][0] == new[agree]:
            agree += 1
        foretold = agree == len(new)
        if not foretold:
            self.num_computed = min(self.num_computed, len(self.tokens) + agree)
        self.levels = self.levels[agree:] if foretold else []
        self.num_ahead = min(self.num_ahead, len(self.levels))
        self.tokens = np.concatenate([self.tokens, np.asarray(new, np.int32)])
        if self.counts is not None:
            self.counts.extend(new)
        return foretold

    def forget_levels(self, keep: int = 0) -> None:
        """Drop the levels behind the first `keep`."""
        self.num_ahead = max(0, self.num_ahead - max(0, len(self.levels) - keep))
        self.levels = self.levels[:keep]
        self.num_computed = min(self.num_computed, len(self.tokens) + max(0, keep - 1))

    def num_levels(self, depth: int, floor: float) -> int | None:
        """How many levels a proposal has: up to `depth`, or to where the spine's chance falls below `floor`.

        None if they are not all there yet.
        """
        chance = 1.0
        for level, (_, scores) in enumerate(self.levels[:depth], 1):
            chance *= scores[0]
            if not chance >= floor or level == depth:  # a NaN ends it as well
                return level
        return None


class DraftEngine:
    """One draft model, many streams. Not thread-safe."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        token_budget: int,
        metrics: Metrics | None = None,
        prefix_cache: bool = True,
        keep_levels: bool = True,
    ) -> None:
        """`keep_levels` False is the plain twin: each proposal is drafted from its first level on."""
        self.runner = runner
        self._metrics = metrics or Metrics()
        self._keep_levels = keep_levels
        self._prefix_cache = prefix_cache
        self.pool = BlockPool(runner.cache.num_blocks, runner.cache.block_size)
        self._token_budget = token_budget
        self._streams: dict[str, DraftStream] = {}
        self._ahead: dict[str, DraftStream] = {}
        """Those whose last proposal is with the target now, as long as there is something to draft ahead for them."""
        self._clock = 0
        self._noise = CachedNoise()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, key: str, message: DraftOpen) -> None:
        """Start over with all tokens of a stream."""
        self.close(key)
        if message.token_ids and self._is_known(message.token_ids):
            tokens = np.asarray(message.token_ids, np.int32)
            stream = DraftStream(key, message.request_id, message.sampling, tokens, message.cache_salt)
            if message.sampling.is_adjusted:
                prompt = message.token_ids[: message.num_prompt]
                stream.counts = TokenCounts(
                    message.sampling, prompt, message.stop_ids, self.runner.vocab_size
                )
                stream.counts.extend(message.token_ids[message.num_prompt :])
            self._streams[key] = stream

    def advance(self, key: str, base_len: int, known_hash: int, new: tuple[int, ...]) -> bool:
        """Append committed tokens; False if this side does not hold the stream up to `base_len`, or lacks a token."""
        stream = self._streams.get(key)
        if stream is None or len(stream.tokens) != base_len or prefix_hash(stream.tokens) != known_hash:
            self.close(key)
            return False
        if not self._is_known(new):
            self.close(key)
            return False
        self._ahead.pop(key, None)
        num_ahead = stream.num_ahead
        foretold = stream.advance(new)
        if not self._keep_levels:
            stream.forget_levels()
        if num_ahead:
            self._metrics.draft_ahead.labels("hit" if stream.num_ahead else "miss").inc()
            if not foretold:
                self._metrics.draft_levels.labels("wasted").inc(num_ahead)
        return True

    def _is_known(self, token_ids: tuple[int, ...]) -> bool:
        """Whether this model has all these tokens; a target's vocabulary may be larger than its draft's."""
        return all(0 <= token < self.runner.vocab_size for token in token_ids)

    def close(self, key: str) -> None:
        """Forget a stream."""
        stream = self._streams.pop(key, None)
        if stream is not None and stream.num_ahead:
            self._metrics.draft_levels.labels("wasted").inc(stream.num_ahead)
        self._ahead.pop(key, None)
        self.pool.free(key)

    def close_all(self, prefix: str) -> None:
        """Forget all streams of a peer."""
        for key in [k for k in self._streams if k.startswith(prefix)]:
            self.close(key)

    def propose(
        self, keys: list[str], depth: int, width: int, floor: float = 0.0
    ) -> tuple[list[DraftTree], list[str]]:
        """Trees behind the ends of these streams, and those whose state had to be dropped.

        A stream's chain ends at `depth`, or where the chance that all of it is accepted falls below `floor`.
        """
        self._clock += 1
        if self.runner.cache.books is not self.pool:  # another engine wrote here: nothing is where it was
            assert self.runner.cache.books is None or self.pool.num_used == 0, (
                "another engine wrote into our blocks"
            )
            self.pool.forget_all()
            self.runner.cache.books = self.pool
        streams: list[DraftStream] = []
        dropped: list[str] = []
        for key in keys:
            stream = self._streams.get(key)
            if stream is None or not self._reserve(stream, depth, keys):
                dropped.append(key)
            else:
                stream.last_used = self._clock
                streams.append(stream)
        return self._draft(streams, depth, width, floor), dropped

    # -- drafting ahead ----------------------------------------------------------------------------------

    @property
    def has_ahead(self) -> bool:
        """Whether `draft_ahead` may find something to do."""
        return bool(self._ahead)

    def draft_ahead(self) -> int:
        """Draft one level more behind proposals that nobody has answered yet: that of how many streams.

        While the target verifies a tree, its likeliest outcome is that all of the spine stands. What is drafted
        behind that is the next proposal, or its beginning, if the target agrees; else it is forgotten.
        Takes no block that a stream holds.
        """
        if self.runner.cache.books is not self.pool:
            self._ahead.clear()
        found = [stream for stream in self._ahead.values() if self._goes_on(stream)][: self._token_budget]
        self._ahead = {stream.key: stream for stream in found}
        if found:
            self._extend(found, max(stream.asked[1] for stream in found))
            for stream in found:
                stream.num_ahead += 1
            self._metrics.draft_levels.labels("ahead").inc(len(found))
        return len(found)

    def _goes_on(self, stream: DraftStream) -> bool:
        """Whether one level more may be of use, and has room."""
        depth, _, _ = stream.asked
        chance = math.prod(scores[0] for _, scores in stream.levels)
        end = len(stream.tokens) + len(stream.levels)
        return (
            0
            < len(stream.levels)
            <= 2 * depth  # a whole proposal behind a whole spine and the target's own token
            and chance >= _AHEAD_FLOOR
            and end <= self.runner.max_context
            and self.pool.try_extend(stream.key, end)
        )

    # -- room --------------------------------------------------------------------------------------------

    def _reserve(self, stream: DraftStream, depth: int, busy: list[str]) -> bool:
        """Blocks for the stream and its spine, taking what was drafted ahead, then whoever drafted longest ago."""
        wanted = len(stream.tokens) + depth
        if wanted > self.runner.max_context:
            return False
        if self._prefix_cache and not self.pool.table(stream.key):
            self._adopt(stream)
        if self.pool.try_extend(stream.key, wanted):
            return True
        for other in self._streams.values():
            if other is not stream:
                self._give_up_ahead(other, depth)
        while not self.pool.try_extend(stream.key, wanted):
            idle = [s for s in self._streams.values() if s.key not in busy and self.pool.table(s.key)]
            if not idle:
                self.close(stream.key)
                return False
            self.close(min(idle, key=lambda s: s.last_used).key)
        return True

    def _give_up_ahead(self, stream: DraftStream, depth: int) -> None:
        """Keep no more than a proposal of the depth last asked for, or of this one."""
        keep = max(depth, stream.asked[0])
        wasted = min(stream.num_ahead, max(0, len(stream.levels) - keep))
        self._metrics.draft_levels.labels("wasted").inc(wasted)
        stream.forget_levels(min(keep, len(stream.levels)))
        self.pool.shrink(stream.key, len(stream.tokens) + keep)
        self._ahead.pop(stream.key, None)

    def _adopt(self, stream: DraftStream) -> None:
        """Begin with the longest known prefix; the last token is always computed, for its logits."""
        hashes = self._hashes(stream, (len(stream.tokens) - 1) // self.pool.block_size)
        stream.num_computed = self.pool.adopt(stream.key, hashes)
        stream.num_shared = stream.num_computed // self.pool.block_size
        self._metrics.prefix_query_tokens.inc(len(stream.tokens))
        self._metrics.prefix_hit_tokens.inc(stream.num_computed)

    def _share(self, stream: DraftStream) -> None:
        """Offer completed blocks to the prefix cache. The last token's waits: it is computed again when asked again."""
        num_full = (len(stream.tokens) - 1) // self.pool.block_size
        if self._prefix_cache and stream.num_shared < num_full:
            hashes = self._hashes(stream, num_full)
            for index in range(stream.num_shared, num_full):
                self.pool.register(stream.key, index, hashes[index])
            stream.num_shared = num_full

    def _hashes(self, stream: DraftStream, num_blocks: int) -> list[bytes]:
        salt = f"{self.runner.version}\0{stream.cache_salt}"
        self.pool.extend_hashes(stream.hashes, num_blocks, stream.tokens, salt)
        return stream.hashes[:num_blocks]

    # -- levels ------------------------------------------------------------------------------------------

    def _draft(self, streams: list[DraftStream], depth: int, width: int, floor: float) -> list[DraftTree]:
        for stream in streams:
            if any(len(ids) < width for ids, _ in stream.levels):
                stream.forget_levels()
            stream.asked = (depth, width, floor)
        self._catch_up([stream for stream in streams if not stream.levels])
        active = [stream for stream in streams if stream.num_levels(depth, floor) is None]
        while active:
            self._extend(active, width)
            self._metrics.draft_levels.labels("asked").inc(len(active))
            active = [stream for stream in active if stream.num_levels(depth, floor) is None]
        trees: list[DraftTree] = []
        for stream in streams:
            num = stream.num_levels(depth, floor)
            assert num is not None
            trees.append(self._tree(stream, stream.levels[:num], width))
            stream.num_ahead = max(0, len(stream.levels) - num)
            self._ahead[stream.key] = stream
            self._share(stream)
        return trees

    def _catch_up(self, streams: list[DraftStream]) -> None:
        """Compute tokens that are not in the pool yet, in chunks; the last few wait for the first level's forward."""
        while True:
            left = self._token_budget
            builder = BatchBuilder(self.runner.cache)
            for stream in streams:
                missing = len(stream.tokens) - 1 - stream.num_computed
                num = min(left, missing) if missing > _WITH_FIRST_LEVEL else 0
                if num > 0:
                    ids = stream.tokens[stream.num_computed : stream.num_computed + num]
                    builder.add_chunk(self.pool.table(stream.key), ids, stream.num_computed, keep_last=False)
                    stream.num_computed += num
                    left -= num
            if left == self._token_budget:
                return
            self.runner.forward(builder.build()[0])

    def _extend(self, streams: list[DraftStream], width: int) -> None:
        """One level more for each: behind its spine, or behind its last token if it has none."""
        builder = BatchBuilder(self.runner.cache)
        for stream in streams:
            table = self.pool.table(stream.key)
            if stream.levels:
                (token, *_), _ = stream.levels[-1]
                builder.add_token(table, token, len(stream.tokens) + len(stream.levels) - 1)
            else:
                start = min(stream.num_computed, len(stream.tokens) - 1)
                builder.add_chunk(table, stream.tokens[start:], start, keep_last=True)
        logits = self._adjusted(self.runner.forward(builder.build()[0]), streams)
        ends = np.asarray([len(s.tokens) + len(s.levels) for s in streams], np.int64)
        rows = SamplingRows.build([s.sampling for s in streams], [1] * len(streams), ends)
        for stream, ids, scores in zip(streams, *self._children(logits, rows, width), strict=True):
            stream.num_computed = len(stream.tokens) + len(stream.levels)
            stream.levels.append((ids, scores))

    @staticmethod
    def _adjusted(logits: Tensor, streams: list[DraftStream]) -> Tensor:
        """Bias and penalties as the target will apply them: along the path, here the spine."""
        found: list[Changes] = []
        starts: list[int] = []
        for index, stream in enumerate(streams):
            if stream.counts is not None:
                path = np.asarray(stream.spine, np.int64)
                found.append(
                    stream.counts.changes(np.zeros(len(path), np.int64), path, np.asarray([len(path)]))
                )
                starts.append(index)
        return apply_changes(logits, found, starts)

    def _children(
        self, logits: Tensor, rows: SamplingRows, width: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """[B][width] tokens, best first, and what speaks for each: softmax of the scores, 0 for a filtered one.

        With noise it is not the draft's probability: a token that this noise puts far ahead will be the target's as
        well, however improbable it is.
        """
        ids, chances = best(perturb(logits, rows, self._noise), width)
        return ids.tolist(), chances.tolist()

    @staticmethod
    def _tree(stream: DraftStream, levels: list[Level], width: int) -> DraftTree:
        """Spine first, then the alternatives level by level."""
        tokens = [ids[0] for ids, _ in levels]
        parents = list(range(-1, len(levels) - 1))
        scores = [chances[0] for _, chances in levels]
        for level, (ids, chances) in enumerate(levels):
            for token, chance in zip(ids[1:width], chances[1:width], strict=True):
                if chance > 0:
                    tokens.append(token)
                    parents.append(level - 1)
                    scores.append(chance)
        return DraftTree(
            stream.request_id,
            len(stream.tokens),
            prefix_hash(stream.tokens),
            tuple(tokens),
            tuple(parents),
            tuple(scores),
        )


class DraftWorker(Worker):
    """Answers every decode worker that asks; all asks waiting at once share the forwards."""

    role = "draft"
    _engine: DraftEngine

    def load(self) -> None:
        draft = self.config.draft
        runner = self.load_model(self.config.model.draft, draft, few_rows=True)
        self._engine = DraftEngine(
            runner,
            token_budget=draft.token_budget,
            metrics=self.metrics,
            prefix_cache=self.config.kv.prefix_cache,
        )
        self._asks: list[tuple[wire.Peer, DraftAsk]] = []
        self._spare_core = SpareCore()

    def handle(self, peer: wire.Peer, message: Message) -> None:
        if isinstance(message, DraftAsk):
            self._asks.append((peer, message))
        else:
            self.soon(lambda: peer.close(f"a draft worker has no use for {type(message).__name__}"))

    def peer_lost(self, peer: wire.Peer) -> None:
        self._engine.close_all(_prefix(peer))
        self._asks = [(p, ask) for p, ask in self._asks if p is not peer]

    def has_work(self) -> bool:
        return bool(self._asks) or (self._engine.has_ahead and self._spare_core.may_work(time.monotonic()))

    def step(self) -> bool:
        """Answer who asks; while nobody does, draft ahead by one level and look again."""
        if self._asks:
            self._answer()
            return True
        wall, cpu = time.perf_counter(), time.thread_time()
        num = self._engine.draft_ahead()
        self._spare_core.worked(time.monotonic(), time.perf_counter() - wall, time.thread_time() - cpu)
        return num > 0

    def _answer(self) -> None:
        """Apply everything that was asked, draft once for all, answer each peer's newest ask."""
        started = time.perf_counter()
        asks, self._asks = self._asks, []
        latest: dict[wire.Peer, DraftAsk] = {}
        wanted: dict[wire.Peer, dict[str, str]] = {}
        unknown: dict[wire.Peer, set[str]] = {}
        for peer, ask in asks:
            latest[peer] = ask
            self._apply(peer, ask, wanted.setdefault(peer, {}), unknown.setdefault(peer, set()))
        keys = [key for members in wanted.values() for key in members]
        depth = min(16, max(1, max((ask.depth for ask in latest.values()), default=1)))
        width = min(8, max(1, max((ask.width for ask in latest.values()), default=1)))
        floor = min((ask.floor for ask in latest.values()), default=0.0)
        if not self._spare_core.may_work(time.monotonic()):
            self.metrics.draft_ahead.labels("paused").inc(len(keys))
        trees, dropped = self._engine.propose(keys, depth, width, floor) if keys else ([], [])
        if failpoints.enabled:
            failpoints.hit("mid_step", *(tree.request_id for tree in trees))
        by_stream = {tree.request_id: tree for tree in trees}
        for peer, ask in latest.items():
            members = wanted[peer]
            mine = tuple(by_stream[name] for name in members.values() if name in by_stream)
            lost = unknown[peer] | {members[key] for key in dropped if key in members}
            if mine or lost:
                peer.send_threadsafe(Drafts(ask.step, self._engine.runner.version, mine, tuple(sorted(lost))))
        self.metrics.steps.inc()
        self.metrics.step_seconds.observe(time.perf_counter() - started)
        if failpoints.enabled:
            failpoints.hit("mid_stream", *by_stream)

    def _apply(self, peer: wire.Peer, ask: DraftAsk, wanted: dict[str, str], unknown: set[str]) -> None:
        prefix = _prefix(peer)
        for opened in ask.opens:
            self._engine.open(prefix + opened.request_id, opened)
            wanted[prefix + opened.request_id] = opened.request_id
            unknown.discard(opened.request_id)
        for advance in ask.advances:
            key = prefix + advance.request_id
            if self._engine.advance(key, advance.base_len, advance.prefix_hash, advance.token_ids):
                wanted[key] = advance.request_id
            else:
                wanted.pop(key, None)
                unknown.add(advance.request_id)
        for closed in ask.closes:
            self._engine.close(prefix + closed)
            wanted.pop(prefix + closed, None)
            unknown.discard(closed)

    def num_streams(self) -> int:
        return len(self._engine) if self.state != "starting" else 0

    def blocks(self) -> tuple[int, int]:
        return (
            (self._engine.pool.num_used, self._engine.pool.num_free) if self.state != "starting" else (0, 0)
        )

    def version(self) -> str:
        return self._engine.runner.version if self.state != "starting" else ""


def _prefix(peer: wire.Peer) -> str:
    assert peer.identity is not None
    return f"{peer.identity.incarnation}/"
