"""A learning loop over a real registry, and what a cluster around it would say -> what tests of the loop start from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.cluster.config import ClusterConfig, load_config
from paceline.cluster.learning.loop import LearningLoop
from paceline.cluster.learning.routing import version_for
from paceline.cluster.metrics import Metrics
from paceline.cluster.registry.registry import Registry
from paceline.cluster.types import (
    Directory,
    DraftPlan,
    DraftRef,
    DraftStatus,
    Role,
    Served,
    ServedStream,
    Snapshot,
    TrainerStatus,
    TrainOrder,
    TrainState,
    WorkerInfo,
)

SETTINGS = (
    "learning.enabled=true",
    "learning.train.min_requests=30",
    "learning.gate.min_requests=20",
    "learning.rollout.canary_share=0.3",
    "learning.rollout.canary_min_requests=40",
    "learning.rollout.watch_s=60",
    "learning.rollout.backoff_s=100",
    "learning.min_return=0",
)
NEW = DraftRef("aaaaaaaaaaaa", "/drafts/aaaaaaaaaaaa", "ab" * 32)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def info(role: Role, version: str = "") -> WorkerInfo:
    return WorkerInfo(f"{role}-a", role, 1, "h", 1, 1, "n", "ready", version)


class World:
    """A loop, and what the cluster around it would say: one draft worker that does as it is told, one trainer."""

    def __init__(self, folder: Path, clock: Clock, *settings: str) -> None:
        self.folder, self.clock = folder, clock
        extra = (f"learning.storage={folder}/learning",)
        self.config: ClusterConfig = load_config(None, [*SETTINGS, *extra, *settings])
        self.rng = np.random.default_rng(0)
        self.metrics = Metrics()
        self.held: list[str] = []
        self.refused: tuple[tuple[str, str], ...] = ()
        self.num = 0
        self.has_trainer = True
        self.loop = self._make()

    def _make(self) -> LearningLoop:
        registry = Registry(f"sqlite:///{self.folder}/registry.db", self.folder, wait_s=0.2)
        return LearningLoop(self.config, registry, clock=self.clock)

    async def begin(self) -> None:
        self.loop.start()
        await self.until(lambda: self.loop.rollout is not None)
        self.held = [self.loop.base]
        self.loop.on_directory(
            Directory(1, (info("decode", self.loop.target), info("draft"), info("trainer")))
        )
        self.turn()

    async def restart(self, *, cleanly: bool = True) -> None:
        """Control dies, and another one begins with what the registry has."""
        await self.loop.keeper.settled()
        if cleanly:
            await self.end()
        self.loop = self._make()
        held = self.held
        await self.begin()
        self.held = held
        self.turn()

    async def end(self) -> None:
        await self.loop.close()
        self.loop.registry.close()

    @staticmethod
    async def until(condition: Callable[[], object]) -> None:
        for _ in range(500):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not happen")

    @property
    def plan(self) -> DraftPlan:
        plan = self.loop.draft_plan
        assert plan is not None
        return plan

    @property
    def order(self) -> TrainOrder:
        plan = self.loop.trainer_plan
        assert plan is not None and plan.order is not None, self.loop.view().status
        return plan.order

    def turn(self, seconds: float = 1.0, captured: int = 0) -> None:
        """A second passes: everybody says what is."""
        self.clock.now += seconds
        self.metrics.capture_requests.inc(captured)
        self.metrics.step_seconds.observe(0.5)
        self.metrics.step_cost.labels(1).set(0.001)
        plan = self.loop.draft_plan
        if plan is not None:
            refused = {version for version, _ in self.refused}
            self.held = [ref.version for ref in plan.resident if ref.version not in refused]
            live, revision = plan.live, plan.revision
            self.loop.on_draft_status(
                DraftStatus(
                    "draft-a", revision, plan.target, tuple(self.held), live, plan.canary, self.refused
                )
            )
        if self.has_trainer and (order := self.loop.runs.order) is None:
            self.loop.on_trainer_status(TrainerStatus("trainer-a", 1))
        elif self.has_trainer and order is not None:
            self.trainer("training" if order.kind == "train" else "scoring", step=1)
        self.loop.tick(
            [
                Snapshot(info("gateway"), b""),
                Snapshot(info("decode", self.loop.target), self.metrics.text()),
            ]
        )

    def trainer(self, state: TrainState, **how: Any) -> None:
        """The trainer says this of the run that is on."""
        how.setdefault("cpu_s", 5.0)
        order = self.order
        self.loop.on_trainer_status(TrainerStatus("trainer-a", 1, order.run_id, state, num_steps=20, **how))

    def serve(
        self, num: int, level: dict[str, float], *, acceptance: float = 0.5, domain: str = "law"
    ) -> None:
        """Streams that end, ten a second, as the plan in force has them drafted for."""
        for at in range(1, num + 1):
            self.num += 1
            request_id = f"req-{self.num}"
            version = version_for(self.plan, request_id, "t", domain)
            steps = int(self.rng.integers(5, 40))
            tokens = max(steps, round(steps * max(1.05, level[version] * (1 + self.rng.normal(0, 0.1)))))
            hits = int(self.rng.binomial(steps, acceptance))
            self.loop.on_served(
                Served(
                    "decode-a",
                    (
                        ServedStream(
                            request_id,
                            "t",
                            domain,
                            version,
                            tokens,
                            steps,
                            (steps,),
                            (hits,),
                            0.01 * tokens,
                            0.02,
                        ),
                    ),
                )
            )
            self.clock.now += 0.1
            if at % 10 == 0 or at == num:
                self.turn(0.0)

    def gate(self, *, passed: bool, saving: float = 0.1, num: int = 50) -> None:
        """The scoring that is on ends with this report."""
        assert self.order.kind == "score"
        report = {
            "passed": passed,
            "reason": "as the test says",
            "num_requests": num,
            "saving": {"mean": saving, "lo": saving - 0.02, "hi": saving + 0.02},
        }
        self.trainer("done", report=json.dumps(report).encode())


Begin = Callable[..., Awaitable[World]]


async def trained(world: World, report: bytes = b'{"lineage": {"requests_by_tenant": {"t": 40}}}') -> str:
    """Traffic until a run is on, which ends with a candidate -> the base of all."""
    base = world.loop.base
    world.serve(40, {base: 2.0})
    world.turn(captured=40)
    world.turn()
    assert world.order.kind == "train"
    world.trainer("training", step=10, loss=1.5)
    world.trainer("done", step=20, loss=1.2, result=NEW, report=report)
    return base
