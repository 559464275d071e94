"""Hugging Face's attention hook -> causal attention inside each request of one packed row.

Requests of a micro-batch stand behind each other without padding, so that every other layer computes real tokens only;
here they are laid out as a rectangle, which wastes at most half of what is small anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from paceline.cluster.errors import ModelError


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the tokens of a packed row [T] stand in a rectangle of B requests and L columns."""

    lengths: tuple[int, ...]
    places_T: Tensor
    """int64, into the flat rectangle."""

    @classmethod
    def build(cls, lengths: tuple[int, ...], device: torch.device) -> Packed:
        longest = max(lengths)
        places = [row * longest + torch.arange(length) for row, length in enumerate(lengths)]
        return cls(lengths, torch.cat(places).to(device))

    def unpack(self, x_HTD: Tensor) -> Tensor:
        """[H, T, D] -> [B, H, L, D]; columns behind a request are zero."""
        heads, _, dim = x_HTD.shape
        rows, longest = len(self.lengths), max(self.lengths)
        flat = x_HTD.new_zeros(rows * longest, heads, dim).index_copy(0, self.places_T, x_HTD.transpose(0, 1))
        return flat.view(rows, longest, heads, dim).transpose(1, 2)

    def pack(self, x_BHLD: Tensor) -> Tensor:
        """[B, H, L, D] -> [T, H, D]."""
        rows, heads, longest, dim = x_BHLD.shape
        flat = x_BHLD.transpose(1, 2).reshape(rows * longest, heads, dim)
        return flat.index_select(0, self.places_T)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paceline_packed: Packed | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, G, T, D], keys rotated already."""
    assert paceline_packed is not None, "training attention needs a packed row"
    if s_aux is not None or not getattr(module, "is_causal", True):
        raise ModelError("attention sinks or non-causal attention: such a draft cannot be trained yet")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (paceline_packed.unpack(x[0]) for x in (query, key, value))
    longest = q.shape[2]
    if softcap is None and (sliding_window is None or sliding_window >= longest):
        # What stands behind a request is never before one of its tokens: causal is mask enough.
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        out = _plain(q, k, v, scale, sliding_window, softcap)
    return paceline_packed.pack(out)[None], None


def _plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attention written out, for windows and capped scores."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(q.shape[2], device=q.device)
    is_seen = at[:, None] >= at
    if window is not None:
        is_seen = is_seen & (at[:, None] - at < window)
    return scores.masked_fill(~is_seen, -torch.inf).softmax(-1) @ v


AttentionInterface.register("paceline_training", _attention)
