"""Whole requests, alternated -> the cluster over HTTP against the engine in this process: ratios, shares, costs by role.

Starts a cluster of its own in a home of its own. The clock runs over whole requests of `streams` clients, then over the
same requests in an engine with as many threads as the decode worker's; both must give the same texts.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster.config import ClusterConfig, load_config
from paceline.cluster.errors import PacelineError
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.types import SOURCE_DRAFT, SOURCE_NAMES, Request, Sampling
from paceline.deploy import local
from paceline.deploy.bench import clients, handoff, inprocess, report
from paceline.deploy.bench.clients import Answer
from paceline.deploy.bench.figures import Count, Figure, alternate, median, rate, ratio
from paceline.deploy.bench.suite import WAVES, Options, Say, block_size
from paceline.deploy.bench.workload import Workload

LONG_PROMPT = 1000
"""Tokens of the prompts whose hand-offs are timed."""
_LONG_OUTPUT = 4
_LONG_GROUPS = 12
_DRAFT = SOURCE_NAMES[SOURCE_DRAFT]
_DRAFTING = ("speculation.control=fixed", "speculation.sources=[draft]")
"""Every step asks a draft worker, whether it pays on this machine or not: what drafts are worth is told from there."""
_DRAFTING_STREAMS = 4
_SETTLE_S = 10.0
"""For figures to reach control, which workers tell once a second."""
_PACELINE = [sys.executable, "-m", "paceline.deploy.cli"]


# --- a cluster to measure -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """A running cluster that nobody else uses."""

    host: str
    port: int
    control: str
    model: str
    pids: dict[str, list[int]]
    """Of each role."""

    def counters(self) -> Counters:
        """What all workers have told control so far."""
        text = httpx.get(f"{self.control}/metrics", timeout=10.0).raise_for_status().text
        values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
        return Counters(values)

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of each role so far."""
        return {role: sum(map(_cpu_seconds, pids)) for role, pids in self.pids.items()}


@contextmanager
def serving(settings: Sequence[str]) -> Iterator[Served]:
    """Start a cluster as a user does, on free ports; end it and remove everything.

    Raises:
        PacelineError: it did not start.
    """
    home = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    environment = {**os.environ, "PACELINE_HOME": str(home)}
    given = ["gateway.port=0", "control.port=0", *settings]
    arguments = ["serve", "--detach", *(part for setting in given for part in ("--set", setting))]
    # Whoever ends this process must not leave its cluster behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        done = subprocess.run(
            [*_PACELINE, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise PacelineError(f"the cluster did not start:\n{done.stdout}{done.stderr}")
        state = local.read_state(home / "run" / "local")
        assert state is not None, "a cluster that is ready has a state"
        gateway = urlsplit(state["gateway"])
        workers = httpx.get(f"{state['control']}/admin/api/status", timeout=10.0).json()["workers"]
        pids: dict[str, list[int]] = {}
        for worker in workers:
            pids.setdefault(worker["role"], []).append(worker["pid"])
        known = {pid for found in pids.values() for pid in found}
        # What Ray runs beside the workers is the cluster's as well.
        pids["ray"] = [p.pid for p in local.processes_of(state["run_id"]) if p.pid not in known]
        model = ClusterConfig.model_validate(state["config"]).model.name
        assert gateway.hostname is not None and gateway.port is not None
        yield Served(gateway.hostname, gateway.port, state["control"], model, pids)
    finally:
        # In a session of its own: a second Ctrl-C must not stop the stopping.
        subprocess.run(
            [*_PACELINE, "stop"], env=environment, capture_output=True, check=False, start_new_session=True
        )
        shutil.rmtree(home, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True, slots=True)
class Counters:
    """Samples of all workers at one moment, or what was added between two."""

    values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]

    def __sub__(self, before: Counters) -> Counters:
        return Counters({key: value - before.values.get(key, 0.0) for key, value in self.values.items()})

    def __add__(self, other: Counters) -> Counters:
        names = self.values.keys() | other.values.keys()
        return Counters({key: self.values.get(key, 0.0) + other.values.get(key, 0.0) for key in names})

    def mean(self, name: str) -> float:
        """Of a histogram's observations; 0 without any."""
        return self.total(f"{name}_sum") / max(1.0, self.total(f"{name}_count"))

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        return sum(
            value
            for (sample, found), value in self.values.items()
            if sample == f"paceline_{name}" and labels.items() <= dict(found).items()
        )


