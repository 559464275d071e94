"""Catalogue, alerts and dashboard -> files that agree with the code, with each other, and with the figures there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from paceline.cluster.config import ClusterConfig
from paceline.cluster.metrics import Entry, Metrics
from paceline.deploy import cli
from paceline.deploy.eyes import alerts, dashboard, main

ROOT = Path(__file__).resolve().parents[3]
KNOWN = {entry.name: entry for entry in Metrics().catalogue}
ROLES = ("gateway", "router", "prefill", "decode", "draft", "trainer", "control")
QUERIES = [query.expr for panel in dashboard.panels() for query in panel.queries]


def rows() -> dict[str, tuple[str, ...]]:
    """Name -> the other cells, as they stand in docs/metrics.md."""
    found: dict[str, tuple[str, ...]] = {}
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        if line.startswith("| `paceline_"):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            assert name not in found, name
            found[name.strip("`")] = tuple(cells)
    return found


def entry_of(name: str) -> Entry | None:
    """The figure that a name in a query belongs to: a histogram's has an ending."""
    return KNOWN.get(name) or KNOWN.get(re.sub("_(bucket|sum|count)$", "", name))


# --- the catalogue --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", main.files(), ids=str)
def test_what_stands_in_the_repository_is_what_the_code_says(path: Path) -> None:
    """`make deploy-files` writes them."""
    assert (ROOT / path).read_text() == main.files()[path]


def test_the_catalogue_and_the_code_have_the_same_metrics() -> None:
    """Both ways: type, labels, who reports it, and a sentence about it."""
    found = rows()

    assert found.keys() == KNOWN.keys()
    for name, (kind, labels, roles, text) in found.items():
        entry = KNOWN[name]
        assert (kind, tuple(re.findall("`(.+?)`", labels))) == (entry.kind, entry.labels), name
        assert set(roles.split(", ")) == set(entry.roles) <= set(ROLES)
        assert len(text) > 10 and text == entry.text


def test_what_is_registered_is_what_the_catalogue_says() -> None:
    """The catalogue is no list of its own: prometheus_client's registry has these metrics and no other."""
    families = {family.name: family for family in Metrics().registry.collect()}

    assert families.keys() == {name.removesuffix("_total") for name in KNOWN}
    for entry in KNOWN.values():
        family = families[entry.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (entry.kind, entry.text)
        assert (entry.kind == "counter") == entry.name.endswith("_total")


@pytest.mark.parametrize("role", ROLES)
def test_a_process_shows_the_figures_of_its_role_only(role: Any) -> None:
    families = {family.name for family in Metrics(role).registry.collect()}

    assert families == {e.name.removesuffix("_total") for e in KNOWN.values() if role in e.roles} != set()


def test_every_metric_is_set_somewhere() -> None:
    """One that nothing ever sets would be in the catalogue and a lie."""
    sources = "".join(
        path.read_text()
        for folder in ("cluster", "workers", "deploy")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "metrics.py" and "eyes" not in path.relative_to(ROOT).parts
    )
    metrics = Metrics()
    figures = {name for name, value in vars(metrics).items() if hasattr(value, "_documentation")}

    unused = {name for name in figures if not re.search(rf"metrics\.{name}\b", sources)}
    assert len(figures) == len(KNOWN)
    assert unused == set()


# --- queries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expr", [*QUERIES, *(alert.expr for alert in alerts.ALERTS)])
def test_queries_ask_for_figures_and_labels_that_exist(expr: str) -> None:
    """A name that is misspelt gives no error anywhere, only an empty panel and an alert that never fires."""
    names = re.findall(r"\bpaceline_\w+", expr)
    assert names
    for name in names:
        assert entry_of(name) is not None, name
    known = {label for name in names if (entry := entry_of(name)) for label in entry.labels}
    known |= {"role", "worker", "job", "le"}
    asked = {
        label
        for inside in re.findall(r"{(.*?)}", expr)
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)
    }
    grouped = {
        label.strip() for inside in re.findall(r"\b(?:by|on) \((.*?)\)", expr) for label in inside.split(",")
    }
    assert asked | grouped <= known


