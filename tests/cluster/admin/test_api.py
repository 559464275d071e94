"""Each endpoint over a real registry on SQLite: what is shown, what actions do, what is refused and why."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, get_args

import httpx
import pytest
import structlog.testing
from fastapi import FastAPI

from paceline.cluster.admin.app import build_admin_app
from paceline.cluster.admin.key import hash_key
from paceline.cluster.control import Control
from paceline.cluster.errors import Unavailable
from paceline.cluster.learning.config import TrainConfig
from paceline.cluster.learning.views import Alarm, LaneView, Result, RunView
from paceline.cluster.registry.records import AuditRow, Deletion, FigurePoint, LedgerEntry, Run, Version
from paceline.cluster.registry.registry import Registry
from paceline.cluster.types import Snapshot
from scripted_admin import KEY, WORKERS, ScriptedLoop, client_of, push, served

API = "/admin/api"


async def get(client: httpx.AsyncClient, path: str, **params: Any) -> Any:
    answer = await client.get(f"{API}/{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def act(client: httpx.AsyncClient, name: str, **body: Any) -> httpx.Response:
    return await client.post(f"{API}/actions/{name}", json=body)


def fails(loop: ScriptedLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the registry cannot be reached."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise Unavailable("registry sqlite: disk I/O error")

    for name in ("_reading", "_writing"):
        monkeypatch.setattr(loop.registry, name, refuse)


# --- what is shown ----------------------------------------------------------------------------------------


async def test_the_overview_says_what_is_live_and_what_the_loop_waits_for(
    operator: httpx.AsyncClient, loop: ScriptedLoop, control: Control
) -> None:
    """Figures of the last minute and hour, the alarms with a hint, what starts the next run, and the run that is on."""
    loop.figures.add(served(num=6), time.time())
    loop.alarms = {name: Alarm(name, 5.0, "does not answer") for name in ("registry", "trainer")}
    loop.runs = [RunView("r1", "train", "training", "", "v1", "", 1.0, 0.0, "drift", 50, 200, 1.5,
                         [(1, 2.0)], 3.0, 100.0, {}, "")]  # fmt: skip

    found = await get(operator, "overview")

    assert found["model"] == "some-model" and found["learning"]["state"] == "waiting"
    assert found["live"] == {"version": "v1", "since": 5.0, "by": "loop", "pinned": False}
    assert found["acceptance"] == {"now": 0.75, "hour": 0.75}
    assert found["tokens_per_step"]["now"] == 2.0 and found["tokens_per_s"]["now"] == 1.0
    assert found["num_streams"] == 3 and found["canary"] is None and found["routes"] == []
    assert [alarm["severity"] for alarm in found["alarms"]] == ["critical", "warning"]
    assert all(alarm["hint"] for alarm in found["alarms"])
    (trigger,) = found["triggers"]
    assert (trigger["now"], trigger["fires_at"]) == (488, control.config.learning.train.min_requests)
    assert found["run"]["eta_s"] == pytest.approx(300.0) and found["run"]["state"] == "training"


async def test_the_overview_shows_canary_and_routes(operator: httpx.AsyncClient, loop: ScriptedLoop) -> None:
    """A lane of its own is a route; one that gets everybody's version is none."""
    saving = {"mean": 0.04, "lo": -0.01, "hi": 0.09}
    test = {"num_requests": 120, "num_drafted": 7, "is_weak": True, "saving": saving}
    loop.lanes = [
        LaneView("", "v1", 5.0, "ops", "v0", "canary", "v2", 9.0, True, 0.0, 0, True, test, ""),
        LaneView("domain:code", "v3", 5.0, "loop", "", "steady", "", 9.0, False, 0.0, 0, True, None, ""),
        LaneView("tenant:acme", "v1", 5.0, "loop", "", "steady", "", 9.0, False, 0.0, 0, False, None, ""),
    ]

    found = await get(operator, "overview")

    assert found["live"] == {"version": "v1", "since": 5.0, "by": "ops", "pinned": True}
    assert found["canary"]["version"] == "v2" and found["canary"]["saving"] == saving
    assert found["canary"]["num_requests"] == 120 and found["canary"]["share"] == 0.05
    assert found["canary"]["num_drafted"] == 7 and found["canary"]["is_weak"]
    assert found["routes"] == [{"tag": "domain:code", "version": "v3"}]


