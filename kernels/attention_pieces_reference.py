"""Queries, a paged pool and pieces of work -> attention output, piece by piece in plain torch.

The plain twin of the kernel in `tree_attention_triton`: the same pieces, the same partial results, the same merge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.attention_merge import attention_merge
from paceline.kernels.attention_pieces import Cut, Pieces


def attend(
    q_THD: Tensor,
    k_pool_GSD: Tensor,
    v_pool_GSD: Tensor,
    pieces: Pieces,
    cut: Cut,
    *,
    block_size: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `paceline.kernels.tree_attention_triton.attend`."""
    num_rows, num_heads, _ = q_THD.shape
    num_kv, _, dim_v = v_pool_GSD.shape
    out = q_THD.new_zeros(num_rows, num_heads, dim_v)
    num_partials = pieces.merge_entry.numel() + cut.rows_per_tile
    partial = torch.zeros(num_partials, num_heads, dim_v)
    lse = torch.full((num_partials, num_heads), -torch.inf)
    num_pieces = int(pieces.program_start[-1])  # what lies behind them may be of an earlier step
    arrays = (pieces.piece_tile, pieces.piece_start, pieces.piece_stop, pieces.piece_entry)
    for tile, start, stop, entry in zip(*(array[:num_pieces].tolist() for array in arrays), strict=True):
        # A tile is always as many rows, as in the kernel: products may round otherwise where there are fewer.
        is_row = pieces.tile_rows[tile] >= 0
        rows = pieces.tile_rows[tile].clamp(min=0).long()
        keys = torch.arange(start, stop)
        table = pieces.tables[int(pieces.tile_segment[tile])].long()
        slots = table[keys // block_size] * block_size + keys % block_size
        q_RGHD = q_THD[rows].float().view(len(rows), num_kv, num_heads // num_kv, -1)
        scores = torch.einsum("rghd,gcd->rghc", q_RGHD, k_pool_GSD[:, slots].float()) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = sees(pieces, rows, keys, window)[:, None, None]
        scores = scores.masked_fill(~seen, -torch.inf).flatten(1, 2)
        logs_RH = scores.logsumexp(-1)
        weights = (scores - logs_RH[..., None]).exp().nan_to_num(0.0).view(len(rows), num_kv, -1, len(keys))
        result = torch.einsum("rghc,gcd->rghd", weights, v_pool_GSD[:, slots].float()).flatten(1, 2)
        rows, result, logs_RH = rows[is_row], result[is_row], logs_RH[is_row]
        if entry >= 0:
            partial[entry : entry + len(rows)], lse[entry : entry + len(rows)] = result, logs_RH
        else:
            if sinks_H is not None:
                result = result * torch.sigmoid(logs_RH - sinks_H.float())[..., None]
            out[rows] = result.to(out.dtype)
    attention_merge(
        partial, lse, pieces.merge_start, pieces.merge_entry, out, sinks_H=sinks_H, backend="reference"
    )
    return out


def sees(pieces: Pieces, rows: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """bool [R, C]: whether each row sees each key."""
    leading, position = pieces.leading[rows, None], pieces.positions[rows, None]
    is_leading = keys < leading
    bit = keys - pieces.base[rows, None].long()
    words = pieces.bits.shape[1]
    inside = (bit >= 0) & (bit < 32 * words)
    at = bit.clamp(0, 32 * words - 1)
    row = rows[:, None].expand_as(at)
    word = pieces.bits[row, at // 32].long() & 0xFFFFFFFF
    is_own = inside & ((word >> (at % 32)) & 1).bool()
    if window is not None:
        lowest = position - window
        is_leading &= keys > lowest
        below = word & ((1 << (at % 32)) - 1)
        count = sum(((below >> i) & 1) for i in range(32))
        is_own &= leading + pieces.ranks[row, at // 32] + count > lowest
    return is_leading | is_own
