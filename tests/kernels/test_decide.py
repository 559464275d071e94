"""Rows of scores -> the same token and the same verdict as torch's max gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.kernels.decide import best, decide


@pytest.mark.parametrize("num_ids", [1, 2, 17, 4096])
def test_both_backends_agree_on_ties_infinities_and_nan(num_ids: int) -> None:
    """Few distinct values make ties everywhere; rows with NaN or without anything left are not usable."""
    generator = torch.Generator().manual_seed(num_ids)
    scores = torch.randint(-3, 4, (200, num_ids), generator=generator).float()
    scores[1::10] = -torch.inf
    scores[2::10, num_ids // 2] = torch.nan
    scores[3::10, 0] = torch.nan
    scores[4::10, -1] = torch.inf
    scores[5::10, : num_ids // 2] = -torch.inf
    ids, usable = decide(scores)
    plain_ids, plain_usable = decide(scores, backend="reference")

    assert np.array_equal(usable, plain_usable) and 0 < usable.sum() < 200
    assert np.array_equal(ids[usable], plain_ids[usable])
    first = [row.tolist().index(row.max()) for row in scores[usable]]
    assert ids[usable].tolist() == first


@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_best_few_and_their_chances_are_those_of_softmax(width: int) -> None:
    """Order, chances, filtered tokens, a row narrower than asked for; NaN does not look like a chance."""
    scores = torch.randn(50, 311, generator=torch.Generator().manual_seed(width)) * 8
    scores[7, 3:] = -torch.inf
    ids, chances = best(scores, width)
    plain_ids, plain = best(scores, width, backend="reference")

    seen = plain > 0
    assert np.array_equal(ids[seen], plain_ids[seen])
    assert chances == pytest.approx(plain, rel=1e-5, abs=1e-30)
    assert best(scores[:, :1], width)[1].tolist() == [[1.0]] * 50
    scores[9, 5] = torch.nan
    assert (
        np.isnan(best(scores, width)[1][9]).all()
        and np.isnan(best(scores * 0 - torch.inf, width)[1][0]).all()
    )
