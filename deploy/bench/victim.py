"""Settings -> a running cluster with failpoints on, that nobody else uses; at its end nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from paceline.cluster.config import ClusterConfig, load_config
from paceline.cluster.errors import PacelineError
from paceline.cluster.failpoints import Failpoints
from paceline.deploy import local
from paceline.deploy.bench import nodes as ray_nodes

ENGINES = ("prefill", "decode", "draft")
_BACK_LIMIT_S = 90.0
_START_LIMIT_S = 240.0
_PACELINE = [sys.executable, "-m", "paceline.deploy.cli"]


@dataclass
class Victim:
    """A running cluster with failpoints on, that nobody else uses."""

    home: Path
    failpoints: Failpoints
    url: str
    control: str
    model: str
    wanted: dict[str, int]
    """Ready workers of each role when nothing is broken."""
    run_id: str
    nodes: Nodes | None = None
    """What it is deployed on; none where `paceline serve` started it, which has one configuration for its life."""

    async def redeploy(self, **replicas: int) -> None:
        """Other numbers of workers, as an operator gives them to a cluster that serves; back when control knows them.

        Raises:
            PacelineError: the deployment fails, or takes too long.
        """
        assert self.nodes is not None, "started by `paceline serve`"
        # Before they are there: until then roles that change are not whole, and nobody breaks what is left of them.
        self.wanted.update(replicas)
        await asyncio.to_thread(
            self.nodes.deploy, *(f"{role}.replicas={num}" for role, num in replicas.items())
        )
        await self.until_whole(only=set(replicas))

    async def workers(self) -> list[dict[str, Any]]:
        """What control knows of living processes; nothing while it is away itself."""
        try:
            async with httpx.AsyncClient(timeout=2.0) as client:
                report = (await client.get(f"{self.control}/admin/api/status")).raise_for_status().json()
        except (httpx.HTTPError, ValueError):
            return []
        return [worker for worker in report["workers"] if _lives(worker["pid"])]

    async def whole_roles(self, gone: int = 0) -> set[str]:
        """Roles that have all their ready workers, the process `gone` not among them."""
        ready = Counter(w["role"] for w in await self.workers() if w["state"] == "ready" and w["pid"] != gone)
        return {role for role, num in self.wanted.items() if ready[role] == num}

    async def is_whole(self, gone: int = 0) -> bool:
        """All roles are, and the gateway takes requests."""
        if await self.whole_roles(gone) != set(self.wanted):
            return False
        async with httpx.AsyncClient(timeout=2.0) as client:
            try:
                return (await client.get(f"{self.url}/ready")).status_code == 200
            except httpx.HTTPError:
                return False

    async def until_whole(
        self, gone: int = 0, limit_s: float = _BACK_LIMIT_S, only: AbstractSet[str] = frozenset()
    ) -> None:
        """Wait for that, or for some roles only.

        Raises:
            PacelineError: it takes too long.
        """
        end = time.monotonic() + limit_s
        while not (only <= await self.whole_roles(gone) if only else await self.is_whole(gone)):
            if time.monotonic() > end:
                found = [(w["role"], w["state"], w["pid"]) for w in await self.workers()]
                raise PacelineError(f"the cluster is not whole after {limit_s:g} s: {found}")
            await asyncio.sleep(0.1)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@dataclass(frozen=True, slots=True)
class Nodes:
    """Empty Ray nodes of a run, and how to bring a configuration there."""

    folder: Path
    environment: Mapping[str, str]

    def deploy(self, *settings: str) -> None:
        """`paceline deploy`, with these changes to the run's own configuration.

        Raises:
            PacelineError: it fails.
        """
        state = local.read_state(self.folder)
        assert state is not None
        config = ClusterConfig.model_validate(state["config"]).model_dump(mode="json", exclude_defaults=True)
        file = self.folder / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        changes = [part for setting in settings for part in ("--set", setting)]
        dashboard = f"http://127.0.0.1:{state['dashboard_port']}"
        environment = {
            **self.environment,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": state["ray_token"],
        }
        done = subprocess.run(
            [*_PACELINE, "deploy", "--ray", dashboard, "--config", str(file), *changes],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise PacelineError(f"not deployed: {done.stdout}{done.stderr}")


@contextmanager
def victim(settings: Sequence[str] = (), *, replicas: int = 2, nodes: int = 0) -> Iterator[Victim]:
    """Start a cluster with `replicas` engines of each role in a home of its own; end it and remove everything.

    `nodes`: deployed on so many Ray nodes, 1 or 2; 0: what `paceline serve` starts.
    """
    home = Path(tempfile.mkdtemp(prefix="paceline-faults-"))
    failpoints = Failpoints(home / "failpoints")
    given = [
        f"gateway.port={_free_port()}",
        f"control.port={_free_port()}",
        # A draft worker is asked in every step, whether it pays here or not.
        "speculation.control=fixed",
        "speculation.sources=[draft]",
        *(f"{role}.replicas={replicas}" for role in ENGINES),
        *(ray_nodes.SETTINGS if nodes else ()),
        *(ray_nodes.ONE_OF_EACH_ROLE if nodes == 2 else ()),
        *settings,
    ]
    environment = {**os.environ, **failpoints.environment, "PACELINE_HOME": str(home)}
    folder = home / "run" / "local"
    # Whoever ends this process must not leave its cluster behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if nodes:
            deployed = _serve_nodes(folder, given, environment, nodes)
        else:
            deployed = None
            _serve(folder, given, environment)
        state = local.read_state(folder)
        assert state is not None
        config = state["config"]
        wanted = {role: config[role]["replicas"] for role in ENGINES} | {
            role: config[role].get("replicas", 1) for role in ("gateway", "router", "control")
        }
        model = config["model"]["name"]
        run_id = state["run_id"]
        cluster = Victim(
            home, failpoints, state["gateway"], state["control"], model, wanted, run_id, deployed
        )
        asyncio.run(cluster.until_whole(limit_s=_START_LIMIT_S))
        yield cluster
    finally:
        found = local.read_state(folder)
        left = local.processes_of(found["run_id"]) if found is not None else []
        local.end_processes([p for p in left if p.name() != "raylet" and _is_supervisor(p)], 60.0)
        subprocess.run([*_PACELINE, "stop"], env=environment, capture_output=True, check=False)
        shutil.rmtree(home, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _serve(folder: Path, settings: Sequence[str], environment: Mapping[str, str]) -> None:
    """What a user does."""
    arguments = ["serve", "--detach", *(part for setting in settings for part in ("--set", setting))]
    done = subprocess.run(
        [*_PACELINE, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise PacelineError(f"the cluster did not start:\n{done.stdout}{done.stderr}")


def _serve_nodes(folder: Path, settings: Sequence[str], environment: Mapping[str, str], num: int) -> Nodes:
    """Nodes first, then what a user does who has some."""
    config = load_config("laptop", settings)
    folder.mkdir(parents=True)
    run_id = uuid.uuid4().hex
    state = {
        "run_id": run_id,
        "phase": "launching",
        "gateway": f"http://127.0.0.1:{config.gateway.port}",
        "control": f"http://127.0.0.1:{config.control.port}",
        "config": config.model_dump(mode="json"),
        "nodes": num,
        "dashboard_port": _free_port(),
    }
    local.write_state(folder, state)
    with (folder / "supervisor.log").open("w") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", ray_nodes.__name__, str(folder)],
            env={**environment, local.RUN_VARIABLE: run_id},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    end = time.monotonic() + _START_LIMIT_S
    while (local.read_state(folder) or state)["phase"] != "empty":
        if supervisor.poll() is not None or time.monotonic() > end:
            raise PacelineError(f"Ray did not start:\n{(folder / 'supervisor.log').read_text()}")
        time.sleep(0.2)
    found = Nodes(folder, environment)
    found.deploy()
    return found


def _is_supervisor(process: psutil.Process) -> bool:
    try:
        return ray_nodes.__name__ in process.cmdline()
    except psutil.Error:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
