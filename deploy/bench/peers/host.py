"""A driver file and what it is to open, as JSON -> a process in a peer's own Python that answers JSON lines.

Run as a script where Paceline is not installed: nothing but the standard library here, nothing of ours in a driver.
What goes over the pipes, a line each, no pickle:

    argument   {"target": folder, "draft": folder or null, "work": folder, "max_streams": n, "max_len": n, "settings": {...}}
    answer     {"text": how it runs, "versions": {...}}                         once it is open
    request    {"prompts": [[token ids]], "num_tokens": n, "streams": n}
    answer     {"outputs": [[token ids]], "seconds": s}      or      {"error": "..."}

A driver module has `environment(settings)`: variables that its process must have been started with; and a class
`Driver(target, draft, work, max_streams, max_len, settings)` with `text`, `packages` and `run(prompts, num_tokens,
streams)`: greedy, each prompt for exactly that many tokens, `streams` of them at a time. Only `run` is timed: no
peer pays for the pipe.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main(driver_file: str, argument: str) -> None:
    """Open the driver, then answer until stdin ends."""
    # A script's folder comes first on the path: files beside this one must not hide a peer's packages.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [folder for folder in sys.path if folder != here]
    spec = json.loads(argument)
    module = load(driver_file)
    wanted = module.environment(spec["settings"])
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # Libraries to be loaded first, and thread counts, are read when a process starts.
        os.execve(sys.executable, [sys.executable, __file__, driver_file, argument], {**os.environ, **wanted})
    _end_with_parent()
    # Peers print on stdout as they like: the answers keep the pipe for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    try:
        driver = module.Driver(**spec)
    except Exception as error:  # noqa: BLE001 - whatever a peer cannot do is said, in its words
        traceback.print_exc()
        answer({"error": described(error)})
        return
    answer({"text": driver.text, "versions": {name: version(name) for name in driver.packages}})
    for line in sys.stdin:
        try:
            answer(timed(driver, **json.loads(line)))
        except Exception as error:  # noqa: BLE001 - likewise
            traceback.print_exc()
            answer({"error": described(error)})


def _end_with_parent() -> None:
    """Killed when the bench is, even while it is stopped; where the kernel is Linux."""
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)


def timed(driver: Any, prompts: list[list[int]], num_tokens: int, streams: int) -> dict[str, Any]:
    """One block: the outputs, and how long they took."""
    began = time.perf_counter()
    outputs = driver.run(prompts, num_tokens, streams)
    return {"seconds": time.perf_counter() - began, "outputs": outputs}


def load(file: str) -> Any:
    """A driver's module, from its file."""
    spec = importlib.util.spec_from_file_location("peer_driver", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


if __name__ == "__main__":
    main(*sys.argv[1:])
