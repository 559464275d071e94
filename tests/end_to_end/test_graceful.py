"""Sixteen clients without a pause -> workers come, go, are replaced and die, nodes are emptied, and no request notices."""

from __future__ import annotations

import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import pytest

from deployed import PACELINE, Deployed, free_port, ray_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]
NUM_CLIENTS = 16
PROMPTS = [f"What is {2000 + 7 * n} + {1000 + 3 * n}? Show the work." for n in range(NUM_CLIENTS)]
ROLES = ("prefill", "decode", "draft", "gateway")
ONE_EACH = dict.fromkeys(ROLES, 1)
TREE: dict[str, Any] = {
    "preset": "cluster",
    "prefill": {"threads": 1},
    "decode": {"threads": 1, "max_streams": 6},
    "draft": {"threads": 1},
    # Drafts are asked for in every step, whether that pays here or not.
    "speculation": {"control": "fixed", "sources": ["draft"]},
}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """One worker of each role on a head and two nodes, either of which has room for all of them."""
    home = tmp_path_factory.mktemp("graceful")
    ports = {name: {"host": "127.0.0.1", "port": free_port()} for name in ("gateway", "control")}
    file = {"applications": [{"args": {"config": {**TREE, **ports}}}]}
    with ray_nodes(home, admin := "pla_" + secrets.token_hex(20), num_workers=2) as (url, token):
        found = Deployed(url, token, home, file, "none", admin)
        done = found.deploy()
        assert done.returncode == 0, done.stdout + done.stderr
        found.wait_for(**ONE_EACH)
        yield found


@pytest.fixture(scope="module")
def texts(deployed: Deployed) -> list[str]:
    """What each client must read, every time."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda prompt: deployed.stream(prompt)[0], PROMPTS))


class Clients:
    """Sixteen of them, each of which asks its question again and again; at the end none was ever let down."""

    def __init__(self, deployed: Deployed, texts: list[str]) -> None:
        self.pause_s = 0.0
        """Between two questions of one client, in the mean."""
        self.num_answers = 0
        self._deployed, self._texts = deployed, texts
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self._running: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._running = [self._pool.submit(self._ask, number) for number in range(NUM_CLIENTS)]
        self.answer(2 * NUM_CLIENTS)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.answer(2 * NUM_CLIENTS)
        self._is_over.set()
        self._pool.shutdown()
        for future in self._running:
            future.result()  # a failed stream, or another text, raises here

    def answer(self, count: int) -> None:
        """Wait for so many more answers."""
        wanted, end = self.num_answers + count, time.monotonic() + 120
        while self.num_answers < wanted:
            assert time.monotonic() < end, f"{self.num_answers} answers, {wanted} wanted"
            for future in self._running:
                if future.done():
                    future.result()
            time.sleep(0.1)

    def _ask(self, number: int) -> None:
        client, pauses = self._deployed.client(), random.Random(number)
        while not self._is_over.is_set():
            text, _ = self._deployed.stream(PROMPTS[number], client=client)
            assert text == self._texts[number]
            self.num_answers += 1
            self._is_over.wait(pauses.expovariate(1 / self.pause_s) if self.pause_s else 0)


def until(condition: Callable[[], object], limit_s: float, what: str) -> float:
    """Wait for something to become true; the seconds that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, f"{what}: not within {limit_s:g} s"
        time.sleep(0.3)
    return time.monotonic() - began


def test_decode_workers_come_and_go_by_hand(deployed: Deployed, texts: list[str]) -> None:
    """1 -> 3 -> 1 by `paceline deploy`, under sixteen streams."""
    with Clients(deployed, texts) as clients:
        assert deployed.deploy("decode.replicas=3").returncode == 0
        deployed.wait_for(**{**ONE_EACH, "decode": 3})
        clients.answer(3 * NUM_CLIENTS)
        assert deployed.deploy("decode.replicas=1").returncode == 0
        deployed.wait_for(**ONE_EACH)

    print(f"{clients.num_answers} answers")


def test_decode_workers_follow_the_load(deployed: Deployed, texts: list[str]) -> None:
    """1 -> 3 by itself, because sixteen streams are more than one worker's six; and -> 1 when clients take their time."""
    limits = ("scaling.up_after_s=2", "scaling.down_after_s=5")
    assert deployed.deploy("decode.max_replicas=2", *limits).returncode == 0
    before = deployed.wait_for(**ONE_EACH)
    assert deployed.deploy("decode.max_replicas=3", *limits).returncode == 0
    assert deployed.wait_for(**ONE_EACH) == before  # other bounds restart nobody

    with Clients(deployed, texts) as clients:
        up = until(lambda: len(deployed.pids("decode")["decode"]) == 3, 150, "three decode workers")
        assert before["decode"] <= deployed.pids("decode")["decode"]
        clients.answer(3 * NUM_CLIENTS)
        clients.pause_s = 8.0
        down = until(lambda: len(deployed.pids("decode")["decode"]) == 1, 150, "one decode worker")
        clients.pause_s = 0.0

    print(
        f"{clients.num_answers} answers; three workers after {up:.0f} s, one {down:.0f} s after the load fell"
    )
    assert deployed.deploy().returncode == 0
    deployed.wait_for(**ONE_EACH)


def test_a_rolling_restart_is_not_seen(deployed: Deployed, texts: list[str]) -> None:
    """Another configuration: every process but the nodes' own is another one afterwards."""
    before = deployed.wait_for(**ONE_EACH)
    with Clients(deployed, texts) as clients:
        done = deployed.deploy("speculation.depth=4")
        assert done.returncode == 0, done.stdout + done.stderr
        after = deployed.wait_for(**ONE_EACH)

    print(f"{clients.num_answers} answers")
    assert all(not before[role] & after[role] for role in ROLES)


def test_a_lost_draft_worker_is_not_missed(deployed: Deployed, texts: list[str]) -> None:
    """SIGKILL to the only one; another comes, and drafts again."""
    (victim,) = deployed.wait_for(**ONE_EACH)["draft"]
    with Clients(deployed, texts) as clients:
        os.kill(victim, signal.SIGKILL)
        until(lambda: deployed.pids("draft")["draft"] - {victim}, 90, "another draft worker")

    print(f"{clients.num_answers} answers")
    assert deployed.stream(PROMPTS[0])[1]["tokens_by_source"]["draft"] > 0


def test_a_node_is_emptied_under_load(deployed: Deployed, texts: list[str]) -> None:
    """`paceline drain`: all of its workers go on elsewhere, then Ray has one node less. The head cannot be drained."""
    until(lambda: len(deployed.workers()) == 6, 60, "one worker of each role, router and Control")
    places = {w["role"]: w["node"] for w in deployed.workers()}
    with Clients(deployed, texts) as clients:
        began = time.monotonic()
        done = deployed.run(*PACELINE, "drain", places["decode"], "--limit-s", "180")
        took = time.monotonic() - began

    print(f"{clients.num_answers} answers; drained in {took:.0f} s: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    deployed.wait_for(**ONE_EACH)
    assert places["decode"] not in {w["node"] for w in deployed.workers()}
    refused = deployed.run(*PACELINE, "drain", places["control"])
    assert refused.returncode == 2 and "the head cannot leave" in refused.stderr
