"""A running cluster -> what an operator sees: a real Prometheus' panels and alerts, logs, traces, `paceline doctor`."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from otlp import Collector, attributes, collecting
from paceline.cluster.metrics import Metrics
from paceline.deploy.eyes import alerts, dashboard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RULES = Path(__file__).resolve().parents[2] / "deploy/prometheus/paceline.rules.yaml"
ROLES = ("gateway", "router", "prefill", "decode", "draft", "trainer", "control")
WINDOW = "20s"
"""What Grafana would choose for a scrape each second, and some more: this machine is busy."""
MAY_BE_NAN = {"Right among the verified", "Prompt tokens found in the cache"}
"""Ratios of things that need not have happened. A quantile of no observations is NaN as well, and is looked at apart."""


@dataclass
class Eyes:
    """A cluster, and everything that looks at it."""

    cluster: Any
    collector: Collector
    prometheus: str
    request_id: str

    def query(self, expr: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.prometheus}/api/v1/query", params={"query": expr}, timeout=10.0).json()
        assert answer["status"] == "success", (expr, answer)
        return list(answer["data"]["result"])

    def firing(self) -> set[str]:
        found = httpx.get(f"{self.prometheus}/api/v1/alerts", timeout=10.0).json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in found if alert["state"] == "firing"}


def until(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """What it came to; it must in time."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.3)
    return found


