"""Reserve, KVReady, Commit of prefill workers -> prompts' KV in the pool and their streams runnable.

The decode worker's half of the hand-offs; everything here runs on its engine thread. A stream whose hand-off is given up,
for whatever reason, is unblocked with nothing in the pool: the engine then computes its prompt like any other.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import structlog
import torch
from torch import Tensor

from paceline.cluster import failpoints, wire
from paceline.cluster.config import LinkConfig
from paceline.cluster.handoff import Handoff, exchange, head_ranges
from paceline.cluster.metrics import Metrics
from paceline.cluster.scheduler import Stream
from paceline.cluster.types import (
    Abort,
    Commit,
    CommitAck,
    Credit,
    Grant,
    KVPart,
    KVReady,
    LinkPlaced,
    Refuse,
    Reserve,
    WorkerInfo,
)
from paceline.workers.engine import Engine
from paceline.workers.kv_codec import Codec
from paceline.workers.kv_link import BACKENDS, Arrival, LinkReceiver, LinkStore, check_backend, store_arrival
from paceline.workers.parallel.links import FarReceiver, RankLinks
from paceline.workers.parallel.runner import ParallelRunner

log = structlog.get_logger(__name__)

_RETRY_S = 0.02
"""When a prefill worker may ask again for blocks, or for a stream this worker has not heard of yet."""

_MAX_SETTLED = 4096
"""Hand-offs to remember after their end: their senders may still ask."""


@dataclass(slots=True, eq=False)
class Incoming:
    """One stream's hand-off, and what became of it."""

    stream: Stream
    handoff: Handoff
    peer: wire.Peer | None = None
    """The prefill worker, once it has asked for blocks."""
    reserved_at: float = 0.0
    committed_at: float = 0.0
    """When the sender's "that was all" reached this process."""
    source: str = ""
    """How the KV came: "link", "link:<codec>" or "local:<reason>"; empty while that is open."""
    num_skipped: int = 0
    exposed_s: float = 0.0
    awaited: set[tuple[str, int]] = field(default_factory=set)
    """(link, number) of messages under way. A request may come again under its name while rows of its last time are."""


LinkKey = tuple[wire.Peer, int, int]
"""Connection, sending rank, receiving rank."""


