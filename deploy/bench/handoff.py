"""A long prompt, layer by layer, chunk by chunk -> what copying and checking its KV costs beside computing it.

Both ends of a hand-off in one process, without the link between them: each message's rows are copied out of the pool
(gather), hashed, copied into another pool (scatter) and hashed there again, just where a prefill worker does it, behind
each layer of each chunk. What the share is of is the computation and the copies together, which is less than the time to
the first token, so the share is no smaller than that of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from paceline.cluster.config import PrefillConfig
from paceline.cluster.errors import TransferError
from paceline.cluster.scheduler import Plan
from paceline.cluster.types import KVReady, Request, Sampling
from paceline.deploy.bench.figures import Figure, median
from paceline.deploy.bench.inprocess import config_26m
from paceline.workers.engine import Engine
from paceline.workers.kv_cache import KVCache, digest, octets
from paceline.workers.kv_link import Arrival, store_arrival
from paceline.workers.model_runner import ModelRunner

PROMPT = 4096
_BLOCK_SIZE = 16
_KEY = bytes(range(32))


def random_runner(seed: int = 0, context: int = PROMPT + 256) -> ModelRunner:
    """A Llama of 26 M random weights, with a context that such a prompt fits in."""
    config = config_26m(4096, context)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="paceline")
    model = model.eval().requires_grad_(False)
    return ModelRunner(model, "random", num_blocks=-(-context // _BLOCK_SIZE), block_size=_BLOCK_SIZE)


@dataclass(slots=True)
class Handoff:
    """Repeated hand-offs of prompts from one runner's pool into another of the same layout."""

    runner: ModelRunner
    num_tokens: int = PROMPT
    chunk: int = PrefillConfig().token_budget
    gather_s: float = 0.0
    digest_s: float = 0.0
    scatter_s: float = 0.0
    """With the receiver's own digest, which is taken in the same call."""
    num_bytes: int = 0
    _there: KVCache = field(init=False)
    _engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        ours = self.runner.cache
        shape = ours.layout
        self._there = KVCache(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_blocks=ours.num_blocks,
            block_size=ours.block_size,
            model_version=shape.model_version,
            dtype=ours.dtype,
            device=ours.device,
        )
        self._engine = Engine(self.runner, token_budget=self.chunk, max_streams=1, prefix_cache=False)

    def share(self, rounds: int) -> Figure:
        """Gather, digests and scatter of all the time."""
        self._once(0)
        return median([self._once(index) for index in range(rounds)])

    def _once(self, index: int) -> float:
        draw = np.random.default_rng(index)
        ids = tuple(draw.integers(0, self.runner.vocab_size, self.num_tokens).tolist())
        request = Request(f"prompt-{index}", ids, Sampling(0), 0)
        stream = self._engine.add_prefill(request, epoch=0, token_ids=ids)
        self.gather_s = self.digest_s = self.scatter_s = 0.0
        self.num_bytes = 0
        began = time.perf_counter()
        while stream.num_missing:
            self._engine.step(on_layer=self._send)
        if self.runner.cache.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        self._engine.remove(stream)
        return (self.gather_s + self.digest_s + self.scatter_s) / seconds

    def _send(self, plan: Plan, layer: int) -> None:
        """What a prefill worker pushes behind a layer, and what a decode worker does with it."""
        (segment,) = plan.segments
        ours, stream = self.runner.cache, segment.stream
        layout, start, num = ours.layout, segment.start, segment.num_rows
        message = KVReady(stream.request.id, 0, "bench", layer, 1, 0, layout.num_kv_heads, start, num)
        slots = ours.slots(self._engine.pool.table(stream.key), start, start + num)
        at = time.perf_counter()
        if ours.device.type == "cuda":
            rows, mark = ours.pack_marked(_KEY, message, slots)
            self.gather_s, at = self._add(self.gather_s, at)
            found = octets(mark)
        else:
            rows = ours.pack(message, slots)
            message = msgspec.structs.replace(message, digest_by="gmac")
            self.gather_s, at = self._add(self.gather_s, at)
            found = digest(_KEY, message, rows)
        self.digest_s, at = self._add(self.digest_s, at)
        sent = msgspec.structs.replace(message, digest=found)
        if not store_arrival(self._there, slots, _KEY, Arrival(sent, rows, rows)).is_intact:
            raise TransferError("bench", "KV that was copied is not what arrived")
        self.scatter_s, _ = self._add(self.scatter_s, at)
        self.num_bytes += rows.nbytes

    @staticmethod
    def _add(total: float, since: float) -> tuple[float, float]:
        now = time.perf_counter()
        return total + now - since, now


if __name__ == "__main__":
    made = Handoff(random_runner())
    share = made.share(10)
    print(
        f"kv.handoff_share {share.value:.4f} [{share.lo:.4f}, {share.hi:.4f}]  ({made.num_bytes / 1e6:.1f} MB)"
    )
    parts = {"gather": made.gather_s, "digest": made.digest_s, "scatter": made.scatter_s}
    print("  ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in parts.items()))
