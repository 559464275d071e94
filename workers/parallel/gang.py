"""A model folder and a number of ranks -> their leader's runner, the other ranks in processes of their own.

Here they are spawned; in a cluster Ray starts them, beside their leader (`paceline.deploy.gang`). A gang lives and dies
as one: whatever happens to a rank ends the next call of its leader, and who owns the leader starts another gang.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import structlog
import torch

from paceline.cluster.errors import GangLost, ModelError
from paceline.workers.kv_link import LinkStore
from paceline.workers.model_runner import load_model_config, text_config
from paceline.workers.parallel.frames import Connect
from paceline.workers.parallel.group import INTERFACE, Group
from paceline.workers.parallel.links import LinkSetup
from paceline.workers.parallel.rank import READY, RankSetup, ready_key
from paceline.workers.parallel.runner import ParallelRunner, load_rank, num_blocks_of

log = structlog.get_logger(__name__)

_POLL_S = 0.05
_END_S = 5.0


class RankHandle(Protocol):
    """Another rank's process, as its leader sees it."""

    def is_alive(self) -> bool: ...

    def end(self, limit_s: float) -> None:
        """Give it so long to end by itself, then kill it."""
        ...


Launch = Callable[[RankSetup], RankHandle]
"""Starts a rank on this node."""


class SpawnedRank:
    """A rank in a child process. It ends with its leader's: it sees the socket between them close."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "paceline.workers.parallel.process", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._socket = ours

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, setup: RankSetup) -> None:
        """Be this rank, once the last gang is dissolved."""
        self._socket.sendall(msgspec.json.encode(setup) + b"\n")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self, limit_s: float) -> None:
        self._socket.close()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def spawn(setup: RankSetup) -> SpawnedRank:
    """A child process that is this rank."""
    rank = SpawnedRank()
    rank.begin(setup)
    return rank


class Gang:
    """The ranks besides the leader, and how all of them find each other."""

    def __init__(self, setups: Sequence[RankSetup], store: LinkStore, launch: Launch) -> None:
        self.name = setups[0].name
        self._setups = setups
        self._store = store
        self._ranks = [launch(setup) for setup in setups]

    def wait(self) -> None:
        """Until every rank has loaded.

        Raises:
            ModelError: one of them cannot use the model.
            GangLost: one of them died, or they took too long.
        """
        limit = time.monotonic() + self._setups[0].start_s
        for setup, rank in zip(self._setups, self._ranks, strict=True):
            key = ready_key(self.name, setup.rank)
            while not self._store.store.check([key]):
                if not rank.is_alive():
                    raise GangLost(f"rank {setup.rank} of {setup.size} ended while it loaded")
                if time.monotonic() > limit:
                    raise GangLost(
                        f"rank {setup.rank} of {setup.size} did not load within {setup.start_s:g} s"
                    )
                time.sleep(_POLL_S)
            said = self._store.store.get(key).decode()
            if said != READY:
                raise ModelError(said)

    def lost(self) -> str:
        """Which rank's process is gone; empty if none is."""
        return next(
            (
                f"rank {setup.rank} of {setup.size} is gone"
                for setup, rank in zip(self._setups, self._ranks, strict=True)
                if not rank.is_alive()
            ),
            "",
        )

    def end(self, limit_s: float = _END_S) -> None:
        """None of them outlives this."""
        for rank in self._ranks:
            rank.end(limit_s)


def load_parallel_runner(
    folder: Path,
    *,
    tp: int,
    kv_memory_mb: int,
    block_size: int,
    attention: str = "jit",
    threads: int = 1,
    device: str = "cpu",
    timeout_s: float = 30.0,
    start_s: float = 600.0,
    launch: Launch = spawn,
    links: LinkSetup | None = None,
) -> tuple[ParallelRunner, str]:
    """A model on `tp` ranks, this process the first of them; also why the pools have the size they have.

    `kv_memory_mb`, `threads`: of each rank. `device`: "cuda" is one GPU for each, weights and pools in bfloat16. `timeout_s`: a rank that keeps the others waiting longer is lost.

    Raises:
        ModelError: the folder, its weights or its family cannot be used by so many ranks.
        GangLost: a rank died while it loaded.
    """
    config = text_config(load_model_config(folder))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    num_blocks, reason = num_blocks_of(
        config, tp=tp, kv_memory_mb=kv_memory_mb, block_size=block_size, dtype=dtype
    )
    store = LinkStore(INTERFACE, start_s)
    name = secrets.token_hex(16)
    setups = [
        RankSetup(
            str(folder.resolve()),
            rank,
            tp,
            store.port,
            name,
            num_blocks,
            block_size,
            attention,
            threads,
            device if device == "cpu" else f"{device}:{rank}",
            timeout_s,
            start_s,
            links,
        )
        for rank in range(1, tp)
    ]
    gang = Gang(setups, store, launch)
    try:
        group = Group(0, tp, device if device == "cpu" else f"{device}:0")
        runner = load_rank(folder, group, num_blocks=num_blocks, block_size=block_size, attention=attention)
        assert isinstance(runner, ParallelRunner)
        gang.wait()
        group.join(store.store, name, timeout_s)
        runner.check()
        if links is not None:
            runner.tell(Connect())
    except BaseException:
        gang.end(0.0)
        raise
    runner.gang = gang
    return runner, reason
