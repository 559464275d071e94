"""A real Control with its learning loop, registry, storage and listener; what workers say to it comes from a script.

The script answers plans as workers do: it loads what is to be resident, works on the trainer's order, and ends streams
whose acceptance depends on the version that a plan gives them. Time is real; there is no model, no Ray and no GPU.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import msgspec
import uvicorn

from paceline.cluster import wire
from paceline.cluster.admin.key import hash_key
from paceline.cluster.config import load_config
from paceline.cluster.control import Control, build_control_app
from paceline.cluster.keys import KeyFile
from paceline.cluster.learning.routing import version_for
from paceline.cluster.types import (
    Directory,
    DraftPlan,
    DraftRef,
    DraftStatus,
    KeySet,
    Message,
    Role,
    Served,
    ServedStream,
    Snapshot,
    TrainerPlan,
    TrainerStatus,
    WorkerInfo,
)

T = TypeVar("T")
KEY = "pla_" + "d" * 40
TARGET = "0123456789ab"
_STEP_S = 0.1
_DEPTH = 4
_NUM_STEPS = 20
"""Of a run: two seconds."""
_DOMAINS = ("chat", "code", "")


class ScriptedPeer:
    """The far end of Control's connection to one worker: keeps the last plan it was sent."""

    is_open = True

    def __init__(self, worker_id: str) -> None:
        self.identity = wire.Identity(worker_id, 1)
        self.plan: DraftPlan | TrainerPlan | None = None

    def send(self, message: Message) -> None:
        if not isinstance(message, KeySet):  # of which gateways are told
            assert isinstance(message, DraftPlan | TrainerPlan)
            self.plan = message


