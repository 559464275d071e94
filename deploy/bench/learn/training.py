"""Texts of a target, and a draft -> the draft trained on them by the trainer's own loop, at once and in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paceline.cluster.learning.capture import CapturedRequest
from paceline.cluster.learning.captured_rows import pack
from paceline.cluster.learning.config import TrainConfig
from paceline.cluster.types import Request
from paceline.workers.model_batch import BatchBuilder
from paceline.workers.model_runner import ModelRunner, load_model, load_model_config
from paceline.workers.training.batches import Batches
from paceline.workers.training.engines import make_engine
from paceline.workers.training.loop import Training, trainable
from paceline.workers.training.lora import add_adapters
from paceline.workers.training.pool import Pool, Sample, to_sample

TOP = 128


def captured(
    request: Request, output: Sequence[int], target: ModelRunner, *, created: float = 0.0
) -> CapturedRequest:
    """What a decode worker would have kept of an answer; one pass of the target over the text."""
    ids = np.asarray([*request.prompt_ids, *output], np.int32)
    logits = output_logits(target, ids, len(request.prompt_ids))
    top, top_ids = logits.log_softmax(-1).topk(TOP, -1)
    return CapturedRequest(
        request_id=request.id,
        tenant=request.tenant,
        domain=request.domain,
        created=created,
        target_version=target.version,
        draft_version="",
        sampling=request.sampling,
        num_prompt=len(request.prompt_ids),
        token_ids=ids,
        rows=pack(top_ids.numpy().astype(np.int32), top.numpy(), logits.logsumexp(-1).numpy()),
        is_heldout=False,
        num_steps=len(output),
    )


def output_logits(runner: ModelRunner, ids: npt.NDArray[np.int32], num_prompt: int) -> Tensor:
    """float32 [outputs, V]: what decides each output token, row i at the prefix before token num_prompt + i."""
    builder = BatchBuilder(runner.cache)
    table = list(range(-(-len(ids) // runner.cache.block_size)))
    builder.add_chunk(table, ids[:-1], 0, keep_last=True, also=range(num_prompt - 1, len(ids) - 2))
    logits = runner.forward(builder.build()[0])
    runner.cache.books = None  # whoever uses the pool next finds it overwritten
    return logits


def train(
    base: Path,
    records: Iterable[CapturedRequest],
    settings: TrainConfig,
    *,
    after_step: Callable[[Training], None] = lambda training: None,
) -> Training:
    """All of `settings.max_steps`; the weights are those of the result's `model`."""
    model = trainable(load_model(base, load_model_config(base)))
    if settings.method == "lora":
        add_adapters(model, settings.lora_rank, settings.seed)
    vocab, room = int(model.config.vocab_size), int(model.config.max_position_embeddings)
    samples: list[Sample | None] = [to_sample(r, "bench", vocab=vocab, max_context=room) for r in records]
    pool = Pool({s.request_id: s for s in samples if s is not None})
    batches = Batches(
        pool,
        batch_tokens=settings.batch_tokens,
        fresh_share=settings.fresh_share,
        max_tenant_share=settings.max_tenant_share,
        seed=settings.seed,
    )
    training = Training(model, make_engine(model, zero_stage=settings.zero_stage), pool, batches, settings)
    while not training.is_done:
        training.step()
        after_step(training)
    return training
