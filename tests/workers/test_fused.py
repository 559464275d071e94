"""Several drafters, with and without a controller: the same text, fewer steps, whoever is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from paceline.cluster.controller import Controller, StepCost
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import Request, Sampling
from paceline.workers.draft import DraftEngine
from paceline.workers.drafters.base import Drafter
from paceline.workers.drafters.colocated import ColocatedDrafter
from paceline.workers.drafters.fused import FusedDrafter
from paceline.workers.drafters.suffix import SuffixDrafter
from paceline.workers.engine import Engine
from paceline.workers.model_runner import load_runner
from paceline.workers.profile import measure_step_cost

REQUESTS = [
    Request(
        f"r{i}", tuple(range(3 + i, 40 + 2 * i)) * 2, Sampling(seed=i, temperature=[0.0, 0.8, 1.0][i % 3]), 60
    )
    for i in range(6)
]


class Nonsense(Drafter):
    """Proposes a token that is always wrong, and takes its time."""

    name = "nonsense"
    num_asked = 0

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        self.num_asked += 1
        return [
            Tree.build(int(s.token_ids[-1]), [1] * 8, list(range(-1, 7)), scores=[0.9] * 8) for s in streams
        ]


@pytest.mark.parametrize("controlled", [False, True])
def test_fused_drafters_give_the_plain_text_in_fewer_steps(
    model_folder: Callable[[str], Path], controlled: bool
) -> None:
    """A draft equal to the target, copies and nonsense together."""
    folder = model_folder("llama")
    runner, _ = load_runner(folder, kv_memory_mb=8, block_size=8)
    plain = Engine(runner, token_budget=256, max_streams=8)
    expected = plain.run(REQUESTS)

    draft, _ = load_runner(folder, kv_memory_mb=8, block_size=8)
    colocated = ColocatedDrafter(
        DraftEngine(draft, token_budget=256), vocab_size=runner.vocab_size, depth=4, width=2
    )
    controller = Controller(StepCost([1, 64], [1.0, 1.5])) if controlled else None
    ticks = iter(range(10**9))
    # Under a controller nonsense would spoil the calibration of the source it passes itself off as.
    drafters = [SuffixDrafter(), colocated] if controlled else [SuffixDrafter(), Nonsense(), colocated]
    fused = FusedDrafter(drafters, controller, clock=lambda: next(ticks) * 1e-3)
    engine = Engine(runner, token_budget=256, max_streams=8, drafter=fused)
    texts = engine.run(REQUESTS)

    assert texts == expected
    assert engine._metrics.steps._value.get() < 0.6 * plain._metrics.steps._value.get()
    engine.scheduler.check_integrity()
    assert engine.pool.num_used == 0


def test_a_drafter_that_only_costs_is_asked_ever_less(model_folder: Callable[[str], Path]) -> None:
    """The controller stops asking it, the text is the plain one."""
    runner, _ = load_runner(model_folder("llama"), kv_memory_mb=8, block_size=8)
    request = Request("long", tuple(range(3, 20)), Sampling(seed=1, temperature=1.0), 200)
    expected = Engine(runner, token_budget=256, max_streams=8).run([request])
    nonsense = Nonsense()
    ticks = iter(range(10**9))
    controller = Controller(StepCost([1, 64], [1.0, 2.0]))
    engine = Engine(
        runner,
        token_budget=256,
        max_streams=8,
        drafter=FusedDrafter([nonsense], controller, clock=lambda: float(next(ticks))),
    )

    assert engine.run([request]) == expected
    assert 1 <= nonsense.num_asked < 60


def test_step_costs_are_measured(model_folder: Callable[[str], Path]) -> None:
    """Seconds per number of rows, never falling."""
    runner, _ = load_runner(model_folder("llama"), kv_memory_mb=8, block_size=8)
    cost = measure_step_cost(runner)

    assert cost.rows.tolist() == [1, 2, 4, 8, 16, 32, 64]
    assert (cost.seconds[1:] >= cost.seconds[:-1]).all() and cost.seconds[0] > 0
