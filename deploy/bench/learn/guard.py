"""Open-loop arrivals beside training on the same cores -> what training costs requests, and what it gets done.

Training is stopped and continued by signal in alternate blocks; each block has the same arrivals. Inter-token latency
is the time from the first to the last part of an answer over the tokens between; gaps are those between parts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from paceline.cluster.errors import PacelineError
from paceline.cluster.types import Request
from paceline.deploy.bench import clients
from paceline.deploy.bench.clients import Raw
from paceline.deploy.bench.figures import Figure, median
from paceline.deploy.bench.learn.traffic import Cluster, in_domain, learning_cluster
from paceline.deploy.bench.workload import Workload

Say = Callable[[str], None]

_SETTINGS = (
    "learning.train_automatically=false",
    "learning.train.max_steps=1000000",
    "learning.capture.flush_s=1",
)
_CAPACITY_STREAMS = 8
_FULL_STREAMS = 16
_BURST = 8
"""Requests that come at the same moment."""
_START_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Size:
    """How long and how much."""

    num_captured: int = 80
    num_capacity: int = 96
    solo_s: float = 15.0
    pairs: int = 30
    block_s: float = 8.0
    num_bursts: int = 12
    full_s: float = 20.0
    load: float = 0.5
    """Arrivals, as a share of the measured capacity."""
    max_tokens: int = 48
    seed: int = 0


QUICK = Size(num_captured=40, num_capacity=32, solo_s=6.0, pairs=3, block_s=4.0, num_bursts=3, full_s=6.0)


@dataclass(slots=True)
class GuardReport:
    """One entry for each block, with training or without."""

    itl_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    p99_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    burst_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """From a burst to the first part of its last answer."""
    capacity: float = 0.0
    """Requests a second."""
    solo: float = 0.0
    """Tokens a second that training learns from with the machine to itself, and then beside requests ..."""
    shared: float = 0.0
    full: float = 0.0
    """... and at full load."""

    def figures(self) -> dict[str, float]:
        """By the names of the bench."""
        found: dict[str, float] = {}
        for name, values in (("itl_ratio", self.itl_s), ("itl_p99_ratio", self.p99_s)):
            found |= _ratio(values).entries(f"guard.{name}")
        waited = [1e3 * (on - off) for on, off in zip(self.burst_s[True], self.burst_s[False], strict=True)]
        return {
            **found,
            **median(waited).entries("guard.yield_ms"),
            "guard.trainer_share": self.shared / self.solo if self.solo else 0.0,
            "guard.trainer_share_full": self.full / self.solo if self.solo else 0.0,
            "guard.trainer_solo_tokens_s": self.solo,
            "guard.capacity_requests_s": self.capacity,
        }


def _ratio(values: dict[bool, list[float]]) -> Figure:
    return median([on / off for on, off in zip(values[True], values[False], strict=True)])


class GuardBench:
    """One cluster, one run that does not end."""

    def __init__(self, target: Path, draft: Path, size: Size, say: Say) -> None:
        self._size = size
        self._say = say
        self._settings = [f"model.target={target}", f"model.draft={draft}", *_SETTINGS]
        self._workload = Workload(target, seed=size.seed)
        self._dice = np.random.default_rng(size.seed)
        self._next = 0

    def run(self) -> GuardReport:
        """All of it.

        Raises:
            PacelineError: the cluster or the run did not start, or a request failed.
        """
        size, report = self._size, GuardReport()
        with learning_cluster(self._settings) as cluster:
            cluster.run(self._requests("unseen", size.num_captured), _CAPACITY_STREAMS, "captured", {})
            window = cluster.run(
                self._requests("domains", size.num_capacity), _CAPACITY_STREAMS, "capacity", {}
            )
            report.capacity = window.num_requests / window.seconds
            self._say(f"capacity: {report.capacity:.1f} requests/s")
            training = _Training(cluster)
            report.solo = training.rate(lambda: time.sleep(size.solo_s))
            self._say(f"training alone: {report.solo:.0f} tokens/s")
            shared: list[float] = []
            for index in range(size.pairs):
                self._pair(cluster, training, report, shared, index)
            report.shared = float(np.mean(shared))
            for index in range(size.num_bursts):
                for on in (True, False) if index % 2 else (False, True):
                    training.allow(on)
                    time.sleep(1.0)
                    report.burst_s[on].append(self._burst(cluster, index))
            training.allow(True)
            report.full = self._full_load(cluster, training, report)
        return report

    def _pair(
        self, cluster: Cluster, training: _Training, report: GuardReport, shared: list[float], index: int
    ) -> None:
        size = self._size
        num = max(4, round(size.load * report.capacity * size.block_s))
        starts = np.sort(self._dice.uniform(0, size.block_s, num)).tolist()
        requests = self._requests("domains", num)
        for on in (True, False) if index % 2 else (False, True):
            training.allow(on)
            answers: list[Raw] = []

            def block(on: bool = on, answers: list[Raw] = answers) -> None:
                answers += self._send(cluster, requests, starts, f"open-{index}-{on}")

            if on:
                shared.append(training.rate(block))
            else:
                block()
            itl, p99 = latencies(answers)
            report.itl_s[on].append(itl)
            report.p99_s[on].append(p99)
        self._say(f"pair {index + 1} of {size.pairs}: {report.itl_s[True][-1] / report.itl_s[False][-1]:.3f}")

    def _burst(self, cluster: Cluster, index: int) -> float:
        answers = self._send(cluster, self._requests("domains", _BURST), [0.0] * _BURST, f"burst-{index}")
        return max(answer.ttft_s for answer in answers)

    def _full_load(self, cluster: Cluster, training: _Training, report: GuardReport) -> float:
        """Training's rate while all streams are taken: more requests than are answered meanwhile wait."""
        num = _FULL_STREAMS + round(1.3 * report.capacity * self._size.full_s)
        requests = self._requests("domains", num)
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(cluster.run, requests, _FULL_STREAMS, "full", {})
            time.sleep(1.0)
            rate = training.rate(lambda: time.sleep(self._size.full_s))
            answered.result()
        return rate

    def _send(self, cluster: Cluster, requests: list[Request], starts: list[float], salt: str) -> list[Raw]:
        served = cluster.served
        bodies = [clients.post(r, model=served.model, salt=f"{salt}/{r.id}") for r in requests]
        return asyncio.run(clients.run_open(served.host, served.port, bodies, starts))

    def _requests(self, scenario: str, num: int) -> list[Request]:
        first, self._next = self._next, self._next + num
        found = self._workload.requests(scenario, first, num, max_tokens=self._size.max_tokens)
        return in_domain(found, scenario)


