"""Worker snapshots and the directory -> /metrics and /admin/api/status on the operator's port; plans of the learning loop.

One replica, its own listener, loopback by default. Serving never waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI

from paceline.cluster import failpoints, wire
from paceline.cluster.admin.app import build_admin_app
from paceline.cluster.config import ClusterConfig
from paceline.cluster.key_watch import KeyWatch
from paceline.cluster.keys import KeyContent, KeyFile, needs_keys
from paceline.cluster.learning.loop import LearningLoop
from paceline.cluster.learning.storage import home
from paceline.cluster.learning.telemetry import report
from paceline.cluster.metrics import WORKER_STATES, Metrics, merge
from paceline.cluster.registry.registry import Registry
from paceline.cluster.types import (
    Directory,
    DraftStatus,
    KeySet,
    Message,
    Role,
    Served,
    Snapshot,
    TrainerStatus,
    WorkerInfo,
)

log = structlog.get_logger(__name__)

_STALE_S = 5.0
"""A worker that pushed nothing for this long is left out."""
_TICK_S = 0.25
_PLAN_S = 1.0
"""Plans are said again so often: whoever began anew, or was cut off, hears them soon."""


class Control:
    """Collects what workers push; a `Resident` of its process."""

    def __init__(self, config: ClusterConfig, *, keys: KeyFile | None = None) -> None:
        """`keys`: the file of API keys, of which all gateways are told."""
        self._config = config
        self.keys = KeyWatch(keys) if keys is not None else None
        self._gateways: dict[str, wire.Peer] = {}
        """By worker id."""
        self._watching: asyncio.Task[None] | None = None
        self._metrics = Metrics("control")
        self._id = "control"
        self._snapshots: dict[str, tuple[float, Snapshot]] = {}
        self._directory = Directory(0, ())
        self.loop: LearningLoop | None = None
        """Where learning is on."""
        self._peers: dict[str, tuple[Role, wire.Peer]] = {}
        """Draft workers and the trainer, by worker id."""
        self._ticking: asyncio.Task[None] | None = None
        self._planned_at = 0.0

    @property
    def config(self) -> ClusterConfig:
        return self._config

    # -- life --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Watch the key file, and begin to learn if the configuration says so.

        Raises:
            ConfigError: `learning.registry` or `learning.storage` cannot be used.
        """
        if self.keys is not None:
            self.keys.subscribe(self._send_keys)
            self._watching = asyncio.create_task(self.keys.run())
        if not self._config.learning.enabled:
            return
        registry = Registry(self._config.learning.registry, home())
        self.loop = LearningLoop(self._config, registry, on_plan=self._send_plans, metrics=self._metrics)
        self.loop.start()
        self._ticking = asyncio.create_task(self._tick_for_ever(self.loop))

    async def close(self) -> None:
        """What was decided is written first."""
        for task in (self._watching, self._ticking):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self.loop is not None:
            await self.loop.close()
            self.loop.registry.close()

    async def _tick_for_ever(self, loop: LearningLoop) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                loop.tick(self.fresh())
                report(loop, self._metrics)
            except Exception:  # whatever it is: plans go on being said, and the next tick tries again
                log.exception("learning_tick_failed")
            if time.monotonic() - self._planned_at >= _PLAN_S:
                self._send_plans()

    def _send_keys(self, content: KeyContent) -> None:
        """To all gateways."""
        if needs_keys(self._config.gateway.auth, self._config.gateway.host) and not content.keys:
            log.warning("no_api_keys", reason="gateways let nobody in; `paceline keys create` makes one")
        message = KeySet(msgspec.json.encode(content.keys))
        for peer in list(self._gateways.values()):
            if peer.is_open:
                peer.send(message)

    def _send_plans(self) -> None:
        """To all draft workers and the trainer: what should be."""
        self._planned_at = time.monotonic()
        for role, peer in list(self._peers.values()):
            self._send_plan(role, peer)

    def _send_plan(self, role: Role, peer: wire.Peer) -> None:
        if self.loop is None:
            return
        plan = self.loop.draft_plan if role == "draft" else self.loop.trainer_plan
        if plan is not None and peer.is_open:
            peer.send(plan)

    # -- Resident ----------------------------------------------------------------------------------------

    def describe(self, info: WorkerInfo) -> WorkerInfo:
        self._id = info.worker_id
        return WorkerInfo(
            info.worker_id, info.role, info.incarnation, info.host, info.port, info.pid, info.node, "ready"
        )

    def metrics_text(self) -> bytes:
        self._count_workers()
        return self._metrics.text()

    def _count_workers(self) -> None:
        """Who is there by what they push: the directory's last word outlives a router that is gone."""
        config, metrics = self._config, self._metrics
        found = Counter((s.worker.role, s.worker.state) for s in self.fresh())
        found["control", "ready"] += 1
        # Only whether: Serve is told how many, and may be told otherwise without control's knowing.
        wanted: dict[Role, int] = {
            "gateway": 1,
            "router": 1,
            "prefill": config.prefill.replicas,
            "decode": config.decode.replicas,
            "draft": config.draft.replicas,
            "trainer": config.has_trainer,
            "control": 1,
        }
        for role, num in wanted.items():
            metrics.roles_wanted.labels(role).set(num > 0)
            for state in WORKER_STATES:
                metrics.workers.labels(role, state).set(found[role, state])

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        if isinstance(message, Snapshot):
            if failpoints.enabled:
                failpoints.hit("snapshot")
            self._snapshots[message.worker.worker_id] = (time.monotonic(), message)
            if message.worker.role == "gateway":
                self._meet_gateway(message.worker.worker_id, peer)
            if message.worker.role in ("draft", "trainer"):
                self._meet(message.worker.worker_id, message.worker.role, peer)
        elif self.loop is not None:
            self._learn(self.loop, peer, message)

    def _meet_gateway(self, worker_id: str, peer: wire.Peer) -> None:
        """Who is new is told all keys at once."""
        if self.keys is None or self._gateways.get(worker_id) is peer:
            return
        self._gateways[worker_id] = peer
        if self.keys.is_read:
            peer.send(KeySet(msgspec.json.encode(self.keys.content.keys)))

    def _meet(self, worker_id: str, role: Role, peer: wire.Peer) -> None:
        """Who is new is told the plan at once."""
        known = self._peers.get(worker_id)
        if known is None or known[1] is not peer:
            self._peers[worker_id] = (role, peer)
            self._send_plan(role, peer)

    def _learn(self, loop: LearningLoop, peer: wire.Peer, message: Message) -> None:
        match message:
            case Served():
                loop.on_served(message)
            case DraftStatus():
                self._meet(message.worker_id, "draft", peer)
                loop.on_draft_status(message)
            case TrainerStatus():
                self._meet(message.worker_id, "trainer", peer)
                loop.on_trainer_status(message)
            case _:
                return

    def on_peer_lost(self, peer: wire.Peer) -> None:
        for worker_id, (_, snapshot) in list(self._snapshots.items()):
            if peer.identity == wire.Identity(worker_id, snapshot.worker.incarnation):
                del self._snapshots[worker_id]
        for worker_id, gateway in list(self._gateways.items()):
            if gateway is peer:
                del self._gateways[worker_id]
        for worker_id, (_, known) in list(self._peers.items()):
            if known is peer:
                del self._peers[worker_id]
                if self.loop is not None:
                    self.loop.on_worker_lost(worker_id)

    def on_directory(self, directory: Directory) -> None:
        self._directory = directory
        if self.loop is not None:
            self.loop.on_directory(directory)

    def reports(self) -> Sequence[Message]:
        return ()

    # -- HTTP --------------------------------------------------------------------------------------------

    def fresh(self) -> list[Snapshot]:
        """Snapshots of workers that still push."""
        horizon = time.monotonic() - _STALE_S
        return [snapshot for stamp, snapshot in list(self._snapshots.values()) if stamp >= horizon]

    def metrics(self) -> bytes:
        """All workers' metrics as one text, and those of this process."""
        texts: dict[tuple[str, str], bytes] = {
            (s.worker.role, s.worker.worker_id): s.metrics for s in self.fresh()
        }
        return merge({**texts, ("control", self._id): self.metrics_text()})

    def workers(self) -> list[tuple[WorkerInfo, float | None]]:
        """The directory, with the freshest figures and how many seconds old they are; None where there are none."""
        now = time.monotonic()
        newest = {s.worker.worker_id: (stamp, s.worker) for stamp, s in list(self._snapshots.values())}
        found: list[tuple[WorkerInfo, float | None]] = []
        for entry in self._directory.workers:
            stamp, worker = newest.get(entry.worker_id, (0.0, entry))
            is_fresh = (
                worker is not entry and worker.incarnation == entry.incarnation and now - stamp <= _STALE_S
            )
            found.append((worker, now - stamp) if is_fresh else (entry, None))
        return found

    def status(self) -> dict[str, Any]:
        """What `paceline status --json` prints: the directory, with the freshest block counts."""
        newest = {s.worker.worker_id: s.worker for s in self.fresh()}
        workers = []
        for entry in self._directory.workers:
            snapshot = newest.get(entry.worker_id)
            worker = snapshot if snapshot is not None and snapshot.incarnation == entry.incarnation else entry
            workers.append(
                {
                    "role": worker.role,
                    "id": worker.worker_id,
                    "pid": worker.pid,
                    "node": worker.node,
                    "state": worker.state,
                    "incarnation": str(worker.incarnation),
                    "version": worker.version,
                    "kv_blocks_used": worker.kv_blocks_used,
                    "kv_blocks_free": worker.kv_blocks_free,
                    "streams": worker.num_streams,
                }
            )
        return {
            "model": self._config.model.name,
            "revision": self._directory.revision,
            "workers": workers,
            "learning": self._learning(),
        }

    def _learning(self) -> dict[str, Any]:
        """One line for `paceline status`."""
        if self.loop is None:
            return {
                "state": "off",
                "reason": "learning is off (learning.enabled=false)",
                "live": "",
                "alarms": [],
            }
        state, reason = self.loop.cycle.state(self.loop.clock())
        live = self.loop.rollout.default.live if self.loop.rollout is not None else ""
        alarms = [alarm.message for alarm in self.loop.alarms.values()]
        return {"state": state, "reason": reason, "live": live, "alarms": alarms}


def build_control_app(control: Control, key_digest: bytes = b"") -> FastAPI:
    """The operator's routes. `key_digest`: of the admin key; empty if there is none, and then nobody signs in."""
    return build_admin_app(control, key_digest)
