"""A message's rows and slots -> the pool and the digest of what it holds, two launches (Triton).

Each program writes its words, waits for itself, and hashes what it then reads from the pool: past L1, so that what is
hashed is what others will read.
"""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.kv_gather_triton import SCATTER, launch


def kv_scatter(pool_LEGSD: Tensor, slots_N: Tensor, rows_LEGND: Tensor, key: bytes | Tensor) -> Tensor:
    """See `paceline.kernels.kv_scatter.kv_scatter`."""
    return launch(SCATTER, pool_LEGSD, rows_LEGND, slots_N, key)
