"""Control with a scripted loop over a real registry -> what tests of the admin API start from."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI

from paceline.cluster.control import Control
from paceline.cluster.learning.config import LearningConfig
from paceline.cluster.learning.drift import Drift
from paceline.cluster.learning.figures import Figures
from paceline.cluster.learning.guard import Guard
from paceline.cluster.learning.keeper import Keeper
from paceline.cluster.learning.loop import LearningLoop
from paceline.cluster.learning.views import (
    Action,
    Alarm,
    LaneView,
    Result,
    RunView,
    StatusView,
    VersionView,
    View,
)
from paceline.cluster.registry.records import GateRecord, LedgerEntry, Run, Source, Version
from paceline.cluster.registry.registry import Registry
from paceline.cluster.types import Directory, ServedStream, Snapshot, WorkerInfo

KEY = "pla_" + "k" * 40
LOCAL = "http://localhost:8001"


class ScriptedLoop(LearningLoop):
    """Answers actions as it is told to, and shows real figures, guard and drift."""

    def __init__(self, config: LearningConfig, registry: Registry) -> None:
        self.registry = registry
        self.keeper = Keeper(registry)
        self.figures = Figures()
        self.guard = Guard(config.guard, max_streams=8)
        self.drift = Drift()
        self.learning = config
        self.clock = time.time
        self.rollout = None
        self.cycle = SimpleNamespace(state=lambda now: (self.state, ""))  # type: ignore[assignment]
        self.calls: list[tuple[str, str, str, dict[str, Any] | None]] = []
        self.result = Result(True, "done")
        self.delay_s = 0.0
        self.lanes = [LaneView("", "v1", 5.0, "loop", "v0", "steady", "", 5.0, False, 0.0, 0, True, None, "")]
        self.runs: list[RunView] = []
        self.alarms: dict[str, Alarm] = {}
        self.marks: list[dict[str, Any]] = []
        self.state = "waiting"

    @property
    def draft_plan(self) -> None:
        return None

    @property
    def trainer_plan(self) -> None:
        return None

    def on_directory(self, directory: Directory) -> None:
        return

    def configure(self, config: LearningConfig) -> None:
        self.learning = config

    def view(self) -> View:
        now = time.time()
        return View(
            is_enabled=True,
            status=StatusView(self.state, "waits for 12 more requests", "v1", "", 7, "t1", 488, False),
            lanes=self.lanes,
            versions=[VersionView("v1", "live", "v0", "", 1.0, "", "", ["draft-a"], {})],
            runs=self.runs,
            figures=self.figures.view(now),
            ledger={},
            guard=self.guard.view(now),
            drift=self.drift.view(),
            speculation={"on": True, "reason": "it pays", "num_on": 1, "num_workers": 1},
            trainer=None,
            workers=[
                {
                    "worker_id": "draft-a",
                    "revision": 7,
                    "live": "v1",
                    "canary": "",
                    "resident": ["v1", "v0"],
                    "refused": {"v9": "NaN"},
                    "swap_ms": 1.5,
                }
            ],
            alarms=list(self.alarms.values()),
            marks=self.marks,
        )

    def series(self, *, since: float, step_s: float, tag: str = "") -> dict[str, Any]:
        return self.figures.series(since=since, step_s=step_s)

    async def act(
        self, action: Action, subject: str, actor: str, arguments: dict[str, Any] | None = None
    ) -> Result:
        self.calls.append((action, subject, actor, arguments))
        await asyncio.sleep(self.delay_s)
        return self.result


def served(version: str = "v1", domain: str = "code", num: int = 1) -> list[ServedStream]:
    """Streams of 10 tokens in 5 steps, of which 6 places of 8 were accepted."""
    return [ServedStream(f"r{i}", "acme", domain, version, 10, 5, (5, 3), (4, 2), 1.0) for i in range(num)]


WORKERS = (
    WorkerInfo("decode-a", "decode", 2**62, "127.0.0.1", 1, 42, "node", "ready", "t1", 6, 4, 3),
    WorkerInfo("draft-a", "draft", 5, "127.0.0.1", 1, 43, "node", "ready", "v1"),
)


def fill(registry: Registry) -> None:
    """Two versions, a run with its loss, a gate report, a ledger entry, a decision."""
    interval = {"mean": 0.05, "lo": 0.02, "hi": 0.08}
    registry.add_version(Version("v0", state="retired", target="t1", created=1.0))
    registry.add_version(
        Version("v1", "mem://v1", "ab" * 32, "v0", "run1", "", "t1", "live", 2.0),
        parents=["v0"],
        sources=[Source("acme", "req1", "shard1", 100, 1.5), Source("acme", "req2", "shard1", 50, 1.7)],
    )
    registry.put_run(
        Run("run1", trigger="drift", base="v0", state="done", created=1.5, started=1.6, ended=1.9, steps=2,
            num_steps=2, tokens=100, seconds=0.3, loss=((1, 2.0), (2, None), (3, 1.5)), result="v1")
    )  # fmt: skip
    report = {
        "saving": interval, "num_requests": 100, "num_tokens": 900, "min_saving": 0.01, "domain_floor": -0.02,
        "max_slowdown": 1.02, "slowdown": None, "champion_acceptance": 0.5, "candidate_acceptance": 0.6,
        "champion_tokens_per_step": 2.0, "candidate_tokens_per_step": 2.2,
        "domains": [{"domain": "code", "num_requests": 100, "saving": interval, "passed": True}],
    }  # fmt: skip
    registry.put_gate(GateRecord("run2", "v0", "v1", True, "saves 5 %", 1.95, report))
    registry.add_ledger(LedgerEntry("train", "drift", 1.5, "run1", "v1", "", 100.0, 20.0, 30.0, 25.0))
    registry.add_ledger(LedgerEntry("skip", "would not pay", 3.0, predicted_s=1.0, predicted_cost_s=9.0))


@contextlib.asynccontextmanager
async def client_of(
    app: FastAPI, *, base: str = LOCAL, address: str = "127.0.0.1", **headers: str
) -> AsyncIterator[httpx.AsyncClient]:
    """A client at an address."""
    transport = httpx.ASGITransport(app, client=(address, 1000))
    async with httpx.AsyncClient(transport=transport, base_url=base, headers=headers) as client:
        yield client


def push(control: Control, info: WorkerInfo, metrics: bytes = b"") -> None:
    """A worker's snapshot."""
    control.on_message(None, Snapshot(info, metrics))  # type: ignore[arg-type]


def wrong_key() -> str:
    return "pla_" + secrets.token_urlsafe(32)
