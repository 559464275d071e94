"""Python's standard library and generated tasks -> tokenizer, target and draft as safetensors, and their card.

Makes the pair that ships with Paceline, so that a laptop without network can serve with speculation. Everything
comes from the running interpreter; nothing is downloaded. With an NVIDIA GPU the target is larger.

    python -m paceline.deploy.models.build --out deploy/models/bundled
    python -m paceline.deploy.models.build --out DIR --minutes 1       # a dry run
    python -m paceline.deploy.models.build --out DIR --draft-only      # another draft for the target in DIR
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
DRAFT = Shape(hidden=192, layers=2, heads=3, kv_heads=1, intermediate=384)
LENGTH = 512  # of a row; every fourth step has rows twice as long
ROWS_PER_STEP = 4
ITEMS_OF_A_DOMAIN = 12_000
DRILL_STEPS = 200  # of copying, before anything is read
DRAFT_SHARE = 0.4  # of the budget; the draft is smaller but pays for the target's forward pass too


@dataclass(frozen=True, slots=True)
class Workshop:
    """What both trainings share."""

    out: Path
    tokenizer: Tokenizer
    documents: list[corpus.Document]
    """Of the standard library."""
    device: torch.device
    seed: int

    def rows(self, domains: Sequence[str], seed: int) -> corpus.Rows:
        """The library and the tasks of these domains, packed."""
        generated = corpus.task_documents(domains, ITEMS_OF_A_DOMAIN, seed)
        rows = corpus.pack(self.tokenizer, self.documents + generated, LENGTH, seed)
        print(f"{rows.num_tokens:,} tokens, {int((rows.labels >= 0).sum()):,} of them learnt", flush=True)
        return rows

    def note(self, name: str, cost: Cost) -> None:
        """Keep what a training cost beside the models, for the card."""
        path = self.out / "training.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        known[name] = dataclasses.asdict(cost)
        path.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def prepare(out: Path, device: torch.device, seed: int) -> Workshop:
    """Library -> documents and tokenizer; the tokenizer of a target that is there already is taken."""
    torch.manual_seed(seed)
    library, _ = corpus.read_library(Path(sysconfig.get_path("stdlib")))
    # The tasks are what the pair is for: the library is there for its language, a part of it is enough.
    documents = library.sources[::3] + library.chats[::2]
    file = out / "target" / "tokenizer.json"
    if file.is_file():
        return Workshop(out, Tokenizer.from_file(str(file)), documents, device, seed)
    examples = corpus.task_documents(list(tasks.DOMAINS), 1000, seed)
    return Workshop(out, corpus.train_tokenizer(documents + examples), documents, device, seed)


def build_target(shop: Workshop, minutes: float, *, resume: bool = False) -> None:
    """Text -> target; `resume` goes on with the one that is there, on other items and at half the rate."""
    shape = TARGET_ON_GPU if shop.device.type == "cuda" else TARGET_ON_CPU
    seed = shop.seed + 2 if resume else shop.seed
    rows = shop.rows(list(tasks.DOMAINS), seed)
    folder = shop.out / "target"
    target = read_model(folder, shop.device).train() if resume else llama(shape, seed).to(shop.device)
    cost = train(
        "target, continued" if resume else "target",
        target,
        text_loss(target),
        lessons(rows, shop.device, seed, 0 if resume else DRILL_STEPS),
        budget_s=60 * minutes,
        peak=6e-4 if resume else 1.2e-3,
        snapshot=lambda: write_model(target, shop.tokenizer, shop.out / "target"),
    )
    write_model(target, shop.tokenizer, shop.out / "target")
    corpus.check_tokenizer(shop.out / "target")
    shop.note("target, continued" if resume else "target", cost)


def build_draft(shop: Workshop, minutes: float) -> None:
    """Target and text without two of the domains -> draft."""
    seed = shop.seed + 1
    rows = shop.rows([name for name in tasks.DOMAINS if name not in tasks.UNKNOWN_TO_DRAFT], seed)
    target, draft = read_model(shop.out / "target", shop.device), llama(DRAFT, seed).to(shop.device)
    cost = train(
        "draft",
        draft,
        distill_loss(draft, target),
        lessons(rows, shop.device, seed, DRILL_STEPS),
        budget_s=60 * minutes,
        peak=2e-3,
        snapshot=lambda: write_model(draft, shop.tokenizer, shop.out / "draft"),
    )
    write_model(draft, shop.tokenizer, shop.out / "draft")
    shop.note("draft", cost)


def lessons(
    rows: corpus.Rows, device: torch.device, seed: int, num_drills: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Copying first, then the corpus."""
    drill = itertools.islice(corpus.drill(2 * ROWS_PER_STEP, LENGTH // 2, seed), num_drills)
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
    parser.add_argument(
        "--resume", action="store_true", help="train the target in --out further, then a new draft"
    )
    parser.add_argument(
        "--draft-only", action="store_true", help="keep the target in --out, train a draft for it"
    )
    parser.add_argument("--card-only", action="store_true", help="measure the pair in --out, train nothing")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not args.card_only:
        shop = prepare(args.out, device, args.seed)
        if not args.draft_only:
            build_target(shop, args.minutes * (1 - DRAFT_SHARE), resume=args.resume)
        build_draft(shop, args.minutes * DRAFT_SHARE)
    measure(args.out, device)


if __name__ == "__main__":
    main()
