"""Counts and durations of one process -> Prometheus text; many processes' text -> one merged exposition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_NODES = (0, 1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Every figure a Paceline process can report. A process touches those of its role only."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests_total", "HTTP requests by route and status.", "route", "status"
        )
        self.ttft = self._histogram("ttft_seconds", "Request received to first token sent.")
        self.inter_token = self._histogram(
            "inter_token_seconds", "Time between two token events of a stream."
        )
        self.recoveries = self._counter(
            "stream_recoveries_total", "Streams moved to another attempt.", "reason"
        )
        self.turned_away = self._counter(
            "streams_turned_away_total",
            "Streams refused before they began: no_room, no_worker, quarantined, or key_limit for requests of API keys that "
            "used up what they may.",
            "reason",
        )
        self.blind_routes = self._counter(
            "blind_routes_total", "Routes decided by the last directory: there was no router, or no answer."
        )
        self.resumed = self._counter(
            "streams_resumed_total", "Event streams that clients went on with behind an event they had."
        )
        self.forward = Gauge(
            "paceline_forward_info",
            "1 for the forward a worker runs: whole step and its arithmetic, lean, or transformers, and why not the former.",
            ["path"],
            registry=self.registry,
        )
        self.steps = self._counter("engine_steps_total", "Engine steps.")
        self.step_seconds = self._histogram("engine_step_seconds", "Duration of one engine step.")
        self.tokens = self._counter("tokens_total", "Emitted tokens by source.", "source")
        self.drafted = self._counter("drafted_tokens_total", "Proposed tokens by source.", "source")
        self.verified = self._counter(
            "verified_tokens_total", "Proposed tokens that the target verified, by source.", "source"
        )
        self.accepted = self._counter(
            "accepted_tokens_total", "Proposed tokens that were right, by source.", "source"
        )
        self.wasted = self._counter(
            "wasted_tokens_total", "Proposed tokens that were verified and wrong, by source.", "source"
        )
        self.draft_seconds = self._counter(
            "draft_seconds_total", "Time that steps spent asking a source, waits included.", "source"
        )
        self.calibration_error = Gauge(
            "paceline_draft_calibration_error",
            "Mean distance of a source's calibrated scores from its acceptance, over buckets of the score.",
            ["source"],
            registry=self.registry,
        )
        self.step_cost = Gauge(
            "paceline_step_cost_seconds",
            "Seconds of a target's step by its number of rows, as the controller has them now.",
            ["rows"],
            registry=self.registry,
        )
        self.draft_gain = Gauge(
            "paceline_draft_gain",
            "Tokens a second with drafts against plain steps, by number of streams (powers of two), as measured.",
            ["streams"],
            registry=self.registry,
        )
        self.draft_off = Gauge(
            "paceline_draft_off",
            "1 where drafting does not pay and is off, by number of streams (powers of two).",
            ["streams"],
            registry=self.registry,
        )
        self.draft_models_off = Gauge(
            "paceline_draft_models_off",
            "1 where free sources alone, or no drafts, are faster than asking draft models too, by number of streams.",
            ["streams"],
            registry=self.registry,
        )
        self.step_nodes = self._histogram(
            "step_draft_nodes", "Proposed tokens verified in one step, of all its streams.", _NODES
        )
        self.preemptions = self._counter("preemptions_total", "Streams that gave up their KV blocks.")
        self.prefix_query_tokens = self._counter(
            "prefix_query_tokens_total", "Tokens of streams that looked for their prefix in the KV cache."
        )
        self.prefix_hit_tokens = self._counter(
            "prefix_hit_tokens_total", "Tokens whose KV was found in the cache and not computed."
        )
        self.draft_wait_seconds = self._histogram("draft_wait_seconds", "Wait for remote drafts in a step.")
        self.draft_round_trip_seconds = self._histogram(
            "draft_round_trip_seconds", "Asking a draft worker to having its answer."
        )
        self.draft_ahead = self._counter(
            "draft_ahead_total",
            "Streams asked for that were drafted ahead: hit if the target's tokens were those foretold, else miss; "
            "paused: those that could not be, for no core was spare.",
            "outcome",
        )
        self.draft_levels = self._counter(
            "draft_levels_total",
            "Levels a draft worker drafted: asked for, ahead, and those of the latter that were wasted.",
            "kind",
        )
        self.draft_replies = self._counter(
            "draft_replies_total",
            "Streams that a step wanted drafts for, by what came: used; rerooted (late, its rest used); late (nothing "
            "in time, or of no use any more); malformed; unknown (to its draft worker); unasked (it had none).",
            "outcome",
        )
        self.kv_prompts = self._counter(
            "kv_prompts_total", 'Prompts by the way their KV came: "link", or "local:<reason>".', "source"
        )
        self.kv_bytes = self._counter("kv_bytes_total", "KV bytes by direction.", "direction")
        self.kv_drops = self._counter("kv_handoffs_dropped_total", "Hand-offs dropped, by reason.", "reason")
        self.kv_refused = self._counter(
            "kv_messages_refused_total", "KV messages refused, by reason.", "reason"
        )
        self.kv_links = self._counter("kv_links_total", "Links by event.", "event")
        self.kv_messages = self._counter("kv_messages_total", "KV messages by direction.", "direction")
        self.kv_skipped_tokens = self._counter(
            "kv_skipped_tokens_total",
            "Prompt tokens that were not sent: their KV was in the decode worker's prefix cache.",
        )
        self.kv_digest_seconds = self._counter(
            "kv_digest_seconds_total", "Time spent on digests of KV messages, by direction.", "direction"
        )
        self.kv_exposed_seconds = self._histogram(
            "kv_exposed_seconds",
            "Prompt computed to hand-off acknowledged, on the prefill worker's clock: what sending adds to the "
            "time to the first token, and the acknowledgement's way back.",
        )
        self.handoff_seconds = self._histogram("kv_handoff_seconds", "Reservation to commit of one hand-off.")
        self.consent = self._counter(
            "capture_consent_total",
            "Requests by whether they may be kept for training: kept, or who said no first: operator, tenant, request.",
            "outcome",
        )
        self.capture_requests = self._counter("capture_requests_total", "Streams written to capture shards.")
        self.capture_tokens = self._counter("capture_tokens_total", "Their tokens, each with its logits.")
        self.capture_bytes = self._counter("capture_bytes_total", "Bytes of the shards they were written to.")
        self.capture_dropped = self._counter(
            "capture_dropped_tokens_total",
            "Tokens of consenting streams that were not kept: full (memory), storage (it failed), redacted, deleted "
            "before they were written, error.",
            "reason",
        )
        self.capture_dropped_requests = self._counter(
            "capture_dropped_requests_total",
            "Consenting streams that were not kept, by the same reasons.",
            "reason",
        )
        self.capture_seconds = self._counter(
            "capture_seconds_total",
            "Time spent on capture: step (wall, what steps waited), thread (CPU, behind them).",
            "where",
        )
        self.capture_storage_errors = self._counter(
            "capture_storage_errors_total", "Shards that could not be written, tries counted."
        )
        self.capture_off = Gauge(
            "paceline_capture_off",
            "1 while nothing is captured because storage failed; it is tried again by itself.",
            registry=self.registry,
        )
        self.capture_held_bytes = Gauge(
            "paceline_capture_held_bytes", "Captured and not on storage yet.", registry=self.registry
        )
        self.blocks = Gauge("paceline_kv_blocks", "KV blocks by state.", ["state"], registry=self.registry)
        self.streams = Gauge("paceline_streams", "Streams in this worker.", registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"paceline_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(f"paceline_{name}", text, buckets=buckets, registry=self.registry)

    def text(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return generate_latest(self.registry)


class Merged(Collector):
    """Texts of many workers as one collector: each sample gains `role` and `worker` labels."""

    def __init__(self, texts: Mapping[tuple[str, str], bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for (role, worker), text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text.decode()):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "role": role, "worker": worker}
                    merged.add_sample(sample.name, labels, sample.value)
        return families.values()


def merge(texts: Mapping[tuple[str, str], bytes]) -> bytes:
    """(role, worker) -> text, merged into one text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Merged(texts))
    return generate_latest(registry)
