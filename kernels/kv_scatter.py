"""A message's rows and slots -> the pool, and the keyed digest of what the pool then holds, in one pass.

Legend: L layers, E = 2 (K and V), G KV heads, S pool slots, N tokens, D head size.
"""

from __future__ import annotations

from torch import Tensor

from paceline.kernels import kv_scatter_reference as reference
from paceline.kernels.dispatch import Backend, backend_of


def kv_scatter(
    pool_LEGSD: Tensor,
    slots_N: Tensor,
    rows_LEGND: Tensor,
    key: bytes | Tensor,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Inverse of `kv_gather`: write the rows and digest them as they are read back from the pool.

    Args:
        pool_LEGSD: changed in place; see `kv_gather`. slots_N: int64, all different. rows_LEGND: contiguous, the pool's
            dtype. key: as for `kv_gather`.
        backend: "triton" or "reference".
    Returns:
        uint8 [16]: equal to the sender's if and only if these rows are now in the pool.
    """
    if backend_of(pool_LEGSD, backend) == "reference":
        return reference.kv_scatter(pool_LEGSD, slots_N, rows_LEGND, key)
    from paceline.kernels import kv_scatter_triton as kernel  # there is no Triton where there is no GPU

    return kernel.kv_scatter(pool_LEGSD, slots_N, rows_LEGND, key)
