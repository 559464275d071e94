"""A draft, an engine and batches -> a trained draft, micro-step by micro-step, and a state that survives a kill.

Micro-steps are short, and between any two the run asks how much it may take. A state is what the last whole step left:
a step that was cut short is done again with the same requests.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.cluster.errors import PacelineError
from paceline.cluster.learning.config import TrainConfig
from paceline.kernels.distill_loss import (
    Shares,
    draft_shares,
    forward_kl,
    hybrid,
    learnable,
    log_overlap,
    overlap,
    target_shares,
    total_variation,
)
from paceline.workers.training.batches import Batches
from paceline.workers.training.engines import Engine
from paceline.workers.training.microbatch import MicroBatch, by_length, pack, take
from paceline.workers.training.pace import Pace
from paceline.workers.training.pool import Pool, Sample

WARM_UP_STEPS = 20
MICRO_S = 0.03
"""Of processor time that a micro-step is sized for: what yielding may take."""
SELECTED = 0.4
"""Of the rows of a micro-batch that adaspec learns from."""
_FIRST_MICRO_TOKENS = 256
_MIN_MICRO_TOKENS = 32
_MEMORY = 0.9
"""Of the mean acceptance, from step to step."""
_MAX_CURVE = 512


class TrainingError(PacelineError):
    """A run cannot go on; the message says why and what to do."""


class Training:
    """One run. `step` until `is_done`; whoever owns it decides when to save."""

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Engine,
        pool: Pool,
        batches: Batches,
        settings: TrainConfig,
        *,
        pace: Pace | None = None,
        micro_tokens: int | None = None,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        """`micro_tokens` None: as many as `MICRO_S` of `clock` allows."""
        self.model, self.pool, self.batches, self.settings = model, pool, batches, settings
        self.num_done = self.num_tokens = 0
        self.loss = math.nan
        self.acceptance = 0.0
        """Mean overlap, over about ten steps: what hybrid goes by."""
        self.curve: list[tuple[int, float, float]] = []
        """(step, loss, acceptance before it); every second one goes when there are too many."""
        self.used: dict[str, tuple[str, float]] = {}
        """Requests in the weights: id -> (tenant, created)."""
        self.slowest_micro_s = 0.0
        """Wall time; others' work is in it."""
        self._engine = engine
        self._pace = pace or Pace()
        self._is_adaptive = micro_tokens is None and engine.world == 1
        self._micro_tokens = micro_tokens or _FIRST_MICRO_TOKENS
        self._clock = clock
        self._device = model.device
        self._vocab = int(model.config.get_text_config().vocab_size)
        self._first = {name: tensor for name, tensor in engine.state().items() if name.startswith("weight.")}
        self._reference: PreTrainedModel | None = None
        self._turns = batches.turns()
        """As the last whole step left them."""

    @property
    def is_done(self) -> bool:
        return self.num_done >= self.settings.max_steps

    @property
    def _switch(self) -> int:
        """The step at which adaspec's reference is ready and the draft begins anew; 0 for other losses."""
        return self.settings.max_steps // 2 if self.settings.loss == "adaspec" else 0

    def step(self) -> None:
        """One optimiser step.

        Raises:
            TrainingError: there is nothing to learn from, or the loss is not finite.
            Evicted: control wants the memory back; the weights are those of the last whole step.
        """
        if self._switch and self.num_done == self._switch and self._reference is None:
            self._begin_selection()
        batch = self.batches.next()
        num_rows = sum(s.num_rows for s in batch)
        if num_rows == 0:
            raise TrainingError(
                "nothing is left to learn from: what was captured was deleted or expired meanwhile"
            )
        sums = torch.zeros(2, dtype=torch.float64)
        for group, weight, is_last in self._groups(batch):
            began, worked = time.monotonic(), self._clock()
            sums += self._micro_step(group, weight / num_rows, is_last)
            self.slowest_micro_s = max(self.slowest_micro_s, time.monotonic() - began)
            self._adapt(group, self._clock() - worked)
            self._pace.between()
        if self._engine.world > 1:
            torch.distributed.all_reduce(sums)
        since = self.num_done - (self._switch if self._reference is not None else 0)
        rate = self.settings.learning_rate * min(1.0, (since + 1) / WARM_UP_STEPS)
        norm = self._engine.step(rate)
        loss, acceptance = (sums / num_rows).tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"step {self.num_done + 1}: the loss is {loss}, its gradient's norm {norm}: expected finite numbers; "
                f"learning.train.learning_rate={self.settings.learning_rate} may be too high for this draft"
            )
        self._note(batch, num_rows, loss, acceptance)

    def _note(self, batch: list[Sample], num_rows: int, loss: float, acceptance: float) -> None:
        self.num_done += 1
        self._turns = self.batches.turns()
        self.num_tokens += num_rows
        self.loss = loss
        self.acceptance = (
            acceptance if self.num_done == 1 else _MEMORY * self.acceptance + (1 - _MEMORY) * acceptance
        )
        self.used.update({s.request_id: (s.tenant, s.created) for s in batch})
        self.curve.append((self.num_done, round(loss, 5), round(acceptance, 5)))
        if len(self.curve) > _MAX_CURVE:
            del self.curve[1:-1:2]

    def _groups(self, batch: list[Sample]) -> Iterator[tuple[list[Sample], float, bool]]:
        """(samples of one micro-step, their weight, whether they are the last) of this rank."""
        left = by_length(batch)
        if self._engine.world == 1:
            while left:
                group = take(left, self._pace.size(self._micro_tokens))
                yield group, 1.0, not left
            return
        groups = []
        while left:
            groups.append(take(left, self._micro_tokens))
        world, rank = self._engine.world, self._engine.rank
        num = math.ceil(len(groups) / world)
        for index in range(num):  # all ranks take as many micro-steps: their gradients meet in each
            place = index * world + rank
            is_real = place < len(groups)
            yield groups[place if is_real else 0], float(is_real), index == num - 1

    def _adapt(self, group: list[Sample], worked_s: float) -> None:
        """Size the next micro-steps by what this one took."""
        num = sum(len(s.token_ids) for s in group)
        if not self._is_adaptive or len(group) == 1 and num < self._micro_tokens // 2:
            return
        fitting = num * MICRO_S / max(worked_s, 1e-6)
        size = self._micro_tokens + 0.3 * (min(fitting, 2 * self._micro_tokens) - self._micro_tokens)
        self._micro_tokens = max(_MIN_MICRO_TOKENS, min(round(size), self.settings.batch_tokens))

    def _micro_step(self, group: list[Sample], weight: float, is_last: bool) -> Tensor:
        """Add a group's gradient; (sum of losses, sum of overlaps)."""
        batch = pack(group, greedy_temperature=self.settings.greedy_temperature, device=self._device)
        p = target_shares(
            batch.top_log_probs_NM, torch.zeros_like(batch.temperatures_N), batch.temperatures_N, self._vocab
        )
        q = self._shares(self._engine.run(**_inputs(batch)), batch)
        loss_N = self._losses(p, q, batch)
        self._engine.backward(weight * loss_N.sum(), is_last=is_last)
        if weight == 0:
            return torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            return torch.stack([loss_N.sum(), overlap(p, q).sum()]).double().cpu()

    def _shares(self, logits_1NV: Tensor, batch: MicroBatch) -> Shares:
        return draft_shares(logits_1NV[0].float(), batch.top_ids_NM, batch.temperatures_N)

    def _losses(self, p: Shares, q: Shares, batch: MicroBatch) -> Tensor:
        """Loss of each row; their sum over a step's rows, divided by their number, is minimised."""
        match self.settings.loss:
            case "kl":
                return forward_kl(p, q)
            case "tv":
                return total_variation(p, q)
            case "log_alpha":
                return log_overlap(p, q)
            case "hybrid":
                return hybrid(forward_kl(p, q), total_variation(p, q), self.acceptance)
            case "adaspec":
                kl_N = forward_kl(p, q)
                if self._reference is None:
                    return kl_N
                with torch.no_grad():
                    reference = self._shares(self._reference(**_inputs(batch)).logits, batch)
                    chosen_N = learnable(kl_N, forward_kl(p, reference), SELECTED)
                return kl_N * chosen_N * (len(kl_N) / chosen_N.sum())

    def _begin_selection(self) -> None:
        """What was trained so far becomes the reference; the draft starts again from where it was."""
        self._reference = copy.deepcopy(self.model).requires_grad_(False)
        self._engine.restore(self._first, 0)

    # -- what a kill must not lose -----------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON) of the last whole step."""
        tensors = self._engine.state()
        if self._reference is not None:
            own = dict(self._reference.named_parameters())
            names = [name.removeprefix("weight.") for name in self._first]
            tensors |= {f"reference.{name}": own[name].detach().clone() for name in names}
        facts = {
            "step": self.num_done,
            "num_tokens": self.num_tokens,
            "loss": None if math.isnan(self.loss) else self.loss,
            "acceptance": self.acceptance,
            "curve": self.curve,
            "used": self.used,
            "micro_tokens": self._micro_tokens,
            "batches": self.batches.state(self._turns),
        }
        return tensors, facts

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from a state. The model must be as it was when that run began."""
        self.num_done, self.num_tokens = int(facts["step"]), int(facts["num_tokens"])
        self.loss = math.nan if facts["loss"] is None else float(facts["loss"])
        self.acceptance = float(facts["acceptance"])
        self.curve = [tuple(item) for item in facts["curve"]]
        self.used = {name: (str(tenant), float(at)) for name, (tenant, at) in facts["used"].items()}
        self._micro_tokens = int(facts["micro_tokens"])
        self.batches.restore(facts["batches"])
        self._turns = self.batches.turns()
        if any(name.startswith("reference.") for name in tensors):
            self._reference = copy.deepcopy(self.model).requires_grad_(False)
            own = dict(self._reference.named_parameters())
            for name, tensor in tensors.items():
                if name.startswith("reference."):
                    own[name.removeprefix("reference.")].data.copy_(tensor)
        num = self.num_done - (self._switch if self._reference is not None else 0)
        self._engine.restore(tensors, num)

    def start_again(self, batches: Batches) -> None:
        """Back to the base, with batches of what is left: requests that are in the weights were deleted."""
        self.batches, self._turns = batches, batches.turns()
        self._reference = None
        self.num_done = self.num_tokens = 0
        self.loss, self.acceptance = math.nan, 0.0
        self.curve, self.used = [], {}
        self._engine.restore(self._first, 0)


def _inputs(batch: MicroBatch) -> dict[str, Any]:
    return {
        "input_ids": batch.input_ids_T[None],
        "position_ids": batch.position_ids_T[None],
        "use_cache": False,
        "paceline_packed": batch.packed,
        "logits_to_keep": batch.keep_N,
    }


def trainable(model: PreTrainedModel) -> PreTrainedModel:
    """A model as `load_model` gives it -> one whose weights can be trained on packed rows. Drop-out stays off."""
    model.set_attn_implementation("paceline_training")
    return model.requires_grad_(True)
