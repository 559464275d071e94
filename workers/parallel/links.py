"""KV of a rank's heads <-> the rank of another worker that wants them, over a link of their own, controlled by the leader.

The hand-off's protocol is the leaders' alone (`paceline.workers.prefill`, `paceline.workers.kv_receive`): they announce,
credit, commit. `LinkAgent` is a rank's part: it has the ends of the links, and tells its leader what happens there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec
import structlog
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not declared so

from paceline.cluster import wire
from paceline.cluster.errors import GangLost, WireError
from paceline.cluster.membership import new_incarnation
from paceline.cluster.types import (
    Credit,
    KVReady,
    LinkArrived,
    LinkClose,
    LinkDown,
    LinkExpect,
    LinkForget,
    LinkMark,
    LinkOpen,
    LinkPlaced,
    LinkSent,
    Message,
    RankHello,
)
from paceline.workers.kv_cache import KVCache
from paceline.workers.kv_codec import Codec
from paceline.workers.kv_link import BACKENDS, Arrival, LinkReceiver, LinkSender, connect_store, store_arrival
from paceline.workers.model_batch import LayerHook, PackedBatch

log = structlog.get_logger(__name__)

End = TypeVar("End", LinkSender, LinkReceiver)

_CONNECT_S = 20.0
_OPEN_S = 5.0
"""A frame may speak of a link whose `LinkOpen` is still on its way, as the two go different ways."""


class LinkSetup(msgspec.Struct, frozen=True):
    """The worker whose rank this is, and how its links are made; as in `link` and `kv` of the configuration."""

    host: str
    port: int
    worker_id: str
    incarnation: int
    secret: bytes
    interface: str
    backend: str
    timeout_s: float
    overlap: bool
    ping_s: float
    dead_s: float
    codec: Codec


class FarStore:
    """A rendezvous store of another process, connected when it is first asked for."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self.host, self.port = host, port
        self._timeout_s = timeout_s

    @property
    def store(self) -> TCPStore:
        """A connection of its own."""
        return connect_store(self.host, self.port, self._timeout_s)


