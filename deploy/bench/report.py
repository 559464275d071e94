"""Results -> what is shown: a card, one ratio table, the peers, the cost of a step, and one JSON line."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from paceline.cluster.types import SOURCE_NAMES, SOURCE_TARGET
from paceline.deploy.bench.check import Exactness
from paceline.deploy.bench.figures import Figure, ceiling_verdict, verdict

FLOORS = {
    "spec.on_off.domains.1": 1.5,
    "spec.on_off.copy.1": 2.0,
    "engine.vs_hf.1": 1.3,
    "engine.vs_hf_batch.16": 1.2,
    "peer.llamacpp.off.1": 0.8,
    "peer.llamacpp.off.random.1": 0.8,
    "peer.llamacpp.best.1": 1.2,
    "peer.vllm.best.1": 2.0,
    "http.vs_engine.16": 0.85,
    "http.vs_engine.64": 0.8,
    "kv.remote_share": 1.0,
    "draft.remote.accepted_share": 0.3,
}
"""Figure -> the floor it has to reach."""
KIND_FLOORS = {
    "spec.on_off.": 0.97,
    "engine.vs_": 1.0,
    "peer.vllm.off.": 1.5,
    "peer.hf.off.": 1.5,
    "peer.llamacpp.off.": 1.0,
}
"""Beginning of a figure's name -> the floor of those that have none of their own."""
CEILINGS = {
    "step.t8_t1": 1.25,
    "step.t16_t1": 1.5,
    "step.floor": 1.4,
    "exact.mismatches": 0.0,
    "exact.near_ties_per_100k": 1.0,
    "kv.exposed_share": 0.1,
    "kv.digest_share": 0.02,
    "kv.handoff_share": 0.02,
}
"""Figure -> what it must not pass."""

WAITING = 0.03
"""Of a core, taken by the side of a pair that waits."""
OTHERS = 0.1
"""Of a core, taken by processes outside the measurement: more spoils ratios of something with many processes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario at one number of streams."""

    scenario: str
    streams: int
    off: Figure
    """Tokens per second without drafts."""
    on: Figure
    ratio: Figure
    tokens_per_step: float
    """Emitted tokens for each step of a stream, with drafts."""
    accepted: dict[str, float]
    """Source -> share of the emitted tokens."""
    num_drafted_per_token: float


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer at one number of streams."""

    figure: str
    ours: str
    peer: str
    streams: int
    num_threads: int
    rate: Figure
    """Our tokens per second."""
    peer_rate: Figure
    ratio: Figure
    num_same: int
    """Requests whose text is the same token by token."""
    num_requests: int
    num_near_ties: int = 0
    """Requests whose first difference is between two tokens that the reference has equally likely, nearly."""
    widest_near_tie: float = 0.0
    """How far apart their logits are at most."""
    different: tuple[str, ...] = ()
    """The other requests."""
    waiting_cpu: float = 0.0
    """Of one core, taken by the side that should have been asleep."""
    others_cpu: float = 0.0
    """The same, of everybody else on the machine."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the peer."""


@dataclass(frozen=True, slots=True)
class HttpRow:
    """One scenario at one number of streams, over HTTP."""

    scenario: str
    streams: int
    engine: Figure
    """Tokens per second of the engine alone."""
    http: Figure
    ratio: Figure
    ttft_ms: tuple[float, float]
    """Median and 99th percentile, at the client."""
    tokens_per_step: float
    accepted: dict[str, float]
    """Source -> share of the emitted tokens."""
    remote_prompts: float
    """Share of the prompts that a prefill worker computed, `prefix_hits` left out."""
    prefix_hits: int
    late_drafts: float
    """Share of the streams asked for at a draft worker whose draft came too late."""
    kv_bytes: float
    """A prompt's hand-off."""
    exposed_ms: float
    """The same: what it adds behind the prompt's computation."""
    client_cpu: float
    """Of one core, while requests ran."""
    others_cpu: float
    """The same, of everybody else on the machine: more than a few percent spoils the figures."""
    cpu_us: dict[str, float]
    """CPU time for each emitted token, by who spent it."""

    @property
    def name(self) -> str:
        """Its part of a figure's name; the tasks that the draft knows go without saying."""
        return str(self.streams) if self.scenario == "domains" else f"{self.scenario}.{self.streams}"


