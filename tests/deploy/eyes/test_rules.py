"""Series -> alerts: each rule fires on what it is for, and not on its opposite, by Prometheus' own evaluator."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from paceline.deploy.eyes import alerts

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "deploy/prometheus/paceline.rules.yaml"
POST = 'job="j",route="/v1/chat/completions"'

Series = dict[str, str]
"""Series -> values each minute, in promtool's notation."""


def histogram(name: str, slow: bool) -> Series:
    """Sixty observations a minute, all below a millisecond or none below ten seconds."""
    return {
        f'paceline_{name}_bucket{{job="j",le="{le}"}}': "0+0x600" if slow and le in ("0.001", "10") else "0+60x600"
        for le in ("0.001", "10", "30", "+Inf")
    }  # fmt: skip


CASES: dict[str, tuple[Series, Series]] = {
    "Unseen": ({'up{job="paceline"}': "0x600"}, {'up{job="paceline"}': "1x600", 'paceline_workers{job="j"}': "1x600"}),
    "NoDecodeWorker": (
        {'paceline_workers{job="j",kind="decode",state="ready"}': "0x600", 'paceline_workers{job="j",kind="decode",state="starting"}': "1x600"},
        {'paceline_workers{job="j",kind="decode",state="ready"}': "1x600"},
    ),
    "RoleMissing": (
        {'paceline_roles_wanted{job="j",kind="draft"}': "1x600", 'paceline_workers{job="j",kind="draft",state="ready"}': "0x600"},
        {
            'paceline_roles_wanted{job="j",kind="draft"}': "1x600", 'paceline_workers{job="j",kind="draft",state="ready"}': "2x600",
            'paceline_roles_wanted{job="j",kind="trainer"}': "0x600", 'paceline_workers{job="j",kind="trainer",state="ready"}': "0x600",
        },
    ),
    "WorkerLost": (
        {'paceline_workers_lost_total{job="j",kind="draft"}': "0x598 1x10"},
        {'paceline_workers_lost_total{job="j",kind="draft"}': "1x608"},
    ),
    "ServerErrors": (
        {f'paceline_requests_total{{{POST},status="200"}}': "0+90x600", f'paceline_requests_total{{{POST},status="503"}}': "0+10x600"},
        {f'paceline_requests_total{{{POST},status="200"}}': "0+90x600", f'paceline_requests_total{{{POST},status="429"}}': "0+90x600"},
    ),
    "TurnsAway": (
        {'paceline_streams_turned_away_total{job="j",reason="no_room"}': "0+10x600", f'paceline_requests_total{{{POST},status="200"}}': "0+90x600"},
        {'paceline_streams_turned_away_total{job="j",reason="key_limit"}': "0+90x600", 'paceline_streams_turned_away_total{job="j",reason="no_room"}': "0+1x600", f'paceline_requests_total{{{POST},status="200"}}': "0+90x600"},
    ),
    "SlowFirstToken": (histogram("ttft_seconds", True), histogram("ttft_seconds", False)),
    "SlowTokens": (histogram("inter_token_seconds", True), histogram("inter_token_seconds", False)),
    "KVFull": (
        {'paceline_kv_blocks{job="j",role="decode",state="used"}': "99x600", 'paceline_kv_blocks{job="j",role="decode",state="free"}': "1x600"},
        {'paceline_kv_blocks{job="j",role="decode",state="used"}': "50x600", 'paceline_kv_blocks{job="j",role="decode",state="free"}': "50x600"},
    ),
    "Preempts": (
        {'paceline_preemptions_total{job="j",role="decode"}': "0+60x600"},
        {'paceline_preemptions_total{job="j",role="decode"}': "0+1x600"},
    ),
    "HandoffsFail": (
        {'paceline_kv_handoffs_dropped_total{job="j",role="decode",reason="lease"}': "0+10x600", 'paceline_kv_prompts_total{job="j",source="link"}': "0+60x600"},
        {'paceline_kv_handoffs_dropped_total{job="j",role="decode",reason="lease"}': "0+1x600", 'paceline_kv_prompts_total{job="j",source="link"}': "0+60x600"},
    ),
    "KVCorrupt": (
        {'paceline_kv_handoffs_dropped_total{job="j",worker="d",reason="digest"}': "0x598 1x10"},
        {'paceline_kv_handoffs_dropped_total{job="j",worker="d",reason="lease"}': "0x598 1x10"},
    ),
    "RoutesBlind": ({'paceline_blind_routes_total{job="j"}': "0+1x600"}, {'paceline_blind_routes_total{job="j"}': "5x600"}),
    "RequestQuarantined": (
        {'paceline_streams_turned_away_total{job="j",reason="quarantined"}': "0x598 1x10"},
        {'paceline_streams_turned_away_total{job="j",reason="no_room"}': "0x598 1x10"},
    ),
    "DraftsLate": (
        {'paceline_draft_replies_total{job="j",outcome="late"}': "0+6x600", 'paceline_draft_replies_total{job="j",outcome="used"}': "0+4x600"},
        {'paceline_draft_replies_total{job="j",outcome="late"}': "0+4x600", 'paceline_draft_replies_total{job="j",outcome="used"}': "0+6x600"},
    ),
    "CaptureStopped": ({'paceline_capture_off{job="j"}': "1x600"}, {'paceline_capture_off{job="j"}': "0x600"}),
    "LearningTrouble": (
        {'paceline_learning_alarm{job="j",alarm="registry"}': "1x600"}, {'paceline_learning_alarm{job="j",alarm="registry"}': "0x600"},
    ),
    "TrainingFails": (
        {'paceline_training_runs_total{job="j",kind="train",result="failed"}': "0x580 2x30"},
        {'paceline_training_runs_total{job="j",kind="train",result="done"}': "0x580 2x30"},
    ),
    "DraftRefused": (
        {'paceline_draft_versions_refused_total{job="j"}': "0x598 1x10"}, {'paceline_draft_versions_refused_total{job="j"}': "1x600"},
    ),
    "DraftRolledBack": (
        {'paceline_draft_changes_total{job="j",change="rolled_back"}': "0x598 1x10"},
        {'paceline_draft_changes_total{job="j",change="promoted"}': "0x598 1x10"},
    ),
    "LearningCosts": (
        {'paceline_ledger_seconds{job="j",kind="realised"}': "5x600", 'paceline_ledger_seconds{job="j",kind="spent"}': "50x600", 'paceline_ledger_runs{job="j"}': "4x600"},
        {'paceline_ledger_seconds{job="j",kind="realised"}': "50x600", 'paceline_ledger_seconds{job="j",kind="spent"}': "5x600", 'paceline_ledger_runs{job="j"}': "4x600"},
    ),
}  # fmt: skip
"""Alert -> (series on which it has to fire after ten hours, series on which it must not)."""


