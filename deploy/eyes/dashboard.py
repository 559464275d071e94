"""Rows of panels -> a Grafana dashboard. `$all` in a query becomes the dashboard's choice of clusters.

Grafana replaces `$__rate_interval` by what suits the scrape interval and the width of the screen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

UID = "paceline"
_ALL = 'job=~"$job"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _HEIGHT = 24, 8
_USED, _DRAFTED = ',state="used"', ',source!="target"'


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression; `legend` names its lines by their labels."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart, or one number if `is_number`."""

    title: str
    unit: str
    """Grafana's name of it."""
    queries: Sequence[Query]
    says: str = ""
    """What to make of it."""
    is_number: bool = False
    width: int = 8
    """Of 24 columns."""


def _quantiles(name: str, *qs: float, by: str = "") -> list[Query]:
    labels = f"le, {by}" if by else "le"
    shown = f" {{{{{by}}}}}" if by else ""
    return [
        Query(
            f"histogram_quantile({q}, sum by ({labels}) (rate(paceline_{name}_bucket{{$all}}[$__rate_interval])))",
            f"p{round(100 * q)}{shown}",
        )
        for q in qs
    ]


def _rate(name: str, by: str = "", where: str = "") -> str:
    aggregate = f"sum by ({by})" if by else "sum"
    return f"{aggregate} (rate(paceline_{name}{{$all{where}}}[$__rate_interval]))"


def _sum(name: str, by: str = "", where: str = "") -> str:
    return f"{f'sum by ({by})' if by else 'sum'} (paceline_{name}{{$all{where}}})"


_NUMBERS = (
    Panel("Requests a second", "reqps", [Query(_rate("requests_total", where=',route=~"/v1/.*"'))], is_number=True, width=4),
    Panel("Tokens a second", "none", [Query(_rate("tokens_total"))], is_number=True, width=4),
    Panel("Open streams", "none", [Query(_sum("streams", where=',role="gateway"'))], is_number=True, width=4),
    Panel("First token, p50", "s", _quantiles("ttft_seconds", 0.5), is_number=True, width=4),
    Panel("Tokens per step", "none", [Query(f"{_rate('tokens_total')} / {_rate('stream_steps_total')}")], is_number=True, width=4),
    Panel("Ready decode workers", "none", [Query(_sum("workers", where=',kind="decode",state="ready"'))], is_number=True, width=4),
)  # fmt: skip

_REQUESTS = (
    Panel("Requests a second, by status", "reqps", [Query(_rate("requests_total", "status"), "{{status}}")]),
    Panel("Time to first token", "s", _quantiles("ttft_seconds", 0.5, 0.95, 0.99)),
    Panel("Time between token events", "s", _quantiles("inter_token_seconds", 0.5, 0.95, 0.99)),
    Panel("Streams", "none", [
        Query(_sum("streams", "role"), "in {{role}}"),
        Query(_sum("streams_waiting", "role"), "waiting in {{role}}"),
    ]),
    Panel("Time in queue", "s", _quantiles("queue_seconds", 0.5, 0.99, by="role"), "Until a step computes for a stream that could run."),
    Panel("Turned away, moved, routed blindly", "ops", [
        Query(_rate("streams_turned_away_total", "reason"), "turned away: {{reason}}"),
        Query(_rate("stream_recoveries_total", "reason"), "moved: {{reason}}"),
        Query(_rate("blind_routes_total"), "routed without a router"),
    ]),
)  # fmt: skip

_CLUSTER = (
    Panel("Processes ready", "none", [Query(_sum("workers", "kind", ',state="ready"'), "{{kind}}")]),
    Panel("Workers lost in an hour", "none", [
        Query("sum by (kind) (increase(paceline_workers_lost_total{$all}[1h]))", "{{kind}}")
    ], "Those that ended without saying so. Ones that drain do not count."),
    Panel("Routes a second", "ops", [Query(_rate("routes_total", "outcome"), "{{outcome}}")], "remote: with a prefill worker."),
)  # fmt: skip

_ENGINE = (
    Panel("Tokens a second, by source", "none", [Query(_rate("tokens_total", "source"), "{{source}}")]),
    Panel("Engine step", "s", _quantiles("engine_step_seconds", 0.5, 0.99, by="role")),
    Panel("KV blocks in use", "percentunit", [
        Query(f"{_sum('kv_blocks', 'role', _USED)} / {_sum('kv_blocks', 'role')}", "{{role}}")
    ]),
    Panel("Prompt tokens found in the cache", "percentunit", [
        Query(f"{_rate('prefix_hit_tokens_total', 'role')} / {_rate('prefix_query_tokens_total', 'role')}", "{{role}}")
    ]),
    Panel("Preemptions a second", "ops", [Query(_rate("preemptions_total", "role"), "{{role}}")]),
    Panel("Seconds of a step, by rows", "s", [
        Query("avg by (rows) (paceline_step_cost_seconds{$all})", "{{rows}} rows")
    ], "As the controller has measured them: what speculation lives on is that these are close together."),
)  # fmt: skip

