"""Request -> workers chosen, attempts followed, deltas in order: the cluster behind the gateway's `Streams`.

The gateway keeps the token ids of every open stream. When a decode worker dies, the stream becomes a new attempt
(epoch + 1) on another worker, which starts from prompt and output; keyed noise makes it continue with the same text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import structlog

from paceline.cluster import wire
from paceline.cluster.config import ClusterConfig
from paceline.cluster.errors import Unavailable, WireError
from paceline.cluster.gateway.streams import StreamEvent, StreamReport
from paceline.cluster.membership import Member
from paceline.cluster.metrics import Metrics
from paceline.cluster.router import choose, ready_workers
from paceline.cluster.types import (
    SOURCE_NAMES,
    Abort,
    Assignment,
    Cancel,
    Delta,
    Deltas,
    Directory,
    Generate,
    Message,
    Prefill,
    PrefillLost,
    Request,
    Route,
    WorkerInfo,
)

log = structlog.get_logger(__name__)

_ROUTE_TIMEOUT_S = 1.0
_MAX_CRASHES = 3
"""A stream in flight at this many crashes of its decode worker is ended: it may be what kills them."""


@dataclass(frozen=True, slots=True)
class _Lost:
    """Put into an attempt's queue when its decode worker is gone."""

    reason: str


@dataclass(slots=True, eq=False)
class _Attempt:
    """One epoch of one stream."""

    request_id: str
    epoch: int
    decode: wire.Peer
    prefill: wire.Peer | None = None
    queue: asyncio.Queue[Delta | _Lost] = field(default_factory=asyncio.Queue)
    has_tokens: bool = False


