"""Routes and registrations -> assignments and a directory; the router itself over real sockets."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import structlog.testing

from paceline.cluster import wire
from paceline.cluster.config import ClusterConfig, load_config
from paceline.cluster.prefixes import MARK_BYTES, prefix_marks
from paceline.cluster.rates import Limits
from paceline.cluster.router import (
    STREAM_TOKENS,
    Candidate,
    DirectoryState,
    Load,
    Policy,
    Router,
    candidates,
    choose,
    ready_workers,
    sticky,
)
from paceline.cluster.types import (
    NO_PROBATION,
    NO_ROOM,
    NO_WORKER,
    QUARANTINED,
    Admit,
    Admitted,
    Assignment,
    Cancel,
    Directory,
    Message,
    Progress,
    Quarantine,
    Register,
    Role,
    Route,
    Settle,
    Snapshot,
    WorkerInfo,
)

SECRET = b"s" * 32


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """What the router logs during a test."""
    with structlog.testing.capture_logs() as events:
        yield events


def worker(role: Role, name: str, incarnation: int, **how: Any) -> WorkerInfo:
    how.setdefault("state", "ready")
    node = how.pop("node", "node")
    return WorkerInfo(f"{role}-{name}", role, incarnation, "127.0.0.1", 1000 + incarnation, 1, node, **how)


D1, D2 = worker("decode", "a", 1), worker("decode", "b", 2)
P1, P2 = worker("prefill", "a", 3), worker("prefill", "b", 4)
R1, R2 = worker("draft", "a", 5), worker("draft", "b", 6)


def route(request_id: str = "r", num_tokens: int = 100, **how: Any) -> Route:
    return Route(request_id, how.pop("epoch", 0), num_tokens, how.pop("speculate", True), **how)


def picked(assignment: Assignment) -> tuple[str, ...]:
    """Names of decode, prefill and draft, and the reason."""
    workers = (assignment.decode, assignment.prefill, assignment.draft)
    return (*(w.worker_id if w else "" for w in workers), assignment.reason)


# --- the policy -----------------------------------------------------------------------------------------


POLICY = Policy(min_remote_tokens=16, max_streams=4)


def decided(workers: list[WorkerInfo], **how: Any) -> Assignment:
    """The policy's word about a stream, all workers as they say they are."""
    streams = {w.incarnation: w.num_streams for w in workers}
    return choose(route(**how), candidates(workers, streams), POLICY)


@pytest.mark.parametrize(
    "workers, how, expected",
    [
        ([], {}, ("", "", "", NO_WORKER)),
        ([P1, R1], {}, ("", "", "", NO_WORKER)),
        ([D1], {}, ("decode-a", "", "", "no_prefill_worker")),
        ([D2, D1, P2, P1], {}, ("decode-a", "prefill-a", "", "")),
        ([D1, P1, R1], {"num_tokens": 16}, ("decode-a", "", "draft-a", "short")),
        ([D1, P1, R1], {"num_tokens": 17}, ("decode-a", "prefill-a", "draft-a", "")),
        ([D1, P1, R1], {"needs_prompt_logits": True}, ("decode-a", "", "draft-a", "prompt_logits")),
        ([D1, P1, R1], {"speculate": False}, ("decode-a", "prefill-a", "", "")),
        ([D1, D2, P1], {"avoid": (1,)}, ("decode-b", "prefill-a", "", "")),
        ([D1, P1], {"avoid": (1,)}, ("", "", "", NO_WORKER)),
        ([D1, P1, P2], {"avoid": (3,)}, ("decode-a", "prefill-b", "", "")),
        ([D1, P1], {"avoid": (3,)}, ("decode-a", "", "", "no_prefill_worker")),
        ([worker("decode", "a", 1, num_streams=3), D2], {}, ("decode-b", "", "", "no_prefill_worker")),
        ([worker("decode", "a", 1, state="draining")], {}, ("", "", "", NO_WORKER)),
        ([worker("decode", "a", 1, state="starting"), D2, P1], {}, ("decode-b", "prefill-a", "", "")),
        ([D1, worker("prefill", "a", 3, state="draining")], {}, ("decode-a", "", "", "no_prefill_worker")),
        ([D1, P1, worker("draft", "a", 5, state="starting")], {}, ("decode-a", "prefill-a", "", "")),
        ([worker("decode", "a", 1, num_streams=4), P1], {"is_new": True}, ("", "", "", NO_ROOM)),
        ([worker("decode", "a", 1, num_streams=4), D2], {"is_new": True}, ("decode-b", "", "", "no_prefill_worker")),
        ([worker("decode", "a", 1, num_streams=9), P1], {}, ("decode-a", "prefill-a", "", "")),
        ([worker("decode", "a", 1, num_streams=1), P1, R1], {"alone": True}, ("", "", "", NO_PROBATION)),
        ([D1, P1, R1], {"alone": True}, ("decode-a", "", "", "probation")),
    ],
)  # fmt: skip
def test_the_policy_picks(
    workers: list[WorkerInfo], how: dict[str, Any], expected: tuple[str, str, str, str]
) -> None:
    """By cost, with the reason for what is missing; never one to avoid, never one that is not ready."""
    assignment = decided(workers, epoch=4, **how)

    assert picked(assignment) == expected
    assert (assignment.request_id, assignment.epoch) == ("r", 4)


