"""Room for workers -> empty Ray nodes on this machine, and what is deployed there: for tests of `paceline deploy`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml

from paceline.cluster.admin.key import VARIABLE
from paceline.deploy import local

PACELINE = [sys.executable, "-m", "paceline.deploy.cli"]
NODES = Path(__file__).parent / "end_to_end" / "ray_nodes.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Deployed:
    """Ray, and what the chart says should run on it."""

    dashboard: str
    token: str
    home: Path
    serve_config: dict[str, Any]
    key: str
    admin: str

    @property
    def gateway(self) -> str:
        return f"http://127.0.0.1:{self.tree['gateway']['port']}"

    @property
    def tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = self.serve_config["applications"][0]["args"]["config"]
        return tree

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # these nodes are on loopback: local.ray_environment
            "PACELINE_HOME": str(self.home),
            VARIABLE: self.admin,
        }
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    def deploy(self, *settings: str) -> subprocess.CompletedProcess[str]:
        """`paceline deploy`, with the chart's own configuration as its file."""
        file = self.home / "config.yaml"
        file.write_text(yaml.safe_dump(self.tree))
        changes = [part for setting in settings for part in ("--set", setting)]
        return self.run(*PACELINE, "deploy", "--ray", self.dashboard, "--config", str(file), *changes)

    def workers(self) -> list[dict[str, Any]]:
        control = f"http://127.0.0.1:{self.tree['control']['port']}"
        try:
            answer = httpx.get(
                f"{control}/admin/api/status", headers={"authorization": f"Bearer {self.admin}"}, timeout=5.0
            )
            return [w for w in answer.raise_for_status().json()["workers"] if w["state"] == "ready"]
        except (httpx.HTTPError, ValueError):
            return []

    def pids(self, *roles: str) -> dict[str, set[int]]:
        found = self.workers()
        return {role: {w["pid"] for w in found if w["role"] == role} for role in roles}

    def wait_for(self, **counts: int) -> dict[str, set[int]]:
        """Until so many workers of these roles are ready, and no more."""
        end = time.monotonic() + 90
        while time.monotonic() < end:
            pids = self.pids(*counts)
            if {role: len(found) for role, found in pids.items()} == counts:
                return pids
            time.sleep(0.3)
        raise AssertionError(f"{counts} within 90 s: {self.workers()}")

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.gateway}/v1", api_key=self.key, max_retries=0, timeout=200.0)

    def stream(
        self, prompt: str, max_tokens: int = 48, client: openai.OpenAI | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The text and the metrics of one stream, which must end as it should."""
        text, reason, metrics = "", None, {}
        for chunk in (client or self.client()).chat.completions.create(
            model="paceline-small",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            seed=7,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        ):
            metrics = (chunk.model_extra or {}).get("metrics") or metrics
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
        assert reason in ("stop", "length"), (reason, text)
        return text, metrics


@contextmanager
def ray_nodes(home: Path, admin: str, num_workers: int = 1) -> Iterator[tuple[str, str]]:
    """A head and nodes for workers: URL of Ray's dashboard and Ray's token. At the end no process is left."""
    port, run_id, ready = free_port(), uuid.uuid4().hex, home / "token"
    environment = {
        **os.environ,
        local.RUN_VARIABLE: run_id,
        "PACELINE_HOME": str(home),
        VARIABLE: admin,  # as in the head's pod
    }
    with (home / "ray.log").open("w") as log:
        nodes = subprocess.Popen(
            [sys.executable, str(NODES), str(port), str(ready), str(num_workers)],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + 120
        while not (ready.exists() and ready.read_text()):
            assert nodes.poll() is None and time.monotonic() < end, (home / "ray.log").read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", ready.read_text()
    finally:
        nodes.terminate()
        nodes.wait(120)
    assert local.processes_of(run_id) == []
