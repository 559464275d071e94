"""Model pair and requests -> counts of blocks: the engine with drafts, without, on prompts, and on trees of n nodes.

No socket, no process, no HTTP: what is measured here is the engine. With and without drafts run on one set of
weights and one KV pool, one after the other, and must emit the same tokens.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from transformers import LlamaConfig

from paceline.cluster.config import DraftConfig, SpeculationConfig
from paceline.cluster.controller import Controller
from paceline.cluster.errors import RequestError
from paceline.cluster.metrics import Metrics
from paceline.cluster.referee import Referee
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_NAMES, Request, Sampling
from paceline.deploy.bench.figures import Block, Count, timed
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.drafters.base import Context, Drafter, make
from paceline.workers.drafters.colocated import ColocatedDrafter
from paceline.workers.drafters.fused import FusedDrafter, choices
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner, load_runner
from paceline.workers.profile import measure_step_cost

DrafterFactory = Callable[[ModelRunner], Drafter]
"""The target's runner -> a new drafter without streams."""

KV_MEMORY_MB = 96
BLOCK_SIZE = 16
TOKEN_BUDGET = 256
_COPY_BYTES = 128 << 20
"""Larger than any cache."""


def config_26m(vocab_size: int, context: int) -> LlamaConfig:
    """A Llama of 26 M weights. Random ones are spread wide enough that two tokens are hardly ever equally likely."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=context,
        initializer_range=0.06,
        tie_word_embeddings=True,
    )


def load(folder: Path) -> ModelRunner:
    """The target, with room for every block of the benchmark."""
    return load_runner(folder, kv_memory_mb=KV_MEMORY_MB, block_size=BLOCK_SIZE)[0]


def draft_model(folder: Path, speculation: SpeculationConfig | None = None) -> DrafterFactory:
    """A draft model in the same process, trees as deep and wide as the cluster's default."""
    shape = speculation or SpeculationConfig()
    config = DraftConfig()
    runner, _ = load_runner(folder, kv_memory_mb=config.kv_memory_mb, block_size=BLOCK_SIZE)

    def make_one(target: ModelRunner) -> Drafter:
        engine = DraftEngine(runner, token_budget=config.token_budget, prefix_cache=False)
        return ColocatedDrafter(
            engine, vocab_size=target.vocab_size, depth=shape.depth, width=shape.width, floor=shape.floor
        )

    return make_one


def drafters(folder: Path, speculation: SpeculationConfig | None = None) -> DrafterFactory:
    """The configured sources under a controller, with the draft model in this process."""
    shape = speculation or SpeculationConfig()
    config = DraftConfig()
    runner, _ = load_runner(folder, kv_memory_mb=config.kv_memory_mb, block_size=BLOCK_SIZE)

    def make_all(target: ModelRunner) -> Drafter:
        engine = DraftEngine(runner, token_budget=config.token_budget, prefix_cache=False)
        context = Context(target, shape, Metrics(), draft=engine)
        # Step times are measured where the blocks will run: with the same number of threads.
        sources = [make(name, context) for name in shape.sources]
        controller = Controller(measure_step_cost(target), referee=Referee(choices(sources)))
        return FusedDrafter(sources, controller)

    return make_all


def new_engine(runner: ModelRunner, drafter: Drafter | None, streams: int) -> Engine:
    """An idle engine. Several may share a runner's pool as long as only one of them has streams.

    No prefix cache: a prompt that comes again must cost again.
    """
    return Engine(
        runner,
        token_budget=TOKEN_BUDGET,
        max_streams=max(64, streams),
        drafter=drafter,
        prefix_cache=False,
    )


# --- whole requests -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """What a block of whole requests did."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    num_drafted: int = 0
    num_turns: int = 0
    """Steps, counted once for each stream that took part and sampled."""
    by_source: list[int] = field(default_factory=lambda: [0] * len(SOURCE_NAMES))
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(self.by_source)

    @property
    def count(self) -> Count:
        return Count(self.num_tokens, self.seconds)

    def add(self, other: Tally) -> None:
        """Another block of the same side; outputs are not kept."""
        self.num_drafted += other.num_drafted
        self.num_turns += other.num_turns
        self.by_source = [a + b for a, b in zip(self.by_source, other.by_source, strict=True)]
        self.seconds += other.seconds


