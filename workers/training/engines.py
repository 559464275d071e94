"""Losses of micro-batches -> optimiser steps: plain torch, or DeepSpeed with its ZeRO stage by configuration.

Both hold float32 weights and moments, clip the gradient's norm at 1 and step alike; the plain one is the twin that the
other is compared with. What they would lose by a kill is given as plain tensors: DeepSpeed's own checkpoints are
pickles, and none is ever written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.cluster.errors import ConfigError

BETAS = (0.9, 0.95)
MAX_NORM = 1.0
MOMENTS = ("exp_avg", "exp_avg_sq")


class Engine(Protocol):
    """Holds a model while it is trained. `rank` of `world` processes that hold the same."""

    rank: int
    world: int

    def run(self, **inputs: Any) -> Tensor:
        """The model's logits."""
        ...

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add a micro-batch's gradient; the losses of a step add up to its mean over all rows of all ranks."""
        ...

    def step(self, rate: float) -> float:
        """Change the weights; the gradient's norm before clipping. One that is not finite changes nothing."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Trained weights and their moments, whole, by `weight.NAME` and so on."""
        ...

    def restore(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Go on from a state, whichever engine it came from; moments that are not in it are zero."""
        ...


def make_engine(
    model: nn.Module, *, zero_stage: int, rank: int = 0, world: int = 1, store: Path | None = None
) -> Engine:
    """The engine that the configuration asks for.

    Raises:
        ConfigError: DeepSpeed is asked for and not installed.
    """
    if zero_stage == 0:
        assert world == 1, "plain torch trains in one process"
        return PlainEngine(model)
    assert store is not None
    return DeepSpeedEngine(model, zero_stage, rank, world, store)


class _Base:
    def __init__(self, model: nn.Module, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def _weights(self) -> dict[str, Tensor]:
        return {f"weight.{name}": p.detach().clone() for name, p in self._named.items()}

    @torch.no_grad()
    def _set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._named.items():
            parameter.copy_(tensors[f"weight.{name}"])


class PlainEngine(_Base):
    """torch's AdamW in one process."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, 0, 1)
        self._model = model
        self._optimizer = _adamw(list(self._named.values()))

    def run(self, **inputs: Any) -> Tensor:
        logits: Tensor = self._model(**inputs).logits
        return logits

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        torch.autograd.backward(loss)

    def step(self, rate: float) -> float:
        norm = float(nn.utils.clip_grad_norm_(self._named.values(), MAX_NORM))
        if torch.isfinite(torch.tensor(norm)):
            _set_rate(self._optimizer, rate)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Tensor]:
        tensors = self._weights()
        for name, parameter in self._named.items():
            for moment in MOMENTS:
                value = self._optimizer.state.get(parameter, {}).get(moment)
                tensors[f"{moment}.{name}"] = torch.zeros_like(parameter) if value is None else value.clone()
        return tensors

    def restore(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._set_weights(tensors)
        for name, parameter in self._named.items():
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(num_steps)),
                **{moment: _moment(tensors, moment, name, parameter) for moment in MOMENTS},
            }


class DeepSpeedEngine(_Base):
    """ZeRO stage 1 or 2: each rank keeps the moments of its share of the weights, in stage 2 the gradients too."""

    def __init__(self, model: nn.Module, zero_stage: int, rank: int, world: int, store: Path) -> None:
        super().__init__(model, rank, world)
        settings = {
            "train_batch_size": world,  # how many rows a step has is the losses' affair
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": MAX_NORM,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": zero_stage},
        }
        self._engine, self._optimizer, *_ = _deepspeed(rank, world, store).initialize(
            model=model, optimizer=_adamw(list(self._named.values())), config=settings
        )

        # Moments come to be in its first step; a state may be asked for, or restored, before.
        for part in self._optimizer.single_partition_of_fp32_groups:
            zeros = {moment: torch.zeros_like(part) for moment in MOMENTS}
            self._optimizer.optimizer.state[part] = {"step": torch.tensor(0.0), **zeros}
        self._optimizer._lazy_init_hp_params_optimizer_state()

    def run(self, **inputs: Any) -> Tensor:
        logits: Tensor = self._engine(**inputs).logits
        return logits

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * self.world)  # ranks are averaged

    def step(self, rate: float) -> float:
        _set_rate(self._optimizer, rate)
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def state(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        tensors = self._weights()
        for name, parameter in self._named.items():
            for moment in MOMENTS:
                value = safe_get_full_optimizer_state(parameter, moment)
                tensors[f"{moment}.{name}"] = torch.zeros_like(parameter) if value is None else value.clone()
        return tensors

    def restore(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        self._set_weights(tensors)
        for name, parameter in self._named.items():
            safe_set_full_fp32_param(parameter, tensors[f"weight.{name}"])
            for moment in MOMENTS:
                safe_set_full_optimizer_state(parameter, _moment(tensors, moment, name, parameter), moment)
        for values in self._optimizer.optimizer.state.values():
            values["step"] = torch.tensor(float(num_steps))


def _moment(tensors: Mapping[str, Tensor], moment: str, name: str, like: Tensor) -> Tensor:
    value = tensors.get(f"{moment}.{name}")
    return torch.zeros_like(like) if value is None else value.clone()


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, betas=BETAS, weight_decay=0.0, fused=False, foreach=False)


def _set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _deepspeed(rank: int, world: int, store: Path) -> Any:
    """DeepSpeed with its process group, on loopback and without the op that it would compile for half a minute."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        import deepspeed
        from deepspeed.ops import __compatible_ops__ as ops
    except ImportError as error:
        raise ConfigError(
            "learning.train.zero_stage: expected 0 where DeepSpeed is not installed; "
            "`pip install paceline[train]` gets it"
        ) from error
    if os.environ["DS_ACCELERATOR"] == "cpu":
        ops["deepspeed_shm_comm"] = False
    if not torch.distributed.is_initialized():
        backend = "gloo" if os.environ["DS_ACCELERATOR"] == "cpu" else "nccl"
        torch.distributed.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=world
        )
    os.environ.setdefault("LOCAL_RANK", str(rank))
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)
    return deepspeed
