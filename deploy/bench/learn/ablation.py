"""The bundled pair and texts of domains its draft has never seen -> a table of losses: acceptance before and after.

    python -m paceline.deploy.bench.learn.ablation --requests 240 --steps 60

One seed; every arm starts at the shipped draft and sees the same requests in the same order. Acceptance is that of the
deployed rule: the share of output tokens that the draft, coupled by the request's own noise, proposes first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer

from paceline.cluster.config import model_folder
from paceline.cluster.learning.capture import CapturedRequest
from paceline.cluster.learning.config import TrainConfig
from paceline.cluster.types import Request, Sampling
from paceline.deploy.bench.learn.training import captured, output_logits, train
from paceline.deploy.models import corpus, tasks
from paceline.deploy.models.corpus import END_ID, EOS_ID
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner, load_runner
from paceline.workers.sampling import SamplingRows, choose
from paceline.workers.training.loop import Training
from paceline.workers.training.output import write_version

_MAX_TOKENS = 120
_SEED = 4001
"""Of the items: no training or other benchmark uses it."""


@dataclass(frozen=True, slots=True)
class Arm:
    """What is different from the defaults."""

    name: str
    settings: dict[str, Any]


ARMS = (
    Arm("kl", {"loss": "kl"}),
    Arm("tv", {"loss": "tv"}),
    Arm("-log overlap", {"loss": "log_alpha"}),
    Arm("hybrid", {"loss": "hybrid"}),
    Arm("adaspec", {"loss": "adaspec"}),
    Arm("hybrid, rate x 5", {"loss": "hybrid", "learning_rate": 1e-3}),
    Arm("hybrid, lora 16", {"loss": "hybrid", "method": "lora", "learning_rate": 2e-3}),
)


class Row(msgspec.Struct, frozen=True):
    """One arm. Seconds and tokens per second are processor time of this process, scoring left out."""

    arm: str
    learning_rate: float
    steps: int
    tokens: int
    acceptance_before: float
    acceptance_after: float
    tokens_per_step_before: float
    tokens_per_step_after: float
    loss: float
    cpu_s: float
    tokens_per_cpu_s: float
    by_domain: dict[str, tuple[float, float]]


def requests_of(domains: Sequence[str], num: int, *, temperature: float, prefix: str = "") -> list[Request]:
    """`num` requests of new words, of each domain in turn."""
    tokenizer = Tokenizer.from_file(str(model_folder("bundled/target") / "tokenizer.json"))
    items = [tasks.items(domain, "new_words", _SEED) for domain in domains]
    found = []
    for index, (domain, source) in enumerate(
        itertools.islice(itertools.cycle(zip(domains, items, strict=True)), num)
    ):
        ids = tokenizer.encode(corpus.item_document(next(source)).given).ids
        how = Sampling(_SEED + index, temperature=temperature)
        found.append(
            Request(
                f"{prefix}{index}",
                tuple(ids),
                how,
                _MAX_TOKENS,
                stop_ids=(EOS_ID, END_ID),
                tenant="bench",
                domain=domain,
            )
        )
    return found


def capture(requests: Iterable[Request], runner: ModelRunner) -> list[CapturedRequest]:
    """Let the target answer, and keep what the decode worker would have kept."""
    wanted = list(requests)
    engine = Engine(runner, token_budget=256, max_streams=16)
    outputs = engine.run(wanted)
    return [captured(r, outputs[r.id], runner, created=float(index)) for index, r in enumerate(wanted)]


def accepted(records: Sequence[CapturedRequest], draft: ModelRunner) -> dict[str, list[list[bool]]]:
    """By domain and request: at which output tokens the draft's first choice, drawn with the same noise, is the text's."""
    found: dict[str, list[list[bool]]] = {}
    for record in records:
        logits = output_logits(draft, record.token_ids, record.num_prompt)
        positions = np.arange(record.num_prompt, len(record.token_ids))
        rows = SamplingRows.build([record.sampling], [len(positions)], positions)
        drafted, _ = choose(logits, rows)
        hits = (drafted == record.token_ids[record.num_prompt :]).tolist()
        found.setdefault(record.domain, []).append(hits)
    return found


def tokens_per_step(hits: Iterable[Sequence[bool]], depth: int = 4) -> float:
    """With a chain of `depth` drafted in each step."""
    num_tokens = num_steps = 0
    for one in hits:
        at = 0
        while at < len(one):
            run = list(one[at : at + depth])
            at += (run.index(False) if False in run else len(run)) + 1
            num_steps += 1
        num_tokens += len(one)
    return num_tokens / num_steps


def _rate(found: dict[str, list[list[bool]]]) -> float:
    hits = [hit for requests in found.values() for one in requests for hit in one]
    return sum(hits) / len(hits)


def train_arm(arm: Arm, records: Sequence[CapturedRequest], settings: TrainConfig, out: Path) -> Training:
    """Train the shipped draft on records and write the version to `out`."""
    base = model_folder("bundled/draft")
    training = train(base, records, settings)
    write_version(training.model, base, out, {"arm": arm.name})
    return training


def ablation(
    *,
    num_requests: int = 240,
    num_held_out: int = 60,
    steps: int = 60,
    temperature: float = 1.0,
    domains: Sequence[str] = tasks.UNKNOWN_TO_DRAFT,
    arms: Sequence[Arm] = ARMS,
    batch_tokens: int = 2048,
) -> tuple[list[Row], dict[str, float]]:
    """(one row for each arm, figures `ablation.<arm>.acceptance_gain`)."""
    torch.set_num_threads(1)
    target, _ = load_runner(model_folder("bundled/target"), kv_memory_mb=64, block_size=16)
    wanted = requests_of(domains, num_requests + num_held_out, temperature=temperature)
    records = capture(wanted, target)
    # The first items are held out: later ones of a domain are others, by how items are made.
    held_out, shown = records[:num_held_out], records[num_held_out:]
    before = accepted(held_out, _draft(model_folder("bundled/draft")))
    rows = []
    for arm in arms:
        settings = TrainConfig(**{"max_steps": steps, "batch_tokens": batch_tokens, **arm.settings})
        with tempfile.TemporaryDirectory() as place:
            began = time.process_time()
            training = train_arm(arm, shown, settings, Path(place))
            cpu_s = time.process_time() - began
            after = accepted(held_out, _draft(Path(place)))
        rows.append(_row(arm, settings, training, cpu_s, before, after))
        print(_line(rows[-1]), flush=True)
    return rows, {
        f"ablation.{row.arm}.acceptance_gain": row.acceptance_after - row.acceptance_before for row in rows
    }


def _draft(folder: Path) -> ModelRunner:
    return load_runner(folder, kv_memory_mb=16, block_size=16)[0]


def _row(
    arm: Arm,
    settings: TrainConfig,
    training: Training,
    cpu_s: float,
    before: dict[str, list[list[bool]]],
    after: dict[str, list[list[bool]]],
) -> Row:
    def steps(found: dict[str, list[list[bool]]]) -> float:
        return tokens_per_step(itertools.chain(*found.values()))

    return Row(
        arm.name,
        settings.learning_rate,
        training.num_done,
        training.num_tokens,
        _rate(before),
        _rate(after),
        steps(before),
        steps(after),
        training.loss,
        cpu_s,
        training.num_tokens / cpu_s,
        {name: (_rate({name: before[name]}), _rate({name: after[name]})) for name in before},
    )


HEADER = (
    "| arm | rate | steps | tokens | acceptance | tokens per step | by domain | loss | CPU s | tokens/CPU s |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |"
)


def _line(row: Row) -> str:
    domains = ", ".join(f"{name} {a:.3f} -> {b:.3f}" for name, (a, b) in row.by_domain.items())
    return (
        f"| {row.arm} | {row.learning_rate:g} | {row.steps} | {row.tokens:,} "
        f"| {row.acceptance_before:.3f} -> {row.acceptance_after:.3f} "
        f"| {row.tokens_per_step_before:.2f} -> {row.tokens_per_step_after:.2f} | {domains} | {row.loss:.3f} "
        f"| {row.cpu_s:.0f} | {row.tokens_per_cpu_s:,.0f} |"
    )


def main() -> None:
    """Run it and print the table, then a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--held-out", type=int, default=60)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--arms", default="", help="names with semicolons between them; all by default")
    how = parser.parse_args()
    chosen = [arm for arm in ARMS if not how.arms or arm.name in how.arms.split(";")]
    print(HEADER, flush=True)
    rows, figures = ablation(
        num_requests=how.requests,
        num_held_out=how.held_out,
        steps=how.steps,
        temperature=how.temperature,
        arms=chosen,
    )
    print(json.dumps({"rows": [msgspec.to_builtins(row) for row in rows], "figures": figures}))


if __name__ == "__main__":
    main()
