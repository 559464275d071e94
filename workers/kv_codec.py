"""KV rows of a message <-> what goes over the link: the rows themselves, or (lossy) codes and scales.

An encoded message is one flat run of bytes, the codes of all elements and then the scales of all rows, so that a link
carries and digests it like any other tensor.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import torch
from torch import Tensor

from paceline.kernels import kv_codec

Codec = Literal["none", "int8", "fp8"]


def encode(rows: Tensor, codec: Codec) -> Tensor:
    """[..., D] rows -> what is sent: the same tensor, or uint8 [elements + 4 * rows]."""
    if codec == "none":
        return rows
    codes, scales = kv_codec.encode(rows, codec)
    return torch.cat([codes.view(-1), scales.view(-1).view(torch.uint8)])


def decode(sent: Tensor, shape: torch.Size, dtype: torch.dtype, codec: Codec) -> Tensor:
    """What was sent -> rows of this shape and type."""
    if codec == "none":
        return sent
    num_codes = prod(shape)
    # A copy: the scales' bytes need not begin where a float may.
    scales = sent[num_codes:].clone().view(torch.float32).view(shape[:-1])
    return kv_codec.decode(sent[:num_codes].view(shape), scales, codec, dtype)


def sent_as(shape: torch.Size, dtype: torch.dtype, codec: Codec) -> tuple[torch.Size, torch.dtype]:
    """Shape and type on the link of rows of this shape and type."""
    if codec == "none":
        return shape, dtype
    return torch.Size([prod(shape) + 4 * prod(shape[:-1])]), torch.uint8
