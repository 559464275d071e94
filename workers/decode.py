"""Streams, their prompts' KV and drafts -> committed tokens, one frame a step for each gateway.

The engine thread owns all state. A stream waits for its KV from a prefill worker; if that hand-off is dropped for
whatever reason, the stream computes its prompt here instead, and says so in its first tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from paceline.cluster import failpoints, wire
from paceline.cluster.controller import Controller
from paceline.cluster.errors import RequestError, WireError
from paceline.cluster.referee import Asked, Referee
from paceline.cluster.scheduler import Stream
from paceline.cluster.types import (
    Abort,
    Cancel,
    Commit,
    Delta,
    Deltas,
    Directory,
    Drafts,
    Generate,
    KVReady,
    Message,
    PrefillLost,
    Reserve,
    WorkerInfo,
)
from paceline.workers.base import Worker
from paceline.workers.capture import Recorder
from paceline.workers.drafters.base import Context, Drafter, make
from paceline.workers.drafters.fused import FusedDrafter, choices
from paceline.workers.drafters.remote import RemoteDrafter
from paceline.workers.engine import Emission, Engine, StepResult
from paceline.workers.kv_receive import HandoffReceiver, Incoming
from paceline.workers.model_runner import ModelRunner
from paceline.workers.profile import measure_step_cost
from paceline.workers.served import ServedBook, StreamFigures

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Session:
    """One attempt at a stream, with the two processes it concerns."""

    stream: Stream
    gateway: wire.Peer
    incoming: Incoming | None
    """Its prompt's KV, if a prefill worker was chosen to compute it."""
    local_reason: str = ""
    """Why none was."""
    kv_reported: bool = False
    figures: StreamFigures = field(default_factory=StreamFigures)


