"""Routes and registrations -> assignments and a directory; the router itself over real sockets."""

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import structlog.testing

from paceline.cluster import wire
from paceline.cluster.config import ClusterConfig
from paceline.cluster.router import DirectoryState, Router, choose, ready_workers
from paceline.cluster.types import Assignment, Cancel, Directory, Message, Register, Role, Route, WorkerInfo

SECRET = b"s" * 32


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """What the router logs during a test."""
    with structlog.testing.capture_logs() as events:
        yield events


def worker(role: Role, name: str, incarnation: int, **how: Any) -> WorkerInfo:
    how.setdefault("state", "ready")
    return WorkerInfo(f"{role}-{name}", role, incarnation, "127.0.0.1", 1000 + incarnation, 1, "node", **how)


D1, D2 = worker("decode", "a", 1), worker("decode", "b", 2)
P1, P2 = worker("prefill", "a", 3), worker("prefill", "b", 4)
R1, R2 = worker("draft", "a", 5), worker("draft", "b", 6)


def route(name: str = "r", num_tokens: int = 100, **how: Any) -> Route:
    return Route(name, how.pop("epoch", 0), num_tokens, how.pop("speculate", True), **how)


def picked(assignment: Assignment) -> tuple[str, ...]:
    """Names of decode, prefill and draft, and the reason."""
    workers = (assignment.decode, assignment.prefill, assignment.draft)
    return (*(w.worker_id if w else "" for w in workers), assignment.reason)


# --- the policy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "workers, how, expected",
    [
        ([], {}, ("", "", "", "no decode worker is ready")),
        ([P1, R1], {}, ("", "", "", "no decode worker is ready")),
        ([D1], {}, ("decode-a", "", "", "no_prefill_worker")),
        ([D2, D1, P2, P1, R1], {}, ("decode-a", "prefill-a", "draft-a", "")),
        ([D1, P1, R1], {"num_tokens": 16}, ("decode-a", "", "draft-a", "short")),
        ([D1, P1, R1], {"num_tokens": 17}, ("decode-a", "prefill-a", "draft-a", "")),
        ([D1, P1, R1], {"needs_prompt_logits": True}, ("decode-a", "", "draft-a", "prompt_logits")),
        ([D1, P1, R1], {"speculate": False}, ("decode-a", "prefill-a", "", "")),
        ([D1, D2, P1], {"avoid": (1,)}, ("decode-b", "prefill-a", "", "")),
        ([D1, P1], {"avoid": (1,)}, ("", "", "", "no decode worker is ready")),
        ([D1, P1, P2], {"avoid": (3,)}, ("decode-a", "prefill-b", "", "")),
        ([D1, P1], {"avoid": (3,)}, ("decode-a", "", "", "no_prefill_worker")),
        ([worker("decode", "a", 1, num_streams=3), D2], {}, ("decode-b", "", "", "no_prefill_worker")),
        ([worker("decode", "a", 1, state="draining")], {}, ("", "", "", "no decode worker is ready")),
        ([worker("decode", "a", 1, state="starting"), D2, P1], {}, ("decode-b", "prefill-a", "", "")),
        ([D1, worker("prefill", "a", 3, state="draining")], {}, ("decode-a", "", "", "no_prefill_worker")),
        ([D1, P1, worker("draft", "a", 5, state="starting")], {}, ("decode-a", "prefill-a", "", "")),
    ],
)
def test_the_policy_picks(
    workers: list[WorkerInfo], how: dict[str, Any], expected: tuple[str, str, str, str]
) -> None:
    """Decode by load, prefill by load unless the prompt is short, a draft if wanted; never one to avoid."""
    assignment = choose(route(epoch=4, **how), workers, min_remote_tokens=16)

    assert picked(assignment) == expected
    assert (assignment.request_id, assignment.epoch) == ("r", 4)


def test_a_stream_keeps_its_draft_worker_and_streams_spread_over_them() -> None:
    """The draft follows from the request's id alone, in whatever order the directory lists the workers."""
    names = [f"request-{i}" for i in range(64)]
    first = {name: choose(route(name), [D1, R1, R2], min_remote_tokens=1).draft for name in names}
    again = {name: choose(route(name), [R2, R1, D1], min_remote_tokens=1).draft for name in names}

    assert first == again
    assert first["request-0"] == [R1, R2][zlib.crc32(b"request-0") % 2]
    assert set(first.values()) == {R1, R2}


