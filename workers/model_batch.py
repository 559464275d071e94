"""Chunks and draft trees of many streams -> one packed batch for a forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.cluster.speculation import Tree
from paceline.cluster.types import KVReady
from paceline.kernels.tree_attention import AttentionPlan
from paceline.workers.kv_cache import KVCache

if TYPE_CHECKING:
    from paceline.workers.sampling import Sample, SamplingRows

LayerHook = Callable[[int], None]


class KVSend(msgspec.Struct, frozen=True, array_like=True):
    """Rows that a rank pushes into one of its links once a layer's K and V of the step are in the pool."""

    layer: int
    """The layer behind which they are ready: the last of the message's."""
    segment: int
    """Of the step: its block table says where the rows are."""
    rank: int
    message: KVReady


@dataclass(slots=True)
class PackedBatch:
    """One forward. Legend: T rows.

    input_ids, position_ids: int64 [T]. slots: int64 [T], where each row's K and V go. keep: int64, rows whose logits
    are wanted, may be empty. on_layer: called with a layer's index once its K and V of all rows are in the pool.
    sample: how kept rows are drawn, and sends: what of the pool leaves behind which layer, for runners of several ranks.
    """

    input_ids: Tensor
    position_ids: Tensor
    slots: npt.NDArray[np.int64]
    attention: AttentionPlan
    keep: Tensor
    on_layer: LayerHook | None = None
    sample: Sample | None = None
    sends: Sequence[KVSend] = ()

    def slots_of(self, send: KVSend) -> Tensor:
        """int64 [n]: where the rows of a send lie."""
        size, message = self.attention.block_size, send.message
        at = np.arange(message.start, message.start + message.num_tokens)
        blocks = self.attention.tables[send.segment][at // size].astype(np.int64)
        return torch.from_numpy(blocks * size + at % size)


@dataclass(slots=True)
class Spine:
    """What is drafted behind the rows of a batch, one a stream: B of them.

    depth: levels, at most; fewer if the chance of one whole spine falls below `floor`. width: tokens of each level.
    noise: float32 [depth, B, V], or [0, B, V] if all are greedy. temperatures: float32 [B], 1 where a row is greedy, and
    its noise 0. chances: float64 [B], of the spines so far; updated.
    """

    depth: int
    width: int
    floor: float
    noise: npt.NDArray[np.float32]
    temperatures: npt.NDArray[np.float32]
    chances: npt.NDArray[np.float64]
    draws: SamplingRows | None = None
    """How the first level of each row is drawn, for runners that make their noise themselves; `noise` is empty then."""


class BatchBuilder:
    """Segments, one at a time -> one PackedBatch and the positions of its kept rows."""

    def __init__(self, cache: KVCache) -> None:
        self._block_size = cache.block_size
        self._tables: list[list[int]] = []
        # Rows, flat. Lists, because most segments are one row, where an array costs more than its content.
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._segment: list[int] = []
        self._leading: list[int] = []
        self._own: list[int] = []
        self._own_start: list[int] = [0]
        self._keep: list[int] = []

    def add_chunk(
        self,
        table: list[int],
        ids: npt.NDArray[np.int32],
        start: int,
        *,
        keep_last: bool,
        also: range = range(0),
    ) -> None:
        """Consecutive tokens from position `start` on, causal; `also` are rows to keep besides, before the last."""
        first, num = len(self._ids), len(ids)
        self._add(table, ids.tolist(), range(start, start + num), start)
        self._leading.extend(range(start + 1, start + num + 1))
        self._own_start.extend([len(self._own)] * num)
        self._keep.extend(first + row for row in also)
        if keep_last:
            self._keep.append(len(self._ids) - 1)

    def add_token(self, table: list[int], token: int, at: int) -> None:
        """One token, its logits kept: a plain decode step, the most frequent segment of all."""
        self._keep.append(len(self._ids))
        self._ids.append(token)
        self._positions.append(at)
        self._slots.append(table[at // self._block_size] * self._block_size + at % self._block_size)
        self._segment.append(len(self._tables))
        self._tables.append(table)
        self._leading.append(at + 1)
        self._own_start.append(len(self._own))

    def add_tree(self, table: list[int], tree: Tree, start: int) -> None:
        """A draft tree whose root stands at position `start`; node i uses the slot of position start + i."""
        first = len(self._ids)
        if len(tree) == 1:
            self.add_token(table, int(tree.tokens[0]), start)
            return
        self._add(table, tree.tokens.tolist(), (start + tree.depths).tolist(), start)
        # Nodes that stand where a plain step would put them are leading keys, the others follow one by one.
        paths: list[tuple[int, list[int]]] = []
        for node, parent in enumerate(tree.parents.tolist()):
            leading, own = paths[parent] if parent >= 0 else (start, [])
            is_next = not own and leading == start + node
            paths.append((leading + 1, own) if is_next else (leading, [*own, start + node]))
            self._leading.append(paths[node][0])
            self._own.extend(paths[node][1])
            self._own_start.append(len(self._own))
        self._keep.extend(range(first, len(self._ids)))

    def _add(self, table: list[int], ids: list[int], positions: range | list[int], start: int) -> None:
        size = self._block_size
        self._slots.extend([table[at // size] * size + at % size for at in range(start, start + len(ids))])
        self._segment.extend([len(self._tables)] * len(ids))
        self._tables.append(table)
        self._ids.extend(ids)
        self._positions.extend(positions)

    def build(self, on_layer: LayerHook | None = None) -> tuple[PackedBatch, npt.NDArray[np.int64]]:
        """The batch, and int64 positions of its kept rows."""
        tables = np.zeros((len(self._tables), max(map(len, self._tables))), np.int32)
        for row, table in zip(tables, self._tables, strict=True):
            row[: len(table)] = table
        positions = np.asarray(self._positions, np.int64)
        keep = np.asarray(self._keep, np.int64)
        plan = AttentionPlan(
            tables,
            self._block_size,
            np.asarray(self._segment, np.int32),
            positions,
            np.asarray(self._leading, np.int32),
            np.asarray(self._own_start, np.int32),
            np.asarray(self._own, np.int32),
        )
        batch = PackedBatch(
            torch.from_numpy(np.asarray(self._ids, np.int64)),
            torch.from_numpy(positions),
            np.asarray(self._slots, np.int64),
            plan,
            torch.from_numpy(keep),
            on_layer,
        )
        return batch, positions[keep]
