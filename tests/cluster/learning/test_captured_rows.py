"""Ids and log-probabilities -> bytes -> the same ids, and log-probabilities in half precision."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.cluster.learning.captured_rows import ids_of, pack, row_type, unpack

RANDOM = np.random.default_rng(3)


@pytest.mark.parametrize(("num", "num_top"), [(1, 1), (5, 3), (7, 128)])
def test_what_is_packed_is_there_again(num: int, num_top: int) -> None:
    """Ids of 24 bits exactly, sums exactly, log-probabilities rounded once."""
    ids = RANDOM.integers(0, 1 << 24, (num, num_top)).astype(np.int32)
    ids[0, 0] = (1 << 24) - 1
    log_probs = -RANDOM.exponential(8, (num, num_top)).astype(np.float32)
    log_sums = RANDOM.normal(0, 9, num).astype(np.float32)
    again = unpack(pack(ids, log_probs, log_sums).tobytes(), num_top)

    assert np.array_equal(ids_of(again), ids) and ids_of(again).dtype == np.int32
    assert np.array_equal(again["log_probs"], log_probs.astype(np.float16))
    assert np.array_equal(again["log_sum"], log_sums)
    assert row_type(num_top).itemsize == 5 * num_top + 4


def test_what_half_precision_cannot_hold_is_improbable_not_infinite() -> None:
    rows = pack(np.zeros((1, 3), np.int32), np.array([[-np.inf, -1e9, np.nan]]), np.zeros(1))

    assert rows["log_probs"][0, :2].tolist() == [-60000.0, -60000.0]
    assert np.isnan(rows["log_probs"][0, 2])


def test_bytes_that_are_no_whole_rows_are_refused() -> None:
    with pytest.raises(ValueError):
        unpack(bytes(5 * 4 + 3), 4)
