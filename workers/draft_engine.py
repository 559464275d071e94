"""Committed tokens of many streams -> draft trees: a small model that runs ahead with the target's own noise.

At the position t behind a stream's end the children are the top `width` of log q_t + gumbel(key, t), the noise the
target will use for its own choice; the first child continues the spine. Alternatives cost this worker nothing, the
logits are there anyway. State lost (restart, eviction) is not an error: the stream is named unknown and opened again.

Streams may draft with different weights of one shape. All share one pool of KV, and none finds another version's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.cluster.blocks import BlockPool
from paceline.cluster.metrics import Metrics
from paceline.cluster.speculation import prefix_hash
from paceline.cluster.types import DraftOpen, DraftTree
from paceline.kernels.decide import best
from paceline.workers.adjust import Changes, TokenCounts, apply_changes
from paceline.workers.device_step import children_of
from paceline.workers.draft_spine import extend_spines, is_plain
from paceline.workers.draft_stream import DraftStream, Level
from paceline.workers.model_batch import BatchBuilder
from paceline.workers.model_runner import ModelRunner
from paceline.workers.sampling import CachedNoise, SamplingRows, perturb

_AHEAD_FLOOR = 0.1
"""Nothing is drafted ahead whose use is less likely than this."""
_WITH_FIRST_LEVEL = 8
"""So many tokens that are not in the pool yet are cheaper beside the last one than in a forward of their own."""

Choice = Callable[[str, str, str], ModelRunner]
"""Request id, tenant and domain of a stream -> the weights that draft for it."""


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
        repeats: bool = True,
    ) -> None:
        """`keep_levels` False is the plain twin: each proposal is drafted from its first level on.

        `repeats` False is that of `extend_spines`: a batch is built for each level.
        """
        self.runner = runner
        """What drafts for streams of which nothing else is said."""
        self._cache = runner.cache
        self._choose: Choice = lambda request_id, tenant, domain: self.runner
        self._metrics = metrics or Metrics()
        self._keep_levels = keep_levels
        self._repeats = repeats
        self._prefix_cache = prefix_cache
        self.pool = BlockPool(runner.cache.num_blocks, runner.cache.block_size)
        self._token_budget = token_budget
        self._streams: dict[str, DraftStream] = {}
        self._ahead: dict[str, DraftStream] = {}
        """Those whose last proposal is with the target now, as long as there is something to draft ahead for them."""
        self._clock = 0
        self._noise = CachedNoise()
        if self._cache.books is None:  # nobody's text is in it yet
            runner.warm_up_levels()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, key: str, message: DraftOpen) -> None:
        """Start over with all tokens of a stream."""
        self.close(key)
        if message.token_ids and self._is_known(message.token_ids):
            stream = DraftStream(
                key,
                message.request_id,
                message.sampling,
                np.asarray(message.token_ids, np.int32),
                self._choose(message.request_id, message.tenant, message.domain),
                message.cache_salt,
                message.tenant,
                message.domain,
            )
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

    def num_missing(self, key: str) -> int:
        """Tokens of a stream to compute before its first proposal, as far as is known now."""
        stream = self._streams.get(key)
        return 0 if stream is None else max(0, len(stream.tokens) - 1 - stream.num_computed)

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
        self, keys: list[str], depth: int, width: int, floor: float = 0.0, others: Collection[str] = ()
    ) -> tuple[list[DraftTree], list[str]]:
        """Trees behind the ends of these streams, and those whose state had to be dropped.

        A stream's chain ends at `depth`, or where the chance that all of it is accepted falls below `floor`. Neither
        these streams nor `others` give up their state for one of these.
        """
        self._clock += 1
        self._take_pool()
        streams: list[DraftStream] = []
        dropped: list[str] = []
        busy = {*keys, *others}
        for key in keys:
            stream = self._streams.get(key)
            if stream is None or not self._reserve(stream, depth, busy):
                dropped.append(key)
            else:
                stream.last_used = self._clock
                streams.append(stream)
        return self._draft(streams, depth, width, floor), dropped

    def _take_pool(self) -> None:
        if self._cache.books is not self.pool:  # another engine wrote here: nothing is where it was
            assert self._cache.books is None or self.pool.num_used == 0, (
                "another engine wrote into our blocks"
            )
            self.pool.forget_all()
            self._cache.books = self.pool

    # -- which weights -----------------------------------------------------------------------------------

    def switch(self, live: ModelRunner, choose: Choice) -> int:
        """Between two proposals: these weights draft from now on, for running streams too; how many changed theirs.

        A stream's KV stays: computing all of it again would keep everybody waiting, and costs more than it brings.
        """
        live.take_graphs(self.runner)
        self.runner, self._choose = live, choose
        num = 0
        for stream in self._streams.values():
            weights = choose(*stream.origin)
            if weights is not stream.weights:
                self._move(stream, weights)
                num += 1
        return num

    def attach(self, weights: ModelRunner) -> None:
        """Let weights of the same shape draft in this engine's pool; from here on `switch` may name them."""
        ours, theirs = self._cache.layout, weights.cache.layout
        assert msgspec.structs.replace(theirs, model_version=ours.model_version) == ours, (
            "KV of another shape"
        )
        weights.share(self._cache)

    def _move(self, stream: DraftStream, weights: ModelRunner) -> None:
        stream.weights = weights
        stream.is_mixed = bool(self.pool.table(stream.key))
        stream.hashes = []
        self._metrics.draft_levels.labels("wasted").inc(stream.num_ahead)
        stream.forget_levels()
        self._ahead.pop(stream.key, None)

    @property
    def streams(self) -> Iterable[DraftStream]:
        """All that are open."""
        return self._streams.values()

    def probe(self, ids: npt.NDArray[np.int32]) -> Tensor:
        """Logits behind each of these tokens, by what drafts for new streams now; streams make room if they must."""
        key = "\0probe"
        self._take_pool()
        while not self.pool.try_extend(key, len(ids)):
            self.close(min(self._streams.values(), key=lambda s: s.last_used).key)
        try:
            return probe_logits(self.runner, self.pool.table(key), ids)
        finally:
            self.pool.free(key)

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
        if self._cache.books is not self.pool:
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
            and end <= stream.weights.max_context
            and self.pool.try_extend(stream.key, end)
        )

    # -- room --------------------------------------------------------------------------------------------

    def _reserve(self, stream: DraftStream, depth: int, busy: Collection[str]) -> bool:
        """Blocks for the stream and its spine, taking what was drafted ahead, then whoever drafted longest ago."""
        wanted = len(stream.tokens) + depth
        if wanted > stream.weights.max_context:
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
        stream.is_mixed = False
        self._metrics.prefix_query_tokens.inc(len(stream.tokens))
        self._metrics.prefix_hit_tokens.inc(stream.num_computed)

    def _share(self, stream: DraftStream) -> None:
        """Offer completed blocks to the prefix cache. The last token's waits: it is computed again when asked again."""
        num_full = (len(stream.tokens) - 1) // self.pool.block_size
        if self._prefix_cache and not stream.is_mixed and stream.num_shared < num_full:
            hashes = self._hashes(stream, num_full)
            for index in range(stream.num_shared, num_full):
                self.pool.register(stream.key, index, hashes[index])
            stream.num_shared = num_full

    def _hashes(self, stream: DraftStream, num_blocks: int) -> list[bytes]:
        salt = f"{stream.weights.version}\0{stream.cache_salt}"
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
            if self._repeats:
                self._extend_on(active, depth, width, floor)
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
        for members in _by_weights(streams):
            self._catch_up_alike(members)

    def _catch_up_alike(self, streams: list[DraftStream]) -> None:
        while True:
            left = self._token_budget
            builder = BatchBuilder(self._cache)
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
            streams[0].weights.forward(builder.build()[0])

    def _extend(self, streams: list[DraftStream], width: int) -> None:
        """One level more for each: behind its spine, or behind its last token if it has none."""
        for members in _by_weights(streams):
            self._extend_alike(members, width)

    def _extend_on(self, streams: list[DraftStream], depth: int, width: int, floor: float) -> None:
        """The levels behind the first, of streams for which that is quick."""
        for members in _by_weights([stream for stream in streams if is_plain(stream)]):
            num = extend_spines(members, self.pool, self._noise, depth=depth, width=width, floor=floor)
            self._metrics.draft_levels.labels("asked").inc(num)

    def _extend_alike(self, streams: list[DraftStream], width: int) -> None:
        builder = BatchBuilder(self._cache)
        for stream in streams:
            table = self.pool.table(stream.key)
            if stream.levels:
                (token, *_), _ = stream.levels[-1]
                builder.add_token(table, token, len(stream.tokens) + len(stream.levels) - 1)
            else:
                start = min(stream.num_computed, len(stream.tokens) - 1)
                builder.add_chunk(table, stream.tokens[start:], start, keep_last=True)
        weights, batch = streams[0].weights, builder.build()[0]
        ends = np.asarray([len(s.tokens) + len(s.levels) for s in streams], np.int64)
        rows = SamplingRows.build([s.sampling for s in streams], [1] * len(streams), ends)
        changes = self._changes(streams)
        if weights.decides:
            children = children_of(weights.launch(batch), rows, width, changes)
        else:
            children = self._children(apply_changes(weights.forward(batch), *changes), rows, width)
        for stream, ids, scores in zip(streams, *children, strict=True):
            stream.num_computed = len(stream.tokens) + len(stream.levels)
            stream.levels.append((ids, scores))

    @staticmethod
    def _changes(streams: list[DraftStream]) -> tuple[list[Changes], list[int]]:
        """Bias and penalties as the target will apply them: along the path, here the spine. As `apply_changes` takes them."""
        found: list[Changes] = []
        starts: list[int] = []
        for index, stream in enumerate(streams):
            if stream.counts is not None:
                path = np.asarray(stream.spine, np.int64)
                found.append(
                    stream.counts.changes(np.zeros(len(path), np.int64), path, np.asarray([len(path)]))
                )
                starts.append(index)
        return found, starts

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
            stream.weights.version,
        )


def _by_weights(streams: list[DraftStream]) -> list[list[DraftStream]]:
    """Those that one forward can serve."""
    groups: dict[int, list[DraftStream]] = {}
    for stream in streams:
        groups.setdefault(id(stream.weights), []).append(stream)
    return list(groups.values())


def probe_logits(runner: ModelRunner, table: list[int], ids: npt.NDArray[np.int32]) -> Tensor:
    """float32 [len(ids), V]: logits behind each token of a text, in blocks that are nobody's; the last ones one by one.

    Both ways a draft computes are taken: a chunk, and single tokens behind it.
    """
    num = max(1, len(ids) - 3)
    builder = BatchBuilder(runner.cache)
    builder.add_chunk(table, ids[:num], 0, keep_last=True, also=range(num - 1))
    found = [runner.forward(builder.build()[0])]
    for at in range(num, len(ids)):
        builder = BatchBuilder(runner.cache)
        builder.add_token(table, int(ids[at]), at)
        found.append(runner.forward(builder.build()[0]))
    return torch.cat(found)
