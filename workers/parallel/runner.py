"""A batch and how its rows are drawn -> the same step on every rank of a gang, the tokens at the leader.

`RankRunner` is one rank's share of the model and of the pool; `ParallelRunner` is the leader's, and looks to the engine
like a runner of the whole model. The engine, its books and its verdict exist once, at the leader: the other ranks do
what its frames say (`paceline.workers.parallel.rank`), in the order in which they were sent.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.cluster.errors import GangLost, ModelError
from paceline.cluster.model_files import weights_version
from paceline.cluster.types import KVReady
from paceline.kernels.penalties import penalise
from paceline.kernels.top_logits import top_logits
from paceline.workers.kv_cache import KVCache
from paceline.workers.model_batch import BatchBuilder, PackedBatch
from paceline.workers.model_runner import (
    ModelRunner,
    kv_shape,
    load_model,
    load_model_config,
    placed,
    text_config,
)
from paceline.workers.parallel import device_logits
from paceline.workers.parallel.frames import Draws, End, Frame, Move, Place, Rows, Step, encode
from paceline.workers.parallel.group import Group
from paceline.workers.parallel.logits import draws_of, merge, rank_part
from paceline.workers.parallel.shards import Shape, cut_model, heads_of, vocabulary
from paceline.workers.raw_logits import Top
from paceline.workers.sampling import CachedNoise, DirectNoise, Sample, SamplingRows, choose

if TYPE_CHECKING:
    from paceline.workers.parallel.gang import Gang

IntArray = npt.NDArray[np.int64]

_CUT_TOLERANCE = 1e-3
"""Largest difference of the ranks' logits and the whole model's own, relative to the largest: sums in another order."""
_HALF_TOLERANCE = 5e-2
"""Instead of it where weights have eight bits of mantissa."""
_PROBE = 25

log = structlog.get_logger(__name__)


class RankRunner(ModelRunner):
    """A rank's share: its layers' parts, its KV heads, its token ids."""

    def __init__(
        self,
        model: PreTrainedModel,
        version: str,
        group: Group,
        *,
        num_blocks: int,
        block_size: int,
        attention: str = "jit",
    ) -> None:
        """`model` is whole, and is cut here: the same one on every rank.

        Raises:
            ModelError: so many ranks cannot share it.
        """
        shape = shape_of(text_config(model.config))
        cut_model(model, shape, group)
        if group.device.type == "cuda":
            torch.cuda.set_device(group.device)
            model = placed(model, group.device, torch.bfloat16)
        super().__init__(
            model,
            version,
            num_blocks=num_blocks,
            block_size=block_size,
            attention=attention,
            heads=heads_of(shape, group.rank, group.size),
        )
        self.path = f"transformers: rank of {group.size}"
        self.group = group
        self.widths = [_width(shape.vocab_size, rank, group.size) for rank in range(group.size)]
        self._first_id = vocabulary(shape.vocab_size, group.rank, group.size).start
        self._noise = CachedNoise(first_id=self._first_id)
        self._raw = torch.empty(0, self.widths[group.rank])
        """This rank's part of the last step's rows."""

    def compute(self, batch: PackedBatch, draws: Draws | None) -> list[Tensor]:
        """One step. At the leader: what each rank says about the rows that are drawn."""
        raw = self.launch(batch)
        self._raw = raw if len(raw) else torch.empty(0, self.widths[self.group.rank])
        if draws is None:
            return []
        if self.cache.device.type == "cuda":  # the logits stay where they are
            part = device_logits.rank_part(self._raw, draws, self._first_id)
        else:
            part = rank_part(self._raw, draws, self._noise, self._first_id)
        return self.group.gather(part)

    def collect(self, rows: IntArray) -> Tensor:
        """Rows of the last step's raw logits: whole at the leader, float32 [n, V]; empty elsewhere."""
        mine = torch.zeros(len(rows), max(self.widths))
        chosen = torch.from_numpy(rows).to(self._raw.device)
        mine[:, : self.widths[self.group.rank]] = self._raw[chosen].float().cpu()
        parts = self.group.gather(mine)
        if not parts:
            return torch.empty(0, self.vocab_size)
        return torch.cat([part[:, :width] for part, width in zip(parts, self.widths, strict=True)], dim=1)


