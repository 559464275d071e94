"""The admin API over the learning loop itself, its registry on SQLite and captured shards on disk: nothing scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cluster.admin.app import build_admin_app
from paceline.cluster.admin.key import hash_key
from paceline.cluster.config import load_config
from paceline.cluster.control import Control
from paceline.cluster.registry.records import Version
from paceline.cluster.types import Directory, DraftStatus, Served, WorkerInfo
from scripted_admin import KEY, client_of, push, served

API = "/admin/api"
OTHER = "0123456789ab"


class Peer:
    """A connection as far as control looks at it; what it was sent is kept."""

    is_open = True

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture
async def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Control]:
    """Control that has restored itself from an empty registry, with one decode and one draft worker."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    control = Control(load_config(None, ["learning.enabled=true", "control.port=8001"]))
    control.start()
    assert control.loop is not None
    async with asyncio.timeout(30):
        while control.loop.rollout is None:
            await asyncio.sleep(0.02)
    workers = (
        WorkerInfo("decode-a", "decode", 1, "", 0, 1, "node", "ready", control.loop.target),
        WorkerInfo("draft-a", "draft", 2, "", 0, 2, "node", "ready", control.loop.base),
    )
    control.on_directory(Directory(1, workers))
    yield control
    await control.close()


@pytest.fixture
async def operator(control: Control) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(build_admin_app(control, hash_key(KEY)), authorization=f"Bearer {KEY}") as client:
        yield client


def say(control: Control, peer: Peer) -> None:
    """The draft worker takes up the plan it was sent last."""
    assert control.loop is not None and control.loop.draft_plan is not None
    plan = control.loop.draft_plan
    resident = tuple(ref.version for ref in plan.resident)
    status = DraftStatus("draft-a", plan.revision, plan.target, resident, plan.live, plan.canary)
    control.on_message(peer, status)  # type: ignore[arg-type]


async def get(client: httpx.AsyncClient, path: str, **params: Any) -> Any:
    answer = await client.get(f"{API}/{path}", params=params)
    assert answer.status_code == 200, (path, answer.text)
    return answer.json()


async def settled(control: Control) -> None:
    """What was decided is written down."""
    assert control.loop is not None
    await asyncio.sleep(0.3)


async def test_every_page_of_a_fresh_cluster_loads(operator: httpx.AsyncClient, control: Control) -> None:
    """All values are of the kinds that were agreed on: pydantic refuses others."""
    push(control, control.workers()[0][0])
    control.on_message(Peer(), Served("decode-a", tuple(served(control.loop.base, num=30))))  # type: ignore
    assert control.loop is not None
    control.loop.tick(control.fresh())

    for path in ("overview", "workers", "drift", "guard", "figures", "capture", "versions", "lineage", "runs", "ledger",
                 "audit", "settings"):  # fmt: skip
        await get(operator, path)
    overview = await get(operator, "overview")
    assert overview["live"]["version"] == control.loop.base and overview["acceptance"]["now"] == 0.75


async def test_a_version_is_promoted_and_rolled_back_by_hand(
    operator: httpx.AsyncClient, control: Control
) -> None:
    """Plans follow, the registry and the audit trail say who did it, the overview shows it."""
    loop, peer = control.loop, Peer()
    assert loop is not None
    base = loop.base
    new = Version(OTHER, url="/nowhere", base=base, target=loop.target, created=time.time())
    loop.registry.add_version(new)
    loop.versions[OTHER] = new
    say(control, peer)

    answer = await operator.post(f"{API}/actions/promote", json={"version": OTHER, "reason": "looks good"})
    assert answer.status_code == 200, answer.text
    say(control, peer)
    await settled(control)
    live = (await get(operator, "overview"))["live"]
    assert live["version"] == OTHER and live["by"].startswith("key:")
    detail = await get(operator, f"versions/{OTHER}")
    assert detail["state"] == "live" and detail["parent"] == base

    answer = await operator.post(f"{API}/actions/roll_back", json={"confirm": "everything"})
    assert answer.status_code == 200, answer.text
    await settled(control)
    assert (await get(operator, "overview"))["live"]["version"] == base
    detail = await get(operator, f"versions/{OTHER}")
    assert detail["state"] == "rolled_back" and detail["history"][-1]["who"].startswith("key:")
    marks = [mark["kind"] for mark in (await get(operator, "figures"))["marks"]]
    assert "promote" in marks and "rollback" in marks
    rows = (await get(operator, "audit"))["items"]
    assert [(row["action"], row["ok"]) for row in rows] == [("roll_back", True), ("promote", True)]


async def test_buttons_do_what_they_say(operator: httpx.AsyncClient, control: Control) -> None:
    """Pause, resume, train, forget, pin, unpin, delete, each seen in what is shown afterwards; refusals say why."""

    async def press(name: str, **body: Any) -> httpx.Response:
        return await operator.post(f"{API}/actions/{name}", json=body)

    assert control.loop is not None
    base = control.loop.base
    assert (await press("pause")).status_code == 200
    assert (await get(operator, "overview"))["learning"]["is_paused"]
    assert (await press("resume")).status_code == 200
    assert not (await get(operator, "overview"))["learning"]["is_paused"]
    assert (await press("pin")).status_code == 200
    assert (await get(operator, "overview"))["live"]["pinned"]
    assert (await press("unpin")).status_code == 200
    assert (await press("train")).status_code == 200
    await settled(control)
    (run,) = (await get(operator, "runs"))["items"]
    assert (await get(operator, "overview"))["run"]["run_id"] == run["run_id"]
    assert (await press("train", tag="")).status_code == 409
    assert (await press("forget", run_id=run["run_id"], confirm=run["run_id"])).status_code == 200
    await settled(control)
    assert (await get(operator, f"runs/{run['run_id']}"))["state"] == "stopped"
    assert (await press("roll_back", confirm="everything")).status_code == 409
    assert (await press("revoke", version=base, confirm=base)).status_code == 409
    answer = await press("delete", tenant="acme", confirm="tenant:acme")
    assert answer.status_code == 200, answer.text
    async with asyncio.timeout(10):
        while (deletion := (await get(operator, "capture"))["deletions"][0])["state"] == "pending":
            await asyncio.sleep(0.05)
    assert (
        deletion["what"] == "tenant:acme"
        and deletion["state"] == "done"
        and deletion["who"].startswith("key:")
    )


async def test_settings_outlive_control(operator: httpx.AsyncClient, control: Control) -> None:
    """What an operator changed counts from the first moment of the next control, before anybody looks."""
    values = {"learning.gate.min_saving": 0.04, "learning.rollout.canary_share": 0.25}
    answer = await operator.patch(f"{API}/settings", json={"values": values})
    assert answer.status_code == 200, answer.text
    assert control.loop is not None and control.loop.learning.gate.min_saving == 0.04

    again = Control(control.config)
    again.start()
    try:
        assert again.loop is not None
        async with asyncio.timeout(30):
            while again.loop.rollout is None:
                await asyncio.sleep(0.02)
        assert again.loop.learning.gate.min_saving == 0.04
        assert again.loop.rollout.config.canary_share == 0.25
        async with client_of(build_admin_app(again, hash_key(KEY)), authorization=f"Bearer {KEY}") as client:
            shown = {s["name"]: s["value"] for s in await get(client, "settings")}
            assert shown["learning.gate.min_saving"] == 0.04
    finally:
        await again.close()