class LinkAgent:
    """A rank's ends of links. `pusher` and `place` are for the thread that follows the leader; the rest has its own."""

    def __init__(self, rank: int, setup: LinkSetup, cache: KVCache) -> None:
        """Connect to the leader.

        Raises:
            GangLost: it is not there.
        """
        self._rank, self._setup, self._cache = rank, setup, cache
        self._senders: dict[str, LinkSender] = {}
        self._receivers: dict[str, LinkReceiver] = {}
        self._arrived: dict[tuple[str, int], Arrival] = {}
        self._pair_keys: dict[str, bytes] = {}
        self._change = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._is_closing = False
        threading.Thread(target=self._loop.run_forever, name="rank-links", daemon=True).start()
        dial = asyncio.run_coroutine_threadsafe(self._connect(), self._loop)
        try:
            self._leader = dial.result(_CONNECT_S)
        except (WireError, TimeoutError) as error:
            raise GangLost(f"rank {rank}: its leader is not there: {error}") from error
        self._tell(RankHello(rank))

    async def _connect(self) -> wire.Peer:
        setup = self._setup
        return await wire.connect(
            setup.host,
            setup.port,
            wire.Identity(f"{setup.worker_id}/rank{self._rank}", new_incarnation()),
            setup.secret,
            self,
            expect_incarnation=setup.incarnation,
            liveness=wire.Liveness(setup.ping_s, setup.dead_s),
        )

    def close(self) -> None:
        """Drop all links and the connection."""
        self._is_closing = True
        for key in [*self._senders, *self._receivers]:
            self._closed(key)
        self._loop.call_soon_threadsafe(self._leader.close)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _tell(self, message: Message) -> None:
        self._leader.send_threadsafe(message)

    # -- the thread that follows the leader --------------------------------------------------------------

    def pusher(self, batch: PackedBatch, cache: KVCache) -> LayerHook:
        """What of a step's K and V this rank sends behind which layer -> a hook that does it."""
        mine = [send for send in batch.sends if send.rank == self._rank]

        def push(layer: int) -> None:
            for send in mine:
                if send.layer == layer:
                    self._push(cache, send.message, batch.slots_of(send))

        return push

    def _push(self, cache: KVCache, message: KVReady, slots: Tensor) -> None:
        link, mark = self._opened(self._senders, message.link_key), None
        if cache.device.type == "cuda":
            rows, mark = cache.pack_marked(self._pair_keys[message.link_key], message, slots.to(cache.device))
        else:
            rows = cache.pack(message, slots)
        link.push(message, rows, mark)

    def place(self, cache: KVCache, message: KVReady, slots: Tensor) -> None:
        """Into the pool, then check what the pool holds: the digest covers the scatter as well."""
        with self._change:
            arrival = self._arrived.pop((message.link_key, message.seq), None)
            pair_key = self._pair_keys.get(message.link_key)
        if arrival is None or pair_key is None:  # the link was closed meanwhile
            self._tell(LinkPlaced(message.link_key, message.seq, False, 0, 0.0))
            return
        stored = store_arrival(cache, slots, pair_key, arrival)
        num_bytes = arrival.sent.nbytes
        self._tell(LinkPlaced(message.link_key, message.seq, stored.is_intact, num_bytes, stored.digest_s))

    def _opened(self, ends: dict[str, End], key: str) -> End:
        with self._change:
            if not self._change.wait_for(lambda: key in ends, _OPEN_S):
                raise GangLost(f"rank {self._rank}: its leader speaks of link {key}, and did not open it")
            return ends[key]

    # -- wire.Handler, on the loop's thread --------------------------------------------------------------

    def on_open(self, peer: wire.Peer) -> None:
        return

    def on_close(self, peer: wire.Peer) -> None:
        if not self._is_closing:
            log.info("leader_lost", rank=self._rank, reason=peer.close_reason)

    def on_message(self, peer: wire.Peer, message: Message) -> None:
        match message:
            case LinkOpen():
                self._open(message)
            case Credit(key, seq, accept) if key in self._senders:
                self._senders[key].credit(seq, accept)
            case LinkMark(key) if key in self._senders:
                self._senders[key].after(lambda: self._tell(message))
            case LinkExpect(announced) if announced.link_key in self._receivers:
                layout = self._cache.layout
                shape = (announced.num_layers, 2, announced.num_heads, announced.num_tokens, layout.head_dim)
                self._receivers[announced.link_key].expect(announced, torch.Size(shape), self._cache.dtype)
            case LinkForget(key, seq):
                with self._change:
                    self._arrived.pop((key, seq), None)
            case LinkClose(key):
                self._closed(key)
            case _:
                return  # of a link that is closed by now

    def _open(self, message: LinkOpen) -> None:
        setup, key = self._setup, message.link_key
        with self._change:
            self._pair_keys[key] = message.pair_key
            if message.is_sender:
                self._senders[key] = self._sender(message)
            else:
                self._receivers[key] = self._receiver(message)
            self._change.notify_all()
        link = self._senders.get(key) or self._receivers[key]
        log.info("rank_link", rank=self._rank, link=key, backend=setup.backend)
        link.start()

    def _sender(self, message: LinkOpen) -> LinkSender:
        setup, key = self._setup, message.link_key
        return LinkSender(
            key,
            pair_key=message.pair_key,
            store=(message.store_host, message.store_port),
            interface=setup.interface,
            timeout_s=setup.timeout_s,
            open_group=BACKENDS[setup.backend],
            overlap=setup.overlap,
            codec=setup.codec,
            on_poisoned=lambda key, reason: self._tell(LinkDown(key, reason)),
            announce=self._tell,
            on_sent=lambda num_bytes, seconds: self._tell(LinkSent(key, num_bytes, seconds)),
        )

    def _receiver(self, message: LinkOpen) -> LinkReceiver:
        setup, key = self._setup, message.link_key

        def arrived(arrival: Arrival) -> None:
            with self._change:
                self._arrived[key, arrival.message.seq] = arrival
            self._tell(LinkArrived(arrival.message))

        return LinkReceiver(
            key,
            pair_key=message.pair_key,
            store=FarStore(message.store_host, message.store_port, setup.timeout_s),
            interface=setup.interface,
            timeout_s=setup.timeout_s,
            open_group=BACKENDS[setup.backend],
            codec=setup.codec,
            on_poisoned=lambda key, reason: self._tell(LinkDown(key, reason)),
            on_arrival=arrived,
            send_credit=lambda seq: self._tell(Credit(key, seq)),
        )

    def _closed(self, key: str) -> None:
        with self._change:
            sender, receiver = self._senders.pop(key, None), self._receivers.pop(key, None)
            for place in [place for place in self._arrived if place[0] == key]:
                self._arrived.pop(place)
            self._pair_keys.pop(key, None)
        for link in (sender, receiver):
            if link is not None:
                link.close()


# --- the leader's side ----------------------------------------------------------------------------------


class _FarLink:
    """A rank's end of a link, as its leader sees it."""

    def __init__(
        self,
        key: str,
        rank: wire.Peer,
        *,
        pair_key: bytes,
        store: tuple[str, int],
        is_sender: bool,
        on_poisoned: Callable[[str, str], None],
    ) -> None:
        self.key = key
        self.is_usable = True
        self._rank = rank
        self._open = LinkOpen(key, pair_key, *store, is_sender)
        self._on_poisoned = on_poisoned

    def start(self) -> None:
        self._rank.send_threadsafe(self._open)

    def close(self) -> None:
        """Drop the link; what is not sent is released."""
        self.is_usable = False
        self._rank.send_threadsafe(LinkClose(self.key))

    def down(self, reason: str) -> None:
        """The rank says that it is poisoned."""
        if self.is_usable:
            self.is_usable = False
            self._on_poisoned(self.key, reason)


