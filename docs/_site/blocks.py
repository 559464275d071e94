"""Markdown -> its fenced blocks, each with what must be so before its commands can run, and the commands themselves.

The info string of a fence says it. Every block of commands has exactly one of these:

    ```console run              runs in CI, in a folder and a PACELINE_HOME of the page's own, in order
    ```console run=cluster      the same, against the cluster that all pages share
    ```console run=start, run=stop      starts and ends that cluster
    ```console needs=gpu        cannot run there, and the page says what is missing: one or more of NEEDS
    ```python run=cluster       likewise
    ```yaml config              is a configuration, and is checked as one

In `console` blocks commands begin with `$ `, and their further lines with `> `; other lines are what they print, `...`
standing for anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

NEEDS = {
    "gpu": "a GPU",
    "cloud": "an account with a cloud",
    "kubernetes": "a Kubernetes cluster",
    "network": "the Internet",
    "package": "a package of its own",
    "hosts": "several hosts",
    "minutes": "minutes of a quiet machine",
}
RUNS = ("", "cluster", "start", "stop")
LANGUAGES = ("console", "python", "yaml", "json", "text", "promql")
"""Commands stand in the first two; the others hold none."""

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks) *$",
    re.MULTILINE | re.DOTALL,
)


class BlockError(ValueError):
    """A block that says nothing of what it needs, or what is not known."""


@dataclass(frozen=True)
class Command:
    """What is typed, and what is shown of what it prints."""

    text: str
    output: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    """Of the fence, from 1."""
    language: str
    marks: tuple[str, ...]
    body: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def run(self) -> str | None:
        """One of RUNS; None if it does not run."""
        return next((m.partition("=")[2] for m in self.marks if m.partition("=")[0] == "run"), None)

    @property
    def needs(self) -> tuple[str, ...]:
        found = next((m.partition("=")[2] for m in self.marks if m.partition("=")[0] == "needs"), "")
        return tuple(found.split(",")) if found else ()

    @property
    def commands(self) -> tuple[Command, ...]:
        """Of a console block.

        Raises:
            BlockError: it begins with something else.
        """
        found: list[Command] = []
        for line in self.body.splitlines():
            if line.startswith("$ "):
                found.append(Command(line[2:], ()))
            elif not found:
                raise BlockError(f"{self.where}: a block of commands begins with `$ `")
            elif (line.startswith("> ") or line == ">") and not found[-1].output:
                found[-1] = Command(f"{found[-1].text}\n{line[2:]}", ())
            else:
                found[-1] = Command(found[-1].text, (*found[-1].output, line))
        return tuple(found)

    def check(self) -> None:
        """
        Raises:
            BlockError: it says nothing of what it needs, or what is not known.
        """
        if self.language not in LANGUAGES:
            raise BlockError(f"{self.where}: {self.language!r}: expected one of {', '.join(LANGUAGES)}")
        kinds = [mark.partition("=")[0] for mark in self.marks]
        if self.language in ("console", "python"):
            if sorted(kinds) not in (["run"], ["needs"]):
                raise BlockError(
                    f"{self.where}: expected `run`, `run=cluster` or `needs=...` behind {self.language}"
                )
            if self.run is not None and self.run not in RUNS:
                raise BlockError(f"{self.where}: run={self.run}: expected one of {', '.join(RUNS[1:])}")
            if unknown := [need for need in self.needs if need not in NEEDS]:
                raise BlockError(f"{self.where}: needs={unknown[0]}: expected some of {', '.join(NEEDS)}")
            if self.language == "console":
                assert self.commands is not None
        elif kinds not in ([], ["config"]) or (kinds and self.language != "yaml"):
            raise BlockError(
                f"{self.where}: {' '.join(self.marks)}: expected nothing, or `config` behind yaml"
            )
        elif found := re.search(
            r"^\s*(\$ |paceline |make |ray |helm |kubectl |docker |curl |pip |python )",
            self.body,
            re.MULTILINE,
        ):
            raise BlockError(
                f"{self.where}: {found[1].strip()!r} is a command: it belongs in a console block"
            )


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    for found in _FENCE.finditer(text):
        language, *marks = found["info"].split() or [""]
        indent = len(found["indent"])
        body = "".join(
            line[indent:] if line.strip() else "\n" for line in found["body"].splitlines(keepends=True)
        )
        yield Block(page, text.count("\n", 0, found.start()) + 1, language, tuple(marks), body)


def for_readers(page: str, text: str) -> str:
    """The page with each mark as readers see it: a title where something is needed, nothing where it runs anywhere."""

    def fence(found: re.Match[str]) -> str:
        language, *marks = found["info"].split() or [""]
        needs = Block(page, 0, language, tuple(marks), "").needs
        title = f' title="Needs {" and ".join(NEEDS[need] for need in needs)}"' if needs else ""
        return f"{found['indent']}{found['ticks']}{language}{title}\n{found['body']}{found['indent']}{found['ticks']}"

    return _FENCE.sub(fence, text)
