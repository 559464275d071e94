"""A plan of drafts -> their weights in memory, prepared aside and checked, and one switch between two proposals.

What is asked for is loaded by a thread that stands still while the engine answers; the switch itself is a change of
handles. Whatever is wrong with a version, drafting goes on with what is in force, and the status says why.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from safetensors import safe_open
from torch import Tensor

from paceline.cluster.errors import ModelError, PacelineError
from paceline.cluster.learning.routing import version_for, versions_needed
from paceline.cluster.metrics import Metrics
from paceline.cluster.model_files import file_sha256, read_object, weight_files, weights_version
from paceline.cluster.types import DraftPlan, DraftRef, DraftStatus
from paceline.workers.draft_engine import DraftEngine, probe_logits
from paceline.workers.model_runner import ModelRunner, load_model, load_model_config, placed

log = structlog.get_logger(__name__)

Fetch = Callable[[DraftRef, Path], Path]
"""Brings a version into a folder and returns where it is, its files whole and the ones that were published."""
Job = Callable[[], None]

_PROBE_TOKENS = 16
_RETRY_S = 10.0
"""After storage failed."""
_AROUND_S = 1.0
"""So long after a switch, waits still count as near it."""
_LONGEST_YIELD_S = 0.1
"""Work aside goes on after so long, however busy the engine is."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A version that can draft from one proposal to the next."""

    version: str
    runner: ModelRunner
    probe: Tensor
    """Logits of the probe, from a load of its own."""


