"""deploy/cluster.yaml's template -> a real `ray up` on three hosts of this machine, a stream through them, and nothing left."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from network_hosts import Hosts, why_not
from paceline.cluster.config import load_config
from paceline.deploy.ray_cluster import Files, Host, cluster_yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
preset: cluster
gateway: {drain_s: 5}
prefill: {threads: 1}
decode: {threads: 1}
draft: {threads: 1}
speculation: {control: fixed, sources: [draft]}
"""
NODES = """
import json, ray
ray.init(address="auto", log_to_driver=False, configure_logging=False, logging_level="ERROR")
print("NODES", json.dumps([[n["NodeManagerAddress"], n["Alive"], n["Resources"]] for n in ray.nodes()]))
"""
CLIENT = """
import json, sys, httpx
key, url = sys.argv[1:]
body = {"model": "paceline-small", "temperature": 0, "max_tokens": 64, "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "What is 3468 + 2795? Show the work."}]}
text, metrics = "", {}
with httpx.stream("POST", url + "/v1/chat/completions", json=body, headers={"authorization": "Bearer " + key},
                  timeout=120) as answer:
    assert answer.status_code == 200, answer.read()
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            metrics = event.get("metrics") or metrics
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
print("STREAM", json.dumps([text, metrics]))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """A head and two workers."""
    if reason := why_not():
        pytest.skip(f"hosts on this machine: {reason}")
    # Short: sockets and shebangs lie below it.
    found = Hosts(tmp_path_factory.mktemp("h"), ["head", "one", "two"])
    yield found
    found.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built outside the tree, as `ray up` installs it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("cluster", "workers", "kernels", "deploy"):
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree" / name)
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(folder / "tree")], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def cluster(hosts: Hosts, wheel: Path) -> Iterator[str]:
    """Path of the file, of a cluster that is up; at the end `ray down`, and then nothing may be left."""
    folder = hosts.root
    (folder / "paceline.yaml").write_text(CONFIG)
    token = hosts.launch("ray", "get-auth-token", "--generate")
    assert token.returncode == 0, token.stderr
    text = cluster_yaml(
        load_config(folder / "paceline.yaml"),
        "onprem",
        files=Files(config=str(folder / "paceline.yaml"), wheel=str(wheel), ssh_key=str(folder / "key")),
        head=hosts.address["head"],
        hosts=[Host(hosts.address["one"], ("prefill",)), Host(hosts.address["two"], ("decode", "draft"))],
        ssh_user="root",
    )
    path = folder / "cluster.yaml"
    path.write_text(text)
    began = time.monotonic()
    up = hosts.launch("ray", "up", "-y", "--no-config-cache", str(path))
    print(f"ray up: {time.monotonic() - began:.1f} s")
    try:
        assert up.returncode == 0, f"{up.stdout[-4000:]}\n---\n{up.stderr[-2000:]}\n---\n{serve_logs(hosts)}"
        yield str(path)
    finally:
        began = time.monotonic()
        down = hosts.launch("ray", "down", "-y", str(path))
        print(f"ray down: {time.monotonic() - began:.1f} s")
    assert down.returncode == 0, (down.stdout + down.stderr)[-4000:]
    # The launcher ends Ray on the head; nodes end by themselves once they have missed it.
    end = time.monotonic() + 100
    while time.monotonic() < end and any(hosts.commands(name) for name in hosts.address):
        time.sleep(0.5)
    print(f"nothing is left {time.monotonic() - began:.1f} s after `ray down` began")
    assert {name: hosts.remains(name) for name in hosts.address} == {"head": [], "one": [], "two": []}


def until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit_s:g} s"
        time.sleep(0.5)


def serve_logs(hosts: Hosts) -> str:
    """The end of what Ray's dashboard and Serve's controller on the head wrote: what explains a failed deployment."""
    logs = "/tmp/ray/session_latest/logs"
    what = f"tail -n 15 {logs}/dashboard.log {logs}/serve/*.log {logs}/worker*.err"
    return "\n".join(hosts.on(name, what).stdout[-3000:] for name in hosts.address)


def execute(hosts: Hosts, cluster: str, command: str) -> str:
    """`ray exec`."""
    done = hosts.launch("ray", "exec", "--no-config-cache", cluster, command)
    assert done.returncode == 0, (
        f"{done.stdout[-2000:]}\n---\n{done.stderr[-1000:]}\n---\n{serve_logs(hosts)}"
    )
    return done.stdout


def nodes(hosts: Hosts) -> dict[str, dict[str, float]]:
    """Address -> resources of the living nodes."""
    (hosts.root / "nodes.py").write_text(NODES)
    done = hosts.on("head", f"RAY_AUTH_MODE=token python {hosts.root}/nodes.py")
    match = re.search(r"^NODES (.*)$", done.stdout, re.MULTILINE)
    assert match, done.stdout + done.stderr
    return {address: resources for address, alive, resources in json.loads(match[1]) if alive}


def workers(hosts: Hosts) -> dict[str, dict[str, Any]]:
    """By role, as Control tells them on its own host; elsewhere nobody reaches it."""
    done = hosts.on("head", "curl -s http://127.0.0.1:8001/admin/api/status")
    return {w["role"]: w for w in json.loads(done.stdout)["workers"]}


def test_every_host_joins(hosts: Hosts, cluster: str) -> None:
    """Head and both workers, with the room that the file gives them; and none of them leaves again."""
    wanted = {hosts.address[name] for name in ("head", "one", "two")}
    end = time.monotonic() + 90
    while nodes(hosts).keys() != wanted:
        assert time.monotonic() < end, nodes(hosts)
        time.sleep(1.0)

    found = nodes(hosts)

    assert found[hosts.address["one"]]["paceline_prefill"] == 1
    assert (
        found[hosts.address["two"]]["paceline_decode"] == found[hosts.address["two"]]["paceline_draft"] == 1
    )
    assert found[hosts.address["head"]]["paceline_control"] == 1
    time.sleep(12.0)  # two rounds of the autoscaler
    assert nodes(hosts).keys() == wanted


def test_the_application_runs_on_the_wheel(hosts: Hosts, cluster: str) -> None:
    """What the last start command handed over comes up: the third command in the file's own comment waits for it."""
    said = execute(hosts, cluster, "paceline deploy --ray auto --config ~/paceline.yaml")
    found = workers(hosts)

    assert "running" in said
    assert {
        role: w["node"].split("/")[0] for role, w in found.items() if role in ("prefill", "decode", "draft")
    } == {
        "prefill": "one",
        "decode": "two",
        "draft": "two",
    }
    where = hosts.on("two", 'python -c "import paceline.workers as w; print(w.__file__)"').stdout
    assert str(hosts.home("two")) in where


