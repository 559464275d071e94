"""Streams with a first level -> their next levels, row after row, without a batch built anew for each.

A level of a small draft is a hundred microseconds of arithmetic. What Python does around it for the general case
(batches, tensors, filters, penalties) takes longer, so for streams that need none of that all levels are one compiled
loop, where the model has one. The plain twin is `DraftEngine._extend`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.cluster.blocks import BlockPool
from paceline.workers.draft_stream import DraftStream
from paceline.workers.model_batch import BatchBuilder, Spine
from paceline.workers.sampling import NoiseSource, SamplingRows

FloatArray = npt.NDArray[np.float32]


def is_plain(stream: DraftStream) -> bool:
    """Whether its tokens are drawn from all of the vocabulary, by logits as they are."""
    sampling = stream.sampling
    is_filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return stream.counts is None and (sampling.temperature == 0 or not is_filtered)


def extend_spines(
    streams: Sequence[DraftStream],
    pool: BlockPool,
    noise: NoiseSource,
    *,
    depth: int,
    width: int,
    floor: float,
) -> int:
    """Levels until each stream has a proposal of `depth`, or one whose chance is below `floor`; how many were made.

    All have one level or more, blocks for `depth`, equal weights, and are plain. A runner that has no such
    loop makes none.
    """
    num_made = 0
    left = [stream for stream in streams if stream.num_levels(depth, floor) is None]
    while left:
        made = _run_alike(left, pool, noise, depth, width, floor)
        if made == 0:
            return num_made
        num_made += made
        left = [stream for stream in left if stream.num_levels(depth, floor) is None]
    return num_made


def _run_alike(
    streams: Sequence[DraftStream], pool: BlockPool, noise: NoiseSource, depth: int, width: int, floor: float
) -> int:
    """Levels of all of these, until the first of them needs no more."""
    runner = streams[0].weights
    builder = BatchBuilder(runner.cache)
    for stream in streams:
        table = pool.table(stream.key)
        builder.add_token(table, stream.levels[-1][0][0], len(stream.tokens) + len(stream.levels) - 1)
    num_most = depth - max(len(stream.levels) for stream in streams)
    draws = _draws(streams) if runner.decides else None
    drawn, temperatures = _noise_of(streams, noise, 0 if draws else num_most, runner.vocab_size)
    chances = np.asarray([math.prod(scores[0] for _, scores in stream.levels) for stream in streams])
    spine = Spine(num_most, width, floor, drawn, temperatures, chances, draws)
    found = runner.levels(builder.build()[0], spine)
    if found is None:
        return 0
    for ids, shares in zip(found[0].tolist(), found[1].tolist(), strict=True):
        for stream, *level in zip(streams, ids, shares, strict=True):
            stream.num_computed = len(stream.tokens) + len(stream.levels)
            stream.levels.append((level[0], level[1]))
    return len(found[0]) * len(streams)


def _draws(streams: Sequence[DraftStream]) -> SamplingRows:
    """How each stream's next level is drawn."""
    ends = [len(stream.tokens) + len(stream.levels) for stream in streams]
    return SamplingRows([stream.sampling for stream in streams], ends)


def _noise_of(
    streams: Sequence[DraftStream], noise: NoiseSource, num_levels: int, vocab_size: int
) -> tuple[FloatArray, FloatArray]:
    """float32 [levels, B, V], no level if all are greedy, and temperatures [B]; greedy rows have 0 and 1."""
    sampled = [index for index, stream in enumerate(streams) if stream.sampling.temperature > 0]
    temperatures = np.asarray([s.sampling.temperature or 1.0 for s in streams], np.float32)
    if not sampled or num_levels == 0:
        return np.empty((0, len(streams), vocab_size), np.float32), temperatures
    samplings, positions = [], []
    for level in range(num_levels):
        for index in sampled:
            stream = streams[index]
            samplings.append(stream.sampling)
            positions.append(len(stream.tokens) + len(stream.levels) + level)
    rows = noise.rows(SamplingRows(samplings, positions), vocab_size).numpy()
    found = rows.reshape(num_levels, len(sampled), vocab_size)
    if len(sampled) == len(streams):
        return found, temperatures
    drawn = np.zeros((num_levels, len(streams), vocab_size), np.float32)
    drawn[:, sampled] = found
    return drawn, temperatures
