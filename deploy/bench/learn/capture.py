"""Requests through one engine, with capture and without -> bytes and microseconds that capture costs for each token.

Costs this small drown in the difference of two runs, so they are measured where they arise: what the engine thread
spends in the recorder's calls, and the CPU time of the thread behind it, storage included. The difference of process
CPU time between the two kinds of blocks stands beside them as a check that nothing was overlooked; it is noisy.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from paceline.cluster.config import ModelConfig, model_folder
from paceline.cluster.learning.capture import ShardReader, ShardWriter, shards
from paceline.cluster.learning.config import CaptureConfig, LearningConfig
from paceline.cluster.learning.storage import FileSystem, learning_folder
from paceline.cluster.metrics import Metrics
from paceline.cluster.scheduler import Stream
from paceline.deploy.bench.inprocess import TOKEN_BUDGET, drafters, generate, load
from paceline.deploy.bench.workload import Workload
from paceline.workers.capture import Recorder
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner
from paceline.workers.raw_logits import RawLogits

MAX_BYTES = 1024
MAX_US = 20.0


class TimedRecorder(Recorder):
    """Adds up what its calls take of the engine thread, the clock's own time included."""

    calls_s = 0.0

    def note(self, stream: Stream, at: int, path: Sequence[int], num: int, draft_version: str) -> None:
        began = time.perf_counter()
        super().note(stream, at, path, num, draft_version)
        self.calls_s += time.perf_counter() - began

    def take(self, logits: RawLogits) -> None:
        began = time.perf_counter()
        super().take(logits)
        self.calls_s += time.perf_counter() - began

    def close(self, stream: Stream) -> None:
        began = time.perf_counter()
        super().close(stream)
        self.calls_s += time.perf_counter() - began


@dataclass(slots=True)
class _Side:
    """Blocks of one kind."""

    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    ratios: list[float] = field(default_factory=list)

    def add(self, tokens: int, wall_s: float, cpu_s: float) -> None:
        self.tokens += tokens
        self.wall_s += wall_s
        self.cpu_s += cpu_s
        self.ratios.append(wall_s / max(1, tokens))


def capture_figures(
    *, blocks: int = 12, streams: int = 8, requests: int = 16, max_tokens: int = 128, seed: int = 1
) -> dict[str, Any]:
    """`capture.bytes_per_token` and `capture.us_per_token`, the parts of the latter, and how they came about.

    Args:
        blocks: of each kind, alternated; each runs the same `requests` requests, `streams` at a time.
    """
    models = ModelConfig()
    folder = model_folder(models.target)
    runner, make_drafter = load(folder), drafters(model_folder(models.draft))
    work = Workload(folder, seed=seed).requests("domains", 0, requests, max_tokens=max_tokens)
    asked = [msgspec.structs.replace(request, capture=True) for request in work]
    with tempfile.TemporaryDirectory() as storage:
        fs, root = learning_folder(LearningConfig(storage=storage))
        metrics = Metrics()
        recorder = TimedRecorder(
            CaptureConfig(flush_s=1.0),
            ShardWriter(fs, root, "bench"),
            target_version=runner.version,
            vocab_size=runner.vocab_size,
            metrics=metrics,
        )
        engines = [_engine(runner, make_drafter(runner), capture, streams) for capture in (None, recorder)]
        sides = [_Side(), _Side()]
        texts: dict[str, list[int]] = {}
        for engine in engines:  # everything compiled, caches filled
            texts = generate(engine, asked, streams).outputs
        recorder.work(flush=True)
        recorder.start()
        before_s, warm_tokens, warm_dropped = _thread_s(metrics), _kept(metrics), _dropped(metrics)
        recorder.calls_s = 0.0
        changed = 0
        for block in range(blocks):
            for kind in (0, 1) if block % 2 else (1, 0):
                cpu_s = time.process_time()
                tally = generate(engines[kind], asked, streams)
                if kind:
                    _settle(recorder)
                sides[kind].add(tally.num_tokens, tally.seconds, time.process_time() - cpu_s)
                changed += sum(texts[name] != ids for name, ids in tally.outputs.items())
        recorder.stop(60.0)
        return _figures(sides, recorder, metrics, before_s, warm_tokens, warm_dropped, changed, fs, root)


def _engine(runner: ModelRunner, drafter: Any, capture: Recorder | None, streams: int) -> Engine:
    return Engine(
        runner,
        token_budget=TOKEN_BUDGET,
        max_streams=max(64, streams),
        drafter=drafter,
        prefix_cache=False,
        capture=capture,
    )


def _settle(recorder: Recorder) -> None:
    """Wait until the thread has worked off a block, so that the next one does not pay for it."""
    limit = time.monotonic() + 30
    while not recorder.is_idle and time.monotonic() < limit:
        time.sleep(0.01)


def _figures(
    sides: Sequence[_Side],
    recorder: TimedRecorder,
    metrics: Metrics,
    before_s: float,
    warm_tokens: float,
    warm_dropped: float,
    changed: int,
    fs: FileSystem,
    root: str,
) -> dict[str, Any]:
    plain, kept = sides
    num_tokens = _kept(metrics) - warm_tokens
    step_us = 1e6 * recorder.calls_s / max(1, kept.tokens)
    thread_us = 1e6 * (_thread_s(metrics) - before_s) / max(1, kept.tokens)
    found = shards(fs, root)
    records = list(ShardReader(fs, root).requests())
    dropped = _dropped(metrics) - warm_dropped
    return {
        "capture.bytes_per_token": sum(found.values()) / max(1, sum(record.num_rows for record in records)),
        "capture.us_per_token": step_us + thread_us,
        "step_us_per_token": step_us,
        "thread_cpu_us_per_token": thread_us,
        "memory_bytes_per_token": float(np.mean([r.num_bytes / max(1, r.num_rows) for r in records])),
        "process_cpu_us_per_token": 1e6
        * (kept.cpu_s / max(1, kept.tokens) - plain.cpu_s / max(1, plain.tokens)),
        "time_ratio": float(np.median(np.array(kept.ratios) / np.array(plain.ratios))),
        "tokens": kept.tokens,
        "tokens_kept": num_tokens,
        "tokens_dropped": dropped,
        "texts_changed": changed,
        "passes": changed == 0 and dropped == 0 and step_us + thread_us <= MAX_US,
        "how": "engine in process, bundled pair, blocks with and without capture alternated; microseconds are the engine "
        "thread's in the recorder's calls (wall) plus the capture thread's (CPU: selection, records, Parquet, files); "
        "bytes are those of the shards, prompts included",
    }


def _thread_s(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("paceline_capture_seconds_total", {"where": "thread"}) or 0.0


def _dropped(metrics: Metrics) -> float:
    families = [f for f in metrics.registry.collect() if f.name == "paceline_capture_dropped_tokens"]
    return sum(s.value for family in families for s in family.samples if s.name.endswith("_total"))


def _kept(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("paceline_capture_tokens_total") or 0.0


def main() -> None:
    """Print the figures as JSON."""
    print(msgspec.json.format(msgspec.json.encode(capture_figures())).decode())


if __name__ == "__main__":
    main()
