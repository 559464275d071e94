"""Python's standard library and generated tasks -> a tokenizer, rows of token ids, and labels where a loss belongs.

Everything comes from the running interpreter and from `tasks`: nothing is downloaded. Knows nothing of models.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer

from paceline.deploy.models.tasks import EDITS, Draw, Item, items, rename_item, stable_hash

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD_ID, BOS_ID, EOS_ID, END_ID = 0, 1, 2, 6
VOCAB_SIZE = 4096
MAX_POSITIONS = 2048
NO_LOSS = -100
"""Label of a token whose prediction is nobody's business: what a user may ask is not learnt."""

# `render_chat` is the Python twin of this template; `check_tokenizer` holds them together.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('role ' + message['role'] + ': expected system, user or assistant') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

# Tests and foreign packages are not library code; the rest are tables or prose that would crowd out code.
EXCLUDED_DIRS = frozenset(
    [
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "encodings",
        "pydoc_data",
        "turtledemo",
        "ensurepip",
        "lib-dynload",
        "__pycache__",
    ]
)
# `_sysconfigdata*` lists the paths of the machine that compiled the interpreter.
EXCLUDED_FILE_PREFIXES = ("_sysconfigdata", "entities.py")
HELD_OUT_FILES_ONE_IN = 20
MAX_REPLY_CHARS = 1400  # about 450 tokens: request and reply fit one row

SYSTEM_PROMPTS = ("You are a helpful assistant.", "You write Python functions.")
REQUESTS = (
    "Write a Python function `{name}`. {summary}.",
    "Write `{name}({arguments})`: {summary}.",
    "{summary}. Call the function `{name}`.",
)

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Document:
    """Text up to where the loss begins, and the text that is learnt."""

    given: str
    learnt: str

    @property
    def text(self) -> str:
        return self.given + self.learnt


@dataclass(frozen=True, slots=True)
class Library:
    """The standard library as documents: whole modules, and chats made of documented functions."""

    sources: list[Document]
    chats: list[Document]

    @property
    def num_bytes(self) -> int:
        return sum(len(document.text.encode()) for document in self.sources + self.chats)


# -- library -> documents --------------------------------------------------------------------------------


def source_files(root: Path) -> Iterator[Path]:
    """Library modules below root in a fixed order, relative to it."""
    for folder, dirs, files in os.walk(root):
        dirs[:] = sorted(d for d in dirs if d not in EXCLUDED_DIRS and not d.startswith("config-"))
        for file in sorted(files):
            if file.endswith(".py") and not file.startswith(EXCLUDED_FILE_PREFIXES):
                yield (Path(folder) / file).relative_to(root)


