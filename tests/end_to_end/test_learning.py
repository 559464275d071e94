"""Traffic that the draft does not know -> a real cluster learns it: trained, scored, in canary, live; kills on the way.

Training runs at idle priority: on a busy machine it takes as long as others leave it nothing, hence the long limits.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import httpx
import psutil
import pytest
from transformers import AutoTokenizer

from paceline.cluster.config import model_folder
from paceline.deploy.bench.workload import chat
from paceline.deploy.models import tasks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS = (
    "speculation.control=fixed",
    "speculation.sources=[draft]",
    "learning.enabled=true",
    "learning.train.min_requests=30",
    "learning.train.max_steps=20",
    "learning.train.save_steps=2",
    "learning.train.learning_rate=0.001",
    "learning.gate.min_requests=20",
    "learning.capture.holdout=0.4",
    "learning.capture.flush_s=1",
    "learning.rollout.canary_share=0.3",
    "learning.rollout.canary_min_requests=30",
    "learning.rollout.canary_max_s=10",
    "learning.rollout.watch_s=5",
    "learning.rollout.backoff_s=5",
    "learning.guard.ttft_p99_ms=60000",
    "learning.guard.inter_token_p99_ms=30000",
    "learning.min_return=0",
)
LIMIT_S = 300.0
"""For each stage."""


class Traffic:
    """Clients that ask for what the shipped draft was not trained on, until they are told to stop."""

    def __init__(self, url: str, num_clients: int = 3) -> None:
        self.url = url
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder("bundled/target"))
        self.errors: list[str] = []
        self.versions: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(num_clients)]

    def body(self, seed: int) -> dict[str, Any]:
        item = next(tasks.items(tasks.UNKNOWN_TO_DRAFT[0], "new_words", seed))
        return {
            "model": "paceline-small",
            "prompt": chat(self.tokenizer, item.request),
            "max_tokens": 64,
            "temperature": 0.7,
            "seed": seed,
            "store": True,
            "metadata": {"domain": "unknown"},
        }

    def ask(self, http: httpx.Client, seed: int) -> dict[str, Any]:
        response = http.post(f"{self.url}/v1/completions", json=self.body(seed), timeout=120)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def _ask(self, index: int) -> None:
        with httpx.Client() as http:
            for k in itertools.count():
                if self._stop.wait(0.3):
                    return
                try:
                    self.ask(http, 1_000_003 * (index + 1) + k)
                except (httpx.HTTPError, AssertionError) as error:
                    self.errors.append(repr(error)[:300])

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


class Admin:
    """What an operator sees, with the key that the cluster made; asked again where control is just away."""

    def __init__(self, cluster: Any) -> None:
        key = (cluster.home / "admin.key").read_text().strip()
        self._url = f"{cluster.control}/admin/api"
        self._headers = {"authorization": f"Bearer {key}"}

    def get(self, path: str) -> Any:
        response = httpx.get(f"{self._url}{path}", headers=self._headers, timeout=20.0)
        assert response.status_code == 200, response.text
        return response.json()

    def until(self, what: str, found: Any) -> Any:
        """Ask again and again until `found(overview)` is something."""
        end, overview = time.monotonic() + LIMIT_S, {"learning": {}, "alarms": []}
        while time.monotonic() < end:
            time.sleep(0.2)
            try:
                overview = self.get("/overview")
            except httpx.TransportError:  # control is killed in one test, and comes back
                continue
            if result := found(overview):
                return result
        raise AssertionError(
            f"not within {LIMIT_S:.0f} s: {what}; {json.dumps(overview['learning'])} {overview['alarms']}"
        )


@pytest.fixture(scope="module")
def learner(start_cluster: Callable[..., Any]) -> Any:
    """A cluster that learns fast, from everybody."""
    return start_cluster("learner", *SETTINGS)


def trainers(cluster: Any) -> list[psutil.Process]:
    """The process of the run that is on."""
    found = []
    for process in psutil.process_iter():
        try:
            is_run = "paceline.workers.training.process" in " ".join(process.cmdline())
            if is_run and process.environ().get("PACELINE_HOME") == str(cluster.home):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_cluster_learns_what_it_serves(learner: Any) -> None:
    """train -> score -> canary -> live -> kept, with the run's process and its trainer killed on the way.

    No request fails, one request with one seed gives one text before and after, and the registry knows it all.
    """
    admin = Admin(learner)
    base = admin.until("a live version", lambda o: o["live"] and o["live"]["version"])
    with Traffic(learner.url) as traffic, httpx.Client() as http:
        before = [traffic.ask(http, seed)["choices"][0]["text"] for seed in range(5)]

        run = admin.until("a run trains", lambda o: o["run"] and o["run"]["step"] >= 3 and o["run"])
        for process in trainers(learner):
            process.kill()
        again = admin.until(
            "the run goes on", lambda o: o["run"] and o["run"]["step"] > run["step"] and o["run"]
        )
        assert again["run_id"] == run["run_id"]
        psutil.Process(learner.worker("trainer")["pid"]).kill()

        live = admin.until(
            "another version is live",
            lambda o: o["live"]["version"] != base and o["live"]["version"],
        )
        admin.until("it is kept", lambda o: o["canary"] is None and o["learning"]["state"] != "watching")
        after = [traffic.ask(http, seed)["choices"][0]["text"] for seed in range(5)]

    assert traffic.errors == []
    assert after == before
    runs = {r["run_id"]: r for r in admin.get("/runs")["items"]}
    assert runs[run["run_id"]]["state"] == "done" and runs[run["run_id"]]["result"] == live
    detail = admin.get(f"/versions/{live}")
    assert detail["parent"] == base and detail["report"]["passed"]
    assert detail["trained_on"][0]["num_requests"] >= 5
    kinds = {entry["state"] for entry in detail["history"]}
    assert {"canary", "live"} <= kinds
    marks = {mark["kind"] for mark in admin.get("/figures?window_s=3600")["marks"]}
    assert {"train", "gate", "canary", "promote", "swap"} <= marks
    acceptance = {v["version"]: v["acceptance"] for v in admin.get("/versions")["items"]}
    assert acceptance[live] > acceptance[base] + 0.05


def test_control_that_was_killed_knows_everything_again(learner: Any) -> None:
    """What is live stays live, in the registry and in the draft workers; revisions go on growing."""
    admin = Admin(learner)
    live = admin.get("/overview")["live"]["version"]
    old = learner.worker("control")["pid"]

    psutil.Process(old).kill()
    learner.wait_for("control", not_pid=old)

    found = admin.until("control is back", lambda o: o["live"] and o["live"]["version"])
    assert found == live
    drafts = admin.until(
        "draft workers follow the new control",
        lambda o: [w for w in admin.get("/workers") if w["draft"] and w["draft"]["is_current"]],
    )
    assert drafts[0]["draft"]["live"] == live
