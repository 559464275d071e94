"""A trained pair and held-out items -> bits per token, accuracy and acceptance per domain, as CARD.md."""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from paceline.deploy.models import corpus, tasks
from paceline.deploy.models.corpus import Document, Library
from paceline.deploy.models.training import KL_WEIGHT, has_fast_bfloat16

DRAFT_LEN = 4  # K of the simulated speculation
ITEMS_MEASURED = 40
SPLITS: tuple[tasks.Split, ...] = ("train", "new_words", "held_out")
"""Of the items measured; with SEED, which no training used, "train" items are new ones of known words."""
MAX_NEW_TOKENS = 400
SEED = 1001  # of the items measured


@dataclass(frozen=True, slots=True)
class Facts:
    """A pair as a reader gets it, what it was made from and what that cost (`Cost` as a dict)."""

    target: LlamaForCausalLM
    draft: LlamaForCausalLM
    tokenizer: Tokenizer
    library: tuple[Library, Library]
    costs: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Known:
    """Both models on the same held-out text. bits are per token that is learnt."""

    num_tokens: int
    target_bits: float
    draft_bits: float
    overlap: float
    """Mean of sum(min(p, q)): the chance that sampling at temperature 1 accepts a drafted token."""


@dataclass(frozen=True, slots=True)
class Replies:
    """The target's own greedy replies, which is what speculation meets. Shares are of 1."""

    right: float
    """Replies that equal the reference, letter by letter."""
    agreement: float
    """Tokens where the draft's first choice is the target's."""
    tokens_per_step: float
    """With a chain of DRAFT_LEN drafted."""


@torch.no_grad()
def compare(facts: Facts, documents: Iterable[Document]) -> Known:
    """Both models over held-out documents, each alone in its context."""
    num_tokens, target_nats, draft_nats, overlap = 0, 0.0, 0.0, 0.0
    for document in documents:
        rows = corpus.pack(facts.tokenizer, [document], 1, 0)
        ids, labels = (
            rows.inputs.T[:, : corpus.MAX_POSITIONS // 2],
            rows.labels[: corpus.MAX_POSITIONS // 2, 0],
        )
        learnt = labels != corpus.NO_LOSS
        target = logits_of(facts.target, ids)[learnt].log_softmax(-1)
        draft = logits_of(facts.draft, ids)[learnt].log_softmax(-1)
        num_tokens += int(learnt.sum())
        target_nats += F.nll_loss(target, labels[learnt], reduction="sum").item()
        draft_nats += F.nll_loss(draft, labels[learnt], reduction="sum").item()
        overlap += torch.minimum(target, draft).exp().sum().item()
    per_token = 1 / (num_tokens * math.log(2))
    return Known(num_tokens, target_nats * per_token, draft_nats * per_token, overlap / num_tokens)


def logits_of(model: LlamaForCausalLM, ids_1L: Tensor) -> Tensor:
    """float32 logits [L, V], computed in float32 as a server does."""
    logits: Tensor = model(input_ids=ids_1L, use_cache=False).logits[0]
    return logits


@torch.no_grad()
def reply_to(facts: Facts, document: Document) -> tuple[list[int], list[bool]]:
    """The target's greedy reply, and where the draft would have said the same.

    Greedy speculation accepts a drafted token when it is the target's own, so one pass of the draft over the
    finished text tells every verdict.
    """
    prompt = torch.tensor([facts.tokenizer.encode(document.given).ids])
    ids: Tensor = facts.target.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
    )
    reply = ids[0, prompt.shape[1] :]
    drafted = logits_of(facts.draft, ids)[prompt.shape[1] - 1 : -1].argmax(-1)
    return reply.tolist(), (drafted == reply).tolist()


def measure_replies(facts: Facts, documents: Sequence[Document]) -> Replies:
    """Let the target answer every document's request."""
    right = num_agreed = num_tokens = num_steps = 0
    for document in documents:
        reply, verdicts = reply_to(facts, document)
        right += facts.tokenizer.decode(reply) == document.learnt.partition("<|end|>")[0]
        num_agreed, num_tokens = num_agreed + sum(verdicts), num_tokens + len(verdicts)
        num_steps += count_steps(verdicts)
    return Replies(right / len(documents), num_agreed / num_tokens, num_tokens / num_steps)


def count_steps(verdicts: list[bool]) -> int:
    """Target steps that greedy speculation with DRAFT_LEN needs for a text.

    >>> count_steps([True, True, False, True])    # 2 accepted and the target's own, then the last alone
    2
    """
    num_steps, at = 0, 0
    while at < len(verdicts):
        run = verdicts[at : at + DRAFT_LEN]
        at += (run.index(False) if False in run else len(run)) + 1
        num_steps += 1
    return num_steps


def documents_of(domain: str, split: tasks.Split, num: int) -> list[Document]:
    """Items of a domain that no training saw, as documents."""
    return [corpus.item_document(i) for i in itertools.islice(tasks.items(domain, split, SEED), num)]


# -- facts -> text ---------------------------------------------------------------------------------------


def head_lines(facts: Facts) -> list[str]:
    """What the pair is."""
    return [
        "# The bundled pair",
        "",
        "A toy that is worth serving: a small target that answers five kinds of request, and a draft that knows",
        f"three of them. {' and '.join(tasks.UNKNOWN_TO_DRAFT)} were kept from the draft, so that there is",
        "something to learn from live traffic. Written by `paceline.deploy.models.build`; every number below is",
        "measured on the saved bfloat16 weights, computed in float32.",
        "",
        "| model | parameters | layers | hidden | heads (KV) | MLP |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {name} | {m.num_parameters():,} | {m.config.num_hidden_layers} | {m.config.hidden_size} "
            f"| {m.config.num_attention_heads} ({m.config.num_key_value_heads}) | {m.config.intermediate_size} |"
            for name, m in (("target", facts.target), ("draft", facts.draft))
        ),
        "",
    ]


