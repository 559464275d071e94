"""Words of KV rows -> their keyed BLAKE3-128, on the GPU: the same bytes as the CPU's library gives.

BLAKE3 cuts its input into chunks of 1,024 bytes that do not depend on each other, so a lane takes a chunk. Each goes
through 16 blocks of 64 bytes, each of those through 7 rounds; the chunks' results, eight words each, are then folded in
pairs, an odd one going up as it is. About 12 integer operations a byte: an H200's 32-bit units bound it near 1 TB/s.

Versions: 1, one lane a chunk, words read through L1, folds through memory. Not timed on a card yet.
Source: O'Connor, Aumasson, Neves, Wilcox-O'Hearn, "BLAKE3", sections 2.1 to 2.4.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK_WORDS = 256
"""32-bit words of a BLAKE3 chunk."""

_CHUNK_START = tl.constexpr(1)
_CHUNK_END = tl.constexpr(2)
_PARENT = tl.constexpr(4)
_ROOT = tl.constexpr(8)
_KEYED = tl.constexpr(16)


@triton.jit
def _mix(
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3,
    x0, x1, x2, x3, y0, y1, y2, y3,
):  # fmt: skip
    """The quarter-round on four columns, or four diagonals, of the state. (In one function: the interpreter is slow to call.)"""
    a0, a1, a2, a3 = a0 + b0 + x0, a1 + b1 + x1, a2 + b2 + x2, a3 + b3 + x3
    d0, d1, d2, d3 = d0 ^ a0, d1 ^ a1, d2 ^ a2, d3 ^ a3
    d0, d1, d2, d3 = (
        (d0 >> 16) | (d0 << 16),
        (d1 >> 16) | (d1 << 16),
        (d2 >> 16) | (d2 << 16),
        (d3 >> 16) | (d3 << 16),
    )
    c0, c1, c2, c3 = c0 + d0, c1 + d1, c2 + d2, c3 + d3
    b0, b1, b2, b3 = b0 ^ c0, b1 ^ c1, b2 ^ c2, b3 ^ c3
    b0, b1, b2, b3 = (
        (b0 >> 12) | (b0 << 20),
        (b1 >> 12) | (b1 << 20),
        (b2 >> 12) | (b2 << 20),
        (b3 >> 12) | (b3 << 20),
    )
    a0, a1, a2, a3 = a0 + b0 + y0, a1 + b1 + y1, a2 + b2 + y2, a3 + b3 + y3
    d0, d1, d2, d3 = d0 ^ a0, d1 ^ a1, d2 ^ a2, d3 ^ a3
    d0, d1, d2, d3 = (
        (d0 >> 8) | (d0 << 24),
        (d1 >> 8) | (d1 << 24),
        (d2 >> 8) | (d2 << 24),
        (d3 >> 8) | (d3 << 24),
    )
    c0, c1, c2, c3 = c0 + d0, c1 + d1, c2 + d2, c3 + d3
    b0, b1, b2, b3 = b0 ^ c0, b1 ^ c1, b2 ^ c2, b3 ^ c3
    b0, b1, b2, b3 = (
        (b0 >> 7) | (b0 << 25),
        (b1 >> 7) | (b1 << 25),
        (b2 >> 7) | (b2 << 25),
        (b3 >> 7) | (b3 << 25),
    )
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


@triton.jit
def compress(
    h0, h1, h2, h3, h4, h5, h6, h7,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
    counter, length, flags,
):  # fmt: skip
    """One block: chaining words h, message words m, all uint32 tensors of one shape -> the next chaining words."""
    v0, v1, v2, v3, v4, v5, v6, v7 = h0, h1, h2, h3, h4, h5, h6, h7
    zero = h0 ^ h0
    v8, v9, v10, v11 = zero + 0x6A09E667, zero + 0xBB67AE85, zero + 0x3C6EF372, zero + 0xA54FF53A
    v12, v13, v14, v15 = counter, zero, length, flags
    for _ in range(7):  # not unrolled: seven times the code took half a minute to compile
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _mix(
            v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
            m0, m2, m4, m6, m1, m3, m5, m7,
        )  # fmt: skip
        v0, v1, v2, v3, v5, v6, v7, v4, v10, v11, v8, v9, v15, v12, v13, v14 = _mix(
            v0, v1, v2, v3, v5, v6, v7, v4, v10, v11, v8, v9, v15, v12, v13, v14,
            m8, m10, m12, m14, m9, m11, m13, m15,
        )  # fmt: skip
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = (
            m2, m6, m3, m10, m7, m0, m4, m13, m1, m11, m12, m5, m9, m14, m15, m8,
        )  # fmt: skip
    return v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11, v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15


@triton.jit
def _store(at, mask, h0, h1, h2, h3, h4, h5, h6, h7):
    """Eight words each, side by side, behind the pointers `at`."""
    tl.store(at + 0, h0, mask=mask)
    tl.store(at + 1, h1, mask=mask)
    tl.store(at + 2, h2, mask=mask)
    tl.store(at + 3, h3, mask=mask)
    tl.store(at + 4, h4, mask=mask)
    tl.store(at + 5, h5, mask=mask)
    tl.store(at + 6, h6, mask=mask)
    tl.store(at + 7, h7, mask=mask)


@triton.jit
def _fold(nodes, num, stride, key, root_flag, LANES: tl.constexpr):
    """`num` chaining values, `stride` apart, -> one, in place of the first. One program; `root_flag` marks the last."""
    lanes = tl.arange(0, LANES)
    zero = tl.zeros([LANES], tl.uint32)
    h0, h1, h2, h3 = (
        zero + tl.load(key),
        zero + tl.load(key + 1),
        zero + tl.load(key + 2),
        zero + tl.load(key + 3),
    )
    h4, h5, h6, h7 = (
        zero + tl.load(key + 4),
        zero + tl.load(key + 5),
        zero + tl.load(key + 6),
        zero + tl.load(key + 7),
    )
    while num > 1:
        pairs = num // 2
        flags = zero + _PARENT + _KEYED
        if num == 2:
            flags = flags + root_flag
        for first in range(0, pairs, LANES):
            pair = first + lanes
            inside = pair < pairs
            left = nodes + pair * 2 * stride * 8
            right = left + stride * 8
            m0, m1 = tl.load(left, mask=inside), tl.load(left + 1, mask=inside)
            m2, m3 = tl.load(left + 2, mask=inside), tl.load(left + 3, mask=inside)
            m4, m5 = tl.load(left + 4, mask=inside), tl.load(left + 5, mask=inside)
            m6, m7 = tl.load(left + 6, mask=inside), tl.load(left + 7, mask=inside)
            m8, m9 = tl.load(right, mask=inside), tl.load(right + 1, mask=inside)
            m10, m11 = tl.load(right + 2, mask=inside), tl.load(right + 3, mask=inside)
            m12, m13 = tl.load(right + 4, mask=inside), tl.load(right + 5, mask=inside)
            m14, m15 = tl.load(right + 6, mask=inside), tl.load(right + 7, mask=inside)
            c0, c1, c2, c3, c4, c5, c6, c7 = compress(
                h0, h1, h2, h3, h4, h5, h6, h7,
                m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
                zero, zero + 64, flags,
            )  # fmt: skip
            # A pair is stored at or before the place of the earliest that is still to be read.
            tl.debug_barrier()
            _store(nodes + pair * stride * 8, inside, c0, c1, c2, c3, c4, c5, c6, c7)
            tl.debug_barrier()
        if num % 2 == 1:
            word = tl.arange(0, 8)
            odd = tl.load(nodes + (num - 1) * stride * 8 + word)
            tl.store(nodes + pairs * stride * 8 + word, odd)
            tl.debug_barrier()
        num = pairs + num % 2


@triton.jit
def fold_all(nodes, num, stride, key, digest, LANES: tl.constexpr):
    """The last fold, by one program: the digest's four words."""
    _fold(nodes, num, stride, key, _ROOT, LANES)
    word = tl.arange(0, 4)
    tl.store(digest + word, tl.load(nodes + word))


