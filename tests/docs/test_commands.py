"""Commands that stand in the pages -> run as they stand: in a folder of the page's own, or against one cluster for all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docs_site import blocks

from paceline.deploy import local

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCKS = [
    block
    for path in sorted(DOCS.rglob("*.md"))
    for block in blocks.blocks_of(str(path.relative_to(DOCS)), path.read_text())
]
ALONE = sorted({b.page for b in BLOCKS if b.run == "" and b.language == "console"})
PROGRAMS = [b for b in BLOCKS if b.run == "" and b.language == "python"]
WITH_CLUSTER = [b for b in BLOCKS if b.run == "cluster"]
GATEWAY, CONTROL = "http://127.0.0.1:8000", "http://127.0.0.1:8001"


@dataclass
class Shell:
    """Where commands run. `home` is PACELINE_HOME; addresses of the pages stand for those of the cluster."""

    folder: Path
    home: Path
    gateway: str = GATEWAY
    control: str = CONTROL

    def run(self, block: blocks.Block, *, more: str = "") -> None:
        """All commands of a block in one bash, and what the page shows of what they print. `more`: arguments of the last."""
        commands = block.commands
        script = ["set -e -o pipefail"]
        for number, command in enumerate(commands):
            text = self.here(command.text) + (more if number == len(commands) - 1 else "")
            script += [f"exec >{self.folder}/out.{number} 2>&1", text]
        state = self.folder / "variables"  # of one block for the next one of its page
        script = [f"test ! -e {state} || . {state}", *script, f"declare -p > {state}.new 2>/dev/null"]
        done = subprocess.run(
            ["bash", "-c", "\n".join(script)],
            cwd=self.folder,
            env=self.environment(),
            timeout=280,
            check=False,
        )
        printed = [self._printed(number) for number in range(len(commands))]
        assert done.returncode == 0, f"{block.where}: exit {done.returncode}\n" + "\n".join(printed)
        for command, text in zip(commands, printed, strict=True):
            if command.output:
                assert agrees(command.output, text), f"{block.where}: $ {command.text}\n{text}"

    def program(self, block: blocks.Block) -> str:
        """A block of Python."""
        done = subprocess.run(
            [sys.executable, "-c", self.here(block.body)],
            cwd=self.folder, env=self.environment(), capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block.where}\n{done.stderr}"
        return done.stdout

    def here(self, text: str) -> str:
        return text.replace(GATEWAY, self.gateway).replace(CONTROL, self.control)

    def environment(self) -> dict[str, str]:
        path = f"{self.home}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PACELINE_HOME": str(self.home), "COLUMNS": "200"}

    def _printed(self, number: int) -> str:
        file = self.folder / f"out.{number}"
        return file.read_text() if file.is_file() else ""


def make_shell(folder: Path) -> Shell:
    """A `paceline` that is this interpreter's, whatever else is installed."""
    home = folder / "home"
    (home / "bin").mkdir(parents=True)
    command = home / "bin" / "paceline"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline.deploy.cli "$@"\n')
    command.chmod(0o755)
    (folder / "work").mkdir()
    return Shell(folder / "work", home)


def agrees(shown: tuple[str, ...], printed: str) -> bool:
    """Whether output is what a page shows, in which `...` stands for anything, also for nothing."""
    wanted = r"\s*".join(re.escape(line.strip()).replace(r"\.\.\.", r"[\s\S]*?") for line in shown)
    return re.fullmatch(rf"\s*{wanted}\s*", printed) is not None


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        (("a", "b"), "a\nb\n", True),
        (("a ... c",), "a b c", True),
        (("...", "b", "..."), "a\nb\nc\nd", True),
        (("...", "b", "..."), "b", True),
        (("a",), "a\nb", False),
        (("a", "..."), "b", False),
    ],
)
def test_dots_stand_for_anything(shown: tuple[str, ...], printed: str, expected: bool) -> None:
    assert agrees(shown, printed) is expected


def test_a_command_that_fails_or_prints_something_else_is_noticed(tmp_path: Path) -> None:
    shell = make_shell(tmp_path)
    fails, differs, good = blocks.blocks_of(
        "p.md",
        "```console run\n$ false\n```\n```console run\n$ echo a\nb\n```\n```console run\n$ echo a\na\n```\n",
    )

    shell.run(good)
    for block in (fails, differs):
        with pytest.raises(AssertionError, match="p.md"):
            shell.run(block)


@pytest.mark.slow
@pytest.mark.parametrize("page", ALONE)
def test_commands_that_need_no_cluster(page: str, tmp_path: Path) -> None:
    """Those of a page in their order."""
    shell = make_shell(tmp_path)
    for block in BLOCKS:
        if block.page == page and block.run == "" and block.language == "console":
            shell.run(block)


@pytest.mark.slow
@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.where)
def test_programs_that_need_no_cluster(block: blocks.Block, tmp_path: Path) -> None:
    assert make_shell(tmp_path).program(block).strip()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """The cluster that the first page starts and stops, by its own commands: on free ports, and with learning on."""
    shell = make_shell(tmp_path_factory.mktemp("docs"))
    start, stop = (next(b for b in BLOCKS if b.run == kind) for kind in ("start", "stop"))
    free = " --port 0 --set control.port=0 --set learning.enabled=true"
    folder = shell.home / "run" / "local"
    try:
        shell.run(start, more=free)
        state = local.read_state(folder)
        assert state is not None
        shell.gateway, shell.control = state["gateway"], state["control"]
        yield shell
        shell.run(stop)
        assert local.processes_of(state["run_id"]) == []
    finally:
        if local.read_state(folder) is not None:
            subprocess.run(
                [shell.home / "bin" / "paceline", "stop"], env=shell.environment(), check=False, timeout=120
            )


@pytest.mark.slow
@pytest.mark.parametrize("block", WITH_CLUSTER, ids=lambda block: block.where)
def test_commands_against_the_cluster(block: blocks.Block, shell: Shell) -> None:
    if block.language == "python":
        assert shell.program(block).strip()
    else:
        for file in shell.folder.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        shell.run(block)
