"""Requests and what the engine emitted for them -> tokens compared, mismatches and near-ties.

The judge is `transformers` with eager attention and no cache, which shares no line with our forward. It reads prompt
and output together once: every token is judged given those before it, so one near-tie does not spoil the rest. For
greedy requests that is all there is; for sampled ones the noise is the engine's own, and the judge is asked only where
drafts and no drafts disagree. The full oracle, with noise of its own, belongs to the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.cluster.types import Request
from paceline.workers.sampling import SamplingRows, perturb

NEAR_TIE = 1e-5
"""A gap below this between the two best scores may fall either way in float32."""


@dataclass(slots=True)
class Exactness:
    """Counts over a whole run."""

    num_requests: int = 0
    num_tokens: int = 0
    mismatches: int = 0
    near_ties: int = 0
    num_judged: int = 0
    """Tokens that the judge recomputed."""
    examples: list[str] = field(default_factory=list)
    """Requests with a mismatch."""

    @property
    def near_ties_per_100k(self) -> float:
        return 1e5 * self.near_ties / max(1, self.num_tokens + self.num_judged)


class Judge:
    """One target as `transformers` runs it."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", use_safetensors=True
        ).eval()

    @torch.inference_mode()
    def scores(self, request: Request, output: Sequence[int]) -> Tensor:
        """float32 [len(output), V]: what each token was the argmax of."""
        ids = torch.tensor([[*request.prompt_ids, *output[:-1]]])
        logits: Tensor = self._model(ids, use_cache=False, logits_to_keep=len(output)).logits[0]
        positions = np.arange(len(output), dtype=np.int64) + len(request.prompt_ids)
        return perturb(logits.float(), SamplingRows.build([request.sampling], [len(output)], positions))

    def judge(self, request: Request, output: Sequence[int]) -> tuple[int, int]:
        """(mismatches, near-ties) among these tokens."""
        scores = self.scores(request, output)
        chosen = scores.gather(1, torch.tensor(output)[:, None])[:, 0]
        gaps = (scores.amax(1) - chosen)[scores.argmax(1) != torch.tensor(output)]
        near = int((gaps < NEAR_TIE).sum())
        return len(gaps) - near, near

    def compare(
        self,
        exactness: Exactness,
        requests: Sequence[Request],
        on: dict[str, list[int]],
        off: dict[str, list[int]],
    ) -> None:
        """With drafts against without, all of them; a difference is a near-tie if either text can be right."""
        for request in requests:
            left, right = on[request.id], off[request.id]
            exactness.num_requests += 1
            exactness.num_tokens += len(right)
            if left == right:
                continue
            is_wrong = (
                len(left) != len(right) or self.judge(request, left)[0] or self.judge(request, right)[0]
            )
            self._note(exactness, request, mismatches=1 if is_wrong else 0, near_ties=0 if is_wrong else 1)

    def sample(
        self, exactness: Exactness, requests: Sequence[Request], outputs: dict[str, list[int]]
    ) -> None:
        """The engine against the judge, for these greedy requests."""
        for request in requests:
            mismatches, near_ties = self.judge(request, outputs[request.id])
            exactness.num_judged += len(outputs[request.id])
            self._note(exactness, request, mismatches=mismatches, near_ties=near_ties)

    @staticmethod
    def _note(exactness: Exactness, request: Request, *, mismatches: int, near_ties: int) -> None:
        exactness.mismatches += mismatches
        exactness.near_ties += near_ties
        if mismatches and request.id not in exactness.examples:
            exactness.examples.append(request.id)
