"""Serve's constructor and health calls -> one router, control, gateway, prefill, decode, draft or trainer process.

torch is imported by the workers' replicas only, inside their own processes. Serve awaits a constructor that is
async, which Python's typing does not know: hence the ignores.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn
from fastapi import FastAPI
from ray import serve
from ray._private import worker as ray_worker
from ray.serve._private import replica as serve_replica

from paceline.cluster import failpoints, wire
from paceline.cluster.config import ClusterConfig, GatewayConfig, Secrets, model_folder
from paceline.cluster.control import Control, build_control_app
from paceline.cluster.gateway.listener import server_config
from paceline.cluster.keys import KeyFile, key_file_path, needs_keys
from paceline.cluster.membership import Member, ResolveRouter, new_incarnation
from paceline.cluster.metrics import Metrics
from paceline.cluster.router import Router
from paceline.cluster.scaling import LOAD
from paceline.cluster.types import Role
from paceline.deploy import local
from paceline.deploy.logs import configure_logs
from paceline.deploy.placement import node_name, on_this_node
from paceline.deploy.tls import Certificate, certificate_of

if TYPE_CHECKING:
    from paceline.cluster.gateway.cluster_streams import ClusterStreams

log = structlog.get_logger(__name__)

_LET_GO_S = 1.0
"""A client that sends one request after the other has left in this time, to a gateway that listens on the same port."""
_UNREAD_S = 0.2
"""The request of a connection that was just accepted has been read by then: idle connections are closed next."""


def _begin(role: str, config: ClusterConfig) -> ClusterConfig:
    """First thing in every replica: logs, and Serve's own socket on our interface. The configuration for this node."""
    configure_logs(role, config.telemetry.log_level)
    failpoints.enter(f"{role}-{_name()}")
    config = on_this_node(config)
    _bind_serve_to(config.link.interface)
    return config


def _freeze() -> None:
    """What is loaded stays: Python's collector need not look at it again.

    Each of its looks at everything takes a quarter of a second in a process with torch and transformers, in which all
    threads stand still, between any two steps.
    """
    gc.collect()
    gc.freeze()


def _leave_on_sigterm(leave: Callable[[], Awaitable[None]]) -> None:
    """SIGTERM to this process -> `leave()`, then its end; a second SIGTERM ends it at once.

    Only the main thread may set signal handlers and Ray keeps that to itself, so the helper that Ray's handler calls is
    replaced in this process.
    """
    if not hasattr(ray_worker, "raise_sys_exit_with_custom_error_message"):
        log.warning("sigterm_ends_at_once", reason="this Ray version handles it elsewhere")
        return
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    async def leave_and_end() -> None:
        try:
            await leave()
        finally:
            os._exit(0)  # Serve sees the death at its next check and replaces the replica

    def begin(*_: Any, **__: Any) -> None:
        if tasks:
            os._exit(1)
        log.info("sigterm")
        loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(leave_and_end())))

    ray_worker.raise_sys_exit_with_custom_error_message = begin


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

    def __init__(
        self,
        app: FastAPI,
        host: str,
        port: int,
        client_timeout_s: float,
        *,
        certificate: Certificate | None = None,
    ) -> None:
        """`certificate`: with which it speaks TLS."""
        self._host, self._port = host, port
        self._certificate = certificate
        config = server_config(app, client_timeout_s=client_timeout_s)
        if self._certificate is not None:
            config.load()
            config.ssl = self._certificate.context
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # a successor listens before this one ends
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
        """Each second."""
        if self._certificate is not None:
            self._certificate.refresh()
        if self._task is not None and self._task.done():
            raise RuntimeError(f"the listener on {self._host}:{self._port} ended") from self._task.exception()

    async def let_go(self, seconds: float) -> None:
        """Send clients away without breaking anything of theirs: first each answer ends its connection, so that the next
        request comes by a new one, perhaps to another gateway; after `seconds` no connection is accepted any more."""
        farewell = (b"connection", b"close")
        self._server.config.encoded_headers.append(farewell)
        self._server.server_state.default_headers.append(farewell)
        await asyncio.sleep(seconds)
        for server in self._server.servers:
            server.close()
        await asyncio.sleep(_UNREAD_S)

    async def close(self, limit_s: float) -> None:
        """Accept no connection; answers that are on their way have this long."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait([self._task], timeout=limit_s)
            self._server.force_exit = True
            await asyncio.wait([self._task], timeout=2.0)


class RouterReplica:
    """The directory and the routing policy."""

    async def __init__(self, config: ClusterConfig, secrets: Secrets) -> None:  # type: ignore[misc]
        config = _begin("router", config)
        me = wire.Identity(f"router-{_name()}", new_incarnation())
        self._router = Router(config, me, node=node_name())
        self._address = await self._router.start(secrets.link)
        _leave_on_sigterm(self._router.close)

    async def address(self) -> tuple[str, int]:
        """Where it listens; asked once by each process, and again after a loss."""
        return self._address


class _HttpReplica:
    """A member of the cluster with an HTTP listener."""

    _http: _HttpListener
    _member: Member
    _grace_s: float = 2.0

    async def check_health(self) -> None:
        self._http.check()

    async def _leave(self) -> None:
        await self._http.close(self._grace_s)
        await self._member.close()

    async def __del__(self) -> None:
        await self._leave()


class ControlReplica(_HttpReplica):
    """Merged metrics, status and the learning loop on the operator's port."""

    async def __init__(self, config: ClusterConfig, secrets: Secrets, router: Any) -> None:  # type: ignore[misc]
        config = _begin("control", config)
        keys = KeyFile(key_file_path(config.gateway.keys_file, local.home()))
        control = self._control = Control(config, keys=keys)
        self._http = _HttpListener(
            build_control_app(control, secrets.admin or local.take_admin_key()),
            config.control.host,
            config.control.port,
            config.gateway.client_timeout_s,
            certificate=certificate_of(config.control.tls, "control"),
        )
        me = wire.Identity(f"control-{_name()}", new_incarnation())
        self._member = Member(
            me, "control", config.link, secrets.link, control, _resolver(router), node=node_name()
        )
        control.start()
        await self._member.start()
        await self._http.start()
        _leave_on_sigterm(self._leave)

    async def _leave(self) -> None:
        await super()._leave()
        await self._control.close()


