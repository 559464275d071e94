"""Accepted tree nodes -> their places in the pool, with one indexing: all are read before any is written."""

from __future__ import annotations

import torch
from torch import Tensor


def kv_commit(
    pool_LEGSD: Tensor, tables_BX: Tensor, starts_B: Tensor, paths_BN: Tensor, block_size: int
) -> None:
    """See `paceline.kernels.kv_commit.kv_commit`."""
    streams_M, places_M = torch.nonzero(paths_BN >= 0, as_tuple=True)
    nodes_M = paths_BN[streams_M, places_M].long()

    def slots(offsets_M: Tensor) -> Tensor:
        positions_M = starts_B[streams_M].long() + offsets_M
        blocks_M = tables_BX[streams_M, positions_M // block_size].long()
        return blocks_M * block_size + positions_M % block_size

    pool_LEGSD[:, :, :, slots(places_M + 1)] = pool_LEGSD[:, :, :, slots(nodes_M)]
