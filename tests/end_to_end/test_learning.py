"""Traffic that the draft does not know -> a real cluster learns it: trained, scored, in canary, live; kills on the way.

The tests are stages of one story, on one cluster under one stream of traffic. Training runs at idle priority: on a busy
machine it takes as long as others leave it nothing, hence the long limits; runs are small, so that it is seconds else.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import httpx
import psutil
import pytest
from transformers import AutoTokenizer

from paceline.cluster.config import model_folder
from paceline.deploy.bench.workload import chat
from paceline.deploy.models import tasks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SETTINGS = (
    "speculation.control=fixed",
    "speculation.sources=[draft]",
    "learning.enabled=true",
    "learning.train.min_requests=30",
    "learning.train.max_steps=30",
    "learning.train.batch_tokens=384",
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
LIMIT_S = 150.0
"""For each thing that is waited for."""


class Traffic:
    """Clients that ask for what the shipped draft was not trained on, until they are told to stop."""

    def __init__(self, url: str, num_clients: int = 2) -> None:
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

    def press(self, action: str) -> None:
        """One of the dashboard's buttons that ask for nothing more."""
        url = f"{self._url}/actions/{action}"
        response = httpx.post(url, json={}, headers=self._headers, timeout=20.0)
        assert response.status_code == 200, response.text

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


@dataclass
class Story:
    """What the stages tell each other."""

    cluster: Any
    admin: Admin
    traffic: Traffic
    base: str
    """The version that is live before anything was learnt."""
    texts: list[str]
    """What some requests are answered before."""

    def ask(self) -> list[str]:
        """The same requests again."""
        with httpx.Client() as http:
            return [self.traffic.ask(http, seed)["choices"][0]["text"] for seed in range(5)]


@pytest.fixture(scope="module")
def story(start_cluster: Callable[..., Any]) -> Iterator[Story]:
    """A cluster that learns fast, from everybody; clients ask it all the time."""
    cluster = start_cluster("learner", *SETTINGS)
    admin, traffic = Admin(cluster), Traffic(cluster.url)
    base = admin.until("a live version", lambda o: o["live"] and o["live"]["version"])
    found = Story(cluster, admin, traffic, base, [])
    found.texts = found.ask()
    with traffic:
        yield found


def test_a_run_goes_on_after_its_process_and_its_trainer_were_killed(story: Story) -> None:
    """Under its id, from the last state it saved, to a version that is published."""
    admin = story.admin
    run = admin.until("a run trains", lambda o: o["run"] and o["run"]["step"] >= 3 and o["run"])
    for process in trainers(story.cluster):
        process.kill()
    admin.until("the run goes on", lambda o: admin.get(f"/runs/{run['run_id']}")["step"] > run["step"])
    psutil.Process(story.cluster.worker("trainer")["pid"]).kill()

    done = admin.until("the run is over", lambda o: ended(admin, run["run_id"]))

    assert done["state"] == "done" and done["result"] not in ("", story.base)
    assert done["error"] == "" and story.traffic.errors == []


def ended(admin: Admin, run_id: str) -> Any:
    run = admin.get(f"/runs/{run_id}")
    return run if run["state"] in ("done", "failed", "stopped") else None


def test_what_was_learnt_goes_live_and_no_text_changes(story: Story) -> None:
    """score -> canary -> live -> kept: no request fails, one request with one seed gives one text, the draft is better."""
    admin, base = story.admin, story.base
    live = admin.until(
        "another version is live", lambda o: o["live"]["version"] != base and o["live"]["version"]
    )
    admin.until("it is kept", lambda o: o["canary"] is None and o["learning"]["state"] != "watching")

    assert story.ask() == story.texts
    assert story.traffic.errors == []
    detail = admin.get(f"/versions/{live}")
    assert detail["parent"] == base and detail["report"]["passed"]
    assert admin.get(f"/runs/{detail['run_id']}")["result"] == live
    assert detail["trained_on"][0]["num_requests"] >= 5
    assert {"canary", "live"} <= {entry["state"] for entry in detail["history"]}
    marks = {mark["kind"] for mark in admin.get("/figures?window_s=3600")["marks"]}
    assert {"train", "gate", "canary", "promote", "swap"} <= marks
    acceptance = {v["version"]: v["acceptance"] for v in admin.get("/versions")["items"]}
    assert acceptance[live] > acceptance[base] + 0.05


def test_control_that_was_killed_knows_everything_again(story: Story) -> None:
    """What is live stays live, in the registry and in the draft workers; revisions go on growing."""
    admin, cluster = story.admin, story.cluster
    admin.press("pause")
    admin.until(
        "nothing is on its way", lambda o: o["canary"] is None and o["learning"]["state"] != "preparing"
    )
    live = admin.get("/overview")["live"]["version"]
    old = cluster.worker("control")["pid"]

    psutil.Process(old).kill()
    cluster.wait_for("control", not_pid=old)

    found = admin.until("control is back", lambda o: o["live"] and o["live"]["version"])
    assert found == live
    drafts = admin.until(
        "draft workers follow the new control",
        lambda o: [w for w in admin.get("/workers") if w["draft"] and w["draft"]["is_current"]],
    )
    assert drafts[0]["draft"]["live"] == live
    assert story.traffic.errors == []
