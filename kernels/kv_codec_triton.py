"""KV rows <-> codes and scales, one launch each (Triton). A program takes 32 rows.

Bound by memory: reads 2 or 4 bytes an element and writes one, or the other way round. fp8 is put together from bits: the
same codes on every card, those without fp8 too, and in the interpreter, whose own conversion does not round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.kv_codec_reference import LARGEST

_ROWS = 32


def encode(rows: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """See `paceline.kernels.kv_codec.encode`."""
    dim = rows.shape[-1]
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    scales = torch.empty(rows.shape[:-1], dtype=torch.float32, device=rows.device)
    num = scales.numel()
    _encode[(triton.cdiv(num, _ROWS),)](
        rows.contiguous(),
        codes,
        scales,
        num,
        dim,
        LARGEST=LARGEST[codec],
        INT8=codec == "int8",
        ROWS=_ROWS,
        BLOCK_D=triton.next_power_of_2(dim),
    )
    return codes, scales


def decode(codes: Tensor, scales: Tensor, codec: str, dtype: torch.dtype) -> Tensor:
    """See `paceline.kernels.kv_codec.decode`."""
    dim = codes.shape[-1]
    rows = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    num = scales.numel()
    _decode[(triton.cdiv(num, _ROWS),)](
        codes.contiguous(),
        scales.contiguous(),
        rows,
        num,
        dim,
        INT8=codec == "int8",
        ROWS=_ROWS,
        BLOCK_D=triton.next_power_of_2(dim),
    )
    return rows


@triton.jit
def _to_fp8(x):
    """float32 of at most 448 -> e4m3, nearest, ties to even: uint8."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (
        (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    ) - 960  # exponent bias 127 -> 7, three bits of mantissa
    # Below 2^-6 codes are multiples of 2^-9; 1.5 * 2^14 pushes what is finer out.
    small = ((tl.abs(x) + 24576.0) - 24576.0) * 512.0
    code = tl.where(size >= 0x3C800000, normal, small.to(tl.uint32))
    return (code | ((bits >> 31) << 7)).to(tl.uint8)


@triton.jit
def _from_fp8(code):
    code = code.to(tl.uint32)
    exponent = (code >> 3) & 15
    normal = (((exponent + 120) << 23) | ((code & 7) << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent > 0, normal, (code & 7).to(tl.float32) * 0.001953125)
    return tl.where(code >= 128, -size, size)


@triton.jit
def _encode(
    rows, codes, scales, num, dim,
    LARGEST: tl.constexpr, INT8: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    mask = (row < num)[:, None] & (column < dim)[None, :]
    at = row.to(tl.int64)[:, None] * dim + column[None, :]
    x = tl.load(rows + at, mask=mask, other=0.0).to(tl.float32)
    size = tl.abs(x)
    # max() drops NaN, so unusable elements are counted.
    is_usable = tl.max((~(size < float("inf"))).to(tl.int32), 1) == 0
    scale = tl.div_rn(
        tl.max(tl.where(size < float("inf"), size, 0.0), 1), tl.full([ROWS], LARGEST, tl.float32)
    )
    divisor = tl.where(scale > 0, scale, 1.0)
    quotient = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    quotient = tl.where(is_usable[:, None], quotient, 0.0)
    if INT8:
        # 1.5 * 2^23 pushes the fraction out: round to nearest, ties to even.
        code = ((quotient + 12582912.0) - 12582912.0).to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        code = _to_fp8(quotient)
    tl.store(codes + at, code, mask=mask)
    tl.store(scales + row, tl.where(is_usable, scale, float("nan")), mask=row < num)


@triton.jit
def _decode(codes, scales, rows, num, dim, INT8: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    mask = (row < num)[:, None] & (column < dim)[None, :]
    at = row.to(tl.int64)[:, None] * dim + column[None, :]
    code = tl.load(codes + at, mask=mask, other=0)
    if INT8:
        x = code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        x = _from_fp8(code)
    scale = tl.load(scales + row, mask=row < num, other=0.0)
    tl.store(rows + at, (x * scale[:, None]).to(rows.dtype.element_ty), mask=mask)
