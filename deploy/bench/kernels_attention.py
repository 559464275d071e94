"""Shapes of attention and of moving KV -> rows of the kernels' card.

An 8B model's attention: 32 query heads, 8 KV heads of 128, bfloat16, blocks of 256 tokens, each stream with a chain of four
drafted tokens. The torch side is `varlen_attn`, paged, causal, which is right for chains; for moving KV it is indexing. FlashInfer is measured where
it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from paceline.deploy.bench.kernel_rows import Row, Runs
from paceline.kernels import kv_codec
from paceline.kernels.attention_pieces import on_device, plan_pieces
from paceline.kernels.kv_commit import kv_commit
from paceline.kernels.kv_gather import kv_gather
from paceline.kernels.kv_scatter import kv_scatter
from paceline.kernels.tree_attention import AttentionPlan, default_cut

_HEADS, _KV_HEADS, _DIM, _BLOCK, _ROWS = 32, 8, 128, 256, 5
_TOKEN_BYTES = 2 * _KV_HEADS * _DIM * 2
"""K and V of a token in one layer."""
_CLOCK_HZ = 1.755e9
_HASH_OPERATIONS = 12
"""Of BLAKE3 for a byte: 7 rounds of 8 quarter-rounds of 14 for 64 bytes."""


def rows() -> list[Row]:
    """All of them."""
    uneven = [
        1024,
        2048,
        1024,
        4096,
        1024,
        65_536,
        2048,
        1024,
        8192,
        1024,
        1024,
        32_768,
        2048,
        1024,
        4096,
        1024,
    ]
    found = []
    for name, contexts, shared, figure in (
        ("attention 32 x 8k", [8192] * 32, 0, "gpu.attn"),
        ("attention uneven", uneven, 0, "gpu.attn_uneven"),
        ("attention one stream 32k", [32_768], 0, ""),
        ("attention prefix 4k", [5120] * 32, 4096, ""),
    ):
        num_keys = sum(contexts) - shared * (len(contexts) - 1) if shared else sum(contexts)
        shape = f"B={len(contexts)} rows={_ROWS} H={_HEADS} G={_KV_HEADS} D={_DIM} keys={num_keys}"
        make = partial(_attention, contexts, shared)
        found.append(Row(name, shape, num_keys * _TOKEN_BYTES, make, figure, has_bandwidth=bool(figure)))
    layers, tokens = 4, 2048
    size = layers * tokens * _TOKEN_BYTES
    shape = f"L={layers} G={_KV_HEADS} N={tokens} D={_DIM}"
    found.append(Row("kv gather", shape, 2 * size, partial(_move, False), "", partial(_hash_seconds, size)))
    found.append(Row("kv scatter", shape, 2 * size, partial(_move, True), "", partial(_hash_seconds, size)))
    found.append(Row("kv codec int8", shape, size + size // 2, partial(_encode, "int8")))
    found.append(Row("kv codec fp8", shape, size + size // 2, partial(_encode, "fp8")))
    moved = 32 * 2 * 32 * _TOKEN_BYTES * 2
    found.append(Row("kv commit", "B=32, two nodes moved of each, L=32", moved, _commit))
    return found


def _hash_seconds(num_bytes: int, device: torch.device) -> float:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return num_bytes * _HASH_OPERATIONS / (processors * 64 * _CLOCK_HZ)


def _attention(contexts: Sequence[int], shared: int, device: torch.device, copy: int) -> Runs:
    """Blocks in random order; the first ones of all streams are the same where a prefix is shared."""
    draw = np.random.default_rng(copy)
    num_blocks = sum(-(-(context + _ROWS) // _BLOCK) for context in contexts)
    free = draw.permutation(num_blocks).tolist()
    common = [free.pop() for _ in range(shared // _BLOCK)]
    tables = np.zeros((len(contexts), max(contexts) // _BLOCK + 1), np.int32)
    for row, context in zip(tables, contexts, strict=True):
        need = -(-(context + _ROWS) // _BLOCK)
        row[:need] = [*common, *(free.pop() for _ in range(need - len(common)))]
    starts = np.repeat(np.asarray(contexts), _ROWS)
    positions = starts + np.tile(np.arange(_ROWS), len(contexts))
    num_rows = len(positions)
    plan = AttentionPlan(
        tables,
        _BLOCK,
        np.repeat(np.arange(len(contexts), dtype=np.int32), _ROWS),
        positions.astype(np.int64),
        (positions + 1).astype(np.int32),
        np.zeros(num_rows + 1, np.int32),
        np.zeros(0, np.int32),
    )
    how: dict[str, Any] = {
        "generator": torch.Generator(device).manual_seed(copy),
        "device": device,
        "dtype": torch.bfloat16,
    }
    k, v = (torch.randn(_KV_HEADS, num_blocks * _BLOCK, _DIM, **how) for _ in range(2))
    q = torch.randn(num_rows, _HEADS, _DIM, **how)
    cut = default_cut(_HEADS, _KV_HEADS, device)
    pieces = on_device(plan_pieces(plan, cut), device)
    paged_k, paged_v = (
        pool.view(_KV_HEADS, -1, _BLOCK, _DIM).permute(1, 2, 0, 3).contiguous() for pool in (k, v)
    )
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device) + _ROWS
    first = torch.arange(0, num_rows + 1, _ROWS, dtype=torch.int32, device=device)
    from paceline.kernels.tree_attention_triton import attend  # there is no Triton where there is no GPU

    def ours() -> object:
        return attend(q, k, v, pieces, cut, block_size=_BLOCK, scaling=_DIM**-0.5)

    def plain() -> object:
        return varlen_attn(
            q,
            paged_k,
            paged_v,
            first,
            None,
            _ROWS,
            int(tables.shape[1]) * _BLOCK,
            scale=_DIM**-0.5,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=lengths,
            block_table=pieces.tables,
        )

    others = {}
    if find_spec("flashinfer"):
        others["flashinfer"] = _flashinfer(q, (paged_k, paged_v), first, contexts, tables)
    return Runs(ours, plain, others, can_capture=True)


def _flashinfer(
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    first: torch.Tensor,
    contexts: Sequence[int],
    tables: np.ndarray,
) -> Callable[[], object]:
    """FlashInfer's paged prefill, which is what it has for several rows of a stream; planned once, as in a step's layers."""
    import flashinfer

    lengths = np.asarray(contexts) + _ROWS
    used = -(-lengths // _BLOCK)
    pages = np.concatenate([row[:num] for row, num in zip(tables, used, strict=True)])
    device = q.device

    def there(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device)

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD"
    )
    wrapper.plan(
        first,
        there(np.concatenate([[0], np.cumsum(used)])),
        there(pages),
        there((lengths - 1) % _BLOCK + 1),
        _HEADS,
        _KV_HEADS,
        _DIM,
        _BLOCK,
        causal=True,
        sm_scale=_DIM**-0.5,
        q_data_type=q.dtype,
    )
    return lambda: wrapper.run(q, pools)


def _pool(device: torch.device, copy: int, layers: int, num_slots: int) -> torch.Tensor:
    draw = torch.Generator(device).manual_seed(copy)
    shape = (layers, 2, _KV_HEADS, num_slots, _DIM)
    return torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)


def _move(is_scatter: bool, device: torch.device, copy: int) -> Runs:
    pool = _pool(device, copy, 4, 16_384)
    draw = torch.Generator(device).manual_seed(copy)
    slots = torch.randperm(1024, generator=draw, device=device)[:128, None] * 16 + torch.arange(
        16, device=device
    )
    slots = slots.flatten()
    key = torch.arange(32, dtype=torch.uint8, device=device)
    rows, _ = kv_gather(pool, slots, key)
    if is_scatter:
        return Runs(lambda: kv_scatter(pool, slots, rows, key), lambda: pool.index_copy_(3, slots, rows))
    return Runs(lambda: kv_gather(pool, slots, key), lambda: pool.index_select(3, slots))


def _encode(codec: kv_codec.CodecName, device: torch.device, copy: int) -> Runs:
    rows = _pool(device, copy, 4, 2048)
    return Runs(
        lambda: kv_codec.encode(rows, codec), lambda: kv_codec.encode(rows, codec, backend="reference")
    )


def _commit(device: torch.device, copy: int) -> Runs:
    """Of each tree nodes 3 and 6 go to places 2 and 3."""
    pool = _pool(device, copy, 32, 32 * 64)
    tables = torch.arange(128, dtype=torch.int32, device=device).view(32, 4)
    starts = torch.full((32,), 20, dtype=torch.int32, device=device)
    paths = torch.tensor([[1, 3, 6, -1]] * 32, dtype=torch.int32, device=device)
    first = torch.arange(32, device=device)[:, None] * 64 + 20
    sources = (first + torch.tensor([3, 6], device=device)).flatten()
    targets = (first + torch.tensor([2, 3], device=device)).flatten()

    def plain() -> None:
        pool[:, :, :, targets] = pool[:, :, :, sources]

    return Runs(lambda: kv_commit(pool, tables, starts, paths, block_size=16), plain)
