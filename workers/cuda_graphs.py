"""Packed batches -> logits, from buffers that never move: a forward of one fixed size a bucket, captured once, replayed.

What a step does to a GPU must not wait for Python, and must be the same addresses each time. So a bucket of T rows owns
its inputs on the device: ids, positions, slots, which rows are kept, and the attention's pieces for each window of the
model. A step fills them with two copies from pinned memory and replays. Rows that a batch does not have are token 0
written to a block that nobody reads, in no piece and not kept. Nothing between the copies and the logits waits for the
device; whoever reads the logits does.

Weights are never part of what was captured, their addresses are: `swap` copies new ones into place under the graphs.

`capture` False runs the same buffers eagerly: the plain twin, and what is tested on CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.cluster.speculation import Tree
from paceline.kernels import attention_pieces_reference
from paceline.kernels.attention_pieces import ARRAYS, Cut, Pieces, plan_pieces
from paceline.kernels.tree_attention import default_cut
from paceline.workers.cuda_buffers import Buffer
from paceline.workers.kv_cache import KVCache
from paceline.workers.model_batch import BatchBuilder, PackedBatch, Spine

if TYPE_CHECKING:
    from paceline.workers.draft_loop import DraftLoop

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of a step. A step runs in the smallest that holds it: at most half of one is idle, and a weight-bound step of
more rows costs little more."""


