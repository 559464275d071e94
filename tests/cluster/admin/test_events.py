"""The stream of events, by a real client over a real socket: state, changes, heartbeats, its end, its bounds."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import uvicorn

from paceline.cluster.admin import events as events_module
from paceline.cluster.admin.app import build_admin_app
from paceline.cluster.admin.desk_answers import Overview, Worker
from paceline.cluster.admin.key import hash_key
from paceline.cluster.control import Control
from paceline.cluster.gateway.listener import server_config
from paceline.cluster.registry.registry import Registry
from scripted_admin import KEY, ScriptedLoop, served

EVENTS = "/admin/api/events"
SESSION = "/admin/api/session"
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
async def url(control: Control, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A listener like Control's, whose seconds are short."""
    original = events_module.Feed.__init__

    def quick(self: events_module.Feed, *given: Any, **named: Any) -> None:
        original(self, *given, **named, period_s=0.05)

    monkeypatch.setattr(events_module.Feed, "__init__", quick)
    app = build_admin_app(control, hash_key(KEY))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(server_config(app, client_timeout_s=5.0))
        task = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.should_exit = server.force_exit = True
        await task


@dataclass
class Event:
    id: str
    kind: str
    data: Any


class Stream:
    """Events one after the other; comments are counted."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.num_comments = 0

    async def next(self, *kinds: str) -> Event:
        """The next event of these kinds, or any."""
        async with asyncio.timeout(10):
            while True:
                fields: dict[str, str] = {}
                async for line in self._lines:
                    if not line:
                        break
                    name, _, value = line.partition(":")
                    fields[name] = value.strip()
                else:
                    raise EOFError
                if "data" not in fields:
                    self.num_comments += 1
                elif not kinds or fields["event"] in kinds:
                    return Event(fields["id"], fields["event"], json.loads(fields["data"]))


@contextlib.asynccontextmanager
async def stream_of(client: httpx.AsyncClient, **headers: str) -> AsyncIterator[Stream]:
    async with client.stream("GET", EVENTS, headers=headers, timeout=20) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert (
            response.headers["cache-control"] == "no-store" and "x-content-type-options" in response.headers
        )
        yield Stream(response)


async def test_who_connects_gets_the_state_at_once_and_then_each_second(url: str, loop: ScriptedLoop) -> None:
    """One whole overview and all workers, as the endpoints give them."""
    async with httpx.AsyncClient(base_url=url, headers=BEARER) as client, stream_of(client) as stream:
        first, second = await stream.next(), await stream.next()
        assert (first.kind, second.kind) == ("overview", "workers")
        Overview.model_validate(first.data)
        assert [Worker.model_validate(item).id for item in second.data] == ["decode-a", "draft-a"]
        loop.state = "training"
        async with asyncio.timeout(5):
            while (await stream.next("overview")).data["learning"]["state"] != "training":
                continue


async def test_streams_that_ended_come_as_differences(url: str, loop: ScriptedLoop) -> None:
    """What was before is in the figures' endpoint; nothing comes twice, and nothing in between is lost."""
    loop.figures.add(served("v1", num=5), time.time())
    async with httpx.AsyncClient(base_url=url, headers=BEARER) as client, stream_of(client) as stream:
        await stream.next("overview")
        await stream.next("overview")
        total = 0
        for num in (1, 2):
            loop.figures.add(served("v1", "code", num), time.time())
            delta = (await stream.next("figures")).data
            (point,) = delta["points"]
            total += point["num_requests"]
            assert point["num_tokens"] == 10 * point["num_requests"] and point["domain"] == "code"
            assert [(d["depth"], d["num_tested"]) for d in delta["depths"]] == [(1, 5 * num), (2, 3 * num)]
        assert total == 3
        loop.marks = [
            {"at": time.time() + 1, "kind": "swap", "version": "v1", "tag": "", "text": "v1 drafts now"}
        ]
        assert (await stream.next("figures")).data["marks"][0]["kind"] == "swap"


async def test_what_changed_is_named_once(url: str, loop: ScriptedLoop) -> None:
    """The page loads that again: an action changes the audit trail, a version's state the versions."""
    async with httpx.AsyncClient(base_url=url, headers=BEARER) as client, stream_of(client) as stream:
        await stream.next("overview")
        await stream.next("overview")
        await client.post("/admin/api/actions/pause", json={})
        assert (await stream.next("changed")).data == {"what": ["audit"]}
        loop.lanes = []
        assert (await stream.next("changed")).data == {"what": ["versions"]}
        await client.patch("/admin/api/settings", json={"values": {"learning.gate.min_saving": 0.5}})
        found: set[str] = set()
        while found != {"audit", "settings"}:
            found |= set((await stream.next("changed")).data["what"])


