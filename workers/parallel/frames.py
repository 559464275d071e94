"""What ranks are to do next <-> one frame of flat arrays: a step, rows of its logits, KV that moves or arrived.

No pickle: a header of int64 numbers, then the arrays' bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from paceline.cluster.types import KVReady
from paceline.kernels.tree_attention import AttentionPlan
from paceline.workers.model_batch import KVSend, PackedBatch

IntArray = npt.NDArray[np.int64]
_TYPES = tuple(np.dtype(name) for name in ("<i8", "<i4", "<f8", "<f4", "u1"))
_END, _STEP, _ROWS, _MOVE, _PLACE, _CONNECT = range(6)


@dataclass(frozen=True, slots=True)
class Draws:
    """How the step's sampled rows are drawn, as far as ranks have to know.

    rows: int64 [R], among those whose logits are kept. temperature: float64 [R]. keys: int64 [R, 4]: seed (the bits of
    64), choice, prompt, position. filtered: int64 [F], which of the R are drawn from less than everything. The rest are
    changed entries, [P] each, as `penalise` takes them; their rows count among the R.
    """

    rows: IntArray
    temperature: npt.NDArray[np.float64]
    keys: IntArray
    filtered: IntArray
    change_rows: IntArray
    change_ids: IntArray
    bias: npt.NDArray[np.float64]
    repetition: npt.NDArray[np.float64]
    minus: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class End:
    """The gang is dissolved."""


@dataclass(frozen=True, slots=True)
class Step:
    """Run a batch; then, if `draws` says so, tell the leader what this rank's tokens have to say."""

    batch: PackedBatch
    draws: Draws | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Give the leader these rows of the last step's raw logits: int64 [n]."""

    rows: IntArray


@dataclass(frozen=True, slots=True)
class Move:
    """Copy KV from slots to slots, int64 [n] each: the path that the verdict accepted."""

    source: IntArray
    destination: IntArray


@dataclass(frozen=True, slots=True)
class Place:
    """KV that arrived at `rank` over a link of its own: into these slots, int64 [n], and check it there."""

    rank: int
    slots: IntArray
    message: KVReady


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to the worker that the leader belongs to: KV links will be spoken of."""


Frame = End | Step | Rows | Move | Place | Connect


@dataclass(slots=True)
class _Writer:
    numbers: list[int]
    data: list[bytes] = field(default_factory=list)

    def add(self, array: npt.NDArray[Any]) -> None:
        self.numbers += [_TYPES.index(array.dtype), array.ndim, *array.shape]
        self.data.append(np.ascontiguousarray(array).tobytes())

    def frame(self) -> bytes:
        head = np.asarray([len(self.numbers), *self.numbers], "<i8")
        return b"".join([head.tobytes(), *self.data])


class _Reader:
    def __init__(self, frame: bytes) -> None:
        num = int(np.frombuffer(frame, "<i8", 1)[0])
        self._numbers = iter(np.frombuffer(frame, "<i8", num, 8).tolist())
        self._frame, self._at = frame, 8 * (num + 1)

    def number(self) -> int:
        return int(next(self._numbers))

    def array(self) -> Any:
        """A copy of its own: tensors are made of them."""
        kind = _TYPES[self.number()]
        shape = [self.number() for _ in range(self.number())]
        num = int(np.prod(shape, dtype=np.int64))
        found = np.frombuffer(self._frame, kind, num, self._at).reshape(shape).copy()
        self._at += found.nbytes
        return found


def encode(frame: Frame) -> bytes:
    """A frame as bytes."""
    match frame:
        case End():
            return _Writer([_END]).frame()
        case Step(batch, draws):
            return _encode_step(batch, draws)
        case Rows(rows):
            return _written([_ROWS], rows)
        case Move(source, destination):
            return _written([_MOVE], source, destination)
        case Place(rank, slots, message):
            return _written([_PLACE, rank], slots, _packed(message))
        case Connect():
            return _Writer([_CONNECT]).frame()


def decode(data: bytes) -> Frame:
    """Inverse of `encode`."""
    reader = _Reader(data)
    kind = reader.number()
    if kind == _STEP:
        return _decode_step(reader)
    if kind == _ROWS:
        return Rows(reader.array())
    if kind == _MOVE:
        return Move(reader.array(), reader.array())
    if kind == _PLACE:
        rank, slots = reader.number(), reader.array()
        return Place(rank, slots, msgspec.msgpack.decode(reader.array().tobytes(), type=KVReady))
    return Connect() if kind == _CONNECT else End()


def _written(numbers: list[int], *arrays: npt.NDArray[Any]) -> bytes:
    writer = _Writer(numbers)
    for array in arrays:
        writer.add(array)
    return writer.frame()


def _packed(what: object) -> npt.NDArray[np.uint8]:
    return np.frombuffer(msgspec.msgpack.encode(what), np.uint8)


def _encode_step(batch: PackedBatch, draws: Draws | None) -> bytes:
    plan = batch.attention
    arrays: Sequence[npt.NDArray[Any]] = [
        batch.input_ids.numpy(),
        plan.positions,
        batch.slots,
        batch.keep.numpy(),
        plan.tables,
        plan.row_segment,
        plan.num_leading,
        plan.own_start,
        plan.own,
        _packed(list(batch.sends)),
    ]
    if draws is not None:
        arrays = [*arrays, *(getattr(draws, name) for name in Draws.__slots__)]
    return _written([_STEP, plan.block_size, draws is not None], *arrays)


def _decode_step(reader: _Reader) -> Step:
    block_size, has_draws = reader.number(), reader.number()
    ids, positions, slots, keep, tables, segment, leading, own_start, own, sends = (
        reader.array() for _ in range(10)
    )
    batch = PackedBatch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        slots,
        AttentionPlan(tables, block_size, segment, positions, leading, own_start, own),
        torch.from_numpy(keep),
        sends=msgspec.msgpack.decode(sends.tobytes(), type=list[KVSend]),
    )
    return Step(batch, Draws(*(reader.array() for _ in Draws.__slots__)) if has_draws else None)
