"""Rows of scores -> the same token and the same verdict as torch's max gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.kernels.decide import decide


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
