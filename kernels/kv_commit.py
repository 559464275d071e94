"""Accepted tree nodes -> their K and V at the places that plain decoding would have given them, in the pool.

Legend: L layers, E = 2 (K and V), G KV heads, S pool slots, D head size, B streams, X table entries, N path length.
"""

from __future__ import annotations

from torch import Tensor

from paceline.kernels import kv_commit_reference as reference
from paceline.kernels.dispatch import Backend, backend_of


def kv_commit(
    pool_LEGSD: Tensor,
    tables_BX: Tensor,
    starts_B: Tensor,
    paths_BN: Tensor,
    *,
    block_size: int,
    backend: Backend | None = None,
) -> None:
    """Move node `paths[b, j]` of each stream's tree from position start + node to start + j + 1, in place.

    Args:
        pool_LEGSD: changed in place. tables_BX: int32, pool blocks of each stream.
        starts_B: int32, contiguous, the position of each root, whose place is right already.
        paths_BN: int32, accepted nodes below the root in depth order, then -1: what fused verification leaves on the
            device. Nodes are in topological order, so node j + 1 of a path is never before place j + 1.
        backend: "triton" or "reference".
    """
    if backend_of(pool_LEGSD, backend) == "reference":
        reference.kv_commit(pool_LEGSD, tables_BX, starts_B, paths_BN, block_size)
        return
    from paceline.kernels import kv_commit_triton as kernel  # there is no Triton where there is no GPU

    kernel.kv_commit(pool_LEGSD, tables_BX, starts_B, paths_BN, block_size)
