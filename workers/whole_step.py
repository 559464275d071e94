"""A loaded decoder of the Llama kind -> its logits and KV, a whole step in one compiled loop (CPU).

Weights are repacked into panels once, in the smallest form that keeps every bit: bfloat16 where the model's weights are
that, as most are, else float32; int8 if somebody asked for it and its error. Arithmetic is float32's in any case. The
plain twin is `paceline.workers.lean`.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding
from numba.core import config as numba_config
from torch import Tensor, nn

from paceline.kernels.spine_jit import levels
from paceline.kernels.step_jit import BLOCK, LINE, TILE, step
from paceline.kernels.vectors_jit import PAIR
from paceline.workers.kv_cache import KVCache
from paceline.workers.model_batch import PackedBatch, Spine

AnyArray = npt.NDArray[Any]
_INPUTS_OF_A_TILE = 64
"""int8; 32 of bfloat16."""
_PHASES = 10
"""Of a layer, at most."""
_LARGE = 3_000_000
"""Weights of a model that waits for memory: from here on a second thread pays for its wake-up, and tiles, whose start is
slower, pay for a row. Smaller ones stay in a core's cache."""
_INPUTS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
"""Inputs that lie together in a panel."""


@dataclass(slots=True)
class _Linears:
    """One linear of every layer: panels [L, pairs, inputs * 32], and scale and bias of each output [L, 2, outputs], or
    [L, 0, outputs] if there is neither."""

    panels: AnyArray
    affine: AnyArray


@dataclass(slots=True)
class _Buffers:
    """What a step writes, for up to so many rows."""

    x: AnyArray
    projected: AnyArray
    normed: AnyArray
    attended: AnyArray
    gated: AnyArray
    attended_rows: AnyArray
    """As float32, where inputs can be made only of whole rows; else `attended` itself."""
    gated_rows: AnyArray
    scales: list[AnyArray]
    """Of the rows of `normed`, `attended` and `gated`."""