class PartedLogits:
    """Rows of the leader's last step; see `paceline.workers.raw_logits.PartedRows`."""

    verdicts = None
    """Trees are walked by the engine."""

    def __init__(
        self,
        runner: ParallelRunner,
        step: int,
        rows: IntArray,
        decided: tuple[IntArray, npt.NDArray[np.bool_]] | None = None,
    ) -> None:
        self.decided = decided
        self._runner, self._step, self._rows = runner, step, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Any) -> PartedLogits:
        chosen = rows if isinstance(rows, slice) else np.asarray(rows)
        return PartedLogits(self._runner, self._step, self._rows[chosen])

    def gather(self) -> Tensor:
        """float32 [n, V]; before the runner's next step."""
        return self._runner.rows_of(self._step, self._rows)

    def top(self, rows: Sequence[int], num_wanted: int) -> Top:
        """Of those rows, which alone come to the leader."""
        return top_logits(self[np.asarray(rows, np.int64)].gather().numpy(), num_wanted)


class ParallelRunner(RankRunner):
    """The leader: says to all ranks what it does, and does it with them."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self._num_steps = 0
        self.probe: tuple[Tensor, IntArray] | None = None
        """The whole model's own logits [1, V] behind fixed tokens, and these tokens."""
        self.gang: Gang | None = None
        """The other ranks' processes."""
        self.cache.on_move = self._moved

    def tell(self, frame: Frame) -> None:
        """To all other ranks; they do it when they have done what was said before."""
        self.group.send(encode(frame))

    def forward(self, batch: PackedBatch) -> PartedLogits:  # type: ignore[override]  # rows that stay where they are
        """Run one packed batch on all ranks, and decide what its `sample` asks for."""
        sample, num_kept = batch.sample, len(batch.keep)
        draws = draws_of(sample, num_kept) if sample is not None and sample.params.positions else None
        self._num_steps += 1
        self.tell(Step(batch, draws))
        parts = self.compute(batch, draws)
        if draws is None:
            return PartedLogits(self, self._num_steps, np.arange(num_kept))
        assert sample is not None
        if self.cache.device.type == "cuda":
            found = device_logits.merge(parts, draws, sample, self.cache.device)
        else:
            found = merge(parts, self.widths, draws, sample)
        for row in found.undecided:
            found.tokens[row], found.usable[row] = self._decide_whole(row, draws, sample)
        return PartedLogits(self, self._num_steps, np.arange(num_kept), (found.tokens, found.usable))

    def _decide_whole(self, row: int, draws: Draws, sample: Sample) -> tuple[int, bool]:
        """A row whose filters keep more than was sent."""
        z = self.rows_of(self._num_steps, draws.rows[[row]])
        mine = draws.change_rows == row
        if mine.any():
            zero = np.zeros(int(mine.sum()), np.int64)
            entries = (
                zero,
                *(c[mine] for c in (draws.change_ids, draws.bias, draws.repetition, draws.minus)),
            )
            z = penalise(z, *(torch.from_numpy(column) for column in entries))
        params = SamplingRows([sample.params.samplings[row]], [sample.params.positions[row]])
        tokens, usable = choose(z, params, DirectNoise())
        return int(tokens[0]), bool(usable[0])

    def rows_of(self, step: int, rows: IntArray) -> Tensor:
        """Rows of a step's raw logits, whole: float32 [n, V]. The ranks keep those of the last step only."""
        assert step == self._num_steps, "these logits are of a step before the last"
        if not len(rows):
            return torch.empty(0, self.vocab_size)
        self.tell(Rows(rows))
        return self.collect(rows)

    def _moved(self, source: Tensor, destination: Tensor) -> None:
        self.tell(Move(source.cpu().numpy(), destination.cpu().numpy()))

    def place(self, rank: int, message: KVReady, slots: Tensor) -> None:
        """Have a rank put KV into its pool that arrived there; it says itself whether it was intact."""
        self.tell(Place(rank, slots.cpu().numpy(), message))

    def close(self) -> None:
        """Dissolve the gang; none of its processes outlives this."""
        try:
            self.tell(End())
        except GangLost:
            log.info("gang_lost_already")
        if self.gang is not None:
            self.gang.end()

    @torch.inference_mode()
    def check(self) -> None:
        """
        Raises:
            ModelError: the ranks together compute something else than the whole model did.
        """
        assert self.probe is not None
        wanted, ids = self.probe
        builder = BatchBuilder(self.cache)
        builder.add_chunk(
            list(range(-(-len(ids) // self.cache.block_size))), ids.astype(np.int32), 0, keep_last=True
        )
        found = self.forward(builder.build()[0]).gather()
        difference = float((found - wanted).abs().max())
        tolerance = _CUT_TOLERANCE if self.cache.dtype == torch.float32 else _HALF_TOLERANCE
        if not difference <= tolerance * float(wanted.abs().max()):  # NaN is refused too
            raise ModelError(
                f"tp={self.group.size}: logits of the ranks differ from the whole model's by {difference:.1e}, expected "
                f"at most {tolerance:.0e} of the largest; the family has something that was cut wrongly"
            )


def shape_of(config: Any) -> Shape:
    """What of a decoder's configuration a cut depends on."""
    _, kv_heads, dim = kv_shape(config)
    return Shape(int(config.num_attention_heads), kv_heads, dim, int(config.vocab_size))


def num_blocks_of(
    config: Any, *, tp: int, kv_memory_mb: int, block_size: int, dtype: torch.dtype = torch.float32
) -> tuple[int, str]:
    """Blocks of every rank's pool, and why: so many megabytes on each hold its heads.

    Raises:
        ModelError: not one block fits, or so many ranks cannot share the model.
    """
    shape = shape_of(config)
    shape.check(tp)
    layers = kv_shape(config)[0]
    heads = max(heads_of(shape, rank, tp).num for rank in range(tp))
    per_block = KVCache.bytes_per_token(layers, heads, shape.head_dim, dtype) * block_size
    num_blocks = (kv_memory_mb << 20) // per_block
    if num_blocks < 1:
        raise ModelError(
            f"kv_memory_mb={kv_memory_mb}: expected at least {-(-per_block // (1 << 20))}; "
            f"one block of {block_size} tokens takes {per_block} bytes on each rank"
        )
    reason = f"{kv_memory_mb} MB / ({per_block} bytes a block of {block_size} tokens on each of {tp} ranks)"
    return num_blocks, reason


def load_rank(folder: Path, group: Group, *, num_blocks: int, block_size: int, attention: str) -> RankRunner:
    """A rank's share of a model folder. The group is joined later; no forward can run before.

    Raises:
        ModelError: the folder, its weights or its family cannot be used so.
    """
    model = load_model(folder, load_model_config(folder))
    probe = None if group.rank else _whole_logits(model, num_blocks * block_size)
    kind = RankRunner if group.rank else ParallelRunner
    runner = kind(
        model,
        weights_version(folder),
        group,
        num_blocks=num_blocks,
        block_size=block_size,
        attention=attention,
    )
    if isinstance(runner, ParallelRunner):
        runner.probe = probe
    del model
    _release_memory()
    return runner


def _release_memory() -> None:
    """What was needed to load goes back to the system at once: it is as much as other ranks need beside this one."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


@torch.inference_mode()
def _whole_logits(model: PreTrainedModel, room: int) -> tuple[Tensor, IntArray]:
    """The last logits of fixed tokens as the family itself computes them, [1, V], and the tokens."""
    config = text_config(model.config)
    num = min(_PROBE, room, int(config.max_position_embeddings))
    ids = (np.arange(num) * 7919 + 13) % int(config.vocab_size)
    model.set_attn_implementation("eager")
    wanted: Tensor = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0, -1:].float()
    model.set_attn_implementation("paceline")
    return wanted, ids


def _width(vocab_size: int, rank: int, size: int) -> int:
    mine = vocabulary(vocab_size, rank, size)
    return int(mine.stop - mine.start)
