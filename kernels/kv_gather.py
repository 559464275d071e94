"""Pool and slots -> a message's rows side by side, and their keyed digest, in one pass over the pool.

Legend: L layers, E = 2 (K and V), G KV heads, S pool slots, N tokens, D head size.
"""

from __future__ import annotations

from torch import Tensor

from paceline.kernels import kv_gather_reference as reference
from paceline.kernels.dispatch import Backend, backend_of


def kv_gather(
    pool_LEGSD: Tensor, slots_N: Tensor, key: bytes | Tensor, *, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """Copy rows out of the pool and digest them as they lie there.

    Args:
        pool_LEGSD: any dtype whose rows are whole 32-bit words; a view of some layers and heads of a pool will do, with
            its last dimension contiguous.
        slots_N: int64, at least one. key: 32 bytes; as a uint8 tensor on the pool's device nothing is copied there.
        backend: "triton" (GPU, or Triton's interpreter) or "reference".
    Returns:
        Rows [L, E, G, N, D], contiguous, and uint8 [16]: BLAKE3-128, keyed, of their bytes in that order. Both on the
        pool's device; on a GPU neither has been waited for.
    """
    if backend_of(pool_LEGSD, backend) == "reference":
        return reference.kv_gather(pool_LEGSD, slots_N, key)
    from paceline.kernels import kv_gather_triton as kernel  # there is no Triton where there is no GPU

    return kernel.kv_gather(pool_LEGSD, slots_N, key)


def kv_digest(rows: Tensor, key: bytes | Tensor, *, backend: Backend | None = None) -> Tensor:
    """The same digest of rows (contiguous, not empty) that lie side by side already: uint8 [16]."""
    if backend_of(rows, backend) == "reference":
        return reference.kv_digest(rows, key)
    from paceline.kernels import kv_gather_triton as kernel

    return kernel.kv_digest(rows, key)