def test_a_stream_goes_through_all_hosts(hosts: Hosts, cluster: str) -> None:
    """From the launcher to the head's gateway; KV from one host to the other; drafts."""
    said = execute(hosts, cluster, "cat ~/.paceline/first-key.json")
    match = re.search(r"\"key\": \"(pl_\S+)\"", said)
    assert match, said
    (hosts.root / "client.py").write_text(CLIENT)
    url = f"http://{hosts.address['head']}:8000"

    done = hosts.launch("python", str(hosts.root / "client.py"), match[1], url)
    refused = hosts.launch("python", str(hosts.root / "client.py"), "pl_wrong", url)

    assert done.returncode == 0, done.stderr
    text, metrics = json.loads(done.stdout.split("STREAM ", 1)[1])
    assert "3 + 5" in text or "8 + 5" in text
    assert metrics["kv_source"] == ["link"] and metrics["kv_bytes"] > 0
    assert metrics["prefill_worker"].startswith("prefill-") and metrics["tokens_by_source"]["draft"] > 0
    assert refused.returncode != 0 and "invalid_api_key" in refused.stderr or "401" in refused.stderr


def test_others_reach_the_gateway_and_nothing_else(hosts: Hosts, cluster: str) -> None:
    """Ray's dashboard and jobs, and Control, listen on the head's loopback only."""
    for port in (8265, 8001):
        done = hosts.launch("curl", "-s", "--max-time", "3", f"http://{hosts.address['head']}:{port}/")
        assert done.returncode == 7, (port, done.stdout)


def test_another_configuration_is_two_commands(hosts: Hosts, cluster: str) -> None:
    """The file of the configuration is copied again, and handed over again."""
    changed = {**yaml.safe_load(CONFIG), "speculation": {"enabled": False}}
    (hosts.root / "paceline.yaml").write_text(yaml.safe_dump(changed))
    before = {role: w["pid"] for role, w in workers(hosts).items()}

    copied = hosts.launch("ray", "rsync-up", cluster, str(hosts.root / "paceline.yaml"), "~/paceline.yaml")
    execute(hosts, cluster, "paceline deploy --ray auto --config ~/paceline.yaml")

    assert copied.returncode == 0, copied.stderr
    after = workers(hosts)
    assert after["decode"]["pid"] != before["decode"]


def test_a_host_is_emptied_before_it_is_serviced(hosts: Hosts, cluster: str) -> None:
    """`paceline drain` on it, by its own Ray token: its prefill worker ends in time, and prompts are computed elsewhere."""
    assert "prefill" in workers(hosts)

    done = hosts.on("one", "paceline drain --limit-s 25", limit_s=90.0)

    assert done.returncode == 0 and "drained" in done.stdout, done.stdout + done.stderr
    assert "prefill" not in workers(hosts)
    until(lambda: hosts.commands("one") == [], 15.0, "nothing of Ray on the host")


def test_a_host_that_was_emptied_stays_away_until_it_is_back(hosts: Hosts, cluster: str) -> None:
    """Ray's autoscaler misses it for half a minute and starts Ray on it again; then its prefill worker would be there again."""
    time.sleep(50.0)
    assert hosts.address["one"] not in nodes(hosts) and "prefill" not in workers(hosts)

    assert hosts.on("one", "touch ~/.paceline/joins").returncode == 0

    until(lambda: workers(hosts).get("prefill", {}).get("state") == "ready", 150.0, "its prefill worker")
    assert workers(hosts)["prefill"]["node"].startswith("one/")
