"""KV rows of one prefill rank -> one decode rank, over a two-rank process group of their own.

Rank 0 sends, rank 1 receives, strictly in the order of announcement (as NCCL demands): the sender announces a
message on the framed connection, the receiver posts the receive and answers with a credit, the sender sends. Data that
is not ready never has a receive waiting for it. A group that times out or loses its peer is poisoned: dropped, and
rebuilt under a new key, never used again.

Threads: each end owns one thread that blocks in the group's calls; the engine never does. The sender's thread also takes
the digests, so the engine computes the next layer meanwhile.
"""

from __future__ import annotations

import hashlib
import hmac
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import structlog
import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # exported, but not declared so
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from paceline.cluster.errors import ConfigError, LinkPoisoned
from paceline.cluster.types import KVReady
from paceline.workers.kv_cache import KVCache, digest, octets
from paceline.workers.kv_codec import Codec, decode, encode, sent_as
from paceline.workers.one_node_link import CudaIpcGroup, OneNodeGroup

log = structlog.get_logger(__name__)


class LinkStore:
    """The receiver's rendezvous store, bound to one interface (a plain TCPStore listens on all of them)."""

    def __init__(self, interface: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in interface else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((interface, 0))
        self._socket.listen(128)
        self.host = interface
        self.port = int(self._socket.getsockname()[1])
        self.store = TCPStore(
            interface,
            self.port,
            None,
            True,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The sender's side of the rendezvous."""
    return TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)


# --- groups of two --------------------------------------------------------------------------------------


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Block until it is done; RuntimeError or LinkPoisoned if it cannot be."""
        ...


class Group(Protocol):
    """Two ranks that exchange tensors: 0 sends, 1 receives.

    `tag` is what either side believes this transfer to be. No caller may depend on more than order: NCCL has no tags.
    """

    def send(self, rows: Tensor, tag: int) -> Work: ...
    def recv(self, rows: Tensor, tag: int) -> Work: ...


class GlooGroup:
    """A gloo group of two on one interface. Building it blocks until the other side joins.

    Raises:
        LinkPoisoned: it did not join in time.
    """

    def __init__(self, store: TCPStore, name: str, rank: int, interface: str, timeout_s: float) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        options._devices = [ProcessGroupGloo.create_device(hostname=interface)]
        try:
            self._group: Any = ProcessGroupGloo(PrefixStore(name, store), rank, 2, options)
        except RuntimeError as error:
            raise LinkPoisoned("link_setup", str(error)[:200]) from error

    def send(self, rows: Tensor, tag: int) -> Work:
        """Rank 0. `rows` must stay unchanged until the work is done."""
        work: Work = self._group.send([rows.cpu()], 1, tag)
        return work

    def recv(self, rows: Tensor, tag: int) -> Work:
        """Rank 1. `rows` is filled when the work is done."""
        work: Work = self._group.recv([rows], 0, tag)
        return work


class StrictFifoGroup(GlooGroup):
    """Gloo under NCCL's rules: transfers match by order alone, and one that is not what the receiver expects is an error.

    Gloo itself matches by tag, and so sets right what is out of order. Here a header goes before each transfer, and whoever
    depends on more than order fails, where over NCCL it would hang or take one message's bytes for another's.
    """

    def send(self, rows: Tensor, tag: int) -> Work:
        super().send(_header(rows, tag), 0).wait()
        return super().send(rows, 0)

    def recv(self, rows: Tensor, tag: int) -> Work:
        return _StrictReceive(lambda rows: super(StrictFifoGroup, self).recv(rows, 0), rows, tag)


def _header(rows: Tensor, tag: int) -> Tensor:
    return torch.tensor([tag, rows.numel(), rows.element_size()])


class _StrictReceive:
    """A receive that looks at the header before it takes what follows.

    Of several that are posted the headers would overtake the rows of those before, so each is taken in `wait`: in order.
    """

    def __init__(self, recv: Callable[[Tensor], Work], rows: Tensor, tag: int) -> None:
        self._recv = recv
        self._rows = rows
        self._expected = _header(rows, tag)

    def wait(self) -> object:
        header = torch.zeros_like(self._expected)
        self._recv(header).wait()
        if not torch.equal(header, self._expected):
            raise LinkPoisoned(
                "fifo_mismatch",
                f"expected (tag, elements, bytes of one) {self._expected.tolist()}, got {header.tolist()}",
            )
        return self._recv(self._rows).wait()


OpenGroup = Callable[[TCPStore, str, int, str, float], Group]
"""(store, name, rank, interface, timeout in seconds) -> group."""

BACKENDS: dict[str, OpenGroup] = {"gloo": GlooGroup, "strict_fifo": StrictFifoGroup, "shm": OneNodeGroup}
"""By the names that `link.backend` takes."""
if torch.cuda.is_available():
    BACKENDS["cuda_ipc"] = CudaIpcGroup


def check_backend(name: str) -> None:
    """Raises:
    ConfigError: what `link.backend` names cannot be had here.
    """
    if name not in BACKENDS:
        raise ConfigError(
            f"link.backend={name}: expected one of {', '.join(BACKENDS)}; there is no CUDA device here"
        )


# --- both ends ------------------------------------------------------------------------------------------


class _LinkThread:
    """What both ends share: one daemon thread, one queue, one way to die."""

    def __init__(
        self,
        key: str,
        *,
        pair_key: bytes,
        interface: str,
        timeout_s: float,
        open_group: OpenGroup,
        on_poisoned: Callable[[str, str], None],
    ) -> None:
        self.key = key
        self.is_poisoned = False
        self._pair_key = pair_key
        self._interface = interface
        self._timeout_s = timeout_s
        self._open_group = open_group
        self._on_poisoned = on_poisoned
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kv-link-{key}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  # whatever ends this thread ends the link, and must be told
            self.is_poisoned = True
            if not self._closed:
                reason = error.reason if isinstance(error, LinkPoisoned) else "link_poisoned"
                log.warning("kv_link_poisoned", link=self.key, error=str(error)[:200])
                self._on_poisoned(self.key, reason)
        finally:
            self._ended()

    def _join(self, store: TCPStore, rank: int) -> Group:
        """The group, under a name that only the two processes know: the store itself lets anybody in."""
        name = hashlib.blake2b(self.key.encode(), key=self._pair_key, digest_size=16).hexdigest()
        return self._open_group(store, name, rank, self._interface, self._timeout_s)

    def _serve(self) -> None:
        raise NotImplementedError

    def _ended(self) -> None:
        """The thread is about to end."""

    @property
    def is_usable(self) -> bool:
        return not self.is_poisoned and not self._closed


@dataclass(slots=True)
class _Outgoing:
    """Rows on their way out, and the message that announces them, still without number and digest."""

    message: KVReady
    rows: Tensor
    mark: Tensor | None = None
    """Their digest, if it was taken when they were copied out of the pool."""
    is_done: threading.Event = field(default_factory=threading.Event)
    """They were sent, or nobody wanted them."""


class LinkSender(_LinkThread):
    """Prefill's end. `push` and `after` from the engine thread; credits from the event loop's."""

    def __init__(
        self,
        key: str,
        *,
        pair_key: bytes,
        store: tuple[str, int],
        interface: str,
        timeout_s: float,
        on_poisoned: Callable[[str, str], None],
        announce: Callable[[KVReady], None],
        on_sent: Callable[[int, float], None],
        open_group: OpenGroup = GlooGroup,
        overlap: bool = True,
        codec: Codec = "none",
    ) -> None:
        """`announce` takes the finished message to the receiver. `on_sent`: bytes, and seconds its digest took.

        `codec` as the receiver's; what is sent, counted and digested are the encoded rows.
        `overlap` False: `push` returns when the rows are with the receiver, as if there were no thread.
        """
        super().__init__(
            key,
            pair_key=pair_key,
            interface=interface,
            timeout_s=timeout_s,
            open_group=open_group,
            on_poisoned=on_poisoned,
        )
        self._store_address = store
        self._announce = announce
        self._on_sent = on_sent
        self._overlap = overlap
        self._codec = codec
        self._inbox: queue.SimpleQueue[_Outgoing | tuple[int, bool] | Callable[[], None] | None] = (
            queue.SimpleQueue()
        )
        self._announced: dict[int, tuple[_Outgoing, float]] = {}
        self._next_seq = 0
        self._has_ended = threading.Event()

    def push(self, message: KVReady, rows: Tensor, mark: Tensor | None = None) -> None:
        """Announce these rows and send them when their credit comes; they must not change any more.

        `mark`: their digest, from `KVCache.pack_marked`; else it is taken here.
        """
        outgoing = _Outgoing(message, rows, mark if self._codec == "none" else None)
        self._inbox.put(outgoing)
        if not self._overlap:
            limit = time.monotonic() + self._timeout_s
            while not outgoing.is_done.wait(0.05):
                if self._has_ended.is_set() or time.monotonic() > limit:
                    return  # the hand-off ends by its lease, or because the link is poisoned

    def after(self, action: Callable[[], None]) -> None:
        """Run this on the link's thread when all that was pushed so far is announced."""
        self._inbox.put(action)

    def credit(self, seq: int, accept: bool) -> None:
        """The receiver posted the receive of message `seq`, or wants nothing of it."""
        self._inbox.put((seq, accept))

    def close(self) -> None:
        """Drop the link; what is not sent is released."""
        self._closed = True
        self._inbox.put(None)

    def _serve(self) -> None:
        store = connect_store(*self._store_address, self._timeout_s)
        group = self._join(store, 0)
        while (item := self._inbox.get()) is not None:
            match item:
                case _Outgoing():
                    self._announce_next(item)
                case (seq, accept):
                    self._credited(group, seq, accept)
                case _:
                    item()

    def _announce_next(self, outgoing: _Outgoing) -> None:
        outgoing.rows = encode(outgoing.rows, self._codec)
        began = time.thread_time()  # what it costs: by the clock it waits for cores and for Python
        message = outgoing.message
        if outgoing.mark is not None:
            mark = octets(outgoing.mark)
        else:
            if outgoing.rows.device.type == "cpu":
                message = msgspec.structs.replace(message, digest_by="gmac")
            mark = digest(self._pair_key, message, outgoing.rows)
        seconds = time.thread_time() - began
        seq = self._next_seq
        self._next_seq += 1
        self._announced[seq] = outgoing, seconds
        self._announce(msgspec.structs.replace(message, seq=seq, digest=mark))

    def _credited(self, group: Group, seq: int, accept: bool) -> None:
        found = self._announced.pop(seq, None)
        if found is None:
            raise LinkPoisoned("bad_credit", f"credit for message {seq}, which was not announced")
        outgoing, seconds = found
        if accept:
            group.send(outgoing.rows, seq).wait()
            self._on_sent(outgoing.rows.nbytes, seconds)
        outgoing.is_done.set()

    def _ended(self) -> None:
        self._has_ended.set()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A received message: still outside the pool, not checked yet."""

    message: KVReady
    rows: Tensor
    sent: Tensor
    """What came over the link: `rows` itself, unless a codec made them of it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of an arrival."""

    is_intact: bool
    """What was sent arrived, and the pool now holds it."""
    digest_s: float
    """Thread seconds that reading it back and its digest took; on a GPU with the writing, which is one pass with them."""


def store_arrival(cache: KVCache, slots: Tensor, pair_key: bytes, arrival: Arrival) -> Stored:
    """Rows into the pool; the digest is checked over what the pool holds then, so it covers the writing as well."""
    message, sent = arrival.message, arrival.sent
    is_coded = sent is not arrival.rows
    began = time.thread_time()
    if message.digest_by == "blake3" and not is_coded:
        mark = octets(cache.unpack_marked(pair_key, message, slots, sent))
        return Stored(hmac.compare_digest(mark, message.digest), time.thread_time() - began)
    cache.unpack(message, slots, arrival.rows)
    began = time.thread_time()
    stored = cache.pack(message, slots)
    if is_coded and not torch.equal(stored.cpu().view(torch.uint8), arrival.rows.cpu().view(torch.uint8)):
        return Stored(False, time.thread_time() - began)
    mark = digest(pair_key, message, sent if is_coded else stored)
    return Stored(hmac.compare_digest(mark, message.digest), time.thread_time() - began)


class StoreAddress(Protocol):
    """A rendezvous store, here or in another process."""

    @property
    def store(self) -> TCPStore: ...


class LinkReceiver(_LinkThread):
    """Decode's end. Receives into staging; the engine thread scatters, checks and commits."""

    def __init__(
        self,
        key: str,
        *,
        pair_key: bytes,
        store: StoreAddress,
        interface: str,
        timeout_s: float,
        on_poisoned: Callable[[str, str], None],
        on_arrival: Callable[[Arrival], None],
        send_credit: Callable[[int], None],
        open_group: OpenGroup = GlooGroup,
        codec: Codec = "none",
    ) -> None:
        super().__init__(
            key,
            pair_key=pair_key,
            interface=interface,
            timeout_s=timeout_s,
            open_group=open_group,
            on_poisoned=on_poisoned,
        )
        self._store = store
        self._on_arrival = on_arrival
        self._send_credit = send_credit
        self._codec = codec
        self._announced: queue.SimpleQueue[tuple[KVReady, torch.Size, torch.dtype] | None] = (
            queue.SimpleQueue()
        )

    def expect(self, message: KVReady, shape: torch.Size, dtype: torch.dtype) -> None:
        """Receive this announced message, whose rows are of this shape and type, when its turn comes."""
        self._announced.put((message, shape, dtype))

    def close(self) -> None:
        """Drop the link; announced messages are never received."""
        self._closed = True
        self._announced.put(None)

    def _serve(self) -> None:
        group = self._join(self._store.store, 1)
        posted: queue.SimpleQueue[tuple[KVReady, Tensor, Work, torch.Size, torch.dtype]] = queue.SimpleQueue()
        num_posted = 0
        while True:
            # Post everything announced so far, then wait for the oldest: credits run ahead of the data.
            while num_posted == 0 or not self._announced.empty():
                item = self._announced.get()
                if item is None:
                    return
                message, shape, dtype = item
                size, kind = sent_as(shape, dtype, self._codec)
                # Where the back-end can reach; gloo knows the CPU only.
                sent = torch.empty(size, dtype=kind, device=getattr(group, "device", "cpu"))
                work = group.recv(sent, message.seq)
                self._send_credit(message.seq)
                posted.put((message, sent, work, shape, dtype))
                num_posted += 1
            message, sent, work, shape, dtype = posted.get()
            work.wait()
            num_posted -= 1
            self._on_arrival(Arrival(message, decode(sent, shape, dtype, self._codec), sent))
