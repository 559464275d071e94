"""Rows of logits in a GPU's memory -> adjusted tiles of them, and searches in them: what kernels over a vocabulary share.

Sums that decide anything are integers (exp(z - top) in units of 2^-44), so that they are the same however the work is
split. Searches for a boundary run over `ordered_key`, an integer that orders like its float, and end exactly.

Legend: a tile is BLOCK ids of one row, held as [BLOCK / 4, 4], because four ids share a counter of the noise.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

NEVER = tl.constexpr(-3.0e38)
"""Below every score."""
LOWEST_KEY = tl.constexpr(-2139095041)
"""`ordered_key` of minus infinity."""
_MASS_UNIT = tl.constexpr(17592186044416.0)  # 2^44: 2^18 tokens of mass 1 fit an int64


class Columns(NamedTuple):
    """A row's parameters, each a pointer to one of every row."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    seed: Tensor
    position: Tensor
    choice: Tensor
    prompt: Tensor


class Edits(NamedTuple):
    """Changed entries and masks; pointers to anything where there are none.

    (No field may be called `values`: inside a kernel that is a tuple's own attribute.)
    """

    starts: Tensor
    ids: Tensor
    changed: Tensor
    mask_of_row: Tensor
    mask_words: Tensor
    words_per_mask: int


@triton.jit
def is_nan(z):
    """Element by element."""
    return z != z  # noqa: PLR0124


@triton.jit
def ordered_key(z):
    """float32 without NaN -> int32 of the same order; -0 and 0 are one."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """The float32 of an `ordered_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(z, top):
    """exp(z - top) as int64 in units of 2^-44; z <= top, finite top."""
    return (tl.exp(z - top) * _MASS_UNIT).to(tl.int64)


@triton.jit
def largest_key(keys, weights, wanted, top_key):
    """The largest key so that the weights of all keys not below it sum to `wanted` at least; LOWEST_KEY if none does."""
    low = tl.full([], LOWEST_KEY, tl.int64)
    high = top_key.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        if tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0)) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def is_filtered(columns, row):
    """Whether a row is drawn, and from less than the whole vocabulary."""
    has_filter = (tl.load(columns.top_k + row) > 0) | (tl.load(columns.top_p + row) < 1)
    has_filter = has_filter | (tl.load(columns.log_min_p + row) > float("-inf"))
    return has_filter & (tl.load(columns.temperature + row) > 0)


@triton.jit
def first_entry(entry_ids, begin, end, id, LANES: tl.constexpr):
    """Index of the first of the ascending entries [begin, end) that is not below `id`."""
    at = begin
    for start in range(begin, end, LANES):
        i = start + tl.arange(0, LANES)
        below = tl.load(entry_ids + i, mask=i < end, other=2147483647) < id
        at += tl.sum(below.to(tl.int32))
    return at


@triton.jit
def fetch(logits, at, num_ids, local):
    """Raw logits of a row that begins at `logits + at`; minus infinity past the shard's end."""
    return tl.load(logits + at + local, mask=local < num_ids, other=float("-inf"))


@triton.jit
def adjusted(
    raw, row, num_ids, first_id, start, local, edits,
    BLOCK: tl.constexpr, HAS_CHANGES: tl.constexpr, HAS_MASKS: tl.constexpr,
):  # fmt: skip
    """What `fetch` gave for row `row`'s ids `local`, some of [start, start + BLOCK), changed and masked, in float32."""
    z = raw.to(tl.float32)
    if HAS_CHANGES:
        begin = tl.load(edits.starts + row)
        end = tl.load(edits.starts + row + 1)
        if begin < end:
            stop = tl.minimum(start + BLOCK, num_ids)
            first = first_entry(edits.ids, begin, end, first_id + start, 128)
            last = first_entry(edits.ids, begin, end, first_id + stop, 128)
            for entry in range(first, last):
                is_changed = local == tl.load(edits.ids + entry) - first_id
                z = tl.where(is_changed, tl.load(edits.changed + entry), z)
    if HAS_MASKS:
        mask = tl.load(edits.mask_of_row + row)
        if mask >= 0:
            ids = first_id + local
            words = edits.mask_words + mask.to(tl.int64) * edits.words_per_mask
            word = tl.load(words + (ids >> 5), mask=local < num_ids, other=0)
            z = tl.where(((word >> (ids & 31)) & 1) != 0, z, z - float("inf"))  # NaN stays NaN
    return z


@triton.jit
def over(z, temperature):
    """z over a temperature, rounded as float32 division is everywhere else; 0 and 1 leave it alone."""
    if (temperature > 0) & (temperature != 1):
        z = tl.div_rn(z, temperature)
    return z


@triton.jit
def load_tile(
    logits, at, row, num_ids, first_id, start, local, temperature, edits,
    BLOCK: tl.constexpr, HAS_CHANGES: tl.constexpr, HAS_MASKS: tl.constexpr,
):  # fmt: skip
    """z of a tile: fetched, adjusted, over temperature; minus infinity where there is NaN (`scan` reports that)."""
    raw = fetch(logits, at, num_ids, local)
    z = adjusted(raw, row, num_ids, first_id, start, local, edits, BLOCK, HAS_CHANGES, HAS_MASKS)
    return over(tl.where(is_nan(z), float("-inf"), z), temperature)


@triton.jit
def tile_lanes(BLOCK: tl.constexpr):
    """0..BLOCK-1 as a tile has them, [BLOCK / 4, 4]."""
    return tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def keep_better(scores, ids, best, best_ids):
    """Lane by lane the better of two, the first where they are equal."""
    is_better = scores > best
    return tl.where(is_better, scores, best), tl.where(is_better, ids, best_ids)


@triton.jit
def best_of(scores, ids):
    """The largest score and the lowest id that has it."""
    top = tl.max(scores)
    return top, tl.min(tl.where(scores == top, ids, 2147483647))
