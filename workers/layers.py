"""nn.Linear modules of a loaded model -> the same maths on oneDNN's packed weights (CPU)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_NOTHING: list[float] = []


class PackedLinear(nn.Module):
    """y = x W^T + b with W packed once. Flat in the number of rows, and a row's bits do not depend on its batch.

    `paceline bench` shows the first as step.t8_t1, `tests/workers/test_layers.py` checks the second. Packing is explicit
    and per handle, so weights can be swapped by packing aside.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._apply_packed = torch.ops.mkldnn._linear_pointwise.default
        self._add_packed = torch.ops.mkldnn._linear_pointwise.binary
        self._is_wide = linear.in_features > 1024
        self._bias = None if linear.bias is None else linear.bias.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], float32."""
        out: Tensor = self.rows(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        return out

    def rows(self, x: Tensor) -> Tensor:
        """[n, in_features] -> [n, out_features] without a module's overhead."""
        if self._is_wide and x.shape[0] == 1:
            # The one shape whose bits differ from the batched kernel's: give it a second row.
            y: Tensor = self._apply_packed(x.repeat(2, 1), self._packed, self._bias, "none", _NOTHING, "")[:1]
        else:
            y = self._apply_packed(x, self._packed, self._bias, "none", _NOTHING, "")
        return y

    def rows_plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [n, in_features], residual [n, out_features] -> residual + x W^T + b, in one pass."""
        if self._is_wide and x.shape[0] == 1:
            doubled: Tensor = self._add_packed(
                x.repeat(2, 1), residual.repeat(2, 1), self._packed, self._bias, "add"
            )
            return doubled[:1]
        y: Tensor = self._add_packed(x, residual, self._packed, self._bias, "add")
        return y


def can_pack() -> bool:
    """Whether this build and machine have oneDNN's packed linears."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_linears(model: nn.Module) -> int:
    """Replace every nn.Linear by a PackedLinear; how many were replaced. Unpacked weights are released."""
    num_packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child))
                num_packed += 1
    return num_packed