async def test_workers_come_with_their_blocks_drafts_and_age(
    operator: httpx.AsyncClient, control: Control
) -> None:
    """The directory says who exists; a snapshot says how they are; numbers that JavaScript would round are text."""
    push(control, WORKERS[0].__class__(**{**dict.fromkeys(()), **_fields(WORKERS[0]), "kv_blocks_used": 9}))

    decode, draft = await get(operator, "workers")

    assert (decode["id"], decode["incarnation"], decode["kv_blocks_used"]) == ("decode-a", str(2**62), 9)
    assert decode["draft"] is None and abs(decode["seen"] - time.time()) < 5 and draft["seen"] == 0
    assert draft["draft"] == {
        "live": "v1", "canary": "", "resident": ["v1", "v0"], "is_current": True, "swap_ms": 1.5,
        "refused": [{"version": "v9", "reason": "NaN"}],
    }  # fmt: skip


def _fields(info: Any) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__struct_fields__}


async def test_versions_are_found_by_state_and_word_and_paged(
    operator: httpx.AsyncClient, registry: Registry
) -> None:
    """Newest first, each version once."""
    for number in range(5):
        registry.add_version(Version(f"x{number}", state="rejected", created=10.0 + number, reason="slower"))

    first = await get(operator, "versions", state="rejected", limit=3)
    rest = await get(operator, "versions", state="rejected", limit=3, cursor=first["next"])

    assert [v["version"] for v in first["items"] + rest["items"]] == ["x4", "x3", "x2", "x1", "x0"]
    assert first["total"] == 5 and rest["next"] is None
    assert {v["version"] for v in (await get(operator, "versions", q="SLOWER"))["items"]} == {
        f"x{i}" for i in range(5)
    }
    (live,) = (await get(operator, "versions", state="live"))["items"]
    assert live["gate"] == {"passed": True, "saving": {"mean": 0.05, "lo": 0.02, "hi": 0.08}}
    assert live["parent"] == "v0" and live["run_id"] == "run1"


async def test_a_version_tells_its_whole_life(
    operator: httpx.AsyncClient, registry: Registry, loop: ScriptedLoop
) -> None:
    """What it was trained on, the gate's report, each state with who and why, and how it serves."""
    loop.figures.add(served("v1", num=3), time.time())
    registry.roll_back(reason="worse", actor="ops")

    found = await get(operator, "versions/v1")

    assert found["trained_on"] == [{"tenant": "acme", "num_requests": 2, "num_tokens": 150}]
    assert (found["num_shards"], found["data_from"], found["data_to"]) == (1, 1.5, 1.7)
    assert found["report"] == await get(operator, "reports/v1")
    assert found["report"]["domains"][0]["passed"] and found["report"]["slowdown"] is None
    assert [(h["state"], h["who"], h["reason"]) for h in found["history"]] == [
        ("rolled_back", "ops", "worse")
    ]
    assert (found["acceptance"], found["num_requests"], found["state"]) == (0.75, 3, "rolled_back")
    nodes = (await get(operator, "lineage"))["nodes"]
    assert [(n["version"], n["parent"], n["saving"]) for n in nodes] == [("v0", "", None), ("v1", "v0", 0.05)]


async def test_runs_show_their_loss_without_what_is_no_number(
    operator: httpx.AsyncClient, registry: Registry
) -> None:
    """And no more points than a chart has pixels, the last one among them."""
    registry.put_run(
        Run(
            "long",
            state="pending",
            created=9.0,
            loss=tuple((i, 1.0 / (i + 1)) for i in range(5000)),
            settings={
                "order": '{"target":"t1","train":{"loss":"tv"}}',
                "family": "run1",
                "kind": "train",
                "candidate": "",
            },
        )
    )

    page = await get(operator, "runs")
    run, long = await get(operator, "runs/run1"), await get(operator, "runs/long")

    assert [item["run_id"] for item in page["items"]] == ["long", "run1"]
    assert [point["step"] for point in run["loss_curve"]] == [1, 3] and run["loss"] == 1.5
    assert run["ledger"]["spent_s"] == 25.0 and run["why"] == "drift"
    assert long["settings"] == {"target": "t1", "train": {"loss": "tv"}, "family": "run1"}
    assert len(long["loss_curve"]) <= 600 and long["loss_curve"][-1]["step"] == 4999
    assert long["state"] == "pending" and long["ledger"] is None
    assert [r["run_id"] for r in (await get(operator, "runs", state="pending"))["items"]] == ["long"]
    assert [r["run_id"] for r in (await get(operator, "runs", state="done"))["items"]] == ["run1"]


