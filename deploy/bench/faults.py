"""Roles and phases -> processes killed there under running streams -> what the clients saw, and how long it took.

Starts a cluster of its own, with failpoints on. Every kill happens at a named point, in the worker that serves one of
the streams; every text is compared with what the engine says in this process.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.cluster.config import model_folder
from paceline.cluster.errors import PacelineError
from paceline.cluster.failpoints import Fired
from paceline.cluster.gateway.text import Tokenizer
from paceline.deploy.bench.traffic import Answer, Ask, Clients, How, expect
from paceline.deploy.bench.victim import ENGINES, Victim, victim

_FIRE_LIMIT_S = 20.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a point, what happens there, and at which hit of it."""

    point: str
    action: str = "kill"
    hits: tuple[int, int] = (1, 1)
    """The fault comes at a hit drawn from these, both included."""

    @property
    def role(self) -> str:
        return self.point.partition(".")[0]

    @property
    def phase(self) -> str:
        return self.point.partition(".")[2]

    @property
    def is_idle(self) -> bool:
        """The fault comes while no stream runs, and streams begin right behind it."""
        return self.phase in ("idle", "beat")

    @property
    def name(self) -> str:
        return self.point if self.action == "kill" else f"{self.point}.{self.action}"


ROWS = (
    Row("prefill.idle"),
    Row("prefill.mid_step", hits=(1, 2)),
    Row("prefill.mid_transfer", hits=(1, 4)),
    Row("prefill.committed", hits=(1, 2)),
    Row("prefill.mid_transfer", "stop", hits=(1, 4)),
    Row("decode.idle"),
    Row("decode.mid_transfer", hits=(1, 4)),
    Row("decode.mid_step", hits=(1, 12)),
    Row("decode.mid_stream", hits=(1, 12)),
    Row("decode.mid_stream", "stop", hits=(1, 12)),
    Row("draft.idle"),
    Row("draft.mid_step", hits=(1, 12)),
    Row("draft.mid_stream", hits=(1, 12)),
    Row("draft.mid_stream", "stop", hits=(1, 12)),
    Row("gateway.beat"),
    Row("gateway.mid_stream", hits=(5, 60)),
    Row("router.beat"),
    Row("router.route", hits=(1, 12)),
    Row("control.beat"),
    Row("control.snapshot"),
    Row("prefill.mid_transfer", "node", hits=(1, 4)),
    Row("decode.mid_stream", "node", hits=(1, 12)),
)


@dataclass(slots=True)
class Kill:
    """What one fault did."""

    row: Row
    fired: Fired | None = None
    num_streams: int = 0
    failed: list[str] = field(default_factory=list)
    wrong_tokens: int = 0
    num_tokens: int = 0
    recovery_s: float = 0.0
    """The longest any stream went without text behind the fault."""
    slowest: str = ""
    """Which stream that was, and how it went on."""
    back_s: float = 0.0
    """Until the role had its full number of ready workers again."""
    moved: int = 0
    """Streams that went on with another decode worker."""
    resumes: int = 0
    """Streams whose clients came again with Last-Event-ID."""
    complaint: str = ""
    """Why the fault does not count: it did not fire, or not in a worker that served the stream."""

    def __str__(self) -> str:
        wrong = f"{self.wrong_tokens} wrong tokens" if self.wrong_tokens else ""
        verdict = "; ".join(text for text in [self.complaint, *self.failed, wrong] if text) or "ok"
        times = f"{self.recovery_s:.2f} s without text ({self.slowest}), role back after {self.back_s:.1f} s"
        return f"{self.row.name}: {verdict}; {times}"


# --- one kill -------------------------------------------------------------------------------------------


