"""A configured model pair -> measured steps, prompts, drafts and thread counts, in process, without Ray.

A step here is what the model costs: packing the batch and one forward. Sampling and sockets come on top; `paceline
bench` measures whole steps. Contexts are really computed first: pages that nobody wrote are read faster than KV.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.cluster.config import ClusterConfig, EngineConfig, model_folder
from paceline.cluster.profile import (
    DraftPoint,
    ModelCard,
    PrefillPoint,
    Spread,
    StepPoint,
    ThreadPoint,
)
from paceline.cluster.speculation import Tree, prefix_hash
from paceline.cluster.types import DraftOpen, Sampling
from paceline.deploy.bench.inprocess import thread_counts, threads
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.kv_cache import KVCache
from paceline.workers.model_batch import BatchBuilder
from paceline.workers.model_runner import ModelRunner, load_runner

Say = Callable[[str], None]
"""Told what is measured now."""

_ROUNDS = 12
"""Whole drafts measured for each number of streams."""
_FILL_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """Which points are measured, and how often."""

    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    contexts: tuple[int, ...] = (64, 256, 1024)
    streams: tuple[int, ...] = (1, 4, 16)
    chunks: tuple[int, ...] = (16, 64, 256, 1024)
    prompt: int = 1024
    link_bytes: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20)
    least_s: float = 0.15
    """A point is repeated for at least this long ..."""
    least_num: int = 9
    """... and at least so often."""
    num_messages: int = 61
    """Of each size over the link; wake-ups make small ones vary a lot."""

    @classmethod
    def quick(cls) -> Plan:
        """The corners only."""
        return cls(
            nodes=(1, 4, 16),
            contexts=(64, 256),
            chunks=(64, 256),
            prompt=256,
            link_bytes=(4 << 10, 1 << 20, 8 << 20),
            least_s=0.04,
            least_num=5,
            num_messages=15,
        )


class ModelBench:
    """One model, a pool filled with real KV, and the measurements on it."""

    def __init__(self, runner: ModelRunner, max_context: int, plan: Plan) -> None:
        self.runner = runner
        self._max_context = min(max_context, runner.max_context)
        self._plan = plan
        self._written: set[int] = set()

    def card(self, folder: str, num_threads: int) -> ModelCard:
        """What the times belong to."""
        layout = self.runner.cache.layout
        size = KVCache.bytes_per_token(
            layout.num_layers, layout.num_kv_heads, layout.head_dim, self.runner.cache.dtype
        )
        return ModelCard(
            folder=folder,
            version=self.runner.version,
            path=self.runner.path,
            kv_bytes_per_token=size,
            threads=num_threads,
        )

    def room(self, streams: int) -> int:
        """Tokens that each of so many streams can have."""
        return min(self._max_context, self._num_blocks(streams) * self.runner.cache.block_size)

    def contexts(self, streams: int, num_more: int) -> list[int]:
        """The plan's contexts that leave room for `num_more` tokens; the longest possible if none does."""
        room = self.room(streams) - num_more
        return [c for c in self._plan.contexts if c <= room] or ([room] if room >= 1 else [])

    def step(self, streams: int, nodes: int, context: int) -> Spread:
        """Seconds of one forward of `streams` trees of `nodes` nodes behind `context` tokens each."""
        tables = self._tables(streams, context + nodes)
        tree = Tree.build(0, [0] * (nodes - 1), list(range(-1, nodes - 2)))
        for table in tables:
            if not self._written.issuperset(table):
                self._prompt(table, context, _FILL_CHUNK)
                self._written.update(table)

        def work() -> None:
            builder = BatchBuilder(self.runner.cache)
            for table in tables:
                builder.add_tree(table, tree, context)
            self.runner.forward(builder.build()[0])

        return repeated(work, self._plan)

    def prompt(self, chunk: int, num_tokens: int) -> Spread:
        """Seconds of a whole prompt in chunks."""
        (table,) = self._tables(1, num_tokens)
        return repeated(lambda: self._prompt(table, num_tokens, chunk), self._plan)

    def _num_blocks(self, streams: int) -> int:
        return self.runner.cache.num_blocks // streams

    def _tables(self, streams: int, num_tokens: int) -> list[list[int]]:
        """Blocks of each stream, spread over the whole pool."""
        cache, apart = self.runner.cache, self._num_blocks(streams)
        num = -(-num_tokens // cache.block_size)
        assert num <= apart, f"{num_tokens} tokens do not fit {streams} streams; `room` says so"
        return [list(range(i * apart, i * apart + num)) for i in range(streams)]

    def _prompt(self, table: list[int], num_tokens: int, chunk: int) -> None:
        ids = token_ids(num_tokens, self.runner.vocab_size)
        for start in range(0, num_tokens, chunk):
            builder = BatchBuilder(self.runner.cache)
            builder.add_chunk(table, ids[start : start + chunk], start, keep_last=False)
            self.runner.forward(builder.build()[0])


def repeated(work: Callable[[], object], plan: Plan) -> Spread:
    """Seconds of `work`, once to warm up and then until the plan is content."""
    work()
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < plan.least_num or time.perf_counter() - began < plan.least_s:
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return Spread.of(seconds)


def token_ids(num: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """Any tokens, the same ones each time."""
    return np.random.default_rng(0).integers(0, vocab_size, num).astype(np.int32)


# --- the pair -------------------------------------------------------------------------------------------


class PairBench:
    """The configured target and draft, as their workers load them, each on its workers' number of threads."""

    def __init__(self, config: ClusterConfig, plan: Plan, say: Say) -> None:
        self.config, self.plan, self._say = config, plan, say
        say("loading the target")
        self.target = self._load(config.model.target, config.decode, int8=config.model.int8_weights)
        say("loading the draft")
        self.draft = self._load(config.model.draft, config.draft)

    def _load(self, name: str, engine: EngineConfig, *, int8: bool = False) -> ModelBench:
        runner, _ = load_runner(
            model_folder(name),
            kv_memory_mb=engine.kv_memory_mb,
            block_size=self.config.kv.block_size,
            int8_weights=int8,
        )
        return ModelBench(runner, self.config.limits.max_context, self.plan)

    def steps(self) -> Iterator[StepPoint]:
        """T(streams, nodes, context) of the target; points that do not fit the pool are left out."""
        for streams in self.plan.streams:
            for nodes in self.plan.nodes:
                self._say(f"target: {streams} streams, trees of {nodes}")
                for context in self.target.contexts(streams, nodes):
                    with threads(self.config.decode.threads):
                        seconds = self.target.step(streams, nodes, context)
                    yield StepPoint(streams=streams, nodes=nodes, context=context, seconds=seconds)

    def prefill(self) -> Iterator[PrefillPoint]:
        """Tokens per second of one prompt, by chunk."""
        num = min(self.plan.prompt, self.target.room(1))
        for chunk in sorted({min(chunk, num) for chunk in self.plan.chunks}):
            self._say(f"prefill: chunks of {chunk}")
            with threads(self.config.prefill.threads):
                took = self.target.prompt(chunk, num)
            rates = Spread(median=num / took.median, q1=num / took.q3, q3=num / took.q1, num=took.num)
            yield PrefillPoint(chunk=chunk, tokens=num, tokens_s=rates)

    def drafts(self) -> Iterator[DraftPoint]:
        """The draft's step and whole draft, by streams; nothing when drafting is off."""
        shape = self.config.speculation
        for streams in self.plan.streams if shape.enabled else ():
            contexts = self.draft.contexts(streams, (_ROUNDS + 2) * (shape.depth + 1))
            if not contexts:
                continue
            self._say(f"draft: {streams} streams")
            with threads(self.config.draft.threads):
                step = self.draft.step(streams, 1, contexts[-1])
                whole = self._whole_draft(streams, contexts[-1])
            yield DraftPoint(
                streams=streams,
                context=contexts[-1],
                depth=shape.depth,
                width=shape.width,
                step=step,
                whole=whole,
            )

    def _whole_draft(self, streams: int, context: int) -> Spread:
        """Seconds of drafts that follow each other as in serving: half of a spine is right, then a token is not."""
        shape, runner = self.config.speculation, self.draft.runner
        engine = DraftEngine(runner, token_budget=self.config.draft.token_budget)
        ids = tuple(token_ids(context, runner.vocab_size).tolist())
        texts = {str(index): ids for index in range(streams)}
        for index, key in enumerate(texts):
            engine.open(key, DraftOpen(key, ids, Sampling(index), context))
        seconds = []
        for _ in range(_ROUNDS + 1):
            began = time.perf_counter()
            trees, dropped = engine.propose(list(texts), shape.depth, shape.width)
            seconds.append(time.perf_counter() - began)
            assert not dropped, f"no room for the drafts of {dropped}"
            for tree in trees:
                known = texts[tree.request_id]
                new = (*tree.tokens[: shape.depth // 2], tree.tokens[0])
                engine.advance(tree.request_id, len(known), prefix_hash(np.asarray(known, np.int32)), new)
                texts[tree.request_id] = known + new
        return Spread.of(seconds[1:])  # the first one computed the prompt

    def threads(self, counts: Sequence[int] | None = None) -> Iterator[ThreadPoint]:
        """The target's step with the configured tree, and a prompt chunk, by number of threads."""
        shape, room = self.config.speculation, self.target.room(1)
        nodes = min(1 + shape.depth * shape.width if shape.enabled else 1, room // 2)
        context = self.target.contexts(1, nodes)[-1]
        chunk = min(self.config.prefill.token_budget, room)
        for count in counts or thread_counts():
            self._say(f"target on {count} threads")
            with threads(count):
                decode = self.target.step(1, nodes, context)
                prefill = self.target.prompt(chunk, chunk)
            yield ThreadPoint(threads=count, decode=decode, prefill=prefill)