def generate(engine: Engine, requests: Sequence[Request], streams: int) -> Tally:
    """Run requests to their ends, `streams` at a time: when one ends, the next begins."""
    tally = Tally({request.id: [] for request in requests})

    def work() -> int:
        waiting = deque(requests)
        while waiting or len(engine.scheduler):
            while waiting and len(engine.scheduler) < streams:
                engine.add(waiting.popleft())
            for emission in engine.step().emissions:
                if emission.finish == "error":
                    raise RequestError(emission.error, status=500)
                tally.outputs[emission.stream.request.id].extend(emission.tokens)
                tally.num_drafted += emission.num_drafted
                tally.num_turns += 1
                for source in emission.sources:
                    tally.by_source[source] += 1
        return tally.num_tokens

    tally.seconds = timed(work).seconds
    return tally


# --- steps and prompts ----------------------------------------------------------------------------------


class WrongTrees(Drafter):
    """Proposes trees of a fixed size that are hardly ever right, so that a step costs what its nodes cost."""

    name = "wrong"

    def __init__(self, num_nodes: int, vocab_size: int) -> None:
        """`num_nodes` counts the root."""
        self._num_drafted = num_nodes - 1
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(num_nodes)

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        """Chains of random tokens."""
        return [self._chain(stream) for stream in streams]

    def _chain(self, stream: Stream) -> Tree | None:
        tokens = self._rng.integers(0, self._vocab_size, self._num_drafted).tolist()
        root = int(stream.buffer[stream.num_tokens - 1])
        return Tree.build(root, tokens, range(-1, len(tokens) - 1)) if tokens else None


def step_block(runner: ModelRunner, num_nodes: int, num_steps: int, context: int) -> Block:
    """A block of steps of one greedy stream with trees of `num_nodes`, the prompt's own steps left out."""
    drafter = WrongTrees(num_nodes, runner.vocab_size) if num_nodes > 1 else None
    engine = new_engine(runner, drafter, 1)

    def block(index: int) -> Count:
        room = num_steps + 2 * num_nodes + 8
        stream = engine.add(
            Request(f"steps-{index}", _ids(runner, context, index), Sampling(index, 0.0), room)
        )
        while not stream.is_caught_up:
            engine.step()
        taken = timed(lambda: _steps(engine, num_steps))
        if len(engine.scheduler):
            engine.remove(stream)
        return taken

    return block


def _steps(engine: Engine, num_steps: int) -> int:
    taken = 0
    while taken < num_steps and len(engine.scheduler):
        engine.step()
        taken += 1
    return taken


def prefill_block(runner: ModelRunner, num_tokens: int, num_prompts: int) -> Block:
    """A block of prompts whose KV is computed, without a token sampled."""
    engine = new_engine(runner, None, 1)

    def block(index: int) -> Count:
        prompts = [_ids(runner, num_tokens, index * num_prompts + i) for i in range(num_prompts)]
        return timed(lambda: sum(_prefill(engine, prompt) for prompt in prompts))

    return block


def _prefill(engine: Engine, prompt: tuple[int, ...]) -> int:
    request = Request("prefill", prompt, Sampling(0), 1)
    stream = engine.add_prefill(request, epoch=0, token_ids=prompt)
    while not engine.step().computed:
        pass
    engine.remove(stream)
    return len(prompt)


def _ids(runner: ModelRunner, num: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, runner.vocab_size, num).tolist())


# --- the machine ----------------------------------------------------------------------------------------


def weight_bytes(folder: Path, bytes_per_weight: int = 4) -> int:
    """Bytes of all weights in the precision they are computed in; tied weights count once."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.offset_keys():
                total += int(np.prod(tensors.get_slice(name).get_shape()))
    return total * bytes_per_weight


def memory_bandwidth() -> float:
    """Bytes per second that a copy reads and writes, best of ten over all thread counts."""
    source = torch.zeros(_COPY_BYTES // 8, dtype=torch.float64)
    target = torch.ones_like(source)  # written once, so that its pages exist
    seconds: list[float] = []
    for count in thread_counts():
        with threads(count):
            for _ in range(10):
                seconds.append(timed(lambda: target.copy_(source).shape[0]).seconds)
    return 2 * _COPY_BYTES / min(seconds)


def thread_counts() -> list[int]:
    """1, 2, 4 ... and all of this process's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return sorted({cores, *(1 << i for i in range(cores.bit_length()) if 1 << i <= cores)})


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch works with this many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def best_threads(work: Callable[[], object]) -> int:
    """The thread count with which `work` is fastest; one warm-up, then the better of two."""
    seconds: dict[int, float] = {}
    for count in thread_counts():
        with threads(count):
            work()
            seconds[count] = min(timed(lambda: work() is None).seconds for _ in range(2))
    return min(seconds, key=lambda count: seconds[count])


def with_threads(count: int, block: Block) -> Block:
    """The same block, run with this many threads."""

    def run(index: int) -> Count:
        with threads(count):
            return block(index)

    return run
