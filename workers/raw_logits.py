"""Rows of raw logits, here or in parts on several ranks -> float32 [n, V] of those that somebody reads.

Most steps read none: what decides tokens works on the parts (`paceline.workers.parallel.logits`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor


class PartedRows(Protocol):
    """Rows of one step whose columns lie on several ranks, until the next step begins."""

    decided: tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]] | None
    """What was drawn from the rows, if the step said how."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: object) -> PartedRows:
        """Some of the rows; nothing moves yet."""
        ...

    def gather(self) -> Tensor:
        """float32 [n, V]."""
        ...


RawLogits = Tensor | PartedRows


def whole(logits: RawLogits) -> Tensor:
    """The rows here, float32 [n, V]."""
    return logits if isinstance(logits, Tensor) else logits.gather()
