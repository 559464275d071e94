"""What can go wrong -> Prometheus rules, and the page that says what to do about each.

Ratios are NaN without traffic, and NaN is above nothing: a cluster that nobody uses raises no alarm. Counters are there
from the start at zero wherever a first event has to be seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import yaml

RUNBOOK = "docs/alerts.md"
"""Where each alert has a heading of its name; the documentation's site makes the same anchors of it."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `{{ $value }}` and `{{ $labels.x }}` in its texts are Prometheus'."""

    name: str
    severity: Literal["critical", "warning", "info"]
    """critical: users feel it now. warning: somebody should look today. info: the loop has dealt with it."""
    lasts: str
    """How long it has to hold."""
    expr: str
    summary: str
    description: str
    what_to_do: str
    """Markdown."""

    def rule(self) -> dict[str, Any]:
        """As Prometheus reads it."""
        return {
            "alert": f"Paceline{self.name}",
            "expr": self.expr,
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook": f"{RUNBOOK}#paceline{self.name.lower()}",
            },
        }


def _quantile(q: float, name: str, window: str = "5m") -> str:
    return f"histogram_quantile({q}, sum by (job, le) (rate(paceline_{name}_bucket[{window}])))"


_GENERATES = 'route=~"/v1/(chat/)?completions"'

ALERTS = (
    Alert(
        "Unseen",
        "critical",
        "2m",
        'absent(paceline_workers) or up{job=~".*paceline.*"} == 0',
        "Paceline's figures cannot be scraped",
        "Control's /metrics has not answered for two minutes. Requests may still be served: control is not in their way.",
        "Is the head (pod or host) there, and Control on it: `paceline status`, `paceline doctor`. Off loopback the scraper "
        "has to send the admin key as a bearer token; a 401 in Prometheus' target page means that the key was changed.",
    ),
    Alert(
        "NoDecodeWorker",
        "critical",
        "1m",
        'sum by (job) (paceline_workers{kind="decode",state="ready"}) == 0',
        "No decode worker is ready",
        "Nothing generates. Streams wait with keep-alive comments for gateway.recovery_limit_s, then fail; new requests get "
        "429 or 503.",
        "`paceline status` shows whether decode workers are starting (weights are loading: wait) or absent. If absent, Ray "
        "could not place them (`ray status`: CPUs, GPUs, custom resources) or they die while loading: look for "
        "`engine_died` and `model_ready` in the logs of their node.",
    ),
    Alert(
        "RoleMissing",
        "warning",
        "5m",
        'paceline_roles_wanted == 1 unless on (job, kind) sum by (job, kind) (paceline_workers{state="ready"}) > 0',
        "No {{ $labels.kind }} process is ready",
        "The configuration has {{ $labels.kind }} processes and none is ready. Without prefill workers decode workers "
        "compute prompts themselves, without draft workers only free sources draft, without a router gateways route by "
        "the last directory: requests are served, more slowly.",
        "As for [PacelineNoDecodeWorker](#pacelinenodecodeworker), for this role. A trainer that is missing stops learning "
        "only.",
    ),
    Alert(
        "WorkerLost",
        "warning",
        "0s",
        "sum by (job, kind) (increase(paceline_workers_lost_total[15m])) > 0",
        "{{ $labels.kind }} workers died",
        "About {{ $value | humanize }} {{ $labels.kind }} process(es) ended in the last 15 minutes without saying so. Streams went on in others; "
        "Ray Serve replaces what is gone.",
        "One now and then is a node that went away. Several of one role: look for `worker_lost` in the router's log, which "
        "names them, then in theirs for `engine_died`, and in the kernel's log for the OOM killer.",
    ),
    Alert(
        "ServerErrors",
        "critical",
        "5m",
        f'sum by (job) (rate(paceline_requests_total{{{_GENERATES},status=~"5.."}}[5m]))'
        f" / sum by (job) (rate(paceline_requests_total{{{_GENERATES}}}[5m])) > 0.01",
        "{{ $value | humanizePercentage }} of requests fail",
        "More than one request in a hundred was answered with a status from 500 on for five minutes.",
        "Filter the gateways' log for `request_done` with that status: its `error` says which kind it is. `unavailable`: no "
        "worker came in time. `worker_crashed`: one request ends workers, see [PacelineRequestQuarantined]"
        "(#pacelinerequestquarantined). `internal_error`: a traceback stands beside it; report it.",
    ),
    Alert(
        "TurnsAway",
        "warning",
        "5m",
        'sum by (job) (rate(paceline_streams_turned_away_total{reason=~"no_room|no_worker"}[5m]))'
        f" / sum by (job) (rate(paceline_requests_total{{{_GENERATES}}}[5m])) > 0.05",
        "{{ $value | humanizePercentage }} of requests find no room",
        "Queues of all decode workers are full: clients get 429 with a Retry-After.",
        "More decode workers (`decode.replicas`, or the autoscaler's upper bound), or longer queues (`decode.max_queue`) if "
        "users would rather wait. Look at KV use first: with a full pool `decode.max_streams` is not what limits.",
    ),
    Alert(
        "SlowFirstToken",
        "warning",
        "10m",
        f"{_quantile(0.99, 'ttft_seconds')} > 5",
        "The slowest hundredth waits {{ $value | humanizeDuration }} for its first token",
        "p99 of the time to the first token has been above five seconds for ten minutes.",
        "Which part is it? *Queue* high in prefill workers: more of them, or a larger `prefill.token_budget`. High in decode "
        "workers: see [PacelineTurnsAway](#pacelineturnsaway). *Exposed hand-off* high: the network between nodes; try "
        "`kv.codec` only if its loss is acceptable. None of them: prompts got longer.",
    ),
    Alert(
        "SlowTokens",
        "warning",
        "10m",
        f"{_quantile(0.99, 'inter_token_seconds')} > 0.5",
        "The slowest hundredth of tokens takes {{ $value | humanizeDuration }}",
        "p99 of the time between two events of a stream has been above half a second for ten minutes.",
        "*Engine step* high: too many streams in a worker (`decode.max_streams`), a neighbour on its cores, or prompts that "
        "decode workers compute themselves (`kv_prompts` by source). If only p99 is high: preemptions, or training; "
        "the guard's level says whether learning has been told to give way.",
    ),
    Alert(
        "KVFull",
        "warning",
        "10m",
        'sum by (job) (paceline_kv_blocks{role="decode",state="used"}) / sum by (job) (paceline_kv_blocks{role="decode"}) '
        "> 0.95",
        "{{ $value | humanizePercentage }} of KV blocks are in use",
        "Decode workers have next to no KV memory left; the next long stream preempts another.",
        "More `decode.kv_memory_mb` where the machine has it, more decode workers where it has not, or a smaller "
        "`limits.max_context`.",
    ),
    Alert(
        "Preempts",
        "warning",
        "10m",
        'sum by (job) (rate(paceline_preemptions_total{role="decode"}[10m])) > 0.1',
        "Streams lose their KV {{ $value | humanize }} times a second",
        "Preempted streams compute their KV again: the text stays the same, time is lost.",
        "As for [PacelineKVFull](#pacelinekvfull).",
    ),
    Alert(
        "HandoffsFail",
        "warning",
        "10m",
        'sum by (job) (rate(paceline_kv_handoffs_dropped_total{role="decode"}[10m]))'
        " / sum by (job) (rate(paceline_kv_prompts_total[10m])) > 0.05",
        "{{ $value | humanizePercentage }} of KV hand-offs are dropped",
        "Prompts that prefill workers computed did not arrive whole, and decode workers compute them again.",
        "The dashboard's *hand-offs dropped, by reason* says why. `lease`, `prefill_lost`: prefill workers die or are far "
        "too slow. Poisoned links: the network, or `link.timeout_s` below what it needs. `no_blocks`: "
        "[PacelineKVFull](#pacelinekvfull).",
    ),
    Alert(
        "KVCorrupt",
        "critical",
        "0s",
        'sum by (job, worker) (increase(paceline_kv_handoffs_dropped_total{reason="digest"}[1h])) > 0',
        "KV arrived at {{ $labels.worker }} with other bytes than were sent",
        "A digest did not hold. No token was computed from it: the prompt was computed again.",
        "Bytes do not change by themselves: memory, network card or driver of one of the two nodes. Take the node out, "
        "test its memory. If two nodes run different builds, that is it.",
    ),
    Alert(
        "RoutesBlind",
        "warning",
        "2m",
        "sum by (job) (rate(paceline_blind_routes_total[5m])) > 0",
        "Gateways route without a router",
        "The router is away or does not answer within a second. Gateways use its last directory: load is spread worse, "
        "prefixes are found less often.",
        "Ray Serve restarts it within seconds. If it does not come back: is there room on the head, and what does its log "
        "say? If it is there and slow: `router_slow` in the gateways' logs.",
    ),
    Alert(
        "RequestQuarantined",
        "warning",
        "0s",
        'sum by (job) (increase(paceline_streams_turned_away_total{reason="quarantined"}[15m])) > 0',
        "A request that ended workers comes again and again",
        "It was in flight at three crashes and is refused for a while, by what it asks for.",
        "`request_quarantined` in the gateway's log has the request's id; the decode workers' logs of that time have the "
        "crash. Report both: no request should be able to do that.",
    ),
    Alert(
        "DraftsLate",
        "warning",
        "15m",
        'sum by (job) (rate(paceline_draft_replies_total{outcome="late"}[10m]))'
        ' / sum by (job) (rate(paceline_draft_replies_total{outcome=~"used|rerooted|late"}[10m])) > 0.5',
        "{{ $value | humanizePercentage }} of drafts come too late",
        "Draft workers do not keep up: steps go on without their drafts, so speculation brings less than it costs.",
        "More draft workers, or more of a core for each (`draft.threads`, `draft.num_cpus`); a smaller "
        "`speculation.depth`. If the round trip is long on an idle cluster, draft workers are on the wrong nodes.",
    ),
    Alert(
        "CaptureStopped",
        "warning",
        "10m",
        "max by (job) (paceline_capture_off) == 1",
        "Nothing is captured: storage fails",
        "Decode workers cannot write their shards. Serving goes on; nothing is learned from what is said now.",
        "`capture_off` in their logs has the error. Is the disk full, did a credential expire? It is tried again by "
        "itself.",
    ),
    Alert(
        "LearningTrouble",
        "warning",
        "5m",
        "max by (job, alarm) (paceline_learning_alarm) == 1",
        "The learning loop has trouble with its {{ $labels.alarm }}",
        "Drafts that serve go on serving; nothing new begins where it needs what is missing.",
        "`paceline status` and /admin have the loop's own words. registry: the database does not answer. storage: nor does "
        "the store of shards and weights. draft_workers: they refused a version. trainer: a run waits for one, or failed.",
    ),
    Alert(
        "TrainingFails",
        "warning",
        "0s",
        'sum by (job) (increase(paceline_training_runs_total{result="failed"}[6h])) > 1',
        "Training runs fail",
        "More than one run failed in six hours.",
        "`paceline drafts runs` has the error of each. Ended by signal 9: the kernel's, for want of memory; lower "
        "`learning.train.memory_mb`.",
    ),
    Alert(
        "DraftRefused",
        "warning",
        "0s",
        "sum by (job) (increase(paceline_draft_versions_refused_total[1h])) > 0",
        "Draft workers refuse a version",
        "A version's hash, shapes, tokenizer or target are not what they should be, or its switch did nothing. The version "
        "before goes on drafting.",
        "`paceline drafts list` names version and reason. A wrong hash means that the store changed the file, or somebody "
        "did: revoke the version (`paceline drafts revoke`).",
    ),
    Alert(
        "DraftRolledBack",
        "info",
        "0s",
        'sum by (job) (increase(paceline_draft_changes_total{change="rolled_back"}[1h])) > 0',
        "A draft was rolled back",
        "Live streams accepted less of it than of its predecessor. The loop has already gone back, and waits before it "
        "tries again.",
        "Nothing, once. Again and again: held-out requests are not like live ones; look at the gate's report beside the "
        "canary's (`paceline drafts show`), and at `learning.capture.holdout`.",
    ),
    Alert(
        "LearningCosts",
        "info",
        "6h",
        'sum by (job) (paceline_ledger_seconds{kind="realised"}) - sum by (job) (paceline_ledger_seconds{kind="spent"}) < 0 '
        "and sum by (job) (paceline_ledger_runs) >= 3",
        "Learning has cost {{ $value | humanizeDuration }} more than it saved",
        "Over all runs the ledger knows, decoding time saved is less than what training and scoring took.",
        "The loop stops by itself when runs bring nothing. If traffic is too varied or too little for a draft to learn from, "
        "`learning.enabled=false` saves the rest.",
    ),
)


def rules() -> dict[str, Any]:
    """The rule file."""
    return {"groups": [{"name": "paceline", "rules": [alert.rule() for alert in ALERTS]}]}


def rules_text() -> str:
    """As YAML."""
    head = "# Written by `python -m paceline.deploy.eyes.main`. What to do about each: docs/alerts.md.\n"
    return head + yaml.safe_dump(rules(), sort_keys=False, width=110)


def page() -> str:
    """docs/alerts.md."""
    lines = [
        "# Alerts",
        "",
        "Written by `python -m paceline.deploy.eyes.main` from `deploy/eyes/alerts.py`. The rules are in",
        "`deploy/prometheus/paceline.rules.yaml` and, with `metrics.rules=true`, in the chart.",
        "",
        "| alert | severity | means |",
        "| --- | --- | --- |",
        *(
            f"| [Paceline{a.name}](#paceline{a.name.lower()}) | {a.severity} | {_plain(a.description)} |"
            for a in ALERTS
        ),
    ]
    for alert in ALERTS:
        lasts = "at once" if alert.lasts == "0s" else f"for {alert.lasts}"
        lines += [
            "",
            f"## Paceline{alert.name}",
            "",
            f"*{alert.severity}*, when this holds {lasts}:",
            "",
            "```promql",
            alert.expr,
            "```",
            "",
            _plain(alert.description),
            "",
            f"**What to do.** {alert.what_to_do}",
        ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """For readers who see no values: `{{ $labels.kind }}` -> the name of the label."""
    return (
        text.replace("About {{ $value | humanize }} {{ $labels.kind }} process(es)", "Processes")
        .replace("{{ $labels.kind }} processes", "processes of a role")
        .replace("|", "\\|")
    )