class TooLarge(Exception):
    """The batch does not fit the buffers of its bucket."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a bucket has room for."""

    rows: int
    streams: int
    blocks: int
    """Of one stream's table."""
    block_size: int

    def arrays(self, cut: Cut) -> dict[str, tuple[int, ...]]:
        """Shape of each array of `Pieces`."""
        tiles = 3 * self.rows
        per_row = cut.num_programs + 2
        pieces = tiles + cut.num_programs
        if cut.split is not None:
            per_row = -(-self.blocks * self.block_size // cut.split) + 2
            pieces = tiles + self.streams * per_row
        words = -(-self.rows // 32)
        merged = min(self.rows * per_row, pieces * cut.rows_per_tile)
        return {
            "tables": (self.streams, self.blocks),
            "segment_start": (self.streams + 1,),
            "leading": (self.rows,),
            "positions": (self.rows,),
            "base": (self.rows,),
            "bits": (self.rows, words),
            "ranks": (self.rows, words),
            "tile_rows": (tiles, cut.rows_per_tile),
            "tile_segment": (tiles,),
            "tile_base": (tiles,),
            "piece_tile": (pieces,),
            "piece_start": (pieces,),
            "piece_stop": (pieces,),
            "piece_entry": (pieces,),
            "program_start": (cut.num_programs + 1,),
            "merge_start": (self.rows + 1,),
            "merge_entry": (merged,),
        }


_Result = TypeVar("_Result")


@torch.inference_mode()
def record(compute: Callable[[], _Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, _Result]:
    """What `compute` launches, as a graph, and what it gave while it was recorded: the tensors that replays fill."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles kernels and lets libraries make their workspaces
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Another thread may load new weights meanwhile; what it allocates is no part of this.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = compute()
    return graph, result


class _PieceBuffer:
    """Room for one window's pieces."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self._buffer = Buffer(sum(int(np.prod(shape)) for shape in shapes.values()), torch.int32, device)
        self._arrays: dict[str, npt.NDArray[np.int32]] = {}
        views, at = [], 0
        for name in ARRAYS:
            size = int(np.prod(shapes[name]))
            self._arrays[name] = self._buffer.array[at : at + size].reshape(shapes[name])
            views.append(self._buffer.there[at : at + size].view(shapes[name]))
            at += size
        self.pieces = Pieces(*views)

    def fill(self, arrays: Mapping[str, npt.NDArray[np.int32]]) -> None:
        """Copy one step's arrays. What lies behind them is left over from earlier steps, and no piece leads there.

        Raises:
            TooLarge: one of them has no room.
        """
        for name, array in arrays.items():
            if any(have < want for have, want in zip(self._arrays[name].shape, array.shape, strict=True)):
                raise TooLarge(f"{name} {array.shape}: room for {self._arrays[name].shape}")
        self._buffer.ready()
        for name, array in arrays.items():
            self._arrays[name][tuple(slice(size) for size in array.shape)] = array
        # Words and rows that this step does not have.
        for name in ("bits", "ranks"):
            self._arrays[name][:, arrays[name].shape[1] :] = 0
        merge_start = arrays["merge_start"]
        self._arrays["merge_start"][len(merge_start) :] = merge_start[-1]
        tables = arrays["segment_start"]
        self._arrays["segment_start"][len(tables) :] = tables[-1]
        self._buffer.copy()


class StaticStep:
    """One bucket: its buffers, and the forward that reads them."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        shape: StepShape,
        *,
        cut: Cut,
        windows: set[int | None],
        backend: str,
    ) -> None:
        """`windows`: those that layers may ask for; those that none does ask for are dropped after the first run."""
        self.shape = shape
        self.cut = cut
        self._model = model
        self._cache = cache
        self._backend = backend
        device = cache.device
        shapes = shape.arrays(cut)
        rows = shape.rows
        self._inputs = Buffer(4 * rows, torch.int64, device)
        self.ids, self.positions, self.slots, self.keep = self._inputs.there.view(4, rows)
        self._pieces = {window: _PieceBuffer(shapes, device) for window in windows}
        self._used: set[int | None] = set()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)

    @torch.inference_mode()
    def load(self, batch: PackedBatch) -> None:
        """Put a batch into the buffers.

        Raises:
            TooLarge: it does not fit.
        """
        for window, buffer in self._pieces.items():
            buffer.fill(plan_pieces(batch.attention, self.cut, window=window))
        self._inputs.ready()
        inputs = self._inputs.array.reshape(4, self.shape.rows)
        inputs[:2] = 0
        inputs[2] = self._cache.scratch_slot
        inputs[3] = 0
        for row, values in zip(
            inputs,
            (batch.input_ids.numpy(), batch.position_ids.numpy(), batch.slots, batch.keep.numpy()),
            strict=True,
        ):
            row[: len(values)] = values
        self._inputs.copy()

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Logits [rows, V] of the loaded batch's kept rows, then of anything; good until the next run of any bucket."""
        if self._graph is not None:
            self._graph.replay()
            return self._logits
        return self.compute()

    def capture(self, pool: Any) -> None:
        """Record the forward, with a batch loaded. `pool`: memory that all graphs share, for one runs at a time."""
        self._graph, self._logits = record(self.compute, pool)

    def compute(self) -> Tensor:
        """Launch the forward as it is, captured or not: logits [rows, V]."""
        logits: Tensor = self._model(
            input_ids=self.ids[None],
            position_ids=self.positions[None],
            use_cache=False,
            logits_to_keep=self.keep,
            paceline_step=self,
        ).logits[0]
        self._pieces = {window: self._pieces[window] for window in self._used}
        return logits

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """One layer's attention, for the model's hook: K and V into the pool, then all rows over what they see."""
        cache = self._cache
        self._used.add(window)
        cache.write(layer, self.slots, k_TGD, v_TGD)
        how: dict[str, Any] = {
            "block_size": cache.block_size,
            "scaling": scaling,
            "window": window,
            "softcap": softcap,
            "sinks_H": sinks_H,
        }
        pieces, keys, values = self._pieces[window].pieces, cache.keys(layer), cache.values(layer)
        if self._backend == "pieces":
            return attention_pieces_reference.attend(q_THD, keys, values, pieces, self.cut, **how)
        from paceline.kernels import (
            tree_attention_triton as kernel,
        )  # there is no Triton where there is no GPU

        return kernel.attend(q_THD, keys, values, pieces, self.cut, **how)


@dataclass(slots=True)
class GraphedDecoder:
    """A model's steps of up to so many rows, each bucket made when it is first needed."""

    model: PreTrainedModel
    cache: KVCache
    max_streams: int
    max_context: int
    capture: bool
    backend: str = "triton"
    cut: Cut | None = None
    buckets: tuple[int, ...] = BUCKETS
    num_too_large: int = 0
    """Batches that no bucket had room for; they ran without buffers."""
    _steps: dict[int, StaticStep] = field(default_factory=dict)
    _loops: dict[tuple[int, int, int], DraftLoop] = field(default_factory=dict)
    """By rows, levels and children; each recorded when it is first needed, a tenth of a second or two."""
    _pool: Any = None

    def takes(self, batch: PackedBatch) -> bool:
        """A step that decides tokens and that nobody looks into while it runs."""
        return (
            batch.on_layer is None
            and not batch.sends
            and len(batch.keep) > 0
            and len(batch.slots) <= self.buckets[-1]
            and len(batch.attention.tables) <= self.max_streams
        )

    def capture_all(self) -> None:
        """Record every bucket that the pool can fill now, not in the first requests. Writes into blocks that nobody owns yet."""
        size = self.cache.block_size
        for rows in self.buckets:
            if rows > min(self.max_context, self.cache.num_blocks * size):
                break
            builder = BatchBuilder(self.cache)
            chain = Tree.build(0, [0] * (rows - 1), list(range(-1, rows - 2)))
            builder.add_tree(list(range(-(-rows // size))), chain, 0)
            self.forward(builder.build()[0])

    def forward(self, batch: PackedBatch) -> Tensor | None:
        """Logits [len(keep), V] of the model's type on the pool's device, not waited for; None if the batch does not fit."""
        num_rows = len(batch.slots)
        rows = next(size for size in self.buckets if size >= num_rows)
        step = self._steps.get(rows)
        try:
            if step is None:
                step = self._make(rows)
                step.load(batch)
                if self.capture:
                    self._pool = self._pool or torch.cuda.graph_pool_handle()
                    step.capture(self._pool)
                self._steps[rows] = step
            else:
                step.load(batch)
        except TooLarge:
            self.num_too_large += 1
            return None
        return step.run()[: len(batch.keep)]

    @torch.inference_mode()
    def levels(
        self, batch: PackedBatch, spine: Spine
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        """See `ModelRunner.levels`; None if the rows do not fit, or nobody says how they are drawn."""
        num_rows = len(batch.slots)
        if spine.draws is None or num_rows > self.max_streams or num_rows > self.buckets[-1]:
            return None
        rows = next(size for size in self.buckets if size >= num_rows)
        vocab_size = int(self.model.config.get_text_config().vocab_size)
        key = rows, spine.depth, min(spine.width, vocab_size)
        loop = self._loops.get(key)
        try:
            if loop is None:
                steps = [self._make(rows) for _ in range(spine.depth)]
                from paceline.workers.draft_loop import DraftLoop  # it is made of our steps

                loop = DraftLoop(steps, key[2], vocab_size)
                loop.load(batch, spine)
                if self.capture:
                    self._pool = self._pool or torch.cuda.graph_pool_handle()
                    loop.capture(self._pool)
                self._loops[key] = loop
            else:
                loop.load(batch, spine)
        except TooLarge:
            self.num_too_large += 1
            return None
        loop.run()
        return loop.found(num_rows, spine.chances, spine.floor)

    def on(self, cache: KVCache) -> GraphedDecoder:
        """The same for another pool; nothing that was made or captured is taken along."""
        return replace(self, cache=cache, _steps={}, _loops={}, _pool=None)

    @torch.no_grad()
    def exchange(self, other: GraphedDecoder) -> None:
        """Between two steps: our model's weights and those of another model of the same shape change places."""
        theirs = dict(other.model.named_parameters(remove_duplicate=False))
        seen: set[int] = set()
        for name, tensor in self.model.named_parameters(remove_duplicate=False):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            kept = tensor.clone()
            tensor.copy_(theirs[name])
            theirs[name].copy_(kept)

    def _make(self, rows: int) -> StaticStep:
        cache = self.cache
        shape = StepShape(
            rows, min(rows, self.max_streams), -(-self.max_context // cache.block_size), cache.block_size
        )
        num_heads = int(self.model.config.get_text_config().num_attention_heads)
        cut = self.cut or default_cut(num_heads, cache.layout.num_kv_heads, cache.device)
        return StaticStep(
            self.model, cache, shape, cut=cut, windows=windows_of(self.model), backend=self.backend
        )


def windows_of(model: PreTrainedModel) -> set[int | None]:
    """Windows that a layer of this model may ask for."""
    found: set[int | None] = {None, getattr(model.config.get_text_config(), "sliding_window", None)}
    found.update(getattr(module, "sliding_window", None) for module in model.modules())
    return {window for window in found if window is None or isinstance(window, int)}
