"""Streams, their prompts' KV and drafts -> committed tokens, one frame a step for each gateway.

The engine thread owns all state. A stream waits for its KV from a prefill worker; if that hand-off is dropped for
whatever reason, the stream computes its prompt here instead, and says so in its first tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import structlog
import torch

from paceline.cluster import wire
from paceline.cluster.config import model_folder
from paceline.cluster.controller import Controller
from paceline.cluster.errors import RequestError, WireError
from paceline.cluster.handoff import Handoff, HandoffState
from paceline.cluster.scheduler import Stream
from paceline.cluster.types import (
    Abort,
    Cancel,
    Commit,
    CommitAck,
    Credit,
    Delta,
    Deltas,
    Directory,
    Drafts,
    Generate,
    Grant,
    KVReady,
    Message,
    PrefillLost,
    Refuse,
    Reserve,
    WorkerInfo,
)
from paceline.workers.base import Worker
from paceline.workers.drafters.base import Context, Drafter, make
from paceline.workers.drafters.fused import FusedDrafter
from paceline.workers.drafters.remote import RemoteDrafter
from paceline.workers.engine import Emission, Engine
from paceline.workers.kv_cache import digest
from paceline.workers.kv_link import Arrival, LinkReceiver, LinkStore
from paceline.workers.model_runner import ModelRunner, load_runner
from paceline.workers.profile import measure_step_cost

log = structlog.get_logger(__name__)

_RETRY_S = 0.05
"""When a prefill worker may ask again for blocks, or for a stream this worker has not heard of yet."""


@dataclass(slots=True, eq=False)
class Session:
    """One attempt at a stream, with the two processes it concerns."""

    stream: Stream
    gateway: wire.Peer
    handoff: Handoff | None
    prefill_peer: wire.Peer | None = None
    kv_source: str = ""
    kv_reported: bool = False
    reserved_at: float = 0.0


class DecodeWorker(Worker):
    """Owns one engine, one link for each prefill worker, one mailbox of drafts."""

    role = "decode"
    _engine: Engine

    def load(self) -> None:
        decode = self.config.decode
        torch.set_num_threads(decode.threads)
        runner, reason = load_runner(
            model_folder(self.config.model.target),
            kv_memory_mb=decode.kv_memory_mb,
            block_size=self.config.kv.block_size,
        )
        log.info(
            "model_ready",
            worker=self.member.me.worker_id,
            forward=runner.path,
            num_blocks=runner.cache.num_blocks,
            reason=reason,
        )
        self.metrics.forward.labels(runner.path).set(1)
        self._engine = Engine(
            runner,
            token_budget=decode.token_budget,
            max_streams=decode.max_streams,
            max_context=self.config.limits.max_context,
            drafter=self._make_drafter(runner),
            metrics=self.metrics,
            prefix_cache=self.config.kv.prefix_cache,
        )
        self._sessions: dict[str, Session] = {}
        self._links: dict[int, LinkReceiver] = {}
        self._num_links = 0
        self._store = LinkStore(self.config.link.interface, self.config.link.timeout_s)

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
            self._controller = Controller(measure_step_cost(runner))
        return FusedDrafter(drafters, self._controller, metrics=self.metrics)

    # -- event loop's thread -----------------------------------------------------------------------------

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        if isinstance(message, Drafts):
            # Straight to the mailbox: the engine thread may be waiting for it.
            if self.state != "starting" and self._remote is not None and peer.identity is not None:
                self._remote.deliver(peer.identity.incarnation, message)
        else:
            super().on_message(peer, message)

    def on_directory(self, directory: Directory) -> None:
        if self.state == "ready" and self._remote is not None:
            remote = self._remote
            drafts = [w for w in directory.workers if w.role == "draft" and w.state == "ready"]
            self.post(lambda: remote.reroute((s.stream for s in self._sessions.values()), drafts))

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
        match message:
            case Generate():
                self._generate(peer, message)
            case Cancel(request_id, epoch):
                session = self._sessions.get(f"{request_id}/{epoch}")
                if session is not None:
                    self._forget(session, "cancelled")
            case PrefillLost(request_id, epoch):
                self._drop(self._sessions.get(f"{request_id}/{epoch}"), "prefill_lost")
            case Reserve():
                self._reserve(peer, message)
            case KVReady():
                self._announced(peer, message)
            case Commit(request_id, epoch):
                session = self._sessions.get(f"{request_id}/{epoch}")
                if session is None or session.handoff is None:
                    self.metrics.kv_refused.labels("no_handoff").inc()
                    return
                reason = session.handoff.note_commit(message)
                if reason:
                    self.metrics.kv_refused.labels(reason).inc()
                    self._drop(session, reason)
                else:
                    self._try_complete(session)
            case Abort(request_id, epoch, reason):
                self._drop(self._sessions.get(f"{request_id}/{epoch}"), reason)
            case _:
                self.soon(lambda: peer.close(f"a decode worker has no use for {type(message).__name__}"))

    def _generate(self, gateway: wire.Peer, message: Generate) -> None:
        request, epoch = message.request, message.epoch
        key = f"{request.id}/{epoch}"
        if key in self._sessions:
            return  # said twice
        for old in [s for s in self._sessions.values() if s.stream.request.id == request.id]:
            self._forget(old, "superseded")
        num_remote = len(request.prompt_ids) + len(message.resumed) - 1
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
        session = Session(stream, gateway, None, kv_source=f"local:{message.local_reason or 'assigned'}")
        if prefill is not None:
            session.kv_source = ""
            session.handoff = Handoff(
                request.id,
                epoch,
                prefill.worker_id,
                prefill.incarnation,
                num_remote,
                self._engine.runner.cache.layout.num_layers,
                time.monotonic() + self.config.link.first_reserve_s,
            )
        self._sessions[key] = session

    def peer_lost(self, peer: wire.Peer) -> None:
        if peer.identity is None:
            return
        incarnation = peer.identity.incarnation
        link = self._links.pop(incarnation, None)
        if link is not None:
            link.close()
        if self._remote is not None:
            self._remote.lost(incarnation)
        for session in list(self._sessions.values()):
            if session.gateway is peer:
                self._forget(session, "gateway_lost")
            elif session.handoff is not None and session.handoff.sender_incarnation == incarnation:
                self._drop(session, "prefill_lost")

    # -- engine thread: receiving KV ---------------------------------------------------------------------

    def _reserve(self, peer: wire.Peer, message: Reserve) -> None:
        session = self._sessions.get(f"{message.request_id}/{message.epoch}")
        if session is None or session.handoff is None:
            self._refuse(peer, message, "unknown_stream", _RETRY_S)
            return
        handoff = session.handoff
        if message.layout != self._engine.runner.cache.layout:
            self._refuse(peer, message, "layout", 0.0)
            self._drop(session, "layout")
            return
        refusal = handoff.refuses(message.epoch, message.sender_incarnation)
        if refusal:
            self._refuse(peer, message, refusal, 0.0)
            return
        if not self._engine.pool.try_extend(session.stream.key, message.num_tokens):
            self._refuse(peer, message, "no_blocks", _RETRY_S)
            return
        link = self._link_from(peer)
        refusal = handoff.reserve(message, link.key, self._lease())
        if refusal:
            self._refuse(peer, message, refusal, 0.0)
            self._drop(session, refusal)
            return
        session.prefill_peer = peer
        session.reserved_at = time.monotonic()
        peer.send_threadsafe(
            Grant(message.request_id, message.epoch, link.key, self._store.host, self._store.port)
        )

    def _refuse(self, peer: wire.Peer, message: Reserve, reason: str, retry_after_s: float) -> None:
        self.metrics.kv_refused.labels(reason).inc()
        peer.send_threadsafe(Refuse(message.request_id, message.epoch, reason, retry_after_s))

    def _link_from(self, peer: wire.Peer) -> LinkReceiver:
        """The usable link from this sender, or a fresh one under a key never used before."""
        assert peer.identity is not None
        sender = peer.identity.incarnation
        link = self._links.get(sender)
        if link is not None and link.is_usable:
            return link
        self._num_links += 1
        key = f"kv/{sender}/{self.member.me.incarnation}/{self._num_links}"
        config = self.config.link
        link = LinkReceiver(
            key,
            store=self._store,
            interface=config.interface,
            timeout_s=config.timeout_s,
            on_poisoned=lambda key, reason: self.post(lambda: self._link_poisoned(sender, key, reason)),
            on_arrival=lambda arrival: self.post(lambda: self._arrived(arrival)),
            send_credit=lambda seq: peer.send_threadsafe(Credit(key, seq)),
        )
        self._links[sender] = link
        self.metrics.kv_links.labels("opened").inc()
        link.start()
        return link

    def _link_poisoned(self, sender: int, key: str, reason: str) -> None:
        self.metrics.kv_links.labels("poisoned").inc()
        link = self._links.get(sender)
        if link is not None and link.key == key:
            del self._links[sender]
            link.close()
        for session in list(self._sessions.values()):
            if session.handoff is not None and session.handoff.link_key == key:
                self._drop(session, reason)

    def _announced(self, peer: wire.Peer, message: KVReady) -> None:
        """A message is ready at the sender: receive it, or say that nobody wants it."""
        session = self._sessions.get(f"{message.request_id}/{message.epoch}")
        assert peer.identity is not None
        link = self._links.get(peer.identity.incarnation)
        reason = "no_handoff"
        if session is not None and session.handoff is not None:
            reason = session.handoff.announce(message, self._lease())
        if not reason and (link is None or link.key != message.link_key):
            reason = "no_link"
        if reason:
            self.metrics.kv_refused.labels(reason).inc()
            peer.send_threadsafe(Credit(message.link_key, message.seq, accept=False))
            if reason not in ("no_handoff", "closed", "stale_epoch"):
                self._drop(session, reason)
            return
        assert link is not None
        layout = self._engine.runner.cache.layout
        shape = torch.Size((2, message.num_tokens, layout.num_kv_heads, layout.head_dim))
        link.expect(message, shape, self._engine.runner.cache.dtype)

    def _arrived(self, arrival: Arrival) -> None:
        """Into the pool, then check what the pool holds: the digest covers the scatter as well."""
        message = arrival.message
        session = self._sessions.get(f"{message.request_id}/{message.epoch}")
        if session is None or session.handoff is None or session.handoff.state is not HandoffState.STREAMING:
            return  # dropped meanwhile: the rows never touch the pool
        cache = self._engine.runner.cache
        table = self._engine.pool.table(session.stream.key)
        slots = cache.slots(table, message.start, message.start + message.num_tokens)
        cache.scatter(message.layer, slots, arrival.rows)
        stored = cache.gather(message.layer, slots)
        mark = digest(
            self.secrets.link, message.request_id, message.epoch, message.layer, message.start, stored
        )
        if mark != message.digest:
            self._drop(session, "digest")
            return
        session.handoff.arrived(stored.nbytes, self._lease())
        self.metrics.kv_bytes.labels("received").inc(stored.nbytes)
        self._try_complete(session)

    def _try_complete(self, session: Session) -> None:
        handoff = session.handoff
        assert handoff is not None
        if not handoff.try_complete() or not session.stream.is_blocked:
            return
        session.stream.num_computed = handoff.num_tokens
        session.stream.is_blocked = False
        session.kv_source = "link"
        self.metrics.handoff_seconds.observe(time.monotonic() - session.reserved_at)
        if session.prefill_peer is not None:
            session.prefill_peer.send_threadsafe(CommitAck(handoff.request_id, handoff.epoch, True))

    def _drop(self, session: Session | None, reason: str) -> None:
        """Give up on receiving this prompt's KV and compute it here."""
        if session is None or session.handoff is None or not session.handoff.drop(reason):
            return
        handoff, stream = session.handoff, session.stream
        log.warning("kv_recomputed", request=handoff.request_id, epoch=handoff.epoch, reason=reason)
        self.metrics.kv_drops.labels(reason).inc()
        self._engine.pool.free(stream.key)
        stream.restart()
        stream.is_blocked = False
        session.kv_source = f"local:{reason}"
        if session.prefill_peer is not None:
            session.prefill_peer.send_threadsafe(Abort(handoff.request_id, handoff.epoch, reason))

    def _lease(self) -> float:
        return time.monotonic() + self.config.link.lease_s

    def tick(self) -> None:
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if session.handoff is not None and session.handoff.is_open and now > session.handoff.deadline:
                self._drop(session, "lease")

    # -- engine thread: stepping -------------------------------------------------------------------------

    def has_work(self) -> bool:
        return self._engine.has_work

    def step(self) -> bool:
        frames: dict[wire.Peer, list[Delta]] = {}
        result = self._engine.step()
        for emission in result.emissions:
            session = self._sessions[emission.stream.key]
            delta = self._delta(session, emission)
            if delta.prompt_logprobs is None:
                frames.setdefault(session.gateway, []).append(delta)
            else:  # megabytes: several in one frame could exceed what a frame may hold
                session.gateway.send_threadsafe(Deltas((delta,)))
            if emission.finish is not None:
                del self._sessions[emission.stream.key]
        for gateway, deltas in frames.items():
            gateway.send_threadsafe(Deltas(tuple(deltas)))
        return result.num_rows > 0

    def _delta(self, session: Session, emission: Emission) -> Delta:
        kv_source, kv_bytes = "", 0
        if not session.kv_reported:
            session.kv_reported = True
            kv_source = session.kv_source
            kv_bytes = session.handoff.num_bytes if session.handoff is not None else 0
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
        )

    def _forget(self, session: Session, reason: str) -> None:
        """End a session nobody waits for; its blocks are free when this returns."""
        handoff = session.handoff
        if handoff is not None and handoff.drop(reason) and session.prefill_peer is not None:
            session.prefill_peer.send_threadsafe(Abort(handoff.request_id, handoff.epoch, reason))
        self._sessions.pop(session.stream.key, None)
        self._engine.remove(session.stream)

    # -- figures -----------------------------------------------------------------------------------------

    def metrics_text(self) -> bytes:
        if self.state != "starting" and self._controller is not None:
            for source, error in self._controller.calibration_errors().items():
                self.metrics.calibration_error.labels(source).set(error)
        return super().metrics_text()

    def num_streams(self) -> int:
        return len(self._sessions) if self.state != "starting" else 0

    def blocks(self) -> tuple[int, int]:
        return (
            (self._engine.pool.num_used, self._engine.pool.num_free) if self.state != "starting" else (0, 0)
        )

    def version(self) -> str:
        return self._engine.runner.version if self.state != "starting" else ""
