"""A random model of an 8B's shape on a device -> what whole steps cost beside the bytes they have to read.

    gpu.step_floor      wall time of `Engine.step` for eight streams / time to read weights and KV at a copy's bandwidth
    gpu.forward_floor   the same for the launch alone, without planning, verdict and bookkeeping
    gpu.t64_t1          a step of 64 rows of one stream / one of a single row
    gpu.vs_hf           tokens a second of eight streams, prompts included / `generate` on a batch of the same prompts

Weights are random: their values are nobody's, their bytes are. Steps run as in a worker: graphs, fused verification, commit.
The same code runs a small model on a CPU, eagerly, which says nothing but that it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import Request, Sampling
from paceline.deploy.bench.figures import Count, Figure, alternate, median, ratio
from paceline.workers.engine import Engine
from paceline.workers.kv_cache import KVCache
from paceline.workers.model_batch import BatchBuilder, PackedBatch
from paceline.workers.model_runner import ModelRunner, kv_shape

FIGURES = ("gpu.step_floor", "gpu.forward_floor", "gpu.t64_t1", "gpu.vs_hf")
_STREAMS = 8
_BLOCK_SIZE = 256


def shape_8b() -> LlamaConfig:
    """Llama 3's of 8 billion weights."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    pairs: int = 30
    block_s: float = 0.2
    context: int = 1024
    copy_bytes: int = 1 << 29
    new_tokens: int = 64
    """Of each stream beside `generate`."""


