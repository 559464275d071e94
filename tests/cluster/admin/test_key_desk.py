"""API keys on the operator's desk: made, changed and revoked by the API, told to gateways, and every change audited."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
import structlog.testing
from fastapi import FastAPI

from paceline.cluster import wire
from paceline.cluster.admin.app import build_admin_app
from paceline.cluster.admin.key import hash_key
from paceline.cluster.control import Control
from paceline.cluster.gateway.known_keys import KnownKeys
from paceline.cluster.keys import Key, KeyFile
from paceline.cluster.rates import Limits
from paceline.cluster.registry.registry import Registry
from paceline.cluster.types import KeySet, Message, Snapshot, WorkerInfo
from scripted_admin import KEY, LOCAL, client_of

API = "/admin/api"
KEYS = f"{API}/keys"
SESSION = f"{API}/session"
GATEWAY = WorkerInfo("gateway-a", "gateway", 9, "127.0.0.1", 1, 44, "node", "ready")


@pytest.fixture
def store(tmp_path: Path) -> KeyFile:
    """The file that Control watches, as a command sees it."""
    return KeyFile(tmp_path / "keys.json", recheck_s=0.0)


async def rows(operator: httpx.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await operator.get(f"{API}/audit")).json()["items"]
    return [row for row in found if row["action"].startswith("key_")]


async def made(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post(KEYS, json={"name": "ci", **body})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def code_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


# --- what operators do ------------------------------------------------------------------------------------


async def test_a_key_is_made_shown_once_changed_and_revoked(
    browser: httpx.AsyncClient, operator: httpx.AsyncClient, store: KeyFile
) -> None:
    """By a browser's session as by the admin key; each change is a row that names who, and no row has the key."""
    with structlog.testing.capture_logs() as logged:
        created = await made(browser, tenant="acme", capture="asked", requests_per_minute=60, concurrency=4)
        secret, id = created["secret"], created["key"]["id"]
        changed = await operator.patch(f"{KEYS}/{id}", json={"tokens_per_minute": 9000, "capture": "never"})
        listed = (await browser.get(KEYS)).json()
        before = store.find(secret)
        revoked = await browser.delete(f"{KEYS}/{id}")

    assert isinstance(before, Key) and before.owner == "acme"
    assert before.limits == Limits(60, 9000, 4), "what is not given stays"
    assert changed.json()["limits"] == {
        "requests_per_minute": 60,
        "tokens_per_minute": 9000,
        "concurrency": 4,
    }
    assert listed["keys"] == [changed.json()] and listed["trouble"] == ""
    assert revoked.json()["revoked"] >= revoked.json()["created"] > 1e9
    assert store.find(secret) is None
    audited = await rows(operator)
    assert [(row["action"], row["subject"], row["ok"]) for row in audited] == [
        ("key_revoke", id, True),
        ("key_change", id, True),
        ("key_create", id, True),
    ]
    assert [row["who"].partition(":")[0] for row in audited] == ["session", "key", "session"]
    assert all(row["address"] == "127.0.0.1" for row in audited)
    assert "tokens_per_minute=9000" in audited[1]["detail"] and "tenant=acme" in audited[2]["detail"]
    half = secret[16:]
    everything = [str(audited), str(logged), str(listed), store.path.read_text(), revoked.text, changed.text]
    assert not any(half in text for text in everything)


async def test_commands_are_audited_too_also_those_before_control_began(
    make_control: Callable[..., Control], store: KeyFile, registry: Registry
) -> None:
    """Each once, over Control's restarts: the file carries them until they are copied."""
    first, _ = store.create("before")
    seen: list[tuple[str, str]] = []
    for turn in range(2):
        app = build_admin_app(make_control(), hash_key(KEY))
        async with client_of(app, authorization=f"Bearer {KEY}") as operator:
            await operator.get(KEYS)
            await asyncio.sleep(0.05)
            store.revoke(first.id) if turn == 0 else store.create("after")
            await operator.get(KEYS)
            await asyncio.sleep(0.05)
            seen = [(row["action"], row["who"].partition(":")[0]) for row in await rows(operator)]

    assert seen == [("key_create", "cli"), ("key_revoke", "cli"), ("key_create", "cli")]


async def test_what_is_wrong_is_refused_and_named(operator: httpx.AsyncClient, store: KeyFile) -> None:
    """And is a row as well, where it was more than a slip of the pen."""
    for body, field in (
        ({"name": ""}, "name"),
        ({"name": "x" * 81}, "name"),
        ({"name": "x", "scope": "root"}, "scope"),
        ({"name": "x", "capture": "always"}, "capture"),
        ({"name": "x", "requests_per_minute": -1}, "requests_per_minute"),
        ({"name": "x", "concurrency": 1.5}, "concurrency"),
        ({"name": "x", "concurrency": 10**12}, "concurrency"),
        ({"name": "x", "sha256": "0" * 64}, "sha256"),
        ({}, "name"),
    ):
        answer = await operator.post(KEYS, json=body)
        assert answer.status_code == 422, body
        assert answer.json()["error"]["field"] == field
    for name in ("a\nb", "a\u2028b", "a\x1b[31mb"):
        refused = await operator.post(KEYS, json={"name": name})
        assert refused.status_code == 422 and "one line" in refused.json()["error"]["message"]
    for method in ("PATCH", "DELETE"):
        body = {"json": {"concurrency": 1}} if method == "PATCH" else {}
        unknown = await operator.request(method, f"{KEYS}/nope", **body)  # type: ignore[arg-type]
        assert unknown.status_code == 404 and code_of(unknown) == "not_found"

    assert not store.path.exists()
    assert [row["ok"] for row in await rows(operator)] == [False] * 5