class Matrix:
    """Breaks one cluster again and again under the same requests."""

    def __init__(self, cluster: Victim, asks: Sequence[Ask], tokenizer: Tokenizer, *, seed: int = 0) -> None:
        self._cluster = cluster
        self._asks = asks
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._num = 0

    async def undisturbed(self, streams: int) -> Kill:
        """The same without a fault: what the other rows compare with."""
        kill = Kill(Row("nobody.nowhere", "none"))
        began = time.monotonic()
        self._judge(kill, await self._streams("calm", streams), began)
        return kill

    async def kill(self, row: Row, streams: int) -> Kill:
        """One fault under `streams` streams, until the cluster is whole again."""
        await self._cluster.until_whole()
        self._num += 1
        kill = Kill(row)
        seen = len(self._cluster.failpoints.fired())
        run = self._idle_kill if row.is_idle else self._busy_kill
        answers = await run(kill, f"k{self._num}", streams, seen)
        left = self._cluster.failpoints.disarm()
        fired = self._cluster.failpoints.fired()[seen:]
        if left or len(fired) != 1:
            kill.complaint = kill.complaint or f"fired {len(fired)} times instead of once"
        kill.fired = fired[0] if fired else None
        self._judge(kill, answers, kill.fired.monotonic if kill.fired else time.monotonic())
        if kill.fired is not None:
            self.check_served(kill, kill.fired, answers)
            if row.action == "stop":
                os.kill(kill.fired.pid, signal.SIGCONT)
                await self._cluster.until_whole()
            else:
                await self._cluster.until_whole(gone=kill.fired.pid)
            kill.back_s = time.monotonic() - kill.fired.monotonic
        return kill

    async def _busy_kill(self, kill: Kill, name: str, streams: int, seen: int) -> list[Answer]:
        how = {"request": f"{name}-"} if kill.row.role != "control" else {}
        if kill.row.action == "node":
            how["worker"] = await self._on_second_node(kill.row.role)
        self._arm(kill.row, **how)
        return await self._streams(name, streams, resume=kill.row.role == "gateway")

    async def _on_second_node(self, role: str) -> str:
        """A worker of this role that does not share the gateway's node."""
        workers = await self._cluster.workers()
        first = next(w["node"] for w in workers if w["role"] == "gateway")
        return str(next(w["id"] for w in workers if w["role"] == role and w["node"] != first))

    async def _idle_kill(self, kill: Kill, name: str, streams: int, seen: int) -> list[Answer]:
        """A worker that has just served a stream dies; then the streams come."""
        (before,) = await self._streams(f"{name}-before", 1)
        served = [w for w in before.workers if w.startswith(f"{kill.row.role}-")]
        if kill.row.role in ENGINES and not served:
            kill.complaint = f"no {kill.row.role} worker served the stream before the fault"
            return [before]
        self._arm(kill.row, worker=served[0] if served else "")
        end = time.monotonic() + _FIRE_LIMIT_S
        while len(self._cluster.failpoints.fired()) == seen and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return await self._streams(name, streams, resume=kill.row.role == "gateway")

    def _arm(self, row: Row, **how: str) -> None:
        self._cluster.failpoints.arm(row.point, action=row.action, nth=self._random.randint(*row.hits), **how)

    async def _streams(self, name: str, num: int, *, resume: bool = False) -> list[Answer]:
        clients = Clients(self._cluster.url, self._cluster.model)
        how = How(salt=name, resume=resume)
        try:
            asked = (clients.ask(self._asks[i % len(self._asks)], f"{name}-{i}", how) for i in range(num))
            return list(await asyncio.gather(*asked))
        finally:
            await clients.close()

    def _judge(self, kill: Kill, answers: Sequence[Answer], moment: float) -> None:
        kill.num_streams = len(answers)
        for index, answer in enumerate(answers):
            ask = self._asks[index % len(self._asks)]
            if answer.error or answer.finish is None:
                kill.failed.append(f"{answer.request_id}: {answer.error or 'no finish'}")
                continue
            kill.wrong_tokens += answer.wrong_tokens(ask, self._tokenizer)
            kill.num_tokens += len(ask.tokens)
            kill.moved += answer.metrics.get("recoveries", 0)
            kill.resumes += bool(answer.resumes)
        slowest = max(answers, key=lambda answer: answer.wait_after(moment))
        kill.recovery_s = slowest.wait_after(moment)
        how = ", ".join(f"{name} {slowest.metrics.get(name)}" for name in ("recoveries", "kv_source"))
        kill.slowest = f"{slowest.request_id}: {how}"

    @staticmethod
    def check_served(kill: Kill, fired: Fired, answers: Sequence[Answer]) -> None:
        """The worker that failed was serving a stream: the hit says so, and so do the stream's own metrics."""
        if kill.row.is_idle or kill.row.role == "control":
            return  # chosen because it had served one; control serves none
        by_id = {answer.request_id: answer for answer in answers}
        # Streams of the cluster are `request-prompt-choice@gateway`, and `/epoch` for drafts.
        names = [name.partition("@")[0].rsplit("-", 2)[0] for name in fired.requests]
        served = [by_id[name] for name in names if name in by_id]
        if not served:
            kill.complaint = f"{fired.worker} failed with none of the streams: {fired.requests}"
        elif kill.row.role in ENGINES and not any(a.names(fired.worker) for a in served):
            kill.complaint = f"{fired.worker} is not named by the streams it failed with"