def test_ready_workers_come_least_loaded_first_and_ties_by_name() -> None:
    """The order does not depend on the order of registration."""
    busy = worker("decode", "c", 7, num_streams=2)

    assert ready_workers([busy, D2, P1, D1], "decode") == [D1, D2, busy]
    assert ready_workers([busy, D2, P1, D1], "decode", avoid=[1, 2]) == [busy]


# --- the directory --------------------------------------------------------------------------------------


def test_a_new_incarnation_replaces_the_old_one_and_is_not_replaced_by_it() -> None:
    """A late heartbeat of a life that ended changes nothing."""
    state = DirectoryState()
    new = msgspec.structs.replace(D1, incarnation=9)

    assert state.put(D1) and state.put(new)
    assert not state.put(D1)
    assert state.snapshot().workers == (new,) and state.revision == 2


def test_only_the_same_incarnation_is_dropped() -> None:
    """The old connection's end does not take the new life out of the directory."""
    state = DirectoryState()
    state.put(D2)

    assert not state.drop(D2.worker_id, 1) and not state.drop("nobody", 2)
    assert state.snapshot().workers == (D2,)
    assert state.drop(D2.worker_id, 2) and not state.drop(D2.worker_id, 2)
    assert state.snapshot() == Directory(2, ())


@pytest.mark.parametrize(
    "change, is_news",
    [
        ({}, False),
        ({"num_streams": 5, "kv_blocks_used": 3}, False),
        ({"state": "draining"}, True),
        ({"port": 4321}, True),
        ({"incarnation": 8}, True),
    ],
)
def test_news_is_told_from_a_heartbeat(change: dict[str, Any], is_news: bool) -> None:
    """Figures are kept without a new revision; address, incarnation and state make one."""
    state = DirectoryState()
    state.put(D1)
    changed = msgspec.structs.replace(D1, **change)

    assert state.put(changed) is is_news
    assert state.snapshot() == Directory(1 + is_news, (changed,))


def test_a_snapshot_is_sorted_by_role_and_name() -> None:
    """Everyone sees the same order, whoever registered first."""
    state = DirectoryState()
    for info in (P2, D2, R1, D1, P1):
        state.put(info)

    assert state.snapshot().workers == (D1, D2, R1, P1, P2)


def others(directory: Directory) -> tuple[WorkerInfo, ...]:
    """Everyone but the router itself."""
    return tuple(w for w in directory.workers if w.role != "router")


# --- the process ----------------------------------------------------------------------------------------


class FakeMember:
    """One connection to the router and what came over it."""

    def __init__(self) -> None:
        self.directories: list[Directory] = []
        self.assignments: list[Assignment] = []
        self.is_closed = False
        self.peer: wire.Peer | None = None
        self._changed = asyncio.Event()

    def on_open(self, peer: wire.Peer) -> None:
        self.peer = peer

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        match message:
            case Directory():
                self.directories.append(message)
            case Assignment():
                self.assignments.append(message)
        self._changed.set()

    def on_close(self, peer: wire.Peer) -> None:
        self.is_closed = True
        self._changed.set()

    def send(self, message: Message) -> None:
        assert self.peer is not None
        self.peer.send(message)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return others(self.directories[-1]) if self.directories else ()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


Join = Callable[[WorkerInfo | None], Any]


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Router, Join]]:
    """A router, and a function that connects a member and registers it."""
    router = Router(ClusterConfig(), wire.Identity("router", 1))
    host, port = await router.start(SECRET)
    members: list[FakeMember] = []

    async def join(info: WorkerInfo | None) -> FakeMember:
        member = FakeMember()
        me = wire.Identity(info.worker_id, info.incarnation) if info else wire.Identity("gateway", 99)
        await wire.connect(host, port, me, SECRET, member)
        members.append(member)
        if info is not None:
            member.send(Register(info))
            await member.until(lambda: info in member.workers)
        return member

    try:
        yield router, join
    finally:
        await router.close()
        for member in members:
            await member.until(lambda member=member: member.is_closed)


