"""Streams that may be kept -> records whose rows are the target's own, one for each emitted token; others leave nothing."""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from structlog.testing import capture_logs
from transformers import PreTrainedModel

from paceline.cluster.errors import ConfigError
from paceline.cluster.learning.capture import (
    CapturedRequest,
    ShardReader,
    ShardWriter,
    delete,
    is_heldout,
    shards,
)
from paceline.cluster.learning.config import CaptureConfig
from paceline.cluster.learning.storage import files, read_whole
from paceline.cluster.metrics import Metrics
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import Request, Sampling
from paceline.workers.capture import Recorder
from paceline.workers.drafters.base import Drafter
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner

VOCAB = 211
LENGTH = 20
TOLERANCE = 2e-3
"""Log-probabilities are kept in half precision: the largest rounding error of one in -4..-2."""
RunnerFactory = Callable[..., ModelRunner]


def ask(name: str, num_prompt: int, sampling: Sampling, *, capture: bool = True, **how: object) -> Request:
    ids = np.random.default_rng(num_prompt).integers(3, VOCAB, num_prompt)
    return Request(
        name, tuple(ids.tolist()), sampling, LENGTH, tenant="acme", domain="notes", capture=capture, **how  # type: ignore[arg-type]
    )  # fmt: skip


REQUESTS = [
    ask("greedy-0-0", 5, Sampling(1, 0.0)),
    ask("drawn-0-0", 17, Sampling(2, 0.7, 20, 0.9)),
    ask("secret-0-0", 23, Sampling(3), capture=False),
    ask("penalised-0-0", 9, Sampling(4, 0.0, repetition_penalty=1.5, logit_bias=((9, 3.0),))),
    ask("one token-0-0", 1, Sampling(7), logprobs=2),
]
KEPT = [request for request in REQUESTS if request.capture]


class Guesses(Drafter):
    """The text, behind a wrong sibling, and an error now and then: accepted nodes are never the first ones."""

    name = "guesses"

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self._texts = texts
        self._random = np.random.default_rng(1)

    def version(self, stream: Stream) -> str:
        return "guess-1"

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        return [self._tree(stream) for stream in streams]

    def _tree(self, stream: Stream) -> Tree | None:
        future = self._texts[stream.request.id][stream.num_output : stream.num_output + 4]
        tokens: list[int] = []
        parents: list[int] = []
        spine = -1
        for token in future:
            right = token if self._random.random() > 0.2 else (token + 1) % VOCAB
            tokens += [(token + 7) % VOCAB, right]
            parents += [spine, spine]
            spine = len(tokens) - 1
        return Tree.build(int(stream.token_ids[-1]), tokens, parents) if tokens else None


class OffByOne(Recorder):
    """The bug of the prototype that this was learnt from: the row at a token, which tells of the one behind it."""

    def note(self, stream: Stream, at: int, path: Sequence[int], num: int, draft_version: str) -> None:
        if num > 1:
            rows = [at + node for node in path[: num - 1]]
            at, path = rows[0], [row - rows[0] for row in [*rows[1:], rows[-1]]]
        super().note(stream, at, path, num, draft_version)


@pytest.fixture
def fs() -> Iterator[MemoryFileSystem]:
    yield MemoryFileSystem()


@pytest.fixture
def root(fs: MemoryFileSystem) -> Iterator[str]:
    name = f"/{uuid.uuid4().hex}"
    yield name
    if fs.exists(name):
        fs.rm(name, recursive=True)


def recorder(
    fs: MemoryFileSystem,
    root: str,
    kind: type[Recorder] = Recorder,
    metrics: Metrics | None = None,
    **config: object,
) -> Recorder:
    return kind(
        CaptureConfig.model_validate(config),
        ShardWriter(fs, root, "decode-1"),
        target_version="target-1",
        vocab_size=VOCAB,
        metrics=metrics or Metrics(),
    )


