"""Numbers -> streams of counted tokens, and a scheduler with a pool of its own to put them in."""

from __future__ import annotations

import numpy as np

from paceline.cluster.blocks import BlockPool
from paceline.cluster.scheduler import Scheduler, Stream
from paceline.cluster.types import Request, Sampling


def new_stream(name: str, num_prompt: int, max_tokens: int, arrival: int, priority: int = 0) -> Stream:
    """A stream of tokens 0, 1, 2..."""
    request = Request(name, tuple(range(num_prompt)), Sampling(0), max_tokens, priority=priority)
    buffer = np.zeros(num_prompt + max_tokens, np.int32)
    buffer[:num_prompt] = range(num_prompt)
    return Stream(request, 0, buffer, num_prompt, num_prompt, arrival)


def make(
    num_blocks: int,
    *,
    token_budget: int = 64,
    max_streams: int = 8,
    block_size: int = 4,
    cache: str | None = None,
) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(pool, token_budget=token_budget, max_streams=max_streams, cache_version=cache), pool


def admit(
    scheduler: Scheduler,
    name: str,
    num_prompt: int,
    arrival: int,
    num_computed: int = 0,
    priority: int = 0,
) -> Stream:
    stream = new_stream(name, num_prompt, 16, arrival, priority)
    scheduler.add(stream)
    stream.num_computed = num_computed
    return stream
