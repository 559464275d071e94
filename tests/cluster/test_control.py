"""Snapshots and directories -> the operator's status and metrics, without the workers that stopped pushing."""

import itertools
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster import control as control_module
from paceline.cluster import wire
from paceline.cluster.config import load_config
from paceline.cluster.control import Control, build_control_app
from paceline.cluster.metrics import Metrics
from paceline.cluster.types import Directory, Ping, Role, Snapshot, WorkerInfo


class Clock:
    """Stands in for the `time` module where control reads it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class FakePeer:
    """A connection as far as control looks at it."""

    def __init__(self, worker: WorkerInfo) -> None:
        self.identity = wire.Identity(worker.worker_id, worker.incarnation)


def worker(role: Role, name: str, incarnation: int, **how: Any) -> WorkerInfo:
    how.setdefault("state", "ready")
    return WorkerInfo(f"{role}-{name}", role, incarnation, "127.0.0.1", 1, 42, "node", **how)


DECODE = worker("decode", "a", 2**62, version="abc", kv_blocks_used=1, kv_blocks_free=9, num_streams=1)
DRAFT = worker("draft", "a", 5)


def peer(info: WorkerInfo) -> wire.Peer:
    return cast(wire.Peer, FakePeer(info))


def push(control: Control, info: WorkerInfo, num_steps: int = 1) -> None:
    metrics = Metrics(info.role)
    metrics.steps.inc(num_steps)
    control.on_message(peer(info), Snapshot(info, metrics.text()))


def steps(text: str) -> dict[tuple[str, str], float]:
    """Engine steps by role and worker."""
    return {
        (sample.labels["role"], sample.labels["worker"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "paceline_engine_steps_total"
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that moves when a test says so."""
    clock = Clock()
    monkeypatch.setattr(control_module, "time", clock)
    return clock


@pytest.fixture
def control(clock: Clock) -> Control:
    """A control part that has heard of nobody."""
    return Control(load_config(None, ["model.name=some-model"]))


@pytest.fixture
async def client(control: Control) -> AsyncIterator[httpx.AsyncClient]:
    """An operator."""
    transport = httpx.ASGITransport(build_control_app(control))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def test_health_answers_before_any_worker_is_known(client: httpx.AsyncClient) -> None:
    """The listener is up as soon as it listens; an empty cluster is a legal answer everywhere."""
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert steps((await client.get("/metrics")).text) == {}
    status = (await client.get("/admin/api/status")).json()
    assert (status["model"], status["revision"], status["workers"]) == ("some-model", 0, [])
    assert status["learning"]["state"] == "off" and "learning is off" in status["learning"]["reason"]


async def test_status_lists_the_directory_with_the_freshest_figures(
    client: httpx.AsyncClient, control: Control
) -> None:
    """Who exists is the directory's word; blocks and streams are the worker's own, if it pushed them."""
    control.on_directory(Directory(7, (DECODE, DRAFT)))
    push(control, msgspec.structs.replace(DECODE, kv_blocks_used=6, kv_blocks_free=4, num_streams=3))
    push(control, worker("prefill", "unlisted", 8))

    status = (await client.get("/admin/api/status")).json()

    assert (status["model"], status["revision"]) == ("some-model", 7)
    assert [w["id"] for w in status["workers"]] == ["decode-a", "draft-a"]
    assert status["workers"][0] == {
        "role": "decode",
        "id": "decode-a",
        "pid": 42,
        "node": "node",
        "state": "ready",
        "incarnation": str(2**62),  # a string: JavaScript would round the number
        "version": "abc",
        "kv_blocks_used": 6,
        "kv_blocks_free": 4,
        "streams": 3,
    }
    assert control.status() == status


async def test_figures_of_an_earlier_life_are_not_shown(client: httpx.AsyncClient, control: Control) -> None:
    """A snapshot counts for the incarnation that pushed it only."""
    push(control, msgspec.structs.replace(DECODE, incarnation=1, num_streams=99))
    control.on_directory(Directory(1, (DECODE,)))

    (entry,) = (await client.get("/admin/api/status")).json()["workers"]

    assert (entry["streams"], entry["incarnation"]) == (1, str(2**62))