def render_chat(messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    """Messages -> the text CHAT_TEMPLATE makes of them."""
    turns = "".join(f"<|{m['role']}|>{m['content']}<|end|>\n" for m in messages)
    return turns + ("<|assistant|>" if add_generation_prompt else "")


def chat_prompt(request: str, system: str = "") -> str:
    """One user's message, up to where the reply begins."""
    messages = [{"role": "system", "content": system}] if system else []
    return render_chat([*messages, {"role": "user", "content": request}], add_generation_prompt=True)


def reply_text(reply: str) -> str:
    """A reply as it stands behind `chat_prompt`, the end of its turn included."""
    return f"{reply}<|end|>\n"


def function_text(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Source of one function, moved to the left margin.

    textwrap.dedent would leave a method in place when one of its strings reaches the margin.
    """
    body = lines[node.lineno - 1 : node.end_lineno]
    indent = node.col_offset
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in body)


def chats_of(source: str, split: str) -> Iterator[Document]:
    """Every documented function of a module as a request and its source; one in four as an edit of it."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        summary = (ast.get_docstring(node) or "").partition("\n")[0].strip().rstrip(".")
        reply = function_text(lines, node)
        if not summary or len(reply) > MAX_REPLY_CHARS:
            continue
        choice = stable_hash(reply)
        request = REQUESTS[choice % len(REQUESTS)].format(
            name=node.name, summary=summary, arguments=ast.unparse(node.args)
        )
        # Chats with a system prompt are the minority, as in use.
        system = SYSTEM_PROMPTS[choice // 32 % len(SYSTEM_PROMPTS)] if choice // 8 % 4 == 0 else ""
        yield Document(chat_prompt(request, system), reply_text(reply))
        if split == "train" and len(reply) < MAX_REPLY_CHARS // 2:
            item = rename_item(Draw(random.Random(choice), "train"), reply)
            yield Document(chat_prompt(item.request), reply_text(item.reply))


def read_library(root: Path) -> tuple[Library, Library]:
    """Library below root -> (train, held_out), split by file, so that no function is in both."""
    parts = {"train": Library([], []), "held_out": Library([], [])}
    for path in source_files(root):
        split = "held_out" if stable_hash(path.as_posix()) % HELD_OUT_FILES_ONE_IN == 0 else "train"
        try:
            source = (root / path).read_text(encoding="utf-8")
            chats = list(chats_of(source, split))
        except (UnicodeDecodeError, SyntaxError) as error:
            print(f"skipped {path}: {error}")
            continue
        parts[split].sources.append(Document("", source))
        parts[split].chats.extend(chats)
    return parts["train"], parts["held_out"]


def item_document(item: Item) -> Document:
    """A generated item as a chat; only its reply is learnt."""
    return Document(chat_prompt(item.request), reply_text(item.reply))


def task_documents(domains: Sequence[str], num_each: int, seed: int) -> list[Document]:
    """`num_each` training items of each domain, and as many edits."""
    return [
        item_document(item)
        for domain in (*domains, EDITS)
        for item in itertools.islice(items(domain, "train", seed), num_each)
    ]


# -- documents -> tokenizer ------------------------------------------------------------------------------


def train_tokenizer(documents: Sequence[Document]) -> Tokenizer:
    """Byte-level BPE; any text survives the round trip. Digits stand alone, so that places can be added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus is too small for the vocabulary"
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json without white space (size) and the settings transformers reads beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def check_tokenizer(folder: Path) -> None:
    """Both loaders give the same ids, any text comes back, and template and twin agree."""
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(folder)
    many = "".join(chr(i) for i in range(0, 0x11000, 131) if not 0xD800 <= i < 0xE000)  # no lone surrogates
    texts = ["def f(x):\n\treturn  x\r\n", "", " ", "12 345", "naïve “日本語” 🎉\u200d\ufeff\x00", many]
    for text in texts:
        ids = plain.encode(text).ids
        assert loaded(text)["input_ids"] == ids, f"loaders disagree on {text[:20]!r}"
        assert plain.decode(ids) == loaded.decode(ids) == text, f"round trip loses {text[:20]!r}"
    messages = [{"role": r, "content": f" {r} says\n"} for r in ("system", "user", "assistant", "user")]
    for prompt in (False, True):
        rendered = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert rendered == render_chat(messages, add_generation_prompt=prompt), (
            "template and render_chat disagree"
        )


# -- documents -> rows -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """int64 [rows, length] each: ids, and the next ids, NO_LOSS where nothing is learnt."""

    inputs: Tensor
    labels: Tensor

    @property
    def num_tokens(self) -> int:
        return self.inputs.numel()


def pack(tokenizer: Tokenizer, documents: Sequence[Document], length: int, seed: int) -> Rows:
    """Documents in an order given by seed -> rows without padding; sources stand between <|bos|> and <|eos|>.

    Chats get no <|bos|>, because the template has none and a prompt should look as it did in training.
    """
    order = random.Random(seed).sample(documents, len(documents))
    ids: list[int] = []
    labels: list[int] = []
    given = tokenizer.encode_batch([document.given for document in order])
    learnt = tokenizer.encode_batch([document.learnt for document in order])
    for document, before, after in zip(order, given, learnt, strict=True):
        head = before.ids if document.given else [BOS_ID]
        ids += [*head, *after.ids, EOS_ID]
        labels += [*([NO_LOSS] * len(head)), *after.ids, EOS_ID]
    num_rows = (len(ids) - 1) // length
    end = num_rows * length
    return Rows(
        torch.tensor(ids[:end]).view(num_rows, length),
        torch.tensor(labels[1 : end + 1]).view(num_rows, length),
    )


def drill(num_rows: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of random tokens that come again: what can be learnt is to copy, and nothing else."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        periods = torch.randint(length // 12, length // 2, (num_rows, 1), generator=generator)
        tokens = torch.randint(END_ID + 1, VOCAB_SIZE, (num_rows, length), generator=generator)
        ids = tokens.gather(1, torch.arange(length + 1)[None] % periods)
        is_new = torch.arange(1, length + 1)[None] < periods
        yield ids[:, :-1], ids[:, 1:].masked_fill(is_new, NO_LOSS)


def batches(rows: Rows, num_rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches; epochs differ in order, never in content. Every fourth has rows of twice the length."""
    generator = torch.Generator().manual_seed(seed)
    length, step = rows.inputs.shape[1], 0
    while True:
        for chosen in torch.split(torch.randperm(len(rows.inputs), generator=generator), num_rows):
            if step % 4 == 3 and len(chosen) == num_rows:
                # Neighbours in the corpus follow each other, so two rows in a row are one of twice the length.
                first = chosen[: num_rows // 2] // 2 * 2
                chosen = torch.stack([first, first + 1], 1).flatten() % len(rows.inputs)
                yield rows.inputs[chosen].view(-1, 2 * length), rows.labels[chosen].view(-1, 2 * length)
            else:
                yield rows.inputs[chosen], rows.labels[chosen]
            step += 1
