"""Mixed requests, clients that leave, workers that die and change their roles -> right texts, and nothing left behind.

Afterwards the cluster must look as it did before: no block in use, no stream open, as many processes and sockets as at
rest, no file that was not there.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from paceline.cluster.errors import PacelineError
from paceline.cluster.failpoints import POINTS
from paceline.cluster.gateway.text import Tokenizer
from paceline.deploy import local
from paceline.deploy.bench.faults import Say, known_asks
from paceline.deploy.bench.traffic import Ask, Clients, How
from paceline.deploy.bench.victim import ENGINES, Victim, victim

_CANCELLED = 0.25
_SETTLE_LIMIT_S = 20.0
_TEMPORARY = ("/tmp/paceline*", "/dev/shm/*")


@dataclass(slots=True)
class SoakReport:
    """Counts of one run, and what was left."""

    requests: int = 0
    cancelled: int = 0
    failed: list[str] = field(default_factory=list)
    wrong_tokens: int = 0
    resumes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    swaps: Counter[str] = field(default_factory=Counter)
    """By "FROM to TO": that role had a worker less and this one more."""
    seconds: float = 0.0
    left: dict[str, list[str]] = field(default_factory=dict)
    """blocks, sockets, processes, files -> each thing that should not be there."""

    def as_json(self) -> dict[str, Any]:
        """The object of the JSON line."""
        figures = {
            "soak.requests": self.requests,
            "soak.cancelled": self.cancelled,
            "soak.faults": self.faults.total(),
            "soak.role_swaps": self.swaps.total(),
            "soak.failed": len(self.failed),
            "soak.wrong_tokens": self.wrong_tokens,
            "soak.resumes": self.resumes,
            "soak.seconds": round(self.seconds, 1),
            **{f"soak.left.{name}": len(things) for name, things in self.left.items()},
        }
        return {"bench": "soak", "figures": figures, "complaints": self.complaints()}

    def complaints(self) -> list[str]:
        """Everything that must not be."""
        found = [
            *self.failed,
            *(f"left: {name}: {thing}" for name, all_ in self.left.items() for thing in all_),
        ]
        return [*found, f"{self.wrong_tokens} wrong or repeated tokens"] if self.wrong_tokens else found

    def show(self, out: Console) -> None:
        """A few lines."""
        faults, swaps = (
            ", ".join(f"{name} {num}" for name, num in sorted(counts.items())) or "none"
            for counts in (self.faults, self.swaps)
        )
        out.print(
            f"{self.requests} requests in {self.seconds:.0f} s, {self.cancelled} of them cancelled; faults: {faults}; "
            f"swaps of roles: {swaps}"
        )
        left = ", ".join(f"{name} {len(things)}" for name, things in self.left.items())
        out.print(
            f"failed {len(self.failed)}, wrong tokens {self.wrong_tokens}, resumed {self.resumes}; left behind: {left}"
        )
        for complaint in self.complaints():
            out.print(complaint, style="red", markup=False)


# --- what a cluster occupies ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a cluster at rest has. Counts by role, so that a replaced worker changes nothing."""

    processes: Counter[str]
    sockets: Counter[str]
    files: frozenset[str]
    addresses: dict[str, list[str]]
    """Of the sockets, by the same names: what tells whose they are."""

    @classmethod
    async def of(cls, cluster: Victim) -> Footprint:
        """Look at all processes of the run and at the places where temporary files lie."""
        roles = {worker["pid"]: worker["role"] for worker in await cluster.workers()}
        processes: Counter[str] = Counter()
        addresses: dict[str, list[str]] = {}
        for process in local.processes_of(cluster.run_id):
            try:
                # Ray writes what an actor does at the moment behind a dot.
                name = roles.get(process.pid) or process.name().partition(".")[0]
                connections = process.net_connections("inet") if process.pid in roles else []
            except psutil.Error:
                continue
            processes[name] += 1
            listening = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
            for each in connections:
                way = "<-" if each.laddr.port in listening else "->"
                text = f"{process.pid}:{each.laddr.port} {way} {each.raddr.port if each.raddr else '*'}"
                addresses.setdefault(f"{name} {each.status}", []).append(text)
        patterns = [Path("/").glob(pattern.removeprefix("/")) for pattern in _TEMPORARY]
        files = [str(path) for found in patterns for path in found]
        files += [str(path) for path in cluster.home.rglob("*") if path.suffix not in (".log", ".jsonl")]
        sockets = Counter({name: len(found) for name, found in addresses.items()})
        return cls(processes, sockets, frozenset(files), addresses)

    def __str__(self) -> str:
        return f"{sorted(self.processes.items())} {sorted(self.sockets.items())} {sorted(self.files)}"

    @classmethod
    async def at_rest(cls, cluster: Victim) -> Footprint:
        """Once three looks in a row, a second apart, show the same: clients' connections close a little later."""
        looks = [await cls.of(cluster)]
        while len(looks) < 3 or len({str(look) for look in looks[-3:]}) > 1:
            if len(looks) > _SETTLE_LIMIT_S:
                raise PacelineError(f"the cluster does not come to rest: {looks[-1].more_than(looks[-2])}")
            await asyncio.sleep(1.0)
            looks.append(await cls.of(cluster))
        return looks[-1]

    def more_than(self, before: Footprint) -> dict[str, list[str]]:
        """What is here that was not there before."""
        return {
            "sockets": [
                f"{name}: {num} of {', '.join(self.addresses[name])}"
                for name, num in (self.sockets - before.sockets).items()
            ],
            "processes": [f"{name}: {num}" for name, num in (self.processes - before.processes).items()],
            "files": sorted(self.files - before.files),
        }


