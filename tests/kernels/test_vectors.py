"""Single instructions of the whole step against float64, at sizes and values that could break them."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.kernels import vectors_jit as v
from paceline.kernels.compiled import compiled


@compiled
def put_all(x, values):
    for row in range(len(values)):
        for i in range(0, values.shape[1], 16):
            v.put(x, row, i, values, row * values.shape[1] + i)


@compiled
def gate_all(x, both):
    for row in range(len(both)):
        v.put_gated(x, row, 0, both, row * 32)


@compiled
def softmax_from(scores, at, num, scaling):
    return v.softmax(scores, at, num, scaling)


@compiled
def multiply(x, w, num_in, out):
    for first in range(0, len(x), 8):
        num = min(8, len(x) - first)
        if num == 1:
            v.vectors(1, 1, x, first * x.shape[1], x.shape[1], w, 0, num_in, out[first : first + 1])
        elif num == 2:
            v.vectors(2, 1, x, first * x.shape[1], x.shape[1], w, 0, num_in, out[first : first + 2])
        elif num == 3:
            v.vectors(3, 1, x, first * x.shape[1], x.shape[1], w, 0, num_in, out[first : first + 3])
        elif num <= 6:
            v.vectors(6, 1, x, first * x.shape[1], x.shape[1], w, 0, num_in, out[first : first + 6])
        else:
            v.vectors(8, 1, x, first * x.shape[1], x.shape[1], w, 0, num_in, out[first : first + 8])


def test_three_halves_are_the_number_bit_for_bit() -> None:
    """Every mantissa and sign, in its place among rows and columns; infinity and NaN stay unusable."""
    values = np.random.default_rng(0).normal(size=(18, 64)).astype(np.float32)
    values *= np.float32(10.0) ** np.random.default_rng(1).integers(-25, 30, values.shape).astype(np.float32)
    values[17, :4] = [0.0, -0.0, np.inf, np.nan]
    x = np.zeros((2, 2, 3, 16, 32), np.uint16)
    put_all(x, values)
    pieces = (x.astype(np.uint32) << 16).view(np.float32).transpose(2, 0, 3, 1, 4).reshape(3, 32, 64)[:, :18]

    with np.errstate(invalid="ignore"):
        total = pieces[0].astype(np.float64) + pieces[1] + pieces[2]
    assert np.array_equal(total[:17], values[:17].astype(np.float64))
    assert np.array_equal(total[17, :2], [0.0, 0.0]) and np.isnan(total[17, 2:4]).all()
    plain = np.zeros((18, 64), np.float32)
    put_all(plain, values)
    assert np.array_equal(plain, values, equal_nan=True)


def test_gate_is_silu_times_up_for_all_sizes_of_its_input() -> None:
    """From far below underflow to far above overflow of exp; NaN stays in its place."""
    both = torch.randn(6, 32) * torch.tensor([0.01, 1.0, 10.0, 80.0, 1e4, 1.0])[:, None]
    both[5, 0] = torch.nan
    out = torch.empty(6, 16)
    gate_all(out.numpy(), both.numpy())

    expected = F.silu(both[:, :16].double()) * both[:, 16:].double()
    torch.testing.assert_close(out[:5].double(), expected[:5], rtol=2e-6, atol=1e-27)
    assert out[5, 0].isnan() and not out[5, 1:].isnan().any()


@pytest.mark.parametrize("num", [1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize("scale", [0.01, 1.0, 300.0])
def test_softmax_over_the_first_scores_only(num: int, scale: float) -> None:
    """What stands behind them, NaN even, does not count and becomes zero up to a vector's end."""
    whole = -(-num // 16) * 16
    scores = (torch.randn(3, whole + 16) * scale).float()
    scores[1, num:] = torch.nan
    before = scores.clone()
    total = softmax_from(scores.numpy(), scores.shape[1], num, np.float32(0.7))

    expected = ((before[1, :num].double() - before[1, :num].double().max()) * np.float32(0.7)).exp()
    torch.testing.assert_close(scores[1, :num].double(), expected, rtol=1e-5, atol=2e-38)
    assert total == pytest.approx(float(expected.sum()), rel=1e-5)
    assert (scores[1, num:whole] == 0).all() and scores[1, whole:].isnan().all()
    assert torch.equal(scores[[0, 2]], before[[0, 2]])


def test_softmax_with_nan_is_nan() -> None:
    """Also where the NaN is not the last one looked at."""
    scores = torch.randn(1, 48)
    scores[0, 3] = torch.nan
    assert np.isnan(softmax_from(scores.numpy(), 0, 40, np.float32(1)))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_products_round_once_in_a_fixed_order(kind: str) -> None:
    """The same bits for one row, a few or eight, and those of multiply-adds over the inputs in their order."""
    num_in = 64
    weight = torch.randn(32, num_in)
    together = {"float32": 1, "bfloat16": 2, "int8": 4}[kind]
    if kind == "int8":
        weight = (weight * 40).round().clamp(-127, 127)
    elif kind == "bfloat16":
        weight = weight.bfloat16().float()
    panels = weight.view(2, 16, num_in // together, together).permute(2, 0, 1, 3).reshape(1, 1, -1)
    stored = panels.to(getattr(torch, kind))
    array = stored.view(torch.int16).numpy().view(np.uint16) if kind == "bfloat16" else stored.numpy()
    x = torch.randn(8, num_in)
    out = np.empty((8, 32), np.float32)
    multiply(x.numpy(), array, num_in, out)
    total = np.zeros((8, 32), np.float32)
    for k in range(
        num_in
    ):  # float64 holds a product of float32 exactly, so a sum rounds once, or twice very seldom
        product = x[:, k : k + 1].double().numpy() * weight[:, k].double().numpy()
        total = (product + total).astype(np.float32)

    assert np.abs(out - total).max() <= 1e-6 * np.abs(total).max()
    assert (out == total).mean() > 0.99
    for num in (1, 2, 3, 6):
        few = np.empty((num, 32), np.float32)
        multiply(x[:num].contiguous().numpy(), array, num_in, few)
        assert np.array_equal(few, out[:num])


def test_how_many_registers_there_are_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and scores, worked at in blocks for 32 vectors of 16 numbers or for 16 of 8."""
    rng = np.random.default_rng(5)
    x, w = rng.normal(size=(8, 48)).astype(np.float32), rng.normal(size=48 * 32).astype(np.float32)
    keys, slots = rng.normal(size=(40, 48)).astype(np.float32), rng.integers(0, 40, 16)
    found = []
    for is_wide in (False, True):
        monkeypatch.setattr(v, "HAS_WIDE_REGISTERS", is_wide)

        @numba.njit
        def both(x, w, keys, slots, products, few, scores):
            v.vectors(8, 1, x, 0, x.shape[1], w, 0, x.shape[1], products)
            v.vectors(3, 1, x, 0, x.shape[1], w, 0, x.shape[1], few)
            v.scores_of(x, 0, keys, 0, slots, 0, x.shape[1], scores, 0)

        outs = [np.empty(shape, np.float32) for shape in ((8, 32), (3, 32), 16)]
        both(x, w, keys, slots, *outs)
        found.append(outs)

    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)
    assert np.allclose(found[0][0], x @ w.reshape(48, 2, 16).reshape(48, 32), atol=1e-4)