def data_lines(facts: Facts) -> list[str]:
    """What the pair was trained on."""
    train, test = facts.library
    return [
        "## Data",
        "",
        f"The standard library of CPython {platform.python_version()} (PSF License), without tests, tables and IDLE: whole",
        "modules, chats made from documented functions, and renamings in them; every third module and every second",
        "chat were used. The split is by file.",
        "",
        "| part | modules | chats | bytes |",
        "| --- | ---: | ---: | ---: |",
        f"| train | {len(train.sources)} | {len(train.chats)} | {train.num_bytes:,} |",
        f"| held out | {len(test.sources)} | {len(test.chats)} | {test.num_bytes:,} |",
        "",
        "And generated tasks (`tasks.py`): question to SQL, sentence to JSON record, worked arithmetic, function",
        "completion, and edits of code and records. One in five words (names, cities, products, tables, columns, fields)",
        "and one phrasing of each kind are in no training item; in training four words in ten are made up, so that copying is",
        "learnt and not the words. Requests carry no loss.",
        "",
        f"One byte-level BPE of {corpus.VOCAB_SIZE} tokens with single digits, and a chat template.",
        "",
    ]


def training_lines(facts: Facts, num_bytes: int) -> list[str]:
    """What the training cost."""
    rows = [
        f"| {name} | {c['num_steps']:,} | {c['num_tokens']:,} | {c['budget_s'] / 60:.0f} | {c['wall_s'] / 60:.0f} |"
        for name, c in facts.costs.items()
    ]
    precision = "bfloat16 products" if has_fast_bfloat16(torch.device("cpu")) else "float32"
    where = "CPU only, no accelerator was at hand: hence 8 M parameters, templated domains and this budget"
    if facts.target.num_parameters() > 8_000_000:
        where = "one GPU; its minutes stand for CPU minutes"
    return [
        "## Training",
        "",
        f"{where}. {precision} with float32 weights, AdamW, torch {torch.__version__}, transformers",
        f"{transformers.__version__}; rows of 512 and 1024 tokens. The draft learns from the target: {KL_WEIGHT:g} forward KL +",
        f"{1 - KL_WEIGHT:.2g} cross-entropy. Both folders together, in bfloat16: {num_bytes:,} bytes.",
        "",
        "| model | steps | tokens seen | CPU minutes | minutes |",
        "| --- | ---: | ---: | ---: | ---: |",
        *rows,
        "",
    ]


def quality_lines(facts: Facts) -> list[str]:
    """How good both are, by domain."""
    lines = [
        "## Quality on items that no training saw",
        "",
        "Right: greedy replies of the target that equal the reference letter by letter; on items of known words and",
        "phrasings, of new words, and of new words in new phrasings. The rest is measured on new words: bits per token of",
        "the reply; overlap, the chance that sampling at temperature 1 accepts a drafted token; agreement and tokens per",
        f"step, the draft along the target's own greedy replies with a chain of {DRAFT_LEN} drafted.",
        "",
        (
            "| domain | draft knows it | right: known / new words / new phrasings | target bits/token | draft | overlap "
            "| agreement | tokens per step |"
        ),
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for domain in (*tasks.DOMAINS, tasks.EDITS):
        replies = {
            split: measure_replies(facts, documents_of(domain, split, ITEMS_MEASURED)) for split in SPLITS
        }
        known, own = compare(facts, documents_of(domain, "new_words", ITEMS_MEASURED)), replies["new_words"]
        right = " / ".join(f"{found.right:.0%}" for found in replies.values())
        lines.append(
            f"| {domain} | {'no' if domain in tasks.UNKNOWN_TO_DRAFT else 'yes'} | {right} | {known.target_bits:.3f} "
            f"| {known.draft_bits:.3f} | {known.overlap:.1%} | {own.agreement:.1%} | {own.tokens_per_step:.2f} |"
        )
        print(lines[-1], flush=True)
    test = facts.library[1]
    for name, documents in (("library modules", test.sources), ("library functions", test.chats[:200])):
        known = compare(facts, documents)
        lines.append(
            f"| {name} | yes | | {known.target_bits:.3f} | {known.draft_bits:.3f} | {known.overlap:.1%} | | |"
        )
    return [*lines, ""]


def sample_lines(facts: Facts) -> list[str]:
    """One greedy reply per domain; indented, so that no fence in a text can end the block."""
    lines = ["## Greedy replies of the target", ""]
    for domain in tasks.DOMAINS:
        document = documents_of(domain, "train", 1)[0]
        request = document.given.removeprefix("<|user|>").partition("<|end|>")[0]
        reply = facts.tokenizer.decode(reply_to(facts, document)[0])
        for text in (request, reply):
            lines += [*(f"    {line}".rstrip() for line in text.splitlines()), ""]
            lines += ["gives" if text is request else "and", ""]
    return lines[:-2]


def write_card(out: Path, facts: Facts) -> None:
    """Measure, write and show CARD.md."""
    num_bytes = sum(f.stat().st_size for name in ("target", "draft") for f in (out / name).iterdir())
    lines = [
        *head_lines(facts),
        *data_lines(facts),
        *training_lines(facts, num_bytes),
        *quality_lines(facts),
        *sample_lines(facts),
    ]
    text = "\n".join(lines).rstrip() + "\n"
    (out / "CARD.md").write_text(text, encoding="utf-8")
    print(text)