@pytest.fixture(scope="module")
def eyes(start_cluster: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Eyes]:
    """One cluster that learns, a Prometheus that scrapes it each second, a collector of its traces, and some traffic."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    with collecting() as collector:
        cluster = start_cluster("eyes", "learning.enabled=true", f"telemetry.otlp_endpoint={collector.url}")
        with _prometheus(folder, cluster.control) as url:
            until(lambda: httpx.get(f"{cluster.control}/admin/api/status").json()["learning"]["live"])
            _talk(cluster.url)
            yield Eyes(cluster, collector, url, "eyes-3")


class _prometheus:
    """The real one, on a free port, with our rules as they are."""

    def __init__(self, folder: Path, control: str) -> None:
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {"job_name": "paceline", "static_configs": [{"targets": [control.removeprefix("http://")]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self._command = [
            "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]  # fmt: skip
        self._log = folder / "log"

    def __enter__(self) -> str:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until(self._is_ready, 30.0)
        return self.url

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=2.0).is_success
        except httpx.HTTPError:
            return False

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20.0)


def _talk(url: str) -> None:
    """Twelve streams, four at a time, long enough for drafts and different enough for hand-offs."""

    def ask(number: int) -> None:
        question = f"Turn this into a JSON record: Ada Rossi is {20 + number} years old, works as a teacher in Lisbon."
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": 60, "temperature": 0, "stream": True}
        headers = {"x-request-id": f"eyes-{number}"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120.0)
        assert answer.is_success and "[DONE]" in answer.text

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(12)))


def test_every_panel_shows_something(eyes: Eyes) -> None:
    """Each query of the dashboard, as Grafana would send it, has a result in a real Prometheus; numbers, not NaN."""
    asked = {
        (panel.title, query.expr.replace("$all", 'job=~".*"').replace("$__rate_interval", WINDOW))
        for panel in dashboard.panels()
        for query in panel.queries
    }

    def empty() -> set[tuple[str, str]]:
        return {(title, expr) for title, expr in asked if not eyes.query(expr)}

    end = time.monotonic() + 40
    while (missing := empty()) and time.monotonic() < end:
        time.sleep(1.0)
    assert missing == set()
    _talk(eyes.cluster.url)  # figures of the last seconds
    time.sleep(3.0)
    unclear = {
        title
        for title, expr in asked
        if "histogram_quantile" not in expr and all(r["value"][1] == "NaN" for r in eyes.query(expr))
    }
    assert unclear <= MAY_BE_NAN
    for name in (
        "ttft_seconds",
        "inter_token_seconds",
        "queue_seconds",
        "kv_exposed_seconds",
        "draft_round_trip_seconds",
    ):
        (count,) = eyes.query(f"sum (paceline_{name}_count)")
        assert float(count["value"][1]) > 0, name


def test_accepted_tokens_per_step_are_there_by_source_and_version(eyes: Eyes) -> None:
    """The figure that says whether drafts help, under the name of the draft that is live."""
    live = eyes.cluster.status()["learning"]["live"]

    found = eyes.query("sum by (source, version) (paceline_tokens_total)")
    tokens = {(r["metric"]["source"], r["metric"]["version"]): float(r["value"][1]) for r in found}
    steps = {
        r["metric"]["version"]: float(r["value"][1])
        for r in eyes.query("sum by (version) (paceline_stream_steps_total)")
    }

    assert live in steps and steps[live] > 0
    assert tokens["draft", live] > 0
    assert tokens["target", live] <= steps[live] + 1e-9
    assert eyes.query(f'paceline_draft_versions{{version="{live}",state="live"}} == 1')


def test_every_role_reports_what_the_catalogue_says(eyes: Eyes) -> None:
    """And nothing that is not in it; what has no value yet need not be there."""
    answer = httpx.get(f"{eyes.cluster.control}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, set[str]] = {role: set() for role in ROLES}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation
        for sample in family.samples:
            found[sample.labels["role"]].add(family.name)

    for role, names in found.items():
        mine = [e for e in Metrics().catalogue if role in e.roles]
        known = {e.name.removesuffix("_total") for e in mine}
        certain = {e.name.removesuffix("_total") for e in mine if not e.labels or e.values}
        assert certain <= names <= known, (role, certain - names, names - known)


def test_one_request_is_found_in_the_logs_of_everybody_who_served_it(eyes: Eyes) -> None:
    """By the id that the client gave it: gateway, router, prefill, decode and draft worker, in JSON."""
    state = json.loads((eyes.cluster.home / "run" / "eyes" / "state.json").read_text())
    logs = Path(state["ray_folder"]) / "session_latest" / "logs"

    def found() -> dict[str, dict[str, Any]]:
        lines = [line for file in logs.glob("worker-*.err") for line in file.read_text().splitlines()]
        events = [
            json.loads(line) for line in lines if f'"{eyes.request_id}' in line and line.startswith("{")
        ]
        assert all(event["process"] in ROLES for event in events)
        return {event["process"]: event for event in events}

    until(lambda: {"gateway", "router", "prefill", "decode", "draft"} <= found().keys(), 20.0)
    by_role = found()
    assert by_role["gateway"]["event"] == "request_done" and by_role["gateway"]["status"] == 200
    assert by_role["gateway"]["decode"] == [by_role["router"]["decode"]]
    assert all(re.match(r"20\d\d-\d\d-\d\dT", event["timestamp"]) for event in by_role.values())


def test_traces_of_requests_reach_the_collector(eyes: Eyes) -> None:
    """With workers, KV and drafts of the real thing."""

    def root() -> Any:
        named = [span for span in eyes.collector.spans if span.name.startswith("chat ")]
        return next((s for s in named if attributes(s)["paceline.request.id"] == eyes.request_id), None)

    span = until(root, 30.0)
    children = {s.name: attributes(s) for s in eyes.collector.spans if s.parent_span_id == span.span_id}
    assert children.keys() == {"route", "prefill", "decode"}
    assert children["prefill"]["paceline.prefill.worker"].startswith("prefill-")
    assert (
        children["prefill"]["paceline.kv.source"] == ["link"] and children["prefill"]["paceline.kv.bytes"] > 0
    )
    assert children["decode"]["paceline.steps"] > 0
    assert attributes(span)["gen_ai.usage.output_tokens"] > 10


def test_the_doctor_finds_a_cluster_that_runs_well(eyes: Eyes) -> None:
    done = eyes.cluster.cli("doctor", "--json")
    report = json.loads(done.stdout)

    failed = [finding for finding in report["findings"] if finding["level"] == "fail"]
    assert done.returncode == 0 and failed == [], failed
    found = {finding["check"]: finding for finding in report["findings"]}
    assert "twice the same" in found["completion"]["found"]
    assert (
        found["registry"]["level"] == found["capture's storage"]["level"] == found["metrics"]["level"] == "ok"
    )


def test_a_worker_that_dies_raises_its_alert(eyes: Eyes) -> None:
    """All rules are loaded and well; none fires until a draft worker is killed."""
    loaded = httpx.get(f"{eyes.prometheus}/api/v1/rules").json()["data"]["groups"][0]["rules"]
    assert {rule["name"] for rule in loaded} == {f"Paceline{alert.name}" for alert in alerts.ALERTS}
    assert all(rule["health"] == "ok" for rule in loaded), [r for r in loaded if r["health"] != "ok"]
    assert eyes.firing() == set()

    draft = eyes.cluster.worker("draft")
    psutil.Process(draft["pid"]).kill()

    until(lambda: "PacelineWorkerLost" in eyes.firing(), 30.0)
    (lost,) = eyes.query('sum by (kind) (paceline_workers_lost_total{kind="draft"}) > 0')
    assert float(lost["value"][1]) == 1
    eyes.cluster.wait_for("draft", draft["pid"])
