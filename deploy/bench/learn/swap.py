"""Model pair and requests -> what swapping drafts costs: texts that changed, time that drafting stood still, roll-back.

One engine and one draft engine in this process, sixteen streams, a swap every few steps between the pair's own draft
and a copy with noise on its weights. By the wall clock, each swap directly: a difference of two rates would not show
a millisecond.
"""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from paceline.cluster.config import DraftConfig, SpeculationConfig
from paceline.cluster.learning.publish import fetch, publish
from paceline.cluster.model_files import WEIGHTS
from paceline.cluster.types import DraftPlan, DraftRef, DraftTree, Request
from paceline.deploy.bench.inprocess import BLOCK_SIZE, load, new_engine
from paceline.deploy.bench.workload import Workload
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.draft_versions import Aside, DraftVersions, VersionLoader
from paceline.workers.drafters.colocated import ColocatedDrafter
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner, load_runner

NUM_STREAMS = 16
NUM_SWAPS = 100
_STEPS_BETWEEN = 3
_LOAD_LIMIT_S = 60.0


@dataclass(slots=True)
class SwapReport:
    """Seconds, one for each swap or step; texts by request."""

    stalls: list[float] = field(default_factory=list)
    """What the engine's thread could not draft in: the whole of a plan's arrival and coming into force."""
    stalls_cpu: list[float] = field(default_factory=list)
    """The same as this thread's processor time: without what other processes took of the core."""
    rollbacks: list[float] = field(default_factory=list)
    """From a plan that names the version before to the end of the first proposal with it."""
    steps: list[float] = field(default_factory=list)
    """Of the whole engine, those without a swap."""
    steps_with_swap: list[float] = field(default_factory=list)
    """The swap before them not counted."""
    texts: dict[str, list[int]] = field(default_factory=dict)


def swap_figures(
    target: Path,
    draft: Path,
    *,
    num_swaps: int = NUM_SWAPS,
    num_streams: int = NUM_STREAMS,
    seed: int = 0,
) -> dict[str, float]:
    """Counts: swap.num, .requests, .changed and .dropped. Times: swap.stall_ms and swap.stall_cpu_ms, the median and
    the worst (swap.worst_of_step: in steps), beside swap.step_ms, a step without a swap, and swap.step_after_ms, the step
    behind one; rollback.s.
    """
    runner = load(target)
    wanted = plain_texts(runner, target, num_streams, num_swaps, seed)
    report = swap_back_and_forth(
        runner, target, draft, num_swaps=num_swaps, num_streams=num_streams, seed=seed
    )
    stalls, steps = 1e3 * np.asarray(report.stalls), 1e3 * np.asarray(report.steps)
    ended = [name for name in wanted if name in report.texts]
    return {
        "swap.num": float(len(stalls)),
        "swap.changed": float(sum(report.texts[name] != wanted[name] for name in ended)),
        "swap.dropped": float(len(wanted) - len(ended)),
        "swap.requests": float(len(wanted)),
        "swap.stall_ms": float(np.median(stalls)),
        "swap.stall_ms.worst": float(stalls.max()),
        "swap.worst_of_step": float(stalls.max() / np.median(steps)),
        "swap.stall_cpu_ms": 1e3 * float(np.median(report.stalls_cpu)),
        "swap.stall_cpu_ms.worst": 1e3 * max(report.stalls_cpu),
        "swap.step_ms": float(np.median(steps)),
        "swap.step_after_ms": 1e3 * float(np.median(report.steps_with_swap)),
        "rollback.s": float(np.median(report.rollbacks)),
        "rollback.s.worst": max(report.rollbacks),
    }


def plain_texts(
    runner: ModelRunner, target: Path, num_streams: int, num_swaps: int, seed: int
) -> dict[str, list[int]]:
    """What the target says without drafts."""
    requests = _requests(target, num_streams, num_swaps, seed)
    return _run(
        new_engine(runner, None, num_streams), requests, num_streams, lambda: None, lambda seconds: None
    )


def swap_back_and_forth(
    runner: ModelRunner, target: Path, draft: Path, *, num_swaps: int, num_streams: int, seed: int
) -> SwapReport:
    """The same requests with drafts, and a swap every few steps until there were enough."""
    report = SwapReport()
    with tempfile.TemporaryDirectory(prefix="paceline-swap-") as place:
        new = publish_perturbed(draft, Path(place), seed=seed, target=runner.version)
        config, shape = DraftConfig(), SpeculationConfig()
        base, _ = load_runner(draft, kv_memory_mb=config.kv_memory_mb, block_size=BLOCK_SIZE)
        engine = DraftEngine(base, token_budget=config.token_budget)
        drafter = ColocatedDrafter(
            engine, vocab_size=runner.vocab_size, depth=shape.depth, width=shape.width, floor=shape.floor
        )
        swaps = _Swaps(
            engine, VersionLoader(draft, base, fetch), new, DraftRef(base.version, ""), runner.version
        )
        swaps.watch(report, num_swaps)
        requests = _requests(target, num_streams, num_swaps, seed)
        report.texts = _run(
            new_engine(runner, drafter, num_streams),
            requests,
            num_streams,
            swaps.before_step,
            swaps.after_step,
        )
        gc.unfreeze()
    return report