def run(
    runner: ModelRunner, requests: Sequence[Request], capture: Recorder | None, drafter: Drafter | None = None
) -> dict[str, list[int]]:
    texts = Engine(runner, token_budget=64, max_streams=8, drafter=drafter, capture=capture).run(requests)
    if capture is not None:
        capture.work(flush=True)
    return texts


@pytest.fixture(scope="module")
def texts(make_runner: RunnerFactory) -> dict[str, list[int]]:
    """Without speculation and without capture."""
    return run(make_runner("llama", num_blocks=500), REQUESTS, None)


def error_of(record: CapturedRequest, model: PreTrainedModel) -> float:
    """The largest distance of the record's log-probabilities from the model's own at the prefix of each token."""
    with torch.no_grad():
        logits = model(torch.tensor(record.token_ids[None].astype(np.int64))).logits[0]
    rows = logits[
        record.num_prompt - 1 : -1
    ]  # row i decides token num_prompt + i, behind the tokens before it
    assert len(rows) == record.num_rows
    own = rows.log_softmax(-1).numpy()
    distance = np.abs(
        np.take_along_axis(own, record.top_ids.astype(np.int64), 1) - record.top_log_probs
    ).max()
    return float(max(distance, np.abs(rows.logsumexp(-1).numpy() - record.log_sums).max()))


# --- the index rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "draft"), [(500, False), (500, True), (24, True)])
def test_a_row_is_the_distribution_behind_the_tokens_before_its_token(
    num_blocks: int,
    draft: bool,
    fs: MemoryFileSystem,
    root: str,
    make_runner: RunnerFactory,
    oracle_model: Callable[[str], PreTrainedModel],
    texts: dict[str, list[int]],
) -> None:
    """Row j of verification belongs to drafted token j: by transformers' own logits at that very prefix, for every token,
    with drafts that are accepted at other nodes than the first, and with preemption. Capture changes no text."""
    capture = recorder(fs, root)
    drafter = Guesses(texts) if draft else None
    found = run(make_runner("llama", num_blocks=num_blocks), REQUESTS, capture, drafter)
    records = {record.request_id: record for record in ShardReader(fs, root).requests()}

    assert found == texts
    assert set(records) == {request.id for request in KEPT}
    for request in KEPT:
        record = records[request.id]
        assert record.token_ids.tolist() == [*request.prompt_ids, *texts[request.id]]
        assert (record.num_prompt, record.num_rows) == (len(request.prompt_ids), len(texts[request.id]))
        assert record.top_ids.shape == (LENGTH, 128)
        assert (record.num_steps < LENGTH) == draft
        assert error_of(record, oracle_model("llama")) < TOLERANCE * 4
        assert record.sampling == request.sampling
        assert (record.tenant, record.domain, record.target_version) == ("acme", "notes", "target-1")
        assert record.draft_version == ("guess-1" if draft else "")
        assert record.is_heldout == is_heldout(request.id, 0.05)
        assert abs(record.created - time.time()) < 60


def test_rows_that_are_off_by_one_are_seen(
    fs: MemoryFileSystem,
    root: str,
    make_runner: RunnerFactory,
    oracle_model: Callable[[str], PreTrainedModel],
    texts: dict[str, list[int]],
) -> None:
    """The control of the test above."""
    run(make_runner("llama", num_blocks=500), REQUESTS, recorder(fs, root, OffByOne), Guesses(texts))

    for record in ShardReader(fs, root).requests():
        assert error_of(record, oracle_model("llama")) > 1


def test_greedy_tokens_are_the_best_of_their_rows(
    fs: MemoryFileSystem, root: str, make_runner: RunnerFactory, texts: dict[str, list[int]]
) -> None:
    """And rows come best first."""
    run(make_runner("llama", num_blocks=500), REQUESTS[:1], recorder(fs, root, top=16), Guesses(texts))
    [record] = ShardReader(fs, root).requests()

    assert record.top_ids[:, 0].tolist() == texts["greedy-0-0"]
    assert record.top_ids.shape == (LENGTH, 16)
    assert (np.diff(record.top_log_probs, axis=1) <= 0).all()


