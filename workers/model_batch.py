"""Chunks and draft trees of many streams -> one packed batch for a forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.cluster.speculation import Tree
from paceline.kernels.tree_attention import KEY_BLOCK, AttentionSegment
from paceline.workers.kv_cache import KVCache

LayerHook = Callable[[int], None]


@dataclass(slots=True)
class PackedBatch:
    """One forward. Legend: T rows.

    input_ids, position_ids, slots: int64 [T]. keep: int64, rows whose logits are wanted, may be empty.
    on_layer: called with a layer's index once its K and V of all rows are in the pool.
    """

    input_ids: Tensor
    position_ids: Tensor
    slots: Tensor
    segments: list[AttentionSegment]
    keep: Tensor
    on_layer: LayerHook | None = None


class BatchBuilder:
    """Segments, one at a time -> one PackedBatch and the positions of its kept rows."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._ids: list[npt.NDArray[np.int32]] = []
        self._positions: list[npt.NDArray[np.int64]] = []
        self._slots: list[Tensor] = []
        self._segments: list[AttentionSegment] = []
        self._keep: list[npt.NDArray[np.int64]] = []
        self._num_rows = 0

    def add_chunk(self, table: list[int], ids: npt.NDArray[np.int32], start: int, *, keep_last: bool) -> None:
        """Consecutive tokens from position `start` on, causal."""
        num = len(ids)
        self._add(table, ids, start, np.arange(start, start + num, dtype=np.int64), None)
        if keep_last:
            self._keep.append(np.asarray([self._num_rows - 1]))

    def add_tree(self, table: list[int], tree: Tree, start: int) -> None:
        """A draft tree whose root stands at position `start`; node i uses the slot of position start + i."""
        own_mask = torch.from_numpy(tree.ancestor_mask()) if len(tree) > 1 else None
        self._add(table, tree.tokens, start, start + tree.depths.astype(np.int64), own_mask)
        self._keep.append(np.arange(self._num_rows - len(tree), self._num_rows))

    def _add(
        self,
        table: list[int],
        ids: npt.NDArray[np.int32],
        start: int,
        positions: npt.NDArray[np.int64],
        own_mask: Tensor | None,
    ) -> None:
        num = len(ids)
        slots = self._cache.slots(table, 0, start + num)
        # Whole runs of the last block, then zeros: what is gathered beyond the stream's own keys is masked.
        unit = math.gcd(self._cache.block_size, KEY_BLOCK)
        key_slots = torch.full((-(-len(slots) // KEY_BLOCK) * KEY_BLOCK,), self._cache.zero_slot)
        key_slots[: len(slots)] = slots
        self._ids.append(ids)
        self._positions.append(positions)
        self._slots.append(slots[start:])
        self._segments.append(
            AttentionSegment(
                self._num_rows, num, start, key_slots, torch.from_numpy(positions), own_mask, unit
            )
        )
        self._num_rows += num

    def build(self, on_layer: LayerHook | None = None) -> tuple[PackedBatch, npt.NDArray[np.int64]]:
        """The batch, and int64 positions of its kept rows."""
        positions = np.concatenate(self._positions)
        keep = np.concatenate(self._keep) if self._keep else np.empty(0, np.int64)
        batch = PackedBatch(
            torch.from_numpy(np.concatenate(self._ids).astype(np.int64)),
            torch.from_numpy(positions),
            torch.cat(self._slots),
            self._segments,
            torch.from_numpy(keep),
            on_layer,
        )
        return batch, positions[keep]