@pytest.mark.parametrize(
    "known, expected",
    [
        # A hit is worth as many tokens as it saves, and a stream costs STREAM_TOKENS.
        ([Candidate(D1), Candidate(D2, num_hit=64)], ("decode-b", "", "no_prefill_worker")),
        ([Candidate(D1), Candidate(D2, 1, num_hit=STREAM_TOKENS - 1)], ("decode-a", "", "no_prefill_worker")),
        ([Candidate(D1), Candidate(D2, 1, num_hit=STREAM_TOKENS + 1)], ("decode-b", "", "no_prefill_worker")),
        # Nothing worth sending is left to compute.
        ([Candidate(D1, num_hit=80), Candidate(P1)], ("decode-a", "prefill-a", "")),
        ([Candidate(D1, num_hit=84), Candidate(P1)], ("decode-a", "", "prefix_hit")),
        # Prefill by what is queued and what it holds.
        ([Candidate(D1), Candidate(P1, 1, 50), Candidate(P2)], ("decode-a", "prefill-b", "")),
        ([Candidate(D1, 1), Candidate(P1, 1, 50), Candidate(P2, 3, 90)], ("decode-a", "prefill-a", "")),
        ([Candidate(D1, 1), Candidate(P1, 1, 50), Candidate(P2, 3, 90, 64)], ("decode-a", "prefill-b", "")),
        # All prefill workers have something to do and the decode worker has nothing.
        ([Candidate(D1), Candidate(P1, 1, 50), Candidate(P2, 3, 90)], ("decode-a", "", "prefill_busy")),
        # KV stays on the node unless the other worker is much better.
        ([Candidate(D1), Candidate(worker("prefill", "0", 7, node="far")), Candidate(P1)], ("decode-a", "prefill-a", "")),
        ([Candidate(D1), Candidate(worker("prefill", "0", 7, node="far")), Candidate(P1, 1, 13)], ("decode-a", "prefill-0", "")),
    ],
)  # fmt: skip
def test_costs_decide(known: list[Candidate], expected: tuple[str, str, str]) -> None:
    """Prompts of 100 tokens, of which 99 need KV: hits, load, queues and nodes, all in tokens."""
    assignment = choose(route(speculate=False), known, POLICY)

    decode, prefill, _, reason = picked(assignment)
    assert (decode, prefill, reason) == expected


