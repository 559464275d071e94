"""Scenario, seed and index -> the same requests every time.

Three kinds of text decide what speculation is worth: text of the kind a draft was trained on, text that repeats its
own prompt, and text nobody can foresee. The tables below are data: a model pair that knows more domains gets more
entries in `DOMAINS`, nothing else changes.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from paceline.cluster.types import Request, Sampling


@dataclass(frozen=True, slots=True)
class Domain:
    """Questions as a user asks them, and beginnings of documents to go on with."""

    questions: tuple[str, ...]
    beginnings: tuple[str, ...]


_PYTHON = Domain(
    questions=(
        "Write a Python function `read_file`. Return the contents of a file.",
        "Write `parse_header(line)`: Split a header line into its name and its value.",
        "Return the number of items in a queue. Call the function `qsize`.",
        "Write a Python function `normalize_path`. Collapse redundant separators and up-level references.",
        "Write `copy_tree(source, target)`: Copy a directory with everything below it.",
        "Decode a string of hexadecimal digits to bytes. Call the function `from_hex`.",
        "Write a Python function `format_date`. Format a time tuple as text.",
        "Write `find_module(name, path)`: Search the path for a module and return its loader.",
        "Compare two sequences and return the differences. Call the function `compare`.",
        "Write a Python function `set_timeout`. Set the time after which a socket operation fails.",
        "Write `quote(text)`: Return a shell-escaped version of the string.",
        "Close the connection and release its resources. Call the function `close`.",
        "Write a Python function `get_field`. Return the value of a field, or a default.",
        "Write `add_option(name, default)`: Add an option to the parser.",
        "Return an iterator over the lines of a message. Call the function `iter_lines`.",
        "Write a Python function `mean`. Return the arithmetic mean of the data.",
    ),
    beginnings=(
        "def read_file(path):\n",
        'class Queue:\n    """A queue with a limit on its size."""\n\n    def __init__(self, maxsize=0):\n',
        "import os\nimport sys\n\n\ndef main(argv=None):\n",
        "def test_encode(self):\n    for name, value in",
        'def _parse_line(line, sep=":"):\n    """Return name and value."""\n',
        "    def __repr__(self):\n        return",
        "class HTTPHandler(BaseHandler):\n\n    def http_open(self, req):\n",
        "try:\n    import threading\nexcept ImportError:\n",
        "def walk(top, topdown=True, onerror=None):\n",
        "    def write(self, data):\n        if self.closed:\n            raise ValueError(",
        "@property\ndef name(self):\n",
        "def _format_args(args, kwargs):\n    result = []\n    for",
        "class Error(Exception):\n    pass\n\n\nclass",
        "with open(filename, 'rb') as file:\n    data =",
        "def insert(self, index, item):\n    if index < 0:\n",
        "async def wait_for(self, timeout):\n    loop =",
    ),
)

DOMAINS: dict[str, Domain] = {"python": _PYTHON}

_NOUNS = (
    "record",
    "packet",
    "header",
    "window",
    "counter",
    "buffer",
    "token",
    "request",
    "column",
    "handler",
)
_VERBS = ("read", "write", "parse", "format", "update", "remove", "insert", "check", "find", "merge")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row of the table. Even requests are greedy, odd ones are drawn at `temperature`."""

    name: str
    text: str
    temperature: float
    prompt: Callable[[Any, random.Random, int], list[int]]
    """(tokenizer, random numbers of this request, its index) -> prompt token ids."""


def domains_prompt(tokenizer: Any, rng: random.Random, index: int) -> list[int]:
    """Domains in turn; questions and beginnings in turn."""
    names = sorted(DOMAINS)
    domain = DOMAINS[names[index % len(names)]]
    if (index // len(names)) // 2 % 2:  # not with every other request: those differ in temperature already
        return encode(tokenizer, rng.choice(domain.beginnings))
    return chat(tokenizer, rng.choice(domain.questions))


def copy_prompt(tokenizer: Any, rng: random.Random, index: int) -> list[int]:
    """A user's code, the wish to have it back, and the reply's first line."""
    code = source_code(rng, num_methods=3)
    request = f"Rename nothing and repeat this code:\n\n{code}"
    return chat(tokenizer, request) + encode(tokenizer, code.partition("\n\n")[0])


def random_prompt(tokenizer: Any, rng: random.Random, index: int) -> list[int]:
    """Token ids without meaning, special ones left out."""
    special = set(tokenizer.all_special_ids)
    usable = [token for token in range(len(tokenizer)) if token not in special]
    return rng.choices(usable, k=64)


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("domains", "questions and beginnings of the draft's domains", 0.8, domains_prompt),
        Scenario("copy", "repeat a long code text of the prompt", 0.8, copy_prompt),
        Scenario("random", "random token ids, drawn at temperature 1.5 every other time", 1.5, random_prompt),
    )
}


class Workload:
    """Requests of one model pair."""

    def __init__(self, folder: Path, *, seed: int = 0) -> None:
        """Takes the tokenizer of a model folder."""
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._seed = seed

    def requests(
        self, scenario: str, first: int, num: int, *, max_tokens: int, greedy: bool = False
    ) -> list[Request]:
        """Requests first..first + num - 1 of a scenario. They ignore stop tokens, so that work is comparable."""
        return [self._request(SCENARIOS[scenario], first + i, max_tokens, greedy) for i in range(num)]

    def _request(self, scenario: Scenario, index: int, max_tokens: int, greedy: bool) -> Request:
        rng = random.Random(f"{self._seed}/{scenario.name}/{index}")
        prompt = scenario.prompt(self.tokenizer, rng, index)
        temperature = 0.0 if greedy or index % 2 == 0 else scenario.temperature
        sampling = Sampling(zlib.crc32(f"{self._seed}/{index}".encode()), temperature=temperature)
        return Request(f"{scenario.name}-{index}", tuple(prompt), sampling, max_tokens)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, nothing added."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def chat(tokenizer: Any, content: str) -> list[int]:
    """Token ids of one user's message, up to where the reply begins."""
    if tokenizer.chat_template is None:
        return encode(tokenizer, f"{content}\n\n")
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return encode(tokenizer, text)


def source_code(rng: random.Random, *, num_methods: int) -> str:
    """A class nobody has seen, of parts that everybody has."""
    noun = rng.choice(_NOUNS)
    lines = [
        f"class {noun.title()}{rng.randrange(10, 99)}:",
        f'    """A {noun} with {num_methods} methods."""',
    ]
    for verb in rng.sample(_VERBS, num_methods):
        value = rng.choice(_NOUNS)
        lines += [
            "",
            f"    def {verb}_{value}(self, {value}, limit={rng.randrange(2, 64)}):",
            f'        """{verb.title()} the {value} of this {noun}."""',
            f"        if {value} is None or len({value}) > limit:",
            f'            raise ValueError("{value} too long")',
            f"        self.{value} = {value}",
            f"        return self.{rng.choice(_VERBS)}({value}, limit)",
        ]
    return "\n".join(lines) + "\n"
