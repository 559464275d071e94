"""A whole model -> one rank's share of it, in place: plain smaller linears, and a sum over the ranks where rows are cut.

The plain twin is the model before. Nothing is left of who cut it: no distributed tensors, no wrapped forwards, two
sums a layer. Weights as they stand in the files are mapped, not read, until a rank packs its part of them; what
transformers converts while it loads, such as experts that the files hold one by one, is whole in memory for that long.

Bits: a rank's linears are packed like any other (`paceline.workers.layers`), and a sum over ranks adds each element in
the order of the ranks, so a row's bits depend on nothing but the row, as without tensor parallelism. Between degrees
they differ by rounding: the inputs of a row-cut linear are summed in other groups.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.cluster.errors import ModelError
from paceline.cluster.handoff import head_ranges
from paceline.cluster.types import HeadRange
from paceline.workers.layers import can_pack
from paceline.workers.parallel.group import Group
from paceline.workers.parallel.plans import Cut, plan_for


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model's sizes a cut depends on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def check(self, size: int) -> None:
        """
        Raises:
            ModelError: so many ranks cannot share these heads.
        """
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % size:
            raise ModelError(f"tp={size}: expected a divisor of num_attention_heads={heads}")
        if kv_heads % size and size % kv_heads:
            raise ModelError(f"tp={size}: expected a divisor or a multiple of num_key_value_heads={kv_heads}")


def even(total: int, rank: int, size: int) -> slice:
    """A rank's part of what can be cut anywhere."""
    return slice(rank * total // size, (rank + 1) * total // size)


def vocabulary(total: int, rank: int, size: int) -> slice:
    """A rank's token ids. Parts begin at a multiple of 4, as noise does; the last ones are shorter, or empty."""
    step = -(-total // (4 * size)) * 4
    return slice(min(rank * step, total), min((rank + 1) * step, total))


def heads_of(shape: Shape, rank: int, size: int) -> HeadRange:
    """The KV heads that a rank holds."""
    return head_ranges(shape.num_kv_heads, size)[rank]


class RowLinear(nn.Module):
    """y = sum over ranks of x_r W_r^T, + b: the linear whose inputs are cut."""

    bias: Tensor | None

    def __init__(self, linear: nn.Linear, bias: Tensor | None, group: Group) -> None:
        super().__init__()
        self.inner = linear  # a child, so that it is packed
        self.register_buffer("bias", bias, persistent=False)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """[..., this rank's inputs] -> [..., outputs], the same on all ranks."""
        y = self._group.sum(self.inner(x))
        return y if self.bias is None else y + self.bias


def cut_model(model: PreTrainedModel, shape: Shape, group: Group) -> None:
    """Keep of `model` what this rank computes. Every rank does this; the group is used by the forwards only.

    Raises:
        ModelError: so many ranks cannot share this model.
    """
    shape.check(group.size)
    plan = plan_for(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    cutter = _Cutter(shape, group)
    for name, cut in plan.items():
        place, _, last = name.rpartition(".")
        parent = modules[place]
        if name in parameters:
            part = cutter.parameter(name, parameters[name].detach(), cut)
            setattr(parent, last, nn.Parameter(part, requires_grad=False))
        elif cut is Cut.SUMMED:
            modules[name].register_forward_hook(lambda _, __, out: group.sum(out))
        else:
            linear = modules[name]
            if not isinstance(linear, nn.Linear):
                raise ModelError(f"{name}: expected a linear to cut, got {type(linear).__name__}")
            setattr(parent, last, cutter.linear(name, linear, cut))
            if cut in (Cut.HEADS, Cut.FUSED_QKV):
                _tell_attention(parent, shape, group)
            if cut is Cut.FUSED_QKV:  # asks the configuration where q ends
                parent.config = copy.copy(parent.config)
                parent.config.num_attention_heads //= group.size


def _tell_attention(module: Any, shape: Shape, group: Group) -> None:
    """Where an attention module keeps numbers of heads, they are now this rank's."""
    num_heads = shape.num_heads // group.size
    num_kv_heads = heads_of(shape, group.rank, group.size).num
    mine = {
        "num_heads": num_heads,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_key_value_groups": num_heads // num_kv_heads,
    }
    for name, value in mine.items():
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, value)


class _Cutter:
    """The parts of one rank."""

    def __init__(self, shape: Shape, group: Group) -> None:
        self._shape = shape
        self._group = group
        self._rank, self._size = group.rank, group.size

    def linear(self, name: str, linear: nn.Linear, cut: Cut) -> nn.Module:
        """The rank's linear."""
        if cut is Cut.ROWS:
            mine = even(linear.in_features, self._rank, self._size)
            bias = None if linear.bias is None else linear.bias.detach().clone()
            return RowLinear(_linear(linear.weight.detach()[:, mine], None), bias, self._group)
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        parts = self._outputs(name, linear.out_features, cut)
        return _linear(
            _joined([weight[part] for part in parts]),
            None if bias is None else _joined([bias[part] for part in parts]),
        )

    def _outputs(self, name: str, total: int, cut: Cut) -> list[slice]:
        """Which outputs of a linear."""
        shape, rank, size = self._shape, self._rank, self._size
        kv = heads_of(shape, rank, size)
        dim, start, num = shape.head_dim, kv.start * shape.head_dim, kv.num * shape.head_dim
        if cut is Cut.HEADS:  # whole heads, however many outputs each has
            return [even(total, rank, size)]
        if cut is Cut.KV_HEADS:
            _expect(name, total, shape.num_kv_heads * dim)
            return [slice(start, start + num)]
        if cut is Cut.FUSED_QKV:
            q, k = shape.num_heads * dim, shape.num_kv_heads * dim
            _expect(name, total, q + 2 * k)
            return [
                even(q, rank, size),
                slice(q + start, q + start + num),
                slice(q + k + start, q + k + start + num),
            ]
        if cut is Cut.VOCABULARY:
            return [vocabulary(total, rank, size)]
        if cut is Cut.PACKED:
            half = even(total // 2, rank, size)
            return [half, slice(total // 2 + half.start, total // 2 + half.stop)]
        assert cut is Cut.COLUMNS, f"{name}: {cut}"
        return [even(total, rank, size)]

    def parameter(self, name: str, whole: Tensor, cut: Cut) -> Tensor:
        """The rank's part of a parameter that is no linear's."""
        rank, size = self._rank, self._size
        if cut is Cut.SINKS:
            part = whole[even(len(whole), rank, size)]
        elif cut is Cut.PACKED:
            num = whole.shape[1] // 2
            half = even(num, rank, size)
            part = torch.cat([whole[:, half], whole[:, num + half.start : num + half.stop]], dim=1)
        elif cut is Cut.PAIRS:
            pair = even(whole.shape[-1] // 2, rank, size)
            part = whole[..., 2 * pair.start : 2 * pair.stop]
        elif cut is Cut.ROWS:
            part = whole[..., even(whole.shape[-1], rank, size)]
        elif cut is Cut.INNER:
            part = whole[:, even(whole.shape[1], rank, size)]
        else:
            assert cut is Cut.ONCE, f"{name}: {cut}"
            part = whole if rank == 0 else torch.zeros_like(whole)
        return part.clone(memory_format=torch.contiguous_format)


def _expect(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise ModelError(f"{name}: {found} outputs, expected {expected}; its heads cannot be told apart")


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear with these; with copies of its own, unless they are copied anyway when it is packed."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight if can_pack() else weight.clone(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return linear