class DecodeWorker(Worker):
    """Owns one engine, one link for each prefill worker, one mailbox of drafts."""

    role = "decode"
    _engine: Engine

    def load(self) -> None:
        decode = self.config.decode
        runner = self.load_model(
            self.config.model.target, decode, int8_weights=self.config.model.int8_weights, tp=decode.tp
        )
        self._served = ServedBook() if self.config.learning.enabled else None  # nobody else reads it
        self._capture = Recorder.of(
            self.config.learning,
            self.member.me.worker_id,
            target_version=runner.version,
            vocab_size=runner.vocab_size,
            metrics=self.metrics,
        )
        self._engine = Engine(
            runner,
            token_budget=decode.token_budget,
            max_streams=decode.max_streams,
            max_context=self.config.limits.max_context,
            drafter=self._make_drafter(runner),
            metrics=self.metrics,
            prefix_cache=self.config.kv.prefix_cache,
            capture=self._capture,
            compares_drafts=self._served is not None,
        )
        self._undelivered: StepResult | None = None
        """What the last step emitted, until its gateways are told."""
        if runner.decides:
            self._engine.meanwhile = self._deliver
        if self._capture is not None:
            self._capture.start()
        self._sessions: dict[str, Session] = {}
        self._receiver = HandoffReceiver(
            self._engine,
            me=self.member.me,
            link=self.config.link,
            min_remote_tokens=self.config.kv.min_remote_tokens,
            metrics=self.metrics,
            post=self.post,
            codec=self.config.kv.codec,
            ranks=self.ranks,
        )

    def _make_drafter(self, runner: ModelRunner) -> Drafter | None:
        """What the configuration asks for; step times are measured before anything is in the pool."""
        speculation = self.config.speculation
        self._controller: Controller | None = None
        self._remote: RemoteDrafter | None = None
        if not speculation.enabled:
            return None
        context = Context(runner, speculation, self.metrics, self._connect_draft)
        drafters = [make(name, context) for name in speculation.sources]
        self._remote = next((d for d in drafters if isinstance(d, RemoteDrafter)), None)
        if speculation.control == "measured":
            self._controller = Controller(measure_step_cost(runner), referee=Referee(choices(drafters)))
        return FusedDrafter(drafters, self._controller, metrics=self.metrics)

    # -- event loop's thread -----------------------------------------------------------------------------

    def on_others(self, peer: wire.Peer, message: Message) -> None:
        if isinstance(message, Drafts):
            # Straight to the mailbox: the engine thread may be waiting for it.
            if self.state != "starting" and self._remote is not None and peer.identity is not None:
                self._remote.deliver(peer.identity.incarnation, message)
        elif isinstance(message, Commit):
            received_at = time.monotonic()
            self.post(lambda: self._receiver.committed(peer, message, received_at))
        else:
            super().on_others(peer, message)

    def on_directory(self, directory: Directory) -> None:
        if self.state == "ready" and self._remote is not None:
            remote = self._remote
            drafts = [w for w in directory.workers if w.role == "draft"]

            def reroute() -> None:
                self._deliver()  # a stream that has ended must not be opened again
                remote.reroute((s.stream for s in self._sessions.values()), drafts)

            self.post(reroute)

    def _connect_draft(self, worker: WorkerInfo) -> None:
        """Open the connection to a draft worker; asked for on the engine thread."""
        assert self._remote is not None
        remote = self._remote

        async def connect() -> None:
            try:
                peer = await self.member.peer_to(worker)
            except WireError as error:
                log.info("draft_unreachable", worker=worker.worker_id, error=str(error))
                self.post(lambda: remote.lost(worker.incarnation))
                return
            self.post(lambda: remote.connected(worker, peer))

        self.soon(lambda: self.spawn(connect()))

    # -- engine thread: messages -------------------------------------------------------------------------

    def handle(self, peer: wire.Peer, message: Message) -> None:
        self._deliver()
        match message:
            case Generate():
                self._generate(peer, message)
            case Cancel(request_id, epoch):
                session = self._sessions.get(f"{request_id}/{epoch}")
                if session is not None:
                    self._forget(session, "cancelled")
            case PrefillLost(request_id, epoch):
                self._receiver.aborted(request_id, epoch, "prefill_lost")
            case Abort(request_id, epoch, reason):
                self._receiver.aborted(request_id, epoch, reason)
            case Reserve():
                self._receiver.reserve(peer, message)
            case KVReady():
                self._receiver.announced(peer, message)
            case _:
                self.soon(lambda: peer.close(f"a decode worker has no use for {type(message).__name__}"))

    def _generate(self, gateway: wire.Peer, message: Generate) -> None:
        request, epoch = message.request, message.epoch
        key = f"{request.id}/{epoch}"
        if key in self._sessions:
            return  # said twice
        for old in [s for s in self._sessions.values() if s.stream.request.id == request.id]:
            self._forget(old, "superseded")
        prefill = None if request.needs_prompt_logits else message.prefill
        if self._remote is not None and message.draft is not None and request.speculate:
            self._remote.route(key, message.draft)
        try:
            stream = self._engine.add(
                request, epoch=epoch, resumed=message.resumed, blocked=prefill is not None
            )
        except RequestError as error:
            if self._remote is not None:
                self._remote.unroute(key)
            start = len(message.resumed)
            delta = Delta(request.id, epoch, start, (), b"", finish="error", error=str(error))
            gateway.send_threadsafe(Deltas((delta,)))
            return
        incoming = self._receiver.expect(stream, prefill) if prefill is not None else None
        session = Session(stream, gateway, incoming, message.local_reason or "assigned")
        self._sessions[key] = session

    def peer_lost(self, peer: wire.Peer) -> None:
        self._deliver()
        if peer.identity is None:
            return
        incarnation = peer.identity.incarnation
        if self._remote is not None:
            self._remote.lost(incarnation)
        for session in list(self._sessions.values()):
            if session.gateway is peer:
                self._forget(session, "gateway_lost")
        self._receiver.peer_lost(peer)

    def tick(self) -> None:
        self._receiver.tick()

    # -- engine thread: stepping -------------------------------------------------------------------------

    def has_work(self) -> bool:
        return self._engine.has_work

    def step(self) -> bool:
        result = self._engine.step()
        self._deliver()  # what a step without a forward did not
        self._undelivered = result
        if self._engine.meanwhile is None or not self._engine.has_work:
            self._deliver()
        if failpoints.enabled:
            failpoints.hit("mid_stream", *(e.stream.request.id for e in result.emissions if e.finish is None))
        return result.num_rows > 0

    def _deliver(self) -> None:
        """The last step's tokens to their gateways.

        Where the forward runs on a device that is done while the next one runs; before anything else is done to a
        session in any case.
        """
        result, self._undelivered = self._undelivered, None
        if result is None:
            return
        frames: dict[wire.Peer, list[Delta]] = {}
        now = time.monotonic()
        for emission in result.emissions:
            session = self._sessions[emission.stream.key]
            if self._served is not None:
                session.figures.add(emission, now)
            delta = self._delta(session, emission)
            if delta.prompt_logprobs is None:
                frames.setdefault(session.gateway, []).append(delta)
            else:  # megabytes: several in one frame could exceed what a frame may hold
                session.gateway.send_threadsafe(Deltas((delta,)))
            if emission.finish is not None:
                del self._sessions[emission.stream.key]
                self._ended(session, emission.finish)
        for gateway, deltas in frames.items():
            gateway.send_threadsafe(Deltas(tuple(deltas)))

    def _delta(self, session: Session, emission: Emission) -> Delta:
        kv_source, kv_bytes, num_skipped, exposed_s, queued_s = "", 0, 0, 0.0, 0.0
        if not session.kv_reported:
            session.kv_reported = True
            kv_source, queued_s = f"local:{session.local_reason}", emission.stream.queued_s
            if (incoming := session.incoming) is not None:
                kv_source, kv_bytes = incoming.source, incoming.handoff.num_bytes
                num_skipped, exposed_s = incoming.num_skipped, incoming.exposed_s
            self.metrics.kv_prompts.labels(kv_source).inc()
        stream = emission.stream
        return Delta(
            stream.request.id,
            stream.epoch,
            emission.start,
            emission.tokens,
            emission.sources,
            emission.num_drafted,
            emission.finish,
            kv_source,
            kv_bytes,
            emission.draft_version,
            emission.error,
            emission.logprobs,
            emission.prompt_logprobs,
            num_skipped,
            exposed_s,
            queued_s,
        )

    def hand_over(self) -> None:
        self._deliver()
        for session in list(self._sessions.values()):
            stream = session.stream
            session.gateway.send_threadsafe(Abort(stream.request.id, stream.epoch, "draining"))
            self._forget(session, "draining")

    def _forget(self, session: Session, reason: str) -> None:
        """End a session nobody waits for; its blocks are free when this returns."""
        if session.incoming is not None:
            self._receiver.forget(session.incoming, reason)
        self._sessions.pop(session.stream.key, None)
        self._engine.remove(session.stream)
        self._ended(session, reason)

    def _ended(self, session: Session, reason: str) -> None:
        stream = session.stream
        log.info(
            "stream_ended",
            request=stream.request.id,
            epoch=stream.epoch,
            tokens=stream.num_output,
            reason=reason,
        )
        if self._served is not None and session.figures.num_tokens:
            self._served.add(session.figures.summary(session.stream))

    async def close(self) -> None:
        await super().close()
        if self.state != "starting":
            self._receiver.close()
            if self._capture is not None:
                await asyncio.to_thread(self._capture.stop)

    def reports(self) -> Sequence[Message]:
        if self.state == "starting" or self._served is None:
            return ()
        return self._served.take(self.member.me.worker_id)

    # -- figures -----------------------------------------------------------------------------------------

    def metrics_text(self) -> bytes:
        if self.state != "starting" and self._controller is not None:
            for source, error in self._controller.calibration_errors().items():
                self.metrics.calibration_error.labels(source).set(error)
            cost = self._controller.cost
            for rows, seconds in zip(cost.rows.astype(int).tolist(), cost(cost.rows).tolist(), strict=True):
                self.metrics.step_cost.labels(rows).set(seconds)
            referee = self._controller.referee
            for streams, (gain, asked) in (referee.gains() if referee is not None else {}).items():
                self.metrics.draft_gain.labels(streams).set(gain)
                self.metrics.draft_off.labels(streams).set(asked == Asked.NOBODY)
                self.metrics.draft_models_off.labels(streams).set(asked < Asked.EVERYBODY)
        return super().metrics_text()

    def num_streams(self) -> int:
        return len(self._sessions) if self.state != "starting" else 0

    def num_waiting(self) -> int:
        return self._engine.num_waiting if self.state != "starting" else 0

    def blocks(self) -> tuple[int, int]:
        return (
            (self._engine.pool.num_used, self._engine.pool.num_free) if self.state != "starting" else (0, 0)
        )

    def version(self) -> str:
        return self._engine.runner.version if self.state != "starting" else ""
