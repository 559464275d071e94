"""What a leader says a rank shall be -> that rank, doing what the leader's frames say until it is told to end.

A rank decides nothing: it has no books, no streams and no clock. If its leader is gone, so is the rank.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog
import torch

from paceline.cluster.errors import ModelError
from paceline.workers.kv_link import connect_store
from paceline.workers.parallel.frames import Connect, End, Move, Place, Rows, Step, decode
from paceline.workers.parallel.group import INTERFACE, Group
from paceline.workers.parallel.links import LinkAgent, LinkSetup
from paceline.workers.parallel.runner import RankRunner, load_rank

log = structlog.get_logger(__name__)

READY = "ready"


class RankSetup(msgspec.Struct, frozen=True):
    """Everything a rank has to know; travels on the node it is for."""

    folder: str
    rank: int
    size: int
    store_port: int
    name: str
    """Of the gang: nobody else knows it, and the store lets anybody in."""
    num_blocks: int
    block_size: int
    attention: str
    threads: int
    device: str
    timeout_s: float
    """How long one rank may keep the others waiting."""
    start_s: float
    """How long all may take to load."""
    links: LinkSetup | None = None
    """Where the worker is that its leader belongs to, if KV goes out or comes in over links."""


def ready_key(name: str, rank: int) -> str:
    """Where in the store a rank says that it has loaded, or why not."""
    return f"{name}/{rank}"


def serve_rank(setup: RankSetup) -> None:
    """Load, join, follow; returns when the gang is dissolved.

    Raises:
        GangLost: the leader, or another rank, is gone.
        ModelError: the model cannot be used so; the leader has been told.
    """
    torch.set_num_threads(setup.threads)
    store = connect_store(INTERFACE, setup.store_port, setup.start_s)
    group = Group(setup.rank, setup.size, setup.device)
    key = ready_key(setup.name, setup.rank)
    try:
        runner = load_rank(
            Path(setup.folder),
            group,
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            attention=setup.attention,
        )
    except ModelError as error:
        store.set(key, str(error))
        raise
    store.set(key, READY)
    group.join(store, setup.name, setup.timeout_s)
    links = Links(setup.rank, setup.links, runner)
    try:
        follow(runner, links)
    finally:
        links.close()


class Links:
    """A rank's links, once it is told to have them: before its first step, what is compiled then would look like death."""

    def __init__(self, rank: int, setup: LinkSetup | None, runner: RankRunner) -> None:
        self._rank, self._setup, self._runner = rank, setup, runner
        self._agent: LinkAgent | None = None

    def connect(self) -> None:
        """Say to the leader's worker who this is."""
        assert self._setup is not None, f"rank {self._rank} was not told where its worker is"
        self._agent = LinkAgent(self._rank, self._setup, self._runner.cache)

    @property
    def agent(self) -> LinkAgent:
        assert self._agent is not None, f"rank {self._rank} has no links, and is to send or place KV"
        return self._agent

    def close(self) -> None:
        """Drop them."""
        if self._agent is not None:
            self._agent.close()


def follow(runner: RankRunner, links: Links) -> None:
    """Do what the leader says, in its order, until it dissolves the gang."""
    group = runner.group
    while True:
        match decode(group.receive()):
            case End():
                return
            case Step(batch, draws):
                if batch.sends:
                    batch.on_layer = links.agent.pusher(batch, runner.cache)
                runner.compute(batch, draws)
            case Rows(rows):
                runner.collect(rows)
            case Move(source, destination):
                device = runner.cache.device
                runner.cache.move(*(torch.from_numpy(slots).to(device) for slots in (source, destination)))
            case Place(rank, slots, message):
                if rank == group.rank:
                    at = torch.from_numpy(slots).to(runner.cache.device)
                    links.agent.place(runner.cache, message, at)
            case Connect():
                links.connect()