async def test_the_ledger_shows_losses_too(operator: httpx.AsyncClient, registry: Registry) -> None:
    """Realised less spent, and what was not done, with the sum behind it."""
    registry.add_ledger(LedgerEntry("train", "asked", 2.5, "run9", "v0", "", 50.0, None, -5.0, 40.0))

    found = await get(operator, "ledger")

    assert [row["run_id"] for row in found["runs"]] == ["run9", "run1"]
    assert [row["still_serving"] for row in found["runs"]] == [False, True]
    assert found["total"] == {
        "predicted_s": 150.0,
        "realised_s": 25.0,
        "spent_s": 65.0,
        "net_s": -40.0,
        "num_runs": 2,
    }
    (decision,) = found["decisions"]
    assert decision["what"] == "do_not_train" and decision["reason"] == "would not pay"
    assert (decision["expected_saving_s"], decision["expected_cost_s"], decision["until"]) == (1.0, 9.0, None)


async def test_figures_join_what_is_in_memory_and_what_the_registry_has(
    operator: httpx.AsyncClient, loop: ScriptedLoop, registry: Registry
) -> None:
    """A restart of control loses no chart, and nothing is counted twice."""
    now = time.time()
    loop.figures.add(served("v1", num=2), now)
    registry.add_figures(
        [
            FigurePoint(now - 1800, 10.0, "v0", "code", 3, 30, 15, 3.0, (15, 9), (12, 6)),
            FigurePoint(now + 5, 10.0, "v1", "code", 99, 990, 495, 99.0, (1,), (1,)),  # of now: memory has it
        ]
    )

    found = await get(operator, "figures", window_s=3600)
    series = {s["version"]: s["points"] for s in found["series"]}

    assert (
        found["step_s"] == 10
        and found["to"] - found["from"] == pytest.approx(3600)
        and found["domains"] == ["code"]
    )
    assert [p["num_requests"] for p in series["v0"]] == [3] and [p["num_requests"] for p in series["v1"]] == [
        2
    ]
    assert series["v0"][0]["num_tested"] == 24 and series["v0"][0]["num_accepted"] == 18
    depths = {(d["version"], d["depth"]): (d["num_tested"], d["num_accepted"]) for d in found["depths"]}
    assert depths == {("v0", 1): (15, 12), ("v0", 2): (9, 6), ("v1", 1): (10, 8), ("v1", 2): (6, 4)}
    only = await get(operator, "figures", window_s=60, version="v1", domain="code")
    assert [s["version"] for s in only["series"]] == ["v1"]
    assert (await get(operator, "figures", window_s=60, domain="prose"))["series"] == []


async def test_guard_and_drift_are_shown_with_their_limits(
    operator: httpx.AsyncClient, loop: ScriptedLoop
) -> None:
    """What fires at which value, and where it is now."""
    now = time.time()
    gateway = WORKERS[0].__class__("gateway-a", "gateway", 1, "", 0, 1, "node", "ready")
    loop.guard.observe([Snapshot(gateway, b""), Snapshot(WORKERS[0], b"")], now)
    loop.drift.add(served(num=60), now)

    guard, drift = await get(operator, "guard"), await get(operator, "drift")

    assert guard["now"]["level"] == "normal" and guard["history"][0]["to"] == "normal"
    assert guard["history"][0]["from"] == "pause"
    readings = {r["name"]: r for r in guard["readings"]}
    assert readings["kv_use"]["now"] == 0.6 and readings["kv_use"]["limit"] == 0.9
    assert [d["domain"] for d in drift] == ["code"] and drift[0]["short"] == pytest.approx(0.75, abs=0.01)