# --- what the answers say -------------------------------------------------------------------------------


@dataclass(slots=True)
class Shares:
    """Sums over the answers of a scenario."""

    num_requests: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_events: int = 0
    num_drafted: int = 0
    kv_bytes: int = 0
    kv_sources: Counter[str] = field(default_factory=Counter)
    by_source: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    recoveries: int = 0

    def add(self, answer: Answer) -> None:
        metrics = answer.metrics
        self.num_requests += 1
        self.num_tokens += answer.num_tokens
        self.num_events += answer.num_events
        self.num_steps += metrics["num_steps"]
        self.num_drafted += metrics["speculative_decoding"]["num_draft_tokens"]
        self.kv_bytes += metrics["kv_bytes"]
        self.kv_sources.update(metrics["kv_source"])
        self.by_source.update(metrics["tokens_by_source"])
        self.recoveries += metrics["recoveries"]
        self.ttft_s.append(answer.ttft_s)

    @property
    def remote_prompts(self) -> float:
        """Prompts that a prefill worker computed; those found in a prefix cache are nobody's."""
        asked = self.kv_sources.total() - self.kv_sources["local:prefix_hit"]
        return self.kv_sources["link"] / max(1, asked)

    def accepted(self, source: str) -> float:
        """Share of the emitted tokens."""
        return self.by_source[source] / max(1, self.by_source.total())

    def complaints(self, *, needs_drafts: bool = False) -> list[str]:
        """Where the requests did not go the way they were meant to."""
        found = []
        if self.remote_prompts < 1:
            ways = ", ".join(f"{name} {num}" for name, num in sorted(self.kv_sources.items()))
            found.append(f"not all prompts came from a prefill worker: {ways}")
        if needs_drafts and not self.by_source[_DRAFT]:
            found.append("no token came from a draft worker")
        if self.recoveries:
            found.append(f"{self.recoveries} streams were moved to another worker")
        return found


def late_share(added: Counters) -> float:
    """Of the streams that were asked for at a draft worker, those whose draft came too late."""
    name = "draft_replies_total"
    asked = added.total(name) - added.total(name, outcome="unasked")
    return added.total(name, outcome="late") / max(1.0, asked)


# --- the run --------------------------------------------------------------------------------------------