class FarSender(_FarLink):
    """`LinkSender`, in another rank: rows are pushed there (`KVSend`), everything else goes through here."""

    def __init__(
        self,
        key: str,
        rank: wire.Peer,
        *,
        pair_key: bytes,
        store: tuple[str, int],
        on_poisoned: Callable[[str, str], None],
        announce: Callable[[KVReady], None],
        on_sent: Callable[[int, float], None],
    ) -> None:
        super().__init__(key, rank, pair_key=pair_key, store=store, is_sender=True, on_poisoned=on_poisoned)
        self.announce = announce
        self.on_sent = on_sent
        self._marks: dict[int, Callable[[], None]] = {}
        self._num_marks = 0

    def after(self, action: Callable[[], None]) -> None:
        """Run this on the event loop's thread when all that was pushed so far is announced."""
        self._num_marks += 1
        self._marks[self._num_marks] = action
        self._rank.send_threadsafe(LinkMark(self.key, self._num_marks))

    def marked(self, number: int) -> None:
        """The rank says that it is."""
        self._marks.pop(number)()

    def credit(self, seq: int, accept: bool) -> None:
        """The receiver posted the receive of message `seq`, or wants nothing of it."""
        self._rank.send_threadsafe(Credit(self.key, seq, accept))


class FarReceiver(_FarLink):
    """`LinkReceiver`, in another rank."""

    def __init__(
        self,
        key: str,
        rank: wire.Peer,
        *,
        pair_key: bytes,
        store: tuple[str, int],
        on_poisoned: Callable[[str, str], None],
        on_arrival: Callable[[KVReady], None],
        on_placed: Callable[[LinkPlaced], None],
        send_credit: Callable[[int], None],
    ) -> None:
        super().__init__(key, rank, pair_key=pair_key, store=store, is_sender=False, on_poisoned=on_poisoned)
        self.on_arrival = on_arrival
        self.on_placed = on_placed
        self.send_credit = send_credit

    def expect(self, message: KVReady, shape: torch.Size, dtype: torch.dtype) -> None:
        """Receive this announced message when its turn comes; the rank knows its shape and type."""
        self._rank.send_threadsafe(LinkExpect(message))

    def forget(self, seq: int) -> None:
        """Nobody wants what arrived."""
        self._rank.send_threadsafe(LinkForget(self.key, seq))


class RankLinks:
    """The leader's connections to its other ranks and their ends of links. Messages come on the event loop's thread."""

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        """`on_lost`: a rank is gone, and why."""
        self._on_lost = on_lost
        self._peers: dict[int, wire.Peer] = {}
        self._links: dict[str, FarSender | FarReceiver] = {}
        self._change = threading.Condition()

    def wait(self, size: int, limit_s: float = _CONNECT_S) -> None:
        """Until all other ranks of `size` are connected. From any thread but the event loop's.

        Raises:
            GangLost: they are not.
        """
        with self._change:
            if not self._change.wait_for(lambda: len(self._peers) == size - 1, limit_s):
                raise GangLost(f"of {size - 1} ranks only {len(self._peers)} are connected to their leader")

    def peer(self, rank: int) -> wire.Peer:
        """The connection to a rank."""
        return self._peers[rank]

    def add(self, link: FarSender | FarReceiver) -> None:
        """What its rank says about it is for this link."""
        for key in [key for key, old in self._links.items() if not old.is_usable]:
            del self._links[key]
        self._links[link.key] = link

    def take(self, peer: wire.Peer, message: Message) -> bool:
        """Whether this message is from a rank; if so it has been dealt with."""
        if isinstance(message, RankHello):
            with self._change:
                self._peers[message.rank] = peer
                self._change.notify_all()
            return True
        if peer not in self._peers.values():
            return False
        match message:
            case KVReady(link_key=key) | LinkSent(key) | LinkMark(key) | LinkDown(key):
                link = self._links.get(key)
            case Credit(key) | LinkPlaced(key) | LinkArrived(KVReady(link_key=key)):
                link = self._links.get(key)
            case _:
                link = None
        if link is not None:
            _heard(link, message)
        return True

    def lost(self, peer: wire.Peer) -> bool:
        """Whether this connection was a rank's."""
        found = [rank for rank, known in self._peers.items() if known is peer]
        if found:
            self._on_lost(f"rank {found[0]}: {peer.close_reason}")
        return bool(found)


def _heard(link: FarSender | FarReceiver, message: Message) -> None:
    match link, message:
        case FarSender(), KVReady():
            link.announce(message)
        case FarSender(), LinkSent(_, num_bytes, seconds):
            link.on_sent(num_bytes, seconds)
        case FarSender(), LinkMark(_, number):
            link.marked(number)
        case FarReceiver(), Credit(_, seq):
            link.send_credit(seq)
        case FarReceiver(), LinkArrived(announced):
            link.on_arrival(announced)
        case FarReceiver(), LinkPlaced():
            link.on_placed(message)
        case _, LinkDown(_, reason):
            link.down(reason)
        case _:
            return