@pytest.mark.parametrize("entry", [e for e in KNOWN.values() if e.values], ids=lambda e: e.name)
def test_values_asked_for_are_among_those_that_begin_at_zero(entry: Entry) -> None:
    """`increase` misses the first event of a series that begins with it."""
    for expr in (alert.expr for alert in alerts.ALERTS):
        for inside in re.findall(rf"{entry.name}{{(.*?)}}", expr):
            for label, value in re.findall(r'(\w+)="(.*?)"', inside):
                if label in entry.labels:
                    at = entry.labels.index(label)
                    assert value in {values[at] for values in entry.values}, (entry.name, value)


# --- alerts ---------------------------------------------------------------------------------------------


def test_every_alert_says_what_it_is_and_where_to_read_on() -> None:
    page = (ROOT / alerts.RUNBOOK).read_text()
    headings = {line.removeprefix("## ").lower() for line in page.splitlines() if line.startswith("## ")}
    (group,) = yaml.safe_load((ROOT / "deploy/prometheus/paceline.rules.yaml").read_text())["groups"]

    assert len(group["rules"]) == len(alerts.ALERTS) == len({rule["alert"] for rule in group["rules"]})
    for rule in group["rules"]:
        said = rule["annotations"]
        assert len(said["summary"]) > 10 and len(said["description"]) > 30
        path, _, anchor = said["runbook"].partition("#")
        assert path == alerts.RUNBOOK and anchor in headings
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
    for link in re.findall(r"\]\(#(\w+)\)", page):
        assert link in headings


def test_what_to_do_names_things_that_exist() -> None:
    """Commands, fields of the configuration, events of logs: somebody reads this at night."""
    text = "\n".join(f"{alert.description} {alert.what_to_do}" for alert in alerts.ALERTS)
    sources = "".join(p.read_text() for top in ("cluster", "workers") for p in (ROOT / top).rglob("*.py"))
    commands = {" ".join(path) for path in commands_of(typer.main.get_command(cli.app))}
    sections = ClusterConfig.model_fields
    quoted = set(re.findall("`(.+?)`", text))

    for found in quoted:
        if found.startswith("paceline "):
            assert found.removeprefix("paceline ") in commands, found
        elif found.partition(".")[0] in sections:
            node: Any = ClusterConfig()
            for name in found.partition("=")[0].split("."):
                node = getattr(node, name)
        elif re.fullmatch("[a-z]+(_[a-z]+)+", found):
            assert f'"{found}"' in sources or f"paceline_{found}" in text or found in str(KNOWN), found
    assert len(quoted) > 30


def commands_of(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """("drafts", "runs") and the like."""
    for name, inner in getattr(command, "commands", {}).items():
        yield (*path, name)
        yield from commands_of(inner, (*path, name))


# --- the dashboard --------------------------------------------------------------------------------------


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """Ids are unique, panels do not overlap, every query has a source that the reader chooses."""
    board = json.loads((ROOT / "deploy/grafana/paceline.json").read_text())
    shown = board["panels"]

    assert len({panel["id"] for panel in shown}) == len(shown)
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "job"}
    for one, other in combinations((panel["gridPos"] for panel in shown), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y
    charts = [panel for panel in shown if panel["type"] != "row"]
    assert len(charts) == len(list(dashboard.panels())) > 30
    for panel in charts:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert 'job=~"$job"' in target["expr"] and "$all" not in target["expr"]


def test_what_the_task_of_an_operator_needs_is_on_it() -> None:
    """The figures that tell whether the cluster does what it is for."""
    asked = {
        re.sub("_(bucket|sum|count)$", "", n) for expr in QUERIES for n in re.findall(r"paceline_\w+", expr)
    }

    for name in (
        "ttft_seconds", "inter_token_seconds", "queue_seconds", "kv_blocks", "tokens_total", "stream_steps_total",
        "draft_replies_total", "kv_bytes_total", "kv_exposed_seconds", "draft_swaps_total", "gate_results_total",
        "ledger_seconds", "trainer_state", "workers_lost_total", "kv_handoffs_dropped_total",
    ):  # fmt: skip
        assert f"paceline_{name}" in asked, name
