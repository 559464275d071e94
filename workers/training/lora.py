"""A model -> the same model with low-rank adapters beside its linear layers, and merged into them again.

Adapters are merged before a version is published: a draft worker serves every version by the same forward.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.cluster.errors import ModelError

GAIN = 2.0
"""alpha / rank: how much of an adapter's product counts. Twice the rank is the common alpha."""


class LoraLinear(nn.Module):
    """y = W x + gain B A x with W frozen. A [r, in] starts random, B [out, r] at zero: nothing changes at first.

    Source: Hu et al. 2106.09685.
    """

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        rank = min(rank, base.in_features, base.out_features)
        bound = 1 / math.sqrt(base.in_features)
        start = (2 * torch.rand(rank, base.in_features, generator=generator) - 1) * bound
        self.lora_a = nn.Parameter(start.to(base.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.base(x)) + GAIN * F.linear(F.linear(x, self.lora_a), self.lora_b)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The plain layer with the product added."""
        self.base.weight += GAIN * self.lora_b @ self.lora_a
        return self.base


def add_adapters(model: nn.Module, rank: int, seed: int) -> int:
    """Freeze a model and put an adapter beside each linear layer but the head; how many there are.

    Raises:
        ModelError: there is no such layer.
    """
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    heads = {id(head) for head in (model.get_output_embeddings(),) if head is not None}  # type: ignore[operator]
    num = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and id(layer) not in heads and not isinstance(parent, LoraLinear):
                setattr(parent, name, LoraLinear(layer, rank, generator))
                num += 1
    if num == 0:
        raise ModelError("learning.train.method='lora': the draft has no linear layers; use `full`")
    return num


def merge_adapters(model: nn.Module) -> None:
    """Add all adapters to their layers and take them away."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, LoraLinear):
                setattr(parent, name, layer.merged())


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapters by layer, as PEFT names them without its prefix; empty if there are none."""
    return {
        f"{name}.{'lora_A' if which == 'lora_a' else 'lora_B'}.weight": getattr(layer, which).detach().clone()
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLinear)
        for which in ("lora_a", "lora_b")
    }