@dataclass(slots=True)
class Report:
    """Everything measured so far; it can be shown at any time."""

    card: dict[str, str]
    is_quick: bool
    pairs: int
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    peers: list[PeerRow] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    exactness: Exactness = field(default_factory=Exactness)
    is_interrupted: bool = False
    http: list[HttpRow] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    """Scenarios that did not go the way they were meant to."""
    compared: str = "on against off"
    """Whose tokens the exactness is about."""
    trials: list[str] = field(default_factory=list)
    """Settings of peers, each with what it gave."""
    not_run: list[str] = field(default_factory=list)
    """Figures that there are not, and why."""

    def add_row(self, row: Row) -> None:
        self.rows.append(row)
        self.figures[f"spec.on_off.{row.scenario}.{row.streams}"] = row.ratio
        # The least of a scenario's numbers of streams: what a draft that is no use costs at worst.
        least = f"spec.on_off.{row.scenario}.min"
        self.figures[least] = min(
            self.figures.get(least, row.ratio), row.ratio, key=lambda figure: figure.value
        )

    def add_peer(self, row: PeerRow) -> None:
        self.peers.append(row)
        self.figures[row.figure] = row.ratio

    def add_http(self, row: HttpRow) -> None:
        self.http.append(row)
        self.figures[f"http.vs_engine.{row.name}"] = row.ratio
        self.figures[f"http.client_cpu.{row.name}"] = Figure.exactly(row.client_cpu)
        self.figures[f"draft.accepted_share.{row.name}"] = Figure.exactly(row.accepted["draft"])
        self.figures[f"draft.late_share.{row.name}"] = Figure.exactly(row.late_drafts)
        self.figures["kv.remote_share"] = Figure.exactly(min(r.remote_prompts for r in self.http))

    def verdicts(self) -> dict[str, str]:
        """Figure -> pass, fail or not resolved, for those that have a floor."""
        found: dict[str, str] = {}
        for name, figure in self.all_figures().items():
            floor = FLOORS.get(name, next((f for s, f in KIND_FLOORS.items() if name.startswith(s)), None))
            if floor is not None:
                found[name] = verdict(figure, floor)
            elif name in CEILINGS:
                found[name] = ceiling_verdict(figure, CEILINGS[name])
        return found

    def all_figures(self) -> dict[str, Figure]:
        """What was measured and what was counted."""
        figures = dict(self.figures)
        if self.exactness.num_requests:
            figures["exact.mismatches"] = Figure.exactly(self.exactness.mismatches)
            figures["exact.near_ties_per_100k"] = Figure.exactly(self.exactness.near_ties_per_100k)
        return figures

    def as_json(self) -> dict[str, Any]:
        """One object: figures by name, .lo and .hi; rows with the numbers behind them."""
        flat: dict[str, float] = {}
        for name, figure in self.all_figures().items():
            flat.update(figure.entries(name))
        return {
            "figures": flat,
            "verdicts": self.verdicts(),
            "rows": [asdict(row) for row in self.rows],
            "peers": [asdict(row) for row in self.peers],
            "http": [asdict(row) for row in self.http],
            "complaints": self.complaints,
            "trials": self.trials,
            "not_run": self.not_run,
            "exactness": asdict(self.exactness),
            "card": self.card,
            "versions": self.versions,
            "pairs": self.pairs,
            "quick": self.is_quick,
            "interrupted": self.is_interrupted,
        }

    def show(self, out: Console) -> None:
        """The tables, then the JSON as the last line."""
        if self.rows:
            out.print(self._ratio_table())
            out.print(
                "off: the same engine without drafts, same weights, requests and threads.",
                style="dim",
            )
        if self.peers:
            out.print(self._peer_table())
            if any(row.waiting_cpu > WAITING for row in self.peers):
                out.print("a waiting side did not sleep: these ratios are not figures", style="yellow")
            if any(row.others_cpu > OTHERS for row in self.peers):
                out.print(
                    "other processes took cores meanwhile: these ratios are not figures", style="yellow"
                )
        if self.http:
            self._show_http(out)
        self._show_steps(out)
        self._show_exactness(out)
        for complaint in self.complaints:
            out.print(complaint, style="red", markup=False)
        for line in self.not_run:
            out.print(f"not run: {line}", style="yellow", markup=False)
        if self.is_interrupted:
            out.print("interrupted: only what was finished is shown", style="yellow")
        out.print(json.dumps(self.as_json()), markup=False, soft_wrap=True)

    def show_card(self, out: Console) -> None:
        for name, text in self.card.items():
            out.print(f"[bold]{name:10}[/bold] ", end="")
            out.print(text, markup=False, soft_wrap=True)

    def _ratio_table(self) -> Table:
        table = _table("with drafts against without, median of pairs, 95 % interval")
        sources = [name for index, name in enumerate(SOURCE_NAMES) if index != SOURCE_TARGET]
        shares = [f"by {name} %" for name in sources]
        for column in (
            "scenario",
            "streams",
            "off tok/s",
            "on tok/s",
            "ratio",
            "tokens/step",
            *shares,
            "verdict",
        ):
            _add_column(table, column)
        for row in self.rows:
            table.add_row(
                row.scenario,
                str(row.streams),
                f"{row.off.value:.0f}",
                f"{row.on.value:.0f}",
                str(row.ratio),
                f"{row.tokens_per_step:.2f}",
                *(f"{100 * row.accepted[name]:.0f}" for name in sources),
                self._marked(f"spec.on_off.{row.scenario}.{row.streams}"),
            )
        return table

    def _peer_table(self) -> Table:
        table = _table("against peers, greedy, float32, each at its best settings")
        columns = (
            "peer",
            "streams",
            "threads",
            "peer tok/s",
            "ours tok/s",
            "ratio",
            "same text",
            "near-ties",
            "ours",
            "verdict",
        )
        for column in columns:
            _add_column(table, column)
        for row in self.peers:
            table.add_row(
                row.peer,
                str(row.streams),
                str(row.num_threads),
                f"{row.peer_rate.value:.0f}",
                f"{row.rate.value:.0f}",
                str(row.ratio),
                f"{row.num_same}/{row.num_requests}",
                str(row.num_near_ties),
                row.ours,
                self._marked(row.figure),
            )
        return table

    def _show_http(self, out: Console) -> None:
        speed = _table("the cluster over HTTP against the engine alone, median of pairs, 95 % interval")
        ways = _table("the way of prompts and drafts")
        costs = _table(
            "CPU time in us for each token, by who spent it; of clients and other processes in % of a core"
        )
        sources = [name for index, name in enumerate(SOURCE_NAMES) if index != SOURCE_TARGET]
        who = list(dict.fromkeys(name for row in self.http for name in row.cpu_us))
        fast = ("engine tok/s", "http tok/s", "ratio", "TTFT p50 ms", "p99 ms", "verdict")
        by = [f"by {name} %" for name in sources]
        way = ("remote prompts %", "KB a prompt", "exposed ms", "tokens/step", *by, "late drafts %")
        for table, columns in ((speed, fast), (ways, way), (costs, (*who, "clients %", "others %"))):
            for column in ("scenario", "streams", *columns):
                _add_column(table, column)
        for row in self.http:
            begin = (row.scenario, str(row.streams))
            speed.add_row(
                *begin,
                f"{row.engine.value:.0f}",
                f"{row.http.value:.0f}",
                str(row.ratio),
                *(f"{ms:.0f}" for ms in row.ttft_ms),
                self._marked(f"http.vs_engine.{row.name}"),
            )
            ways.add_row(
                *begin,
                f"{100 * row.remote_prompts:.0f}",
                f"{row.kv_bytes / 1024:.0f}",
                f"{row.exposed_ms:.1f}",
                f"{row.tokens_per_step:.2f}",
                *(f"{100 * row.accepted[source]:.0f}" for source in sources),
                f"{100 * row.late_drafts:.1f}",
            )
            spent = (f"{row.cpu_us.get(name, 0.0):.0f}" for name in who)
            costs.add_row(*begin, *spent, f"{100 * row.client_cpu:.1f}", f"{100 * row.others_cpu:.0f}")
        for table in (speed, ways, costs):
            out.print(table)
        if any(row.others_cpu > OTHERS for row in self.http):
            out.print("other processes took cores meanwhile: these ratios are not figures", style="yellow")

    def _marked(self, name: str) -> str:
        found = self.verdicts().get(name, "")
        colour = {"pass": "green", "fail": "red", "not resolved": "yellow"}.get(found, "white")
        return f"[{colour}]{found}[/{colour}]" if found else ""

    def _show_steps(self, out: Console) -> None:
        steps = {name: figure for name, figure in self.figures.items() if name.startswith("step.t")}
        if steps:
            times = (f"{name[6:]}: {figure.value:.0f}" for name, figure in steps.items() if "_" not in name)
            out.print(f"\nstep time in us by tree nodes   {'   '.join(times)}")
        for name, text in (
            ("step.t8_t1", "eight nodes cost as much as this many steps of one"),
            ("step.t16_t1", "and sixteen as this many"),
            (
                "step.floor",
                "a step of one node over reading the weights once from memory, as they are stored",
            ),
            ("prefill.tokens_s", "prompt tokens per second, one stream"),
            ("kv.remote_share", "prompts that a prefill worker computed"),
            (
                "kv.exposed_share",
                "of a long prompt's time to the first token: its hand-off behind the computation",
            ),
            ("kv.digest_share", "of the same: digests of its KV, both ends"),
            (
                "kv.handoff_share",
                "of computing 4,096 tokens with a random 26 M model: gather, digests, scatter",
            ),
            ("kv.prompt_bytes", "bytes of a long prompt's hand-off"),
            ("kv.exposed_ms", "milliseconds that it adds behind the computation"),
            ("kv.ttft_ms", "milliseconds to a long prompt's first token, at the gateway"),
            (
                "draft.remote.accepted_share",
                "emitted tokens that a draft worker foretold, where every step asks one",
            ),
            ("draft.late_share", "streams asked for whose draft came too late, likewise"),
        ):
            if name in self.figures:
                found = self.verdicts().get(name, "")
                out.print(f"{name:17} {self.figures[name]!s:28} {found:13} {text}", markup=False)

    def _show_exactness(self, out: Console) -> None:
        found = self.exactness
        if not found.num_requests:
            return
        style = "red" if found.mismatches else "green"
        out.print(
            f"exact: {found.mismatches} mismatches in {found.num_requests} requests and {found.num_tokens} tokens, "
            f"{self.compared}; {found.num_judged} tokens also against transformers without a cache; "
            f"{found.near_ties} near-ties ({found.near_ties_per_100k:.2f} per 100,000 tokens)",
            style=style,
        )
        if found.examples:
            out.print(f"mismatched: {', '.join(found.examples[:10])}", style="red")


def console() -> Console:
    """stdout, wide enough for the tables where it is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 130)


def _table(title: str) -> Table:
    return Table(
        title=f"\n{title}", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )


def _add_column(table: Table, name: str) -> None:
    is_text = name in ("scenario", "peer", "ours", "verdict")
    table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "peer")


def cpu_name() -> str:
    """As the kernel calls it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """What the figures depend on."""
    names = ("paceline", "torch", "transformers", "numpy", "numba", "tokenizers")
    found = {name: version(name) for name in names}
    return {**found, "python": platform.python_version(), "os": f"{os.uname().sysname} {os.uname().release}"}
