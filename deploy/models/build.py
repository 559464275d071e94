"""Python's standard library -> tokenizer, target and draft as safetensors.

Makes the pair that ships with Paceline, so that a laptop without network can serve with speculation.
Everything comes from the running interpreter: its library is the corpus, nothing is downloaded. Knows nothing
about serving.

    python -m paceline.deploy.models.build --out deploy/models/tiny
    python deploy/models/build.py --out DIR --minutes 0.5        # a dry run

The order of the data follows --seed. The weights do not repeat bit for bit: the learning rate follows the
clock, so a slower machine takes fewer steps in the same minutes.
"""

import argparse
import ast
import hashlib
import json
import math
import os
import platform
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

# Legend of shape suffixes: B sequences, L positions, V vocabulary.

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD_ID, BOS_ID, EOS_ID, END_ID = 0, 1, 2, 6
VOCAB_SIZE = 2048

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
HELD_OUT_ONE_IN = 20
MAX_REPLY_CHARS = 1400  # about 450 tokens: request and reply fit one row of the longest length trained

SYSTEM_PROMPTS = ("You are a helpful assistant.", "You write Python functions.")
REQUESTS = (
    "Write a Python function `{name}`. {summary}.",
    "Write `{name}({arguments})`: {summary}.",
    "{summary}. Call the function `{name}`.",
)

SHORT_LEN = 256
MAX_LEN = 512  # every fourth step trains this long, so that positions up to here work
ROWS_PER_STEP = 4  # rows of MAX_LEN; a budget of minutes rewards small steps, fewer rows keep the cores idle
INIT_STD = 0.06  # 50 s of training from the usual 0.02 ended 0.76 nats higher: width 128 wants larger weights
DRAFT_SHARE = 0.38  # of the time budget; the draft is smaller but pays for the target's forward pass too
KL_WEIGHT = 0.8  # the rest is cross-entropy on the text, which steadies the start
DRAFT_LEN = 4  # K of the simulated speculation in the card

Message = dict[str, str]
Batches = Iterator[tuple[Tensor, Tensor]]
LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents as text; chats are rendered with their role tokens already in place."""

    sources: list[str]
    chats: list[str]

    @property
    def num_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.sources + self.chats)


@dataclass(frozen=True, slots=True)
class Training:
    """What one run of `train` cost and reached."""

    num_params: int
    num_steps: int
    num_tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Target and draft on the same held-out tokens."""

    num_tokens: int
    target_bits_per_byte: float
    draft_bits_per_byte: float
    target_perplexity: float
    draft_perplexity: float
    greedy_agreement: float
    overlap: (
        float  # mean of sum(min(p, q)): the chance that sampling at temperature 1 accepts a drafted token
    )


@dataclass(frozen=True, slots=True)
class OwnText:
    """Target and draft on what the target writes itself, which is what speculation meets."""

    greedy_agreement: float
    tokens_per_step: float


# Corpus: interpreter's library -> documents


def source_files(root: Path) -> Iterator[Path]:
    """Library modules below root in a fixed order, relative to it."""
    for folder, dirs, files in os.walk(root):
        dirs[:] = sorted(d for d in dirs if d not in EXCLUDED_DIRS and not d.startswith("config-"))
        for file in sorted(files):
            if file.endswith(".py") and not file.startswith(EXCLUDED_FILE_PREFIXES):
                yield (Path(folder) / file).relative_to(root)


def stable_hash(text: str) -> int:
    """Same number in every process, unlike hash()."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def render_chat(messages: list[Message], *, add_generation_prompt: bool = False) -> str:
    """Messages -> the text CHAT_TEMPLATE makes of them."""
    turns = "".join(f"<|{m['role']}|>{m['content']}<|end|>\n" for m in messages)
    return turns + ("<|assistant|>" if add_generation_prompt else "")


def function_text(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Source of one function, moved to the left margin.

    textwrap.dedent would leave a method in place when one of its strings reaches the margin.
    """
    body = lines[node.lineno - 1 : node.end_lineno]
    indent = node.col_offset
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in body)