class _Swaps:
    """Plans that name two versions in turn, said between two steps."""

    def __init__(
        self, engine: DraftEngine, loader: VersionLoader, new: DraftRef, old: DraftRef, target: str
    ) -> None:
        self._posted: deque[Callable[[], object]] = deque()
        self._versions = DraftVersions(
            engine, loader, limit=2, aside=Aside(), post=self._posted.append, target=target
        )
        self._engine = engine
        self._refs = (new, old)
        self._plan = DraftPlan(0, target, self._refs, old.version)
        self._propose = engine.propose
        self._since: float | None = None
        """When the plan came whose first proposal is still to come."""
        self._num_steps = 0
        self._load()
        gc.collect()
        gc.freeze()  # as a worker's process does when it is ready: no pause of its collector is a swap's

    def _load(self) -> None:
        """Both versions in memory, the old one live."""
        limit = time.monotonic() + _LOAD_LIMIT_S
        self._versions.receive(self._plan)
        while len(self._versions.status().resident) < 2:
            if time.monotonic() > limit or self._versions.status().refused:
                raise RuntimeError(f"no second version in {_LOAD_LIMIT_S:.0f} s: {self._versions.status()}")
            time.sleep(0.01)
            while self._posted:
                self._posted.popleft()()

    def watch(self, report: SwapReport, num_swaps: int) -> None:
        """Keep times there, and stop after so many swaps."""
        self._report, self._left = report, num_swaps
        self._engine.propose = self._timed  # type: ignore[method-assign]

    def _timed(
        self, keys: list[str], depth: int, width: int, floor: float = 0.0, others: Collection[str] = ()
    ) -> tuple[list[DraftTree], list[str]]:
        found = self._propose(keys, depth, width, floor, others)
        if self._since is not None and found[0]:
            live = self._versions.live
            if any(tree.version != live for tree in found[0]):
                raise RuntimeError(f"a tree of {found[0][0].version} after the swap to {live}")
            if live == self._refs[1].version:
                self._report.rollbacks.append(time.perf_counter() - self._since)
            self._since = None
        return found

    def before_step(self) -> None:
        self._num_steps += 1
        if self._left == 0 or self._num_steps % _STEPS_BETWEEN:
            return
        self._left -= 1
        other = next(ref for ref in self._refs if ref.version != self._versions.live)
        self._plan = msgspec.structs.replace(self._plan, revision=self._plan.revision + 1, live=other.version)
        self._since, cpu = time.perf_counter(), time.thread_time()
        self._versions.receive(self._plan)
        self._report.stalls.append(time.perf_counter() - self._since)
        self._report.stalls_cpu.append(time.thread_time() - cpu)
        status = self._versions.status()
        if status.live != other.version or status.refused:
            raise RuntimeError(f"the swap did not come into force: {status}")

    def after_step(self, seconds: float) -> None:
        was_swapped = bool(self._report.stalls) and self._num_steps % _STEPS_BETWEEN == 0 and self._left > 0
        (self._report.steps_with_swap if was_swapped else self._report.steps).append(seconds)


def _run(
    engine: Engine,
    requests: Sequence[Request],
    num_streams: int,
    before_step: Callable[[], None],
    after_step: Callable[[float], None],
) -> dict[str, list[int]]:
    """Texts of the requests that came to their ends, `num_streams` at a time."""
    waiting = deque(requests)
    texts: dict[str, list[int]] = {request.id: [] for request in requests}
    ended: set[str] = set()
    while waiting or engine.has_work:
        while waiting and len(engine.scheduler) < num_streams:
            engine.add(waiting.popleft())
        before_step()
        began = time.perf_counter()
        emissions = engine.step().emissions
        after_step(time.perf_counter() - began)
        for emission in emissions:
            texts[emission.stream.request.id].extend(emission.tokens)
            if emission.finish is not None and emission.finish != "error":
                ended.add(emission.stream.request.id)
    return {name: text for name, text in texts.items() if name in ended}


def _requests(target: Path, num_streams: int, num_swaps: int, seed: int) -> list[Request]:
    """Enough of them that all swaps fall while `num_streams` run; half greedy, half drawn."""
    num = max(2 * num_streams, num_streams * _STEPS_BETWEEN * num_swaps // 30)
    half = Workload(target, seed=seed)
    known = half.requests("domains", 0, num // 2, max_tokens=96, stops=False)
    return [*known, *half.requests("unseen", 0, num - num // 2, max_tokens=96, stops=False)]


def perturbed(base: Path, folder: Path, *, seed: int, noise: float = 0.1, target: str = "") -> Path:
    """A copy of a draft with noise on its matrices, relative to their size, and a card that names the target."""
    shutil.copytree(base, folder)
    tensors = load_file(base / WEIGHTS)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(tensors.items()):
        scale = noise * float(tensor.float().std()) if tensor.ndim > 1 else 0.0
        noisy = tensor.float() + scale * torch.randn(tensor.shape, generator=generator)
        tensors[name] = noisy.to(tensor.dtype)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / "card.json").write_text(json.dumps({"target": target}))
    return folder


def publish_perturbed(
    base: Path, place: Path, *, seed: int, noise: float = 0.1, target: str = ""
) -> DraftRef:
    """The same, published under `place`."""
    with tempfile.TemporaryDirectory(prefix="paceline-perturbed-") as made:
        folder = perturbed(base, Path(made) / "version", seed=seed, noise=noise, target=target)
        return publish(fsspec.filesystem("file"), str(place), folder)
