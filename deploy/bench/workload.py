"""Scenario, seed and index -> the same requests every time.

Four kinds of text decide what speculation is worth: tasks a draft was trained on, tasks it has never seen, edits that
repeat their own prompt, and text nobody can foresee. Tasks come from the generators of the bundled pair, with words that it has never seen.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from paceline.cluster.types import Request, Sampling
from paceline.deploy.models import tasks

Prompt = Callable[[Any, int, int], list[int]]
"""(tokenizer, seed, index) -> prompt token ids."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row of the table. Even requests are greedy, odd ones are drawn at `temperature`."""

    name: str
    text: str
    temperature: float
    prompt: Prompt
    max_tokens: int
    stops: bool
    """Requests end where the reply does, as in use; the others run to `max_tokens`."""


def task_prompt(domains: Sequence[str]) -> Prompt:
    """Requests of these domains in turn, about things that no training has named."""

    def prompt(tokenizer: Any, seed: int, index: int) -> list[int]:
        domain = domains[index % len(domains)]
        item = next(tasks.items(domain, "new_words", seed * 1_000_003 + index))
        return chat(tokenizer, item.request)

    return prompt


def random_prompt(tokenizer: Any, seed: int, index: int) -> list[int]:
    """Token ids without meaning, special ones left out."""
    special = set(tokenizer.all_special_ids)
    usable = [token for token in range(len(tokenizer)) if token not in special]
    return random.Random(f"{seed}/{index}").choices(usable, k=64)


KNOWN_TO_DRAFT = tuple(name for name in tasks.DOMAINS if name not in tasks.UNKNOWN_TO_DRAFT)

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("domains", "tasks the draft knows", 0.8, task_prompt(KNOWN_TO_DRAFT), 256, True),
        Scenario(
            "unseen", "tasks the draft has never seen", 0.8, task_prompt(tasks.UNKNOWN_TO_DRAFT), 256, True
        ),
        Scenario("copy", "code or a record again, with a change", 0.8, task_prompt([tasks.EDITS]), 384, True),
        Scenario(
            "random",
            "ids without meaning, drawn at temperature 1.5 or greedy",
            1.5,
            random_prompt,
            128,
            False,
        ),
    )
}


class Workload:
    """Requests of one model pair."""

    def __init__(self, folder: Path, *, seed: int = 0) -> None:
        """Takes the tokenizer of a model folder."""
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._seed = seed
        self._stop_ids = tuple(
            i for i in (self.tokenizer.eos_token_id, self.tokenizer.vocab.get("<|end|>")) if i is not None
        )

    def requests(
        self,
        scenario: str,
        first: int,
        num: int,
        *,
        max_tokens: int,
        greedy: bool = False,
        stops: bool | None = None,
    ) -> list[Request]:
        """Requests first..first + num - 1 of a scenario, of at most `max_tokens` and what the scenario allows.

        `stops`: whether they end at a stop token; None leaves that to the scenario.
        """
        kind = SCENARIOS[scenario]
        ends = self._stop_ids if (kind.stops if stops is None else stops) else ()
        return [self._request(kind, first + i, max_tokens, greedy, ends) for i in range(num)]

    def _request(
        self, scenario: Scenario, index: int, max_tokens: int, greedy: bool, stop_ids: tuple[int, ...]
    ) -> Request:
        prompt = scenario.prompt(self.tokenizer, self._seed, index)
        # Pairs of requests: both domains of a scenario get both temperatures.
        temperature = 0.0 if greedy or index // 2 % 2 == 0 else scenario.temperature
        sampling = Sampling(zlib.crc32(f"{self._seed}/{index}".encode()), temperature=temperature)
        num = min(max_tokens, scenario.max_tokens)
        return Request(f"{scenario.name}-{index}", tuple(prompt), sampling, num, stop_ids)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, nothing added."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def chat(tokenizer: Any, content: str) -> list[int]:
    """Token ids of one user's message, up to where the reply begins."""
    if tokenizer.chat_template is None:
        return encode(tokenizer, f"{content}\n\n")
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return encode(tokenizer, text)