def promtool(*args: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    return subprocess.run(["promtool", *args], capture_output=True, text=True, timeout=60, check=False)


def test_prometheus_loads_the_files() -> None:
    """Its own checker, over the rules and the configuration that names them."""
    done = promtool("check", "config", str(RULES.with_name("prometheus.yml")))

    assert done.returncode == 0 and f"{len(alerts.ALERTS)} rules found" in done.stdout, (
        done.stdout + done.stderr
    )


def test_there_is_a_case_for_every_alert() -> None:
    assert CASES.keys() == {alert.name for alert in alerts.ALERTS}


def fired(cases: dict[str, Series], folder: Path) -> set[str]:
    """Which alerts fire at the end of their series, by name. promtool says which did although none was expected.

    Rules are looked at every ten minutes only: they are as many as there are cases, and each case looks at all.
    """
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": what, "values": values} for what, values in series.items()],
            "alert_rule_test": [{"eval_time": "600m", "alertname": f"Paceline{name}", "exp_alerts": []}],
        }
        for name, series in cases.items()
    ]
    file = folder / "cases.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "10m", "tests": tests})
    )
    done = promtool("test", "rules", str(file))
    found = set(re.findall(r"alertname: ?Paceline(\w+)", done.stdout + done.stderr))
    assert (done.returncode == 0) == (not found), done.stdout + done.stderr
    return found


def test_alerts_fire_on_what_they_are_for(tmp_path: Path) -> None:
    assert fired({name: bad for name, (bad, _) in CASES.items()}, tmp_path) == CASES.keys()


def test_alerts_do_not_fire_on_the_opposite(tmp_path: Path) -> None:
    assert fired({name: good for name, (_, good) in CASES.items()}, tmp_path) == set()


def test_nothing_to_see_is_one_alert(tmp_path: Path) -> None:
    """A Prometheus that has no series at all: the others cannot know."""
    nothing: dict[str, Series] = {name: {} for name in CASES}

    assert fired(nothing, tmp_path) == {"Unseen"}
