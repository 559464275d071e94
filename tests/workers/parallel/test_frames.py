"""What ranks are told -> bytes -> the same, and nothing that could run code."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from paceline.cluster.speculation import Tree
from paceline.cluster.types import HeadRange, KVReady, Sampling
from paceline.workers.adjust import Changes
from paceline.workers.kv_cache import KVCache
from paceline.workers.model_batch import BatchBuilder, KVSend, PackedBatch
from paceline.workers.parallel.frames import Connect, Draws, End, Move, Place, Rows, Step, decode, encode
from paceline.workers.parallel.logits import draws_of
from paceline.workers.sampling import Sample, SamplingRows

READY = KVReady("request", 3, "kv/1/2/3", 0, 2, 1, 1, 4, 9, 7, b"digest")


def batch() -> PackedBatch:
    cache = KVCache(num_layers=2, num_kv_heads=2, head_dim=4, num_blocks=16, block_size=4, model_version="v")
    builder = BatchBuilder(cache)
    builder.add_chunk([3, 1, 4, 2], np.arange(9, dtype=np.int32), 4, keep_last=True)
    builder.add_tree([5, 9], Tree.build(7, [8, 9, 10], [-1, 0, -1]), 3)
    made = builder.build()[0]
    made.sends = [KVSend(1, 0, 1, READY)]
    return made


def draws() -> Draws:
    samplings = [Sampling(2**64 - 1, 0.0), Sampling(2**63, 0.7, 5), *[Sampling(3)] * 3]
    change = Changes(np.asarray([0, 0]), np.asarray([5, 9]), *[np.asarray([0.5, np.inf])] * 3)
    return draws_of(Sample(None, SamplingRows(samplings, [9, 8, 7, 6, 5]), [change], [2]), 5)


def flat(what: Any) -> list[Any]:
    """Everything in a frame, arrays as their bytes, types and shapes."""
    if isinstance(what, torch.Tensor):
        return flat(what.numpy())
    if isinstance(what, np.ndarray):
        return [str(what.dtype), what.shape, what.tobytes()]
    if isinstance(what, PackedBatch):
        plan = what.attention
        parts = [plan.tables, plan.block_size, plan.row_segment, plan.positions, plan.num_leading]
        kept = [what.input_ids, what.position_ids, what.slots, what.keep, list(what.sends)]
        return [flat(part) for part in [*parts, plan.own_start, plan.own, *kept]]
    if hasattr(what, "__dataclass_fields__"):
        return [flat(getattr(what, name)) for name in what.__dataclass_fields__]
    return [what]


@pytest.mark.parametrize(
    "frame",
    [
        End(),
        Connect(),
        Step(batch()),
        Step(batch(), draws()),
        Rows(np.asarray([3, 0, 1])),
        Rows(np.empty(0, np.int64)),
        Move(np.arange(5), np.arange(5) + 100),
        Place(3, np.arange(9), READY),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_a_frame_comes_back_as_it_was(frame: Any) -> None:
    """All numbers, types and shapes; seeds keep their 64 bits."""
    data = encode(frame)

    assert type(decode(data)) is type(frame)
    assert flat(decode(data)) == flat(frame)


def test_a_frame_that_is_cut_off_is_an_error() -> None:
    """Not a step with fewer rows."""
    data = encode(Step(batch(), draws()))

    with pytest.raises((ValueError, msgspec.DecodeError)):
        decode(data[:-8])


def test_rows_that_leave_are_found_by_the_step_s_own_tables() -> None:
    """The slots that a rank works out are those of the leader's book."""
    made = batch()
    cache = KVCache(num_layers=2, num_kv_heads=2, head_dim=4, num_blocks=16, block_size=4, model_version="v")

    assert made.slots_of(made.sends[0]).tolist() == cache.slots([3, 1, 4, 2], 4, 13).tolist()


def test_a_pool_of_some_heads_gives_and_takes_what_a_whole_one_does() -> None:
    """Messages count heads over all ranks; a pool knows where its own begin."""
    shape = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 4, "num_blocks": 8, "block_size": 4}
    whole = KVCache(**shape, model_version="v")  # type: ignore[arg-type]
    part = KVCache(**shape, model_version="v", heads=HeadRange(2, 2))  # type: ignore[arg-type]
    slots = torch.arange(5, 14)
    message = KVReady("r", 0, "k", 0, 2, 3, 1, 0, 9)
    rows = torch.randn(2, 2, 1, 9, 4)
    for cache in (whole, part):
        cache.unpack(message, slots, rows)

    assert part.layout == whole.layout
    assert torch.equal(part.pack(message, slots), rows) and torch.equal(whole.pack(message, slots), rows)
    assert torch.equal(part.keys(1)[1], whole.keys(1)[3])
