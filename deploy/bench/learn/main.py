"""Parts of the learning loop's benchmark -> their figures as one table and one JSON line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from paceline.cluster.config import model_folder
from paceline.cluster.errors import ConfigError
from paceline.cluster.pair import check_pair

if TYPE_CHECKING:
    from paceline.deploy.bench.learn.shift import ShiftReport

PARTS = ("capture", "swap", "guard", "shift", "stationary", "gate", "replay")
"""In the order in which they are measured: `replay` works on what `shift` left."""

FLOORS = {
    "shift.acceptance_gain": 0.2,
    "shift.tokens_per_step_ratio": 1.3,
    "shift.net_vs_static": 1.15,
    "stationary.net_vs_static": 0.99,
    "gate.good_deployed": 18.0,
    "guard.trainer_share": 0.25,
}
CEILINGS = {
    "shift.changed": 0.0,
    "stationary.changed": 0.0,
    "gate.bad_deployed": 0.0,
    "gate.null_deployed": 5.0,
    "gate.prediction_error": 0.01,
    "swap.changed": 0.0,
    "swap.dropped": 0.0,
    "swap.worst_of_step": 1.0,
    "rollback.s": 1.0,
    "guard.itl_ratio": 1.05,
    "guard.yield_ms": 100.0,
    "guard.trainer_share_full": 0.05,
    "capture.bytes_per_token": 1024.0,
    "capture.us_per_token": 20.0,
}
"""What figures must reach; the rest is told for what it is worth."""


@dataclass(slots=True)
class Found:
    """What was measured so far."""

    figures: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    """By part: what stands behind its figures."""
    shift: ShiftReport | None = None
    """For what replays it."""


def run(
    *,
    target: str = "bundled/target",
    draft: str = "bundled/draft",
    parts: Sequence[str] = PARTS,
    quick: bool = False,
    work: Path | None = None,
    seed: int = 0,
    settings: Sequence[str] = (),
    json_path: Path | None = None,
    out: Console | None = None,
    err: Console | None = None,
) -> dict[str, Any]:
    """Measure, print, and return the object of the JSON line.

    Args:
        quick: sizes at which every part runs through; the figures decide nothing.
        work: folder for what a later run can use again (texts, drafts); a temporary one if not given.
        settings: `section.field=value` for the clusters of shift and stationary.
    Raises:
        ConfigError: an unknown part, or a model folder that is not there. PacelineError: a cluster or a request failed.
    """
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise ConfigError(f"part {unknown[0]!r}: expected one of {', '.join(PARTS)}")
    out, err = out or Console(highlight=False), err or Console(stderr=True, highlight=False)
    folders = model_folder(target), model_folder(draft)
    check_pair(*folders)
    found = Found()

    def say(text: str) -> None:
        err.print(f"  {text}", markup=False)

    with ExitStack() as stack:
        place = work or Path(stack.enter_context(TemporaryDirectory(prefix="paceline-learn-")))
        place.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            if part not in parts:
                continue
            began = time.monotonic()
            say(f"{part} ...")
            try:
                _MEASURES[part](_Task(folders, place, quick, seed, tuple(settings), say), found)
            except Exception as error:
                found.notes["failed"] = {part: f"{type(error).__name__}: {error}"}
                _tell(out, found, quick, json_path)  # what was measured before took its time too
                raise
            say(f"{part}: {time.monotonic() - began:.0f} s")
    return _tell(out, found, quick, json_path)


def _tell(out: Console, found: Found, quick: bool, json_path: Path | None) -> dict[str, Any]:
    """The table and the line of JSON."""
    show(out, found, quick)
    result = {"bench": "learn", "quick": quick, "figures": found.figures, "notes": found.notes}
    line = json.dumps(result)
    out.print(line, soft_wrap=True, markup=False)
    if json_path is not None:
        json_path.write_text(line + "\n")
    return result


def show(out: Console, found: Found, quick: bool) -> None:
    """The table: each figure, what it must reach, and whether it does."""
    table = Table(title="learning" + (" (quick: decides nothing)" if quick else ""), title_justify="left")
    for column in ("figure", "measured", "must be", ""):
        table.add_column(column)
    for name, value in sorted(found.figures.items()):
        if name.endswith((".lo", ".hi")):
            continue
        low, high = found.figures.get(f"{name}.lo"), found.figures.get(f"{name}.hi")
        text = f"{value:.4g}" + (f" [{low:.4g}, {high:.4g}]" if low is not None and high is not None else "")
        limit, verdict = "", ""
        if name in FLOORS:
            limit, verdict = f">= {FLOORS[name]:g}", "yes" if value >= FLOORS[name] else "NO"
        elif name in CEILINGS:
            limit, verdict = f"<= {CEILINGS[name]:g}", "yes" if value <= CEILINGS[name] else "NO"
        table.add_row(name, text, limit, verdict)
    out.print(table)


# --- parts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Task:
    folders: tuple[Path, Path]
    work: Path
    quick: bool
    seed: int
    settings: tuple[str, ...]
    say: Callable[[str], None]


def _shift(task: _Task, found: Found) -> None:
    from paceline.deploy.bench.learn import shift

    size = shift.QUICK if task.quick else shift.Size(seed=task.seed)
    report = shift.ShiftBench(*task.folders, task.work, size, task.say, task.settings).shift()
    found.shift = report
    found.figures |= report.figures()
    found.notes["shift"] = {"versions": report.learning.versions, "decisions": report.learning.decisions[:20]}


def _stationary(task: _Task, found: Found) -> None:
    from paceline.deploy.bench.learn import shift

    size = shift.QUICK if task.quick else shift.Size(seed=task.seed)
    report = shift.ShiftBench(*task.folders, task.work, size, task.say, task.settings).stationary()
    found.figures |= report.figures()
    found.notes["stationary"] = {"decisions": report.decisions[:20]}


def _guard(task: _Task, found: Found) -> None:
    from paceline.deploy.bench.learn import guard

    size = guard.QUICK if task.quick else guard.Size(seed=task.seed)
    found.figures |= guard.GuardBench(*task.folders, size, task.say).run().figures()


def _replay(task: _Task, found: Found) -> None:
    from paceline.deploy.bench.learn import arms, shift

    if found.shift is None:
        raise ConfigError("part 'replay': it works on the texts of `shift`; ask for both")
    size = shift.QUICK if task.quick else shift.Size()
    bench = arms.ArmsBench(*task.folders, task.work, size.streams, task.say)
    report = bench.run(found.shift, found.shift.learnt, steps=20 if task.quick else 240, seed=task.seed)
    found.figures |= report.figures()
    if not report.is_trusted:
        found.notes["replay"] = {
            "not reported, replay is too far from the live arms": report.ratios(),
            "errors of steps and time": report.errors,
        }


def _gate(task: _Task, found: Found) -> None:
    from paceline.deploy.bench.learn import gate

    quick = gate.Size(fresh=200, heldout=200, each=100, train=100, tune=50, steps=20, null=4, live=20)
    curve = gate.GateBench(task.work / "gate", quick if task.quick else gate.Size(), task.say).run()
    found.figures |= curve.figures()
    found.notes["gate"] = curve.lines()


def _swap(task: _Task, found: Found) -> None:
    from paceline.deploy.bench.learn import swap

    num_swaps = 6 if task.quick else swap.NUM_SWAPS
    found.figures |= swap.swap_figures(*task.folders, num_swaps=num_swaps, seed=task.seed)


def _capture(task: _Task, found: Found) -> None:
    from paceline.deploy.bench.learn import capture

    measured = capture.capture_figures(blocks=2 if task.quick else 12, seed=task.seed + 1)
    found.figures |= {
        name: float(value) for name, value in measured.items() if isinstance(value, int | float)
    }
    found.notes["capture"] = {name: value for name, value in measured.items() if name not in found.figures}


_MEASURES: dict[str, Callable[[_Task, Found], None]] = {
    "shift": _shift,
    "stationary": _stationary,
    "guard": _guard,
    "gate": _gate,
    "swap": _swap,
    "capture": _capture,
    "replay": _replay,
}