# --- all of it ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """All faults of a run."""

    streams: int
    calm: Kill | None = None
    kills: list[Kill] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The object of the JSON line."""
        figures: dict[str, float] = {
            "faults.kills": len(self.kills),
            "faults.streams": sum(k.num_streams for k in self.kills),
            "faults.tokens": sum(k.num_tokens for k in self.kills),
            "faults.failed_streams": sum(len(k.failed) for k in self.kills),
            "faults.wrong_tokens": sum(k.wrong_tokens for k in self.kills),
            "faults.unproven": sum(bool(k.complaint) for k in self.kills),
        }
        if self.calm is not None:
            figures["faults.recovery.none"] = round(self.calm.recovery_s, 3)
        for row, kills in self.by_row().items():
            for name, values in (
                ("recovery", [k.recovery_s for k in kills]),
                ("back", [k.back_s for k in kills]),
            ):
                figures[f"faults.{name}.{row.name}.p50"] = round(percentile(values, 0.5), 3)
                figures[f"faults.{name}.{row.name}.p99"] = round(percentile(values, 0.99), 3)
        return {
            "bench": "faults",
            "streams": self.streams,
            "figures": figures,
            "complaints": self.complaints(),
        }

    def complaints(self) -> list[str]:
        """Everything that must not be."""
        found = []
        for kill in self.kills:
            found += [f"{kill.row.name}: {text}" for text in [kill.complaint, *kill.failed] if text]
            if kill.wrong_tokens:
                found.append(f"{kill.row.name}: {kill.wrong_tokens} wrong or repeated tokens")
        return found

    def by_row(self) -> dict[Row, list[Kill]]:
        """Rows in the order of their first kill."""
        rows: dict[Row, list[Kill]] = {}
        for kill in self.kills:
            rows.setdefault(kill.row, []).append(kill)
        return rows

    def show(self, out: Console) -> None:
        """The recovery table."""
        table = Table(title=f"{len(self.kills)} faults under {self.streams} streams", title_justify="left")
        columns = ("fault", "kills", "failed", "wrong tokens", "moved", "resumed", "recovery p50", "p99", "role back p50", "p99")  # fmt: skip
        for column in columns:
            table.add_column(column, justify="left" if column == "fault" else "right", no_wrap=True)
        for row, kills in self.by_row().items():
            waits, backs = [k.recovery_s for k in kills], [k.back_s for k in kills]
            table.add_row(
                row.name,
                str(len(kills)),
                str(sum(len(k.failed) for k in kills)),
                str(sum(k.wrong_tokens for k in kills)),
                str(sum(k.moved for k in kills)),
                str(sum(k.resumes for k in kills)),
                *(f"{percentile(waits, q):.2f} s" for q in (0.5, 0.99)),
                *(f"{percentile(backs, q):.1f} s" for q in (0.5, 0.99)),
            )
        out.print(table)
        if self.calm is not None:
            out.print(f"recovery: the longest that any stream went without text behind the fault; {self.calm.recovery_s:.2f} s without one")  # fmt: skip
        for complaint in self.complaints():
            out.print(complaint, style="red", markup=False)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank, so that the p99 of a few values is their largest."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def known_asks(model: str, num: int, max_tokens: int) -> tuple[list[Ask], Tokenizer]:
    """Requests of the benchmark's tasks with their answers; half of them greedy."""
    from paceline.deploy.bench.workload import Workload

    folder = model_folder(model)
    requests = Workload(folder).requests("domains", 0, num, max_tokens=max_tokens, stops=False)
    return expect(folder, requests), Tokenizer(folder)


def run(
    *,
    streams: int = 16,
    kills: int = 2,
    only: str = "",
    max_tokens: int = 96,
    settings: Sequence[str] = (),
    out: Console,
    say: Say,
) -> dict[str, Any]:
    """Measure, print and return the object of the JSON line.

    Args:
        kills: for each row.
        only: rows whose name begins so.
    """
    rows = [row for row in ROWS if row.name.startswith(only)]
    if not rows:
        raise PacelineError(f"--only {only!r}: there are {', '.join(row.name for row in ROWS)}")
    say("computing what every stream must say")
    asks, tokenizer = known_asks("bundled/target", streams, max_tokens)
    report = Report(streams)

    async def work(cluster: Victim, rows: Sequence[Row]) -> None:
        matrix = Matrix(cluster, asks, tokenizer)
        await matrix.undisturbed(streams)  # first connections, first links
        calm = await matrix.undisturbed(streams)
        if calm.failed or calm.wrong_tokens:
            raise PacelineError(f"wrong without any fault: {calm}")
        report.calm = report.calm or calm
        for round_ in range(kills):
            for row in rows:
                kill = await matrix.kill(row, streams)
                report.kills.append(kill)
                say(f"{round_ + 1}/{kills} {kill}")

    for nodes in (0, 2):
        chosen = [row for row in rows if (row.action == "node") == (nodes == 2)]
        if chosen:
            say("starting the cluster on two nodes" if nodes else "starting the cluster")
            with victim(settings, nodes=nodes) as cluster:
                asyncio.run(work(cluster, chosen))
    report.show(out)
    return report.as_json()
