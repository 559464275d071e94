"""Worker snapshots and the directory -> /metrics and /admin/api/status on the operator's port.

One replica, its own listener, loopback by default. Serving never waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Response

from paceline.cluster import failpoints, wire
from paceline.cluster.config import ClusterConfig
from paceline.cluster.metrics import Metrics, merge
from paceline.cluster.types import Directory, Message, Snapshot, WorkerInfo

_STALE_S = 5.0
"""A worker that pushed nothing for this long is left out."""


class Control:
    """Collects what workers push; a `Resident` of its process."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._metrics = Metrics()
        self._snapshots: dict[str, tuple[float, Snapshot]] = {}
        self._directory = Directory(0, ())

    # -- Resident ----------------------------------------------------------------------------------------

    def describe(self, info: WorkerInfo) -> WorkerInfo:
        return WorkerInfo(
            info.worker_id, info.role, info.incarnation, info.host, info.port, info.pid, info.node, "ready"
        )

    def metrics_text(self) -> bytes:
        return self._metrics.text()

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        if isinstance(message, Snapshot):
            if failpoints.enabled:
                failpoints.hit("snapshot")
            self._snapshots[message.worker.worker_id] = (time.monotonic(), message)

    def on_peer_lost(self, peer: wire.Peer) -> None:
        for worker_id, (_, snapshot) in list(self._snapshots.items()):
            if peer.identity == wire.Identity(worker_id, snapshot.worker.incarnation):
                del self._snapshots[worker_id]

    def on_directory(self, directory: Directory) -> None:
        self._directory = directory

    def reports(self) -> Sequence[Message]:
        return ()

    # -- HTTP --------------------------------------------------------------------------------------------

    def fresh(self) -> list[Snapshot]:
        """Snapshots of workers that still push."""
        horizon = time.monotonic() - _STALE_S
        return [snapshot for stamp, snapshot in list(self._snapshots.values()) if stamp >= horizon]

    def metrics(self) -> bytes:
        """All workers' metrics as one text."""
        return merge({(s.worker.role, s.worker.worker_id): s.metrics for s in self.fresh()})

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
        return {"model": self._config.model.name, "revision": self._directory.revision, "workers": workers}


def build_control_app(control: Control) -> FastAPI:
    """The operator's routes."""
    app = FastAPI(title="Paceline control", openapi_url=None)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(control.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/admin/api/status")
    async def status() -> dict[str, Any]:
        return control.status()

    return app
