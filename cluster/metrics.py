"""Counts and durations of one process -> Prometheus text; many processes' text -> one merged exposition.

What there is: `python -m paceline.deploy.eyes` writes the catalogue into docs/metrics.md. How much it is: a process
registers the figures of its role only, and pushes them to control each second; control's /metrics is the one place that
a Prometheus scrapes, however many workers there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from paceline.cluster.types import SOURCE_NAMES, Role, State

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_NODES = (0, 1, 2, 4, 8, 16, 32, 64, 128)

_GATEWAY: tuple[Role, ...] = ("gateway",)
_ROUTER: tuple[Role, ...] = ("router",)
_PREFILL: tuple[Role, ...] = ("prefill",)
_DECODE: tuple[Role, ...] = ("decode",)
_DRAFT: tuple[Role, ...] = ("draft",)
_TRAINER: tuple[Role, ...] = ("trainer",)
_CONTROL: tuple[Role, ...] = ("control",)
_TARGETS: tuple[Role, ...] = ("prefill", "decode")
_ENGINES: tuple[Role, ...] = ("prefill", "decode", "draft")

WORKER_STATES: tuple[State, ...] = ("starting", "ready", "draining")
TRAIN_STATES = ("idle", "loading", "training", "scoring", "paused", "done", "failed")
TRAIN_LEVELS = ("normal", "throttle", "pause", "evict")
ALARMS = ("registry", "storage", "draft_workers", "trainer")
CHANGES = (
    "preparing", "canary", "promoted", "kept", "rolled_back", "rejected", "aborted", "pinned", "unpinned", "dropped",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the catalogue."""

    section: str
    name: str
    """As Prometheus shows it: a counter's ends in _total."""
    kind: str
    """counter, gauge or histogram."""
    text: str
    labels: tuple[str, ...]
    """Besides `role` and `worker`, which merging adds."""
    roles: tuple[Role, ...]
    """Who reports it."""
    values: tuple[tuple[str, ...], ...] = ()
    """Labels that are there from the start, at zero: rates and alerts see the first count of each."""


