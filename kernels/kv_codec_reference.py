"""KV rows <-> codes and scales, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {"int8": 127.0, "fp8": 448.0}
"""The code of a row's largest element."""


def encode(rows: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """See `paceline.kernels.kv_codec.encode`."""
    rows = rows.float()
    largest = rows.abs().amax(-1)
    scales = torch.where(largest.isfinite(), largest / LARGEST[codec], torch.nan)
    divisors = torch.where(scales > 0, scales, 1.0)
    quotients = torch.where(scales.isfinite()[..., None], rows / divisors[..., None], 0.0)
    if codec == "int8":
        return quotients.round().to(torch.int8).view(torch.uint8), scales
    return quotients.to(torch.float8_e4m3fn).view(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, codec: str, dtype: torch.dtype) -> Tensor:
    """See `paceline.kernels.kv_codec.decode`."""
    stored = torch.int8 if codec == "int8" else torch.float8_e4m3fn
    return (codes.view(stored).float() * scales[..., None]).to(dtype)
