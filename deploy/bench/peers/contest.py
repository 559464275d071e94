"""One peer's Python and one model -> rows: its fastest settings first, then blocks alternated with our engine's.

Same weights, prompts and cores; greedy, every request to its full length. A peer is stopped while our engine runs; CPU
time that the waiting side takes all the same is measured and shown. What a peer cannot do is named, never replaced.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from paceline.cluster.types import Request
from paceline.deploy.bench import inprocess
from paceline.deploy.bench.check import Judge
from paceline.deploy.bench.figures import Count, alternate, rate, ratio
from paceline.deploy.bench.peers.compare import Agreement
from paceline.deploy.bench.peers.process import Opening, PeerFailed, PeerProcess
from paceline.deploy.bench.report import PeerRow
from paceline.deploy.bench.workload import Workload
from paceline.workers.model_runner import ModelRunner

SHORT = {"transformers": "hf", "vllm": "vllm", "llamacpp": "llamacpp"}
"""Peer -> its part of a figure's name."""
MAX_LEN = 1024
_PROBES = 1_000_000
"""Index of the first request that settings are tried with; blocks never get there."""
Settings = dict[str, Any]
Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Size:
    """How long and how much."""

    streams: tuple[int, ...]
    pairs: int
    block_s: float
    num_tokens: int
    """Of each request."""


