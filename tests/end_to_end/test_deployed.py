"""A chart's serveConfigV2 and `paceline deploy` -> the application on a Ray cluster that runs already, changed under load."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from charts import Helm
from memory_kube import MemoryKube
from paceline.cluster.admin.key import VARIABLE
from paceline.deploy import local

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PACELINE = [sys.executable, "-m", "paceline.deploy.cli"]
SMALL = {
    "prefill": {"threads": 1, "kv_memory_mb": 96},
    "decode": {"threads": 1, "kv_memory_mb": 96},
    "draft": {"threads": 1},
}


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


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Two Ray nodes, and the chart rendered for them. At the end no process is left."""
    pytest.importorskip("helm_sdkpy", reason="Helm's engine: `make dev` installs it")
    home = tmp_path_factory.mktemp("deployed")
    kube = MemoryKube()
    ports = {"gateway": free_port(), "control": free_port()}
    values: dict[str, Any] = {
        **SMALL,
        "gateway": {"port": ports["gateway"], "auth": "keys", "keys_file": str(home / "keys.json")},
        "control": {"port": ports["control"]},
    }
    release = Helm(kube, home).install(values)
    kube.close()
    secret = {name: base64.b64decode(data) for name, data in release.one("Secret", "-keys")["data"].items()}
    admin = base64.b64decode(release.one("Secret", "-admin")["data"]["admin-key"]).decode()
    (home / "keys.json").write_bytes(secret["keys.json"])
    serve_config = release.serve_config
    for section in ports:  # the rest is as rendered; nothing here listens to the outside
        serve_config["applications"][0]["args"]["config"].setdefault(section, {})["host"] = "127.0.0.1"

    port, run_id, ready = free_port(), uuid.uuid4().hex, home / "token"
    environment = {
        **os.environ,
        local.RUN_VARIABLE: run_id,
        "PACELINE_HOME": str(home),
        VARIABLE: admin,  # as in the head's pod
    }
    with (home / "ray.log").open("w") as log:
        nodes = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), str(port), str(ready)],
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
        url = f"http://127.0.0.1:{port}"
        yield Deployed(url, ready.read_text(), home, serve_config, secret["key"].decode(), admin)
    finally:
        nodes.terminate()
        nodes.wait(120)
    assert local.processes_of(run_id) == []


def test_the_chart_s_file_runs_by_serve_deploy(deployed: Deployed) -> None:
    """RayService's serveConfigV2 as it was rendered, handed to Ray by its own command; a stream through all roles."""
    file = deployed.home / "serve.yaml"
    file.write_text(yaml.safe_dump(deployed.serve_config))
    serve = str(Path(sys.executable).with_name("serve"))

    done = deployed.run(serve, "deploy", str(file), "-a", deployed.dashboard)

    assert done.returncode == 0, done.stdout + done.stderr
    deployed.wait_for(prefill=1, decode=1, draft=1, gateway=1)
    text, metrics = deployed.stream("What is 3468 + 2795? Show the work.", max_tokens=96)
    assert "thousands: 3 + 2 + 1 = 6" in text
    assert metrics["prefill_worker"].startswith("prefill-") and metrics["tokens_by_source"]["draft"] > 0


def test_strangers_are_kept_out(deployed: Deployed) -> None:
    """Ray without its token, the gateway without a key, Control without the admin key."""
    url = f"{deployed.dashboard}/api/serve/applications/"
    control = f"http://127.0.0.1:{deployed.tree['control']['port']}"

    assert httpx.put(url, json=deployed.serve_config).status_code == 401
    assert httpx.post(f"{deployed.dashboard}/api/jobs/", json={"entrypoint": "id"}).status_code == 401
    assert httpx.get(f"{deployed.gateway}/v1/models").status_code == 401
    assert httpx.get(f"{control}/admin/api/versions").status_code in (401, 403)


def test_a_changed_configuration_breaks_no_stream(deployed: Deployed) -> None:
    """`paceline deploy` with the chart's configuration, changed: the one gateway, the one decode worker and all others are
    replaced while clients stream without a pause, and every text stays the same."""
    prompts = [f"What is {2000 + 7 * n} + {1000 + 3 * n}? Show the work." for n in range(4)]
    wanted = [deployed.stream(prompt)[0] for prompt in prompts]
    before = deployed.pids("prefill", "decode", "draft", "gateway")
    enough = threading.Event()

    def client(number: int) -> list[str]:
        mine, texts = deployed.client(), []  # it keeps its connections as long as the gateway does
        while not enough.is_set():
            texts.append(deployed.stream(prompts[number], client=mine)[0])
        return texts

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(client, number) for number in range(4)]
        try:
            time.sleep(2.0)
            done = deployed.deploy("speculation.depth=4")
            time.sleep(2.0)
        finally:
            enough.set()
        texts = [future.result() for future in running]  # a failed stream raises here

    after = deployed.wait_for(prefill=1, decode=1, draft=1, gateway=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(not before[role] & after[role] for role in before), (before, after)
    assert [set(found) for found in texts] == [{text} for text in wanted]
    print(f"{sum(map(len, texts))} streams went through the change")


def test_another_number_of_replicas_restarts_nobody(deployed: Deployed) -> None:
    before = deployed.wait_for(prefill=1, decode=1, draft=1, gateway=1)

    done = deployed.deploy("speculation.depth=4", "decode.replicas=2")
    more = deployed.wait_for(prefill=1, decode=2, draft=1, gateway=1)

    assert done.returncode == 0 and "running" in done.stdout, done.stdout + done.stderr
    assert more["decode"] > before["decode"]
    assert {role: more[role] for role in ("prefill", "draft", "gateway")} == {
        role: before[role] for role in ("prefill", "draft", "gateway")
    }


def test_a_wrong_configuration_leaves_what_runs_alone(deployed: Deployed) -> None:
    """One line says what is wrong; streams go on."""
    before = deployed.pids("decode", "gateway")

    done = deployed.deploy("decode.replicas=2", "link.interface=127.0.0.1")

    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "link.interface=127.0.0.1: a loopback address, but Ray has 2 nodes" in " ".join(
        done.stderr.split()
    )
    assert deployed.pids("decode", "gateway") == before
    assert deployed.stream("Say hello.", max_tokens=8)[0]
