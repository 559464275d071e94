"""Request -> workers chosen, attempts followed, deltas in order: the cluster behind the gateway's `Streams`.

The gateway keeps the token ids of every open stream. When a decode worker dies, the stream becomes a new attempt
(epoch + 1) on another worker, which starts from prompt and output; keyed noise makes it continue with the same text.
The router is told whom each attempt keeps busy, and of requests that crash workers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from paceline.cluster import failpoints, wire
from paceline.cluster.admission import Quarantine, request_digest
from paceline.cluster.config import ClusterConfig
from paceline.cluster.errors import Overloaded, RequestError, Unavailable, WireError
from paceline.cluster.gateway.crashes import CrashRecord
from paceline.cluster.gateway.known_keys import KnownKeys
from paceline.cluster.gateway.limits import RouterCounter
from paceline.cluster.gateway.streams import StreamEvent, StreamReport
from paceline.cluster.membership import Member
from paceline.cluster.metrics import Metrics
from paceline.cluster.prefixes import prefix_marks
from paceline.cluster.router import Policy, candidates, choose, ready_workers
from paceline.cluster.types import (
    NO_PROBATION,
    NO_ROOM,
    NO_WORKER,
    QUARANTINED,
    Abort,
    Admitted,
    Assignment,
    Cancel,
    Delta,
    Deltas,
    Directory,
    Generate,
    KeySet,
    Message,
    Prefill,
    PrefillLost,
    Progress,
    Request,
    Route,
    State,
    WorkerInfo,
)
from paceline.cluster.types import Quarantine as QuarantineNotice

log = structlog.get_logger(__name__)

_ROUTE_TIMEOUT_S = 1.0
"""For a router that is connected but does not answer; one whose connection ends is not waited for."""
_NEWS_TIMEOUT_S = 0.25
"""A stream without a worker asks again this often, whatever the directory says."""
_BLIND_RETRY_S = 2.0
"""What those turned away while there is no router are told: nobody measures."""


@dataclass(frozen=True, slots=True)
class _Lost:
    """Put into an attempt's queue when its decode worker is gone, or gives the stream back."""

    reason: str
    is_crash: bool = True


@dataclass(slots=True, eq=False)
class _Attempt:
    """One epoch of one stream."""

    request_id: str
    epoch: int
    decode: wire.Peer
    busy: Progress
    """Whom it keeps busy, as the router should know it."""
    prefill: wire.Peer | None = None
    queue: asyncio.Queue[Delta | _Lost] = field(default_factory=asyncio.Queue)
    has_tokens: bool = False


@dataclass(slots=True, eq=False)
class _StreamState:
    """One stream, over all its attempts."""

    request: Request
    digest: bytes
    """What it asks for, see `request_digest`."""
    output: list[int] = field(default_factory=list)
    avoid: list[int] = field(default_factory=list)
    """Incarnations that failed it, or are about to end."""
    crashes: CrashRecord = field(default_factory=CrashRecord)
    epoch: int = 0


def _worker_crashed(message: str) -> RequestError:
    return RequestError(message, code="worker_crashed", status=500)


