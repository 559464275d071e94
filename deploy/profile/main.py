"""Configuration -> a measured profile: progress on stderr, tables on stdout, one JSON file.

Nothing here imports torch before `run` does: how idle OpenMP threads wait is read once, when torch is loaded.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.cluster.config import ClusterConfig, model_folder
from paceline.cluster.errors import ConfigError
from paceline.cluster.pair import check_pair
from paceline.cluster.profile import CostModel, LinkModel, Machine, Profile, Spread
from paceline.deploy.bench.main import PASSIVE

if TYPE_CHECKING:
    from paceline.deploy.profile.measure import Plan, Say


def run(
    config: ClusterConfig,
    path: Path,
    *,
    quick: bool = False,
    plan: Plan | None = None,
    out: Console | None = None,
    err: Console | None = None,
) -> Profile:
    """Measure the configured pair on this machine, show it and write it to `path`.

    Raises:
        ConfigError: `path` cannot take a profile. It is looked at first: measuring takes a minute.
        ModelError: the pair cannot be used. TransferError: the link could not be measured.
    """
    if "torch" not in sys.modules:
        for name, value in PASSIVE.items():
            os.environ.setdefault(name, value)
    check_path(path)
    check_pair(model_folder(config.model.target), model_folder(config.model.draft))
    from paceline.deploy.bench.report import console
    from paceline.deploy.profile.measure import Plan

    out, err = out or console(), err or Console(stderr=True, highlight=False)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("starting")

        def say(text: str) -> None:
            progress.update(task, description=text)
            if not err.is_terminal:
                err.print(f"  {text}", markup=False)

        profile = measure(config, plan or (Plan.quick() if quick else Plan()), say, is_quick=quick)
    show(profile, config, out)
    profile.save(path)
    out.print(f"written to {path.resolve()}", markup=False, soft_wrap=True)
    return profile


def check_path(path: Path) -> None:
    """A profile may replace a profile, and nothing else.

    Raises:
        ConfigError: names the path and what stands in the way.
    """
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ConfigError(f"--out {path}: expected a file in a folder that exists")
    if path.exists():
        try:
            Profile.load(path)
        except ConfigError as error:
            raise ConfigError(
                f"--out {path}: exists and is no profile; move it or name another: {error}"
            ) from None


def measure(config: ClusterConfig, plan: Plan, say: Say, *, is_quick: bool = False) -> Profile:
    """All measurements, one after the other: nothing else of ours runs beside them."""
    from paceline.deploy.placement import link_address, local_addresses
    from paceline.deploy.profile.link import measure_link
    from paceline.deploy.profile.measure import PairBench

    pair = PairBench(config, plan, say)
    steps = tuple(pair.steps())
    prefill, drafts, threads = tuple(pair.prefill()), tuple(pair.drafts()), tuple(pair.threads())
    say("KV link between two processes")
    link = measure_link(
        plan.link_bytes,
        repeats=plan.num_messages,
        interface=link_address(config.link.interface, "127.0.0.1", local_addresses()),
        timeout_s=max(10.0, config.link.timeout_s),
    )
    return Profile(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        is_quick=is_quick,
        machine=machine(),
        target=pair.target.card(config.model.target, config.decode.threads),
        draft=pair.draft.card(config.model.draft, config.draft.threads),
        steps=steps,
        cost=CostModel.fit(steps),
        prefill=prefill,
        drafts=drafts,
        threads=threads,
        link=tuple(link),
        link_cost=LinkModel.fit(link),
    )


def machine() -> Machine:
    """This one."""
    from paceline.deploy.bench.inprocess import thread_counts
    from paceline.deploy.bench.report import cpu_name, versions

    return Machine(
        cpu=cpu_name() or "unknown",
        cores=max(thread_counts()),
        memory_bytes=psutil.virtual_memory().total,
        versions=versions(),
    )


# --- what is shown --------------------------------------------------------------------------------------


def show(profile: Profile, config: ClusterConfig, out: Console) -> None:
    """The card, one table for each kind of measurement, and what follows from them."""
    card = profile.machine
    for name, text in (
        ("machine", f"{card.cpu}, {card.cores} cores, {card.memory_bytes >> 20} MB"),
        ("versions", ", ".join(f"{name} {version}" for name, version in card.versions.items())),
        *(
            (name, f"{model.folder} {model.version}, {model.path}, {model.threads} threads")
            for name, model in (("target", profile.target), ("draft", profile.draft))
        ),
    ):
        out.print(f"[bold]{name:10}[/bold] ", end="")
        out.print(text, markup=False, soft_wrap=True)
    out.print(_steps(profile))
    _show_cost(profile, out)
    out.print(_prefill(profile))
    if profile.drafts:
        out.print(_drafts(profile))
    out.print(_threads(profile))
    _show_threads(profile, config, out)
    out.print(_link(profile))
    fit = profile.link_cost
    out.print(
        f"link: {1e6 * fit.latency:.0f} us + bytes / {fit.bandwidth / 1e6:.0f} MB/s, "
        f"residual {100 * fit.residual:.0f} %"
    )


def _steps(profile: Profile) -> Table:
    nodes = sorted({point.nodes for point in profile.steps})
    table = _table(
        "target: median ms of a step by nodes of a tree",
        ("streams", "context", *map(str, nodes)),
    )
    cells = {(p.streams, p.context, p.nodes): f"{1e3 * p.seconds.median:.2f}" for p in profile.steps}
    for streams, context in sorted({key[:2] for key in cells}):
        row = (cells.get((streams, context, num), "") for num in nodes)
        table.add_row(str(streams), str(context), *row)
    return table


def _show_cost(profile: Profile, out: Console) -> None:
    c = profile.cost
    parts = (
        f"{1e6 * c.step:.1f} us",
        f"{1e6 * c.row:.2f} us * rows",
        f"{1e6 * c.stream:.2f} us * streams",
        f"{1e9 * c.key:.2f} ns * streams * context",
        f"{1e9 * c.pair:.3f} ns * rows * context",
    )
    out.print(f"T = {' + '.join(parts)}", markup=False, soft_wrap=True)
    out.print(f"residual {100 * c.residual:.0f} % median, {100 * c.worst:.0f} % worst", style="dim")


def _prefill(profile: Profile) -> Table:
    table = _table("prefill, one prompt", ("chunk", "prompt", "tokens/s"))
    for point in profile.prefill:
        table.add_row(str(point.chunk), str(point.tokens), _spread(point.tokens_s, 1.0, 0))
    return table


def _drafts(profile: Profile) -> Table:
    table = _table("draft", ("streams", "context", "depth", "width", "step ms", "whole draft ms"))
    for p in profile.drafts:
        numbers = (p.streams, p.context, p.depth, p.width)
        table.add_row(*map(str, numbers), _ms(p.step), _ms(p.whole))
    return table


def _threads(profile: Profile) -> Table:
    table = _table("target by threads", ("threads", "decode step ms", "prompt chunk ms"))
    for point in profile.threads:
        table.add_row(str(point.threads), _ms(point.decode), _ms(point.prefill))
    return table


def _show_threads(profile: Profile, config: ClusterConfig, out: Console) -> None:
    for name, now in (("decode", config.decode.threads), ("prefill", config.prefill.threads)):
        best = profile.best_threads("decode" if name == "decode" else "prefill")
        text = "as configured" if best == now else f"configured: {name}.threads={now}"
        out.print(f"fastest {name}: {best} threads ({text})", style="dim")


def _link(profile: Profile) -> Table:
    table = _table("KV link, two processes", ("bytes", "ms a message", "MB/s"))
    for point in profile.link:
        rate = point.num_bytes / point.seconds.median / 1e6
        table.add_row(f"{point.num_bytes}", _ms(point.seconds), f"{rate:.0f}")
    return table


def _ms(spread: Spread) -> str:
    return _spread(spread, 1e3, 2)


def _spread(spread: Spread, factor: float, digits: int) -> str:
    median, q1, q3 = (f"{factor * x:.{digits}f}" for x in (spread.median, spread.q1, spread.q3))
    return f"{median} \\[{q1}, {q3}]"


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(
        title=f"\n{title}", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
