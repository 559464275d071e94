"""The figures that processes register -> the page that lists them."""

from __future__ import annotations

from itertools import groupby

from paceline.cluster.metrics import Entry, Metrics

_HEAD = """# Metrics

Written by `python -m paceline.deploy.eyes.main` from `cluster/metrics.py`.

Every process pushes its figures to Control once a second, and Control serves all of them at `/metrics`, in Prometheus'
text format 0.0.4. **One target is enough**, however many workers come and go; each sample says by `role` and `worker`
whose it is, and a worker that has been silent for five seconds is left out.

| deployed by | scrape |
| --- | --- |
| `paceline serve` | `http://127.0.0.1:8001/metrics`, no key (`control.host`, `control.port`) |
| `ray up`, `paceline deploy` | port 8001 of the head, with the admin key as bearer token: `deploy/prometheus/prometheus.yml` |
| Helm | `metrics.podMonitor=true` makes a PodMonitor for the head's pod that takes the key from its Secret; `metrics.rules` and `metrics.dashboards` bring the alerts and the dashboard |

Counters begin at zero when a process starts: use `rate` and `increase`. Ratios are not exported; divide rates, as the
dashboard in `deploy/grafana/` does. What to do when a figure is bad: [alerts](alerts.md).
"""


def page() -> str:
    """docs/metrics.md."""
    lines = [_HEAD]
    for section, entries in groupby(Metrics().catalogue, lambda entry: entry.section):
        lines += [
            f"## {section}",
            "",
            "| metric | type | labels | reported by | what it says |",
            "| --- | --- | --- | --- | --- |",
            *map(_row, entries),
            "",
        ]
    return "\n".join(lines)


def _row(entry: Entry) -> str:
    labels = ", ".join(f"`{label}`" for label in entry.labels)
    roles = ", ".join(entry.roles)
    return f"| `{entry.name}` | {entry.kind} | {labels} | {roles} | {entry.text} |"