class ScriptedCluster:
    """Control on a port of its own, in a thread with its own event loop; the tests' thread only reads and asks."""

    def __init__(self, home: Path, *settings: str, learning: bool = True) -> None:
        self.config = load_config(
            None,
            [
                f"learning.enabled={str(learning).lower()}",
                f"learning.storage={home}/learning",
                f"learning.registry=sqlite:///{home}/registry.db",
                "learning.rollout.canary_share=0.3",
                "learning.rollout.canary_min_requests=60",
                "learning.rollout.backoff_s=1",
                "learning.rollout.watch_s=1",
                "learning.train_automatically=false",
                *settings,
            ],
        )
        self.control = Control(self.config, keys=KeyFile(home / "keys.json", recheck_s=0.0))
        self.url = ""
        self.skill: dict[str, float] = {}
        """True acceptance by version; others have 0.4."""
        self.next_skill = 0.75
        """Of the version that the next run makes."""
        self.refuses: dict[str, str] = {}
        """By version, why the draft worker will not serve it."""
        self.trainer_waits = False
        """A run goes no further."""
        self.trainer_is_gone = False
        """It says nothing more."""
        self.is_quiet = False
        """No streams end."""
        self._draft, self._trainer = ScriptedPeer("draft-0"), ScriptedPeer("trainer-0")
        self._others = ScriptedPeer("others")
        self._random = random.Random(0)
        self._num = self._num_made = 0
        self._run_id, self._step = "", 0
        self._counts = {"ttft": 0, "steps": 0, "captured": 0}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._main, name="scripted-cluster", daemon=True)
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(30), "Control did not start"
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join(15)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def ask(self, coroutine: Callable[[], Awaitable[T]]) -> T:
        """Await something on Control's own event loop."""
        assert self._loop is not None

        async def awaited() -> T:
            return await coroutine()

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result(10)

    def freeze(self, seconds: float) -> None:
        """Control answers nobody for so long."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(time.sleep, seconds)

    # -- the thread --------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - shown by the thread that waits for this one
            self._failure = error
        finally:
            self._is_up.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.control.start()
        app = build_control_app(self.control, hash_key(KEY))
        server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        )
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # not the main thread
        self._server = server
        serving = asyncio.create_task(server.serve())
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        script = asyncio.create_task(self._script())
        self._is_up.set()
        await serving
        script.cancel()
        await asyncio.gather(script, return_exceptions=True)
        await self.control.close()

    async def _script(self) -> None:
        while True:
            try:
                self._second()
            except Exception as error:
                self._failure = error
                raise
            await asyncio.sleep(_STEP_S)

    def _second(self) -> None:
        self.control.on_directory(Directory(1, tuple(info for info, _ in self._workers())))
        for info, metrics in self._workers():
            peer = {"draft": self._draft, "trainer": self._trainer}.get(info.role, self._others)
            self._say(peer, Snapshot(info, metrics))
        self._answer_draft_plan()
        self._answer_trainer_plan()
        self._serve_streams()

    def _say(self, peer: ScriptedPeer, message: Message) -> None:
        self.control.on_message(cast(wire.Peer, peer), message)

    # -- what workers say --------------------------------------------------------------------------------

    def _workers(self) -> list[tuple[WorkerInfo, bytes]]:
        live = self._draft.plan.live if isinstance(self._draft.plan, DraftPlan) else ""
        counts = self._counts
        ttft = f'paceline_ttft_seconds_bucket{{le="0.1"}} {counts["ttft"]}\npaceline_ttft_seconds_bucket{{le="+Inf"}} {counts["ttft"]}\n'
        gaps = ttft.replace("ttft", "inter_token")
        decode = (
            f"paceline_engine_step_seconds_sum {counts['steps'] * 0.02}\n"
            f"paceline_engine_steps_total {counts['steps']}\n"
            f"paceline_capture_requests_total {counts['captured']}\n"
        )

        def worker(
            role: Role, version: str = "", used: int = 0, free: int = 0, streams: int = 0
        ) -> WorkerInfo:
            return WorkerInfo(f"{role}-0", role, 1, "127.0.0.1", 1, 100, "node-1", "ready", version, used, free, streams)  # fmt: skip

        return [
            (worker("gateway", streams=3), (ttft + gaps).encode()),
            (worker("router"), b""),
            (worker("prefill", TARGET, 10, 90), b""),
            (worker("decode", TARGET, 30, 70, 3), decode.encode()),
            (worker("draft", live, 5, 45), b""),
            (worker("trainer"), b""),
        ]

    def _answer_draft_plan(self) -> None:
        plan = self._draft.plan
        if not isinstance(plan, DraftPlan):
            return
        asked = [ref.version for ref in plan.resident]
        resident = tuple(version for version in asked if version not in self.refuses)
        refused = tuple((version, self.refuses[version]) for version in asked if version in self.refuses)
        self._say(
            self._draft,
            DraftStatus(
                "draft-0", plan.revision, plan.target, resident, plan.live, plan.canary, refused, 0.8
            ),
        )

    def _answer_trainer_plan(self) -> None:
        plan = self._trainer.plan
        if not isinstance(plan, TrainerPlan) or self.trainer_is_gone:
            return
        order = plan.order
        if order is None or plan.level in ("pause", "evict"):
            self._run_id = ""
            self._say(self._trainer, TrainerStatus("trainer-0", plan.revision, level=plan.level))
            return
        if order.run_id != self._run_id:
            self._run_id, self._step = order.run_id, 0
        self._step = min(_NUM_STEPS, self._step + (0 if self.trainer_waits and self._step > 3 else 1))
        state: Any = "training" if order.kind == "train" else "scoring"
        result, report = None, b""
        if self._step == _NUM_STEPS:
            state = "done"
            if order.kind == "train":
                result, report = self._made()
            else:
                assert order.candidate is not None
                report = self._gate_report(order.base, order.candidate)
        self._say(
            self._trainer,
            TrainerStatus(
                "trainer-0", plan.revision, order.run_id, state, plan.level, self._step, _NUM_STEPS, self._step * 4096,
                2.0 / (1 + self._step), self._step * 0.1, self._step * 0.12, result, report,
            ),
        )  # fmt: skip
        if state == "done":
            self._run_id = ""

    def _made(self) -> tuple[DraftRef, bytes]:
        self._num_made += 1
        version = f"{self._num_made:x}".rjust(2, "0") + "feedc0ffee"
        self.skill[version] = self.next_skill
        began = time.time() - 60
        rows = [["acme", f"req-{i}-0-0", "20261121T10/decode-0-1.parquet", 64, began + i] for i in range(5)]
        report = {"steps": _NUM_STEPS, "tokens": 81920, "loss": 0.1, "acceptance": self.next_skill,
                  "num_parameters": 1_330_000, "num_bytes": 5_320_000, "requests": rows}  # fmt: skip
        return DraftRef(version, f"memory://drafts/{version}", "ab" * 32), msgspec.json.encode(report)

    def _gate_report(self, base: DraftRef, candidate: DraftRef) -> bytes:
        saving = round((self._skill(candidate.version) - self._skill(base.version)) * 0.6, 3)
        passed = saving > 0.02
        row = {"mean": saving, "lo": saving - 0.01, "hi": saving + 0.01}
        return msgspec.json.encode(
            {
                "version": candidate.version, "champion": base.version, "at": time.time(), "passed": passed,
                "reason": f"saves {saving:.1%} of decode time", "num_requests": 200, "num_tokens": 12800, "saving": row,
                "min_saving": 0.01, "domain_floor": -0.02, "slowdown": 1.0, "max_slowdown": 1.02,
                "domains": [{"domain": d, "num_requests": 66, "saving": row, "passed": passed} for d in _DOMAINS],
                "champion_tokens_per_step": 2.0, "candidate_tokens_per_step": 2.6,
                "champion_acceptance": self._skill(base.version),
                "candidate_acceptance": self._skill(candidate.version),
            }
        )  # fmt: skip

    def _skill(self, version: str) -> float:
        return self.skill.get(version, 0.4)

    def _serve_streams(self) -> None:
        plan = self._draft.plan
        if not isinstance(plan, DraftPlan) or self.is_quiet:
            return
        items = []
        for _ in range(8):
            self._num += 1
            name, domain = f"req-{self._num}", _DOMAINS[self._num % 3]
            tenant = "acme" if self._num % 2 else "beta"
            items.append(self._stream(name, tenant, domain, version_for(plan, name, tenant, domain)))
        self._counts["ttft"] += len(items)
        self._counts["steps"] += sum(item.num_steps for item in items)
        self._counts["captured"] += len(items) // 2
        self._say(self._others, Served("decode-0", tuple(items)))

    def _stream(self, name: str, tenant: str, domain: str, version: str) -> ServedStream:
        tested, accepted = [0] * _DEPTH, [0] * _DEPTH
        num_steps = 20
        for _ in range(num_steps):
            for depth in range(_DEPTH):
                tested[depth] += 1
                if self._random.random() >= self._skill(version):
                    break
                accepted[depth] += 1
        num_tokens = num_steps + sum(accepted)
        return ServedStream(name, tenant, domain, version, num_tokens, num_steps, tuple(tested), tuple(accepted), num_steps * 0.02, 0.03)  # fmt: skip
