"""The repository's root -> the catalogue, the alerts' page, Prometheus' rules and Grafana's dashboard, written anew.

Run as `python -m paceline.deploy.eyes.main [ROOT]`; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.deploy.eyes import alerts, catalogue, dashboard

_CHART = Path("helm/paceline/files")


def files() -> dict[Path, str]:
    """Path below the root -> content. Helm reads files of the chart only: hence two of each."""
    rules = alerts.rules_text()
    return {
        Path("docs/metrics.md"): catalogue.page(),
        Path("docs/alerts.md"): alerts.page(),
        Path("deploy/prometheus/paceline.rules.yaml"): rules,
        Path("deploy/grafana/paceline.json"): dashboard.text(),
        _CHART / "paceline.rules.yaml": rules,
        _CHART / "paceline.json": dashboard.text(indent=None),
    }


def main(root: Path) -> None:
    """Write all of them."""
    for path, content in files().items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
