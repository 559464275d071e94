"""Rows of logits -> the same largest logits as the CPU's kernel finds, from Triton and from shards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from paceline.kernels import top_logits as contract
from paceline.kernels.top_logits import TopRows, join_top_rows, top_logits
from paceline.kernels.top_logits_triton import top_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_same(found: TopRows, logits: torch.Tensor, rows: list[int], num: int, own: list[int]) -> None:
    wanted = [at for at, row in enumerate(rows) if row >= 0]
    chosen = logits[[rows[at] for at in wanted]].float().cpu()
    ids, log_probs, log_sums = top_logits(chosen.numpy(), num, backend="reference")

    assert found.ids_RM.cpu()[wanted].tolist() == ids.tolist()
    np.testing.assert_allclose(found.log_sums_R.cpu()[wanted], log_sums, rtol=1e-6, atol=1e-6)
    shares = (found.logits_RM - found.log_sums_R[:, None]).cpu()[wanted]
    np.testing.assert_allclose(shares, log_probs, rtol=1e-6, atol=2e-6)
    expected = [chosen[i, own[at]].item() for i, at in enumerate(wanted)]
    assert found.own_R.cpu()[wanted].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_of_some_rows(dtype: torch.dtype) -> None:
    """Rows in any order, some of them none; ties of coarse logits to the lower id; a flat row; two finite logits."""
    logits = (torch.randn(5, 1301, generator=torch.Generator().manual_seed(0)) * 3).to(dtype).to(DEVICE)
    logits[1] = 0.5
    logits[3, 2:] = -torch.inf
    rows, own = [4, -1, 0, 1, 3], [7, 0, 1300, 1, 2]
    found = top_rows(
        logits,
        torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        16,
        torch.tensor(own, dtype=torch.int32, device=DEVICE),
        block=256,
    )

    assert_same(found, logits, rows, 16, own)
    where = torch.tensor([rows, own], dtype=torch.int32, device=DEVICE)
    plain = contract.top_rows(logits, where[0], 16, where[1], backend="reference")
    assert_same(plain, logits, rows, 16, own)


def test_shards_joined_are_the_whole() -> None:
    """Each shard's largest, sums and the one that has the row's own token."""
    logits = (torch.randn(3, 700, generator=torch.Generator().manual_seed(1)) * 3).to(DEVICE)
    logits[2] = 1.0
    rows = torch.arange(3, dtype=torch.int32, device=DEVICE)
    own = torch.tensor([699, 0, 352], dtype=torch.int32, device=DEVICE)
    cuts = [(0, 352), (352, 700)]
    shards = [top_rows(logits[:, a:b], rows, 20, own, first_id=a, block=256) for a, b in cuts]

    assert_same(join_top_rows(shards), logits, [0, 1, 2], 20, own.tolist())