class VersionLoader:
    """A version's reference -> the version, loaded and held against everything it must agree with."""

    def __init__(self, folder: Path, base: ModelRunner, fetch: Fetch) -> None:
        """`folder` and `base` are the configuration's draft: others have its tensors and its tokenizer."""
        self._folder = folder
        self._base = base
        self._fetch = fetch

    def __call__(self, ref: DraftRef, target: str) -> Prepared:
        """Fetch, check, load, compute the probe. Files are in memory afterwards, and on no disk of this machine.

        Raises:
            ModelError: it is not to be served, and why.
            StorageError: it cannot be reached now.
        """
        if not ref.url:
            if ref.version != self._base.version:
                raise ModelError(f"the draft of the configuration is {self._base.version}")
            return self._load(self._folder)
        with tempfile.TemporaryDirectory(prefix="paceline-draft-") as place:
            folder = self._fetch(ref, Path(place))
            self._check_card(folder, target)
            self._check_tensors(folder)
            return self._load(folder)

    def base(self) -> Prepared:
        """The configuration's draft, which is loaded already; nobody uses its pool yet."""
        table = list(range(-(-_PROBE_TOKENS // self._base.cache.block_size)))
        return Prepared(
            self._base.version, self._base, probe_logits(self._base, table, probe_ids(self._base.vocab_size))
        )

    def _check_card(self, folder: Path, target: str) -> None:
        card = read_object(folder / "card.json")
        if card.get("target") != target:
            raise ModelError(f"card.json: target={card.get('target')!r}, expected {target!r}")
        if not (self._folder / "tokenizer.json").is_file():
            return  # then there is nothing to compare it with
        ours, theirs = (_digest(where / "tokenizer.json") for where in (self._folder, folder))
        if theirs != ours:
            raise ModelError(
                f"tokenizer.json has sha256 {theirs[:12]}, expected that of the target's {ours[:12]}"
            )

    def _check_tensors(self, folder: Path) -> None:
        """Names, shapes and dtypes are those of the configuration's draft: all versions share one pool of KV."""
        ours, theirs = _header(self._folder), _header(folder)
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise ModelError(
                    f"tensor {name}: {_shown(theirs.get(name))}, expected {_shown(ours.get(name))}"
                    " as in the configuration's draft"
                )

    def _load(self, folder: Path) -> Prepared:
        """In a pool of its own, as small as the checks need."""
        base = self._base
        size = base.cache.block_size
        model = load_model(folder, load_model_config(folder))
        if base.cache.device.type != "cpu":
            model = placed(model, base.cache.device, base.cache.dtype)
        runner = ModelRunner(
            model,
            weights_version(folder),
            num_blocks=-(-32 // size) + 1,
            block_size=size,
            graphs="eager" if base.decides else "off",  # those in force lend it their graphs
        )
        same = (runner.vocab_size, runner.max_context, _shape(runner))
        if same != (base.vocab_size, base.max_context, _shape(base)):
            raise ModelError(
                f"vocabulary, context and KV {same}: expected those of the configuration's draft, "
                f"{(base.vocab_size, base.max_context, _shape(base))}"
            )
        runner.warm_up_levels()
        table = list(range(-(-_PROBE_TOKENS // size)))
        probe = probe_logits(runner, table, probe_ids(runner.vocab_size))
        if not bool(torch.isfinite(probe).all()):
            raise ModelError("its logits on the probe are not finite")
        return Prepared(runner.version, runner, probe)


def probe_ids(vocab_size: int) -> npt.NDArray[np.int32]:
    """Fixed tokens, the same for every version."""
    return ((np.arange(_PROBE_TOKENS) * 7919 + 13) % vocab_size).astype(np.int32)


def _shape(runner: ModelRunner) -> tuple[int, int, int]:
    layout = runner.cache.layout
    return layout.num_layers, layout.num_kv_heads, layout.head_dim


def _digest(path: Path) -> str:
    return file_sha256(path) if path.is_file() else "none"


def _header(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> dtype and shape."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in weight_files(folder):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                part = file.get_slice(name)
                found[name] = part.get_dtype(), tuple(part.get_shape())
    return found


def _shown(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "none" if tensor is None else f"{tensor[0]} {list(tensor[1])}"


class DraftVersions:
    """The versions of one draft engine: in force, resident, on their way, refused. All calls on the engine's thread."""

    def __init__(
        self,
        engine: DraftEngine,
        load: VersionLoader,
        *,
        limit: int,
        aside: Callable[[Job], object],
        post: Callable[[Job], object],
        worker_id: str = "",
        target: str = "",
        changed: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
    ) -> None:
        """`aside` runs a job on another thread, one at a time; `post` runs one on the engine's thread, between two steps.

        `limit` versions are held besides those in force. `changed` is called when the status did.
        """
        self._engine = engine
        self._load = load
        self._limit = limit
        self._aside = aside
        self._post = post
        self._worker_id = worker_id
        self._changed = changed
        self._clock = clock
        self._metrics = metrics or Metrics("draft")
        base = load.base()
        self._held = {base.version: base}
        self._plan = DraftPlan(-1, target, (DraftRef(base.version, ""),), base.version)
        """In force."""
        self._wanted = self._plan
        self._refused: dict[str, str] = {}
        self._retry_at: dict[str, float] = {}
        self._coming: set[str] = set()
        self._changed_at = -_AROUND_S
        self.targets: frozenset[str] = frozenset()
        """Versions of the targets that are served, as far as is known; set from any thread."""
        self._misfit = ""
        """Why nothing of the wanted plan fits them."""
        self.swap_ms = 0.0
        self.gap_ms = 0.0

    # -- what is asked for -------------------------------------------------------------------------------

    def receive(self, plan: DraftPlan) -> None:
        """What should be, said again and again: an older plan is ignored, one that is in force costs nothing."""
        if plan.revision < self._wanted.revision:
            return
        if plan != self._wanted:
            self._wanted = plan
            self._refused, self._retry_at = {}, {}
            self._check_plan()
        self._misfit = ""
        if plan.target and self.targets and plan.target not in self.targets:
            self._misfit = f"trained for target {plan.target}; {', '.join(sorted(self.targets))} is served"
            self._changed()
            return
        self._prepare()
        self._commit()

    def _check_plan(self) -> None:
        """Versions that nothing could be done for."""
        plan = self._wanted
        refs = {ref.version for ref in plan.resident}
        for version in versions_needed(plan):
            if version not in refs:
                self._refuse(version, "the plan does not say where it lies")
        for version in versions_needed(plan)[self._limit :]:
            self._refuse(version, f"more versions in use than learning.rollout.resident={self._limit}")

    def _to_hold(self) -> list[DraftRef]:
        """Those in use first, then the newest."""
        plan, needed = self._wanted, versions_needed(self._wanted)
        first = [ref for ref in plan.resident if ref.version in needed]
        return [*first, *(ref for ref in plan.resident if ref not in first)][: self._limit]

    def _prepare(self) -> None:
        """Have what is missing loaded aside."""
        target, now = self._wanted.target, self._clock()
        for ref in self._to_hold():
            version = ref.version
            is_given_up = version in self._refused and not now >= self._retry_at.get(version, float("inf"))
            if version not in self._held and version not in self._coming and not is_given_up:
                self._coming.add(version)
                self._aside(lambda ref=ref: self._load_one(ref, target))  # type: ignore[misc]

    def _load_one(self, ref: DraftRef, target: str) -> None:
        """On the thread aside. Whatever goes wrong there is an answer, not the end of a worker that drafts."""
        found: Prepared | Exception
        try:
            found = self._load(ref, target)
        except Exception as error:  # noqa: BLE001
            found = error
        self._post(lambda: self._loaded(ref, found))

    def _loaded(self, ref: DraftRef, found: Prepared | Exception) -> None:
        version = ref.version
        self._coming.discard(version)
        if ref not in self._to_hold():
            pass
        elif isinstance(found, Exception):
            if not isinstance(found, ModelError):  # storage, memory: another time it may work
                self._retry_at[version] = self._clock() + _RETRY_S
            reason = str(found) if isinstance(found, PacelineError) else f"{type(found).__name__}: {found}"
            self._refuse(version, reason)
        elif (twin := self._twin(found)) is not None:
            self._refuse(version, f"its logits on the probe are those of {twin}: it would change nothing")
        else:
            self._engine.attach(found.runner)
            self._held[version] = found
            self._refused.pop(version, None)
        self._commit()
        self._changed()

    def _twin(self, found: Prepared) -> str | None:
        return next((p.version for p in self._held.values() if torch.equal(p.probe, found.probe)), None)

    def _refuse(self, version: str, reason: str) -> None:
        log.warning("draft_version_refused", version=version, reason=reason)
        self._refused[version] = reason[:500]
        self._metrics.draft_refusals.inc()

    # -- the switch --------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Put the wanted plan in force if all that it uses is here; between two proposals, nobody is drained."""
        before, plan = self._plan, self._wanted
        needed = versions_needed(plan)
        if plan is before or self._misfit or any(v not in self._held or v in self._refused for v in needed):
            return
        began = time.perf_counter()
        num = self._switch(plan)
        reason = self._why_not(plan)
        if reason:
            self._switch(before)
            self._refuse(plan.live, reason)
            self._changed()
            return
        took_ms = 1e3 * (time.perf_counter() - began)
        if plan.live != before.live:
            self.swap_ms, self.gap_ms = took_ms, 0.0
            self._changed_at = self._clock()
            self._metrics.draft_swaps.inc()
            self._metrics.draft_swap_seconds.observe(took_ms / 1e3)
        self._plan = plan
        kept = {*needed, *(ref.version for ref in self._to_hold())}
        self._held = {version: held for version, held in self._held.items() if version in kept}
        log.info(
            "draft_plan_in_force",
            revision=plan.revision,
            live=plan.live,
            canary=plan.canary,
            resident=list(self._held),
            moved_streams=num,
            took_ms=took_ms,
        )
        self._changed()

    def _switch(self, plan: DraftPlan) -> int:
        # Only those in use: the engine keeps this function, and what it holds is not released.
        runners = {version: self._held[version].runner for version in versions_needed(plan)}
        return self._engine.switch(runners[plan.live], lambda *stream: runners[version_for(plan, *stream)])

    def _why_not(self, plan: DraftPlan) -> str:
        """Whether the engine really drafts as the plan says: a switch that did nothing would go unnoticed for ever."""
        live = self._held[plan.live]
        if not torch.equal(self._engine.probe(probe_ids(live.runner.vocab_size)), live.probe):
            return "after the switch, draft logits on the probe are not those of a fresh load of it"
        wrong = sum(
            stream.weights is not self._held[version_for(plan, *stream.origin)].runner
            for stream in self._engine.streams
        )
        return f"after the switch, {wrong} streams still drafted with other weights" if wrong else ""

    # -- what is -----------------------------------------------------------------------------------------

    @property
    def live(self) -> str:
        return self._plan.live

    @property
    def beside(self) -> tuple[str, ...]:
        """What drafts for some streams instead: a canary, and versions of routes."""
        return tuple(version for version in versions_needed(self._plan) if version != self._plan.live)

    def waited(self, seconds: float) -> None:
        """An ask was answered after so long: near a switch, the longest counts."""
        if self._coming or self._clock() - self._changed_at < _AROUND_S:
            self.gap_ms = max(self.gap_ms, 1e3 * seconds)

    def status(self) -> DraftStatus:
        plan = self._plan
        refused = self._refused | ({self._wanted.live: self._misfit} if self._misfit else {})
        return DraftStatus(
            self._worker_id,
            plan.revision,
            plan.target or min(self.targets, default=""),
            tuple(self._held),
            plan.live,
            plan.canary,
            tuple(sorted(refused.items())),
            self.swap_ms,
            self.gap_ms,
        )


class Aside:
    """Jobs -> a thread that runs them one by one, and stands still while somebody else is busy.

    Two threads of one interpreter share it in turns of a millisecond, and every operation that lets go of it costs
    the other such a turn: an answer of 16 ms took 50 beside a model that was being loaded. So this thread looks, at
    each call it makes, whether the other is busy, and waits until it is not.
    """

    def __init__(self) -> None:
        self._may_run = threading.Event()
        self._may_run.set()
        self._jobs: list[Job] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __call__(self, job: Job) -> None:
        """Run it when those before it are done."""
        with self._lock:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="draft-versions", daemon=True)
                self._thread.start()

    def busy(self) -> None:
        """The other thread begins what nobody may hold up."""
        self._may_run.clear()

    def idle(self) -> None:
        """It is done."""
        self._may_run.set()

    def _run(self) -> None:
        sys.setprofile(self._give_way)
        try:
            while True:
                with self._lock:
                    if not self._jobs:
                        self._thread = None
                        return
                    job = self._jobs.pop(0)
                job()
        finally:
            sys.setprofile(None)

    def _give_way(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._may_run.is_set():
            self._may_run.wait(_LONGEST_YIELD_S)