def latencies(answers: list[Raw]) -> tuple[float, float]:
    """Mean seconds a token behind the first part, and the 99th percentile of gaps between parts."""
    spans, tokens, gaps = 0.0, 0, []
    for raw in answers:
        num = clients.read(raw).num_tokens
        if len(raw.times) > 1 and num > 1:
            spans += raw.times[-1] - raw.times[0]
            tokens += num - 1
            gaps += np.diff(raw.times).tolist()
    return spans / max(1, tokens), float(np.quantile(gaps, 0.99)) if gaps else 0.0


class _Training:
    """The trainer's child process, and how much it has learnt from."""

    def __init__(self, cluster: Cluster) -> None:
        """Begin a run and wait until it trains."""
        self._cluster = cluster
        cluster.post("actions/train", {"tag": ""})
        until = time.monotonic() + _START_LIMIT_S
        while (run := self._run()) is None or run["state"] != "training" or not run["step"]:
            if time.monotonic() > until:
                raise PacelineError(f"training did not begin: {run}")
            time.sleep(0.2)
        [trainer] = cluster.served.pids["trainer"]
        self._processes = psutil.Process(trainer).children(recursive=True)

    def allow(self, on: bool) -> None:
        """Let it go on, or hold it."""
        for process in self._processes:
            process.resume() if on else process.suspend()

    def rate(self, work: Callable[[], None]) -> float:
        """Tokens a second that it learns from while `work` lasts. It tells once a second, so single blocks are rough."""
        first, began = self._tokens()
        work()
        last, ended = self._tokens()
        return (last - first) / (ended - began)

    def _tokens(self) -> tuple[float, float]:
        """Tokens so far, and when that was asked."""
        run = self._run()
        if run is None:
            raise PacelineError("the run ended")
        return float(run["num_tokens"]), time.monotonic()

    def _run(self) -> Any:
        return self._cluster.get("overview")["run"]