def chats_of(source: str) -> Iterator[str]:
    """Every documented function of a module as a rendered request and reply."""
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
        messages = [{"role": "user", "content": request}, {"role": "assistant", "content": reply}]
        if choice // 8 % 4 == 0:  # chats with a system prompt are the minority, as in use
            messages.insert(
                0, {"role": "system", "content": SYSTEM_PROMPTS[choice // 32 % len(SYSTEM_PROMPTS)]}
            )
        yield render_chat(messages)


def collect(root: Path) -> tuple[Corpus, Corpus]:
    """Library below root -> (train, held_out), split by file, so that no function is in both."""
    train, held_out = Corpus([], []), Corpus([], [])
    for path in source_files(root):
        try:
            source = (root / path).read_text(encoding="utf-8")
            chats = list(chats_of(source))
        except (UnicodeDecodeError, SyntaxError) as error:
            print(f"skipped {path}: {error}")
            continue
        part = held_out if stable_hash(path.as_posix()) % HELD_OUT_ONE_IN == 0 else train
        part.sources.append(source)
        part.chats.extend(chats)
    return train, held_out


# Tokenizer: documents -> byte-level BPE


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """Byte-level BPE over the documents; any text survives the round trip, for every byte is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.sources + corpus.chats, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus is too small for the vocabulary"
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json without white space (size) and the settings transformers reads beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
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
    texts = ["def f(x):\n\treturn  x\r\n", "", " ", "naïve “日本語” 🎉\u200d\ufeff\x00", many]
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


# Data: documents -> batches


def pack(tokenizer: Tokenizer, documents: list[str], seed: int) -> Tensor:
    """Documents -> one stream of ids in an order given by seed; each document between <|bos|> and <|eos|>.

    Chats get no <|bos|>, because the template has none and a prompt should look as it did in training.
    """
    order = random.Random(seed).sample(documents, len(documents))
    stream: list[int] = []
    for text, encoding in zip(order, tokenizer.encode_batch(order), strict=True):
        is_chat = text.startswith(("<|system|>", "<|user|>"))
        stream += [*([] if is_chat else [BOS_ID]), *encoding.ids, EOS_ID]
    return torch.tensor(stream, dtype=torch.int64)


def rows_of(stream: Tensor) -> tuple[Tensor, Tensor]:
    """Stream -> inputs [rows, MAX_LEN] and labels, the same ids one position later."""
    num_rows = (len(stream) - 1) // MAX_LEN
    end = num_rows * MAX_LEN
    return stream[:end].view(num_rows, MAX_LEN), stream[1 : end + 1].view(num_rows, MAX_LEN)


def batches(stream: Tensor, seed: int) -> Batches:
    """Endless batches of the same number of tokens; epochs differ in order, never in content."""
    inputs, labels = rows_of(stream)
    generator = torch.Generator().manual_seed(seed)
    step = 0
    while True:
        for chosen in torch.split(torch.randperm(len(inputs), generator=generator), ROWS_PER_STEP):
            length = MAX_LEN if step % 4 == 3 else SHORT_LEN
            yield inputs[chosen].view(-1, length), labels[chosen].view(-1, length)
            step += 1


# Models: batches -> weights


def llama(*, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> LlamaForCausalLM:
    """A fresh float32 Llama with tied embeddings over our vocabulary."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        intermediate_size=intermediate,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        initializer_range=INIT_STD,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # what joins the residual stream starts smaller, so that depth does not widen it
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_((2 * layers) ** -0.5)
    return model


def logits_of(model: LlamaForCausalLM, inputs_BL: Tensor) -> Tensor:
    """Logits [B, L, V] of one forward pass that keeps no cache."""
    logits: Tensor = model(input_ids=inputs_BL, use_cache=False).logits
    return logits


def text_loss(model: LlamaForCausalLM) -> LossFunction:
    """Cross-entropy with the text."""

    def loss(inputs_BL: Tensor, labels_BL: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(model, inputs_BL).flatten(0, 1), labels_BL.flatten())

    return loss


def distill_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> LossFunction:
    """Forward KL(target || draft) mixed with cross-entropy.

    Sampling accepts a drafted token with chance sum(min(p, q)), and greedy decoding when the two argmaxes
    agree; both follow from q near p, whatever the text says.
    """

    def loss(inputs_BL: Tensor, labels_BL: Tensor) -> Tensor:
        with torch.no_grad():
            target_logp = logits_of(target, inputs_BL).log_softmax(-1).flatten(0, 1)
        draft_logp = logits_of(draft, inputs_BL).log_softmax(-1).flatten(0, 1)
        kl = F.kl_div(draft_logp, target_logp, log_target=True, reduction="batchmean")
        return KL_WEIGHT * kl + (1 - KL_WEIGHT) * F.nll_loss(draft_logp, labels_BL.flatten())

    return loss


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up over the first 4 % of the time, then a cosine down to 2 % of the peak."""
    warm = min(progress / 0.04, 1.0)
    return peak * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * min(progress, 1.0))) / 2)


def adamw(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def train(
    name: str, model: LlamaForCausalLM, loss_of: LossFunction, data: Batches, *, seconds: float, peak: float
) -> Training:
    """Train model in place until the time is over; a line of progress every ten seconds."""
    optimizer = adamw(model)
    begin = said = time.monotonic()
    elapsed, loss, num_steps, num_tokens = 0.0, math.nan, 0, 0
    while elapsed < seconds:
        inputs, labels = next(data)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(peak, elapsed / seconds)
        step_loss = loss_of(inputs, labels)
        torch.autograd.backward(step_loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = step_loss.item()
        loss = value if math.isnan(loss) else 0.98 * loss + 0.02 * value  # smoothed over about 50 steps
        num_steps, num_tokens = num_steps + 1, num_tokens + inputs.numel()
        now = time.monotonic()
        elapsed = now - begin
        if now - said >= 10 or elapsed >= seconds:
            said = now
            speed, left = num_tokens / elapsed, max(seconds - elapsed, 0.0)
            print(
                f"{name}  step {num_steps}  loss {loss:.3f}  {speed:,.0f} tok/s  {left:.0f} s left",
                flush=True,
            )
    return Training(model.num_parameters(), num_steps, num_tokens, elapsed, loss)


def write_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> LlamaForCausalLM:
    """Write weights in bfloat16 with settings and tokenizer; return what a reader gets back, in float32."""
    write_tokenizer(tokenizer, folder)
    model.generation_config = GenerationConfig(
        pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=[EOS_ID, END_ID]
    )
    model.to(dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for its owner alone; these ship
    saved: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return saved.eval()


# Measurements: saved pair + held-out text -> facts


@torch.no_grad()
def compare(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: Tokenizer, stream: Tensor
) -> Comparison:
    """Both models over every whole row of a held-out stream."""
    # A byte-level token has one character per byte; the special tokens stand for none.
    lengths = {i: 0 if token in SPECIAL_TOKENS else len(token) for token, i in tokenizer.get_vocab().items()}
    bytes_V = torch.tensor([lengths[i] for i in range(VOCAB_SIZE)])
    inputs, labels = rows_of(stream)
    target_nats, draft_nats, agreed, overlap = 0.0, 0.0, 0, 0.0
    for inputs_BL, labels_BL in zip(torch.split(inputs, 8), torch.split(labels, 8), strict=True):
        target_logp = logits_of(target, inputs_BL).log_softmax(-1).flatten(0, 1)
        draft_logp = logits_of(draft, inputs_BL).log_softmax(-1).flatten(0, 1)
        target_nats += F.nll_loss(target_logp, labels_BL.flatten(), reduction="sum").item()
        draft_nats += F.nll_loss(draft_logp, labels_BL.flatten(), reduction="sum").item()
        agreed += int((target_logp.argmax(-1) == draft_logp.argmax(-1)).sum())
        overlap += torch.minimum(target_logp, draft_logp).exp().sum().item()
    num_tokens, num_bits = labels.numel(), math.log(2) * int(bytes_V[labels].sum())
    return Comparison(
        num_tokens=num_tokens,
        target_bits_per_byte=target_nats / num_bits,
        draft_bits_per_byte=draft_nats / num_bits,
        target_perplexity=math.exp(target_nats / num_tokens),
        draft_perplexity=math.exp(draft_nats / num_tokens),
        greedy_agreement=agreed / num_tokens,
        overlap=overlap / num_tokens,
    )


@torch.no_grad()
def compare_on_own_text(target: LlamaForCausalLM, draft: LlamaForCausalLM, stream: Tensor) -> OwnText:
    """Let the target continue 32 held-out prompts greedily and walk the draft along what it wrote.

    Greedy speculation accepts a drafted token when it is the target's own, so one pass over finished text
    tells every verdict: a step yields the agreeing run, K at most, and one token more from the target.
    """
    prompt_len = 64
    prompts = rows_of(stream)[0][:32, :prompt_len]
    ids: Tensor = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=192, do_sample=False
    )
    drafted = logits_of(draft, ids)[:, prompt_len - 1 : -1].argmax(-1)
    num_agreed, num_tokens, num_steps = 0, 0, 0
    for row_ids, row_draft in zip(ids[:, prompt_len:], drafted, strict=True):
        verdicts = (row_draft == row_ids)[row_ids != PAD_ID].tolist()
        num_agreed, num_tokens = num_agreed + sum(verdicts), num_tokens + len(verdicts)
        num_steps += count_steps(verdicts)
    return OwnText(num_agreed / num_tokens, num_tokens / num_steps)


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


@torch.no_grad()
def continue_greedily(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, num_tokens: int = 96
) -> str:
    """What the model writes after prompt, special tokens shown."""
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    out: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    text: str = tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=False)
    return text


# Card: facts -> CARD.md


def corpus_lines(train_part: Corpus, held_out: Corpus, num_tokens: int) -> list[str]:
    """The card's section on data."""
    return [
        "## Data",
        "",
        f"The standard library of CPython {platform.python_version()} (PSF License), without tests, tables",
        "and IDLE: whole modules, and chats made from documented functions (docstring's first line as",
        "request, source as reply). The split is by file.",
        "",
        "| part | modules | chats | bytes |",
        "| --- | ---: | ---: | ---: |",
        f"| train | {len(train_part.sources)} | {len(train_part.chats)} | {train_part.num_bytes:,} |",
        f"| held out | {len(held_out.sources)} | {len(held_out.chats)} | {held_out.num_bytes:,} |",
        "",
        f"{num_tokens:,} training tokens, byte-level BPE of {VOCAB_SIZE}.",
        "",
    ]


def training_lines(target: Training, draft: Training, threads: int, num_bytes: int) -> list[str]:
    """The card's section on cost."""
    rows = [
        f"| {name} | {t.num_params:,} | {t.num_steps:,} | {t.num_tokens:,} "
        f"| {t.seconds:.0f} | {t.num_tokens / t.seconds:,.0f} |"
        for name, t in (("target", target), ("draft", draft))
    ]
    return [
        "## Training",
        "",
        f"float32 on {threads} CPU threads, torch {torch.__version__}, transformers",
        f"{transformers.__version__}; AdamW, sequences of {SHORT_LEN} and {MAX_LEN} tokens (positions beyond",
        f"{MAX_LEN} are untrained). The draft learns from the target: {KL_WEIGHT:g} forward KL +",
        f"{1 - KL_WEIGHT:.2g} cross-entropy. Both folders together, in bfloat16: {num_bytes:,} bytes.",
        "",
        "| model | parameters | steps | tokens seen | seconds | tokens/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *rows,
        "",
    ]


def quality_lines(comparisons: dict[str, Comparison], own: OwnText) -> list[str]:
    """The card's section on quality, measured on the saved bfloat16 weights."""
    rows = [
        f"| {name} | {c.num_tokens:,} | {c.target_bits_per_byte:.3f} | {c.draft_bits_per_byte:.3f} "
        f"| {c.target_perplexity:.2f} | {c.draft_perplexity:.2f} "
        f"| {c.greedy_agreement:.1%} | {c.overlap:.1%} |"
        for name, c in comparisons.items()
    ]
    return [
        "## Quality on held-out files",
        "",
        "Perplexity is per token. Agreement: the draft's argmax is the target's. Overlap: sum of min(p, q),",
        "the chance of acceptance at temperature 1.",
        "",
        "| text | tokens | target bits/byte | draft | target perplexity | draft | agreement | overlap |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *rows,
        "",
        (
            "On the target's own greedy continuations of held-out sources they agree on "
            f"{own.greedy_agreement:.1%} of tokens:"
        ),
        f"{own.tokens_per_step:.2f} tokens per target step with {DRAFT_LEN} drafted.",
        "",
    ]


def sample_lines(samples: dict[str, str]) -> list[str]:
    """The card's section of greedy texts; indented, so that no fence in a text can end the block."""
    lines = ["## Greedy samples of the target", ""]
    for prompt, text in samples.items():
        lines += [f"After ``{prompt!r}``:", "", *(f"    {line}".rstrip() for line in text.splitlines()), ""]
    return lines


def write_card(out: Path, sections: list[str]) -> None:
    """Write and show CARD.md."""
    head = [
        "# The bundled pair",
        "",
        "A toy: it writes text that looks like Python, so that serving and speculation can be tried without",
        "network or GPU. Written by `paceline.deploy.models.build`; every number is measured by that run.",
        "",
    ]
    text = "\n".join(head + sections).rstrip() + "\n"
    (out / "CARD.md").write_text(text, encoding="utf-8")
    print(text)


def measured_lines(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: Tokenizer, held_out: Corpus, seed: int
) -> list[str]:
    """Saved pair + held-out files -> the card's sections on quality and samples."""
    streams = {
        "sources": pack(tokenizer, held_out.sources, seed),
        "chats": pack(tokenizer, held_out.chats, seed),
    }
    comparisons = {name: compare(target, draft, tokenizer, stream) for name, stream in streams.items()}
    own = compare_on_own_text(target, draft, streams["sources"])
    content = "Write a Python function `read_file`. Return the contents of a file."
    chat = render_chat([{"role": "user", "content": content}], add_generation_prompt=True)
    samples = {p: continue_greedily(target, tokenizer, p) for p in ("def read_file(path):\n", chat)}
    return quality_lines(comparisons, own) + sample_lines(samples)


def build(out: Path, *, minutes: float, threads: int, seed: int) -> None:
    """Corpus -> tokenizer -> target -> draft -> card."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    train_part, held_out = collect(Path(sysconfig.get_path("stdlib")))
    tokenizer = train_tokenizer(train_part)
    stream = pack(tokenizer, train_part.sources + train_part.chats, seed)
    print(f"{len(stream):,} training tokens, {train_part.num_bytes / len(stream):.2f} bytes each", flush=True)

    seconds = minutes * 60
    fresh = llama(hidden=128, layers=5, heads=4, kv_heads=2, intermediate=352)
    target_cost = train(
        "target",
        fresh,
        text_loss(fresh),
        batches(stream, seed),
        seconds=seconds * (1 - DRAFT_SHARE),
        peak=4e-3,
    )
    target = write_model(fresh, tokenizer, out / "target")
    check_tokenizer(out / "target")
    fresh = llama(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=192)
    draft_cost = train(
        "draft",
        fresh,
        distill_loss(fresh, target),
        batches(stream, seed + 1),
        seconds=seconds * DRAFT_SHARE,
        peak=6e-3,
    )
    draft = write_model(fresh, tokenizer, out / "draft")

    num_bytes = sum(f.stat().st_size for name in ("target", "draft") for f in (out / name).iterdir())
    write_card(
        out,
        corpus_lines(train_part, held_out, len(stream))
        + training_lines(target_cost, draft_cost, threads, num_bytes)
        + measured_lines(target, draft, tokenizer, held_out, seed),
    )


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(
        description="Train the bundled target and draft on Python's standard library."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for target/, draft/ and CARD.md")
    parser.add_argument("--minutes", type=float, default=10.0, help="training time for both models together")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0, help="order of the data and initial weights")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    build(args.out, minutes=args.minutes, threads=args.threads, seed=args.seed)


if __name__ == "__main__":
    main()
