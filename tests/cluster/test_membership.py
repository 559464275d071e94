"""A member over real sockets: its heartbeat and its reports survive what its resident raises."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline.cluster import wire
from paceline.cluster.config import LinkConfig
from paceline.cluster.membership import Member
from paceline.cluster.types import Directory, Message, Register, Served, Snapshot, WorkerInfo

SECRET = b"s" * 32


class Moody:
    """A resident whose figures fail in every call until it is told to behave."""

    is_well = False
    num_calls = 0

    def describe(self, info: WorkerInfo) -> WorkerInfo:
        return info

    def metrics_text(self) -> bytes:
        self.num_calls += 1
        if not self.is_well:
            raise RuntimeError("no figures today")
        return b"figures"

    def on_message(self, peer: wire.Peer, message: Message) -> None: ...
    def on_peer_lost(self, peer: wire.Peer) -> None: ...
    def on_directory(self, directory: Directory) -> None: ...

    def reports(self) -> Sequence[Message]:
        return (Served("w", ()),)


class Ears:
    """The other end: router and control in one."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def on_open(self, peer: wire.Peer) -> None: ...
    def on_close(self, peer: wire.Peer) -> None: ...
    def on_message(self, peer: wire.Peer, message: Message) -> None:
        self.heard.append(message)

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.heard)


async def test_a_bad_second_does_not_end_reports_or_heartbeats() -> None:
    """Figures that raise are logged and tried again; registering goes on meanwhile."""
    ears, moody = Ears(), Moody()
    hub = wire.Identity("hub", 7)
    listener = await wire.listen("127.0.0.1", 0, hub, SECRET, ears)
    control = WorkerInfo("hub", "control", 7, "127.0.0.1", listener.port, 0, "here", "ready")

    async def resolve() -> tuple[str, int]:
        return "127.0.0.1", listener.port

    member = Member(wire.Identity("w", 1), "decode", LinkConfig(), SECRET, moody, resolve)
    await member.start()
    try:
        member.directory = Directory(1, (control,))
        async with asyncio.timeout(20):
            while moody.num_calls < 2 or ears.count(Register) < 2:
                await asyncio.sleep(0.05)
            assert ears.count(Snapshot) == 0
            moody.is_well = True
            while ears.count(Snapshot) < 1 or ears.count(Served) < 1:
                await asyncio.sleep(0.05)
    finally:
        await member.close()
        listener.close()
