"""Python's standard library and generated tasks -> tokenizer, target and draft as safetensors, and their card.

Makes the pair that ships with Paceline, so that a laptop without network can serve with speculation. Everything
comes from the running interpreter; nothing is downloaded. With an NVIDIA GPU the target is larger.

    python -m paceline.deploy.models.build --out deploy/models/bundled
    python -m paceline.deploy.models.build --out DIR --minutes 1       # a dry run
    python -m paceline.deploy.models.build --out DIR --card-only       # measure a pair again

The order of the data follows --seed. The weights do not repeat bit for bit: the learning rate follows the
clock, so a slower machine takes fewer steps in the same minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from paceline.deploy.models import corpus, tasks
from paceline.deploy.models.card import Facts, write_card
from paceline.deploy.models.training import (
    Cost,
    Shape,
    distill_loss,
    llama,
    read_model,
    text_loss,
    train,
    write_model,
)

TARGET_ON_CPU = Shape(hidden=512, layers=3, heads=8, kv_heads=2, intermediate=832)
TARGET_ON_GPU = Shape(hidden=512, layers=5, heads=8, kv_heads=2, intermediate=1152)
DRAFT = Shape(hidden=256, layers=2, heads=4, kv_heads=1, intermediate=448)
LENGTH = 512  # of a row; every fourth step has rows twice as long
ROWS_PER_STEP = 4
ITEMS_OF_A_DOMAIN = 12_000
DRILL_STEPS = 200  # of copying, before anything is read
DRAFT_SHARE = 0.3  # of the budget; the draft is smaller but pays for the target's forward pass too


def build(out: Path, *, minutes: float, device: torch.device, seed: int) -> None:
    """Corpus -> tokenizer -> target -> draft."""
    torch.manual_seed(seed)
    library, _ = corpus.read_library(Path(sysconfig.get_path("stdlib")))
    # The tasks are what the pair is for: the library is there for its language, a part of it is enough.
    everything = library.sources[::3] + library.chats[::2]
    known = [name for name in tasks.DOMAINS if name not in tasks.UNKNOWN_TO_DRAFT]
    for_target = everything + corpus.task_documents(list(tasks.DOMAINS), ITEMS_OF_A_DOMAIN, seed)
    for_draft = everything + corpus.task_documents(known, ITEMS_OF_A_DOMAIN, seed + 1)
    tokenizer = corpus.train_tokenizer(everything + corpus.task_documents(list(tasks.DOMAINS), 1000, seed))
    costs: dict[str, Cost] = {}

    rows = corpus.pack(tokenizer, for_target, LENGTH, seed)
    print(f"target: {rows.num_tokens:,} tokens, {int((rows.labels >= 0).sum()):,} of them learnt", flush=True)
    shape = TARGET_ON_GPU if device.type == "cuda" else TARGET_ON_CPU
    fresh = llama(shape, seed).to(device)
    costs["target"] = train(
        "target",
        fresh,
        text_loss(fresh),
        lessons(rows, device, seed),
        budget_s=60 * minutes * (1 - DRAFT_SHARE),
        peak=1.2e-3,
        snapshot=lambda: write_model(fresh, tokenizer, out / "target"),
    )
    write_model(fresh, tokenizer, out / "target")
    corpus.check_tokenizer(out / "target")

    rows = corpus.pack(tokenizer, for_draft, LENGTH, seed + 1)
    print(f"draft: {rows.num_tokens:,} tokens, {int((rows.labels >= 0).sum()):,} of them learnt", flush=True)
    target, draft = read_model(out / "target", device), llama(DRAFT, seed + 1).to(device)
    costs["draft"] = train(
        "draft",
        draft,
        distill_loss(draft, target),
        lessons(rows, device, seed + 1),
        budget_s=60 * minutes * DRAFT_SHARE,
        peak=2e-3,
        snapshot=lambda: write_model(draft, tokenizer, out / "draft"),
    )
    write_model(draft, tokenizer, out / "draft")
    facts = {name: dataclasses.asdict(cost) for name, cost in costs.items()}
    (out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def lessons(rows: corpus.Rows, device: torch.device, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Copying first, then the corpus."""
    drill = itertools.islice(corpus.drill(2 * ROWS_PER_STEP, LENGTH // 2, seed), DRILL_STEPS)
    for inputs, labels in itertools.chain(drill, corpus.batches(rows, ROWS_PER_STEP, seed)):
        yield inputs.to(device), labels.to(device)


def measure(out: Path, device: torch.device) -> None:
    """A written pair -> its card."""
    facts = Facts(
        target=read_model(out / "target", device),
        draft=read_model(out / "draft", device),
        tokenizer=Tokenizer.from_file(str(out / "target" / "tokenizer.json")),
        library=corpus.read_library(Path(sysconfig.get_path("stdlib"))),
        costs=json.loads((out / "training.json").read_text(encoding="utf-8")),
    )
    write_card(out, facts)


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description="Train the bundled target and draft.")
    parser.add_argument("--out", type=Path, required=True, help="folder for target/, draft/ and CARD.md")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="CPU minutes (minutes on a GPU) for both models together"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0, help="order of the data and initial weights")
    parser.add_argument("--card-only", action="store_true", help="measure the pair in --out, train nothing")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not args.card_only:
        build(args.out, minutes=args.minutes, device=device, seed=args.seed)
    measure(args.out, device)


if __name__ == "__main__":
    main()