def notice_s(gateway: GatewayConfig) -> float:
    """How long a gateway serves on after it was told to end: only where others can take its clients."""
    return gateway.notice_s if gateway.replicas > 1 else 0.0


async def leave_clients(streams: ClusterStreams, http: _HttpListener, notice_s: float) -> None:
    """What a gateway does first when it is told to end: whoever comes is served until nobody comes any more."""
    if notice_s:
        streams.give_notice()
    await http.let_go(max(notice_s, _LET_GO_S))
    streams.drain()


class GatewayReplica(_HttpReplica):
    """OpenAI's API on its own listener."""

    async def __init__(self, config: ClusterConfig, secrets: Secrets, router: Any, others: list[Any]) -> None:  # type: ignore[misc]
        from paceline.cluster.gateway.cluster_streams import ClusterStreams
        from paceline.cluster.gateway.ingress import build_app
        from paceline.cluster.gateway.journal import Journal
        from paceline.cluster.gateway.known_keys import KnownKeys
        from paceline.cluster.gateway.text import Tokenizer
        from paceline.cluster.gateway.traces import open_traces
        from paceline.deploy.resolved import context_limit

        config = _begin("gateway", config)
        metrics, gateway = Metrics("gateway"), config.gateway
        keys: KnownKeys | None = None
        if needs_keys(gateway.auth, gateway.host):
            keys = KnownKeys(KeyFile(key_file_path(gateway.keys_file, local.home())))
        streams = self._streams = ClusterStreams(config, metrics, keys=keys)
        self._grace_s, self._notice_s = gateway.drain_s, notice_s(gateway)
        me = wire.Identity(f"gateway-{_name()}", new_incarnation())
        self._member = Member(
            me, "gateway", config.link, secrets.link, streams, _resolver(router), node=node_name()
        )
        streams.attach(self._member)
        tokenizer = Tokenizer(model_folder(config.model.target))
        max_context, _ = context_limit(config)
        self._traces = open_traces(config.telemetry, metrics, instance=me.worker_id)
        app = build_app(
            config,
            streams,
            tokenizer,
            metrics,
            max_context=max_context,
            keys=keys,
            counter=streams.counter,
            journal=Journal(self._traces),
        )
        certificate = certificate_of(gateway.tls, "gateway")
        self._http = _HttpListener(
            app, gateway.host, gateway.port, gateway.client_timeout_s, certificate=certificate
        )
        await self._member.start()
        await self._http.start()
        _leave_on_sigterm(self._leave)

    async def _leave(self) -> None:
        await leave_clients(self._streams, self._http, self._notice_s)
        await super()._leave()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)


class _EngineReplica:
    """A worker with an engine thread."""

    role: Role

    async def __init__(self, config: ClusterConfig, secrets: Secrets, router: Any) -> None:  # type: ignore[misc]
        from paceline.deploy.gang import RankLauncher
        from paceline.workers.decode import DecodeWorker
        from paceline.workers.draft import DraftWorker
        from paceline.workers.prefill import PrefillWorker

        config = _begin(self.role, config)
        workers = {"prefill": PrefillWorker, "decode": DecodeWorker, "draft": DraftWorker}
        self._worker = workers[self.role](
            config,
            secrets,
            name=_name(),
            resolve=_resolver(router),
            node=node_name(),
            launch=RankLauncher(self.role, getattr(config, self.role)),
        )
        await self._worker.setup()
        _freeze()
        _leave_on_sigterm(self._leave)

    async def check_health(self) -> None:
        self._worker.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks every few seconds where a role has `max_replicas`."""
        return {LOAD: self._worker.load_share()}

    async def _leave(self) -> None:
        await self._worker.drain()
        await self._worker.close()

    async def __del__(self) -> None:
        await self._leave()


class PrefillReplica(_EngineReplica):
    """Computes prompts."""

    role = "prefill"


class DecodeReplica(_EngineReplica):
    """Generates."""

    role = "decode"


class DraftReplica(_EngineReplica):
    """Proposes."""

    role = "draft"


class TrainerReplica:
    """Trains drafts, and yields to everybody else."""

    async def __init__(self, config: ClusterConfig, secrets: Secrets, router: Any) -> None:  # type: ignore[misc]
        from paceline.workers.trainer import TrainerWorker

        config = _begin("trainer", config)
        self._worker = TrainerWorker(
            config, secrets, name=_name(), resolve=_resolver(router), node=node_name()
        )
        await self._worker.setup()
        _leave_on_sigterm(self._leave)

    async def check_health(self) -> None:
        self._worker.check()

    async def _leave(self) -> None:
        await self._worker.drain()
        await self._worker.close()

    async def __del__(self) -> None:
        await self._leave()
