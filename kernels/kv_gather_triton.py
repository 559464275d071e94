"""Pool and slots -> a message's rows and their digest: two launches, the rows read from memory once (Triton).

A program copies the words of 32 BLAKE3 chunks, a warp side by side, and hashes them while they are in its caches; the
second launch folds what the programs found. Versions and what was measured: docs/kernels.md.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paceline.kernels.kv_digest_triton import CHUNK_WORDS, copy_and_hash, fold_all

_CHUNKS = 32
"""Chunks of a program: one for each lane of a warp."""
_COPY = 1024
"""Words that a program copies at a time."""

STAGED, GATHER, SCATTER = 0, 1, 2


def kv_gather(pool_LEGSD: Tensor, slots_N: Tensor, key: bytes | Tensor) -> tuple[Tensor, Tensor]:
    """See `paceline.kernels.kv_gather.kv_gather`."""
    layers, two, heads, _, dim = pool_LEGSD.shape
    rows = torch.empty(
        layers, two, heads, len(slots_N), dim, dtype=pool_LEGSD.dtype, device=pool_LEGSD.device
    )
    return rows, launch(GATHER, pool_LEGSD, rows, slots_N, key)


def kv_digest(rows: Tensor, key: bytes | Tensor) -> Tensor:
    """See `paceline.kernels.kv_gather.kv_digest`."""
    return launch(STAGED, rows, rows, rows, key)


def launch(mode: int, pool: Tensor, rows: Tensor, slots: Tensor, key: bytes | Tensor) -> Tensor:
    """Copy between the pool and `rows` [L, 2, G, N, D], as `mode` says, and digest the pool's (or, staged, the rows)."""
    staged = words(rows.view(-1))
    num_words = staged.numel()
    num_chunks = triton.cdiv(num_words, CHUNK_WORDS)
    device = rows.device
    if not isinstance(key, Tensor):
        key = torch.frombuffer(bytearray(key), dtype=torch.uint8).to(device, non_blocking=True)
    key_words = key.view(torch.uint32)
    nodes = torch.empty(num_chunks, 8, dtype=torch.uint32, device=device)
    digest = torch.empty(4, dtype=torch.uint32, device=device)
    if mode == STAGED:
        source, shape = staged, (1, 1, 1)
        strides: tuple[int, ...] = (0, 0, 0, 0)
    else:
        source = words(pool)
        strides = source.stride()[:4]
        shape = (source.shape[-1], len(slots), source.shape[2])
    num_programs = triton.cdiv(num_chunks, _CHUNKS)
    copy_and_hash[(num_programs,)](
        source,
        staged,
        slots,
        key_words,
        nodes,
        num_words,
        *shape,
        *strides,
        num_chunks,
        MODE=mode,
        CHUNKS=_CHUNKS,
        COPY=_COPY,
        num_warps=1,
    )
    apart = 1 if num_programs == 1 else _CHUNKS
    fold_all[(1,)](
        nodes, triton.cdiv(num_chunks, apart), apart, key_words, digest, LANES=_CHUNKS, num_warps=1
    )
    return digest.view(torch.uint8)


def words(tensor: Tensor) -> Tensor:
    """The same memory as 32-bit words.

    Raises:
        ValueError: a row is not a whole number of them.
    """
    if tensor.shape[-1] * tensor.element_size() % 4 or tensor.stride(-1) != 1:
        raise ValueError(
            f"rows of {tensor.shape[-1]} x {tensor.dtype}: expected whole 32-bit words, contiguous; "
            "use backend='reference'"
        )
    return tensor.view(torch.uint32)
