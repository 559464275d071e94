"""Model folders -> router, workers and a gateway's streams in one process, with real sockets, links and threads.

For tests of the protocol between workers: everything but Ray and HTTP is real. `tests/end_to_end` adds those.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.cluster import wire
from paceline.cluster.config import ClusterConfig, Secrets, load_config
from paceline.cluster.gateway.cluster_streams import ClusterStreams
from paceline.cluster.gateway.streams import StreamReport
from paceline.cluster.membership import Member, new_incarnation
from paceline.cluster.metrics import Metrics
from paceline.cluster.router import Router
from paceline.cluster.types import Request, Sampling
from paceline.workers.base import Worker
from paceline.workers.decode import DecodeWorker
from paceline.workers.draft import DraftWorker
from paceline.workers.prefill import PrefillWorker

VOCAB = 211


def tiny_model(folder: Path, *, seed: int, layers: int = 3, hidden: int = 64) -> Path:
    """A random Llama saved as safetensors."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCAB, (num_tokens,), generator=generator).tolist())


def request(
    name: str, prompt_ids: Sequence[int], num_tokens: int, *, speculate: bool = True, **how: float
) -> Request:
    """A request whose sampling parameters are given by name."""
    sampling = Sampling(int(how.pop("seed", 7)), **{"temperature": 0.0, **how})  # type: ignore[arg-type]
    return Request(name, tuple(prompt_ids), sampling, num_tokens, speculate=speculate)


@dataclass
class Harness:
    """A running cluster of threads. Workers are started and killed one by one."""

    config: ClusterConfig
    secrets: Secrets
    router: Router
    streams: ClusterStreams
    gateway: Member
    metrics: Metrics
    address: tuple[str, int]
    workers: list[Worker] = field(default_factory=list)

    async def resolve(self) -> tuple[str, int]:
        return self.address

    async def add(self, kind: type[Worker], name: str, **how: Any) -> Worker:
        """Start a worker and wait until the gateway sees it ready. `how`: of its constructor."""
        worker = kind(self.config, self.secrets, name=name, resolve=self.resolve, **how)
        self.workers.append(worker)
        await worker.setup()
        incarnation = worker.member.me.incarnation
        await self.until(
            lambda: any(
                w.incarnation == incarnation and w.state == "ready" for w in self.gateway.directory.workers
            )
        )
        return worker

    async def kill(self, worker: Worker) -> None:
        """End a worker the way its death looks from outside: all connections close, nothing is said."""
        worker._inbox.put(None)
        await worker.member.close()
        self.workers.remove(worker)

    async def restart_router(self) -> None:
        """End the router; another, which knows nothing, comes elsewhere and everyone finds it."""
        await self.router.close()
        self.router = Router(self.config, wire.Identity("router-1", new_incarnation()))
        self.address = await self.router.start(self.secrets.link)
        await self.until(lambda: len(self.router.directory.workers) == len(self.workers) + 2)

    async def until(self, condition, limit_s: float = 10.0) -> None:  # type: ignore[no-untyped-def]
        """Wait for something to become true."""
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.01)

    async def run(self, what: Request) -> tuple[list[int], StreamReport]:
        """Generate one stream to its end."""
        report = StreamReport()
        tokens: list[int] = []
        async for event in self.streams.run(what, report):
            assert event.finish != "error", event.error
            tokens.extend(event.tokens)
        return tokens, report


ALWAYS_DRAFTED = (
    "speculation.sources=[draft]",
    "speculation.control=fixed",
    "speculation.depth=4",
    "speculation.floor=0",
)
"""A draft worker is asked in every step, whether it pays or not: what happens then is what these tests are about."""


@asynccontextmanager
async def cluster(folder: Path, *settings: str) -> AsyncIterator[Harness]:
    """A router and a gateway; add workers yourself. All pools must be empty at the end."""
    models = [f"model.target={folder / 'target'}", f"model.draft={folder / 'draft'}"]
    config = load_config(None, [*models, *ALWAYS_DRAFTED, *settings])
    secrets = Secrets.create()
    router = Router(config, wire.Identity("router-0", new_incarnation()))
    address = await router.start(secrets.link)
    metrics = Metrics()
    streams = ClusterStreams(config, metrics)

    async def resolve() -> tuple[str, int]:
        return harness.address

    gateway = Member(
        wire.Identity("gateway-0", new_incarnation()), "gateway", config.link, secrets.link, streams, resolve
    )
    streams.attach(gateway)
    harness = Harness(config, secrets, router, streams, gateway, metrics, address)
    await gateway.start()
    try:
        yield harness
        for worker in harness.workers:
            if worker.failure is not None:
                raise worker.failure
            try:
                await harness.until(lambda worker=worker: worker.num_streams() == 0)
            except TimeoutError:
                left = worker.num_streams()
                raise AssertionError(f"{worker.member.me.worker_id} still has {left} streams") from None
            # One that was put in a dead one's place may still be loading.
            if not isinstance(worker, DraftWorker) and worker.state != "starting":
                worker._engine.scheduler.check_integrity()
                assert worker.blocks()[0] == 0, f"{worker.member.me.worker_id} still holds blocks"
    finally:
        for worker in harness.workers:
            await worker.close()
        await gateway.close()
        await harness.router.close()


ALL = (PrefillWorker, DecodeWorker, DraftWorker)
