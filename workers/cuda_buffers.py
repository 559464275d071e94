"""Arrays of the host -> a tensor of the device that never moves, by a copy from pinned memory that nobody waits for."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


class Buffer:
    """A flat tensor on the device and its twin on the host, filled there and copied at once."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.there = torch.zeros(size, dtype=dtype, device=device)
        self._here = torch.zeros(size, dtype=dtype, pin_memory=is_cuda)
        self.array: npt.NDArray[Any] = self._here.numpy()
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def ready(self) -> None:
        """Wait until the last copy has read the host's side."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self) -> None:
        self.there.copy_(self._here, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
