"""A tiny target and prompts -> captured requests as the decode worker would have written them, and their shards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import fsspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.cluster.learning.capture import CapturedRequest, ShardWriter, is_heldout
from paceline.cluster.learning.captured_rows import pack
from paceline.cluster.types import Sampling

TOP = 16
TARGET = "0123456789ab"


@torch.no_grad()
def captured(
    model: PreTrainedModel,
    num: int,
    *,
    seed: int = 0,
    tenants: Sequence[str] = ("a",),
    domain: str = "",
    num_prompt: int = 6,
    num_tokens: int = 24,
    temperature: float = 1.0,
    created: float | None = None,
    holdout: float = 0.0,
    prefix: str = "r",
) -> list[CapturedRequest]:
    """Texts that the target drew, with its own logits of each output token."""
    generator = torch.Generator().manual_seed(seed)
    vocab = model.config.vocab_size
    ids = torch.randint(3, vocab, (num, num_prompt), generator=generator)
    for _ in range(num_tokens):
        last = model(input_ids=ids).logits[:, -1] / max(temperature, 1e-3)
        ids = torch.cat([ids, torch.multinomial(last.softmax(-1), 1, generator=generator)], 1)
    logits = model(input_ids=ids).logits[:, num_prompt - 1 : -1].float()
    top, top_ids = logits.log_softmax(-1).topk(TOP, -1)
    now = time.time() if created is None else created
    return [
        CapturedRequest(
            request_id=f"{prefix}{seed}-{row}",
            tenant=tenants[row % len(tenants)],
            domain=domain,
            created=now + 1e-3 * row,
            target_version=TARGET,
            draft_version="",
            sampling=Sampling(seed, temperature),
            num_prompt=num_prompt,
            token_ids=ids[row].numpy().astype(np.int32),
            rows=pack(
                top_ids[row].numpy().astype(np.int32), top[row].numpy(), logits[row].logsumexp(-1).numpy()
            ),
            is_heldout=is_heldout(f"{prefix}{seed}-{row}", holdout),
            num_steps=num_tokens,
        )
        for row in range(num)
    ]


def load(folder: Path) -> PreTrainedModel:
    """As transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def write_shards(root: Path, records: Sequence[CapturedRequest], size: int = 16) -> None:
    """Put records into shards under a storage folder."""
    writer = ShardWriter(fsspec.filesystem("file"), str(root), "decode-0")
    for start in range(0, len(records), size):
        assert writer.write(records[start : start + size]) is not None
