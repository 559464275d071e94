"""A run's order -> a published version, or the gate's report: loads, trains or scores, saves, publishes.

Runs in a process of its own (`paceline.workers.training.process`). Whatever goes wrong ends in the state "failed" with a
sentence that says what to do; nothing outside this process notices.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch
from pydantic import ValidationError

from paceline.cluster.config import ClusterConfig, model_folder
from paceline.cluster.errors import ConfigError, PacelineError, StorageError
from paceline.cluster.learning.capture import ShardReader, shards
from paceline.cluster.learning.config import TrainConfig
from paceline.cluster.learning.orders import OrderSettings
from paceline.cluster.learning.publish import fetch, publish
from paceline.cluster.learning.storage import learning_folder
from paceline.cluster.model_files import weights_version
from paceline.cluster.types import DraftRef, TrainLevel, TrainOrder, TrainState
from paceline.workers.model_runner import load_model, load_model_config, text_config
from paceline.workers.training.batches import Batches, ids_of
from paceline.workers.training.engines import make_engine
from paceline.workers.training.folder import RunFolder
from paceline.workers.training.loop import Training, TrainingError, trainable
from paceline.workers.training.lora import add_adapters
from paceline.workers.training.output import write_version
from paceline.workers.training.pace import Evicted, Pace
from paceline.workers.training.pool import Pool, Sieve, load_pool
from paceline.workers.training.protocol import Progress
from paceline.workers.training.scored import score_order
from paceline.workers.training.state import load_state, save_state

log = structlog.get_logger(__name__)

_MAX_RESTARTS = 3
"""Of a run whose requests are deleted while it learns from them. Somebody who deletes all the time cannot hold it up for ever."""


def settings_of(config: TrainConfig, order: TrainOrder) -> tuple[TrainConfig, OrderSettings]:
    """`learning.train` with what the order says differently.

    Raises:
        ConfigError: names the field, its value and the legal range.
    """
    common = OrderSettings.decode(order.settings)
    try:
        return TrainConfig.model_validate({**config.model_dump(), **common.train}), common
    except ValidationError as error:
        raise ConfigError(f"settings of run {order.run_id}: {error}") from error


class Run:
    """One order, from its start or from what the last process left."""

    def __init__(
        self,
        config: ClusterConfig,
        order: TrainOrder,
        folder: RunFolder,
        pace: Pace,
        tell: Callable[[Progress], None],
    ) -> None:
        self._config, self._order, self._folder, self._pace, self._tell = config, order, folder, pace, tell
        self._state: TrainState = "loading"
        self._training: Training | None = None
        self._num_restarts = 0
        self._began = time.monotonic()
        self._seconds_before = self._cpu_before = 0.0
        """Of processes of this run that ended."""

    # -- the whole ---------------------------------------------------------------------------------------

    def go(self) -> Progress:
        """Until it is done, has failed, or must go; the last progress, which was told."""
        try:
            with self._folder.locked():
                found = self._finished()
                if found is None:
                    found = self._score() if self._order.kind == "score" else self._train()
                    self._folder.write(self._folder.result, msgspec.json.encode(found))
                    self._folder.state.unlink(missing_ok=True)
        except Evicted:
            found = self._evicted()
        except Exception as error:  # whatever it is, another process would meet it again
            log.exception("run_failed", run=self._order.run_id)
            self._training = self._training if isinstance(error, TrainingError) else None
            found = self.progress("failed", error=_reason(error))
        self._tell(found)
        return found

    def _finished(self) -> Progress | None:
        """What an earlier process of this run came to, if it came to its end."""
        try:
            return msgspec.json.decode(self._folder.result.read_bytes(), type=Progress)
        except (OSError, msgspec.MsgspecError):
            return None

    def _evicted(self) -> Progress:
        """Save, if there is something to save; the memory is free when this process has ended."""
        if self._training is not None and self._state == "training":
            self._save(self._training)
        return self.progress("paused")

    def progress(self, state: TrainState | None = None, **facts: Any) -> Progress:
        """Where the run stands."""
        training = self._training
        return Progress(
            state or self._shown(),
            self._pace.in_force,
            training.num_done if training else 0,
            training.settings.max_steps if training else 0,
            training.num_tokens if training else 0,
            training.loss if training and training.num_done else 0.0,
            self._seconds_before + time.monotonic() - self._began - self._pace.paused_s,
            self._cpu_before + time.process_time(),
            yielded_s=self._pace.yielded_s,
            **facts,
        )

    def _shown(self) -> TrainState:
        return "paused" if self._pace.in_force in ("pause", "evict") else self._state

    def on_level(self, level: TrainLevel) -> None:
        """The pace changed: said at once."""
        self._tell(self.progress())

    # -- training ----------------------------------------------------------------------------------------

    def _train(self) -> Progress:
        settings, common = settings_of(self._config.learning.train, self._order)
        self._tell(self.progress())
        torch.manual_seed(settings.seed)
        base = self._fetch(self._order.base)
        model_config = load_model_config(base)
        model = trainable(load_model(base, model_config))
        if settings.method == "lora":
            add_adapters(model, settings.lora_rank, settings.seed)
        self._pace.between()
        reader = ShardReader.of(self._config.learning)
        saved = load_state(self._folder)
        sizes = text_config(model_config)
        pool, target = self._load_pool(
            reader,
            settings,
            common,
            vocab=int(sizes.vocab_size),
            max_context=int(sizes.max_position_embeddings),
            only=ids_of(saved[1]["batches"]) if saved is not None else None,
        )
        engine = make_engine(
            model, zero_stage=settings.zero_stage, store=self._folder.path / f"store-{os.getpid()}"
        )
        training = Training(model, engine, pool, _batches(pool, settings), settings, pace=self._pace)
        if saved is not None:
            training.restore(*saved)
            self._num_restarts = int(saved[1]["restarts"])
            self._seconds_before, self._cpu_before = saved[1]["seconds"], saved[1]["cpu_s"]
            log.info("run_resumed", run=self._order.run_id, step=training.num_done)
        self._training, self._state = training, "training"
        self._honour_deletions(reader)
        self._loop(training, reader)
        return self._publish(training, base, target)

    def _fetch(self, ref: DraftRef) -> Path:
        """The folder of a version: the configuration's, or a copy of a published one."""
        if not ref.url:
            return model_folder(self._config.model.draft)
        return fetch(ref, self._folder.path / "versions")

    def _load_pool(
        self,
        reader: ShardReader,
        settings: TrainConfig,
        common: OrderSettings,
        *,
        vocab: int,
        max_context: int,
        only: frozenset[str] | None,
    ) -> tuple[Pool, str]:
        """(what to learn from, the version of its target).

        Raises:
            TrainingError: there is nothing.
        """
        fs, root = learning_folder(self._config.learning)
        paths = list(reversed(shards(fs, root)))
        target = common.target or _newest_target(reader, paths)
        room = settings.memory_mb << 20
        sieve = Sieve(
            fresh_since=common.since,
            fresh_bytes=round(settings.fresh_share * room),
            old_bytes=round((1 - settings.fresh_share) * room),
            seed=settings.seed,
            only=only,
        )
        pool = load_pool(
            reader,
            paths,
            sieve,
            tag=self._order.tag,
            target_version=target,
            vocab=vocab,
            max_context=max_context,
            between=self._pace.between,
        )
        if not len(pool):
            raise TrainingError(
                f"nothing to learn from: {len(paths)} shards under {root} hold no request for training"
                + (f" with {self._order.tag}" if self._order.tag else "")
                + f" of target {target or 'unknown'} ({pool.num_malformed} malformed, {pool.num_other_target} of other "
                "targets); wait for traffic of clients that consent (`learning.capture`)"
            )
        return pool, target

    def _loop(self, training: Training, reader: ShardReader) -> None:
        while not training.is_done:
            training.step()
            self._tell(self.progress())
            self._honour_deletions(reader)
            if training.num_done % training.settings.save_steps == 0 and not training.is_done:
                self._save(training)

    def _honour_deletions(self, reader: ShardReader) -> None:
        """Forget what was deleted before the next batch; if it is in the weights, begin again without it.

        Raises:
            TrainingError: storage cannot be asked, or so much is deleted that there is no end.
        """
        training = self._training
        assert training is not None
        try:
            gone = training.pool.drop_deleted(reader.tombstones)
        except StorageError as error:
            raise TrainingError(
                f"{error}; without storage nobody knows whose consent was withdrawn: training stops, "
                "and starts again with the next run"
            ) from error
        is_tainted = any(reader.tombstones.covers(i, *whose) for i, whose in training.used.items())
        if is_tainted:
            self._num_restarts += 1
            if self._num_restarts > _MAX_RESTARTS:
                raise TrainingError(
                    f"requests that it learnt from were deleted {self._num_restarts} times: expected at most "
                    f"{_MAX_RESTARTS} in one run; train again when deletions have settled"
                )
            training.start_again(_batches(training.pool, training.settings))
            log.info("run_started_again", run=self._order.run_id, num_deleted=len(gone))
        if gone or is_tainted:
            self._save(training)  # what was on disk had seen it, or named it

    def _save(self, training: Training) -> None:
        tensors, facts = training.state()
        now = self.progress()
        extra = {"restarts": self._num_restarts, "seconds": now.seconds, "cpu_s": now.cpu_s}
        save_state(self._folder, tensors, {**facts, **extra})

    def _publish(self, training: Training, base: Path, target: str) -> Progress:
        """Write the version and publish it, unless somebody withdrew consent at the last moment."""
        now = self.progress()
        figures = {
            "steps": training.num_done,
            "tokens": training.num_tokens,
            "seconds": round(now.seconds, 3),
            "cpu_s": round(now.cpu_s, 3),
            "tokens_per_cpu_s": round(training.num_tokens / max(now.cpu_s, 1e-9), 1),
            "loss": training.curve[-1][1],
            "acceptance": training.curve[-1][2],
            "acceptance_at_start": training.curve[0][2],
            "curve": training.curve,
            "num_fresh": len(training.pool.fresh),
            "num_old": len(training.pool.old),
            "num_malformed": training.pool.num_malformed,
            "num_other_target": training.pool.num_other_target,
            "num_left_out": training.pool.num_left_out,
            "num_restarts": self._num_restarts,
        }
        lineage = training.pool.lineage(training.used)
        card = {
            "base": self._order.base.version or weights_version(base),
            "run_id": self._order.run_id,
            "tag": self._order.tag,
            "target": target,
            "created": round(time.time(), 3),
            "settings": training.settings.model_dump(mode="json"),
            "lineage": lineage,
            "figures": {name: value for name, value in figures.items() if name != "curve"},
        }
        out = self._folder.path / "version"
        shutil.rmtree(out, ignore_errors=True)
        num_parameters, num_bytes = write_version(training.model, base, out, card)
        ref = publish(*learning_folder(self._config.learning), out)
        # By request, for whoever is asked later what learnt from one of them; a card, which travels, names shards only.
        samples = [s for s in map(training.pool.get, training.used) if s is not None]
        requests = [
            [s.tenant, s.request_id, s.shard, len(s.token_ids) - s.num_prompt, s.created] for s in samples
        ]
        sizes = {"num_parameters": num_parameters, "num_bytes": num_bytes}
        report = json.dumps({**figures, **sizes, "lineage": lineage, "requests": requests}).encode()
        return self.progress("done", result=ref, report=report)

    # -- scoring -----------------------------------------------------------------------------------------

    def _score(self) -> Progress:
        self._state = "scoring"
        self._tell(self.progress())
        report = score_order(self._config, self._order, self._fetch, self._pace.between)
        return self.progress("done", report=report)


def _batches(pool: Pool, settings: TrainConfig) -> Batches:
    return Batches(
        pool,
        batch_tokens=settings.batch_tokens,
        fresh_share=settings.fresh_share,
        max_tenant_share=settings.max_tenant_share,
        seed=settings.seed,
    )


def _newest_target(reader: ShardReader, paths: list[str]) -> str:
    """Version of the target behind the newest request; "" if there is none."""
    for path in paths:
        for record in reader.shard(path):
            return record.target_version
    return ""


def _reason(error: BaseException) -> str:
    if isinstance(error, PacelineError):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory: lower learning.train.memory_mb or batch_tokens"
    return f"{type(error).__name__}: {str(error)[:500]}"
