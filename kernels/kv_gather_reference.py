"""Pool and slots -> a message's rows and their digest, with one indexing and one library call."""

from __future__ import annotations

import torch
from blake3 import blake3
from torch import Tensor


def kv_gather(pool_LEGSD: Tensor, slots_N: Tensor, key: bytes | Tensor) -> tuple[Tensor, Tensor]:
    """See `paceline.kernels.kv_gather.kv_gather`."""
    rows = pool_LEGSD.index_select(3, slots_N)
    return rows, kv_digest(rows, key)


def kv_digest(rows: Tensor, key: bytes | Tensor) -> Tensor:
    """See `paceline.kernels.kv_gather.kv_digest`."""
    if isinstance(key, Tensor):
        key = key.cpu().numpy().tobytes()
    octets = rows.contiguous().view(-1).view(torch.uint8)
    state = blake3(octets.cpu().numpy().data, key=key)
    return torch.frombuffer(bytearray(state.digest(length=16)), dtype=torch.uint8).to(rows.device)
