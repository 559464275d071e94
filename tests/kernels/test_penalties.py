"""Counts and bias -> the adjusted logits of the plain twin, and of the formulas written out by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.penalties import penalise
from paceline.kernels.penalties_reference import penalise_reference

VOCAB = 13


def run(
    logits: torch.Tensor,
    bias: dict[int, float],
    prompt: list[int],
    outputs: list[list[int]],
    blocked: list[list[int]],
    how: tuple[float, float, float],
) -> torch.Tensor:
    """`penalise` at the entries that these tokens need, in an order of their own; how: repetition, frequency, presence."""
    ids = sorted({*bias, *prompt, *(t for row in outputs + blocked for t in row)}, reverse=True)
    entries = [(row, token) for row in range(len(outputs)) for token in ids]
    repetition, frequency, presence = how

    def minus(row: int, token: int) -> float:
        if token in blocked[row]:
            return math.inf
        return frequency * outputs[row].count(token) + presence * (token in outputs[row])

    return penalise(
        logits,
        torch.tensor([row for row, _ in entries], dtype=torch.int64),
        torch.tensor([token for _, token in entries], dtype=torch.int64),
        torch.tensor([bias.get(token, 0.0) for _, token in entries], dtype=torch.float64),
        torch.tensor(
            [repetition if token in prompt or token in outputs[row] else 1.0 for row, token in entries],
            dtype=torch.float64,
        ),
        torch.tensor([minus(*entry) for entry in entries], dtype=torch.float64),
    )


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**31),
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5),
    tokens,
    st.lists(st.tuples(tokens, tokens), min_size=1, max_size=4),
    st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    st.sampled_from([0.0, -2.0, 0.4]),
    st.sampled_from([0.0, -0.7, 2.0]),
)
def test_touching_some_columns_equals_touching_all(
    seed: int,
    bias: dict[int, float],
    prompt: list[int],
    rows: list[tuple[list[int], list[int]]],
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    """Both round to float32 once, at the end; in float64 they may add in another order."""
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    outputs, blocked = [output for output, _ in rows], [block for _, block in rows]
    before = logits.clone()
    ours = run(logits, bias, prompt, outputs, blocked, (repetition, frequency, presence))
    plain = penalise_reference(
        logits, bias, prompt, outputs, blocked, repetition=repetition, frequency=frequency, presence=presence
    )

    assert torch.allclose(ours, plain, rtol=2e-7, atol=1e-12)
    assert torch.equal(torch.isneginf(ours), torch.isneginf(plain))
    assert torch.equal(logits, before)  # the raw logits are still needed


def test_the_formulas_by_hand() -> None:
    """Positive divided, negative multiplied; each count weighs; bias comes first; what is untouched is untouched."""
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, -1.0, 3.0]])
    out = run(logits, {1: 6.0, 5: -4.0}, [0, 1], [[2, 2, 5]], [[4]], (2.0, 0.25, 0.5))

    assert out.tolist() == [[1.0, 2.0, 0.5 - 0.5 - 0.5, 0.5, -torch.inf, -2.0 - 0.25 - 0.5]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_number_is_not_covered_up(bad: float) -> None:
    """Blocking a token whose logit is no number must not make the row look sound."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = bad
    out = run(logits, {3: -100.0}, [3], [[3]], [[3]], (1.5, 1.0, 1.0))

    assert torch.isnan(out.max(dim=-1).values).all()


def test_a_large_bias_keeps_the_order_of_close_logits() -> None:
    """+100 costs a float32 sum five bits; the sum is rounded once, so order can be lost but never turned."""
    logits = torch.from_numpy(np.linspace(0, 1e-5, VOCAB, dtype=np.float32))[None]
    out = run(logits, dict.fromkeys(range(VOCAB), 100.0), [], [[]], [[]], (1.0, 0.0, 0.0))

    assert (out[0].diff() >= 0).all()
