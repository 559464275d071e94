"""Rows of raw logits, here, on a device or in parts on several ranks -> float32 [n, V] of those that somebody reads.

Most steps read none: what decides tokens works where the logits are (`paceline.workers.device_step`,
`paceline.workers.parallel.logits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paceline.kernels.top_logits import top_logits
from paceline.workers.verifiers.base import Verdict

Top = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""What `top_logits` gives: ids, log-probabilities, logs of the sums."""


class PartedRows(Protocol):
    """Rows of one step that are not here, until the next step begins: on a device, or their columns on several ranks."""

    @property
    def decided(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]] | None:
        """What was drawn from the rows, if the step said how. May wait for a device."""
        ...

    @property
    def verdicts(self) -> Sequence[Verdict] | None:
        """Of the step's trees, if they were walked where the rows are; accepted KV is in its place then."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: object) -> PartedRows:
        """Some of the rows; nothing moves yet."""
        ...

    def gather(self) -> Tensor:
        """float32 [n, V]."""
        ...

    def top(self, rows: Sequence[int], num_wanted: int) -> Top:
        """`top_logits` of some of the rows."""
        ...


RawLogits = Tensor | PartedRows


def whole(logits: RawLogits) -> Tensor:
    """The rows here, float32 [n, V]."""
    return logits if isinstance(logits, Tensor) else logits.gather()


def top_of(logits: RawLogits, rows: Sequence[int], num_wanted: int) -> Top:
    """The largest logits of some rows, wherever they are."""
    if isinstance(logits, Tensor):
        return top_logits(logits.numpy(), num_wanted, rows=rows)
    return logits.top(rows, num_wanted)
