"""Names of clients -> a Python environment of each, once, in the user's cache: they pin each other's packages apart.

    python tests/client_environments.py [litellm lm_eval ...]

`make clients` is this. A test whose client was not built skips, and says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.deploy.bench.peers.environments import Recipe, make_all, python_of

_WHEELS = "--only-binary=:all:"
_TORCH = (_WHEELS, "torch==2.13.0+cpu")
"""First and pinned: what follows would bring the build for GPUs, gigabytes of it."""
RECIPES = {
    "langchain": Recipe(steps=((_WHEELS, "langchain-openai==1.7.3"),), check="import langchain_openai"),
    "litellm": Recipe(steps=((_WHEELS, "litellm==1.106.2"),), check="import litellm"),
    "lm_eval": Recipe(
        # Some of its packages come as (pure Python) source only.
        steps=(_TORCH, ("--prefer-binary", "lm_eval[api]==0.4.13", "transformers==5.23.0")),
        check="import lm_eval",
    ),
    "guidellm": Recipe(steps=(_TORCH, (_WHEELS, "guidellm==0.8.1")), check="import guidellm"),
    "aiperf": Recipe(steps=(_TORCH, (_WHEELS, "aiperf==0.13.0")), check="import aiperf"),
}


def folder() -> Path:
    """Where environments lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "clients"


def client_python(name: str) -> Path | None:
    """The Python of a client's finished environment."""
    return python_of(RECIPES[name], folder() / name)


def main(names: Sequence[str]) -> None:
    """Build each; what fails is said at the end, the others are there."""
    if unknown := [name for name in names if name not in RECIPES]:
        raise SystemExit(f"{unknown[0]}: expected some of {', '.join(RECIPES)}")
    make_all(names or list(RECIPES), RECIPES, folder())


if __name__ == "__main__":
    main(sys.argv[1:])
