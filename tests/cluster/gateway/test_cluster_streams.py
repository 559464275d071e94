"""The cluster behind a gateway's streams, with real connections and a scripted decode worker: what it does when ends come
at the worst moment."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from paceline.cluster import wire
from paceline.cluster.config import ClusterConfig
from paceline.cluster.errors import WireError
from paceline.cluster.gateway import cluster_streams
from paceline.cluster.gateway.cluster_streams import ClusterStreams
from paceline.cluster.gateway.streams import StreamEvent, StreamReport
from paceline.cluster.membership import Member
from paceline.cluster.metrics import Metrics
from paceline.cluster.types import (
    NO_WORKER,
    Assignment,
    Cancel,
    Delta,
    Deltas,
    Directory,
    Generate,
    Logprobs,
    Message,
    Progress,
    Request,
    Route,
    Sampling,
    WorkerInfo,
)

SECRET = b"s" * 32
SCORES = Logprobs(0, bytes(4), bytes(4), b"", b"")
REQUEST = Request("r", (1, 2, 3), Sampling(7), 8)


class Process:
    """Another process of the cluster: answers with `act`, and remembers what it was sent."""

    def __init__(self) -> None:
        self.received: list[Message] = []
        self.peers: list[wire.Peer] = []
        self.act: Callable[[wire.Peer, Message], None] = lambda peer, message: None
        self.greeting: Message | None = None

    async def listen(self, name: str, incarnation: int) -> wire.Listener:
        return await wire.listen("127.0.0.1", 0, wire.Identity(name, incarnation), SECRET, self)

    def on_open(self, peer: wire.Peer) -> None:
        self.peers.append(peer)
        if self.greeting is not None:
            peer.send(self.greeting)

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        self.received.append(message)
        self.act(peer, message)

    def on_close(self, peer: wire.Peer) -> None:
        self.peers.remove(peer)

    def of(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.received if isinstance(message, kind)]


@dataclass
class Cluster:
    """One gateway's streams between a router and the only decode worker."""

    streams: ClusterStreams
    member: Member
    metrics: Metrics
    info: WorkerInfo
    router: Process = field(default_factory=Process)
    decode: Process = field(default_factory=Process)

    async def run(self, request: Request = REQUEST) -> list[int]:
        """One stream to its end."""
        tokens: list[int] = []
        async for event in self.streams.run(request, StreamReport()):
            tokens.extend(event.tokens)
        return tokens

    @property
    def num_blind(self) -> float:
        return self.metrics.registry.get_sample_value("paceline_blind_routes_total") or 0.0


@asynccontextmanager
async def running() -> AsyncIterator[Cluster]:
    config, metrics, router, decode = ClusterConfig(), Metrics(), Process(), Process()
    worker = await decode.listen("decode-0", 5)
    info = WorkerInfo("decode-0", "decode", 5, worker.host, worker.port, 1, "node", "ready")
    router.greeting = Directory(1, (info,))
    place = await router.listen("router-0", 1)

    async def resolve() -> tuple[str, int]:
        return place.host, place.port

    streams = ClusterStreams(config, metrics)
    member = Member(wire.Identity("gateway-0", 9), "gateway", config.link, SECRET, streams, resolve)
    streams.attach(member)
    await member.start()
    try:
        await until(lambda: streams.is_ready)
        yield Cluster(streams, member, metrics, info, router, decode)
    finally:
        await member.close()
        worker.close()
        place.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def assigns(info: WorkerInfo) -> Callable[[wire.Peer, Message], None]:
    """A router that knows this worker only, and respects whom a stream avoids."""

    def act(peer: wire.Peer, message: Message) -> None:
        if isinstance(message, Route):
            found = None if info.incarnation in message.avoid else info
            reason = "short" if found else NO_WORKER
            peer.send(Assignment(message.request_id, message.epoch, found, reason=reason))

    return act


def says(*tokens: int) -> Callable[[wire.Peer, Message], None]:
    """A decode worker that says these tokens in one step, behind those it is told of."""

    def act(peer: wire.Peer, message: Message) -> None:
        if isinstance(message, Generate):
            start = len(message.resumed)
            rest = tokens[start:]
            sources = bytes(len(rest))
            peer.send(
                Deltas((Delta(message.request.id, message.epoch, start, rest, sources, finish="stop"),))
            )

    return act


