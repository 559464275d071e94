"""A score order -> the gate's report as JSON: held-out requests, champion and candidate, or a pool to be ranked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from paceline.cluster.config import ClusterConfig, model_folder
from paceline.cluster.errors import ConfigError
from paceline.cluster.learning.capture import ShardReader
from paceline.cluster.learning.config import GateConfig
from paceline.cluster.learning.counterfactual import Costs, Policy
from paceline.cluster.learning.orders import OrderSettings
from paceline.cluster.model_files import served_version
from paceline.cluster.types import DraftRef, TrainOrder
from paceline.workers.model_runner import load_runner
from paceline.workers.profile import measure_step_cost
from paceline.workers.scoring import load_draft, measure_draft_cost, rank, score


def score_order(
    config: ClusterConfig, order: TrainOrder, fetch: Callable[[DraftRef], Path], between: Callable[[], None]
) -> bytes:
    """Run the order.

    Args:
        fetch: a version's folder.
        between: called between pieces of work of tens of milliseconds.
    Raises:
        ConfigError: the order names nothing to score, or has a setting outside its range.
        ModelError, StorageError: a version cannot be used, or storage not be reached.
    """
    common = OrderSettings.decode(order.settings)
    try:
        gate = GateConfig.model_validate({**config.learning.gate.model_dump(), **common.gate})
    except ValidationError as error:
        raise ConfigError(f"settings of run {order.run_id}: {error}") from error
    reader = ShardReader.of(config.learning)
    base = fetch(order.base)
    between()
    target = common.target or served_version(
        model_folder(config.model.target), int8_weights=config.model.int8_weights
    )
    how: dict[str, Any] = {
        "target_version": target,
        "policy": Policy.of(config.speculation, common.streams, first_is_plain=config.prefill.replicas == 0),
        "costs": _costs(config, common, base, between),
        "between": between,
    }
    if common.rank:
        folders = [base, *(fetch(ref) for ref in common.rank if ref.version != order.base.version)]
        found = rank(folders, reader.requests(heldout=None, tag=order.tag), **how)
        return msgspec.json.encode({"ranked": [asdict(one) for one in found]}, enc_hook=msgspec.to_builtins)
    if order.candidate is None:
        raise ConfigError(f"score order {order.run_id}: candidate: expected a version, got none")
    candidate = fetch(order.candidate)
    held_out = reader.requests(heldout=True, tag=order.tag)
    report = score(held_out, base, candidate, config=gate, at=time.time(), look=common.look, **how)
    return report.encode()


def _costs(config: ClusterConfig, common: OrderSettings, draft: Path, between: Callable[[], None]) -> Costs:
    """The deployed target's step times as control knows them, or measured here; the draft's always here."""
    if common.step_rows:
        rows, seconds = common.step_rows, common.step_seconds
    else:
        folder = model_folder(config.model.target)
        runner, _ = load_runner(
            folder,
            kv_memory_mb=config.draft.kv_memory_mb,
            block_size=config.kv.block_size,
            int8_weights=config.model.int8_weights,
        )
        between()
        cost = measure_step_cost(runner)
        rows, seconds = tuple(cost.rows.astype(int).tolist()), tuple(cost.seconds.tolist())
    draft_rows, draft_seconds = measure_draft_cost(load_draft(draft), between=between)
    return Costs(tuple(rows), tuple(seconds), draft_rows, draft_seconds)