def test_a_stream_that_moved_here_has_rows_of_what_was_generated_here(
    fs: MemoryFileSystem,
    root: str,
    make_runner: RunnerFactory,
    oracle_model: Callable[[str], PreTrainedModel],
    texts: dict[str, list[int]],
) -> None:
    """What another worker emitted stands with the prompt, and is told apart."""
    capture = recorder(fs, root)
    engine = Engine(make_runner("llama", num_blocks=500), token_budget=64, max_streams=8, capture=capture)
    request = REQUESTS[1]
    engine.add(request, epoch=2, resumed=texts[request.id][:8])
    while engine.has_work:
        engine.step()
    capture.work(flush=True)
    [record] = ShardReader(fs, root).requests()

    assert (record.num_prompt, record.num_resumed, record.num_rows) == (17 + 8, 8, LENGTH - 8)
    assert record.token_ids.tolist() == [*request.prompt_ids, *texts[request.id]]
    assert error_of(record, oracle_model("llama")) < TOLERANCE * 4


def test_a_cancelled_stream_is_a_record_of_what_was_emitted(
    fs: MemoryFileSystem, root: str, make_runner: RunnerFactory
) -> None:
    """Its client consented to what it got."""
    capture = recorder(fs, root)
    engine = Engine(make_runner("llama", num_blocks=500), token_budget=64, max_streams=8, capture=capture)
    stream, untouched = engine.add(REQUESTS[0]), engine.add(REQUESTS[1])
    engine.remove(untouched)
    for _ in range(5):
        engine.step()
    engine.remove(stream)
    capture.work(flush=True)
    [record] = ShardReader(fs, root).requests()

    assert (record.request_id, record.num_rows) == ("greedy-0-0", 5)


# --- consent --------------------------------------------------------------------------------------------


def test_nothing_of_a_request_without_consent_reaches_storage(
    fs: MemoryFileSystem, root: str, make_runner: RunnerFactory, texts: dict[str, list[int]]
) -> None:
    """Neither its name nor any four of its tokens in a row, in the bytes of any file, compressed or as they are read; and
    of no row of its logits was anything taken. The same search finds what may be kept."""
    metrics = Metrics()
    capture = recorder(fs, root, metrics=metrics)
    run(make_runner("llama", num_blocks=500), REQUESTS, capture, Guesses(texts))

    everything = b"".join(read_whole(fs, path) or b"" for path in files(fs, root, deep=True))
    records = list(ShardReader(fs, root).requests())
    decoded = np.concatenate([record.token_ids for record in records]).tobytes()
    names = " ".join(record.request_id for record in records)

    def is_found(request: Request) -> bool:
        ids = np.array([*request.prompt_ids, *texts[request.id]], np.int32)
        runs = [ids[at : at + 4].tobytes() for at in range(len(ids) - 3)]
        return request.id in names or request.id.encode() in everything or any(run in decoded for run in runs)

    assert len(everything) > 5000
    assert [is_found(request) for request in REQUESTS] == [request.capture for request in REQUESTS]
    assert capture._num_taken == sum(len(texts[request.id]) for request in KEPT)
    assert f"paceline_capture_tokens_total {LENGTH * len(KEPT)}.0" in metrics.text().decode()


def test_an_engine_without_consenting_streams_does_nothing(
    fs: MemoryFileSystem, root: str, make_runner: RunnerFactory
) -> None:
    """No file, not even a folder."""
    capture = recorder(fs, root)
    run(
        make_runner("llama", num_blocks=500),
        [msgspec.structs.replace(r, capture=False) for r in REQUESTS],
        capture,
    )

    assert not files(fs, root, deep=True)
    assert (capture._num_taken, len(capture._jobs), capture._open) == (0, 0, {})