async def test_capture_says_what_is_kept_and_what_was_refused(
    operator: httpx.AsyncClient, control: Control, registry: Registry
) -> None:
    """Counters of gateways and decode workers together, deletions, whose default is what."""
    push(control, WORKERS[0], b'paceline_capture_requests_total 4.0\n'
         b'paceline_capture_dropped_requests_total{reason="full"} 1.0\n'
         b'paceline_capture_dropped_requests_total{reason="redacted"} 2.0\n')  # fmt: skip
    push(control, WORKERS[1], b'# HELP x y\npaceline_capture_consent_total{outcome="kept"} 8.0\n'
         b'paceline_capture_consent_total{outcome="request"} 3.0\n'
         b'paceline_capture_consent_total{outcome="tenant"} 2.0\n')  # fmt: skip
    registry.put_deletion(Deletion("d1", 4.0, "ops", "tenant:acme", "done", 7, ("v1",)))

    found = await get(operator, "capture")

    assert found["enabled"] and found["reason"] == "" and found["num_requests"] == 0
    assert found["counters"] == {
        "num_seen": 13, "num_kept": 4, "num_opted_out": 3, "num_no_consent": 2, "num_dropped": 1,
        "num_redacted": 2, "num_expired": 0, "num_deleted": 7,
    }  # fmt: skip
    assert found["deletions"][0]["versions"] == ["v1"] and found["deletions"][0]["who"] == "ops"
    assert [(t["tenant"], t["default_consent"]) for t in found["tenants"]] == [("local", True)]


@pytest.mark.parametrize(
    "path", ["versions/none", "reports/v0", "runs/none", "versions/..", "versions/%00", "runs/" + "x" * 200]
)
async def test_what_is_not_there_is_a_404_that_says_so(operator: httpx.AsyncClient, path: str) -> None:
    """In the shape of all errors, with what to do."""
    answer = await operator.get(f"{API}/{path}")

    assert answer.status_code in (404, 422), answer.text
    assert answer.json()["error"]["action"]


@pytest.mark.parametrize(
    "path, field",
    [("versions?state=good", "state"), ("versions?limit=0", "limit"), ("versions?limit=501", "limit"),
     ("versions?cursor=abc", "cursor"), ("runs?cursor=-1", "cursor"), ("audit?cursor=%F0", "cursor"),
     ("figures?window_s=nan", "window_s"), ("figures?window_s=1e300", "window_s"), ("audit?since=-1", "since"),
     ("versions?q=" + "x" * 300, "q"), ("versions?sate=live", "sate"), ("overview?x", "x"), ("session?x=1", "x")],
)  # fmt: skip
async def test_a_bad_question_is_a_422_that_names_the_field(
    operator: httpx.AsyncClient, path: str, field: str
) -> None:
    """Before anything is asked of the registry."""
    answer = await operator.get(f"{API}/{path}")

    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["field"].startswith(field)


# --- where something is missing ---------------------------------------------------------------------------


async def test_with_learning_off_workers_and_metrics_are_shown_and_the_rest_is_empty(
    make_control: Callable[..., Control],
) -> None:
    """Every page loads; what would change something says why it cannot; who tried is remembered."""
    app = build_admin_app(make_control(learning=False), hash_key(KEY))
    async with client_of(app, authorization=f"Bearer {KEY}") as client:
        overview = await get(client, "overview")
        assert overview["learning"]["state"] == "off" and "learning.enabled" in overview["learning"]["reason"]
        assert overview["live"]["version"] == "v1" and overview["num_streams"] == 3
        assert [w["id"] for w in await get(client, "workers")] == ["decode-a", "draft-a"]
        for path in ("versions", "runs"):
            assert await get(client, path) == {"items": [], "total": 0, "next": None}
        assert (await get(client, "lineage")) == {"nodes": []} and (await get(client, "drift")) == []
        assert (await get(client, "ledger"))["runs"] == [] and (await get(client, "figures"))["series"] == []
        assert (await get(client, "guard"))["readings"] == []
        assert not (await get(client, "capture"))["enabled"]
        assert not any(setting["editable"] for setting in await get(client, "settings"))
        for path in ("versions/v1", "reports/v1", "runs/run1"):
            assert (await client.get(f"{API}/{path}")).status_code == 404
        answer = await act(client, "train")
        assert answer.status_code == 409 and answer.json()["error"]["code"] == "learning_off"
        change = await client.patch(f"{API}/settings", json={"values": {"learning.gate.min_saving": 0.02}})
        assert change.status_code == 409
        rows = (await get(client, "audit"))["items"]
        assert [(row["action"], row["ok"]) for row in rows] == [("settings", False), ("train", False)]
        assert rows[0]["id"] > rows[1]["id"] and (await get(client, "audit", action="train"))["total"] == 1