class ClusterStreams:
    """`Streams` over the framed connections; also the `Resident` of a gateway process."""

    def __init__(self, config: ClusterConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._member: Member | None = None
        self._attempts: dict[tuple[str, int], _Attempt] = {}
        self._routes: dict[tuple[str, int], asyncio.Future[Assignment]] = {}
        self._news = asyncio.Event()

    def attach(self, member: Member) -> None:
        """Use this membership; it must have been built with this object as its resident."""
        self._member = member

    # -- Resident ----------------------------------------------------------------------------------------

    def describe(self, info: WorkerInfo) -> WorkerInfo:
        return msgspec.structs.replace(info, state="ready", num_streams=len(self._attempts))

    def metrics_text(self) -> bytes:
        self._metrics.streams.set(len(self._attempts))
        return self._metrics.text()

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        match message:
            case Deltas(items):
                for delta in items:
                    attempt = self._attempts.get((delta.request_id, delta.epoch))
                    if attempt is not None and attempt.decode is peer:
                        attempt.queue.put_nowait(delta)
            case Assignment(request_id, epoch):
                waiting = self._routes.pop((request_id, epoch), None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case Abort(request_id, epoch):
                attempt = self._attempts.get((request_id, epoch))
                if attempt is not None and attempt.prefill is peer:
                    attempt.decode.send(PrefillLost(request_id, epoch))
            case _:
                peer.close(f"a gateway has no use for {type(message).__name__}")

    def on_peer_lost(self, peer: wire.Peer) -> None:
        for attempt in self._attempts.values():
            if attempt.decode is peer:
                attempt.queue.put_nowait(_Lost(peer.close_reason))
            elif attempt.prefill is peer and not attempt.has_tokens:
                attempt.decode.send(PrefillLost(attempt.request_id, attempt.epoch))

    def on_directory(self, directory: Directory) -> None:
        self._news.set()

    # -- Streams -----------------------------------------------------------------------------------------

    @property
    def member(self) -> Member:
        assert self._member is not None, "attach a membership first"
        return self._member

    @property
    def is_ready(self) -> bool:
        return bool(ready_workers(self.member.directory.workers, "decode"))

    async def run(self, request: Request, report: StreamReport) -> AsyncIterator[StreamEvent]:
        """See `Streams.run`."""
        # Workers know streams of many gateways, whose clients may choose equal request ids.
        request = msgspec.structs.replace(request, id=f"{request.id}@{self.member.me.incarnation:x}")
        output: list[int] = []
        avoid: list[int] = []
        epoch = 0
        while True:
            attempt: _Attempt | None = None
            async for found in self._begin(request, epoch, output, avoid, report):
                if isinstance(found, StreamEvent):
                    yield found
                else:
                    attempt = found
            assert attempt is not None
            finished = False
            try:
                async for event in self._follow(attempt, output, report):
                    if isinstance(event, _Lost):
                        break
                    finished = event.finish is not None
                    yield event
                if finished:
                    return
            finally:
                self._end(attempt, cancel=not finished)
            report.num_recoveries += 1
            self._metrics.recoveries.labels("decode_lost").inc()
            log.warning("stream_moved", request=request.id, epoch=epoch, emitted=len(output))
            if report.num_recoveries >= _MAX_CRASHES:
                yield StreamEvent(
                    (), finish="error", error="worker_crashed: the stream's workers died repeatedly"
                )
                return
            assert attempt.decode.identity is not None
            avoid.append(attempt.decode.identity.incarnation)
            epoch += 1

    # -- one attempt -------------------------------------------------------------------------------------

    async def _begin(
        self, request: Request, epoch: int, output: list[int], avoid: list[int], report: StreamReport
    ) -> AsyncIterator[StreamEvent | _Attempt]:
        """Find workers and start the attempt; waiting events until there is one."""
        limit = time.monotonic() + self._config.gateway.recovery_limit_s
        last_sign = time.monotonic()
        while True:
            self._news.clear()
            assignment = await self._assign(request, epoch, len(output), avoid)
            if assignment.decode is not None:
                try:
                    decode = await self.member.peer_to(assignment.decode)
                    break
                except WireError as error:
                    log.info("decode_unreachable", worker=assignment.decode.worker_id, error=str(error))
                    avoid.append(assignment.decode.incarnation)
            now = time.monotonic()
            if now > limit:
                waited = self._config.gateway.recovery_limit_s
                raise Unavailable(f"no decode worker became ready within {waited:.0f} s")
            if now - last_sign >= self._config.gateway.keepalive_s:
                last_sign = now
                yield StreamEvent(())
            try:
                await asyncio.wait_for(self._news.wait(), 0.25)
            except TimeoutError:
                continue
        attempt = _Attempt(request.id, epoch, decode)
        self._attempts[request.id, epoch] = attempt
        report.timeline.stamp("routed")
        report.decode_workers.append(assignment.decode.worker_id)
        report.draft_worker = assignment.draft.worker_id if assignment.draft is not None else ""
        report.prefill_worker = assignment.prefill.worker_id if assignment.prefill is not None else ""
        decode.send(
            Generate(request, epoch, tuple(output), assignment.prefill, assignment.draft, assignment.reason)
        )
        if assignment.prefill is not None:
            try:
                await self._start_prefill(request, attempt, output, assignment)
            except BaseException:  # the client left while the connection was made
                self._end(attempt, cancel=True)
                raise
        yield attempt

    async def _start_prefill(
        self, request: Request, attempt: _Attempt, output: list[int], assignment: Assignment
    ) -> None:
        assert assignment.prefill is not None and assignment.decode is not None
        try:
            attempt.prefill = await self.member.peer_to(assignment.prefill)
        except WireError:
            attempt.decode.send(PrefillLost(request.id, attempt.epoch))
            return
        tokens = (*request.prompt_ids, *output)
        attempt.prefill.send(
            Prefill(
                request.id,
                attempt.epoch,
                tokens,
                assignment.decode,
                request.priority,
                request.cache_salt,
            )
        )

    async def _assign(self, request: Request, epoch: int, num_output: int, avoid: list[int]) -> Assignment:
        """Ask the router; without one, apply the same policy to the last directory."""
        route = Route(
            request.id,
            epoch,
            len(request.prompt_ids) + num_output,
            request.speculate,
            tuple(avoid),
            request.needs_prompt_logits,
        )
        router = self.member.router
        if router is not None:
            waiting: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
            self._routes[request.id, epoch] = waiting
            router.send(route)
            try:
                return await asyncio.wait_for(waiting, _ROUTE_TIMEOUT_S)
            except TimeoutError:
                log.warning("router_slow", request=request.id)
            finally:
                self._routes.pop((request.id, epoch), None)
        workers = self.member.directory.workers
        return choose(route, workers, min_remote_tokens=self._config.kv.min_remote_tokens)

    async def _follow(
        self, attempt: _Attempt, output: list[int], report: StreamReport
    ) -> AsyncIterator[StreamEvent | _Lost]:
        """Events of one attempt until it finishes or is lost."""
        if not attempt.decode.is_open:
            yield _Lost(attempt.decode.close_reason)
            return
        while True:
            try:
                item = await asyncio.wait_for(attempt.queue.get(), self._config.gateway.keepalive_s)
            except TimeoutError:
                yield StreamEvent(())
                continue
            if isinstance(item, _Lost):
                yield item
                return
            if item.start != len(output):  # a defect of the decode worker: never pass on a gap or a repeat
                log.error(
                    "delta_out_of_order", request=item.request_id, start=item.start, expected=len(output)
                )
                yield _Lost("out of order")
                return
            self._record(attempt, item, report)
            output.extend(item.tokens)
            yield StreamEvent(
                item.tokens, item.sources, item.finish, item.error, item.logprobs, item.prompt_logprobs
            )
            if item.finish is not None:
                return

    @staticmethod
    def _record(attempt: _Attempt, delta: Delta, report: StreamReport) -> None:
        attempt.has_tokens = True
        report.num_steps += 1
        report.num_drafted += delta.num_drafted
        report.draft_version = delta.draft_version or report.draft_version
        if delta.kv_source:
            report.kv_sources.append(delta.kv_source)
            report.kv_bytes += delta.kv_bytes
        for source in delta.sources:
            name = SOURCE_NAMES[source]
            report.tokens_by_source[name] = report.tokens_by_source.get(name, 0) + 1

    def _end(self, attempt: _Attempt, *, cancel: bool) -> None:
        """Forget an attempt; unless it finished, tell its workers that nobody waits."""
        self._attempts.pop((attempt.request_id, attempt.epoch), None)
        if cancel:
            message = Cancel(attempt.request_id, attempt.epoch)
            attempt.decode.send(message)
            if attempt.prefill is not None:
                attempt.prefill.send(message)
