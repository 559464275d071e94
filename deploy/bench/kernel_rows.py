"""A kernel, a shape -> a row of the kernels' card: what it runs, beside what, and what it cannot be faster than."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Runs:
    """Calls on inputs that exist already. ours: no host synchronisation. plain: the torch operations, None if there is
    nothing to compare with. others: libraries that are installed here, by name.
    """

    ours: Callable[[], object]
    plain: Callable[[], object] | None = None
    others: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    can_capture: bool = False
    """Whether torch's and the others' calls may be captured in a CUDA graph, as ours are."""


def nothing_else(_: torch.device) -> float:
    """Moving bytes is the floor."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """name: short, unique. bytes_moved: the least. figure: its name in the JSON line, without `_floor` and `_vs_torch`."""

    name: str
    shape: str
    bytes_moved: int
    make: Callable[[torch.device, int], Runs]
    """Device and number of the copy -> calls on inputs of this copy's own."""
    figure: str = ""
    least_seconds: Callable[[torch.device], float] = nothing_else
    """Time that arithmetic takes at least on this device."""
    has_bandwidth: bool = False
    """Whether the share of a copy's bandwidth is a figure of its own."""

    def names(self) -> list[str]:
        """Its figures."""
        if not self.figure:
            return []
        kinds = ["floor", "vs_torch", *(["bandwidth", "vs_best"] if self.has_bandwidth else [])]
        return [f"{self.figure}_{kind}" for kind in kinds]