async def test_without_the_registry_what_is_in_memory_is_still_shown(
    operator: httpx.AsyncClient, loop: ScriptedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists are a 503 that says so; actions go on, and their rows are written once the registry is back."""
    with monkeypatch.context() as broken:
        fails(loop, broken)
        for path in ("overview", "workers", "guard", "drift", "figures"):
            assert (await operator.get(f"{API}/{path}")).status_code == 200, path
        for path in ("versions", "runs", "ledger", "audit", "lineage", "versions/v1", "settings", "capture"):
            answer = await operator.get(f"{API}/{path}")
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "unavailable", path
            assert int(answer.headers["retry-after"]) > 0
        assert (await act(operator, "roll_back", confirm="everything")).status_code == 200
        assert (await act(operator, "pause")).status_code == 200
    rows = (await get(operator, "audit"))["items"]

    assert [row["action"] for row in rows] == ["pause", "roll_back"]
    assert [call[0] for call in loop.calls] == ["roll_back", "pause"]


# --- actions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, body, subject",
    [
        ("train", {}, ""), ("train", {"tag": "domain:code"}, "domain:code"), ("pause", {}, ""), ("resume", {}, ""),
        ("canary", {"version": "v1"}, "v1"), ("promote", {"version": "v1", "tag": "tenant:a@b"}, "v1@tenant:a@b"),
        ("promote", {"version": "v0", "force": True, "confirm": "v0"}, "v0"),
        ("pin", {}, ""), ("unpin", {"tag": "tenant:a"}, "tenant:a"),
        ("roll_back", {"confirm": "everything"}, ""), ("roll_back", {"tag": "tenant:a", "confirm": "tenant:a"}, "tenant:a"),
        ("revoke", {"version": "v1", "confirm": "v1"}, "v1"), ("delete", {"tenant": "acme", "confirm": "tenant:acme"}, "tenant:acme"),
        ("delete", {"request_id": "r/1", "confirm": "request:r/1"}, "request:r/1"),
    ],
)  # fmt: skip
async def test_each_action_reaches_the_loop_once_and_is_audited(
    browser: httpx.AsyncClient, loop: ScriptedLoop, name: str, body: dict[str, Any], subject: str
) -> None:
    """As the loop wants it, with the operator's reason, and the row says who, from where, what and what came of it."""
    answer = await act(browser, name, **body, reason="because")

    assert answer.status_code == 200, answer.text
    assert answer.json() == {"message": "done", "id": body.get("version", "")}
    ((action, on, actor, arguments),) = loop.calls
    assert (action, on) == (name, subject) and actor.startswith("session:")
    assert arguments == {"force": bool(body.get("force")), "reason": "because"}
    row = (await get(browser, "audit"))["items"][0]
    assert (row["who"], row["action"], row["subject"], row["ok"]) == (actor, name, subject, True)
    assert row["address"] == "127.0.0.1" and "because" in row["detail"]


@pytest.mark.parametrize(
    "name, body, status, field",
    [
        ("roll_back", {}, 422, "confirm"), ("roll_back", {"confirm": ""}, 422, "confirm"),
        ("roll_back", {"tag": "tenant:a", "confirm": "everything"}, 422, "confirm"),
        ("revoke", {"version": "v1"}, 422, "confirm"), ("revoke", {"version": "v1", "confirm": "v0"}, 422, "confirm"),
        ("delete", {"tenant": "acme", "confirm": "acme"}, 422, "confirm"), ("forget", {"run_id": "run1"}, 422, "confirm"),
        ("promote", {"version": "v1", "force": True}, 422, "confirm"), ("promote", {}, 422, "version"),
        ("delete", {"confirm": "tenant:"}, 422, "tenant"),
        ("delete", {"tenant": "a", "request_id": "b", "confirm": "tenant:a"}, 422, "tenant"),
        ("promote", {"version": "none"}, 404, None), ("forget", {"run_id": "none", "confirm": "none"}, 404, None),
        ("train", {"version": "v1"}, 422, "version"), ("train", {"tag": "acme"}, 422, "tag"),
        ("train", {"tag": "tenant:"}, 422, "tag"), ("pause", {"tag": "tenant:a"}, 422, "tag"),
        ("train", {"nonsense": 1}, 422, "nonsense"), ("train", {"tag": "tenant:a\nb"}, 422, "tag"),
        ("explode", {}, 422, "name"),
    ],
)  # fmt: skip
async def test_what_is_not_right_is_refused_before_the_loop_hears_of_it(
    operator: httpx.AsyncClient,
    loop: ScriptedLoop,
    name: str,
    body: dict[str, Any],
    status: int,
    field: str | None,
) -> None:
    """Destructive ones repeat what they act upon, and that is checked."""
    answer = await act(operator, name, **body)

    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["field"] == field and loop.calls == []


async def test_a_refusal_of_the_loop_is_a_409_and_a_row(
    operator: httpx.AsyncClient, loop: ScriptedLoop
) -> None:
    """With its reason, in both; a refusal by the API itself is a row too."""
    loop.result = Result(False, "the gate refused it: domain code is worse")

    answer = await act(operator, "promote", version="v1")
    await act(operator, "revoke", version="v1")

    assert answer.status_code == 409 and "domain code is worse" in answer.json()["error"]["message"]
    rows = (await get(operator, "audit"))["items"]
    assert [(row["action"], row["ok"], row["subject"]) for row in rows] == [
        ("revoke", False, "v1"),
        ("promote", False, "v1"),
    ]
    assert "domain code is worse" in rows[1]["detail"] and rows[1]["who"].startswith("key:")


async def test_a_double_click_is_one_action(
    operator: httpx.AsyncClient, browser: httpx.AsyncClient, loop: ScriptedLoop
) -> None:
    """At once or shortly after, refused or not; another operator, or another tag, is no double click."""
    loop.delay_s = 0.05
    both = await asyncio.gather(act(operator, "train"), act(operator, "train"))
    again = await act(operator, "train")
    await act(operator, "train", tag="domain:code")
    await act(browser, "train")

    assert [a.status_code for a in (*both, again)] == [200, 200, 200]
    assert [(call[1], call[2].partition(":")[0]) for call in loop.calls] == [
        ("", "key"),
        ("domain:code", "key"),
        ("", "session"),
    ]
    assert (await get(operator, "audit", action="train"))["total"] == 3


async def test_who_goes_away_leaves_no_action_half_done(
    operator: httpx.AsyncClient, loop: ScriptedLoop
) -> None:
    """A closed laptop between the click and the answer."""
    loop.delay_s = 0.1
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.03):
            await act(operator, "pause")
    await asyncio.sleep(0.3)

    rows = (await get(operator, "audit"))["items"]
    assert len(loop.calls) == 1 and [(row["action"], row["ok"]) for row in rows] == [("pause", True)]