@dataclass(slots=True)
class StepBench:
    """One model on one device."""

    config: LlamaConfig
    device: torch.device
    size: Size = field(default_factory=Size)
    block_size: int = _BLOCK_SIZE
    runner: ModelRunner = field(init=False)
    _model: Any = field(init=False)

    def __post_init__(self) -> None:
        is_cuda = self.device.type == "cuda"
        with self.device:
            model = AutoModelForCausalLM.from_config(
                self.config, dtype=torch.bfloat16 if is_cuda else torch.float32
            )
        model.set_attn_implementation("paceline")
        self._model = model.eval().requires_grad_(False)
        per_stream = -(-self.config.max_position_embeddings // self.block_size)
        self.runner = ModelRunner(
            self._model,
            "random",
            num_blocks=per_stream * _STREAMS,
            block_size=self.block_size,
            graphs="cuda" if is_cuda else "eager",
            max_streams=_STREAMS,
        )

    def measure(self) -> dict[str, Figure]:
        """All figures of `FIGURES`."""
        found = self.floors()
        found["gpu.t64_t1"] = self.t64_t1()
        found["gpu.vs_hf"] = self.vs_generate()
        return found

    # -- a step ------------------------------------------------------------------------------------------

    def floors(self) -> dict[str, Figure]:
        """Whole steps and bare launches, each against the bytes that it reads."""
        engine, streams = self._decoding(self.config.max_position_embeddings - self.size.context)
        source = torch.zeros(self.size.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        num_steps = self._repeats(lambda: engine.step())
        first = self._plain(engine, streams)
        launches = self._repeats(lambda: self._launch(first))
        copies = self._repeats(lambda: self._waited(lambda: target.copy_(source)))
        whole, bare = [], []
        for _ in range(self.size.pairs):
            if any(stream.num_allowed <= num_steps + 1 for stream in streams):
                break  # the context is full: fewer pairs, said by the interval
            copy_s = self._seconds(lambda: target.copy_(source), copies)
            seconds_a_byte = copy_s / (2 * self.size.copy_bytes)
            before = self._step_bytes(streams)
            took = self._seconds(lambda: engine.step(), num_steps)
            num_bytes = (before + self._step_bytes(streams)) / 2
            whole.append(took / (num_bytes * seconds_a_byte))
            batch = self._plain(engine, streams)
            took = self._seconds(lambda batch=batch: self._launch(batch), launches)  # type: ignore[misc]
            bare.append(took / (self._step_bytes(streams) * seconds_a_byte))
        for stream in streams:
            engine.remove(stream)
        return {"gpu.step_floor": median(whole), "gpu.forward_floor": median(bare)}

    def _step_bytes(self, streams: list[Stream]) -> float:
        """Weights but the embedding, of which a step reads rows; K and V of all contexts."""
        embedding = self._model.get_input_embeddings().weight
        is_head = embedding is self._model.get_output_embeddings().weight
        weights = self.runner.weight_bytes - (0 if is_head else embedding.nbytes)
        per_token = KVCache.bytes_per_token(*kv_shape(self.config), self.runner.cache.dtype)
        return float(weights + per_token * sum(stream.num_computed for stream in streams))

    def _decoding(self, max_tokens: int) -> tuple[Engine, list[Stream]]:
        """An engine whose streams have their prompts behind them."""
        engine = Engine(self.runner, token_budget=2048, max_streams=_STREAMS, prefix_cache=False)
        streams = [engine.add(request) for request in self._requests(max_tokens)]
        while any(stream.num_output == 0 for stream in streams):
            engine.step()
        return engine, streams

    def _requests(self, max_tokens: int) -> list[Request]:
        draw = np.random.default_rng(0)
        size = self.size.context
        return [
            Request(f"r{at}", tuple(draw.integers(0, self.config.vocab_size, size).tolist()), Sampling(at, 0.0), max_tokens)
            for at in range(_STREAMS)
        ]  # fmt: skip

    def _plain(self, engine: Engine, streams: list[Stream]) -> PackedBatch:
        """A row of each stream, as a plain step has it: its last computed token once more, whose KV stays what it is."""
        builder = BatchBuilder(self.runner.cache)
        for stream in streams:
            at = stream.num_computed - 1
            builder.add_token(engine.pool.table(stream.key), int(stream.buffer[at]), at)
        return builder.build()[0]

    # -- rows --------------------------------------------------------------------------------------------

    def t64_t1(self) -> Figure:
        """Time of 64 rows over that of one, one stream at the same context."""
        table = list(range(-(-(self.size.context + 64) // self.block_size)))
        blocks = {}
        for num in (1, 64):
            builder = BatchBuilder(self.runner.cache)
            builder.add_tree(
                table, Tree.build(1, [1] * (num - 1), list(range(-1, num - 2))), self.size.context
            )
            blocks[str(num)] = self._block(builder.build()[0])
        counts = alternate(blocks, self.size.pairs)
        return ratio(counts["1"], counts["64"])

    def _block(self, batch: PackedBatch) -> Callable[[int], Count]:
        repeats = self._repeats(lambda: self._launch(batch))
        return lambda _: Count(repeats, repeats * self._seconds(lambda: self._launch(batch), repeats))

    def _launch(self, batch: PackedBatch) -> None:
        self.runner.launch(batch)

    # -- beside transformers -----------------------------------------------------------------------------

    def vs_generate(self) -> Figure:
        """Eight requests of one length, as a batch that needs no padding: what suits `generate` best."""
        requests = self._requests(self.size.new_tokens)
        ids = torch.tensor([request.prompt_ids for request in requests], device=self.device)
        engine = Engine(self.runner, token_budget=2048, max_streams=_STREAMS, prefix_cache=False)
        num = _STREAMS * self.size.new_tokens

        def ours(_: int) -> Count:
            began = time.perf_counter()
            engine.run(requests)
            return Count(num, time.perf_counter() - began)

        def theirs(_: int) -> Count:
            self._model.set_attn_implementation("sdpa")
            try:
                self._wait()
                began = time.perf_counter()
                self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=self.size.new_tokens,
                    min_new_tokens=self.size.new_tokens,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=None,
                )
                self._wait()
                return Count(num, time.perf_counter() - began)
            finally:
                self._model.set_attn_implementation("paceline")

        for side in (ours, theirs):
            side(0)
        counts = alternate({"ours": ours, "theirs": theirs}, max(3, self.size.pairs // 3))
        return ratio(counts["ours"], counts["theirs"])

    # -- clock -------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _waited(self, call: Callable[[], object]) -> None:
        call()
        self._wait()

    def _seconds(self, call: Callable[[], object], repeats: int) -> float:
        """Of one call, many of them between two looks at the clock."""
        self._wait()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        self._wait()
        return (time.perf_counter() - began) / repeats

    def _repeats(self, call: Callable[[], object]) -> int:
        self._seconds(call, 2)  # compile, capture
        return max(1, int(self.size.block_s / self._seconds(call, 2)))
