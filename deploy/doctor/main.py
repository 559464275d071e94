"""Command line -> a table of what is wrong and what to do about it; exit status 1 if something does not work."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cluster.admin.key import read_admin_key
from paceline.cluster.config import ClusterConfig, load_config
from paceline.cluster.errors import ConfigError
from paceline.deploy import local
from paceline.deploy.doctor.cluster import Cluster
from paceline.deploy.doctor.findings import Finding, run
from paceline.deploy.doctor.machine import Machine

out = Console(highlight=False)
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}

Url = Annotated[str, typer.Option(help="Of a cluster elsewhere; that of the local one by default.")]


def doctor(
    name: Annotated[str, typer.Option(help="Name of the local cluster.")] = "local",
    preset: Annotated[str | None, typer.Option(help="A bundled preset.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file with the same sections as a preset.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="section.field=value, repeatable.")
    ] = None,
    gateway: Url = "",
    control: Url = "",
    api_key: Annotated[
        str, typer.Option(help="For the test completion; else PACELINE_API_KEY.", show_default=False)
    ] = "",
    admin_key: Annotated[
        str,
        typer.Option(
            help="For control; else PACELINE_ADMIN_KEY, or admin.key in PACELINE_HOME.", show_default=False
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check this machine, and a running cluster: what is wrong, and what to do about it."""
    if preset is not None and config is not None:
        raise ConfigError("--preset and --config: give one of them")
    state = local.read_state(local.run_folder(name))
    is_running = state is not None and bool(local.processes_of(state["run_id"]))
    asked = config is not None or preset is not None or settings
    if is_running and state is not None and not asked:
        checked = ClusterConfig.model_validate(state["config"])
    else:
        checked = load_config(config or preset or "laptop", settings or [])
    groups: list[tuple[str, Iterable[Finding]]] = [
        ("this machine", run(Machine(checked, is_running=is_running and not asked).checks()))
    ]
    here = state if is_running and state is not None else {}
    where = Cluster(
        (gateway or str(here.get("gateway", ""))).rstrip("/"),
        (control or str(here.get("control", ""))).rstrip("/"),
        api_key or os.environ.get("PACELINE_API_KEY", ""),
        admin_key or _admin_key(),
    )
    if where.gateway or where.control:
        groups.append(("the cluster", run(where.checks())))
    found = [(group, finding) for group, findings in groups for finding in findings]
    failed = [finding for _, finding in found if finding.level == "fail"]
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [{"where": g, **f.plain()} for g, f in found]}))
    else:
        _show(found)
        if not (where.gateway or where.control):
            out.print(
                f"no cluster {name!r} runs here: its checks were left out (--gateway, --control: one elsewhere)"
            )
    if failed:
        raise SystemExit(1)


def _admin_key() -> str:
    """One that cannot be read is a finding of its own."""
    try:
        return read_admin_key(local.admin_key_path()) or ""
    except ConfigError:
        return ""


def _show(found: list[tuple[str, Finding]]) -> None:
    table = Table(title="paceline doctor", title_justify="left", show_edge=False)
    for column in ("", "check", "found", "what to do"):
        table.add_column(column, overflow="fold")
    group = ""
    for where, finding in found:
        if where != group:
            group = where
            table.add_row("", f"[bold]{where}[/bold]", "", "")
        colour = _COLOURS[finding.level]
        # Findings hold what users wrote: brackets in it are no markup.
        table.add_row(
            f"[{colour}]{finding.level}[/{colour}]",
            *map(escape, (finding.check, finding.found, finding.what_to_do)),
        )
    (out if out.is_terminal else Console(highlight=False, width=180)).print(table)
    counts = {level: sum(f.level == level for _, f in found) for level in ("ok", "warn", "fail")}
    out.print(f"{counts['ok']} well, {counts['warn']} to look at, {counts['fail']} that do not work")
