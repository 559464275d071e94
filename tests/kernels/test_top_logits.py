"""Rows of logits -> the same tokens in the same order as a full sort gives, and sums as float64 gives them."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.kernels.top_logits import top_logits

RANDOM = np.random.default_rng(5)


def odd_rows(num_ids: int) -> np.ndarray:
    """Flat, steep, tied, ordered, with a peak, with little left: rows that find out thresholds."""
    rows = RANDOM.normal(0, 3, (12, num_ids)).astype(np.float32)
    rows[1] *= 100
    rows[2] *= 1e-4
    rows[3] = np.round(rows[3])
    rows[4] = 1.0
    rows[5] = np.sort(rows[5])
    rows[6] = -np.sort(-rows[6])
    rows[7, num_ids // 2] = 1e4
    rows[8, : num_ids // 2] = -np.inf
    rows[9, 1:] = -np.inf
    rows[10] += 1e3
    rows[11, num_ids // 3] = -3e38
    return rows


@pytest.mark.parametrize("num_ids", [1, 2, 127, 128, 129, 300, 4096, 5003])
@pytest.mark.parametrize("num_wanted", [1, 7, 128])
def test_both_backends_agree(num_ids: int, num_wanted: int) -> None:
    """Ids exactly, the lower first among equals; sums within float32's rounding."""
    rows = odd_rows(num_ids)
    ids, log_probs, log_sums = top_logits(rows, num_wanted)
    plain_ids, plain, plain_sums = top_logits(rows, num_wanted, backend="reference")

    assert ids.shape == log_probs.shape == (12, min(num_wanted, num_ids)) and ids.dtype == np.int32
    assert np.array_equal(ids, plain_ids)
    assert np.allclose(log_sums, plain_sums, rtol=1e-6, atol=1e-5)
    assert np.allclose(log_probs, plain, rtol=1e-6, atol=2e-5)


def test_no_rows_are_no_rows() -> None:
    """And a view of a larger array is read as it lies."""
    assert top_logits(np.empty((0, 9), np.float32), 3)[0].shape == (0, 3)
    whole = odd_rows(64)
    assert np.array_equal(top_logits(whole[3:5], 5)[0], top_logits(whole, 5)[0][3:5])


def test_only_wanted_rows_are_read_and_in_the_order_asked_for() -> None:
    """Capture wants rows of accepted nodes, of all that a step has; zeros of either sign are equals."""
    logits = odd_rows(300)
    logits[2] = np.where(np.arange(300) % 2 == 0, -0.0, 0.0)
    wanted = [7, 2, 2, 11]
    both = [top_logits(logits, 40, rows=wanted, backend=backend) for backend in ("jit", "reference")]

    for mine, plain, all_rows in zip(*both, top_logits(logits, 40), strict=True):
        assert np.array_equal(mine, all_rows[wanted])
        assert np.allclose(mine, plain, rtol=1e-6, atol=2e-5)
    assert both[0][0][1].tolist() == list(range(40))
