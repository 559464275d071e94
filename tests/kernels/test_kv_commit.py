"""Accepted paths of many trees -> their KV where plain decoding would have put it, on every backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.kernels.kv_commit import kv_commit

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 4


def case(paths: list[list[int]], starts: list[int], seed: int = 0, dim: int = 5) -> tuple[Tensor, ...]:
    """A pool, tables of shuffled blocks, starts and padded paths."""
    draw = torch.Generator().manual_seed(seed)
    pool = torch.randn(2, 2, 3, 400, dim, generator=draw)
    blocks = torch.randperm(100, generator=draw).int().view(len(paths), -1)
    padded = torch.full((len(paths), max(map(len, paths)) + 1), -1, dtype=torch.int32)
    for row, path in zip(padded, paths, strict=True):
        row[: len(path)] = torch.tensor(path, dtype=torch.int32)
    return tuple(t.to(DEVICE) for t in (pool, blocks, torch.tensor(starts, dtype=torch.int32), padded))


def moved(pool: Tensor, tables: Tensor, starts: Tensor, paths: Tensor) -> Tensor:
    """One node at a time from an untouched copy."""
    after = pool.clone()
    for table, start, path in zip(tables.tolist(), starts.tolist(), paths.tolist(), strict=True):

        def slot(position: int, table: list[int] = table) -> int:
            return table[position // BLOCK] * BLOCK + position % BLOCK

        for place, node in enumerate(path):
            if node >= 0:
                after[:, :, :, slot(start + place + 1)] = pool[:, :, :, slot(start + node)]
    return after


@pytest.mark.parametrize(
    ("paths", "starts"),
    [
        ([[2, 3, 6], [1, 2, 3], [], [4], [1, 5, 6, 9]], [0, 3, 7, 30, 11]),  # branches, a spine, nothing
        ([[2, 3, 4, 5, 6, 7, 8], [], [7]], [5, 1, 2]),  # each row lands on the one before it
        ([list(range(2, 80)), [3]], [6, 0]),  # longer than what a program holds at once
    ],
    ids=["mixed", "overlapping", "long"],
)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_path_is_moved_as_if_all_of_it_were_read_first(
    paths: list[list[int]], starts: list[int], backend: str
) -> None:
    """Sources and destinations overlap; nothing else of the pool changes."""
    if len(paths) == 3:
        paths, starts = [*paths, [2]], [*starts, 0]
    pool, *rest = case(paths, starts)
    wanted = moved(pool, *rest)
    assert not torch.equal(wanted, pool)
    kv_commit(pool, *rest, block_size=BLOCK, backend=backend)

    assert torch.equal(pool, wanted)