@triton.jit
def copy_and_hash(
    pool, staged, slots, key, nodes,
    num_words, row_words, num_tokens, num_heads, stride_layer, stride_kv, stride_head, stride_slot,
    num_chunks,
    MODE: tl.constexpr, CHUNKS: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """One program: CHUNKS chunks of the message, copied between pool and staging, and hashed as they lie in the pool.

    The message is the rows [layers, 2, heads, tokens, row_words] one after the other; `staged` holds it so. MODE 1 gathers,
    2 scatters and then reads the pool again, 0 takes `staged` for the message and copies nothing. All memory is uint32.
    """
    program = tl.program_id(0)
    if MODE != 0:
        for tile in range(0, CHUNKS * 256, COPY):
            word = program * (CHUNKS * 256) + tile + tl.arange(0, COPY)
            inside = word < num_words
            row = word // row_words
            rest = row // num_tokens
            slot = tl.load(slots + row % num_tokens, mask=inside, other=0)
            at = (
                (rest // num_heads // 2).to(tl.int64) * stride_layer
                + (rest // num_heads % 2).to(tl.int64) * stride_kv
                + (rest % num_heads).to(tl.int64) * stride_head
                + slot * stride_slot
                + word % row_words
            )
            if MODE == 1:
                tl.store(staged + word, tl.load(pool + at, mask=inside), mask=inside)
            else:
                tl.store(pool + at, tl.load(staged + word, mask=inside), mask=inside)
        tl.debug_barrier()
    chunk = program * CHUNKS + tl.arange(0, CHUNKS)
    is_there = chunk < num_chunks
    zero = tl.zeros([CHUNKS], tl.uint32)
    h0, h1, h2, h3 = (
        zero + tl.load(key),
        zero + tl.load(key + 1),
        zero + tl.load(key + 2),
        zero + tl.load(key + 3),
    )
    h4, h5, h6, h7 = (
        zero + tl.load(key + 4),
        zero + tl.load(key + 5),
        zero + tl.load(key + 6),
        zero + tl.load(key + 7),
    )
    left = tl.minimum(num_words - chunk * 256, 256)
    last = tl.maximum((left + 15) // 16 - 1, 0)
    longest = tl.max(tl.where(is_there, last, 0), 0)
    for block in range(longest + 1):
        is_active = is_there & (block <= last)
        m = ()
        for i in tl.static_range(16):
            word = chunk * 256 + block * 16 + i
            inside = is_active & (word < num_words)
            if MODE == 0:
                m = m + (tl.load(staged + word, mask=inside, other=0),)  # type: ignore[assignment]
            else:
                row = word // row_words
                rest = row // num_tokens
                slot = tl.load(slots + row % num_tokens, mask=inside, other=0)
                at = (
                    (rest // num_heads // 2).to(tl.int64) * stride_layer
                    + (rest // num_heads % 2).to(tl.int64) * stride_kv
                    + (rest % num_heads).to(tl.int64) * stride_head
                    + slot * stride_slot
                    + word % row_words
                )
                loaded = tl.load(pool + at, mask=inside, other=0, volatile=MODE == 2)
                m = m + (loaded,)  # type: ignore[assignment]
        flags = zero + _KEYED
        if block == 0:
            flags = flags + _CHUNK_START
        flags = tl.where(block == last, flags + _CHUNK_END, flags)
        if num_chunks == 1:
            flags = tl.where(block == last, flags + _ROOT, flags)
        length = (tl.minimum(left - block * 16, 16) * 4).to(tl.uint32)
        c0, c1, c2, c3, c4, c5, c6, c7 = compress(
            h0, h1, h2, h3, h4, h5, h6, h7,
            m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7],  # type: ignore[misc]
            m[8], m[9], m[10], m[11], m[12], m[13], m[14], m[15],  # type: ignore[misc]
            chunk.to(tl.uint32), length, flags,
        )  # fmt: skip
        h0, h1 = tl.where(is_active, c0, h0), tl.where(is_active, c1, h1)
        h2, h3 = tl.where(is_active, c2, h2), tl.where(is_active, c3, h3)
        h4, h5 = tl.where(is_active, c4, h4), tl.where(is_active, c5, h5)
        h6, h7 = tl.where(is_active, c6, h6), tl.where(is_active, c7, h7)
    _store(nodes + chunk * 8, is_there, h0, h1, h2, h3, h4, h5, h6, h7)
    if num_chunks > CHUNKS:  # else the last fold does it, and marks the root
        tl.debug_barrier()
        num = tl.minimum(num_chunks - program * CHUNKS, CHUNKS)
        _fold(nodes + program * CHUNKS * 8, num, 1, key, 0, CHUNKS)