async def settled(cluster: Victim, before: Footprint) -> dict[str, list[str]]:
    """Wait until nothing is left, or for long enough; then what is."""
    end = time.monotonic() + _SETTLE_LIMIT_S
    while True:
        workers = await cluster.workers()
        blocks = [f"{w['id']}: {w['kv_blocks_used']} blocks" for w in workers if w["kv_blocks_used"]]
        blocks += [f"{w['id']}: {w['streams']} streams" for w in workers if w["streams"]]
        left = {"blocks": blocks, **(await Footprint.of(cluster)).more_than(before)}
        if not any(left.values()) or time.monotonic() > end:
            return left
        await asyncio.sleep(0.5)


# --- the soak -------------------------------------------------------------------------------------------


class Soak:
    """One run on one cluster."""

    def __init__(
        self, cluster: Victim, asks: Sequence[Ask], tokenizer: Tokenizer, *, seed: int, say: Say
    ) -> None:
        self._cluster = cluster
        self._asks = asks
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._say = say
        self._is_over = False
        self.report = SoakReport()

    async def run(self, num: int, *, at_once: int = 16, with_faults: bool = True) -> None:
        """`num` requests, `at_once` at a time, until all have ended and the cluster is whole again."""
        began = time.monotonic()
        clients = Clients(self._cluster.url, self._cluster.model)
        numbers = iter(range(num))
        breaker = asyncio.create_task(self._break()) if with_faults else None
        may_swap = with_faults and self._cluster.nodes is not None
        swapper = asyncio.create_task(self._swap_roles()) if may_swap else None

        async def client() -> None:
            for number in numbers:
                await self._one(clients, number)
                if (number + 1) % 100 == 0:
                    self._say(f"{number + 1} of {num} requests, {self.report.faults.total()} faults")

        try:
            await asyncio.gather(*(client() for _ in range(at_once)))
        finally:
            self._is_over = True
            if breaker is not None:
                breaker.cancel()
                await asyncio.gather(breaker, return_exceptions=True)
            await clients.close()
            if swapper is not None:
                await swapper
        self._cluster.failpoints.disarm()
        await self._cluster.until_whole()
        self.report.seconds += time.monotonic() - began

    async def _one(self, clients: Clients, number: int) -> None:
        index = self._random.randrange(len(self._asks))
        # Half of the prompts may be found in the prefix caches.
        salt = self._random.choice(("shared", f"own-{number}"))
        leaves = self._random.random() < _CANCELLED
        stream = self._random.random() < 0.7
        how = How(salt, stream, 1 if stream else self._random.choice((1, 1, 2)), resume=True)
        work = clients.ask(self._asks[index], f"soak-{number}", how)
        self.report.requests += 1
        if leaves:
            self.report.cancelled += 1
            task = asyncio.ensure_future(work)
            await asyncio.wait([task], timeout=self._random.choice((0.0, 0.05, 0.3, 1.0)))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        answer = await work
        self.report.resumes += bool(answer.resumes)
        if answer.error or answer.finish is None:
            self.report.failed.append(f"{answer.request_id} {how}: {answer.error or 'no finish'}")
        else:
            self.report.wrong_tokens += answer.wrong_tokens(self._asks[index], self._tokenizer)

    async def _break(self) -> None:
        """One fault after the other, in a role that has all its workers: so none of them is without any for long."""
        while True:
            await asyncio.sleep(self._random.uniform(0.2, 1.5))
            roles = await self._cluster.whole_roles()
            points = [
                f"{role}.{phase}" for role, phases in POINTS.items() for phase in phases if role in roles
            ]
            if not points:
                continue
            point = self._random.choice(points)
            seen = len(self._cluster.failpoints.fired())
            self._cluster.failpoints.arm(point, nth=self._random.randint(1, 4))
            end = time.monotonic() + 2.0
            while len(self._cluster.failpoints.fired()) == seen and time.monotonic() < end:
                await asyncio.sleep(0.02)
            self._cluster.failpoints.disarm()
            if len(self._cluster.failpoints.fired()) > seen:
                self.report.faults[point] += 1
                await asyncio.sleep(1.0)  # until control knows

    async def _swap_roles(self) -> None:
        """A role gives a worker to another and gets it back, again and again; at the end all have what they had."""
        before = dict(self._cluster.wanted)
        while not self._is_over:
            giver, taker = self._random.sample(ENGINES, 2)
            await self._cluster.redeploy(**{giver: before[giver] - 1, taker: before[taker] + 1})
            self.report.swaps[f"{giver} to {taker}"] += 1
            self._say(f"{giver} gave a worker to {taker}")
            await self._cluster.redeploy(**{role: before[role] for role in (giver, taker)})
            self.report.swaps[f"{taker} to {giver}"] += 1
            self._say(f"{taker} gave it back")


