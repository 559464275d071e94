"""Samples of one step -> micro-batches: packed rows of tokens, and the target's row for each output token.

Tokens of the prompt, and what another worker generated before, are context. The logits behind token t - 1 decide token t,
so row i belongs to the logits at place num_prompt + i - 1, and the last token is never computed.

Legend: T tokens of a packed row, N target rows in it, M kept logits of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.workers.training.attention import Packed
from paceline.workers.training.pool import Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some requests, computed together."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    packed: Packed
    keep_N: Tensor
    """int64: the places in T whose logits count."""
    top_ids_NM: Tensor
    top_log_probs_NM: Tensor
    """float32, at temperature 1."""
    temperatures_N: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.keep_N)


def pack(samples: Sequence[Sample], *, greedy_temperature: float, device: torch.device) -> MicroBatch:
    """Put samples behind each other."""
    lengths = tuple(len(s.token_ids) - 1 for s in samples)
    starts = np.cumsum([0, *lengths[:-1]])
    top = min(s.top_ids.shape[1] for s in samples)  # the best come first
    ids = np.concatenate([s.token_ids[:-1] for s in samples])
    positions = np.concatenate([np.arange(n) for n in lengths])
    keep = [
        start + s.num_prompt - 1 + np.arange(s.num_rows) for s, start in zip(samples, starts, strict=True)
    ]
    temperatures = [np.full(s.num_rows, max(s.temperature, greedy_temperature), np.float32) for s in samples]

    def tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device, dtype)

    return MicroBatch(
        tensor(ids, torch.int64),
        tensor(positions, torch.int64),
        Packed.build(lengths, device),
        tensor(np.concatenate(keep), torch.int64),
        tensor(np.concatenate([s.top_ids[:, :top] for s in samples]), torch.int64),
        tensor(np.concatenate([s.top_log_probs[:, :top] for s in samples]), torch.float32),
        tensor(np.concatenate(temperatures), torch.float32),
    )


def by_length(samples: Sequence[Sample]) -> list[Sample]:
    """Longest last: requests of like length make rectangles with little waste. Ids break ties, so the order is one."""
    return sorted(samples, key=lambda s: (len(s.token_ids), s.request_id))


def take(left: list[Sample], num_tokens: int) -> list[Sample]:
    """The end of the list as one micro-batch of so many tokens, one request at least, however long it is."""
    group = [left.pop()]
    room = num_tokens - len(group[0].token_ids)
    while left and len(left[-1].token_ids) <= room:
        room -= len(left[-1].token_ids)
        group.append(left.pop())
    return group
