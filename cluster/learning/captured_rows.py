"""The largest logits of each captured token <-> rows of bytes, as records hold them and shards store them.

Every row has the same size, so a record is one piece of memory, a shard's column that piece as it lies, and nothing is
converted on the way. Bytes that are alike lie together: the upper ones of ids are nearly all 0, and cost no storage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.void]
"""[N] of `row_type(m)`."""

_LEAST = -60000.0
"""Half precision reaches hardly further; less probable than that is nothing."""


def row_type(num_top: int) -> np.dtype[np.void]:
    """5 bytes for each of the largest logits, best first, and 4 for the row.

    Ids are below 2^24. Log-probabilities are before temperature; near 0, where it matters, half precision is finest.
    """
    return np.dtype(
        [
            ("ids_low", "<u2", (num_top,)),
            ("ids_high", "u1", (num_top,)),
            ("log_probs", "<f2", (num_top,)),
            ("log_sum", "<f4"),
        ]
    )


def pack(
    ids: npt.NDArray[np.int32], log_probs: npt.NDArray[np.floating], log_sums: npt.NDArray[np.floating]
) -> Rows:
    """Rows of ids and log-probabilities [N, m] and of the logs of the sums of all exponentials [N]."""
    rows = np.empty(len(ids), row_type(ids.shape[1]))
    rows["ids_low"] = ids & 0xFFFF
    rows["ids_high"] = ids >> 16
    rows["log_probs"] = np.maximum(log_probs, _LEAST)
    rows["log_sum"] = log_sums
    return rows


def unpack(data: bytes, num_top: int) -> Rows:
    """Rows of a shard, not to be written to; ValueError if they are no whole number."""
    return np.frombuffer(data, row_type(num_top))


def join(parts: Sequence[Rows]) -> Rows:
    """A copy of all of them, one behind the other."""
    found: Rows = np.concatenate([_as_bytes(part) for part in parts]).view(parts[0].dtype)[:, 0]
    return found


def select(rows: Rows, places: npt.NDArray[np.integer]) -> Rows:
    """A copy of some of them, in this order."""
    found: Rows = _as_bytes(rows)[places].view(rows.dtype)[:, 0]
    return found


def _as_bytes(rows: Rows) -> npt.NDArray[np.uint8]:
    """[N, bytes of a row]: the same memory. Field by field numpy would take ten times as long to copy it."""
    return rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)


def ids_of(rows: Rows) -> npt.NDArray[np.int32]:
    """[N, m]"""
    found: npt.NDArray[np.int32] = rows["ids_low"] | rows["ids_high"].astype(np.int32) << 16
    return found
