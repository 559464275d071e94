"""A message's rows and slots -> the pool and the digest of what it holds: write, read back, one library call."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.kv_gather_reference import kv_gather


def kv_scatter(pool_LEGSD: Tensor, slots_N: Tensor, rows_LEGND: Tensor, key: bytes | Tensor) -> Tensor:
    """See `paceline.kernels.kv_scatter.kv_scatter`."""
    pool_LEGSD.index_copy_(3, slots_N, rows_LEGND)
    return kv_gather(pool_LEGSD, slots_N, key)[1]