class WholeStepDecoder:
    """Weights repacked once from a Hugging Face model that `LeanDecoder` can run; the model can be dropped afterwards."""

    def __init__(
        self,
        model: Any,
        rotations: tuple[AnyArray, AnyArray],
        *,
        int8_weights: bool = False,
        tiles: bool = True,
        many_rows: bool = False,
    ) -> None:
        """`rotations`: cos and sin [positions, D], the signs of rotate_half in sin. `tiles=False` keeps to vectors.

        `many_rows`: a small model takes tiles too, which gain from 16 rows on and lose below.
        """
        decoder, config = model.model, model.config
        layers = list(decoder.layers)
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        is_half = all(torch.equal(m.weight, m.weight.bfloat16().float()) for m in linears)
        self.weights = "int8" if int8_weights else "bfloat16" if is_half else "float32"
        """As what the panels are stored."""
        kind = getattr(torch, self.weights)
        num_weights = sum(linear.weight.numel() for linear in linears)
        is_large = num_weights >= _LARGE
        can_tile = tiles and self.weights != "float32" and has_tiles()
        self._has_tiles = can_tile and (is_large or many_rows)
        self.gains_from_many_rows = can_tile and not self._has_tiles
        """Whether made for many rows it would be faster at many."""
        self._is_shared = is_large
        self._outputs = 2 * PAIR if self._has_tiles and self.weights == "bfloat16" else PAIR
        """That are computed together."""
        self._vocab_size = int(config.vocab_size)
        self._num_heads = int(config.num_attention_heads)
        self._eps = np.float32(config.rms_norm_eps)
        self._scaling = np.float32(layers[0].self_attn.scaling)
        self._cos_PD, self._sin_PD = rotations
        self._embedding = decoder.embed_tokens.weight.detach().numpy()
        self._qkv = _pack([_side_by_side(_qkv(layer)) for layer in layers], kind, self._outputs)
        self._out = _pack([_side_by_side([layer.self_attn.o_proj]) for layer in layers], kind, self._outputs)
        self._gate_up = _pack(
            [_alternating(layer.mlp.gate_proj, layer.mlp.up_proj) for layer in layers], kind, self._outputs
        )
        self._down = _pack([_side_by_side([layer.mlp.down_proj]) for layer in layers], kind, self._outputs)
        self._head = _pack([_side_by_side([model.lm_head])], kind, self._outputs)
        self._norm_in = _norms([layer.input_layernorm for layer in layers])
        self._norm_mlp = _norms([layer.post_attention_layernorm for layer in layers])
        self._q_norm = _norms([getattr(layer.self_attn, "q_norm", None) for layer in layers])
        self._k_norm = _norms([getattr(layer.self_attn, "k_norm", None) for layer in layers])
        self._norm = _norms([decoder.norm])
        self._windows = np.asarray([_window(layer.self_attn) for layer in layers], np.int64)
        parts = (self._qkv, self._out, self._gate_up, self._down, self._head)
        self.weight_bytes = sum(part.panels.nbytes + part.affine.nbytes for part in parts)
        """Of what every step reads."""
        self._shapes = [_tile_shapes(rows) for rows in range(TILE + 1)]
        self._buffers: dict[int, _Buffers] = {}

    @staticmethod
    def why_not(model: Any) -> str:
        """Why a model that can run lean cannot run here; empty if it can."""
        dim = int(model.model.layers[0].self_attn.head_dim)
        return f"head_dim {dim}, no multiple of 16" if dim % 16 else ""

    @property
    def arithmetic(self) -> str:
        """What the products run on, and as what the weights are stored."""
        return f"{'tiles' if self._has_tiles else 'vectors'} {self.weights}"

    def forward(self, batch: PackedBatch, cache: KVCache) -> Tensor:
        """float32 logits [len(keep), V]; see `ModelRunner.forward`."""
        num_layers = len(self._windows)
        logits = torch.empty(len(batch.keep), self._head.affine.shape[-1])
        arguments = self._arguments(batch, cache, logits.numpy())
        if batch.on_layer is None:
            self._run(0, num_layers, arguments)
        else:
            for layer in range(num_layers):
                self._run(layer, layer + 1, arguments)
                batch.on_layer(layer)
        return logits[:, : self._vocab_size]

    def levels(self, batch: PackedBatch, cache: KVCache, spine: Spine) -> tuple[AnyArray, AnyArray] | None:
        """See `ModelRunner.levels`."""
        if self._is_shared and torch.get_num_threads() > 1:
            return None
        logits = np.empty((len(batch.keep), self._head.affine.shape[-1]), np.float32)
        shared = self._shared(0, len(self._windows), self._arguments(batch, cache, logits))
        ids = np.empty((spine.depth, len(logits), min(spine.width, self._vocab_size)), np.int64)
        shares = np.empty(ids.shape, np.float32)
        num = levels(shared, spine.noise, spine.temperatures, spine.chances, spine.floor, ids, shares)
        return ids[:num], shares[:num]

    def _arguments(self, batch: PackedBatch, cache: KVCache, logits: AnyArray) -> tuple[Any, ...]:
        plan, num = batch.attention, len(batch.slots)
        room = self._room(num)
        return (
            batch.input_ids.numpy(), plan.positions, batch.slots, batch.keep.numpy(), plan.row_segment,
            plan.num_leading, plan.own_start, plan.own, plan.tables, plan.block_size,
            self._embedding, self._norm_in, self._qkv.panels, self._qkv.affine, self._q_norm, self._k_norm,
            self._out.panels, self._out.affine, self._norm_mlp, self._gate_up.panels, self._gate_up.affine,
            self._down.panels, self._down.affine, self._norm, self._head.panels, self._head.affine,
            self._windows, cache.array, self._cos_PD, self._sin_PD, self._num_heads, self._eps, self._scaling,
            room.x, room.normed, room.scales[0], room.projected, room.attended_rows, room.attended, room.scales[1],
            room.gated_rows, room.gated, room.scales[2], logits,
        )  # fmt: skip

    def _run(self, first: int, stop: int, arguments: tuple[Any, ...]) -> None:
        """These layers, by as many threads as torch may use where they have enough to do."""
        shared = self._shared(first, stop, arguments)
        if self._is_shared:
            _helpers.ask(torch.get_num_threads() - 1, shared)
        step(*shared)

    def _shared(self, first: int, stop: int, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """What each thread that joins a step is told."""
        num_rows = len(arguments[0])
        tickets = np.zeros((_PHASES * (stop - first) + 3) * 2 * LINE, np.int64)
        block = _even(num_rows) if self._has_tiles else BLOCK
        return (first, stop, *arguments, tickets, self._shapes[block], block)

    def _room(self, num_rows: int) -> _Buffers:
        """Buffers for so many rows, in whole blocks. Columns that nobody writes are zero, as their weights are."""
        num = -(-num_rows // TILE) * TILE
        found = self._buffers.get(num)
        if found is None:
            if len(self._buffers) >= 8:
                self._buffers.clear()
            size, attended_size, gated_size = (
                part.panels.shape[-1] // self._outputs for part in (self._qkv, self._out, self._down)
            )
            normed, attended, gated = (
                self._inputs(num, width) for width in (size, attended_size, gated_size)
            )
            needs_rows = self._has_tiles and self.weights == "int8"
            found = self._buffers[num] = _Buffers(
                np.zeros((num, size), np.float32),
                np.zeros((num, self._qkv.affine.shape[-1]), np.float32),
                normed,
                attended,
                gated,
                np.zeros((num, attended_size), np.float32) if needs_rows else attended,
                np.zeros((num, gated_size), np.float32) if needs_rows else gated,
                [np.zeros(num, np.float32) for _ in range(3)],
            )
        return found

    def _inputs(self, num: int, size: int) -> AnyArray:
        """Rows of inputs of a product, as its arithmetic wants them."""
        if not self._has_tiles:
            return np.zeros((num, size), np.float32)
        blocks = num // TILE
        if self.weights == "int8":
            return np.zeros((blocks, size // 64, 3, TILE, 64), np.int8)
        return np.zeros((blocks, size // 32, 3, TILE, 32), np.uint16)


class _Helpers:
    """Threads that join steps. They sleep in between; a step does not wait for them to come."""

    def __init__(self) -> None:
        self._asks: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._num = 0
        self._lock = Lock()

    def ask(self, num: int, shared: tuple[Any, ...]) -> None:
        """`num` threads more for this step."""
        if num > self._num:
            with self._lock:
                while self._num < num:
                    Thread(target=self._work, name=f"step-{self._num}", daemon=True).start()
                    self._num += 1
        for _ in range(num):
            self._asks.put(shared)

    def _work(self) -> None:
        while True:
            step(*self._asks.get())


_helpers = _Helpers()


def round_to_int8(model: nn.Module) -> None:
    """Replace every linear's weight by whole multiples, -127 to 127, of a step for each output: lossy."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            steps = _steps(module.weight.detach())
            rounded = (module.weight.detach() / steps[:, None]).round() * steps[:, None]
            module.weight = nn.Parameter(
                rounded, requires_grad=False
            )  # an embedding that was tied stays as it is


def _steps(weight: Tensor) -> Tensor:
    """The step of each output."""
    return weight.abs().amax(1).clamp(min=1e-30) / 127


def has_tiles() -> bool:
    """Whether this machine has AMX for bfloat16, the system lets us use it, and numba compiles for this machine."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    chosen: Any = numba_config
    if chosen.CPU_NAME is not None or chosen.CPU_FEATURES is not None:
        return False
    features = binding.get_host_cpu_features()
    if not all(features.get(name) for name in ("amx-tile", "amx-bf16", "amx-int8", "avx512f")):
        return False
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): a process has to ask before it may use tiles.
    return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)


def _even(num_rows: int) -> int:
    """Rows of a block where as few blocks as can be are as equal as can be: what tiles cost goes by their rows."""
    return -(-num_rows // -(-num_rows // TILE))


def _tile_shapes(rows: int) -> AnyArray:
    """64 bytes that configure the tiles, of 64 bytes a row: sums and inputs have so many rows, weights, in 7, have 16."""
    shapes = np.zeros(64, np.uint8)
    shapes[0] = 1  # the only palette there is
    shapes[16:32].view(np.uint16)[:] = 64
    shapes[48:56] = [rows] * 7 + [16]
    return shapes


def _qkv(layer: Any) -> list[nn.Linear]:
    attention = layer.self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _window(attention: Any) -> int:
    """Sliding window of a layer, 0 for none; per layer where layers differ, else for the whole model."""
    return int(getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)) or 0)


def _norms(norms: Sequence[Any]) -> AnyArray:
    """[L, size], or [L, 0] if there is no such norm."""
    if norms[0] is None:
        return np.empty((len(norms), 0), np.float32)
    return np.stack([norm.weight.detach().numpy() for norm in norms])


def _bias(linear: nn.Linear) -> Tensor:
    return torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach()


def _side_by_side(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    """Weight [outputs, inputs] and bias of linears with the same input."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    return weight, torch.cat([_bias(linear) for linear in linears])


def _alternating(gate: nn.Linear, up: nn.Linear) -> tuple[Tensor, Tensor]:
    """The same with 16 outputs of the gate and 16 of up in turn, so that a pair of panels has both."""
    parts = []
    for linear in (gate, up):
        weight, bias = _padded(linear.weight.detach(), 16), _padded(_bias(linear)[:, None], 16)
        parts.append((weight.view(-1, 16, weight.shape[1]), bias.view(-1, 16)))
    (g, g_bias), (u, u_bias) = parts
    return torch.stack([g, u], 1).flatten(0, 2), torch.stack([g_bias, u_bias], 1).flatten()


def _padded(rows: Tensor, multiple: int) -> Tensor:
    """Zero rows up to a multiple."""
    return nn.functional.pad(rows, (0, 0, 0, -len(rows) % multiple))


def _pack(linears: Sequence[tuple[Tensor, Tensor]], kind: torch.dtype, outputs: int) -> _Linears:
    """Panels, so many outputs together, and affine of one linear of every layer."""
    num_out, num_in = linears[0][0].shape
    groups, inputs = -(-num_out // outputs), -(-num_in // _INPUTS_OF_A_TILE) * _INPUTS_OF_A_TILE
    panels = torch.empty(len(linears), groups, inputs * outputs, dtype=kind)
    affine = torch.zeros(len(linears), 2, groups * outputs)
    affine[:, 0] = 1
    together = _INPUTS[kind]
    for layer, (weight, bias) in enumerate(linears):
        affine[layer, 1, :num_out] = bias
        if kind == torch.int8:
            steps = _steps(weight)
            affine[layer, 0, :num_out] = steps
            weight = (weight / steps[:, None]).round()
        whole = nn.functional.pad(weight, (0, inputs - num_in, 0, groups * outputs - num_out)).to(kind)
        shaped = whole.view(groups, outputs // 16, 16, inputs // together, together).permute(0, 3, 1, 2, 4)
        panels[layer] = shaped.reshape(groups, -1)
    found: AnyArray = (
        panels.view(torch.int16).numpy().view(np.uint16) if kind == torch.bfloat16 else panels.numpy()
    )
    is_plain = kind != torch.int8 and not bool(affine[:, 1].any())
    return _Linears(
        found, np.empty((len(linears), 0, affine.shape[2]), np.float32) if is_plain else affine.numpy()
    )