async def test_a_change_is_told_when_the_registry_has_it(url: str, loop: ScriptedLoop) -> None:
    """Lists come from the registry: who loads one on hearing of a change finds it there, however slow the registry is."""
    gate = threading.Event()
    first = loop.registry.versions().items[0]

    def write(registry: Registry) -> None:
        gate.wait(5)
        registry.move(first.version, "revoked", reason="a test")

    loop.keeper.start()
    async with httpx.AsyncClient(base_url=url, headers=BEARER) as client, stream_of(client) as stream:
        await stream.next("overview")
        await stream.next("overview")
        loop.lanes = []
        loop.keeper.put("version", write)
        for _ in range(6):  # seconds, of the feed's
            assert (await stream.next("overview", "changed")).kind == "overview"
        gate.set()
        assert (await stream.next("changed")).data == {"what": ["versions"]}
        (found,) = (await client.get("/admin/api/versions", params={"state": "revoked"})).json()["items"]
    assert found["version"] == first.version
    await loop.keeper.close()


async def test_changes_that_never_end_are_told_all_the_same(url: str, loop: ScriptedLoop) -> None:
    """A registry that is always a write behind: each change is told when it is there, not when there is none behind it."""
    loop.keeper.start()
    is_over = False

    async def change() -> None:
        while not is_over:
            loop.lanes = [replace(loop.lanes[0], since=loop.lanes[0].since + 1)]
            loop.keeper.put("slow", lambda registry: time.sleep(0.03))
            loop.keeper.put("slow", lambda registry: time.sleep(0.03))
            await asyncio.sleep(0.05)

    task = asyncio.create_task(change())
    async with httpx.AsyncClient(base_url=url, headers=BEARER) as client, stream_of(client) as stream:
        for _ in range(3):
            assert "versions" in (await stream.next("changed")).data["what"]
    is_over = True
    await task
    await loop.keeper.close()


async def test_a_stream_ends_with_its_session(url: str) -> None:
    """Signed out in another tab: it says so and closes. Without a session there is none."""
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.get(EVENTS)).status_code == 401
        token = (await client.post(SESSION, json={"key": KEY})).json()["csrf"]
        async with stream_of(client) as stream:
            await stream.next("workers")
            answer = await client.delete(SESSION, headers={"origin": url, "x-csrf-token": token})
            assert answer.status_code == 204
            assert (await stream.next("signed_out")).data == {}
            with pytest.raises(EOFError):
                await stream.next()


async def test_who_comes_back_goes_on_where_it_was(url: str, loop: ScriptedLoop) -> None:
    """Last-Event-ID: what was missed meanwhile comes first; who was away while nobody looked loads all again."""
    async with httpx.AsyncClient(base_url=url, headers=BEARER) as client, stream_of(client) as other:
        async with stream_of(client) as stream:
            loop.figures.add(served("v1"), time.time())
            last = await stream.next("figures")
        loop.figures.add(served("v2", num=4), time.time())
        await other.next("figures")
        await other.next("figures")
        async with stream_of(client, **{"last-event-id": last.id}) as again:
            missed = await again.next()
            assert missed.kind == "figures" and missed.data["points"][0]["version"] == "v2"
    for unknown in (last.id, "otherprocess-5", "x", "-", "9" * 70):
        async with (
            httpx.AsyncClient(base_url=url, headers=BEARER) as client,
            stream_of(client, **{"last-event-id": unknown}) as stream,
        ):
            first = await stream.next()
            assert first.kind == "changed" and len(first.data["what"]) == 9, unknown


async def test_quiet_streams_have_heartbeats(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies close what says nothing, and a dead client is found by writing to it."""
    monkeypatch.setattr(events_module, "_HEARTBEAT_S", 0.01)
    async with httpx.AsyncClient(base_url=url, headers=BEARER) as client, stream_of(client) as stream:
        for _ in range(4):
            await stream.next("overview")
        assert stream.num_comments > 0


async def test_there_are_only_so_many_streams_and_each_leaves_its_place(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser that opens one a second does not fill Control's memory."""
    monkeypatch.setattr(events_module, "_MAX_CLIENTS", 2)
    async with httpx.AsyncClient(base_url=url, headers=BEARER) as client:
        async with stream_of(client), stream_of(client):
            answer = await client.get(EVENTS)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "too_many_streams"
        async with asyncio.timeout(5):
            while True:
                async with client.stream("GET", EVENTS) as response:
                    if response.status_code == 200:
                        break
                await asyncio.sleep(0.05)


async def test_a_slow_client_is_sent_the_newest_state_not_all_of_it() -> None:
    """What waits for it is bounded; if it missed changes it is told to load everything."""
    client = events_module._Client(None)
    for number in range(1000):
        client.put(events_module._Event(number, "overview", b""))
    assert [event.number for event in client.take()] == [999]
    for number in range(100):
        client.put(events_module._Event(number, "figures", b""))
    assert len(client.waiting) <= 64 and client.is_behind


async def test_a_failing_second_does_not_end_the_stream(
    url: str, loop: ScriptedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry or a defect may be the reason: the next second may be better."""
    async with httpx.AsyncClient(base_url=url, headers=BEARER) as client, stream_of(client) as stream:
        await stream.next("overview")
        monkeypatch.setattr(events_module.log, "exception", lambda *_: None, raising=False)
        with monkeypatch.context() as broken:
            broken.setattr(loop, "view", lambda: 1 / 0)
            await asyncio.sleep(0.2)
        loop.state = "frozen"
        async with asyncio.timeout(5):
            while (await stream.next("overview")).data["learning"]["state"] != "frozen":
                continue