@dataclass(frozen=True, slots=True)
class Ours:
    """Our engine on one model, and what judges both sides."""

    scenario: str
    target: Path
    draft: Path | None
    """None: speculation is not compared."""
    runner: ModelRunner
    make_drafter: inprocess.DrafterFactory | None
    num_threads: int
    workload: Workload
    judge: Judge

    def requests(self, first: int, num: int, num_tokens: int) -> list[Request]:
        """Greedy and of full length."""
        return self.workload.requests(
            self.scenario, first, num, max_tokens=num_tokens, greedy=True, stops=False
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to run a peer, tried: tokens per second for each number of streams, or why it cannot be run."""

    settings: Settings
    rates: Mapping[int, float]
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.settings['name']}: not run: {self.error}"
        rates = ", ".join(f"{rate:.0f} tok/s at {streams}" for streams, rate in self.rates.items())
        return f"{self.settings['name']}: {rates}"


@dataclass(slots=True)
class Outcome:
    """All about one peer on one model."""

    rows: list[PeerRow] = field(default_factory=list)
    trials: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    """Figures that there are not, and why."""


class Contest:
    """One peer against our engine on one model."""

    def __init__(self, peer: str, python: Path, ours: Ours, size: Size, work: Path, say: Say) -> None:
        """`work`: an empty folder, for what the peer makes."""
        self._peer = peer
        self._python = python
        self._driver: Any = importlib.import_module(f"paceline.deploy.bench.peers.drive_{peer}")
        self._ours = ours
        self._size = size
        self._work = work
        self._say = say
        self._process: PeerProcess | None = None
        self._settings: Settings = {}
        """Of the process."""
        self.outcome = Outcome()

    def measure(self) -> Outcome:
        """Without drafts at every number of streams, then the best of both sides for one stream."""
        try:
            plain = self._try(self._driver.plain(inprocess.thread_counts()), self._size.streams)
            for streams in self._size.streams:
                self._figure("off", streams, plain, plain)
            if self._ours.draft is not None and 1 in self._size.streams:
                self._speculation(plain)
        finally:
            self._close()
        return self.outcome

    def _speculation(self, plain: Sequence[Trial]) -> None:
        without = _best(plain, 1)
        if without is None:
            self.outcome.not_run.append(f"{self._name('best', 1)}: it does not run without drafts either")
            return
        tried = self._try(self._driver.speculative(without.settings), (1,))
        if _best(tried, 1) is None:
            # Not a comparison with its plain decoding under another name.
            self._figure("best", 1, tried, tried)
        else:
            # Drafts that lose are no baseline: the best it can do may be to do without.
            self._figure("best", 1, [*tried, without], tried)

    # -- settings ----------------------------------------------------------------------------------------

    def _try(self, candidates: Sequence[Settings], streams: Sequence[int]) -> list[Trial]:
        """Every candidate on the same few requests."""
        trials = []
        for settings in candidates:
            self._say(f"{self._peer}, {self._ours.scenario}: trying {settings['name']}")
            trials.append(self._trial(settings, streams))
            self.outcome.trials.append(f"{self._peer}, {self._ours.scenario}: {trials[-1]}")
        return trials

    def _trial(self, settings: Settings, streams: Sequence[int]) -> Trial:
        rates: dict[int, float] = {}
        try:
            process = self._open(settings)
            for number in streams:
                requests = self._ours.requests(_PROBES, max(2, number), self._size.num_tokens)
                seconds = [self.run(process, requests, number)[1] for _ in range(3)]
                rates[number] = len(requests) * self._size.num_tokens / min(seconds[1:])
        except PeerFailed as error:
            self._close()
            return Trial(settings, {}, str(error))
        return Trial(settings, rates)

    def _open(self, settings: Settings) -> PeerProcess:
        """The open process, if that is how it was opened; another one otherwise."""
        if self._process is None or settings != self._settings:
            self._close()
            ours, most = self._ours, max(self._size.streams)
            draft = str(ours.draft) if ours.draft is not None else None
            max_len = min(MAX_LEN, ours.runner.max_context)
            opening = Opening(str(ours.target), draft, str(self._work), most, max_len, settings)
            self._process = PeerProcess(self._python, Path(self._driver.__file__), opening)
            self._settings = settings
        return self._process

    def _close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def run(
        self, process: PeerProcess, requests: Sequence[Request], streams: int
    ) -> tuple[dict[str, list[int]], float]:
        """Outputs by request, and the peer's seconds."""
        prompts = [request.prompt_ids for request in requests]
        outputs, seconds = process.run(prompts, self._size.num_tokens, streams)
        return {request.id: tokens for request, tokens in zip(requests, outputs, strict=True)}, seconds

    # -- figures -----------------------------------------------------------------------------------------

    def _figure(self, kind: str, streams: int, trials: Sequence[Trial], shown: Sequence[Trial]) -> None:
        """One row, with the fastest of the trials; or why there is none."""
        name, best = self._name(kind, streams), _best(trials, streams)
        if best is None:
            reason = shown[0].error if shown else "it has nothing of the kind"
            self.outcome.not_run.append(f"{name}: {reason}")
            return
        self._say(f"{self._peer}, {self._ours.scenario}: {kind}, {streams} streams")
        try:
            pairs = _Pairs(self, self._open(best.settings), self._ours, self._size, kind, streams)
            self.outcome.rows.append(pairs.measure(name, self._peer, best.settings["threads"]))
        except PeerFailed as error:
            self._close()
            self.outcome.not_run.append(f"{name}: {error}")

    def _name(self, kind: str, streams: int) -> str:
        """Tasks that the draft knows go without saying."""
        scenario = "" if self._ours.scenario == "domains" else f"{self._ours.scenario}."
        return f"peer.{SHORT[self._peer]}.{kind}.{scenario}{streams}"


class _Pairs:
    """The blocks of one figure, and what was seen beside their speed."""

    def __init__(
        self, contest: Contest, process: PeerProcess, ours: Ours, size: Size, kind: str, streams: int
    ) -> None:
        self._contest = contest
        self._process = process
        self._ours = ours
        self._size = size
        self._streams = streams
        self._drafts = kind == "best"
        with inprocess.threads(ours.num_threads):
            drafter = ours.make_drafter(ours.runner) if self._drafts and ours.make_drafter else None
        self._engine = inprocess.new_engine(ours.runner, drafter, streams)
        self._theirs: dict[str, list[int]] = {}
        self._agreement = Agreement()
        self._watch = _Watch(process)

    def measure(self, name: str, peer: str, num_threads: int) -> PeerRow:
        """Warm up, find the length of a block, alternate."""
        ours, size, streams = self._ours, self._size, self._streams
        probe = ours.requests(_PROBES, streams, size.num_tokens)
        slower = max(
            min(side(probe).seconds for _ in range(2)) for side in (self._their_block, self._our_block)
        )
        num = streams * max(1, round(size.block_s / slower))
        self._agreement, self._watch = Agreement(), _Watch(self._process)

        def requests(index: int) -> list[Request]:
            return ours.requests(index * num, num, size.num_tokens)

        counts = alternate(
            {
                "peer": lambda i: self._their_block(requests(i)),
                "ours": lambda i: self._our_block(requests(i)),
            },
            size.pairs,
        )
        agreement = self._agreement
        return PeerRow(
            name,
            "with drafts" if self._drafts else "without drafts",
            f"{peer}: {self._process.text}",
            streams,
            num_threads,
            rate(counts["ours"]),
            rate(counts["peer"]),
            ratio(counts["ours"], counts["peer"]),
            agreement.num_same,
            agreement.num_requests,
            num_near_ties=agreement.num_near_ties,
            widest_near_tie=agreement.widest_near_tie,
            different=tuple(agreement.different),
            waiting_cpu=self._watch.waiting,
            others_cpu=self._watch.others,
            versions=self._process.versions,
        )

    def _their_block(self, requests: list[Request]) -> Count:
        outputs, seconds = self._watch.during(
            "ours", lambda: self._contest.run(self._process, requests, self._streams)
        )
        self._theirs = outputs
        return Count(sum(map(len, outputs.values())), seconds)

    def _our_block(self, requests: list[Request]) -> Count:
        with inprocess.threads(self._ours.num_threads), self._process.stopped():
            tally = self._watch.during(
                "peer", lambda: inprocess.generate(self._engine, requests, self._streams)
            )
        for request in requests:
            theirs = self._theirs[request.id]
            self._agreement.compare(self._ours.judge, request, tally.outputs[request.id], theirs)
        return tally.count


class _Watch:
    """CPU time of whoever should be waiting, and of everybody else, while either side runs."""

    def __init__(self, process: PeerProcess) -> None:
        self._process = process
        self._seconds = self._waiting = self._others = 0.0

    def during(self, waits: str, work: Callable[[], T]) -> T:
        """Run it; "ours" or "peer" waits meanwhile."""
        before, began = self._read(), time.perf_counter()
        result = work()
        self._seconds += time.perf_counter() - began
        spent = {name: now - before[name] for name, now in self._read().items()}
        self._waiting += spent[waits]
        self._others += spent["machine"] - spent["ours"] - spent["peer"]
        return result

    def _read(self) -> dict[str, float]:
        times = psutil.cpu_times()
        machine = times.user + times.system + getattr(times, "nice", 0.0)
        return {"ours": time.process_time(), "peer": self._process.cpu_seconds(), "machine": machine}

    @property
    def waiting(self) -> float:
        """Of a core, on average."""
        return self._waiting / max(1e-9, self._seconds)

    @property
    def others(self) -> float:
        """The same."""
        return max(0.0, self._others) / max(1e-9, self._seconds)


def _best(trials: Sequence[Trial], streams: int) -> Trial | None:
    """The fastest of those that ran."""
    ran = [trial for trial in trials if streams in trial.rates]
    return max(ran, key=lambda trial: trial.rates[streams], default=None)
