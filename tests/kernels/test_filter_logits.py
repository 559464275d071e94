"""Filters -> the set of tokens the documentation says, against a float64 oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.filter_logits import filter_logits

BOUNDARY = 1e-6


def run(logits: Tensor, *rows: tuple[float, int, float, float]) -> Tensor:
    """`filter_logits` with one (temperature, top_k, top_p, min_p) for each row."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return filter_logits(
        logits,
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int64),
        torch.tensor(top_p, dtype=torch.float32),
        torch.tensor(min_p, dtype=torch.float32),
    )


def kept_set(row: Tensor) -> set[int]:
    """Ids that can still be drawn."""
    return set(torch.isfinite(row).nonzero().flatten().tolist())


def expected(logits: np.ndarray, t: float, k: int, p: float, m: float, slack: float = 0.0) -> np.ndarray:
    """One row in float64 from the documentation. `slack` > 0 widens every boundary, < 0 narrows it."""
    z = logits.astype(np.float64)
    if t == 0:
        return z
    z = z / t
    if k > 0:
        floor = sorted(z, reverse=True)[min(k, len(z)) - 1]
        z = np.array([x if x >= floor - slack else -np.inf for x in z])
    if p < 1:
        weight = np.exp(z - z.max())
        weight = weight / weight.sum()
        # Keep a token unless the tokens strictly more probable already hold a mass of top_p.
        above = np.array([weight[z > x].sum() for x in z])
        z = np.where((above < p + slack) | (z == z.max()), z, -np.inf)
    if m > 0:
        share = np.exp(z - z.max())
        z = np.where((share >= m * (1 - slack)) | (z == z.max()), z, -np.inf)
    return z


def check(logits: np.ndarray, row: tuple[float, int, float, float]) -> None:
    """Same kept set, up to tokens within rounding of a boundary; same values on it."""
    ours = run(torch.from_numpy(logits)[None], row)[0].numpy()
    with np.errstate(invalid="ignore"):
        wide, narrow = (np.isfinite(expected(logits, *row, slack)) for slack in (BOUNDARY, -BOUNDARY))
    kept = np.isfinite(ours)

    assert (kept <= wide).all(), "kept a token that the documentation drops"
    assert (kept >= narrow).all(), "dropped a token that the documentation keeps"
    scaled = logits.astype(np.float64) / (row[0] or 1.0)
    np.testing.assert_allclose(ours[kept], scaled[kept], rtol=1e-6)


@pytest.mark.parametrize("num_ids", [2, 7, 211, 1031])
@pytest.mark.parametrize(
    "row",
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 10_000, 1.0, 0.0),
        (1.3, 0, 0.9, 0.0),
        (1.0, 0, 0.5, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.0, 0, 1.0, 1.0),
        (0.5, 20, 0.8, 0.05),
        (2.0, 3, 0.999, 0.3),
    ],
)
def test_filters_keep_what_the_documentation_says(num_ids: int, row: tuple[float, int, float, float]) -> None:
    """Every filter alone and together, on peaked rows of several sizes."""
    generator = np.random.default_rng(num_ids)
    for _ in range(10):
        check((generator.standard_normal(num_ids) * 3).astype(np.float32), row)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    # Few distinct values: ties at every boundary, all the time.
    logits=st.lists(st.integers(-6, 6).map(lambda v: v / 2), min_size=1, max_size=24),
    temperature=st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([1e-6, 0.1, 0.3, 0.73, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.61, 1.0]),
)
def test_filters_agree_with_the_oracle_on_tied_logits(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Random combinations on rows full of ties."""
    check(np.asarray(logits, np.float32), (temperature, top_k, top_p, min_p))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.6, 1.0, 1.7]),
            st.integers(0, 20),
            st.sampled_from([0.2, 0.9, 1.0]),
            st.sampled_from([0.0, 0.1]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_a_row_is_filtered_the_same_alone_and_in_a_batch(
    seed: int, rows: list[tuple[float, int, float, float]]
) -> None:
    """No row's parameters leak into another's."""
    logits = torch.randn(len(rows), 31, generator=torch.Generator().manual_seed(seed)) * 2
    batch = run(logits, *rows)

    for index, row in enumerate(rows):
        assert torch.equal(batch[index], run(logits[index : index + 1], row)[0])


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ((1.0, 2, 1.0, 0.0), {0, 2, 3, 5}),  # three share the second place: all of them stay
        ((1.0, 1, 1.0, 0.0), {0}),
        ((1.0, 5, 1.0, 0.0), {0, 1, 2, 3, 4, 5}),
        ((1.0, 0, 0.9, 0.0), {0, 2, 3, 5}),
        ((1.0, 0, 1.0, 0.3), {0, 2, 3, 5}),
    ],
)
def test_all_tokens_tied_at_a_boundary_are_kept(row: tuple[float, int, float, float], kept: set[int]) -> None:
    """The kept set is a function of the distribution, not of a sort's order among equals."""
    logits = torch.tensor([[3.0, -5.0, 2.0, 2.0, -5.0, 2.0]])

    assert kept_set(run(logits, row)[0]) == kept


def test_a_tiny_top_p_keeps_the_best_token_or_its_ties() -> None:
    """Something is always left to draw."""
    assert kept_set(run(torch.tensor([[0.0, 4.0, 1.0]]), (1.0, 0, 1e-9, 0.0))[0]) == {1}
    assert kept_set(run(torch.tensor([[4.0, 0.0, 4.0]]), (1.0, 0, 1e-9, 0.0))[0]) == {0, 2}


def test_rows_at_temperature_zero_come_back_untouched() -> None:
    """A greedy row between filtered ones keeps its bits, whatever filters it names."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 4
    row = (0.7, 5, 0.5, 0.2)
    out = run(logits, row, (0.0, 5, 0.5, 0.2), row)

    assert torch.equal(out[1], logits[1])
    assert not torch.isfinite(out[0]).all() and not torch.isfinite(out[2]).all()


def test_the_input_is_not_written_to() -> None:
    """A drafter and the capture read the raw logits afterwards."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    run(logits, (0.7, 5, 0.5, 0.2), (1.0, 3, 1.0, 0.5))

    assert torch.equal(logits, before)


def test_a_nan_row_stays_unusable_and_harms_no_other() -> None:
    """Filters must not turn NaN into something that can be drawn."""
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(3))
    clean = run(logits, (0.7, 5, 0.5, 0.2), (0.7, 5, 0.5, 0.2))
    logits[0, 4] = torch.nan
    out = run(logits, (0.7, 5, 0.5, 0.2), (0.7, 5, 0.5, 0.2))

    assert torch.isnan(out[0]).any()
    assert torch.equal(out[1], clean[1])
