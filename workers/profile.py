"""A model runner -> seconds of a step by its number of rows, measured on this machine now."""

from __future__ import annotations

import time

import numpy as np

from paceline.cluster.controller import StepCost
from paceline.cluster.speculation import Tree
from paceline.workers.model_batch import BatchBuilder
from paceline.workers.model_runner import ModelRunner

ROWS = (1, 2, 4, 8, 16, 17, 32, 33, 64)
"""Where arithmetic goes by blocks of sixteen rows, one row more costs a block."""
_CONTEXT = 64
_REPEATS = 9


def measure_step_cost(runner: ModelRunner) -> StepCost:
    """Best time of a forward with 1..64 rows of one stream behind a short context.

    Workers start together, and whoever has the core meanwhile only adds: the best of several tells most of what the
    machine can do, and what steps really take is learnt later. The numbers of rows take turns, so that a neighbour that
    is busy for a moment slows all of them alike. Uses the pool's first blocks: call it before any stream is admitted.
    """
    block_size = runner.cache.block_size
    room = min(runner.cache.num_blocks * block_size, runner.max_context)
    rows = [num for num in ROWS if num + 1 <= room]
    context = min(_CONTEXT, room - rows[-1])
    table = list(range(-(-(context + rows[-1]) // block_size)))
    rounds = [[_forward_s(runner, table, context, num) for num in rows] for _ in range(_REPEATS + 1)]
    return StepCost(rows, np.min(rounds[1:], axis=0).tolist())  # the first one warms up


def _forward_s(runner: ModelRunner, table: list[int], context: int, num_rows: int) -> float:
    tree = Tree.build(0, [0] * (num_rows - 1), list(range(-1, num_rows - 2)))
    builder = BatchBuilder(runner.cache)
    builder.add_tree(table, tree, context)
    batch = builder.build()[0]
    began = time.perf_counter()
    if runner.decides:  # as in a step: logits stay where they are
        runner.launch(batch)[:, :1].cpu()
    else:
        runner.forward(batch)
    return time.perf_counter() - began