async def test_everyone_is_told_of_a_worker_that_registers() -> None:
    """The directory comes on connect and again, at once, when somebody joins or changes state."""
    async with running() as (router, join):
        gateway = await join(None)
        await gateway.until(lambda: gateway.directories)
        assert gateway.workers == ()
        first = await join(D1)
        second = await join(D2)
        await gateway.until(lambda: len(gateway.workers) == 2)
        await first.until(lambda: len(first.workers) == 2)
        draining = msgspec.structs.replace(D1, state="draining")
        first.send(Register(draining))
        await second.until(lambda: draining in second.workers)

        assert router.directory == second.directories[-1]
        assert second.workers == (draining, D2)
        assert second.directories[-1].revision == gateway.directories[0].revision + 3


async def test_a_route_is_answered_with_the_request_s_id_and_epoch() -> None:
    """One assignment per route, in order; without a decode worker it says so."""
    async with running() as (_, join):
        gateway = await join(None)
        gateway.send(route("early", epoch=1))
        await gateway.until(lambda: len(gateway.assignments) == 1)
        await join(D1)
        gateway.send(route("late", epoch=2))
        await gateway.until(lambda: len(gateway.assignments) == 2)

        early, late = gateway.assignments
        assert (early.request_id, early.epoch, early.decode) == ("early", 1, None)
        assert (late.request_id, late.epoch, late.decode) == ("late", 2, D1)


async def test_a_burst_spreads_over_the_workers() -> None:
    """Streams that no heartbeat tells of yet are counted, for decode and prefill alike."""
    async with running() as (_, join):
        for info in (D1, D2, P1, P2):
            await join(info)
        gateway = await join(None)
        for index in range(10):
            gateway.send(route(f"r{index}"))
        await gateway.until(lambda: len(gateway.assignments) == 10)

        decodes = Counter(a.decode.worker_id for a in gateway.assignments if a.decode)
        prefills = Counter(a.prefill.worker_id for a in gateway.assignments if a.prefill)
        assert decodes == {"decode-a": 5, "decode-b": 5}
        assert prefills == {"prefill-a": 5, "prefill-b": 5}


async def test_a_heartbeat_replaces_what_was_counted_meanwhile() -> None:
    """After it the worker's own figure counts: an idle worker takes the next streams again."""
    async with running() as (_, join):
        first, _ = await join(D1), await join(D2)
        gateway = await join(None)
        for index in range(6):
            gateway.send(route(f"r{index}"))
        await gateway.until(lambda: len(gateway.assignments) == 6)
        idle = msgspec.structs.replace(D1, version="after the burst", state="ready")
        first.send(Register(idle))
        # A state change and back is broadcast at once: it tells that the heartbeat was read.
        first.send(Register(msgspec.structs.replace(idle, state="draining")))
        first.send(Register(idle))
        await gateway.until(lambda: idle in gateway.workers)
        for index in range(3):
            gateway.send(route(f"s{index}"))
        await gateway.until(lambda: len(gateway.assignments) == 9)

        assert [a.decode for a in gateway.assignments[6:]] == [
            msgspec.structs.replace(idle, num_streams=n) for n in range(3)
        ]


async def test_a_lost_worker_leaves_the_directory_at_once() -> None:
    """Its connection's end is enough; the others are told without waiting for a heartbeat."""
    async with running() as (router, join):
        lost = await join(D1)
        stays = await join(D2)
        lost.peer.close()
        began = asyncio.get_running_loop().time()
        await stays.until(lambda: stays.workers == (D2,))

        assert asyncio.get_running_loop().time() - began < 0.5
        assert others(router.directory) == (D2,)


async def test_the_end_of_an_old_life_leaves_the_new_one_listed() -> None:
    """A worker that restarted before its old connection was closed stays in the directory."""
    async with running() as (router, join):
        old = await join(D1)
        new = msgspec.structs.replace(D1, incarnation=9)
        again = await join(new)
        old.peer.close()
        await old.until(lambda: old.is_closed)
        again.send(route("probe"))
        await again.until(lambda: again.assignments)

        assert again.assignments[0].decode == new
        assert others(router.directory) == (new,)


async def test_a_message_the_router_has_no_use_for_closes_the_connection() -> None:
    """A peer that mistakes the router for a worker is told by the close."""
    async with running() as (_, join):
        confused = await join(None)
        confused.send(Cancel("r", 0))

        await confused.until(lambda: confused.is_closed)
