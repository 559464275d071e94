"""The bundled draft and texts of its target -> drafts that are better, worse in known ways, or neither.

Folders of bfloat16 weights, as they would be published. Made in order of their names and kept: what is there is not made
again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from paceline.cluster.learning.capture import CapturedRequest
from paceline.cluster.learning.config import TrainConfig
from paceline.deploy.bench.learn.training import captured, train
from paceline.workers.model_runner import load_runner
from paceline.workers.replay import Text
from paceline.workers.training.loop import Training

State = dict[str, Tensor]
Say = Callable[[str], None]

_BATCH_TOKENS = 1024
"""Of one training step, prompts not counted."""
_LEARNING_RATE = 4e-4


class Workshop:
    """Makes drafts of one family in a folder. Weights are handled as float32 and written as bfloat16."""

    def __init__(self, work: Path, target: Path, draft: Path, say: Say) -> None:
        self._folder = work / "drafts"
        self._target, self._draft = target, draft
        self._say = say

    def folder(self, name: str) -> Path:
        return self._folder / name

    def has(self, name: str) -> bool:
        return (self.folder(name) / "done").exists()

    def state(self, name: str = "") -> State:
        """Weights of a draft made before; "" is the bundled one."""
        folder = self.folder(name) if name else self._draft
        state: State = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        return state

    def save(self, name: str, state: State, *, intermediate: int = 0) -> Path:
        """A folder of these weights; `intermediate`: the width of its MLP if it is not the bundled one's."""
        model = LlamaForCausalLM.from_pretrained(self._draft, dtype=torch.float32)
        if intermediate:
            config = copy.deepcopy(model.config)
            config.intermediate_size = intermediate
            model = LlamaForCausalLM(config)
        model.load_state_dict(state)
        folder = self.folder(name)
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "done").write_text(json.dumps({"name": name}))
        return folder

    # -- better --------------------------------------------------------------------------------------------

    def train(
        self,
        name: str,
        base: str,
        texts: Sequence[Text],
        *,
        steps: int,
        snapshots: Mapping[int, str],
        seed: int,
    ) -> None:
        """Distil the target on texts, from `base` on, as the trainer does; snapshots by step, the last one is `name`."""
        wanted = [name, *snapshots.values()]
        if all(self.has(each) for each in wanted):
            return

        def after_step(training: Training) -> None:
            if training.num_done % 20 == 0:
                self._say(
                    f"training {name}: step {training.num_done} of {steps}, loss {training.loss:.3f}, "
                    f"acceptance {training.acceptance:.3f}"
                )
            if training.num_done in snapshots:
                self.save(snapshots[training.num_done], training.model.state_dict())

        settings = TrainConfig(
            max_steps=steps, batch_tokens=_BATCH_TOKENS, learning_rate=_LEARNING_RATE, seed=seed
        )
        folder = self.folder(base) if base else self._draft
        training = train(folder, self._captured(texts, steps, seed), settings, after_step=after_step)
        self.save(name, training.model.state_dict())

    def _captured(self, texts: Sequence[Text], steps: int, seed: int) -> list[CapturedRequest]:
        """As many of the texts, drawn by `seed`, as so many steps can see; with what the target says along them."""
        runner, _ = load_runner(self._target, kv_memory_mb=64, block_size=16)
        found: list[CapturedRequest] = []
        left = steps * _BATCH_TOKENS
        for index in np.random.default_rng(seed).permutation(len(texts)).tolist():
            text = texts[index]
            if left <= 0:
                break
            if text.output:
                found.append(captured(text.request, text.output, runner))
                left -= len(text.output)
        return found

    # -- worse, or the same ------------------------------------------------------------------------------

    def mix(self, name: str, one: str, other: str, share: float) -> Path:
        """`share` of the way from one draft to another."""
        if not self.has(name):
            first, second = self.state(one), self.state(other)
            self.save(name, {key: (1 - share) * first[key] + share * second[key] for key in first})
        return self.folder(name)

    def noisy(self, name: str, base: str, scale: float, seed: int) -> Path:
        """Noise on every weight, in standard deviations of its tensor."""
        if not self.has(name):
            generator = torch.Generator().manual_seed(seed)
            state = self.state(base)
            tied = "lm_head.weight"
            noise = {
                key: scale * float(value.std()) * torch.randn(value.shape, generator=generator)
                for key, value in state.items()
                if key != tied
            }
            noise[tied] = noise["model.embed_tokens.weight"]
            self.save(name, {key: value + noise[key] for key, value in state.items()})
        return self.folder(name)

    def wider(self, name: str, base: str, intermediate: int) -> Path:
        """The same function with more work: rows of zeros in its MLP."""
        if not self.has(name):
            state = self.state(base)
            for key, value in state.items():
                if "gate_proj" in key or "up_proj" in key:
                    state[key] = torch.nn.functional.pad(value, (0, 0, 0, intermediate - value.shape[0]))
                elif "down_proj" in key:
                    state[key] = torch.nn.functional.pad(value, (0, intermediate - value.shape[1]))
            self.save(name, state, intermediate=intermediate)
        return self.folder(name)
