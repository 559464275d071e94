"""A chart's serveConfigV2 and `paceline deploy` -> the application on a Ray cluster that runs already, changed under load."""

from __future__ import annotations

import base64
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from charts import Helm
from deployed import Deployed, free_port, ray_nodes
from memory_kube import MemoryKube

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = {
    "prefill": {"threads": 1, "kv_memory_mb": 96},
    "decode": {"threads": 1, "kv_memory_mb": 96},
    "draft": {"threads": 1},
}


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

    with ray_nodes(home, admin) as (url, token):
        yield Deployed(url, token, home, serve_config, secret["key"].decode(), admin)


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
    assert metrics["prefill_worker"].startswith("prefill-")
    end = time.monotonic() + 60  # the first steps of a cluster are for the clock to compare
    while not metrics["tokens_by_source"].get("draft"):
        assert time.monotonic() < end, metrics
        text, metrics = deployed.stream("What is 3468 + 2795? Show the work.", max_tokens=96)


def test_strangers_are_kept_out(deployed: Deployed) -> None:
    """Ray without its token, the gateway without a key, Control without the admin key."""
    url = f"{deployed.dashboard}/api/serve/applications/"
    control = f"http://127.0.0.1:{deployed.tree['control']['port']}"

    assert httpx.put(url, json=deployed.serve_config).status_code == 401
    assert httpx.post(f"{deployed.dashboard}/api/jobs/", json={"entrypoint": "id"}).status_code == 401
    assert httpx.get(f"{deployed.gateway}/v1/models").status_code == 401
    assert httpx.get(f"{control}/admin/api/versions").status_code in (401, 403)


def test_keys_are_made_limited_and_revoked_while_the_cluster_runs(deployed: Deployed) -> None:
    """By Control's API, which the gateway follows; the router counts. Revoked, a key is refused within two seconds."""
    control = f"http://127.0.0.1:{deployed.tree['control']['port']}"
    headers = {"authorization": f"Bearer {deployed.admin}"}
    body = {"name": "limited", "requests_per_minute": 2, "tokens_per_minute": 100_000}
    made = httpx.post(f"{control}/admin/api/keys", json=body, headers=headers)
    assert made.status_code == 201, made.text
    key, secret = made.json()["key"], made.json()["secret"]

    def ask(path: str = "/v1/completions") -> httpx.Response:
        asked = {"model": "paceline-small", "prompt": "1 + 1", "max_tokens": 4, "seed": 1}
        bearer = {"authorization": f"Bearer {secret}"}
        if path != "/v1/completions":
            return httpx.get(f"{deployed.gateway}{path}", headers=bearer)
        return httpx.post(f"{deployed.gateway}{path}", json=asked, headers=bearer, timeout=60.0)

    def seconds_until(status: int) -> float:
        began = time.monotonic()
        while ask("/v1/models").status_code != status:
            assert time.monotonic() - began < 10, status
            time.sleep(0.02)
        return time.monotonic() - began

    assert seconds_until(200) < 2.0
    answers = [ask() for _ in range(3)]
    user = httpx.get(f"{control}/admin/api/keys", headers={"authorization": f"Bearer {secret}"})
    revoked = httpx.delete(f"{control}/admin/api/keys/{key['id']}", headers=headers)
    took_s = seconds_until(401)

    assert [answer.status_code for answer in answers] == [200, 200, 429], answers[0].text
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    used = answers[0].json()["usage"]["total_tokens"]
    assert int(answers[1].headers["x-ratelimit-remaining-tokens"]) <= 100_000 - used
    assert 1 <= int(answers[2].headers["retry-after"]) <= 61
    assert user.status_code == 403 and revoked.status_code == 200
    assert took_s < 2.0
    print(f"refused {took_s * 1000:.0f} ms after it was revoked")


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