# --- bounds and faults ----------------------------------------------------------------------------------


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"paceline_{name}", labels) or 0.0


def test_what_does_not_fit_is_dropped_whole_and_counted(
    fs: MemoryFileSystem, root: str, make_runner: RunnerFactory, texts: dict[str, list[int]]
) -> None:
    """The newest: of rows that nobody takes away, the first streams' stay."""
    metrics = Metrics()
    capture = recorder(fs, root, metrics=metrics)
    capture._limit = 25 * capture._row_bytes
    assert run(make_runner("llama", num_blocks=500), REQUESTS[:2], None) == {
        name: texts[name] for name in ("greedy-0-0", "drawn-0-0")
    }
    found = run(make_runner("llama", num_blocks=500), [REQUESTS[0]], capture)
    for request in REQUESTS[1:2]:  # nobody works it off meanwhile
        engine = Engine(make_runner("llama", num_blocks=500), token_budget=64, max_streams=8, capture=capture)
        found |= engine.run([request, msgspec.structs.replace(request, id="other-0-0")])
    capture.work(flush=True)

    assert found["drawn-0-0"] == texts["drawn-0-0"]
    assert {record.request_id for record in ShardReader(fs, root).requests()} == {"greedy-0-0"}
    assert value(metrics, "capture_dropped_tokens_total", reason="full") == 2 * LENGTH
    assert value(metrics, "capture_tokens_total") == LENGTH
    assert value(metrics, "capture_held_bytes") == 0


def test_memory_behind_the_queue_is_bounded_too(
    fs: MemoryFileSystem, root: str, make_runner: RunnerFactory
) -> None:
    """Open streams count."""
    metrics = Metrics()
    capture = recorder(fs, root, metrics=metrics)
    capture._limit = 30 * (128 * 6 + 4)
    engine = Engine(make_runner("llama", num_blocks=500), token_budget=64, max_streams=8, capture=capture)
    for request in REQUESTS:
        engine.add(request)
    while engine.has_work:
        engine.step()
        capture.work()
        assert capture._num_bytes <= capture._limit
    capture.work(flush=True)

    kept = list(ShardReader(fs, root).requests())
    dropped = value(metrics, "capture_dropped_tokens_total", reason="full")
    assert dropped + sum(record.num_rows for record in kept) == LENGTH * len(KEPT)
    assert dropped > 0 and kept
    assert capture._num_bytes == 0


class FailingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Refuses to write while it is told to."""

    protocol = "failing"
    cachable = False
    is_failing = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **how: object) -> None:
        if self.is_failing:
            raise PermissionError("read-only")
        super().pipe_file(path, value, **how)


def test_a_failing_storage_switches_capture_off_until_it_is_back(
    root: str, make_runner: RunnerFactory
) -> None:
    """With an alarm and a gauge; texts come as ever, what was finished waits, and a later try writes it."""
    fs, metrics = FailingFileSystem(), Metrics()
    fs.is_failing = True
    capture = recorder(fs, root, metrics=metrics)
    runner = make_runner("llama", num_blocks=500)
    with capture_logs() as events:
        plain = run(runner, REQUESTS[:1], None)
        assert run(runner, REQUESTS[:1], capture) == plain
        assert capture.is_off and value(metrics, "capture_off") == 1
        run(runner, REQUESTS[1:2], capture)  # off: not even copied
        fs.is_failing = False
        capture.work(flush=True)
        assert capture.is_off  # not before its pause is over
        capture._retry_at = 0.0
        capture.work(flush=True)
        run(runner, REQUESTS[3:4], capture)

    assert not capture.is_off and value(metrics, "capture_off") == 0
    assert value(metrics, "capture_storage_errors_total") == 1
    assert value(metrics, "capture_dropped_tokens_total", reason="storage") == LENGTH
    assert {r.request_id for r in ShardReader(fs, root).requests()} == {"greedy-0-0", "penalised-0-0"}
    alarms = [event for event in events if event["log_level"] == "error"]
    assert [event["event"] for event in alarms] == ["capture_off"]
    assert "read-only" in alarms[0]["reason"]


def test_what_is_deleted_while_it_is_in_memory_is_never_written(
    fs: MemoryFileSystem, root: str, make_runner: RunnerFactory
) -> None:
    """Of a request for ever, of a tenant what began before."""
    metrics = Metrics()
    capture = recorder(fs, root, metrics=metrics)
    engine = Engine(make_runner("llama", num_blocks=500), token_budget=64, max_streams=8, capture=capture)
    engine.run([REQUESTS[0], msgspec.structs.replace(REQUESTS[1], tenant="other")])
    capture.work()
    delete(fs, root, request_id="greedy")
    delete(fs, root, tenant="other")
    capture.work(flush=True)

    assert not shards(fs, root)
    assert value(metrics, "capture_dropped_tokens_total", reason="deleted") == 2 * LENGTH
    assert capture._num_bytes == 0


def cut(record: CapturedRequest) -> CapturedRequest | None:
    """An operator's hook: nothing of prompts with one token, no first output token of others."""
    if record.num_prompt == 1:
        return None
    return dataclasses.replace(record, num_prompt=record.num_prompt + 1, rows=record.rows[1:])


def broken(record: CapturedRequest) -> CapturedRequest:
    """Its arrays do not fit each other."""
    return dataclasses.replace(record, rows=record.rows[1:])


def test_redaction_is_the_last_word(
    fs: MemoryFileSystem, root: str, make_runner: RunnerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it returns is kept, None is not, and a hook that fails keeps nothing."""
    metrics = Metrics()
    capture = recorder(fs, root, metrics=metrics)
    capture._redact = cut
    run(make_runner("llama", num_blocks=500), REQUESTS, capture)
    kept = {record.request_id: record for record in ShardReader(fs, root).requests()}
    assert "one token-0-0" not in kept
    assert kept["greedy-0-0"].num_rows == LENGTH - 1

    capture._redact = broken
    with capture_logs() as events:
        run(make_runner("llama", num_blocks=500), [msgspec.structs.replace(REQUESTS[0], id="x-0-0")], capture)
    assert "redaction_failed" in [event["event"] for event in events]
    assert "x-0-0" not in {record.request_id for record in ShardReader(fs, root).requests()}
    assert value(metrics, "capture_dropped_tokens_total", reason="redacted") == 2 * LENGTH


def test_a_hook_that_does_not_exist_is_refused(fs: MemoryFileSystem, root: str) -> None:
    """At start, by its name."""
    for spec in ("nowhere:f", "paceline.workers.capture", "paceline.workers.capture:nothing", "math:pi"):
        with pytest.raises(ConfigError, match="learning.capture.redact="):
            recorder(fs, root, redact=spec)


def test_the_thread_writes_by_itself_and_ends(
    fs: MemoryFileSystem, root: str, make_runner: RunnerFactory
) -> None:
    """Within flush_s; `stop` writes the rest."""
    capture = recorder(fs, root, flush_s=0.3)
    capture.start()
    runner = make_runner("llama", num_blocks=500)
    Engine(runner, token_budget=64, max_streams=8, capture=capture).run(REQUESTS[:1])
    limit = time.monotonic() + 10
    while not shards(fs, root) and time.monotonic() < limit:
        time.sleep(0.01)
    assert shards(fs, root)
    Engine(runner, token_budget=64, max_streams=8, capture=capture).run(REQUESTS[1:2])
    capture.stop()

    assert {r.request_id for r in ShardReader(fs, root).requests()} == {"greedy-0-0", "drawn-0-0"}
    assert "capture" not in {thread.name for thread in threading.enumerate()}
