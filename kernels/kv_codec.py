"""KV rows <-> one byte an element and one scale a row. Lossy.

A row is one token's K or V of one KV head, after rotation. int8: s = max|x| / 127, code = round(x / s), so |e| <= s / 2.
fp8 (e4m3): s = max|x| / 448, code = x / s cast, so |e| <= max(|x| / 16, s / 1024). Both decode to code * s. What that does to
attention is bounded (`attention_bound`): it changes texts, and is never used unless asked for.

Legend: D head size, ... any leading dimensions.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from paceline.kernels import kv_codec_reference as reference
from paceline.kernels.dispatch import Backend, backend_of

CodecName = Literal["int8", "fp8"]

HALF_STEP = {"int8": 0.5, "fp8": 2.0**-10}
"""Largest error of a code near zero, in scales."""
RELATIVE = {"int8": 0.0, "fp8": 2.0**-4}
"""Largest error of a code far from zero, relative to the element."""


def encode(rows: Tensor, codec: CodecName, *, backend: Backend | None = None) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., D] and scales float32 [...] of rows [..., D] (float32, bfloat16 or float16, contiguous).

    A row with NaN or infinity becomes all NaN: what the target made unusable stays so. `backend`: "triton" or "reference";
    their codes are equal bit for bit.
    """
    if backend_of(rows, backend) == "reference":
        return reference.encode(rows, codec)
    from paceline.kernels import kv_codec_triton as kernel  # there is no Triton where there is no GPU

    return kernel.encode(rows, codec)


def decode(
    codes: Tensor, scales: Tensor, codec: CodecName, dtype: torch.dtype, *, backend: Backend | None = None
) -> Tensor:
    """Inverse of `encode` up to its error: rows [..., D] of `dtype`."""
    if backend_of(codes, backend) == "reference":
        return reference.decode(codes, scales, codec, dtype)
    from paceline.kernels import kv_codec_triton as kernel

    return kernel.decode(codes, scales, codec, dtype)


def error_bound(rows: Tensor, codec: CodecName) -> Tensor:
    """What each element of float32 rows may be off by after `encode` and `decode`: float32, the shape of `rows`."""
    largest = rows.abs().amax(-1, keepdim=True)
    scale = largest / reference.LARGEST[codec]
    # Two roundings of float32 come on top: of the quotient and of the product.
    return torch.maximum(rows.abs() * RELATIVE[codec], scale * HALF_STEP[codec]) + largest * 2.0**-22


def attention_bound(scores_error_C: Tensor, value_error: float, values_CD: Tensor) -> Tensor:
    """How far each channel of one attention output can move: [D].

    Args:
        scores_error_C: what the codec added to the C scores of a query (after scaling); a common shift does no harm.
        value_error: largest error of an element of the values. values_CD: the values themselves.

    With h half the range of the errors, the weights move by at most tanh(h / 2) in total variation, hence

        |o'_d - o_d| <= value_error + tanh(h / 2) * (max_c v_cd - min_c v_cd)
    """
    half_range = float(scores_error_C.max() - scores_error_C.min()) / 2
    return value_error + math.tanh(half_range / 2) * (values_CD.amax(0) - values_CD.amin(0))