_SPECULATION = (
    Panel("Accepted tokens per step, by source and version", "none", [
        Query(
            f"{_rate('tokens_total', 'source, version', _DRAFTED)}"
            f" / on (version) group_left () {_rate('stream_steps_total', 'version')}",
            "{{source}} {{version}}",
        )
    ], "Of one stream. The target adds one of its own to each step."),
    Panel("Right among the verified", "percentunit", [
        Query(f"{_rate('accepted_tokens_total', 'source')} / {_rate('verified_tokens_total', 'source')}", "{{source}}")
    ], "Acceptance alone does not tell a speed-up: see the gain."),
    Panel("Answers of draft workers", "ops", [Query(_rate("draft_replies_total", "outcome"), "{{outcome}}")], "late: a step went on without."),
    Panel("Draft round trip and wait", "s", [
        *(Query(q.expr, f"round trip {q.legend}") for q in _quantiles("draft_round_trip_seconds", 0.5, 0.99)),
        *(Query(q.expr, f"wait {q.legend}") for q in _quantiles("draft_wait_seconds", 0.5, 0.99)),
    ]),
    Panel("Draft tokens a second", "none", [
        Query(_rate("drafted_tokens_total", "source"), "proposed: {{source}}"),
        Query(_rate("wasted_tokens_total", "source"), "verified and wrong: {{source}}"),
    ]),
    Panel("Drafted ahead", "ops", [Query(_rate("draft_ahead_total", "outcome"), "{{outcome}}")]),
)  # fmt: skip

_HANDOFFS = (
    Panel("KV bytes a second", "Bps", [Query(_rate("kv_bytes_total", "direction"), "{{direction}}")]),
    Panel("Exposed by a hand-off", "s", _quantiles("kv_exposed_seconds", 0.5, 0.99), "What sending adds behind the end of prefill."),
    Panel("Hand-off, reservation to commit", "s", _quantiles("kv_handoff_seconds", 0.5, 0.99)),
    Panel("Prompts, by the way of their KV", "ops", [Query(_rate("kv_prompts_total", "source"), "{{source}}")]),
    Panel("Hand-offs dropped, by reason", "ops", [
        Query(_rate("kv_handoffs_dropped_total", "role, reason"), "{{role}}: {{reason}}")
    ], "The prompt is then computed again by the decode worker. digest: bytes changed on their way."),
    Panel("Links opened and poisoned", "ops", [Query(_rate("kv_links_total", "event"), "{{event}}")]),
)  # fmt: skip

_DRAFTS = (
    Panel("Draft versions in workers", "none", [
        Query(_sum("draft_versions", "version, state"), "{{version}} {{state}}")
    ], "live: drafts for everybody; beside: for a canary or a route."),
    Panel("Changes of drafts in an hour", "none", [
        Query("sum by (change) (increase(paceline_draft_changes_total{$all}[1h]))", "{{change}}")
    ]),
    Panel("Swaps in an hour", "none", [
        Query("sum (increase(paceline_draft_swaps_total{$all}[1h]))", "swaps"),
        Query("sum (increase(paceline_draft_versions_refused_total{$all}[1h]))", "refused"),
    ]),
    Panel("At the gate in a day", "none", [
        Query("sum by (result) (increase(paceline_gate_results_total{$all}[1d]))", "{{result}}")
    ]),
    Panel("Saving of the last scored candidate", "percentunit", [
        Query("max by (bound) (paceline_gate_saving{$all})", "{{bound}}")
    ], "Share of decode time; lo and hi are its 95 % interval."),
    Panel("Ledger", "s", [Query(_sum("ledger_seconds", "kind"), "{{kind}}")], "Learning pays while realised is above spent."),
    Panel("Trainer", "none", [
        Query(_sum("trainer_state", "state"), "{{state}}"),
    ]),
    Panel("Training loss", "none", [Query("max (paceline_trainer_loss{$all})", "loss")]),
    Panel("Guard of serving's latency", "none", [Query(_sum("guard_level", "level"), "{{level}}")]),
    Panel("Captured", "Bps", [
        Query(_rate("capture_bytes_total"), "written"),
        Query(_sum("capture_held_bytes"), "held (bytes)"),
    ]),
    Panel("Requests by consent", "ops", [Query(_rate("capture_consent_total", "outcome"), "{{outcome}}")]),
    Panel("Trouble", "none", [
        Query(_sum("learning_alarm", "alarm"), "{{alarm}}"),
        Query(_sum("capture_off"), "capture off"),
    ]),
)  # fmt: skip

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Now", _NUMBERS),
    ("Requests", _REQUESTS),
    ("Cluster", _CLUSTER),
    ("Engine", _ENGINE),
    ("Speculation", _SPECULATION),
    ("KV hand-offs", _HANDOFFS),
    ("Drafts that learn", _DRAFTS),
)


def panels() -> Iterator[Panel]:
    """Of all rows."""
    for _, row in ROWS:
        yield from row


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "uid": UID,
        "title": "Paceline",
        "tags": ["paceline", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource(), _job()]},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_placed()),
    }


def text(indent: int | None = 1) -> str:
    """As it stands in the file."""
    return json.dumps(dashboard(), indent=indent) + "\n"


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }


def _job() -> dict[str, Any]:
    query = "label_values(paceline_workers, job)"
    return {
        "name": "job",
        "label": "Cluster",
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "job"},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def _placed() -> Iterator[dict[str, Any]]:
    """Panels from left to right, rows from top to bottom."""
    number, y = 1, 0
    for title, row in ROWS:
        place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        number, y, x = number + 1, y + 1, 0
        height = 4 if all(panel.is_number for panel in row) else _HEIGHT
        for panel in row:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + height
            place = {"x": x, "y": y, "w": panel.width, "h": height}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            number, x = number + 1, x + panel.width
        y += height


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = (
        {"unit": panel.unit, "min": 0} if panel.unit != "percentunit" else {"unit": panel.unit}
    )
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if panel.is_number:
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "value"}
    else:
        defaults["custom"] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
    return {
        "type": "stat" if panel.is_number else "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": _SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expr.replace("$all", _ALL),
                "legendFormat": query.legend or "__auto",
            }
            for index, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }
