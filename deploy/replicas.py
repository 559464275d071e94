"""Serve's constructor and health calls -> one router, control, gateway, prefill, decode or draft process.

torch is imported by the workers' replicas only, inside their own processes. Serve awaits a constructor that is
async, which Python's typing does not know: hence the ignores.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI
from ray import serve
from ray.serve._private import replica as serve_replica

from paceline.cluster import wire
from paceline.cluster.config import ClusterConfig, Secrets, model_folder
from paceline.cluster.control import Control, build_control_app
from paceline.cluster.membership import Member, ResolveRouter, new_incarnation
from paceline.cluster.metrics import Metrics
from paceline.cluster.router import Router
from paceline.cluster.types import Role
from paceline.deploy.logs import configure_logs

log = structlog.get_logger(__name__)


def _begin(role: str, config: ClusterConfig) -> None:
    """First thing in every replica: logs, and Serve's own socket on our interface."""
    configure_logs(role)
    _bind_serve_to(config.link.interface)


def _bind_serve_to(interface: str) -> None:
    """Serve gives each replica a gRPC server on all interfaces, which takes pickled arguments from anybody.

    The address is fixed in Serve's source, so the helper that binds it is replaced in this process.
    """
    original = getattr(serve_replica, "add_port_to_grpc_server", None)
    if original is None:
        log.warning("serve_port_open", reason="this Ray version binds it elsewhere; close it with a firewall")
        return
    host = f"[{interface}]" if ":" in interface else interface
    serve_replica.add_port_to_grpc_server = lambda server, _address: original(server, f"{host}:0")


def _name() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)[:8]


def _resolver(router: Any) -> ResolveRouter:
    async def resolve() -> tuple[str, int]:
        host, port = await router.address.remote()
        return str(host), int(port)

    return resolve


class _HttpListener:
    """uvicorn inside a replica, on a socket of our own so that a restarted replica can bind the same port."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        self._host, self._port = host, port
        # Headers time out and idle connections close by uvicorn's defaults; access logs would repeat our metrics.
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for _ in range(50):  # the killed predecessor's socket may live a moment longer
            try:
                sock.bind((self._host, self._port))
                break
            except OSError as error:
                log.warning("port_busy", host=self._host, port=self._port, error=str(error))
                await asyncio.sleep(0.2)
        else:
            raise RuntimeError(f"{self._host}:{self._port} is in use")
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]))

    def check(self) -> None:
        if self._task is not None and self._task.done():
            raise RuntimeError(f"the listener on {self._host}:{self._port} ended") from self._task.exception()

    async def close(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait([self._task], timeout=10.0)


class RouterReplica:
    """The directory and the routing policy."""

    async def __init__(self, config: ClusterConfig, secrets: Secrets) -> None:  # type: ignore[misc]
        _begin("router", config)
        self._router = Router(config, wire.Identity(f"router-{_name()}", new_incarnation()))
        self._address = await self._router.start(secrets.link)

    async def address(self) -> tuple[str, int]:
        """Where it listens; asked once by each process, and again after a loss."""
        return self._address


class _HttpReplica:
    """A member of the cluster with an HTTP listener."""

    _http: _HttpListener
    _member: Member

    async def check_health(self) -> None:
        self._http.check()

    async def __del__(self) -> None:
        await self._http.close()
        await self._member.close()


class ControlReplica(_HttpReplica):
    """Merged metrics and status on the operator's port."""

    async def __init__(self, config: ClusterConfig, secrets: Secrets, router: Any) -> None:  # type: ignore[misc]
        _begin("control", config)
        control = Control(config)
        self._http = _HttpListener(build_control_app(control), config.control.host, config.control.port)
        me = wire.Identity(f"control-{_name()}", new_incarnation())
        self._member = Member(me, "control", config.link, secrets.link, control, _resolver(router))
        await self._member.start()
        await self._http.start()


class GatewayReplica(_HttpReplica):
    """OpenAI's API on its own listener."""

    async def __init__(self, config: ClusterConfig, secrets: Secrets, router: Any, others: list[Any]) -> None:  # type: ignore[misc]
        from paceline.cluster.gateway.cluster_streams import ClusterStreams
        from paceline.cluster.gateway.ingress import build_app
        from paceline.cluster.gateway.text import Tokenizer

        _begin("gateway", config)
        metrics = Metrics()
        streams = ClusterStreams(config, metrics)
        me = wire.Identity(f"gateway-{_name()}", new_incarnation())
        self._member = Member(me, "gateway", config.link, secrets.link, streams, _resolver(router))
        streams.attach(self._member)
        tokenizer = Tokenizer(model_folder(config.model.target))
        app = build_app(config, streams, tokenizer, metrics, max_context=config.limits.max_context)
        self._http = _HttpListener(app, config.gateway.host, config.gateway.port)
        await self._member.start()
        await self._http.start()


class _EngineReplica:
    """A worker with an engine thread."""

    role: Role

    async def __init__(self, config: ClusterConfig, secrets: Secrets, router: Any) -> None:  # type: ignore[misc]
        from paceline.workers.decode import DecodeWorker
        from paceline.workers.draft import DraftWorker
        from paceline.workers.prefill import PrefillWorker

        _begin(self.role, config)
        workers = {"prefill": PrefillWorker, "decode": DecodeWorker, "draft": DraftWorker}
        self._worker = workers[self.role](config, secrets, name=_name(), resolve=_resolver(router))
        await self._worker.setup()

    async def check_health(self) -> None:
        self._worker.check()

    async def __del__(self) -> None:
        await self._worker.drain()
        await self._worker.close()


class PrefillReplica(_EngineReplica):
    """Computes prompts."""

    role = "prefill"


class DecodeReplica(_EngineReplica):
    """Generates."""

    role = "decode"


class DraftReplica(_EngineReplica):
    """Proposes."""

    role = "draft"