async def test_the_audit_trail_is_filtered_and_paged(operator: httpx.AsyncClient, registry: Registry) -> None:
    """By who, action, words and time; nothing is skipped or shown twice when rows come in between."""
    for number in range(7):
        registry.add_audit(AuditRow(100.0 + number, "ops" if number % 2 else "eve", "pin", f"v{number}"))

    first = await get(operator, "audit", limit=3)
    registry.add_audit(AuditRow(200.0, "ops", "pause"))
    rest = await get(operator, "audit", limit=10, cursor=first["next"])

    assert [row["subject"] for row in first["items"] + rest["items"]] == [f"v{n}" for n in reversed(range(7))]
    assert {row["who"] for row in (await get(operator, "audit", who="eve"))["items"]} == {"eve"}
    assert [row["subject"] for row in (await get(operator, "audit", q="V3"))["items"]] == ["v3"]
    found = await get(operator, "audit", since=102, until=104)
    assert [row["at"] for row in found["items"]] == [103.0, 102.0]


# --- settings ---------------------------------------------------------------------------------------------


async def test_settings_are_changed_kept_and_taken_back(
    operator: httpx.AsyncClient, loop: ScriptedLoop, control: Control
) -> None:
    """They count at once, they outlive control, and null is the configured value again."""
    before = {s["name"]: s for s in await get(operator, "settings")}
    name = "learning.gate.min_saving"
    assert before[name] | {"help": ""} == {
        "name": name, "section": "Gate", "label": "Min saving", "help": "", "kind": "number", "unit": "share",
        "value": 0.01, "configured": 0.01, "min": 0.0, "max": 1.0, "choices": [], "editable": True,
    }  # fmt: skip
    assert before["learning.train.loss"]["choices"] == list(
        get_args(TrainConfig.model_fields["loss"].annotation)
    )
    assert not before["learning.capture.ttl_h"]["editable"] and "learning.registry" not in before

    answer = await operator.patch(
        f"{API}/settings", json={"values": {name: 0.03, "learning.rollout.automatic": False}}
    )

    assert answer.status_code == 200
    after = {s["name"]: s for s in answer.json()}
    assert (after[name]["value"], after[name]["configured"]) == (0.03, 0.01)
    assert loop.learning.gate.min_saving == 0.03 and not loop.learning.rollout.automatic
    loop.learning = control.config.learning
    async with client_of(build_admin_app(control, hash_key(KEY)), authorization=f"Bearer {KEY}") as restarted:
        kept = {s["name"]: s for s in await get(restarted, "settings")}
        assert kept[name]["value"] == 0.03
        answer = await restarted.patch(f"{API}/settings", json={"values": {name: None}})
        assert {s["name"]: s["value"] for s in answer.json()}[name] == 0.01
        assert loop.learning.gate.min_saving == 0.01 and not loop.learning.rollout.automatic
    rows = (await get(operator, "audit", action="settings"))["items"]
    assert [row["subject"] for row in rows] == [name, "learning.rollout.automatic", name]
    assert "0.03" in rows[2]["detail"]