async def test_metrics_of_all_workers_come_as_one_text(client: httpx.AsyncClient, control: Control) -> None:
    """Each worker's latest push, under its role and name, in the type that Prometheus asks for."""
    push(control, DECODE, num_steps=1)
    push(control, DECODE, num_steps=4)
    push(control, DRAFT, num_steps=2)

    answer = await client.get("/metrics")

    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert steps(answer.text) == {("decode", "decode-a"): 4, ("draft", "draft-a"): 2}


async def test_a_worker_that_stopped_pushing_vanishes(
    client: httpx.AsyncClient, control: Control, clock: Clock
) -> None:
    """After five seconds of silence its metrics are gone and its directory entry is the router's again."""
    control.on_directory(Directory(1, (DECODE, DRAFT)))
    push(control, msgspec.structs.replace(DECODE, num_streams=3))
    clock.now += 3
    push(control, DRAFT)
    clock.now += 2.5

    assert steps((await client.get("/metrics")).text) == {("draft", "draft-a"): 1}
    assert (await client.get("/admin/api/status")).json()["workers"][0]["streams"] == 1
    push(control, DECODE)
    assert len(steps((await client.get("/metrics")).text)) == 2


async def test_a_worker_whose_connection_closed_vanishes_at_once(
    client: httpx.AsyncClient, control: Control
) -> None:
    """No need to wait for staleness when the socket says that it is gone."""
    push(control, DECODE)
    push(control, DRAFT)
    control.on_peer_lost(peer(DECODE))

    assert steps((await client.get("/metrics")).text) == {("draft", "draft-a"): 1}


async def test_the_end_of_an_old_life_leaves_the_new_one_s_figures(
    client: httpx.AsyncClient, control: Control
) -> None:
    """A restarted worker that pushed already is not hidden by its old connection's late close."""
    old = msgspec.structs.replace(DECODE, incarnation=1)
    push(control, old)
    push(control, DECODE, num_steps=3)
    control.on_peer_lost(peer(old))

    assert steps((await client.get("/metrics")).text) == {("decode", "decode-a"): 3}


def workers(text: str) -> dict[tuple[str, str], float]:
    """Processes by role and state, as Prometheus sees them."""
    return {
        (sample.labels["kind"], sample.labels["state"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "paceline_workers"
    }


async def test_figures_of_this_process_are_among_them(
    client: httpx.AsyncClient, control: Control, clock: Clock
) -> None:
    """Who is there, by what was pushed lately: a role with nobody left is a zero that an alert can see."""
    control.describe(worker("control", "c", 9))
    push(control, DECODE)
    push(control, worker("decode", "b", 6, state="starting"))
    text = (await client.get("/metrics")).text
    found = workers(text)
    assert (found["decode", "ready"], found["decode", "starting"], found["draft", "ready"]) == (1, 1, 0)
    assert found["control", "ready"] == 1 and 'role="control",worker="control-c"' in text
    assert 'paceline_roles_wanted{role="control",worker="control-c",kind="trainer"} 0.0' in text

    clock.now += 6

    assert workers((await client.get("/metrics")).text)["decode", "ready"] == 0


async def test_other_messages_are_ignored(client: httpx.AsyncClient, control: Control) -> None:
    """Control serves nobody: what is no snapshot changes nothing."""
    control.on_message(peer(DECODE), Ping())

    assert steps((await client.get("/metrics")).text) == {}


def test_control_describes_itself_as_ready_and_keeps_the_rest(control: Control) -> None:
    """Its directory entry says who it is and where it listens."""
    bare = worker("control", "c", 3, state="starting")

    assert control.describe(bare) == msgspec.structs.replace(bare, state="ready")
    assert b"paceline_" in control.metrics_text()


def test_metrics_can_be_read_while_workers_push(control: Control) -> None:
    """/metrics runs in a thread of its own: a new worker's push in the middle of it is no error."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            names = itertools.count()
            control.on_message(peer(DECODE), Snapshot(DECODE, b""))
            reader = pool.submit(lambda: [len(control.fresh()) for _ in range(300)])
            while not reader.done():
                info = worker("decode", str(next(names) % 3000), 1)
                control.on_message(peer(info), Snapshot(info, b""))
    finally:
        sys.setswitchinterval(interval)

    counts = reader.result()
    assert counts == sorted(counts) and counts[-1] >= 1
