"""The bundled draft and texts of its target -> drafts that are better, worse in known ways, or neither.

Folders of bfloat16 weights, as they would be published. Made in order of their names and kept: what is there is not made
again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from paceline.deploy.models.corpus import NO_LOSS, PAD_ID
from paceline.deploy.models.training import distill_loss
from paceline.workers.replay import Text

State = dict[str, Tensor]
Say = Callable[[str], None]

_BATCH = 12
"""Texts of one training step."""
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
        """Distil the target on its own texts, from `base` on; snapshots by step, the last one is `name`."""
        wanted = [name, *snapshots.values()]
        if all(self.has(each) for each in wanted):
            return
        target = LlamaForCausalLM.from_pretrained(self._target, dtype=torch.float32).eval()
        model = LlamaForCausalLM.from_pretrained(
            self.folder(base) if base else self._draft, dtype=torch.float32
        )
        loss_of = distill_loss(model, target)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0
        )
        for step, (inputs, labels) in zip(range(1, steps + 1), batches(texts, seed), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = _LEARNING_RATE * min(1.0, step / 10)
            loss = loss_of(inputs, labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 20 == 0:
                self._say(f"training {name}: step {step} of {steps}, loss {float(loss.detach()):.3f}")
            if step in snapshots:
                self.save(snapshots[step], model.state_dict())
        self.save(name, model.state_dict())

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


def batches(texts: Sequence[Text], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless: int64 [B, L] tokens, and the next ones, NO_LOSS in prompts and padding. Texts of like length together."""
    generator = torch.Generator().manual_seed(seed)
    by_length = sorted(texts, key=lambda text: len(text.request.prompt_ids) + len(text.output))
    groups = [by_length[at : at + _BATCH] for at in range(0, len(by_length) - _BATCH + 1, _BATCH)]
    while True:
        for index in torch.randperm(len(groups), generator=generator).tolist():
            yield _padded(groups[index])


def _padded(texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    length = max(len(text.request.prompt_ids) + len(text.output) for text in texts) - 1
    inputs = torch.full((len(texts), length), PAD_ID)
    labels = torch.full((len(texts), length), NO_LOSS)
    for row, text in enumerate(texts):
        ids = torch.tensor([*text.request.prompt_ids, *text.output])
        num = len(text.request.prompt_ids)
        inputs[row, : len(ids) - 1] = ids[:-1]
        labels[row, num - 1 : len(ids) - 1] = ids[num:]
    return inputs, labels
