"""Raw logits, bias and the tokens on each row's path -> adjusted logits, column by column: the plain twin.

Legend: R rows (nodes), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def penalise_reference(
    logits_RV: Tensor,
    bias: Mapping[int, float],
    prompt: Sequence[int],
    outputs: Sequence[Sequence[int]],
    blocked: Sequence[Sequence[int]],
    *,
    repetition: float,
    frequency: float,
    presence: float,
) -> Tensor:
    """Adjust rows of one stream.

    Args:
        logits_RV: float32.
        bias: by token id.
        prompt: token ids.
        outputs: for each row the output tokens before the one it decides.
        blocked: for each row the tokens that must not be drawn.
        repetition, frequency, presence: strengths of the penalties.
    Returns:
        float32 [R, V], a new tensor.
    """
    rows = []
    for row, logits in enumerate(logits_RV.tolist()):
        output = list(outputs[row])
        adjusted = []
        for token, z in enumerate(logits):
            z += bias.get(token, 0.0)
            if token in output or token in prompt:
                z = z / repetition if z > 0 else z * repetition
            z -= frequency * output.count(token)
            z -= presence * (token in output)
            adjusted.append(z - math.inf if token in blocked[row] else z)
        rows.append(adjusted)
    return torch.tensor(rows, dtype=torch.float64).reshape(logits_RV.shape).to(torch.float32)
