"""Rows of logits in a GPU's memory -> their largest, best first, the log of the sum, one token's log-probability (Triton).

What capture and log-probabilities want of the accepted path's rows, and of no others. `scan` reads a row once for the
maximum of each 32 ids; the M-th largest maximum has at least M logits not below it, and on real rows hardly more, so
`collect` lists those and sums the rest; `order` counts for each listed one how many come before it. A row whose list
overflows (hundreds of equal logits at the M-th place) or has too few finite ones is searched M times in memory.

Versions: 1, this. Not timed on a card yet.

Legend: R rows, V vocabulary or this shard of it, M tokens wanted of each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.top_logits import TopRows
from paceline.kernels.verify_triton import RowScan, Tuning
from paceline.kernels.vocabulary_triton import LOWEST_KEY, fetch, ordered_key

_CAPACITY = 512


@triton.jit
def order(
    logits, stride, rows, tokens, num_ids, first_id, tops, masses, listed, listed_ids, found,
    ids, values, log_sums, own, num_wanted,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a row."""
    at = tl.program_id(0)
    row = tl.load(rows + at)
    if row >= 0:
        begin = row.to(tl.int64) * stride
        total = tl.load(masses + at).to(tl.float64) * 5.684341886080802e-14  # 2^-44
        tl.store(log_sums + at, (tl.load(tops + at).to(tl.float64) + tl.log(total)).to(tl.float32))
        token = tl.load(tokens + at) - first_id
        token = tl.where(token < 0, num_ids, token)
        tl.store(own + at, fetch(logits, begin, num_ids, token).to(tl.float32))
        num = tl.load(found + at)
        to = at.to(tl.int64) * num_wanted
        if num >= num_wanted:
            i = tl.arange(0, CAPACITY)
            mine = listed + at.to(tl.int64) * CAPACITY
            my_ids = listed_ids + at.to(tl.int64) * CAPACITY
            z = tl.load(mine + i, mask=i < num, other=float("-inf"))
            id = tl.load(my_ids + i, mask=i < num, other=0)
            rank = tl.zeros([CAPACITY], tl.int32)
            for start in range(0, num, CHUNK):
                j = start + tl.arange(0, CHUNK)
                other = tl.load(mine + j, mask=j < num, other=float("-inf"))[None, :]
                other_id = tl.load(my_ids + j, mask=j < num, other=0)[None, :]
                is_before = (other > z[:, None]) | ((other == z[:, None]) & (other_id < id[:, None]))
                rank += tl.sum((is_before & (j < num)[None, :]).to(tl.int32), 1)
            is_in = (i < num) & (rank < num_wanted)
            tl.store(ids + to + rank, id, mask=is_in)
            tl.store(values + to + rank, z, mask=is_in)
        else:
            last_key = tl.full([], 2147483647, tl.int32)
            last_id = tl.full([], -1, tl.int32)
            for place in range(num_wanted):
                best = tl.full([BLOCK], LOWEST_KEY - 1, tl.int32)
                best_id = tl.zeros([BLOCK], tl.int32)
                for start in range(0, num_ids, BLOCK):
                    local = start + tl.arange(0, BLOCK)
                    keys = ordered_key(fetch(logits, begin, num_ids, local).to(tl.float32))
                    is_left = (keys < last_key) | ((keys == last_key) & (local > last_id))
                    is_better = is_left & (local < num_ids) & (keys > best)
                    best = tl.where(is_better, keys, best)
                    best_id = tl.where(is_better, local, best_id)
                last_key = tl.max(best)
                last_id = tl.min(tl.where(best == last_key, best_id, 2147483647))
                tl.store(ids + to + place, first_id + last_id)
                tl.store(values + to + place, fetch(logits, begin, num_ids, last_id).to(tl.float32))


def top_rows(
    logits_NV: Tensor,
    rows_R: Tensor,
    num_wanted: int,
    tokens_R: Tensor,
    *,
    first_id: int = 0,
    block: int = 1024,
) -> TopRows:
    """See `paceline.kernels.top_logits.top_rows`."""
    num, num_ids = rows_R.numel(), logits_NV.shape[1]
    num_wanted = min(num_wanted, num_ids)
    assert num_wanted <= _CAPACITY // 2, f"num_wanted={num_wanted}: expected at most {_CAPACITY // 2}"
    device = logits_NV.device
    rows = rows_R.reshape(-1)
    tokens = tokens_R.reshape(-1)
    tuning = Tuning(block=block, row_block=4 * block, capacity=_CAPACITY, wanted=num_wanted)
    part = RowScan(logits_NV, None, first_id, tuning, raw_rows=rows).run()
    ids = torch.empty(num, num_wanted, dtype=torch.int32, device=device)
    values = torch.empty(num, num_wanted, dtype=torch.float32, device=device)
    log_sums, own = (torch.empty(num, dtype=torch.float32, device=device) for _ in range(2))
    if num:
        order[(num,)](
            *(logits_NV, logits_NV.stride(0), rows, tokens, num_ids, first_id),
            *(part.tops_N, part.masses_N, part.listed_NC, part.listed_ids_NC, part.found_N),
            *(ids, values, log_sums, own, num_wanted),
            CAPACITY=_CAPACITY,
            CHUNK=32,
            BLOCK=block,
            num_warps=8,
        )
    return TopRows(ids, values, log_sums, own)
