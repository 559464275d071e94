"""Committed tokens of many streams -> draft trees: a small model that runs ahead with the target's own noise.

At the position t behind a stream's end the children are the top `width` of log q_t + gumbel(key, t), the noise the
target will use for its own choice; the first child continues the spine. Alternatives cost this worker nothing, the
logits are there anyway. State lost (restart, eviction) is not an error: the stream is named unknown and opened again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor

from paceline.cluster import wire
from paceline.cluster.blocks import BlockPool
from paceline.cluster.config import model_folder
from paceline.cluster.metrics import Metrics
from paceline.cluster.speculation import prefix_hash
from paceline.cluster.types import DraftAsk, DraftOpen, Drafts, DraftTree, Message, Sampling
from paceline.kernels.decide import best
from paceline.workers.adjust import Changes, TokenCounts, apply_changes
from paceline.workers.base import Worker
from paceline.workers.model_batch import BatchBuilder
from paceline.workers.model_runner import ModelRunner, load_runner
from paceline.workers.sampling import CachedNoise, SamplingRows, perturb

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class DraftStream:
    """One stream as the draft worker knows it."""

    key: str
    request_id: str
    sampling: Sampling
    tokens: npt.NDArray[np.int32]
    cache_salt: str = ""
    num_computed: int = 0
    spine: list[int] = field(default_factory=list)
    """Tokens whose KV is in the pool behind `tokens`, from the last proposal."""
    last_used: int = 0
    hashes: list[bytes] = field(default_factory=list)
    """Of its leading full blocks, as far as they were needed."""
    num_shared: int = 0
    """Leading blocks that were adopted or offered to the prefix cache."""
    counts: TokenCounts | None = None
    """For bias, penalties and minimum length, if the stream has any."""

    def advance(self, new: tuple[int, ...]) -> None:
        """Take over committed tokens; KV of spine tokens that turned out right stays valid."""
        agree = 0
        while agree < min(len(self.spine), len(new)) and self.spine[agree] == new[agree]:
            agree += 1
        if self.num_computed == len(self.tokens):
            self.num_computed += agree
        self.spine = []
        self.tokens = np.concatenate([self.tokens, np.asarray(new, np.int32)])
        if self.counts is not None:
            self.counts.extend(new)


Level = tuple[list[int], list[float]]
"""Tokens of one depth, best first, and their chances."""


class DraftEngine:
    """One draft model, many streams. Not thread-safe."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        token_budget: int,
        metrics: Metrics | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self.runner = runner
        self._metrics = metrics or Metrics()
        self._prefix_cache = prefix_cache
        self.pool = BlockPool(runner.cache.num_blocks, runner.cache.block_size)
        self._token_budget = token_budget
        self._streams: dict[str, DraftStream] = {}
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
        stream.advance(new)
        return True

    def _is_known(self, token_ids: tuple[int, ...]) -> bool:
        """Whether this model has all these tokens; a target's vocabulary may be larger than its draft's."""
        return all(0 <= token < self.runner.vocab_size for token in token_ids)

    def close(self, key: str) -> None:
        """Forget a stream."""
        self._streams.pop(key, None)
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
        if not streams:
            return [], dropped
        return self._draft(streams, depth, width, floor), dropped

    def _reserve(self, stream: DraftStream, depth: int, busy: list[str]) -> bool:
        """Blocks for the stream and its spine, evicting whoever drafted longest ago."""
        wanted = len(stream.tokens) + depth
        if wanted > self.runner.max_context:
            return False
        if self._prefix_cache and not self.pool.table(stream.key):
            self._adopt(stream)
        while not self.pool.try_extend(stream.key, wanted):
            idle = [s for s in self._streams.values() if s.key not in busy and self.pool.table(s.key)]
            if not idle:
                self.close(stream.key)
                return False
            self.close(min(idle, key=lambda s: s.last_used).key)
        return True

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

    def _draft(self, streams: list[DraftStream], depth: int, width: int, floor: float) -> list[DraftTree]:
        levels: dict[str, list[Level]] = {stream.key: [] for stream in streams}
        chances = dict.fromkeys(levels, 1.0)
        active, logits = streams, self._catch_up(streams)
        for level in range(depth):
            logits = self._adjusted(logits, active, levels)
            ends = np.asarray([len(s.tokens) + level for s in active], np.int64)
            rows = SamplingRows.build([s.sampling for s in active], [1] * len(active), ends)
            for stream, ids, scores in zip(active, *self._children(logits, rows, width), strict=True):
                levels[stream.key].append((ids, scores))
                chances[stream.key] *= scores[0]
            active = [stream for stream in active if chances[stream.key] >= floor]
            if level + 1 == depth or not active:
                break
            builder = BatchBuilder(self.runner.cache)
            for stream in active:
                token = levels[stream.key][-1][0][0]
                builder.add_token(self.pool.table(stream.key), token, len(stream.tokens) + level)
                stream.spine.append(token)
            logits = self.runner.forward(builder.build()[0])
        return [self._tree(stream, levels[stream.key]) for stream in streams]

    def _catch_up(self, streams: list[DraftStream]) -> Tensor:
        """Compute all tokens not in the pool yet, in chunks; logits [B, V] behind each stream's last token."""
        while True:
            left = self._token_budget
            builder = BatchBuilder(self.runner.cache)
            is_last = True
            for stream in streams:
                # The last token always waits for the final round, which is the one that keeps logits.
                num = min(left, len(stream.tokens) - 1 - stream.num_computed)
                if num > 0:
                    ids = stream.tokens[stream.num_computed : stream.num_computed + num]
                    builder.add_chunk(self.pool.table(stream.key), ids, stream.num_computed, keep_last=False)
                    stream.num_computed += num
                    left -= num
                    is_last = False
            if is_last:
                break
            self.runner.forward(builder.build()[0])
        builder = BatchBuilder(self.runner.cache)
        for stream in streams:
            start = len(stream.tokens) - 1
            builder.add_token(self.pool.table(stream.key), int(stream.tokens[start]), start)
            stream.num_computed = len(stream.tokens)
            stream.spine = []
        logits = self.runner.forward(builder.build()[0])
        for stream in streams:
            self._share(stream)
        return logits

    @staticmethod
    def _adjusted(logits: Tensor, streams: list[DraftStream], levels: dict[str, list[Level]]) -> Tensor:
        """Bias and penalties as the target will apply them: along the path, here the spine."""
        found: list[Changes] = []
        starts: list[int] = []
        for index, stream in enumerate(streams):
            if stream.counts is not None:
                path = np.asarray([ids[0] for ids, _ in levels[stream.key]], np.int64)
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
    def _tree(stream: DraftStream, levels: list[Level]) -> DraftTree:
        """Spine first, then the alternatives level by level."""
        tokens = [ids[0] for ids, _ in levels]
        parents = list(range(-1, len(levels) - 1))
        scores = [chances[0] for _, chances in levels]
        for level, (ids, chances) in enumerate(levels):
            for token, chance in zip(ids[1:], chances[1:], strict=True):
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
        torch.set_num_threads(draft.threads)
        runner, reason = load_runner(
            model_folder(self.config.model.draft),
            kv_memory_mb=draft.kv_memory_mb,
            block_size=self.config.kv.block_size,
        )
        log.info(
            "model_ready",
            worker=self.member.me.worker_id,
            forward=runner.path,
            num_blocks=runner.cache.num_blocks,
            reason=reason,
        )
        self.metrics.forward.labels(runner.path).set(1)
        self._engine = DraftEngine(
            runner,
            token_budget=draft.token_budget,
            metrics=self.metrics,
            prefix_cache=self.config.kv.prefix_cache,
        )
        self._asks: list[tuple[wire.Peer, DraftAsk]] = []

    def handle(self, peer: wire.Peer, message: Message) -> None:
        if isinstance(message, DraftAsk):
            self._asks.append((peer, message))
        else:
            self.soon(lambda: peer.close(f"a draft worker has no use for {type(message).__name__}"))

    def peer_lost(self, peer: wire.Peer) -> None:
        self._engine.close_all(_prefix(peer))
        self._asks = [(p, ask) for p, ask in self._asks if p is not peer]

    def has_work(self) -> bool:
        return bool(self._asks)

    def step(self) -> bool:
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
        trees, dropped = self._engine.propose(keys, depth, width, floor) if keys else ([], [])
        by_stream = {tree.request_id: tree for tree in trees}
        for peer, ask in latest.items():
            members = wanted[peer]
            mine = tuple(by_stream[name] for name in members.values() if name in by_stream)
            lost = unknown[peer] | {members[key] for key in dropped if key in members}
            if mine or lost:
                peer.send_threadsafe(Drafts(ask.step, self._engine.runner.version, mine, tuple(sorted(lost))))
        self.metrics.steps.inc()
        self.metrics.step_seconds.observe(time.perf_counter() - started)
        return True

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