class HttpSuite:
    """One run: engine and cluster side by side, and the measurements in order."""

    def __init__(
        self, folders: tuple[Path, Path], options: Options, settings: Sequence[str], say: Say
    ) -> None:
        say("loading the models")
        self._target, self._draft = folders
        self._options = options
        self._settings = (
            f"decode.threads={options.threads}",
            f"model.target={self._target}",
            f"model.draft={self._draft}",
            *settings,
        )
        self._say = say
        config = load_config(None, self._settings)
        self._threads = config.decode.threads
        self._speculates = config.speculation.enabled
        self._runner = inprocess.load(self._target)
        self._make_drafter = inprocess.drafters(self._draft, config.speculation)
        self._workload = Workload(self._target, seed=options.seed)
        self._tokenizer = Tokenizer(self._target)
        self._told = Shares()
        """Of everything this cluster has answered."""
        self.report = report.Report(
            self._card(), options.quick, options.pairs, report.versions(), compared="the cluster's text against the engine's"
        )  # fmt: skip

    def _card(self) -> dict[str, str]:
        options = self._options
        cores = inprocess.thread_counts()[-1]
        length = f"{options.pairs} pairs of {options.block_s:g} s a block, or of {WAVES} requests a client if that is more"
        versions = ", ".join(f"{name} {number}" for name, number in report.versions().items())
        return {
            "target": self._runner.version,
            "machine": f"{report.cpu_name()}, {cores} cores, shared by cluster, clients and engine",
            "threads": f"{self._threads} for the decode worker and for the engine; {options.waiting}",
            "clients": "in this process, raw sockets, answers read when the clock has stopped; their share of a core is below",
            "set": " ".join(self._settings[3:]) or "nothing; all defaults",
            "run": f"{length}{'; quick: too few to decide anything' if options.quick else ''}; {versions}",
        }

    def measure(self) -> None:
        """All figures; no cluster is left when this returns."""
        self._say(f"copying and checking the KV of {handoff.PROMPT} tokens")
        with inprocess.threads(self._threads):
            hands = handoff.Handoff(handoff.random_runner(self._options.seed))
            self.report.figures["kv.handoff_share"] = hands.share(2 if self._options.quick else _LONG_GROUPS)
        with self._cluster(self._settings):
            for name in self._options.scenarios:
                for streams in self._options.streams:
                    self._say(f"{name}, {streams} streams")
                    self._scenario(name, streams)
            self._say(f"prompts of {LONG_PROMPT} tokens")
            self._long_prompts()
        if not self._speculates:
            return
        with self._cluster((*self._settings, *_DRAFTING)):
            self._say(f"domains, {_DRAFTING_STREAMS} streams that always ask a draft worker")
            self._drafts()

    @contextmanager
    def _cluster(self, settings: Sequence[str]) -> Iterator[None]:
        """What the measurements inside ask."""
        self._say("starting a cluster")
        with serving(settings) as served, asyncio.Runner() as loop:
            self._served, self._loop, self._told = served, loop, Shares()
            yield
            self._say("stopping it")

    # -- over HTTP against the engine --------------------------------------------------------------------

    def _scenario(self, name: str, streams: int) -> None:
        options = self._options
        with inprocess.threads(self._threads):
            drafter = self._make_drafter(self._runner) if self._speculates else None
        engine = inprocess.new_engine(self._runner, drafter, streams)
        costs, shares, outputs = _Costs(), Shares(), dict[str, list[int]]()

        def of_engine(requests: list[Request]) -> inprocess.Tally:
            with inprocess.threads(self._threads):
                tally = inprocess.generate(engine, requests, streams)
            outputs.clear()
            outputs.update(tally.outputs)
            return tally

        def of_cluster(requests: list[Request]) -> tuple[Count, list[Answer], float]:
            answers, spent = self._ask(requests, f"{name}/{streams}", streams)
            self._compare(requests, answers, outputs)
            return Count(sum(a.num_tokens for a in answers), spent.seconds), answers, spent.cpu_s

        warm_up = self._workload.requests(name, 1_000_000, max(8, streams), max_tokens=options.max_tokens)
        slower = max(of_engine(warm_up).seconds, of_cluster(warm_up)[0].seconds)
        num = block_size(slower, len(warm_up), streams, options.block_s)
        before = self._settled()

        def engine_block(index: int) -> Count:
            cpu = time.process_time()
            requests = self._workload.requests(name, index * num, num, max_tokens=options.max_tokens)
            count = of_engine(requests).count
            costs.add({"engine alone": time.process_time() - cpu})
            return count

        def http_block(index: int) -> Count:
            requests = self._workload.requests(name, index * num, num, max_tokens=options.max_tokens)
            cpu, machine = self._served.cpu_seconds(), _machine_seconds()
            count, answers, client_s = of_cluster(requests)
            spent = {role: s - cpu[role] for role, s in self._served.cpu_seconds().items()}
            costs.add(spent | {"clients": client_s})
            costs.seconds += count.seconds
            costs.others_s += _machine_seconds() - machine - sum(spent.values()) - client_s
            for answer in answers:
                shares.add(answer)
            return count

        counts = alternate({"engine": engine_block, "http": http_block}, options.pairs)
        added = self._settled() - before
        self.report.add_http(_row(name, streams, counts, shares, costs, added))
        where = f"{name}, {streams} streams"
        self.report.complaints += [f"{where}: {text}" for text in shares.complaints()]

    def _ask(
        self, requests: Sequence[Request], salt: str, streams: int
    ) -> tuple[list[Answer], clients.Spent]:
        """Requests through the gateway; no two of a run share a prefix in any cache."""
        served, first = self._served, self._told.num_requests
        bodies = [
            clients.post(request, model=served.model, salt=f"{salt}/{first + i}")
            for i, request in enumerate(requests)
        ]
        raw, spent = self._loop.run(clients.run(served.host, served.port, bodies, streams))
        answers = [clients.read(item) for item in raw]
        for answer in answers:
            self._told.add(answer)
        return answers, spent

    def _compare(
        self, requests: Sequence[Request], answers: Sequence[Answer], outputs: Mapping[str, Sequence[int]]
    ) -> None:
        """Every text against the engine's."""
        exactness = self.report.exactness
        for request, answer in zip(requests, answers, strict=True):
            expected = outputs[request.id]
            exactness.num_requests += 1
            exactness.num_tokens += len(expected)
            if answer.text != self._tokenizer.decode(expected) or answer.num_tokens != len(expected):
                exactness.mismatches += 1
                exactness.examples.append(request.id)

    def _settled(self) -> Counters:
        """The cluster's figures, once all that was answered so far is in them."""
        told, end = self._told, time.monotonic() + _SETTLE_S
        while True:
            counters = self._served.counters()
            found = (
                counters.total("ttft_seconds_count") - told.num_requests,
                counters.total("tokens_total") - told.by_source.total(),
                counters.total("kv_exposed_seconds_count") - told.kv_sources["link"],
            )
            if min(found) >= 0:
                return counters
            if time.monotonic() > end:
                raise PacelineError(
                    f"control lacks figures of what was answered {_SETTLE_S:g} s ago: {found}"
                )
            time.sleep(0.05)

    # -- drafts ------------------------------------------------------------------------------------------

    def _drafts(self) -> None:
        """Every step asks: what share of the text a draft worker foretells, and how often it is late."""
        num, streams = (16 if self._options.quick else 96), _DRAFTING_STREAMS
        self._ask(self._known(1_000_000, 2 * streams), "drafts", streams)
        before = self._settled()
        requests, shares = self._known(0, num), Shares()
        with inprocess.threads(self._threads):
            outputs = inprocess.generate(
                inprocess.new_engine(self._runner, None, streams), requests, streams
            ).outputs
        answers, _ = self._ask(requests, "drafts", streams)
        self._compare(requests, answers, outputs)
        for answer in answers:
            shares.add(answer)
        figures = self.report.figures
        figures["draft.remote.accepted_share"] = Figure.exactly(shares.accepted(_DRAFT))
        figures["draft.late_share"] = Figure.exactly(late_share(self._settled() - before))
        self.report.complaints += [f"drafts: {text}" for text in shares.complaints(needs_drafts=True)]

    def _known(self, first: int, num: int) -> list[Request]:
        return self._workload.requests("domains", first, num, max_tokens=self._options.max_tokens)

    # -- hand-offs ---------------------------------------------------------------------------------------

    def _long_prompts(self) -> None:
        """One stream at a time; what its hand-off adds to its time to the first token."""
        groups = 3 if self._options.quick else _LONG_GROUPS
        num = 2 if self._options.quick else 4
        exposed: list[float] = []
        digests: list[float] = []
        shares, total = Shares(), Counters({})
        engine = inprocess.new_engine(self._runner, None, 1)
        self._ask(self._long_requests(1_000_000, 2), "long", 1)
        before = self._settled()
        for index in range(groups):
            requests = self._long_requests(index * num, num)
            with inprocess.threads(self._threads):
                outputs = inprocess.generate(engine, requests, 1).outputs
            answers, _ = self._ask(requests, "long", 1)
            self._compare(requests, answers, outputs)
            for answer in answers:
                shares.add(answer)
            after = self._settled()
            added, before = after - before, after
            ttft_s = added.total("ttft_seconds_sum")
            exposed.append(added.total("kv_exposed_seconds_sum") / ttft_s)
            digests.append(added.total("kv_digest_seconds_total") / ttft_s)
            total = total + added
        self.report.complaints += [f"long prompts: {text}" for text in shares.complaints()]
        figures = self.report.figures
        figures["kv.exposed_share"] = median(exposed)
        figures["kv.digest_share"] = median(digests)
        figures["kv.exposed_ms"] = Figure.exactly(1e3 * total.mean("kv_exposed_seconds"))
        figures["kv.handoff_ms"] = Figure.exactly(1e3 * total.mean("kv_handoff_seconds"))
        figures["kv.prompt_bytes"] = Figure.exactly(shares.kv_bytes / shares.num_requests)
        figures["kv.ttft_ms"] = Figure.exactly(1e3 * total.mean("ttft_seconds"))

    def _long_requests(self, first: int, num: int) -> list[Request]:
        """Prompts of random tokens, greedy."""
        special = set(self._workload.tokenizer.all_special_ids)
        usable = [token for token in range(self._runner.vocab_size) if token not in special]
        length = min(LONG_PROMPT, self._runner.max_context - _LONG_OUTPUT)
        return [
            Request(
                f"long-{index}",
                tuple(random.Random(f"{self._options.seed}/long/{index}").choices(usable, k=length)),
                Sampling(index, 0.0),
                _LONG_OUTPUT,
            )
            for index in range(first, first + num)
        ]