def test_any_mix_of_workers_gets_a_legal_and_repeatable_answer() -> None:
    """Random clusters: ready ones only, none to avoid, the bound holds, and the order they are listed in is no matter."""
    rng = random.Random(0)
    for _ in range(500):
        known = [
            Candidate(
                worker(rng.choice(("prefill", "decode", "draft")), str(i), i + 1, node=rng.choice("xy")),
                rng.randrange(6),
                rng.choice((0, 0, 500)),
                rng.randrange(0, 128, 16),
            )
            for i in range(rng.randrange(9))
        ]
        asked = route(
            f"r{rng.random()}",
            rng.randrange(1, 200),
            avoid=tuple(rng.sample(range(1, 10), 2)),
            is_new=rng.random() < 0.5,
            alone=rng.random() < 0.2,
            speculate=rng.random() < 0.8,
        )
        answer = choose(asked, known, POLICY)
        rng.shuffle(known)
        assert choose(asked, known, POLICY) == answer

        by_worker = {c.worker.incarnation: c for c in known}
        for info, role in ((answer.decode, "decode"), (answer.prefill, "prefill"), (answer.draft, "draft")):
            assert info is None or (info.role == role and info.incarnation not in asked.avoid)
        if answer.decode is None:
            assert answer.reason in (NO_WORKER, NO_ROOM, NO_PROBATION)
            assert answer.prefill is None and answer.draft is None
            continue
        assert (answer.prefill is None) == bool(answer.reason)
        chosen = by_worker[answer.decode.incarnation]
        assert not asked.alone or (chosen.num_streams == 0 and answer.draft is None)
        assert not asked.is_new or asked.alone or chosen.num_streams < POLICY.max_streams
        assert answer.prefill is None or asked.num_tokens - 1 - chosen.num_hit >= POLICY.min_remote_tokens


def test_a_stream_keeps_its_draft_worker_and_only_its_own_move_when_one_goes() -> None:
    """Rendezvous hashing: by id alone, in whatever order workers are listed, near the decode worker if possible."""
    third = worker("draft", "c", 7)
    names = [f"request-{i}" for i in range(300)]
    before = {name: sticky(name, [R1, R2, third]) for name in names}
    after = {name: sticky(name, [third, R1]) for name in names}

    assert Counter(w.worker_id for w in before.values() if w).most_common()[-1][1] > 70
    assert all(after[name] == before[name] for name in names if before[name] != R2)
    assert {after[name] for name in names if before[name] == R2} == {R1, third}
    far = worker("draft", "d", 8, node="far")
    assert {decided([D1, far, R1], request_id=name).draft for name in names} == {R1}
    assert decided([D1, far]).draft == far


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
        self.snapshots: list[Snapshot] = []
        self.admitted: list[Admitted] = []
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
            case Snapshot():
                self.snapshots.append(message)
            case Admitted():
                self.admitted.append(message)
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
async def running(*settings: str) -> AsyncIterator[tuple[Router, Join]]:
    """A router, and a function that connects a member and registers it."""
    config = load_config(None, settings) if settings else ClusterConfig()
    router = Router(config, wire.Identity("router", 1))
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


async def ask(gateway: FakeMember, *routes: Route) -> list[Assignment]:
    """Answers to routes, in order."""
    before = len(gateway.assignments)
    for asked in routes:
        gateway.send(asked)
    await gateway.until(lambda: len(gateway.assignments) == before + len(routes))
    return gateway.assignments[before:]


async def test_what_gateways_say_counts_and_not_a_heartbeat_from_before() -> None:
    """A prefill worker is free with the first tokens, a decode worker with the end, whatever they say themselves."""
    async with running() as (_, join):
        await join(msgspec.structs.replace(D1, num_streams=5))
        await join(D2)
        for info in (P1, P2):
            await join(info)
        gateway = await join(None)
        first, second = await ask(gateway, route("r0"), route("r1"))
        assert (first.decode.worker_id, first.prefill) == ("decode-a", P1)
        assert (second.decode, second.prefill) == (D2, P2)
        gateway.send(Progress("r0", 0, D1.incarnation))
        (third,) = await ask(gateway, route("r2"))
        assert (third.decode.worker_id, third.prefill) == ("decode-a", P1)
        gateway.send(Progress("r1", 0))
        (fourth,) = await ask(gateway, route("r3"))
        assert (fourth.decode, fourth.prefill) == (D2, P2)


async def test_a_gateway_s_death_ends_what_it_had_running() -> None:
    """Its streams are cancelled by the workers; the router must not count them for ever."""
    async with running() as (router, join):
        await join(D1)
        gateway = await join(None)
        await ask(gateway, route("r0"), route("r1"))
        assert router._load.streams == {D1.incarnation: 2}
        gateway.peer.close()
        await gateway.until(lambda: gateway.is_closed)
        again = await join(None)
        await again.until(lambda: router._load.streams == {})

        again.send(Progress("r0", 0, D1.incarnation, P1.incarnation, 40))
        await ask(again, route("probe"))
        assert router._load.streams == {D1.incarnation: 2, P1.incarnation: 1}
        assert router._load.queued == {P1.incarnation: 40}