async def test_a_file_that_cannot_be_written_is_a_409_and_one_that_is_damaged_is_shown(
    operator: httpx.AsyncClient, store: KeyFile
) -> None:
    """A Secret is mounted read-only: the answer says what to do instead."""
    store.create("ci")
    store.path.write_bytes(b"{")
    listed = (await operator.get(KEYS)).json()
    refused = await operator.post(KEYS, json={"name": "x"})

    assert "cannot be read" in listed["trouble"]
    assert refused.status_code == 409 and code_of(refused) == "key_file"
    assert "gateway.keys_file" in refused.json()["error"]["action"]


async def test_the_page_says_whether_keys_are_asked_for_and_what_holds_by_default(
    make_control: Callable[..., Control],
) -> None:
    for settings, asked in (([], False), (["gateway.auth=keys", "limits.concurrency=3"], True)):
        app = build_admin_app(make_control(*settings, learning=False), hash_key(KEY))
        async with client_of(app, authorization=f"Bearer {KEY}") as operator:
            found = (await operator.get(KEYS)).json()
        assert found["asked"] is asked
        assert found["defaults"]["concurrency"] == (3 if asked else 0)


# --- scopes -----------------------------------------------------------------------------------------------


async def test_a_key_of_scope_admin_opens_control_until_it_is_revoked(
    app: FastAPI, operator: httpx.AsyncClient, control: Control, store: KeyFile
) -> None:
    """By itself and by the sessions it opened; the trail names it."""
    created = await made(operator, name="alice", scope="admin")
    secret, id = created["secret"], created["key"]["id"]
    async with (
        client_of(app, authorization=f"Bearer {secret}") as program,
        client_of(app, origin=LOCAL) as browser,
    ):
        signed_in = await browser.post(SESSION, json={"key": secret})
        browser.headers["x-csrf-token"] = signed_in.json()["csrf"]
        other = await made(program, name="by alice")
        assert (await browser.get(KEYS)).status_code == 200
        store.revoke(id)
        assert control.keys is not None
        control.keys.look()  # as it does by itself, twice a second
        for client in (program, browser):
            assert (await client.get(KEYS)).status_code == 401
            assert (await client.delete(f"{KEYS}/{other['key']['id']}")).status_code == 401
        assert (await operator.get(KEYS)).status_code == 200

    assert (
        next(row for row in await rows(operator) if row["subject"] == other["key"]["id"])["who"]
        == f"key:{id}"
    )


async def test_a_key_of_scope_user_opens_nothing_here(
    app: FastAPI, operator: httpx.AsyncClient, stranger: httpx.AsyncClient
) -> None:
    """It says so, and counts as no guess at the admin key."""
    secret = (await made(operator))["secret"]
    async with client_of(app, authorization=f"Bearer {secret}") as user:
        for _ in range(20):
            refused = await user.get(f"{API}/overview")
            assert refused.status_code == 403 and code_of(refused) == "wrong_scope"
    refused = await stranger.post(SESSION, json={"key": secret})
    assert refused.status_code == 403 and "set-cookie" not in refused.headers


async def test_without_an_admin_key_one_of_scope_admin_is_enough(
    make_control: Callable[..., Control], store: KeyFile
) -> None:
    """And while there is neither, nobody is told that a key is wrong."""
    app = build_admin_app(make_control(learning=False), b"")
    async with client_of(app) as client:
        closed = await client.get(KEYS, headers={"authorization": f"Bearer {KEY}"})
        _, text = store.create("alice", scope="admin")
        opened = await client.get(KEYS, headers={"authorization": f"Bearer {text}"})
        wrong = await client.get(KEYS, headers={"authorization": f"Bearer {KEY}"})

    assert (closed.status_code, opened.status_code, wrong.status_code) == (503, 200, 401)


# --- gateways ---------------------------------------------------------------------------------------------


class FakePeer:
    """A gateway's connection, as far as Control looks at it."""

    identity = wire.Identity("gateway-a", 9)
    is_open = True

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=KeySet))


async def test_gateways_hear_of_every_change_within_a_second(
    make_control: Callable[..., Control], store: KeyFile, tmp_path: Path
) -> None:
    """Measured at a gateway that has no file of its own; one that comes later is told at once."""
    control = make_control(learning=False)
    control.start()
    try:
        first, late = FakePeer(), FakePeer()
        gateway = KnownKeys(KeyFile(tmp_path / "elsewhere.json", recheck_s=0.0))
        await asyncio.sleep(0.01)
        control.on_message(cast(wire.Peer, first), Snapshot(GATEWAY, b""))
        key, text = store.create("ci")

        async def until(is_known: bool) -> float:
            began = asyncio.get_running_loop().time()
            async with asyncio.timeout(5):
                while (gateway.find(text) is not None) is not is_known:
                    await asyncio.sleep(0.005)
                    for message in first.sent:
                        assert isinstance(message, KeySet)
                        gateway.tell(message.keys)
            return asyncio.get_running_loop().time() - began

        gateway.tell(b"[]")
        assert await until(True) < 1.0
        store.revoke(key.id)
        assert await until(False) < 1.0
        control.on_message(cast(wire.Peer, late), Snapshot(GATEWAY, b""))
        control.on_message(cast(wire.Peer, late), Snapshot(GATEWAY, b""))
        assert len(late.sent) == 1
        control.on_peer_lost(cast(wire.Peer, late))
    finally:
        await control.close()

    told = late.sent[0]
    assert isinstance(told, KeySet) and text[16:].encode() not in told.keys
    assert msgspec.json.decode(told.keys, type=list[Key])[0].revoked
