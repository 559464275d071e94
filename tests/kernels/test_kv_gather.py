"""Rows out of a pool and into one -> the same rows, and the digest that the BLAKE3 library gives, on every backend."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3
from torch import Tensor

from paceline.kernels.kv_gather import kv_digest, kv_gather
from paceline.kernels.kv_scatter import kv_scatter

pytest.importorskip("triton")

KEY = bytes(range(7, 39))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [
    # layers, heads of the pool, heads taken, tokens, head size, dtype: bytes
    (1, 1, (0, 1), 1, 1, torch.float32),  # 8: less than a block
    (2, 3, (1, 2), 3, 6, torch.bfloat16),  # 288: five blocks, the last one short
    (2, 2, (0, 2), 4, 8, torch.float32),  # 1,024: one whole chunk, the root itself
    (1, 2, (0, 2), 21, 8, torch.float32),  # 2,688: two whole chunks and a short one, odd at the first level
    # 39,040: 39 chunks, a short one, odd ones at several levels, two programs
    pytest.param((5, 2, (0, 2), 61, 8, torch.float32), marks=pytest.mark.slow),
]
SMALL = SHAPES[1]


def pool_of(layers: int, heads: int, dim: int, dtype: torch.dtype, num_slots: int = 96) -> Tensor:
    draw = torch.Generator().manual_seed(layers * 100 + dim)
    return torch.randn(layers, 2, heads, num_slots, dim, generator=draw).to(dtype).to(DEVICE)


def slots_of(num: int, seed: int = 0) -> Tensor:
    return torch.randperm(96, generator=torch.Generator().manual_seed(seed))[:num].to(DEVICE)


def expected_mark(rows: Tensor) -> bytes:
    data = rows.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return blake3(data, key=KEY).digest(length=16)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s[:1] + s[3:5])))
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_gathered_rows_and_their_digest(shape: tuple, backend: str) -> None:
    """A range of heads of a pool, slots in any order; the library's digest of the bytes that would be sent."""
    layers, heads, (first, num), tokens, dim, dtype = shape
    part = pool_of(layers, heads, dim, dtype)[:, :, first : first + num]
    slots = slots_of(tokens)
    rows, mark = kv_gather(part, slots, KEY, backend=backend)

    assert torch.equal(rows, part[:, :, :, slots]) and rows.is_contiguous()
    assert mark.cpu().numpy().tobytes() == expected_mark(rows)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_rows_that_lie_side_by_side_have_the_digest_that_they_had_in_the_pool(backend: str) -> None:
    """For what a codec made of them, or what is in staging already."""
    layers, heads, _, tokens, dim, dtype = SMALL
    rows, mark = kv_gather(pool_of(layers, heads, dim, dtype), slots_of(tokens), KEY, backend=backend)

    assert torch.equal(kv_digest(rows, KEY, backend=backend), mark)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_scattered_rows_and_the_digest_of_what_the_pool_holds(backend: str) -> None:
    """Written where they belong, nothing else touched, and the sender's digest found again."""
    layers, heads, (first, num), tokens, dim, dtype = SMALL
    rows, sent = kv_gather(
        pool_of(layers, heads, dim, dtype)[:, :, first : first + num], slots_of(tokens), KEY
    )
    pool = pool_of(layers, heads, dim, dtype) + 1
    slots = slots_of(tokens, seed=1)
    wanted = pool.clone()
    wanted[:, :, first : first + num, slots] = rows
    mark = kv_scatter(pool[:, :, first : first + num], slots, rows, KEY, backend=backend)

    assert torch.equal(pool, wanted)
    assert torch.equal(mark, sent)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_digest_of_a_scatter_is_of_the_pool_and_not_of_the_message(backend: str) -> None:
    """Negative control: two rows that land in one slot are not what was sent."""
    pool = pool_of(1, 1, 4, torch.float32)
    rows, sent = kv_gather(pool, slots_of(5), KEY)
    slots = slots_of(5, seed=1)
    slots[3] = slots[1]

    assert not torch.equal(kv_scatter(pool, slots, rows, KEY, backend=backend), sent)


def test_another_key_or_bit_is_another_digest() -> None:
    """Negative control of the kernel itself."""
    rows = torch.randn(1, 2, 1, 2, 5).to(DEVICE)
    seen = {kv_digest(rows, KEY, backend="triton").cpu().numpy().tobytes()}
    seen.add(kv_digest(rows, bytes(32), backend="triton").cpu().numpy().tobytes())
    for element in (0, 19):
        changed = rows.clone()
        changed.view(-1).view(torch.int32)[element] ^= 1
        seen.add(kv_digest(changed, KEY, backend="triton").cpu().numpy().tobytes())

    assert len(seen) == 4


def test_rows_that_are_no_whole_words_are_refused_by_the_kernel() -> None:
    """Three halves are six bytes; the plain twin takes them."""
    pool = pool_of(1, 1, 3, torch.bfloat16)

    with pytest.raises(ValueError, match="32-bit words"):
        kv_gather(pool, slots_of(4), KEY, backend="triton")
    assert kv_gather(pool, slots_of(4), KEY, backend="reference")[0].shape == (1, 2, 1, 4, 3)