@pytest.mark.parametrize(
    "values, field",
    [
        ({"learning.gate.min_saving": 2.0}, "learning.gate.min_saving"),
        ({"learning.gate.min_saving": "0.02"}, "learning.gate.min_saving"),
        ({"learning.rollout.automatic": 1}, "learning.rollout.automatic"),
        ({"learning.gate.nonsense": 1}, "learning.gate.nonsense"),
        ({"learning.capture.ttl_h": 1.0}, "learning.capture.ttl_h"),
        ({"learning.registry": "sqlite:////tmp/x"}, "learning.registry"),
        ({"learning.train.loss": "mse"}, "learning.train.loss"),
        ({"learning.gate.max_requests": 50, "learning.gate.min_requests": 5}, "learning.gate.min_requests"),
    ],
)
async def test_settings_change_all_or_none(
    operator: httpx.AsyncClient, loop: ScriptedLoop, values: dict[str, Any], field: str
) -> None:
    """One wrong value among right ones changes nothing, is named, and is audited."""
    answer = await operator.patch(
        f"{API}/settings", json={"values": {"learning.gate.max_slowdown": 1.5, **values}}
    )

    assert answer.status_code == 422 and answer.json()["error"]["field"] == field, answer.text
    assert loop.learning.gate.max_slowdown == 1.02
    assert not any(s["value"] != s["configured"] for s in await get(operator, "settings"))
    assert not (await get(operator, "audit"))["items"][0]["ok"]


async def test_an_unexpected_failure_is_told_in_general_words(
    app: FastAPI, loop: ScriptedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback is the log's."""
    monkeypatch.setattr(loop, "view", lambda: 1 / 0)
    with structlog.testing.capture_logs() as logs:
        async with client_of(app, authorization=f"Bearer {KEY}") as client:
            answer = await client.get(f"{API}/overview")

    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert [entry["event"] for entry in logs] == ["admin_request_failed"]
    assert "division" not in answer.text and answer.headers["x-content-type-options"] == "nosniff"