async def test_prompts_go_where_their_beginning_went_and_a_salt_keeps_them_apart() -> None:
    """The second of two streams that begin alike finds the first's worker, if the load allows; another salt's does not."""
    async with running() as (_, join):
        for info in (D1, D2):
            await join(msgspec.structs.replace(info, kv_blocks_free=100))
        gateway = await join(None)
        tokens = list(range(200))
        mine, other = (prefix_marks(tokens, 16, salt) for salt in ("mine", "other"))
        (first,) = await ask(gateway, route("r0", 200, marks=mine))
        assert first.decode.worker_id == "decode-a"
        (same, apart) = await ask(
            gateway, route("r1", 200, marks=mine[: 10 * MARK_BYTES]), route("r2", 200, marks=other)
        )

        assert same.decode.worker_id == "decode-a"
        assert apart.decode.worker_id == "decode-b"


async def test_a_full_cluster_turns_new_streams_away_for_as_long_as_it_measures() -> None:
    """Each that is turned away is told a later time; one that was moved is taken all the same."""
    async with running("decode.max_streams=1", "decode.max_queue=1") as (_, join):
        await join(D1)
        gateway = await join(None)
        answers = await ask(gateway, *(route(f"r{i}", is_new=True) for i in range(5)))
        assert [bool(a.decode) for a in answers] == [True, True, False, False, False]
        assert {a.reason for a in answers[2:]} == {NO_ROOM}
        waits = [a.retry_after_s for a in answers[2:]]
        assert waits[0] >= 1 and waits[0] < waits[1] < waits[2] < 60

        (moved,) = await ask(gateway, route("moved", epoch=1))
        assert moved.decode == D1
        gateway.send(Progress("moved", 1))
        gateway.send(Progress("r0", 0))
        (fits,) = await ask(gateway, route("fits", is_new=True))
        assert fits.decode == D1


async def test_a_suspect_runs_alone_on_a_worker_that_is_kept_for_it() -> None:
    """Nobody else is sent to that worker; it waits until the worker has run dry; then the worker serves all again."""
    async with running() as (_, join):
        for info in (D1, D2, P1, R1):
            await join(info)
        gateway = await join(None)
        await ask(gateway, route("r0"), route("r1"))
        suspect = route("suspect", epoch=2, alone=True)
        (waits,) = await ask(gateway, suspect)
        assert (waits.decode, waits.reason) == (None, NO_PROBATION)
        others = await ask(gateway, *(route(f"s{i}") for i in range(4)))
        assert {a.decode.worker_id for a in others} == {"decode-b"}
        gateway.send(Progress("r0", 0))
        (alone,) = await ask(gateway, suspect)
        assert picked(alone) == ("decode-a", "", "", "probation")
        (second,) = await ask(gateway, route("another", epoch=2, alone=True))
        assert second.reason == NO_PROBATION
        (other,) = await ask(gateway, route("s9"))
        assert other.decode.worker_id == "decode-b"
        gateway.send(Progress("suspect", 2))
        (free,) = await ask(gateway, route("t"))
        assert free.decode.worker_id == "decode-a"


async def test_the_routers_own_figures_reach_control() -> None:
    """Routes by what came of them, and workers that were lost: those that said they leave are not."""
    async with running() as (_, join):
        control = await join(worker("control", "c", 50))
        gateway = await join(None)
        await ask(gateway, route("r0"))
        first, second = await join(D1), await join(D2)
        await ask(gateway, route("r1"))
        second.send(Register(msgspec.structs.replace(D2, state="draining")))
        await gateway.until(lambda: any(w.state == "draining" for w in gateway.workers))
        for member in (first, second):
            assert member.peer is not None
            member.peer.close()
        await gateway.until(lambda: len(gateway.workers) == 1)
        control.snapshots.clear()
        await control.until(lambda: control.snapshots)

        told = control.snapshots[-1]
        assert told.worker.role == "router" and told.worker.worker_id == "router"
        text = told.metrics.decode()
        assert 'paceline_workers_lost_total{kind="decode"} 1.0' in text
        assert 'paceline_routes_total{outcome="no_worker"} 1.0' in text
        assert 'paceline_routes_total{outcome="local"} 1.0' in text