@dataclass(slots=True)
class _Costs:
    """CPU seconds by who spent them, and how long it took."""

    cpu_s: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    others_s: float = 0.0
    """CPU time of everybody else on the machine, meanwhile."""

    def add(self, spent: Mapping[str, float]) -> None:
        for name, seconds in spent.items():
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + seconds


def _cpu_seconds(pid: int) -> float:
    """Nothing of a process that has ended: Ray's idle ones do."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.Error:
        return 0.0


def _machine_seconds() -> float:
    """CPU time of all processes so far."""
    times = psutil.cpu_times()
    return float(times.user + times.system)


def _row(
    name: str, streams: int, counts: Mapping[str, list[Count]], shares: Shares, costs: _Costs, added: Counters
) -> report.HttpRow:
    tokens = max(1, shares.num_tokens)
    p50, p99 = np.quantile(shares.ttft_s, [0.5, 0.99])
    return report.HttpRow(
        scenario=name,
        streams=streams,
        engine=rate(counts["engine"]),
        http=rate(counts["http"]),
        ratio=ratio(counts["http"], counts["engine"]),
        ttft_ms=(1e3 * float(p50), 1e3 * float(p99)),
        tokens_per_step=shares.num_tokens / max(1, shares.num_steps),
        accepted={source: shares.accepted(source) for source in SOURCE_NAMES},
        remote_prompts=shares.remote_prompts,
        prefix_hits=shares.kv_sources["local:prefix_hit"],
        late_drafts=late_share(added),
        kv_bytes=shares.kv_bytes / shares.num_requests,
        exposed_ms=1e3 * added.mean("kv_exposed_seconds"),
        client_cpu=costs.cpu_s["clients"] / costs.seconds,
        others_cpu=max(0.0, costs.others_s) / costs.seconds,
        cpu_us={who: 1e6 * seconds / tokens for who, seconds in costs.cpu_s.items()},
    )
