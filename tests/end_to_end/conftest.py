"""The command line -> one real cluster for all end-to-end tests: Ray, Serve, HTTP, separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

PACELINE = [sys.executable, "-m", "paceline.deploy.cli"]


@dataclass
class Cluster:
    """A cluster started by `paceline serve --detach`."""

    home: Path
    name: str
    url: str
    control: str
    start_seconds: float

    def cli(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a subcommand on this cluster."""
        return run_cli(self.home, *args, "--name", self.name)

    def status(self) -> dict[str, Any]:
        """`paceline status --json`."""
        done = self.cli("status", "--json")
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def worker(self, role: str) -> dict[str, Any]:
        """The one worker of a role."""
        found = [w for w in self.status()["workers"] if w["role"] == role]
        assert len(found) == 1, found
        return found[0]

    def wait_for(self, role: str, not_pid: int, limit_s: float = 60.0) -> dict[str, Any]:
        """Until another process of this role is ready."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            response = httpx.get(f"{self.control}/admin/api/status", timeout=5.0)
            for worker in response.json()["workers"]:
                if worker["role"] == role and worker["pid"] != not_pid and worker["state"] == "ready":
                    return dict(worker)
            time.sleep(0.1)
        raise AssertionError(f"no new {role} worker within {limit_s} s")

    def client(self) -> openai.OpenAI:
        """The real client, without its own retries: every failure must show."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120.0)


def run_cli(home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`paceline ARGS` with its own home."""
    environment = {**os.environ, "PACELINE_HOME": str(home)}
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
    done = run_cli(home, "serve", "--detach", "--name", name, *ports, *drafts)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    state = json.loads((home / "run" / name / "state.json").read_text())
    try:
        yield Cluster(home, name, state["gateway"], state["control"], seconds)
    finally:
        stopped = run_cli(home, "stop", "--name", name)
    assert stopped.returncode == 0, stopped.stderr
    left = [p.pid for p in psutil.process_iter() if _run_of(p) == state["run_id"]]
    assert left == [], f"processes left by `paceline stop`: {left}"
    assert not Path(state.get("ray_folder") or "/nowhere").exists()


def _run_of(process: psutil.Process) -> str | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.environ().get("PACELINE_RUN")
    except (psutil.Error, OSError):
        return None