class HandoffReceiver:
    """Open hand-offs by stream, and the links they come over."""

    def __init__(
        self,
        engine: Engine,
        *,
        me: wire.Identity,
        link: LinkConfig,
        min_remote_tokens: int,
        metrics: Metrics,
        post: Callable[[Callable[[], object]], None],
        codec: Codec = "none",
        ranks: RankLinks | None = None,
    ) -> None:
        """`ranks`: the engine's other ranks, which receive their heads themselves.

        `post` runs something on the engine thread; prompts that lack fewer than `min_remote_tokens` are not awaited."""
        self._engine = engine
        self._me = me
        self._config = link
        self._min_remote_tokens = min_remote_tokens
        self._metrics = metrics
        self._post = post
        self._codec = codec
        self._layout = msgspec.structs.replace(engine.runner.cache.layout, codec=codec)
        self._ranks = ranks
        self._num_ranks = engine.runner.group.size if isinstance(engine.runner, ParallelRunner) else 1
        self._heads = head_ranges(engine.runner.cache.layout.num_kv_heads, self._num_ranks)
        self._placing: dict[tuple[str, int], Incoming] = {}
        """Whose message (link, number) is, of those that their rank was told to put into its pool."""
        self._open: dict[str, Incoming] = {}
        self._settled: OrderedDict[str, str] = OrderedDict()
        """Stream key -> why it needs no hand-off any more."""
        self._links: dict[LinkKey, LinkReceiver | FarReceiver] = {}
        self._num_links = 0
        check_backend(link.backend)
        self._store = LinkStore(link.interface, link.timeout_s)

    def expect(self, stream: Stream, sender: WorkerInfo) -> Incoming:
        """Await the KV of all but the last token of a blocked stream; at once unblocked if most of it is cached here."""
        handoff = Handoff(
            stream.request.id,
            stream.epoch,
            sender.worker_id,
            sender.incarnation,
            stream.num_tokens - 1,
            self._engine.runner.cache.layout.num_layers,
            time.monotonic() + self._config.first_reserve_s,
        )
        incoming = Incoming(stream, handoff)
        self._open[stream.key] = incoming
        num_cached = self._engine.scheduler.num_cached(stream)
        if handoff.num_tokens - num_cached < self._min_remote_tokens:
            self._skip(incoming, num_cached)
        return incoming

    def close(self) -> None:
        """Drop all links; their threads end."""
        for link in self._links.values():
            link.close()

    # -- messages ----------------------------------------------------------------------------------------

    def reserve(self, peer: wire.Peer, message: Reserve) -> None:
        """Take blocks for a prompt, name the links, say where its KV is to start; or refuse."""
        key = f"{message.request_id}/{message.epoch}"
        incoming = self._open.get(key)
        if incoming is None:
            ended = self._settled.get(key)
            self._refuse(peer, message, ended or "unknown_stream", 0.0 if ended else _RETRY_S)
            return
        handoff, stream = incoming.handoff, incoming.stream
        parts = self._parts(message)
        refusal = "" if parts else "layout"
        refusal = refusal or handoff.refuses_reserve(message)
        if refusal:
            self._refuse(peer, message, refusal, 0.0)
            if refusal in ("layout", "wrong_length"):
                self.drop(incoming, refusal)
            return
        if not self._engine.scheduler.reserve(stream, handoff.num_tokens):
            self._refuse(peer, message, "no_blocks", _RETRY_S)
            return
        if handoff.num_tokens - stream.num_computed < self._min_remote_tokens:
            self._refuse(peer, message, "prefix_hit", 0.0)
            self._skip(incoming, stream.num_computed)
            return
        named = tuple(self._with_link(peer, part) for part in parts)
        handoff.reserve(message, named, self._lease(), num_skipped=stream.num_computed)
        incoming.peer = peer
        incoming.reserved_at = time.monotonic()
        incoming.num_skipped = stream.num_computed
        self._metrics.prefix_query_tokens.inc(stream.num_tokens)
        self._metrics.prefix_hit_tokens.inc(stream.num_computed)
        store = self._store
        peer.send_threadsafe(
            Grant(message.request_id, message.epoch, stream.num_computed, named, store.host, store.port)
        )

    def announced(self, peer: wire.Peer, message: KVReady) -> None:
        """A message is ready at the sender: receive it, or say that nobody wants it."""
        incoming = self._open.get(f"{message.request_id}/{message.epoch}")
        reason, link = "no_handoff", None
        if incoming is not None:
            reason = (
                incoming.handoff.announce(message, self._lease()) if incoming.peer is peer else "wrong_sender"
            )
            link = next((link for link in self._links.values() if link.key == message.link_key), None)
            if not reason and (link is None or not link.is_usable):
                reason = "no_link"
        if reason:
            self._metrics.kv_refused.labels(reason).inc()
            peer.send_threadsafe(Credit(message.link_key, message.seq, accept=False))
            if incoming is not None and reason != "wrong_sender":
                self.drop(incoming, reason)
            return
        assert incoming is not None and link is not None
        incoming.awaited.add((message.link_key, message.seq))
        cache = self._engine.runner.cache
        shape = (message.num_layers, 2, message.num_heads, message.num_tokens, cache.layout.head_dim)
        link.expect(message, torch.Size(shape), cache.dtype)

    def committed(self, peer: wire.Peer, message: Commit, received_at: float) -> None:
        """The sender has announced everything; `received_at` (monotonic) is when this process read that."""
        incoming = self._open.get(f"{message.request_id}/{message.epoch}")
        if incoming is None or incoming.peer is not peer:
            self._metrics.kv_refused.labels("no_handoff").inc()
            return
        reason = incoming.handoff.note_commit(message)
        if reason:
            self._metrics.kv_refused.labels(reason).inc()
            self.drop(incoming, reason)
            return
        incoming.committed_at = received_at
        self._try_complete(incoming)

    def aborted(self, request_id: str, epoch: int, reason: str) -> None:
        """The sender, or the gateway on its behalf, gave up."""
        incoming = self._open.get(f"{request_id}/{epoch}")
        if incoming is not None:
            self.drop(incoming, reason)

    def peer_lost(self, peer: wire.Peer) -> None:
        """A connection closed; what came over it ends."""
        assert peer.identity is not None
        for key in [key for key in self._links if key[0] is peer]:
            self._links.pop(key).close()
        for incoming in list(self._open.values()):
            waits_for = incoming.handoff.sender_incarnation == peer.identity.incarnation
            if incoming.peer is peer or (incoming.peer is None and waits_for):
                self.drop(incoming, "prefill_lost")

    def tick(self) -> None:
        """Give up what made no progress for too long."""
        now = time.monotonic()
        for incoming in list(self._open.values()):
            if now > incoming.handoff.deadline:
                self.drop(incoming, "lease")

    # -- ends of a hand-off ------------------------------------------------------------------------------

    def drop(self, incoming: Incoming, reason: str) -> None:
        """Give up on receiving this prompt's KV; the stream will compute it here."""
        if not self.forget(incoming, reason):
            return
        handoff, stream = incoming.handoff, incoming.stream
        log.warning(
            "kv_recomputed",
            request=handoff.request_id,
            epoch=handoff.epoch,
            sender=handoff.sender,
            reason=reason,
        )
        self._metrics.kv_drops.labels(reason).inc()
        self._engine.pool.free(stream.key)
        stream.restart()
        self._settle(incoming, f"local:{reason}")

    def forget(self, incoming: Incoming, reason: str) -> bool:
        """The stream is no more, or goes on without: tell the sender. False if the hand-off was over already."""
        if not incoming.handoff.drop(reason):
            return False
        self._close(incoming, reason)
        if incoming.peer is not None:
            incoming.peer.send_threadsafe(Abort(incoming.handoff.request_id, incoming.handoff.epoch, reason))
        return True

    def _skip(self, incoming: Incoming, num_cached: int) -> None:
        """So much of the prompt is in the cache that the rest is computed here."""
        incoming.handoff.drop("prefix_hit")
        incoming.num_skipped = num_cached
        self._metrics.kv_skipped_tokens.inc(num_cached)
        self._settle(incoming, "local:prefix_hit")

    def _settle(self, incoming: Incoming, source: str) -> None:
        incoming.source = source
        self._engine.unblock(incoming.stream)
        self._close(incoming, source.removeprefix("local:"))

    def _close(self, incoming: Incoming, reason: str) -> None:
        self._open.pop(incoming.stream.key, None)
        self._settled[incoming.stream.key] = reason
        if len(self._settled) > _MAX_SETTLED:
            self._settled.popitem(last=False)

    # -- links -------------------------------------------------------------------------------------------

    def _parts(self, message: Reserve) -> tuple[KVPart, ...]:
        """Which heads come from whom; empty if the sender's KV does not fit this pool."""
        if message.layout != self._layout:
            return ()
        try:
            return exchange(message.heads, self._heads)
        except ValueError:
            return ()

    def _with_link(self, peer: wire.Peer, part: KVPart) -> KVPart:
        """The part with the key of its usable link, or of a fresh one under a key never used before."""
        place = (peer, part.sender_rank, part.receiver_rank)
        link = self._links.get(place)
        if link is None or not link.is_usable:
            link = self._links[place] = self._new_link(peer, part.receiver_rank)
        return KVPart(*place[1:], part.head_start, part.num_heads, link.key)

    def _new_link(self, peer: wire.Peer, rank: int) -> LinkReceiver | FarReceiver:
        assert peer.identity is not None
        self._num_links += 1
        key = f"kv/{peer.identity.incarnation}/{self._me.incarnation}/{self._num_links}"

        def poisoned(key: str, reason: str) -> None:
            self._post(lambda: self._link_poisoned(key, reason))

        def credit(seq: int) -> None:
            peer.send_threadsafe(Credit(key, seq))

        link: LinkReceiver | FarReceiver
        if rank == 0:
            link = LinkReceiver(
                key,
                pair_key=peer.session_key,
                store=self._store,
                interface=self._config.interface,
                timeout_s=self._config.timeout_s,
                open_group=BACKENDS[self._config.backend],
                on_poisoned=poisoned,
                on_arrival=lambda arrival: self._post(lambda: self._arrived(peer, arrival)),
                send_credit=credit,
                codec=self._codec,
            )
        else:
            assert self._ranks is not None
            link = FarReceiver(
                key,
                self._ranks.peer(rank),
                pair_key=peer.session_key,
                store=(self._store.host, self._store.port),
                on_poisoned=poisoned,
                on_arrival=lambda message: self._post(lambda: self._arrived_at(rank, link, message)),
                on_placed=lambda placed: self._post(lambda: self._placed(placed)),
                send_credit=credit,
            )
            self._ranks.add(link)
        self._metrics.kv_links.labels("opened").inc()
        link.start()
        return link

    def _link_poisoned(self, key: str, reason: str) -> None:
        self._metrics.kv_links.labels("poisoned").inc()
        for place in [place for place, link in self._links.items() if link.key == key]:
            self._links.pop(place).close()
        for incoming in [i for i in self._open.values() if i.handoff.uses(key)]:
            self.drop(incoming, reason)

    def _arrived(self, peer: wire.Peer, arrival: Arrival) -> None:
        """Into the pool, then check what the pool holds: the digest covers the scatter as well."""
        message = arrival.message
        incoming = self._awaiting(message)
        if incoming is None:
            return  # dropped meanwhile: the rows never touch the pool
        cache, slots = self._engine.runner.cache, self._slots(incoming, message)
        stored = store_arrival(cache, slots, peer.session_key, arrival)
        if failpoints.enabled:
            failpoints.hit("mid_transfer", message.request_id)
        self._checked(incoming, stored.is_intact, arrival.sent.nbytes, stored.digest_s)

    def _arrived_at(self, rank: int, link: LinkReceiver | FarReceiver, message: KVReady) -> None:
        """A rank has rows outside its pool. What it is told to do with them comes before any later step."""
        assert isinstance(link, FarReceiver) and isinstance(self._engine.runner, ParallelRunner)
        incoming = self._awaiting(message)
        if incoming is None:
            link.forget(message.seq)
            return
        self._placing[message.link_key, message.seq] = incoming
        self._engine.runner.place(rank, message, self._slots(incoming, message))

    def _placed(self, placed: LinkPlaced) -> None:
        """A rank put rows into its pool and checked what the pool then held."""
        incoming = self._placing.pop((placed.link_key, placed.seq), None)
        if incoming is not None and incoming.handoff.is_open:
            self._checked(incoming, placed.is_intact, placed.num_bytes, placed.digest_s)

    def _awaiting(self, message: KVReady) -> Incoming | None:
        """Who waits for this message, and no longer does when this returns."""
        incoming = self._open.get(f"{message.request_id}/{message.epoch}")
        transfer = (message.link_key, message.seq)
        if incoming is None or transfer not in incoming.awaited:
            return None
        incoming.awaited.discard(transfer)
        return incoming

    def _slots(self, incoming: Incoming, message: KVReady) -> Tensor:
        table = self._engine.pool.table(incoming.stream.key)
        return self._engine.runner.cache.slots(table, message.start, message.start + message.num_tokens)

    def _checked(self, incoming: Incoming, ok: bool, num_bytes: int, digest_s: float) -> None:
        """One message is in a pool and its digest was looked at."""
        self._metrics.kv_digest_seconds.labels("received").inc(digest_s)
        if not ok:
            self.drop(incoming, "digest")
            return
        incoming.handoff.arrived(num_bytes, self._lease())
        self._metrics.kv_bytes.labels("received").inc(num_bytes)
        self._metrics.kv_messages.labels("received").inc()
        self._try_complete(incoming)

    def _try_complete(self, incoming: Incoming) -> None:
        handoff = incoming.handoff
        if not handoff.try_complete():
            return
        now = time.monotonic()
        incoming.stream.num_computed = handoff.num_tokens
        incoming.exposed_s = now - incoming.committed_at
        self._metrics.handoff_seconds.observe(now - incoming.reserved_at)
        self._metrics.kv_skipped_tokens.inc(incoming.num_skipped)
        self._settle(incoming, "link" if self._codec == "none" else f"link:{self._codec}")
        assert incoming.peer is not None
        incoming.peer.send_threadsafe(CommitAck(handoff.request_id, handoff.epoch, True))

    def _refuse(self, peer: wire.Peer, message: Reserve, reason: str, retry_after_s: float) -> None:
        self._metrics.kv_refused.labels(reason).inc()
        peer.send_threadsafe(Refuse(message.request_id, message.epoch, reason, retry_after_s))

    def _lease(self) -> float:
        return time.monotonic() + self._config.lease_s
