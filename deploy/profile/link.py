"""Message sizes -> seconds of each over a KV link between two processes, as a prefill and a decode worker have one.

Rank 0 lives in a process of its own. Announcements and credits go over a pipe instead of a framed connection; the
store, the gloo group and both ends' threads are the cluster's own.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec
import torch

from paceline.cluster.errors import TransferError
from paceline.cluster.profile import LinkPoint, Spread
from paceline.cluster.types import KVReady
from paceline.workers.kv_link import Arrival, LinkReceiver, LinkSender, LinkStore

_KEY = "profile"
_PAIR_KEY = bytes(32)
"""Both processes are ours, and what they send is no secret."""
_MESSAGE = KVReady("", 0, _KEY, 0, 1, 0, 1, 0, 1)
_START_LIMIT_S = 60.0
"""The other process imports torch first."""


def measure_link(sizes: Sequence[int], *, repeats: int, interface: str, timeout_s: float) -> list[LinkPoint]:
    """Seconds from the announcement's arrival at the receiver until the rows have arrived, one message at a time.

    Args:
        sizes: bytes, multiples of 4.
        interface: address that store and group bind to, as link.interface.
    Raises:
        TransferError: the other process ended, or a message took longer than `timeout_s`.
    """
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    mine, theirs = context.Pipe()
    store = LinkStore(interface, timeout_s)
    sender = context.Process(
        target=_send, args=(theirs, store.port, interface, timeout_s), name="profile-link", daemon=True
    )
    sender.start()
    theirs.close()
    try:
        return _measure(mine, store, sizes, repeats, interface, timeout_s)
    except (EOFError, OSError) as error:
        sender.join(1.0)
        raise TransferError("link_peer_lost", f"the sending process ended ({sender.exitcode})") from error
    finally:
        mine.close()  # which ends it
        sender.join(5.0)
        if sender.is_alive():
            sender.kill()
            sender.join()


def _measure(
    pipe: Connection, store: LinkStore, sizes: Sequence[int], repeats: int, interface: str, timeout_s: float
) -> list[LinkPoint]:
    _receive(pipe, _START_LIMIT_S)
    arrivals: queue.SimpleQueue[Arrival | str] = queue.SimpleQueue()
    receiver = LinkReceiver(
        _KEY,
        pair_key=_PAIR_KEY,
        store=store,
        interface=interface,
        timeout_s=timeout_s,
        on_poisoned=lambda _, reason: arrivals.put(reason),
        on_arrival=arrivals.put,
        send_credit=lambda seq: pipe.send(seq),
    )
    receiver.start()
    try:
        points = []
        for num_bytes in sizes:
            seconds = [_one(pipe, receiver, arrivals, num_bytes, timeout_s) for _ in range(repeats + 1)]
            points.append(
                LinkPoint(num_bytes=num_bytes, seconds=Spread.of(seconds[1:]))
            )  # the first warms up
        return points
    finally:
        receiver.close()


def _one(
    pipe: Connection,
    receiver: LinkReceiver,
    arrivals: queue.SimpleQueue[Arrival | str],
    num_bytes: int,
    timeout_s: float,
) -> float:
    """Have rows staged, announced, credited, sent; seconds from the announcement on."""
    pipe.send(-num_bytes)  # a size; credits are not negative
    seq = _receive(pipe, timeout_s)
    began = time.perf_counter()
    message = msgspec.structs.replace(_MESSAGE, seq=seq)
    receiver.expect(message, torch.Size([num_bytes // 4]), torch.float32)
    try:
        arrival = arrivals.get(timeout=2 * timeout_s)
    except queue.Empty:
        raise TransferError("link_timeout", f"a message of {num_bytes} bytes did not arrive") from None
    if isinstance(arrival, str):
        raise TransferError(arrival, f"while a message of {num_bytes} bytes was under way")
    seconds = time.perf_counter() - began
    if arrival.rows.nbytes != num_bytes or float(arrival.rows[-1]) != 1.0:
        raise TransferError("link_content", f"{num_bytes} bytes did not arrive as they were sent")
    return seconds


def _receive(pipe: Connection, limit_s: float) -> int:
    """What the other process says next."""
    if not pipe.poll(limit_s):
        raise TransferError("link_timeout", f"the sending process said nothing for {limit_s} s")
    return int(pipe.recv())


def _send(pipe: Connection, port: int, interface: str, timeout_s: float) -> None:
    """The other process: stage rows of each size asked for, pass credits on, end with the pipe."""
    torch.set_num_threads(1)
    pipe.send(0)  # here
    sender = LinkSender(
        _KEY,
        pair_key=_PAIR_KEY,
        store=(interface, port),
        interface=interface,
        timeout_s=timeout_s,
        on_poisoned=lambda *_: os._exit(1),
        announce=lambda message: pipe.send(message.seq),
        on_sent=lambda *_: None,
    )
    sender.start()
    try:
        while True:
            number = pipe.recv()
            if number < 0:
                sender.push(_MESSAGE, torch.ones(-number // 4))
            else:
                sender.credit(number, True)
    except (EOFError, OSError):
        sender.close()
