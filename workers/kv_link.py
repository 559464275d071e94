"""KV rows of one prefill worker -> one decode worker, over a two-rank process group of their own.

Rank 0 sends, rank 1 receives, strictly in the order of announcement (as NCCL demands): the sender announces a
message on the framed connection, the receiver posts the receive and answers with a credit, the sender sends. Data that
is not ready never has a receive waiting for it. A group that times out or loses its peer is poisoned: dropped, and
rebuilt under a new key, never used again.

Threads: each end owns one thread that blocks in the group's calls; the engine never does.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # exported, but not declared so
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from paceline.cluster.errors import LinkPoisoned
from paceline.cluster.types import KVReady

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


def make_group(store: TCPStore, key: str, rank: int, interface: str, timeout_s: float) -> Any:
    """A gloo group of two on one interface. Blocks until the other side joins.

    Raises:
        LinkPoisoned: it did not join in time.
    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    options._devices = [ProcessGroupGloo.create_device(hostname=interface)]
    try:
        return ProcessGroupGloo(PrefixStore(key, store), rank, 2, options)
    except RuntimeError as error:
        raise LinkPoisoned("link_setup", str(error)[:200]) from error


class _LinkThread:
    """What both ends share: one daemon thread, one queue, one way to die."""

    def __init__(self, key: str, on_poisoned: Callable[[str, str], None]) -> None:
        self.key = key
        self.is_poisoned = False
        self._on_poisoned = on_poisoned
        self._group: Any = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kv-link-{key}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._serve()
        except (RuntimeError, LinkPoisoned) as error:
            self.is_poisoned = True
            if not self._closed:
                reason = error.reason if isinstance(error, LinkPoisoned) else "link_poisoned"
                log.warning("kv_link_poisoned", link=self.key, error=str(error)[:200])
                self._on_poisoned(self.key, reason)
        finally:
            self._group = None

    def _serve(self) -> None:
        raise NotImplementedError

    @property
    def is_usable(self) -> bool:
        return not self.is_poisoned and not self._closed


class LinkSender(_LinkThread):
    """Prefill's end. `push` from the engine thread; credits from the event loop's."""

    def __init__(
        self,
        key: str,
        *,
        store: tuple[str, int],
        interface: str,
        timeout_s: float,
        on_poisoned: Callable[[str, str], None],
        on_sent: Callable[[int], None],
    ) -> None:
        super().__init__(key, on_poisoned)
        self._store_address = store
        self._interface = interface
        self._timeout_s = timeout_s
        self._on_sent = on_sent
        self._credits: queue.SimpleQueue[tuple[int, bool] | None] = queue.SimpleQueue()
        self._pending: dict[int, Tensor] = {}
        self._next_seq = 0

    def stage(self, rows: Tensor) -> int:
        """Keep rows until their credit comes; the sequence number to announce them under."""
        seq = self._next_seq
        self._next_seq += 1
        self._pending[seq] = rows
        return seq

    def credit(self, seq: int, accept: bool) -> None:
        """The receiver posted the receive of message `seq`, or wants nothing of it."""
        self._credits.put((seq, accept))

    def close(self) -> None:
        """Drop the link; staged rows are released."""
        self._closed = True
        self._credits.put(None)

    def _serve(self) -> None:
        store = connect_store(*self._store_address, self._timeout_s)
        self._group = make_group(store, self.key, 0, self._interface, self._timeout_s)
        while (item := self._credits.get()) is not None:
            seq, accept = item
            rows = self._pending.pop(seq, None)
            if rows is None:
                raise LinkPoisoned("bad_credit", f"credit for message {seq}, which is not staged")
            if accept:
                self._group.send([rows], 1, 0).wait()
                self._on_sent(rows.nbytes)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A received message: still outside the pool, not checked yet."""

    message: KVReady
    rows: Tensor


class LinkReceiver(_LinkThread):
    """Decode's end. Receives into staging; the engine thread scatters, checks and commits."""

    def __init__(
        self,
        key: str,
        *,
        store: LinkStore,
        interface: str,
        timeout_s: float,
        on_poisoned: Callable[[str, str], None],
        on_arrival: Callable[[Arrival], None],
        send_credit: Callable[[int], None],
    ) -> None:
        super().__init__(key, on_poisoned)
        self._store = store
        self._interface = interface
        self._timeout_s = timeout_s
        self._on_arrival = on_arrival
        self._send_credit = send_credit
        self._announced: queue.SimpleQueue[tuple[KVReady, torch.Size, torch.dtype] | None] = (
            queue.SimpleQueue()
        )

    def expect(self, message: KVReady, shape: torch.Size, dtype: torch.dtype) -> None:
        """Receive this announced message when its turn comes."""
        self._announced.put((message, shape, dtype))

    def close(self) -> None:
        """Drop the link; announced messages are never received."""
        self._closed = True
        self._announced.put(None)

    def _serve(self) -> None:
        self._group = make_group(self._store.store, self.key, 1, self._interface, self._timeout_s)
        posted: queue.SimpleQueue[tuple[KVReady, Tensor, Any]] = queue.SimpleQueue()
        num_posted = 0
        while True:
            # Post everything announced so far, then wait for the oldest: credits run ahead of the data.
            while num_posted == 0 or not self._announced.empty():
                item = self._announced.get()
                if item is None:
                    return
                message, shape, dtype = item
                rows = torch.empty(shape, dtype=dtype)
                work = self._group.recv([rows], 0, 0)
                self._send_credit(message.seq)
                posted.put((message, rows, work))
                num_posted += 1
            message, rows, work = posted.get()
            work.wait()
            num_posted -= 1
            self._on_arrival(Arrival(message, rows))
