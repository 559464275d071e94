"""The command line -> one real cluster for all end-to-end tests: Ray, Serve, HTTP, separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from paceline.cluster.config import load_config
from paceline.cluster.failpoints import Failpoints
from paceline.deploy import cli, local

PACELINE = [sys.executable, "-m", "paceline.deploy.cli"]


@dataclass
class Cluster:
    """A cluster started by `paceline serve --detach`."""

    home: Path
    name: str
    url: str
    control: str
    start_seconds: float
    supervisor: subprocess.Popen[bytes] | None = None
    """Of a cluster of several nodes: SIGUSR1 kills the second, SIGUSR2 adds another."""
    run_id: str = ""
    failpoints: Failpoints | None = None

    def cli(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a subcommand on this cluster."""
        return run_cli(self.home, *args, "--name", self.name)

    def status(self) -> dict[str, Any]:
        """`paceline status --json`."""
        done = self.cli("status", "--json")
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def workers(self) -> list[dict[str, Any]]:
        """All that control knows now; none while it does not answer."""
        try:
            return list(httpx.get(f"{self.control}/admin/api/status", timeout=5.0).json()["workers"])
        except (httpx.HTTPError, ValueError):
            return []

    def ready(self, *roles: str) -> list[dict[str, Any]]:
        """Those of these roles that take streams."""
        return [w for w in self.workers() if w["role"] in roles and w["state"] == "ready"]

    def worker(self, role: str) -> dict[str, Any]:
        """The one worker of a role."""
        found = [w for w in self.status()["workers"] if w["role"] == role]
        assert len(found) == 1, found
        return found[0]

    def wait_for(self, role: str, not_pid: int, limit_s: float = 60.0) -> dict[str, Any]:
        """Until another process of this role is ready."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            for worker in self.workers():  # none while control itself is the one that is replaced
                if worker["role"] == role and worker["pid"] != not_pid and worker["state"] == "ready":
                    return dict(worker)
            time.sleep(0.1)
        raise AssertionError(f"no new {role} worker within {limit_s} s")

    def client(self) -> openai.OpenAI:
        """The real client, without its own retries: every failure must show."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120.0)


def run_cli(home: Path, *args: str, failpoints: Failpoints | None = None) -> subprocess.CompletedProcess[str]:
    """`paceline ARGS` with its own home."""
    environment = {**os.environ, "PACELINE_HOME": str(home), **(failpoints.environment if failpoints else {})}
    return subprocess.run(
        [*PACELINE, *args], env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def cluster(home: Path) -> Iterator[Cluster]:
    """One cluster for the session; at its end `paceline stop` must leave nothing behind."""
    name = "session"
    began = time.monotonic()
    ports = ("--port", "0", "--set", "control.port=0")
    # A draft worker is asked in every step, whether it pays here or not: tests must not depend on what a busy machine
    # makes of that.
    drafts = ("--set", "speculation.control=fixed", "--set", "speculation.sources=[draft]")
    failpoints = Failpoints(home / "failpoints")
    done = run_cli(home, "serve", "--detach", "--name", name, *ports, *drafts, failpoints=failpoints)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    state = json.loads((home / "run" / name / "state.json").read_text())
    try:
        urls = state["gateway"], state["control"]
        yield Cluster(home, name, *urls, seconds, run_id=state["run_id"], failpoints=failpoints)
    finally:
        stopped = run_cli(home, "stop", "--name", name)
    assert stopped.returncode == 0, stopped.stderr
    left = [p.pid for p in psutil.process_iter() if _run_of(p) == state["run_id"]]
    assert left == [], f"processes left by `paceline stop`: {left}"
    assert not Path(state.get("ray_folder") or "/nowhere").exists()


@pytest.fixture(scope="module")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """(name, *settings) -> a cluster in a home of its own; at the end of the module all of them are stopped."""
    started: list[Cluster] = []

    def start(name: str, *settings: str) -> Cluster:
        home = tmp_path_factory.mktemp(name)
        given = [part for setting in ("control.port=0", *settings) for part in ("--set", setting)]
        began = time.monotonic()
        done = run_cli(home, "serve", "--detach", "--name", name, "--port", "0", *given)
        assert done.returncode == 0, done.stdout + done.stderr
        state = json.loads((home / "run" / name / "state.json").read_text())
        started.append(Cluster(home, name, state["gateway"], state["control"], time.monotonic() - began))
        return started[-1]

    yield start
    results = [cluster.cli("stop") for cluster in started]
    assert [done.returncode for done in results] == [0] * len(started), [done.stderr for done in results]


ROLES = ("prefill", "decode", "draft")
TWO_NODES = (
    "gateway.port=0",
    "control.port=0",
    "gateway.drain_s=6",
    *(f"{role}.replicas=2" for role in ROLES),
    *(f"{role}.max_per_node=1" for role in ROLES),
    "gateway.resources={first: 1}",
    "control.resources={first: 1}",
    "decode.max_streams=2",
    "decode.max_queue=2",
    "link.interface=node",
    "speculation.control=fixed",
    "speculation.sources=[draft]",
)
"""Two workers of each role, one on each node; few places, so that few clients fill them."""


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The application on two raylets; at its end no process is left."""
    home = tmp_path_factory.mktemp("two")
    folder = home / "run" / "two"
    folder.mkdir(parents=True)
    config = cli._with_free_ports(load_config(None, TWO_NODES))
    urls = [f"http://127.0.0.1:{section.port}" for section in (config.gateway, config.control)]
    state: dict[str, Any] = {"run_id": uuid.uuid4().hex, "phase": "launching", "gateway": urls[0]}
    state.update(control=urls[1], config=config.model_dump(mode="json"))
    local.write_state(folder, state)
    began = time.monotonic()
    with (folder / "supervisor.log").open("w") as log:
        supervisor = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("raylets.py")), str(folder)],
            env={**os.environ, local.RUN_VARIABLE: state["run_id"], "PACELINE_HOME": str(home)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    cluster = Cluster(home, "two", *urls, 0.0, supervisor)
    try:
        while len(cluster.ready(*ROLES)) < 6:
            assert supervisor.poll() is None, (folder / "supervisor.log").read_text()
            assert time.monotonic() - began < 240
            time.sleep(0.2)
        cluster.start_seconds = time.monotonic() - began
        yield cluster
    finally:
        supervisor.terminate()
        supervisor.wait(90.0)
    assert local.processes_of(state["run_id"]) == []


def _run_of(process: psutil.Process) -> str | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.environ().get("PACELINE_RUN")
    except (psutil.Error, OSError):
        return None
