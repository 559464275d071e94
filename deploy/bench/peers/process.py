"""A peer's Python, a driver and its settings -> a process that runs prompts, and how long they took it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from paceline.cluster.errors import PacelineError

HOST = Path(__file__).with_name("host.py")
OPEN_S = 600.0
"""vLLM compiles its model when it starts."""
RUN_S = 300.0
"""For one block, which is meant to take seconds."""
_OURS = ("OMP_", "GOMP_", "KMP_", "MKL_", "PYTHON", "VIRTUAL_ENV", "LD_PRELOAD", "NUMBA_", "VLLM_")
"""Beginnings of variables that are not handed on: how our threads wait is no peer's setting."""

_GUARD = 'read _; kill -s KILL -- "-$1"'
"""Waits until nobody can write to it any more: the bench is gone, however it went."""

Outputs = list[list[int]]


class PeerFailed(PacelineError):
    """A peer did not start, broke off, or says that it cannot do what was asked for."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a driver is started with."""

    target: str
    draft: str | None
    work: str
    """A folder for what it makes: converted weights, compiled code."""
    max_streams: int
    max_len: int
    """Prompt and output of the longest request."""
    settings: dict[str, Any]


class PeerProcess:
    """One driver, open from construction to `close`."""

    def __init__(self, python: Path, driver: Path, opening: Opening) -> None:
        """Start a driver file and wait until it is ready.

        Raises:
            PeerFailed: it did not get there; the message has its own last words.
        """
        self._name = driver.stem.removeprefix("drive_")
        self._log = Path(opening.work) / f"{self._name}.log"
        command = [
            str(python),
            str(HOST),
            str(driver),
            json.dumps(asdict(opening)),
        ]
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment(),
                    cwd=opening.work,
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerFailed(f"{self._name}: {python} does not start: {error.strerror}") from None
        # The kernel ends the peer with us, but not what the peer started, and a stopped process ends by itself at nothing.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, f"guard of {self._name}", str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(self._stdout, selectors.EVENT_READ)
        self._rest = b""
        self._is_silent = False
        try:
            ready = self._answer(OPEN_S)
        except BaseException:
            self.close()
            raise
        self.text: str = ready["text"]
        self.versions: dict[str, str] = ready["versions"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int, streams: int) -> tuple[Outputs, float]:
        """Every prompt for `num_tokens` tokens, `streams` at a time; outputs, and the seconds it took the peer.

        Raises:
            PeerFailed: it said why, died, or was silent for too long.
        """
        request = {
            "prompts": [list(prompt) for prompt in prompts],
            "num_tokens": num_tokens,
            "streams": streams,
        }
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(f"{self._name}: it is gone: {self._last_words()}") from None
        answer = self._answer(RUN_S)
        return answer["outputs"], answer["seconds"]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Not scheduled inside, with everything it started: vLLM's workers poll for work even when there is none."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """Spent so far by the process and all its descendants that live."""
        try:
            process = psutil.Process(self._process.pid)
            return sum(sum(one.cpu_times()[:2]) for one in [process, *process.children(recursive=True)])
        except psutil.Error:
            return 0.0

    def close(self) -> None:
        """End it and everything it started."""
        self._stdin.close()
        try:
            self._process.wait(timeout=0 if self._is_silent else 10)
        except subprocess.TimeoutExpired:
            pass
        # Its own session: whatever it started is in it, and nobody else.
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._guard.kill()
        self._guard.communicate()
        self._waiting.close()
        self._stdout.close()

    def _answer(self, patience_s: float) -> dict[str, Any]:
        end = time.monotonic() + patience_s
        while b"\n" not in self._rest:
            if not self._waiting.select(max(0.0, end - time.monotonic())):
                self._is_silent = True
                raise PeerFailed(f"{self._name}: no answer in {patience_s:.0f} s: {self._last_words()}")
            read = os.read(self._stdout.fileno(), 1 << 20)
            if not read:
                code = self._process.wait()
                raise PeerFailed(f"{self._name}: ended with status {code}: {self._last_words()}")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self._name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        """The last line of its stderr that says something."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else "it said nothing"


def environment() -> dict[str, str]:
    """Ours without what is about us."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
