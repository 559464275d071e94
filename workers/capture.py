"""Logits of accepted paths of consenting streams -> records of requests -> shards, without making a step wait.

The engine thread takes the largest logits of the target's raw rows, one row for each emitted token: they are still in
its cache, and a copy for somebody else would take as long. A thread of its own puts the rows of a stream together, and
writes shards. What does not fit is dropped and counted, the newest first, and always a whole request: a record with a
hole is of no use.

The index rule. Node 0 of a step's tree is the pending token; the logits at a node are the distribution of the token
behind it. So row j of a chain is the distribution of drafted token j (from 0) given the prefix and drafted[0..j-1], and
the rows of the nodes [0, *path] are those that decided the emitted tokens, one each, whatever the draft was:

    row (node)          0            path[0]        ...   path[-1]
    decided             token t      token t + 1          the last: correction or bonus
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import structlog

from paceline.cluster.errors import StorageError
from paceline.cluster.learning.capture import (
    CapturedRequest,
    Redactor,
    ShardWriter,
    is_heldout,
    load_redactor,
)
from paceline.cluster.learning.captured_rows import Rows, join, pack, select
from paceline.cluster.learning.config import CaptureConfig, LearningConfig
from paceline.cluster.learning.storage import learning_folder
from paceline.cluster.learning.tombstones import choice_of
from paceline.cluster.metrics import Metrics
from paceline.cluster.scheduler import Stream
from paceline.cluster.types import Request
from paceline.kernels.top_logits import top_logits
from paceline.workers.raw_logits import RawLogits, top_of

log = structlog.get_logger(__name__)

_NAP_S = 0.1
"""The thread looks for rows so often; a queue that is half full wakes it."""
_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0


@dataclass(slots=True, eq=False)
class _Open:
    """One stream that is captured. The engine thread writes the first part, the other thread `pieces`."""

    created: float
    num_prompt: int
    num_resumed: int
    num_steps: int = 0
    num_emitted: int = 0
    draft_version: str = ""
    lost: str = ""
    """Why it is given up; set once, by either thread."""
    pieces: list[Rows] = field(default_factory=list)
    num_bytes: int = 0
    """Of `pieces`."""


@dataclass(frozen=True, slots=True)
class _End:
    """A stream is over."""

    opened: _Open
    request: Request
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Taken:
    """What was taken in one step, as many rows of each stream as stand there."""

    counts: list[tuple[_Open, int]]
    ids: npt.NDArray[np.int32]
    """[rows, m]"""
    log_probs: npt.NDArray[np.float32]
    """[rows, m]"""
    log_sums: npt.NDArray[np.float32]
    """[rows]"""


class Recorder:
    """What an engine does for streams that may be kept. `note`, `take` and `close` on its thread; `start` and `stop` on any."""

    def __init__(
        self,
        config: CaptureConfig,
        writer: ShardWriter,
        *,
        target_version: str,
        vocab_size: int,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Half of `queue_mb` is for what was taken in the last steps, half for what was put together of it.

        Raises:
            ConfigError: `redact` names no function.
        """
        self._config = config
        self._writer = writer
        self._target_version = target_version
        self._clock = clock
        self._metrics = metrics
        self._seconds = {where: metrics.capture_seconds.labels(where) for where in ("step", "thread")}
        self._redact: Redactor | None = load_redactor(config.redact)
        self._limit = config.queue_mb << 19
        self._vocab_size = vocab_size
        self._row_bytes = (
            8 * min(config.top, vocab_size) + 4
        )  # as it is taken; what is put together is smaller
        # The engine thread's:
        self._open: dict[str, _Open] = {}
        self._noted: list[tuple[Stream, int, Sequence[int], int, str]] = []
        """What `note` was told in this step: all of it is worked off at once, in `take`."""
        self._ended: list[Stream] = []
        """Streams that end with this step: behind its rows."""
        self._num_taken = 0
        """Rows, ever."""
        self._step_s = 0.0
        # The other thread's:
        self._num_sorted = 0
        """Rows, ever; also read by the engine thread."""
        self._num_bytes = 0
        """Of pieces and of what is finished."""
        self._finished: list[CapturedRequest] = []
        self._oldest = 0.0
        """Monotonic seconds when the first of `_finished` ended."""
        self._is_off = False
        """Storage failed: nothing is captured until a write succeeds. Read by the engine thread."""
        self._retry_at = 0.0
        self._retry_s = _FIRST_RETRY_S
        self._published_s = 0.0
        # Both threads':
        self._jobs: deque[_Taken | _End] = deque()
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)

    @classmethod
    def of(
        cls, config: LearningConfig, worker_id: str, *, target_version: str, vocab_size: int, metrics: Metrics
    ) -> Recorder | None:
        """As the configuration says; None where learning is off.

        Raises:
            ConfigError: of storage or redaction.
        """
        if not config.enabled:
            return None
        writer = ShardWriter(*learning_folder(config), worker_id)
        return cls(
            config.capture,
            writer,
            target_version=target_version,
            vocab_size=vocab_size,
            metrics=metrics,
        )

    # -- engine thread -----------------------------------------------------------------------------------

    def note(self, stream: Stream, at: int, path: Sequence[int], num: int, draft_version: str) -> None:
        """A step emitted `num` tokens of a stream that may be kept, and appended them to it.

        Args:
            at: row of the step's logits that belongs to node 0 of its tree.
            path: accepted nodes; more than `num` tokens where the text ended before them.
        """
        self._noted.append((stream, at, path, num, draft_version))

    def take(self, logits: RawLogits) -> None:
        """Take what was noted from a step's raw logits, [R, V]: before bias, penalties, temperature and filters."""
        if not self._noted:
            return
        began = time.perf_counter()
        nodes, counts = self._wanted()
        if nodes:
            # Only what was noted moves; what can be done later to it is done later.
            self._jobs.append(_Taken(counts, *top_of(logits, nodes, self._config.top)))
            self._num_taken += len(nodes)
            if 2 * self._row_bytes * (self._num_taken - self._num_sorted) > self._limit:
                self._wake.set()
        for stream in self._ended:
            self._end(stream)
        self._ended = []
        self._step_s += time.perf_counter() - began

    def _wanted(self) -> tuple[list[int], list[tuple[_Open, int]]]:
        """Rows of this step's logits to take from, and whose they are."""
        nodes: list[int] = []
        counts: list[tuple[_Open, int]] = []
        room = self._limit // self._row_bytes - (self._num_taken - self._num_sorted)
        for stream, at, path, num, draft_version in self._noted:
            opened = self._open.get(stream.key)
            if opened is None:
                before = stream.num_tokens - num
                opened = self._open[stream.key] = _Open(self._clock(), before, before - stream.num_prompt)
            opened.num_emitted += num
            opened.num_steps += 1
            opened.draft_version = draft_version or opened.draft_version
            if not opened.lost and (self._is_off or len(nodes) + num > room):
                opened.lost = "storage" if self._is_off else "full"
            if not opened.lost:
                nodes.append(at)
                for node in path[: num - 1]:
                    nodes.append(at + node)
                counts.append((opened, num))
        self._noted = []
        return nodes, counts

    def spoil(self, stream: Stream) -> None:
        """Keep nothing of a stream: something was wrong with it."""
        opened = self._open.get(stream.key)
        if opened is not None:
            opened.lost = opened.lost or "error"

    def close(self, stream: Stream) -> None:
        """A stream ended or was cancelled. Its tokens so far are a record."""
        if self._noted:
            self._ended.append(stream)
        else:
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        opened = self._open.pop(stream.key, None)
        if opened is not None:
            self._jobs.append(_End(opened, stream.request, stream.token_ids.copy()))

    # -- life --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to work off what is taken."""
        top_logits(
            np.zeros((1, self._vocab_size), np.float32), self._config.top, rows=[0]
        )  # compiled now, not later
        self._thread.start()

    def stop(self, limit_s: float = 5.0) -> None:
        """Write what there is and end, within this time. No step runs any more."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(limit_s)

    @property
    def is_idle(self) -> bool:
        """All that was taken is on storage."""
        return not self._jobs and not self._num_bytes and self._num_taken == self._num_sorted

    @property
    def is_off(self) -> bool:
        """Storage failed, and is tried again."""
        return self._is_off

    def _run(self) -> None:
        while not self._is_stopping:
            self._wake.wait(_NAP_S)
            self._wake.clear()
            self._guarded(self.work)
        self._retry_at = 0.0
        self._guarded(lambda: self.work(flush=True))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Whatever goes wrong here, serving does not notice."""
        try:
            work()
        except Exception:
            log.exception("capture_failed")
            self._metrics.capture_dropped_requests.labels("error").inc(len(self._finished))
            self._forget_finished("error")
            self._is_off = False  # what would have shown that storage is back is gone

    # -- the other thread --------------------------------------------------------------------------------

    def work(self, *, flush: bool = False) -> None:
        """Work off what is there; write if it is time. Its thread calls this, and tests that start none."""
        began = time.thread_time()
        jobs = [self._jobs.popleft() for _ in range(len(self._jobs))]
        self._sort([job for job in jobs if isinstance(job, _Taken)])
        for job in jobs:
            if isinstance(job, _End):  # its rows were taken before
                self._finish(job)
        is_due = time.monotonic() - self._oldest >= self._config.flush_s - 2 * _NAP_S
        is_much = 4 * sum(record.num_bytes for record in self._finished) > self._limit
        if self._finished and (flush or is_due or is_much):
            self._write()
        self._seconds["thread"].inc(time.thread_time() - began)
        self._publish()

    def _sort(self, jobs: Sequence[_Taken]) -> None:
        """Some steps' rows -> each stream's own: copies, or one long stream would hold what was taken for all others."""
        if not jobs:
            return
        parts = zip(*((job.ids, job.log_probs, job.log_sums) for job in jobs), strict=True)
        rows = pack(*map(np.concatenate, parts))
        counts = [count for job in jobs for count in job.counts]
        owners = {id(opened): opened for opened, _ in counts}
        numbers = {key: number for number, key in enumerate(owners)}
        owner_of_row = np.repeat([numbers[id(opened)] for opened, _ in counts], [num for _, num in counts])
        of_owners = np.split(
            np.argsort(owner_of_row, kind="stable"),
            np.cumsum(np.bincount(owner_of_row, minlength=len(owners)))[:-1],
        )
        for opened, places in zip(owners.values(), of_owners, strict=True):
            self._add(opened, select(rows, places))
        self._num_sorted += len(rows)

    def _add(self, opened: _Open, rows: Rows) -> None:
        if not opened.lost and self._num_bytes + rows.nbytes > self._limit:
            opened.lost = "full"
        if opened.lost:
            self._forget(opened)
            return
        opened.pieces.append(rows)
        opened.num_bytes += rows.nbytes
        self._num_bytes += rows.nbytes

    def _forget(self, opened: _Open) -> None:
        self._num_bytes -= opened.num_bytes
        opened.num_bytes = 0
        opened.pieces = []

    def _finish(self, end: _End) -> None:
        opened = end.opened
        if opened.lost:
            self._forget(opened)
            self._metrics.capture_dropped.labels(opened.lost).inc(opened.num_emitted)
            self._metrics.capture_dropped_requests.labels(opened.lost).inc()
            return
        record = self._redacted(self._record(end))
        self._forget(opened)
        if record is None:
            self._metrics.capture_dropped.labels("redacted").inc(opened.num_emitted)
            self._metrics.capture_dropped_requests.labels("redacted").inc()
            return
        if not self._finished:
            self._oldest = time.monotonic()
        self._finished.append(record)
        self._num_bytes += record.num_bytes

    def _record(self, end: _End) -> CapturedRequest:
        opened, request = end.opened, end.request
        return CapturedRequest(
            request_id=choice_of(request.id),
            tenant=request.tenant,
            domain=request.domain,
            created=opened.created,
            target_version=self._target_version,
            draft_version=opened.draft_version,
            sampling=request.sampling,
            num_prompt=opened.num_prompt,
            token_ids=end.token_ids,
            rows=join(opened.pieces),
            is_heldout=is_heldout(request.id, self._config.holdout),
            num_steps=opened.num_steps,
            num_resumed=opened.num_resumed,
        )

    def _redacted(self, record: CapturedRequest) -> CapturedRequest | None:
        record.check()
        if self._redact is None:
            return record
        try:
            redacted = self._redact(record)
            if redacted is not None:
                redacted.check()
        except Exception as error:  # noqa: BLE001  # an operator's code; what it cannot read is not kept
            log.error(
                "redaction_failed", redact=self._config.redact, error=f"{type(error).__name__}: {error}"
            )
            return None
        return redacted

    def _write(self) -> None:
        """One shard of all that is finished. A failure switches capture off until a later try succeeds."""
        if time.monotonic() < self._retry_at:
            return
        try:
            written = self._writer.write(self._finished)
        except StorageError as error:
            self._metrics.capture_storage_errors.inc()
            self._is_off = True
            self._retry_at = time.monotonic() + self._retry_s
            log.error("capture_off", reason=str(error), retry_s=self._retry_s, held=len(self._finished))
            self._retry_s = min(_LONGEST_RETRY_S, 2 * self._retry_s)
            return
        if self._is_off:
            log.info("capture_on", held=len(self._finished))
        self._is_off, self._retry_s = False, _FIRST_RETRY_S
        self._metrics.capture_tokens.inc(written.num_tokens)
        self._metrics.capture_requests.inc(written.num_requests)
        self._metrics.capture_bytes.inc(written.num_bytes)
        self._metrics.capture_dropped_requests.labels("deleted").inc(
            len(self._finished) - written.num_requests
        )
        self._forget_finished("deleted", num_kept=written.num_tokens)

    def _forget_finished(self, reason: str, num_kept: int = 0) -> None:
        num_gone = sum(record.num_rows for record in self._finished) - num_kept
        if num_gone:
            self._metrics.capture_dropped.labels(reason).inc(num_gone)
        self._num_bytes -= sum(record.num_bytes for record in self._finished)
        self._finished = []

    def _publish(self) -> None:
        self._metrics.capture_off.set(self._is_off)
        self._metrics.capture_held_bytes.set(self._num_bytes)
        # The engine thread adds up by itself: a counter's lock costs as much as all it does for a token.
        step_s = self._step_s
        self._seconds["step"].inc(step_s - self._published_s)
        self._published_s = step_s
