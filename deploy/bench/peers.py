"""The same weights, prompts and cores -> what `transformers` makes of them, at the best settings it offers on a CPU.

float32 as our engine computes, SDPA attention, KV cache, the fastest number of threads. Greedy throughout: only then
do both sides owe the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline.cluster.types import Request
from paceline.deploy.bench.figures import Block, Count, timed
from paceline.deploy.bench.inprocess import best_threads, threads

Outputs = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to run requests, tuned."""

    name: str
    text: str
    num_threads: int
    generate: Callable[[Sequence[Request]], Outputs]

    def block(
        self, requests_of: Callable[[int], list[Request]], keep: Callable[[int, Outputs], None]
    ) -> Block:
        """Whole requests of a round; `keep` gets what came out, after the clock has stopped."""

        def run(index: int) -> Count:
            requests = requests_of(index)
            outputs: Outputs = {}
            with threads(self.num_threads):
                seconds = timed(lambda: len(outputs.update(self.generate(requests)) or outputs)).seconds
            keep(index, outputs)
            return Count(sum(len(tokens) for tokens in outputs.values()), seconds)

        return run


class Transformers:
    """Target and draft as plain Hugging Face models."""

    def __init__(self, target: Path, draft: Path) -> None:
        self._target = _load(target)
        self._draft = _load(draft)
        self._assistance: dict[str, Any] = {}

    def one_by_one(self, probe: list[Request]) -> Peer:
        """`generate`, batch 1."""
        best = best_threads(lambda: self._each(probe))
        return Peer("hf", "generate, batch 1", best, self._each)

    def batched(self, probe: list[Request]) -> Peer:
        """`generate`, all requests in one left-padded batch."""
        best = best_threads(lambda: self._batch(probe))
        return Peer("hf_batch", f"generate, padded batch of {len(probe)}", best, self._batch)

    def assisted(self, probe: list[Request]) -> Peer:
        """Assisted generation with the better of its default schedule and our depth."""
        settings: dict[str, dict[str, Any]] = {
            "default schedule": {},
            "4 drafted": {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"},
        }
        best = best_threads(lambda: self._assist(probe))
        seconds: dict[str, float] = {}
        defaults = self._draft.generation_config.to_dict()
        for name, setting in settings.items():
            self._draft.generation_config.update(**{**defaults, **setting})
            with threads(best):
                seconds[name] = min(timed(lambda: len(self._assist(probe))).seconds for _ in range(2))
        name = min(seconds, key=lambda name: seconds[name])
        self._draft.generation_config.update(**{**defaults, **settings[name]})
        return Peer("hf_assisted", f"assisted generation, {name}", best, self._assist)

    def _each(self, requests: Sequence[Request]) -> Outputs:
        return {request.id: self._one(request) for request in requests}

    def _assist(self, requests: Sequence[Request]) -> Outputs:
        return {request.id: self._one(request, assistant_model=self._draft) for request in requests}

    def _one(self, request: Request, **extra: Any) -> list[int]:
        ids = torch.tensor([request.prompt_ids])
        out = self._generate(ids, torch.ones_like(ids), request.max_tokens, **extra)
        tokens: list[int] = out[0, ids.shape[1] :].tolist()
        return tokens

    def _batch(self, requests: Sequence[Request]) -> Outputs:
        longest = max(len(request.prompt_ids) for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, longest - len(request.prompt_ids) :] = 1
        out = self._generate(ids, mask, requests[0].max_tokens)
        return {request.id: row[longest:].tolist() for request, row in zip(requests, out, strict=True)}

    def _generate(self, ids: torch.Tensor, mask: torch.Tensor, num_tokens: int, **extra: Any) -> torch.Tensor:
        with torch.inference_mode():
            out: torch.Tensor = self._target.generate(
                ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, use_cache=True, **extra
            )
        return out


def _load(folder: Path) -> Any:
    """float32, SDPA; no stop tokens, as our requests have none."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