async def test_a_quarantined_request_is_turned_away_by_every_gateway_s_router() -> None:
    """One gateway tells, and others get the answer as well."""
    async with running() as (_, join):
        await join(D1)
        one, two = await join(None), await join(None)
        one.send(Quarantine((b"d" * 16,)))
        await ask(one, route("probe"))
        refused, served = await ask(two, route("r", digest=b"d" * 16), route("s", digest=b"e" * 16))

        assert (refused.decode, refused.reason) == (None, QUARANTINED)
        assert served.decode == D1


async def test_a_key_s_requests_are_counted_over_all_gateways_and_a_dead_one_s_places_are_free() -> None:
    """Over real connections, whatever the requests are called at each gateway."""
    limits = Limits(0, 100, 2)
    async with running() as (_, join):
        one, two = [
            await join(msgspec.structs.replace(D1, worker_id=f"gateway-{n}", role="gateway", incarnation=n))
            for n in (101, 102)
        ]
        one.send(Admit("door-1", "k", limits, 60))
        await one.until(lambda: one.admitted)
        two.send(Admit("door-1", "k", limits, 50))
        two.send(Admit("door-2", "k", limits, 40))
        two.send(Admit("door-3", "other", limits, 100))
        two.send(Admit("door-4", "k", limits, 0))
        await two.until(lambda: len(two.admitted) == 4)
        assert [a.standing.exceeded for a in two.admitted] == ["tokens", "", "", "concurrency"]
        one.send(Settle("door-1", "k", 10))
        one.send(Admit("door-2", "k", limits, 50))
        await one.until(lambda: len(one.admitted) == 2)
        assert [(a.standing.exceeded, a.standing.remaining_tokens) for a in one.admitted] == [
            ("", 40),
            ("", 0),
        ]
        one.peer.close()
        await one.until(lambda: one.is_closed)
        two.send(Settle("door-2", "k", 0))
        two.send(Admit("door-5", "k", limits, 40))
        two.send(Admit("door-6", "k", limits, 0))
        two.send(Admit("door-7", "k", limits, 0))
        await two.until(lambda: len(two.admitted) == 7)

        assert [a.standing.exceeded for a in two.admitted[4:]] == ["", "", "concurrency"]


def test_load_adds_up_to_nothing_whatever_the_gateways_say() -> None:
    """Repeated, reordered and unknown messages: after the ends of all attempts nothing is left."""
    rng = random.Random(1)
    load = Load()
    keys = [(gateway, f"r{i}", epoch) for gateway in (1, 2) for i in range(4) for epoch in (0, 1)]
    for now in range(300):
        gateway, name, epoch = rng.choice(keys)
        ends = rng.random() < 0.3
        busy = (0, 0, 0) if ends else (rng.choice((10, 11)), rng.choice((0, 20)), rng.randrange(100))
        load.put(gateway, Progress(name, epoch, *busy), now)
        assert all(num > 0 for num in load.streams.values())
    for gateway, name, epoch in keys[:8]:
        load.put(gateway, Progress(name, epoch), 300)
    load.drop_gateway(2)

    assert load.streams == {} == load.queued


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


async def test_the_end_of_an_old_connection_leaves_a_gateway_s_streams_counted() -> None:
    """One that came back before its old connection's end was seen has said what it runs already."""
    async with running() as (router, join):
        await join(D1)
        old, new = await join(None), await join(None)
        await ask(new, route("r0"))
        old.peer.close()
        await old.until(lambda: old.is_closed)
        await ask(new, route("r1"))

        assert router._load.streams == {D1.incarnation: 2}


async def test_a_message_the_router_has_no_use_for_closes_the_connection() -> None:
    """A peer that mistakes the router for a worker is told by the close."""
    async with running() as (_, join):
        confused = await join(None)
        confused.send(Cancel("r", 0))

        await confused.until(lambda: confused.is_closed)
