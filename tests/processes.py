"""Role and configuration -> a worker in a process of its own, which tests can stop, slow down and kill.

As a script it is that process: it serves until its input ends, so that none outlives the test that began it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster.config import ClusterConfig, Secrets
from paceline.workers.base import Worker
from paceline.workers.decode import DecodeWorker
from paceline.workers.draft import DraftWorker
from paceline.workers.prefill import PrefillWorker

_ROLES: dict[str, type[Worker]] = {"prefill": PrefillWorker, "decode": DecodeWorker, "draft": DraftWorker}

_ANSWERS = os.dup(1) if __name__ == "__main__" else -1


class WorkerProcess:
    """A running worker. Signals are sent to its process; `ask` is answered by it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.incarnation = 0

    async def ask(self, what: str) -> Any:
        """`metrics` or `drain`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n".encode())
        line = await self._process.stdout.readline()
        assert line, f"the worker ended: {self._process.returncode}"
        return json.loads(line)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        families = text_string_to_metric_families(await self.ask("metrics"))
        samples = [s for family in families for s in family.samples if s.name == f"paceline_{name}"]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP, SIGCONT, SIGKILL."""
        self._process.send_signal(number)

    async def close(self) -> None:
        """End it, however it is."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def start(cluster: Any, role: str, name: str, *settings: str) -> AsyncIterator[WorkerProcess]:
    """A worker process of a `harness.cluster`, once the gateway sees it ready."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, role, name, *settings,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
    )  # fmt: skip
    worker = WorkerProcess(process)
    try:
        setup = {
            "config": cluster.config.model_dump(),
            "link": cluster.secrets.link.hex(),
            "router": cluster.address,
        }
        worker.incarnation = await worker.ask(json.dumps(setup))
        await cluster.until(
            lambda: any(
                w.incarnation == worker.incarnation and w.state == "ready"
                for w in cluster.gateway.directory.workers
            ),
            30.0,
        )
        yield worker
    finally:
        await worker.close()


async def _serve(role: str, name: str) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    setup = json.loads(await reader.readline())
    secrets = Secrets.create().model_copy(update={"link": bytes.fromhex(setup["link"])})
    address = tuple(setup["router"])

    async def resolve() -> tuple[str, int]:
        return address

    worker = _ROLES[role](ClusterConfig(**setup["config"]), secrets, name=name, resolve=resolve)
    await worker.setup()
    _say(worker.member.me.incarnation)
    while line := await reader.readline():
        what = line.decode().strip()
        if what == "metrics":
            _say(worker.metrics_text().decode())
        elif what == "drain":
            await worker.drain()
            _say(worker.num_streams())
    os._exit(0)


def _say(what: object) -> None:
    os.write(_ANSWERS, f"{json.dumps(what)}\n".encode())


def _main(arguments: Sequence[str]) -> None:
    os.dup2(2, 1)  # the worker's log must not mix with the answers
    asyncio.run(_serve(*arguments[:2]))


if __name__ == "__main__":
    _main(sys.argv[1:])