class Metrics:
    """Every figure a Paceline process can report.

    With `role` its text has the figures of that role; any figure can be set all the same, so that parts which run in
    several roles need not ask. Without one, as in tests and benchmarks, it has all of them.
    """

    def __init__(self, role: Role | None = None) -> None:
        # Creation times would double the lines of all counters; nobody reads them. Prometheus sees a restart by itself.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.catalogue: list[Entry] = []
        self._role = role
        self._section = ""
        self._requests()
        self._cluster()
        self._engine()
        self._speculation()
        self._drafts()
        self._kv()
        self._capture()
        self._training()
        self._learning()

    def _requests(self) -> None:
        self._section = "Requests"
        self.requests = self._counter(
            "requests_total", "HTTP requests by route and status.", _GATEWAY, route=(), status=()
        )
        self.ttft = self._histogram("ttft_seconds", "Request received to first token sent.", _GATEWAY)
        self.inter_token = self._histogram(
            "inter_token_seconds", "Time between two token events of a stream.", _GATEWAY
        )
        self.recoveries = self._counter(
            "stream_recoveries_total",
            "Streams moved to another attempt: their decode worker died (decode_lost) or drained (handed_over).",
            _GATEWAY,
            reason=("decode_lost", "handed_over"),
        )
        self.turned_away = self._counter(
            "streams_turned_away_total",
            "Streams refused before they began: all queues full (no_room), too many wait for a first worker "
            "(no_worker), what they ask for ended workers again and again (quarantined), or their API key used up what "
            "it may (key_limit).",
            _GATEWAY,
            reason=("no_room", "no_worker", "quarantined", "key_limit"),
        )
        self.blind_routes = self._counter(
            "blind_routes_total",
            "Routes decided by the last directory: there was no router, or no answer.",
            _GATEWAY,
        )
        self.resumed = self._counter(
            "streams_resumed_total",
            "Event streams that clients went on with behind an event they had.",
            _GATEWAY,
        )
        self.trace_spans = self._counter(
            "trace_spans_total",
            "Spans of traces that the collector took, or did not.",
            _GATEWAY,
            outcome=("sent", "lost"),
        )
        self.consent = self._counter(
            "capture_consent_total",
            "Requests by whether they may be kept for training: kept, or who said no first: operator, tenant, request.",
            _GATEWAY,
            outcome=("kept", "operator", "tenant", "request"),
        )

    def _cluster(self) -> None:
        self._section = "Cluster"
        self.workers = self._gauge(
            "workers",
            "Processes by role and state, of those that control heard of within five seconds.",
            _CONTROL,
            kind=("gateway", "router", "prefill", "decode", "draft", "trainer", "control"),
            state=WORKER_STATES,
        )
        self.roles_wanted = self._gauge(
            "roles_wanted",
            "1 for each role of which the configuration has at least one process, 0 for the others.",
            _CONTROL,
            kind=(),
        )
        self.workers_lost = self._counter(
            "workers_lost_total",
            "Workers and gateways whose connection to the router ended without their saying that they leave.",
            _ROUTER,
            kind=("gateway", "prefill", "decode", "draft", "trainer"),
        )
        self.routes = self._counter(
            "routes_total",
            "Routes that gateways asked for: given a decode worker, with a prefill worker (remote) or without (local), "
            "or why not.",
            _ROUTER,
            outcome=("remote", "local", "no_worker", "no_room", "no_probation", "quarantined"),
        )
        self.router_streams = self._gauge(
            "router_streams", "Streams that the router counts in decode workers.", _ROUTER
        )

    def _engine(self) -> None:
        self._section = "Engine"
        self.forward = self._gauge(
            "forward_info",
            "1 for the forward a worker runs: whole step and its arithmetic, lean, or transformers, and why not the former.",
            _ENGINES,
            path=(),
        )
        self.steps = self._counter("engine_steps_total", "Engine steps.", _ENGINES)
        self.step_seconds = self._histogram("engine_step_seconds", "Duration of one engine step.", _ENGINES)
        self.streams = self._gauge("streams", "Streams in this process.", (*_GATEWAY, *_ENGINES))
        self.waiting = self._gauge(
            "streams_waiting",
            "Streams of this worker that could run and that no step has computed for yet.",
            _TARGETS,
        )
        self.queue_seconds = self._histogram(
            "queue_seconds",
            "A stream could run, its KV here if that comes from elsewhere, to the first step that computed for it.",
            _TARGETS,
        )
        self.preemptions = self._counter(
            "preemptions_total", "Streams that gave up their KV blocks.", _TARGETS
        )
        self.blocks = self._gauge(
            "kv_blocks",
            "KV blocks by state; free ones may still hold prefixes that are found again.",
            _ENGINES,
            state=("used", "free"),
        )
        self.prefix_query_tokens = self._counter(
            "prefix_query_tokens_total",
            "Tokens of streams that looked for their prefix in the KV cache.",
            _ENGINES,
        )
        self.prefix_hit_tokens = self._counter(
            "prefix_hit_tokens_total", "Tokens whose KV was found in the cache and not computed.", _ENGINES
        )

    def _speculation(self) -> None:
        self._section = "Speculation"
        drafters = SOURCE_NAMES[1:]
        self.tokens = self._counter(
            "tokens_total",
            "Emitted tokens by source, and by the version of the draft that last drafted for their stream (none: nobody "
            "did). Those of a source, by stream_steps_total, are its accepted tokens per step.",
            _DECODE,
            source=(),
            version=(),
        )
        self.stream_steps = self._counter(
            "stream_steps_total",
            "Steps that emitted tokens, counted for each stream in them, by that version.",
            _DECODE,
            version=(),
        )
        self.drafted = self._counter(
            "drafted_tokens_total", "Proposed tokens by source.", _DECODE, source=drafters
        )
        self.verified = self._counter(
            "verified_tokens_total",
            "Proposed tokens that the target verified, by source.",
            _DECODE,
            source=drafters,
        )
        self.accepted = self._counter(
            "accepted_tokens_total", "Proposed tokens that were right, by source.", _DECODE, source=drafters
        )
        self.wasted = self._counter(
            "wasted_tokens_total",
            "Proposed tokens that were verified and wrong, by source.",
            _DECODE,
            source=drafters,
        )
        self.draft_seconds = self._counter(
            "draft_seconds_total",
            "Time that steps spent asking a source, waits included.",
            _DECODE,
            source=drafters,
        )
        self.step_nodes = self._histogram(
            "step_draft_nodes", "Proposed tokens verified in one step, of all its streams.", _DECODE, _NODES
        )
        self.calibration_error = self._gauge(
            "draft_calibration_error",
            "Mean distance of a source's calibrated scores from its acceptance, over buckets of the score.",
            _DECODE,
            source=(),
        )
        self.step_cost = self._gauge(
            "step_cost_seconds",
            "Seconds of a target's step by its number of rows, as the controller has them now.",
            _DECODE,
            rows=(),
        )
        self.draft_gain = self._gauge(
            "draft_gain",
            "Tokens a second with drafts against plain steps, by number of streams (powers of two), as measured.",
            _DECODE,
            streams=(),
        )
        self.draft_off = self._gauge(
            "draft_off",
            "1 where drafting does not pay and is off, by number of streams (powers of two).",
            _DECODE,
            streams=(),
        )
        self.draft_models_off = self._gauge(
            "draft_models_off",
            "1 where free sources alone, or no drafts, are faster than asking draft models too, by number of streams.",
            _DECODE,
            streams=(),
        )

    def _drafts(self) -> None:
        self._section = "Draft workers"
        self.draft_wait_seconds = self._histogram(
            "draft_wait_seconds", "Wait for remote drafts in a step.", _DECODE
        )
        self.draft_round_trip_seconds = self._histogram(
            "draft_round_trip_seconds", "Asking a draft worker to having its answer.", _DECODE
        )
        self.draft_replies = self._counter(
            "draft_replies_total",
            "Streams that a step wanted drafts for, by what came: used; rerooted (late, its rest used); late (nothing "
            "in time, or of no use any more); malformed; unknown (to its draft worker); unasked (it had none).",
            _DECODE,
            outcome=("used", "rerooted", "late", "malformed", "unknown", "unasked"),
        )
        self.draft_ahead = self._counter(
            "draft_ahead_total",
            "Streams asked for that were drafted ahead: hit if the target's tokens were those foretold, else miss; "
            "paused: those that could not be, for no core was spare.",
            _DRAFT,
            outcome=("hit", "miss", "paused"),
        )
        self.draft_levels = self._counter(
            "draft_levels_total",
            "Levels a draft worker drafted: asked for, ahead, and those of the latter that were wasted.",
            _DRAFT,
            kind=("asked", "ahead", "wasted"),
        )
        self.draft_versions = self._gauge(
            "draft_versions",
            "1 for each version of the draft in this worker: live, beside it for some streams (a canary, routes), or "
            "held in memory only.",
            _DRAFT,
            version=(),
            state=(),
        )
        self.draft_swaps = self._counter(
            "draft_swaps_total", "Changes of the live draft version, without a drain.", _DRAFT
        )
        self.draft_swap_seconds = self._histogram(
            "draft_swap_seconds", "What a change of the live version kept drafting waiting.", _DRAFT
        )
        self.draft_refusals = self._counter(
            "draft_versions_refused_total",
            "Versions that this worker would not serve: wrong hash, shapes, tokenizer, target, or a switch that did nothing.",
            _DRAFT,
        )

    def _kv(self) -> None:
        self._section = "KV hand-offs"
        directions = ("sent", "received")
        self.kv_prompts = self._counter(
            "kv_prompts_total",
            'Prompts by the way their KV came: "link", or "local:<reason>".',
            _DECODE,
            source=(),
        )
        self.kv_bytes = self._counter(
            "kv_bytes_total", "KV bytes by direction.", _TARGETS, direction=directions
        )
        self.kv_messages = self._counter(
            "kv_messages_total", "KV messages by direction.", _TARGETS, direction=directions
        )
        self.kv_drops = self._counter(
            "kv_handoffs_dropped_total",
            "Hand-offs dropped, by reason; the decode worker then computes the prompt itself.",
            _TARGETS,
            reason=("digest",),
        )
        self.kv_refused = self._counter(
            "kv_messages_refused_total", "KV messages refused, by reason.", _DECODE, reason=()
        )
        self.kv_links = self._counter(
            "kv_links_total", "Links by event.", _TARGETS, event=("opened", "poisoned")
        )
        self.kv_skipped_tokens = self._counter(
            "kv_skipped_tokens_total",
            "Prompt tokens that were not sent: their KV was in the decode worker's prefix cache.",
            _DECODE,
        )
        self.kv_digest_seconds = self._counter(
            "kv_digest_seconds_total",
            "Time spent on digests of KV messages, by direction.",
            _TARGETS,
            direction=directions,
        )
        self.kv_exposed_seconds = self._histogram(
            "kv_exposed_seconds",
            "Prompt computed to hand-off acknowledged, on the prefill worker's clock: what sending adds to the "
            "time to the first token, and the acknowledgement's way back.",
            _PREFILL,
        )
        self.handoff_seconds = self._histogram(
            "kv_handoff_seconds", "Reservation to commit of one hand-off.", _DECODE
        )

    def _capture(self) -> None:
        self._section = "Capture"
        self.capture_requests = self._counter(
            "capture_requests_total", "Streams written to capture shards.", _DECODE
        )
        self.capture_tokens = self._counter(
            "capture_tokens_total", "Their tokens, each with its logits.", _DECODE
        )
        self.capture_bytes = self._counter(
            "capture_bytes_total", "Bytes of the shards they were written to.", _DECODE
        )
        self.capture_dropped = self._counter(
            "capture_dropped_tokens_total",
            "Tokens of consenting streams that were not kept: full (memory), storage (it failed), redacted, deleted "
            "before they were written, error.",
            _DECODE,
            reason=(),
        )
        self.capture_dropped_requests = self._counter(
            "capture_dropped_requests_total",
            "Consenting streams that were not kept, by the same reasons.",
            _DECODE,
            reason=(),
        )
        self.capture_seconds = self._counter(
            "capture_seconds_total",
            "Time spent on capture: step (wall, what steps waited), thread (CPU, behind them).",
            _DECODE,
            where=(),
        )
        self.capture_storage_errors = self._counter(
            "capture_storage_errors_total", "Shards that could not be written, tries counted.", _DECODE
        )
        self.capture_off = self._gauge(
            "capture_off",
            "1 while nothing is captured because storage failed; it is tried again by itself.",
            _DECODE,
        )
        self.capture_held_bytes = self._gauge(
            "capture_held_bytes", "Captured and not on storage yet.", _DECODE
        )

    def _training(self) -> None:
        self._section = "Trainer"
        self.trainer_state = self._gauge(
            "trainer_state", "1 for what the trainer does now, 0 for the rest.", _TRAINER, state=TRAIN_STATES
        )
        self.trainer_level = self._gauge(
            "trainer_level",
            "1 for how much the trainer may take now, by the guard of serving's latency.",
            _TRAINER,
            level=TRAIN_LEVELS,
        )
        self.trainer_step = self._gauge("trainer_step", "Steps of the run that is on, or was last.", _TRAINER)
        self.trainer_steps = self._gauge("trainer_steps", "Steps that it will have.", _TRAINER)
        self.trainer_tokens = self._gauge("trainer_tokens", "Tokens that it trained on.", _TRAINER)
        self.trainer_loss = self._gauge("trainer_loss", "Its last loss.", _TRAINER)
        self.trainer_cpu_seconds = self._gauge(
            "trainer_cpu_seconds", "Processor time that it took.", _TRAINER
        )
        self.trainer_yielded_seconds = self._gauge(
            "trainer_yielded_seconds", "That it waited because others wanted the machine.", _TRAINER
        )
        self.training_deaths = self._counter(
            "training_process_deaths_total", "Training processes that ended without a word.", _TRAINER
        )

    def _learning(self) -> None:
        self._section = "Learning loop"
        self.training_runs = self._counter(
            "training_runs_total",
            "Runs that ended: training, scoring (a gate's replay), ranking of the pool.",
            _CONTROL,
            kind=("train", "score", "rank"),
            result=("done", "failed"),
        )
        self.gate_results = self._counter(
            "gate_results_total",
            "Candidates at the gate: passed, refused, or undecided for too few held-out requests.",
            _CONTROL,
            result=("passed", "refused", "undecided"),
        )
        self.gate_saving = self._gauge(
            "gate_saving",
            "Share of decode time that the last scored candidate would save, and its 95 % interval.",
            _CONTROL,
            bound=("mean", "lo", "hi"),
        )
        self.draft_changes = self._counter(
            "draft_changes_total", "Changes of which version drafts for whom.", _CONTROL, change=CHANGES
        )
        self.drifts = self._counter("drifts_total", "Falls of acceptance that were noticed.", _CONTROL)
        self.ledger_seconds = self._gauge(
            "ledger_seconds",
            "Of all runs the ledger knows: decoding that they were predicted to save and did save, what they cost.",
            _CONTROL,
            kind=("predicted", "realised", "spent"),
        )
        self.ledger_runs = self._gauge("ledger_runs", "Runs that the ledger knows.", _CONTROL)
        self.guard_level = self._gauge(
            "guard_level",
            "1 for the level that the guard of serving's latency is at.",
            _CONTROL,
            level=TRAIN_LEVELS,
        )
        self.alarm = self._gauge(
            "learning_alarm",
            "1 while the loop reports trouble with this; its words are at /admin and in `paceline status`.",
            _CONTROL,
            alarm=ALARMS,
        )
        self.new_requests = self._gauge(
            "learning_new_requests", "Requests captured since the last run began.", _CONTROL
        )

    # -- making them ---------------------------------------------------------------------------------------

    def _enter(
        self, name: str, kind: str, text: str, roles: tuple[Role, ...], labels: Mapping[str, Sequence[str]]
    ) -> Entry:
        values = tuple(product(*labels.values())) if labels else ()
        entry = Entry(self._section, f"paceline_{name}", kind, text, tuple(labels), roles, values)
        self.catalogue.append(entry)
        return entry

    def _registry_for(self, entry: Entry) -> CollectorRegistry | None:
        return self.registry if self._role is None or self._role in entry.roles else None

    def _counter(self, name: str, text: str, roles: tuple[Role, ...], **labels: Sequence[str]) -> Counter:
        """A label's values are those it begins with; none if they are not known beforehand."""
        entry = self._enter(name, "counter", text, roles, labels)
        counter = Counter(entry.name, text, entry.labels, registry=self._registry_for(entry))
        for values in entry.values:
            counter.labels(*values)
        return counter

    def _gauge(self, name: str, text: str, roles: tuple[Role, ...], **labels: Sequence[str]) -> Gauge:
        entry = self._enter(name, "gauge", text, roles, labels)
        gauge = Gauge(entry.name, text, entry.labels, registry=self._registry_for(entry))
        for values in entry.values:
            gauge.labels(*values)
        return gauge

    def _histogram(
        self, name: str, text: str, roles: tuple[Role, ...], buckets: Sequence[float] = _SECONDS
    ) -> Histogram:
        entry = self._enter(name, "histogram", text, roles, {})
        return Histogram(entry.name, text, buckets=buckets, registry=self._registry_for(entry))

    def text(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return generate_latest(self.registry)


def set_one(gauge: Gauge, names: Iterable[str], name: str) -> None:
    """1 for `name`, 0 for the others."""
    for other in names:
        gauge.labels(other).set(other == name)


def merge(texts: Mapping[tuple[str, str], bytes]) -> bytes:
    """(role, worker) -> text, merged into one text: each sample gains `role` and `worker` labels.

    By lines, which are our own: parsing them took most of a second for a hundred workers, in the process that also
    decides about drafts.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for (role, worker), text in sorted(texts.items()):
        mine = f'role="{_escaped(role)}",worker="{_escaped(worker)}"'
        family, is_new = "", True
        for line in filter(
            None, text.decode().split("\n")
        ):  # labels may hold what splitlines() takes for an end
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                is_new = family not in heads
                if is_new:
                    heads[family], samples[family] = [line], []
            elif line.startswith("#"):
                if is_new:
                    heads[family].append(line)
            else:
                samples[family].append(_labelled(line, mine))
    lines = [line for family, head in heads.items() for line in (*head, *samples[family])]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(line: str, labels: str) -> str:
    """
    >>> _labelled('a{b="c"} 1.0', 'd="e"'), _labelled('a 1.0', 'd="e"')
    ('a{d="e",b="c"} 1.0', 'a{d="e"} 1.0')
    """
    end = line.find("{")
    if end >= 0:
        return f"{line[: end + 1]}{labels},{line[end + 1 :]}"
    name, _, value = line.partition(" ")
    return f"{name}{{{labels}}} {value}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