class ClusterStreams:
    """`Streams` over the framed connections; also the `Resident` of a gateway process."""

    def __init__(self, config: ClusterConfig, metrics: Metrics, *, keys: KnownKeys | None = None) -> None:
        """`keys`: told of every key that Control has, where keys are asked for."""
        self._config = config
        self._keys = keys
        self.counter = RouterCounter(
            router=lambda: self.member.router,
            num_gateways=lambda: sum(w.role == "gateway" for w in self.member.directory.workers),
        )
        """Of requests of keys that have limits."""
        self._policy = Policy.of(config)
        self._metrics = metrics
        self._member: Member | None = None
        self._attempts: dict[tuple[str, int], _Attempt] = {}
        self._routes: dict[tuple[str, int], asyncio.Future[Assignment | None]] = {}
        """What the router was asked; None is its end."""
        self._news = asyncio.Event()
        self._num_waiting = 0
        self._num_decodes = config.decode.replicas
        """As many as there ever were: their number may change without a restart of gateways."""
        self._num_runs = 0
        self._quarantine = Quarantine()
        self._told: wire.Peer | None = None
        """The router that knows of all attempts."""
        self._has_given_notice = False
        self._is_draining = False

    def attach(self, member: Member) -> None:
        """Use this membership; it must have been built with this object as its resident."""
        self._member = member

    def give_notice(self) -> None:
        """Not be ready any more, for whoever asks; everything is served as before."""
        self._has_given_notice = True

    def drain(self) -> None:
        """Nobody comes any more, since the listener is closed; what runs goes on."""
        self._is_draining = True
        self.member.announce()

    # -- Resident ----------------------------------------------------------------------------------------

    def describe(self, info: WorkerInfo) -> WorkerInfo:
        return msgspec.structs.replace(info, state=self._state, num_streams=len(self._attempts))

    @property
    def _state(self) -> State:
        return "draining" if self._is_draining else "ready"

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
            case Admitted():
                self.counter.on_answer(message)
            case KeySet(keys):
                if self._keys is not None:
                    self._keys.tell(keys)
            case Abort(request_id, epoch, reason):
                attempt = self._attempts.get((request_id, epoch))
                if attempt is not None and attempt.decode is peer:
                    attempt.queue.put_nowait(_Lost(reason, is_crash=False))
                elif attempt is not None and attempt.prefill is peer:
                    attempt.decode.send(PrefillLost(request_id, epoch))
            case _:
                peer.close(f"a gateway has no use for {type(message).__name__}")

    def on_peer_lost(self, peer: wire.Peer) -> None:
        if self.member.router is None:
            self.counter.on_router_lost()
            for waiting in self._routes.values():
                if not waiting.done():
                    waiting.set_result(None)
        is_crash = not self._is_leaving(peer)
        for attempt in self._attempts.values():
            if attempt.decode is peer:
                attempt.queue.put_nowait(_Lost(peer.close_reason, is_crash))
            elif attempt.prefill is peer and not attempt.has_tokens:
                attempt.decode.send(PrefillLost(attempt.request_id, attempt.epoch))

    def _is_leaving(self, peer: wire.Peer) -> bool:
        """It said that it would: a worker that drains closes its connections in the end."""
        return any(
            peer.identity == wire.Identity(w.worker_id, w.incarnation) and w.state == "draining"
            for w in self.member.directory.workers
        )

    def on_directory(self, directory: Directory) -> None:
        self._num_decodes = max(self._num_decodes, sum(w.role == "decode" for w in directory.workers))
        self._news.set()
        router = self.member.router
        if router is not None and router is not self._told:
            self._told = router
            for attempt in self._attempts.values():
                router.send(attempt.busy)
            self.counter.on_router(router)
            digests = self._quarantine.living(time.monotonic())
            if digests:
                router.send(QuarantineNotice(digests))

    def reports(self) -> Sequence[Message]:
        return ()

    def _tell(self, message: Progress | QuarantineNotice) -> None:
        """The router, if there is one; another will be told by `on_directory`."""
        if self.member.router is not None:
            self.member.router.send(message)

    # -- Streams -----------------------------------------------------------------------------------------

    @property
    def member(self) -> Member:
        assert self._member is not None, "attach a membership first"
        return self._member

    @property
    def is_ready(self) -> bool:
        is_staying = not (self._is_draining or self._has_given_notice)
        return is_staying and bool(ready_workers(self.member.directory.workers, "decode"))

    async def run(self, request: Request, report: StreamReport) -> AsyncIterator[StreamEvent]:
        """See `Streams.run`."""
        # Workers know streams of many gateways, whose clients may choose equal request ids, or one id twice: what is
        # still on its way for a stream must never reach another.
        self._num_runs += 1
        place = f"{self.member.me.incarnation:x}.{self._num_runs}"
        request = msgspec.structs.replace(request, id=f"{request.id}@{place}")
        state = _StreamState(request, request_digest(request))
        if self._quarantine.holds(state.digest, time.monotonic()):
            raise self._quarantined()
        finished = False
        try:
            while True:
                attempt: _Attempt | None = None
                async for found in self._begin(state, report):
                    if isinstance(found, StreamEvent):
                        yield found
                    else:
                        attempt = found
                assert attempt is not None
                lost: _Lost | None = None
                try:
                    async for event in self._follow(attempt, state.output, report):
                        if isinstance(event, _Lost):
                            lost = event
                            break
                        finished = event.finish is not None
                        yield event
                    if finished:
                        return
                finally:
                    self._end(attempt, cancel=not finished)
                assert lost is not None
                report.num_recoveries += 1
                self._metrics.recoveries.labels("decode_lost" if lost.is_crash else "handed_over").inc()
                log.warning(
                    "stream_moved",
                    request=request.id,
                    epoch=state.epoch,
                    emitted=len(state.output),
                    reason=lost.reason,
                )
                await self._prepare_next(state, attempt, lost)
        finally:
            if not finished:  # the router may have counted a stream that never began, or keep a worker for it
                self._tell(Progress(request.id, state.epoch))

    async def _prepare_next(self, state: _StreamState, attempt: _Attempt, lost: _Lost) -> None:
        """After a lost attempt: the next epoch, after a pause if it was a crash.

        Raises:
            RequestError: there is no next one.
        """
        assert attempt.decode.identity is not None
        state.avoid.append(attempt.decode.identity.incarnation)
        state.epoch += 1
        if not lost.is_crash:
            return
        crashes = state.crashes
        crashes.crashed(len(state.output))
        if crashes.is_poison:
            log.error("request_quarantined", request=state.request.id, digest=state.digest.hex())
            self._quarantine.add(state.digest, time.monotonic())
            self._tell(QuarantineNotice((state.digest,)))
            raise _worker_crashed("its workers died repeatedly; the same request is not accepted for a while")
        if crashes.is_spent:
            raise _worker_crashed("its workers died repeatedly")
        await asyncio.sleep(crashes.pause_s())

    def _quarantined(self) -> RequestError:
        self._metrics.turned_away.labels("quarantined").inc()
        return _worker_crashed("this request ended several workers; it is not accepted for a while")

    # -- one attempt -------------------------------------------------------------------------------------

    async def _begin(
        self, state: _StreamState, report: StreamReport
    ) -> AsyncIterator[StreamEvent | _Attempt]:
        """Find workers and start the attempt; waiting events until there is one.

        Raises:
            Overloaded: there is no room, and nothing was done for this request yet.
            Unavailable: no worker came within the recovery limit.
            RequestError: the request is quarantined.
        """
        request, epoch, output = state.request, state.epoch, state.output
        tokens = (*request.prompt_ids, *output) if output else request.prompt_ids
        kv = self._config.kv
        marks = prefix_marks(tokens, kv.block_size, request.cache_salt) if kv.prefix_cache else b""
        route = Route(
            request.id,
            epoch,
            len(tokens),
            request.speculate,
            tuple(state.avoid),
            request.needs_prompt_logits,
            marks,
            is_new=epoch == 0,
            digest=state.digest,
            alone=state.crashes.is_suspect,
        )
        limit = time.monotonic() + self._config.gateway.recovery_limit_s
        last_sign = time.monotonic()
        while True:
            self._news.clear()
            assignment = await self._assign(route)
            if assignment.decode is not None:
                try:
                    decode = await self.member.peer_to(assignment.decode)
                    break
                except WireError as error:
                    log.info("decode_unreachable", worker=assignment.decode.worker_id, error=str(error))
                    state.avoid.append(assignment.decode.incarnation)
                    self._tell(Progress(request.id, epoch))
            self._check_refusal(route, assignment)
            if assignment.reason == NO_WORKER:  # what failed it may be all there is, and well again
                state.avoid.clear()
            route = msgspec.structs.replace(route, is_new=False, avoid=tuple(state.avoid))
            now = time.monotonic()
            if assignment.reason == NO_PROBATION:  # there are workers: its turn will come
                limit = now + self._config.gateway.recovery_limit_s
            if now > limit:
                waited = self._config.gateway.recovery_limit_s
                raise Unavailable(f"no decode worker became ready within {waited:.0f} s")
            if now - last_sign >= self._config.gateway.keepalive_s:
                last_sign = now
                yield StreamEvent(())
            await self._wait_for_news()
        yield await self._start(state, decode, assignment, report)

    def _check_refusal(self, route: Route, assignment: Assignment) -> None:
        """Turn a stream away that shall not wait: by the router's word, or because too many wait here already."""
        if assignment.reason == QUARANTINED:
            raise self._quarantined()
        if not route.is_new:
            return
        if assignment.reason == NO_ROOM:
            self._metrics.turned_away.labels("no_room").inc()
            raise Overloaded("all workers are busy and their queues are full", assignment.retry_after_s)
        if self._num_waiting >= self._num_decodes * self._policy.max_streams:
            self._metrics.turned_away.labels("no_worker").inc()
            raise Overloaded("too many requests wait for a worker already", _BLIND_RETRY_S)

    async def _wait_for_news(self) -> None:
        self._num_waiting += 1
        try:
            async with asyncio.timeout(_NEWS_TIMEOUT_S):
                await self._news.wait()
        except TimeoutError:
            return
        finally:
            self._num_waiting -= 1

    async def _start(
        self, state: _StreamState, decode: wire.Peer, assignment: Assignment, report: StreamReport
    ) -> _Attempt:
        """Send the stream to the workers it was given."""
        request, epoch = state.request, state.epoch
        assert assignment.decode is not None
        prefill = assignment.prefill.incarnation if assignment.prefill is not None else 0
        num_prefill = len(request.prompt_ids) + len(state.output) - 1
        busy = Progress(request.id, epoch, assignment.decode.incarnation, prefill, num_prefill)
        attempt = _Attempt(request.id, epoch, decode, busy)
        self._attempts[request.id, epoch] = attempt
        self._tell(busy)  # the router knows it already, unless this one answered too late or is new
        report.timeline.stamp("routed")
        report.decode_workers.append(assignment.decode.worker_id)
        report.draft_worker = assignment.draft.worker_id if assignment.draft is not None else ""
        report.prefill_worker = assignment.prefill.worker_id if assignment.prefill is not None else ""
        output = tuple(state.output)
        decode.send(Generate(request, epoch, output, assignment.prefill, assignment.draft, assignment.reason))
        if assignment.prefill is not None:
            try:
                await self._start_prefill(request, attempt, state.output, assignment)
            except BaseException:  # the client left while the connection was made
                self._end(attempt, cancel=True)
                raise
        return attempt

    async def _start_prefill(
        self, request: Request, attempt: _Attempt, output: list[int], assignment: Assignment
    ) -> None:
        assert assignment.prefill is not None and assignment.decode is not None
        try:
            prefill = await self.member.peer_to(assignment.prefill)
        except WireError:
            attempt.decode.send(PrefillLost(request.id, attempt.epoch))
            return
        attempt.prefill = prefill
        tokens = (*request.prompt_ids, *output)
        prefill.send(
            Prefill(
                request.id, attempt.epoch, tokens, assignment.decode, request.priority, request.cache_salt
            )
        )

    async def _assign(self, route: Route) -> Assignment:
        """Ask the router; without one, apply the same policy to the last directory."""
        router = self.member.router
        assignment = await self._ask(router, route) if router is not None else None
        if assignment is not None:
            return assignment
        self._metrics.blind_routes.inc()
        workers = self.member.directory.workers
        streams = {w.incarnation: w.num_streams for w in workers}
        own = Counter(attempt.busy.decode for attempt in self._attempts.values())
        for incarnation, num in own.items():
            streams[incarnation] = max(num, streams.get(incarnation, 0))
        assignment = choose(route, candidates(workers, streams), self._policy)
        return msgspec.structs.replace(assignment, retry_after_s=_BLIND_RETRY_S)

    async def _ask(self, router: wire.Peer, route: Route) -> Assignment | None:
        """The router's answer; None if it died or takes too long."""
        key = route.request_id, route.epoch
        waiting: asyncio.Future[Assignment | None] = asyncio.get_running_loop().create_future()
        self._routes[key] = waiting
        router.send(route)
        try:
            async with asyncio.timeout(_ROUTE_TIMEOUT_S):
                return await waiting
        except TimeoutError:
            log.warning("router_slow", request=route.request_id)
            return None
        finally:
            self._routes.pop(key, None)

    async def _follow(
        self, attempt: _Attempt, output: list[int], report: StreamReport
    ) -> AsyncIterator[StreamEvent | _Lost]:
        """Events of one attempt until it finishes or is lost."""
        if not attempt.decode.is_open:
            yield _Lost(attempt.decode.close_reason)
            return
        while True:
            try:
                # Not wait_for: until Python 3.12 it can swallow a cancellation that comes together with an item.
                async with asyncio.timeout(self._config.gateway.keepalive_s):
                    items = [await attempt.queue.get()]
            except TimeoutError:
                yield StreamEvent(())
                continue
            while (
                not attempt.queue.empty()
            ):  # we are behind: several steps become one event, one frame, one write
                items.append(attempt.queue.get_nowait())
            for event in self._events(attempt, items, output, report):
                yield event
                if isinstance(event, _Lost) or event.finish is not None:
                    return

    def _events(
        self, attempt: _Attempt, items: Sequence[Delta | _Lost], output: list[int], report: StreamReport
    ) -> Iterator[StreamEvent | _Lost]:
        """As few events as say what these items do."""
        waiting: StreamEvent | None = None
        for item in items:
            if isinstance(item, Delta) and item.start == len(output):
                if failpoints.enabled:
                    failpoints.hit("mid_stream", attempt.request_id)
                self._record(attempt, item, report)
                output.extend(item.tokens)
                event = StreamEvent(
                    item.tokens, item.sources, item.finish, item.error, item.logprobs, item.prompt_logprobs
                )
                both = waiting.joined(event) if waiting is not None else event
                if both is None and waiting is not None:
                    yield waiting
                waiting = both or event
                if item.finish is not None:
                    break
                continue
            if waiting is not None:
                yield waiting
            if isinstance(item, Delta):  # a defect of the decode worker: never pass on a gap or a repeat
                log.error(
                    "delta_out_of_order", request=item.request_id, start=item.start, expected=len(output)
                )
                item = _Lost("out of order")
            yield item
            return
        if waiting is not None:
            yield waiting

    def _record(self, attempt: _Attempt, delta: Delta, report: StreamReport) -> None:
        if not attempt.has_tokens and attempt.busy.prefill:  # the prompt's KV is there
            attempt.busy = Progress(attempt.request_id, attempt.epoch, attempt.busy.decode)
            self._tell(attempt.busy)
        attempt.has_tokens = True
        report.count_step(delta.sources, delta.num_drafted)
        report.draft_version = delta.draft_version or report.draft_version
        if delta.kv_source:
            report.kv_sources.append(delta.kv_source)
            report.kv_bytes += delta.kv_bytes
            report.kv_skipped_tokens += delta.kv_skipped_tokens
            report.kv_exposed_s += delta.kv_exposed_s
            report.queued_s += delta.queued_s

    def _end(self, attempt: _Attempt, *, cancel: bool) -> None:
        """Forget an attempt; unless it finished, tell its workers that nobody waits."""
        if self._attempts.pop((attempt.request_id, attempt.epoch), None) is not None:
            self._tell(Progress(attempt.request_id, attempt.epoch))
        if cancel:
            message = Cancel(attempt.request_id, attempt.epoch)
            attempt.decode.send(message)
            if attempt.prefill is not None:
                attempt.prefill.send(message)
