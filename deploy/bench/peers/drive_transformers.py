"""Prompts -> what `transformers` makes of them: `generate` alone, in a left-padded batch, or assisted by a draft.

Runs in the peer's own Python and imports nothing of Paceline. float32, SDPA attention, KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Settings = dict[str, Any]


def plain(threads: Sequence[int]) -> list[Settings]:
    """What is tried without drafts."""
    return [{"name": f"{number} threads", "threads": number} for number in threads]


def speculative(best: Settings) -> list[Settings]:
    """What is tried with drafts, given the best without: the default schedule and constant depths."""
    schedules: dict[str, Settings] = {"default schedule": {}}
    for depth in (4, 8):
        schedules[f"{depth} drafted"] = {
            "num_assistant_tokens": depth,
            "num_assistant_tokens_schedule": "constant",
        }
    return [
        {**best, "name": f"assisted, {name}, {best['name']}", "assistance": schedule}
        for name, schedule in schedules.items()
    ]


def environment(settings: Settings) -> dict[str, str]:
    """Threads, before torch is loaded."""
    return {"OMP_NUM_THREADS": str(settings["threads"])}


class Driver:
    """A target, and perhaps a draft, as plain Hugging Face models."""

    packages = ("transformers", "torch")

    def __init__(
        self, target: str, draft: str | None, work: str, max_streams: int, max_len: int, settings: Settings
    ) -> None:
        import torch

        self._torch = torch
        self._target = _load(target)
        self._assistance: Settings = {}
        self.text = f"generate, {settings['name']}"
        if "assistance" in settings:
            if draft is None:
                raise ValueError("assisted generation without a draft")
            assistant = _load(draft)
            assistant.generation_config.update(**settings["assistance"])
            self._assistance = {"assistant_model": assistant}

    def run(self, prompts: list[list[int]], num_tokens: int, streams: int) -> list[list[int]]:
        """One padded batch after the other."""
        if self._assistance and streams > 1:
            raise NotImplementedError("assisted generation takes one request at a time")
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), streams):
            outputs.extend(self._batch(prompts[first : first + streams], num_tokens))
        return outputs

    def _batch(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        longest = max(len(prompt) for prompt in prompts)
        ids = self._torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = self._torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with self._torch.inference_mode():
            out = self._target.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                do_sample=False,
                use_cache=True,
                **self._assistance,
            )
        rows: list[list[int]] = out[:, longest:].tolist()
        return rows


def _load(folder: str) -> Any:
    """float32, SDPA; no stop tokens, as our requests have none."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