async def test_a_router_that_dies_while_it_is_asked_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last directory decides at once, and it is counted."""
    monkeypatch.setattr(cluster_streams, "_ROUTE_TIMEOUT_S", 60.0)
    async with asyncio.timeout(10), running() as cluster:
        cluster.router.act = lambda peer, message: (
            peer.close("killed") if isinstance(message, Route) else None
        )
        cluster.decode.act = says(4, 5)

        assert await cluster.run() == [4, 5]
        assert cluster.num_blind == 1


async def test_a_router_that_does_not_answer_hears_who_was_chosen_without_it() -> None:
    """Its own count of streams in each worker must not stay wrong."""
    async with running() as cluster:
        cluster.decode.act = says(4)

        assert await cluster.run() == [4]
        assert cluster.num_blind == 1
        await until(lambda: len(cluster.router.of(Progress)) == 2)
        busy, end = cluster.router.of(Progress)
        assert isinstance(busy, Progress) and (busy.decode, busy.prefill) == (5, 0)
        assert isinstance(end, Progress) and (end.decode, end.prefill) == (0, 0)


async def test_a_stream_goes_on_in_the_only_worker_after_a_broken_connection() -> None:
    """A worker that failed it once is better than none."""
    async with running() as cluster:
        cluster.router.act = assigns(cluster.info)

        def breaks_off_once(peer: wire.Peer, message: Message) -> None:
            if isinstance(message, Generate) and message.epoch == 0:
                peer.send(Deltas((Delta(message.request.id, 0, 0, (4,), b"\0"),)))
                asyncio.get_running_loop().call_later(0.05, peer.close)
            else:
                says(4, 5, 6)(peer, message)

        cluster.decode.act = breaks_off_once

        async with asyncio.timeout(5):
            assert await cluster.run() == [4, 5, 6]
        assert cluster.num_blind == 0


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_cancellation_is_heard_together_with_a_token(num_turns: int) -> None:
    """Whichever of the two comes first: nobody computes on for a client that left."""
    async with running() as cluster:
        cluster.router.act = assigns(cluster.info)
        task = asyncio.create_task(cluster.run())
        await until(lambda: cluster.decode.of(Generate))
        (generate,) = cluster.decode.of(Generate)
        assert isinstance(generate, Generate)
        (attempt,) = cluster.streams._attempts.values()
        cluster.streams.on_message(attempt.decode, Deltas((Delta(generate.request.id, 0, 0, (4,), b"\0"),)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=2)

        assert task.cancelled()
        await until(lambda: cluster.decode.of(Cancel))


def steps(request: Request, *tokens: tuple[int, ...]) -> list[Delta]:
    """So many steps of a stream, the last of which ends it."""
    starts = [sum(map(len, tokens[:step])) for step in range(len(tokens))]
    return [
        Delta(request.id, 0, start, new, bytes(len(new)), finish="stop" if index == len(tokens) - 1 else None)
        for index, (start, new) in enumerate(zip(starts, tokens, strict=True))
    ]


async def test_steps_that_came_while_nobody_looked_are_one_event() -> None:
    """A gateway that is behind writes less, not later; every step still counts."""
    async with running() as cluster:
        cluster.router.act = assigns(cluster.info)

        def says_all_at_once(peer: wire.Peer, message: Message) -> None:
            if isinstance(message, Generate):
                peer.send(Deltas(tuple(steps(message.request, (4,), (5, 6), (7,)))))

        cluster.decode.act = says_all_at_once
        report = StreamReport()
        events = [event async for event in cluster.streams.run(REQUEST, report)]

        (event,) = [event for event in events if event.tokens]
        assert (event.tokens, event.sources, event.finish) == ((4, 5, 6, 7), bytes(4), "stop")
        assert report.num_steps == 3


async def test_what_came_before_a_gap_is_kept_and_the_rest_asked_for_again() -> None:
    """In one look: two good steps, and one that leaves a token out."""
    async with running() as cluster:
        cluster.router.act = assigns(cluster.info)

        def leaves_one_out(peer: wire.Peer, message: Message) -> None:
            if isinstance(message, Generate) and message.epoch == 0:
                first, second, _, last = steps(message.request, (4,), (5,), (6,), (7,))
                peer.send(Deltas((first, second, last)))
            else:
                says(4, 5, 6, 7)(peer, message)

        cluster.decode.act = leaves_one_out
        report = StreamReport()
        tokens = [t async for event in cluster.streams.run(REQUEST, report) for t in event.tokens]

        assert tokens == [4, 5, 6, 7] and report.num_recoveries == 1


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (StreamEvent((4,), b"\0", "stop"), StreamEvent((5,), b"\0")),
        (StreamEvent((4,), b"\0"), StreamEvent((), b"", "error", "broken")),
        (StreamEvent((4,), b"\0"), StreamEvent((5,), b"\0", logprobs=SCORES)),
        (StreamEvent((4,), b"\0", logprobs=SCORES), StreamEvent((5,), b"\0")),
    ],
)
def test_events_that_say_more_than_tokens_stay_alone(first: StreamEvent, later: StreamEvent) -> None:
    assert first.joined(later) is None


async def test_a_worker_that_cannot_be_reached_is_not_remembered() -> None:
    """Workers come and go for months."""
    async with running() as cluster:
        listener = await Process().listen("decode-1", 6)
        listener.close()
        gone = WorkerInfo("decode-1", "decode", 6, listener.host, listener.port, 1, "node", "ready")
        with pytest.raises(WireError):
            await cluster.member.peer_to(gone)
        peer = await cluster.member.peer_to(cluster.info)
        assert await cluster.member.peer_to(cluster.info) is peer
        peer.close()

        await until(lambda: not cluster.member._dials)


async def test_a_gateway_that_gives_notice_is_not_ready_and_serves() -> None:
    """Whoever balances between gateways must hear of it first, and may still send somebody meanwhile."""
    async with running() as cluster:
        cluster.router.act = assigns(cluster.info)
        cluster.decode.act = says(7)
        assert cluster.streams.is_ready

        cluster.streams.give_notice()

        assert not cluster.streams.is_ready
        assert await cluster.run() == [7]