async def soak(
    cluster: Victim,
    asks: Sequence[Ask],
    tokenizer: Tokenizer,
    *,
    requests: int,
    warm_up: int,
    say: Say,
    seed: int = 0,
) -> SoakReport:
    """Soak a cluster, wait until it rests, and look at what is left of it."""
    # Until each worker has met each other: connections between two are kept.
    warm = Soak(cluster, asks, tokenizer, seed=seed + 1, say=lambda _: None)
    await warm.run(warm_up, with_faults=False)
    if warm.report.complaints():
        raise PacelineError(f"wrong without any fault: {warm.report.complaints()}")
    before = await Footprint.at_rest(cluster)
    work = Soak(cluster, asks, tokenizer, seed=seed, say=say)
    await work.run(requests)
    work.report.left = await settled(cluster, before)
    return work.report


def run(
    *, requests: int, seed: int = 0, out: Console, say: Say, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Start a cluster, soak it, end it, and look again."""
    say("computing what every request must say")
    asks, tokenizer = known_asks("bundled/target", 24, 48)
    say("starting the cluster")
    with victim(settings, nodes=1) as cluster:
        state = local.read_state(cluster.home / "run" / "local") or {}
        work = soak(cluster, asks, tokenizer, requests=requests, warm_up=100, say=say, seed=seed)
        report = asyncio.run(work)
    report.left["processes"] += [str(process) for process in local.processes_of(cluster.run_id)]
    ray_folder = state.get("ray_folder", "")
    report.left["files"] += [path for path in (ray_folder, str(cluster.home)) if path and Path(path).exists()]
    report.show(out)
    return report.as_json()
