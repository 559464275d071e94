"""Rows with one token each, how they are drawn -> the best tokens of level after level behind them, from one graph.

A draft's levels depend on each other through one token a stream, and that token need not leave the device: a level's best
token is copied into the next level's inputs, noise is made where it is used. Everything else of all levels is known
before the first: positions, slots, and who sees what. So the host fills the buffers of all levels, replays once, and reads
once. How many levels are of use depends on what they say, and is settled by the host afterwards; those that are not
cost their forwards.

The plain twin is `DraftEngine._extend`, a batch and a wait for each level; on a CPU the loop runs through the plain twins
of its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels.keyed_noise import gumbel_vocabulary
from paceline.kernels.tree_attention import AttentionPlan
from paceline.workers.cuda_buffers import Buffer
from paceline.workers.cuda_graphs import StaticStep, record
from paceline.workers.fused_sampling import children
from paceline.workers.model_batch import PackedBatch, Spine

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class DraftLoop:
    """One bucket's loop: so many rows, levels and children."""

    def __init__(self, steps: Sequence[StaticStep], width: int, vocab_size: int) -> None:
        """`steps`: one for each level, with buffers of their own."""
        self._steps = steps
        self._width = width
        self._vocab_size = vocab_size
        rows, device = steps[0].shape.rows, steps[0].ids.device
        self._keys = Buffer(4 * rows, torch.int64, device)
        self._seeds, self._positions, self._choices, self._prompts = self._keys.there.view(4, rows)
        self._heat = Buffer(2 * rows, torch.float32, device)
        self._temperatures, self._noisy = self._heat.there.view(2, rows)
        shape = (len(steps), rows, width)
        self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._shares = torch.zeros(shape, dtype=torch.float32, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def load(self, batch: PackedBatch, spine: Spine) -> None:
        """Put rows and draws of all levels into the buffers.

        Raises:
            TooLarge: they do not fit.
        """
        plan, num = batch.attention, len(batch.slots)
        streams = np.arange(num)
        for level, step in enumerate(self._steps):
            positions = plan.positions + level
            slots = plan.tables[plan.row_segment, positions // plan.block_size].astype(np.int64)
            ahead = AttentionPlan(
                plan.tables,
                plan.block_size,
                plan.row_segment,
                positions,
                plan.num_leading + np.int32(level),
                plan.own_start,
                plan.own,
            )
            step.load(
                PackedBatch(
                    batch.input_ids,
                    torch.from_numpy(positions),
                    slots * plan.block_size + positions % plan.block_size,
                    ahead,
                    torch.from_numpy(streams),
                )
            )
        assert spine.draws is not None
        samplings = spine.draws.samplings
        self._keys.ready()
        keys = self._keys.array.reshape(4, -1)
        keys[:] = 0
        keys[0, :num] = np.asarray([s.seed for s in samplings], np.uint64).astype(np.int64)
        keys[1, :num] = spine.draws.positions
        keys[2, :num] = [s.choice for s in samplings]
        keys[3, :num] = [s.prompt_index for s in samplings]
        self._keys.copy()
        self._heat.ready()
        heat = self._heat.array.reshape(2, -1)
        heat[0], heat[1] = 1, 0
        heat[0, :num] = spine.temperatures
        heat[1, :num] = [s.temperature > 0 for s in samplings]
        self._heat.copy()

    @torch.inference_mode()
    def run(self) -> None:
        """All levels of what is loaded; launched, not waited for."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()

    def capture(self, pool: Any) -> None:
        """Record the loop, with rows loaded. `pool` as for `StaticStep.capture`."""
        self._graph, _ = record(self._compute, pool)

    def _compute(self) -> None:
        for level, step in enumerate(self._steps):
            keys = self._seeds, self._positions + level, self._choices, self._prompts
            noise = gumbel_vocabulary(*keys, self._vocab_size)
            # Greedy rows have temperature 1 and none of the noise, which is finite.
            scores = step.compute().float() / self._temperatures[:, None] + noise * self._noisy[:, None]
            ids, shares = children(scores, self._width)
            self._ids[level].copy_(ids)
            self._shares[level].copy_(shares)
            if level + 1 < len(self._steps):
                self._steps[level + 1].ids.copy_(ids[:, 0])

    def found(
        self, num_rows: int, chances: npt.NDArray[np.float64], floor: float
    ) -> tuple[IntArray, FloatArray]:
        """int64, float32 [levels, B, width], up to the first level with which some spine's chance is below `floor`.

        Waits for the device. `chances`, of the spines so far, are updated.
        """
        ids = self._ids[:, :num_rows].cpu().numpy()
        shares = self._shares[:, :num_rows].cpu().numpy()
        for level in range(len(ids)):
            chances *= shares[level, :, 0]
            if not (chances >= floor).all():  # a NaN ends it as well
                return ids[: level + 1], shares[: level + 1]
        return ids, shares
