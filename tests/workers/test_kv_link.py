"""Both ends of a link -> messages in order and intact, on gloo and under NCCL's rules; nothing listens elsewhere."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from paceline.cluster.types import KVReady
from paceline.workers.kv_cache import digest
from paceline.workers.kv_link import (
    BACKENDS,
    Arrival,
    LinkReceiver,
    LinkSender,
    LinkStore,
    connect_store,
)

KEY = bytes(range(32))
PLACE = KVReady("r", 1, "kv/1", 0, 1, 0, 2, 0, 5)
LIMIT_S = 10.0


@dataclass
class Ends:
    """A link between two threads. Announcements wait in `announced` until a test passes them on."""

    store: LinkStore
    sender: LinkSender
    receiver: LinkReceiver
    announced: queue.SimpleQueue[KVReady] = field(default_factory=queue.SimpleQueue)
    arrivals: queue.SimpleQueue[Arrival] = field(default_factory=queue.SimpleQueue)
    poisoned: queue.SimpleQueue[tuple[str, str]] = field(default_factory=queue.SimpleQueue)
    sent: list[tuple[int, float]] = field(default_factory=list)

    def expect(self, message: KVReady, rows: Tensor) -> None:
        self.receiver.expect(message, rows.shape, rows.dtype)

    def pass_on(self, rows: Tensor) -> None:
        """Tell the receiver of the next announcement."""
        self.expect(self.announced.get(timeout=LIMIT_S), rows)


Link = Callable[..., Ends]


@pytest.fixture
def link() -> Iterator[Link]:
    """Make a link: back-end's name, or one for each end; pair keys; other settings of the sender."""
    made: list[Ends] = []

    def make(
        backend: str = "gloo",
        *,
        receiving: str = "",
        keys: tuple[bytes, bytes] = (KEY, KEY),
        interface: str = "127.0.0.1",
        timeout_s: float = 5.0,
        **how: bool,
    ) -> Ends:
        store = LinkStore(interface, timeout_s)
        ends: Ends
        sender = LinkSender(
            "kv/1",
            pair_key=keys[0],
            store=(store.host, store.port),
            interface=interface,
            timeout_s=timeout_s,
            open_group=BACKENDS[backend],
            on_poisoned=lambda _, reason: ends.poisoned.put(("sender", reason)),
            announce=lambda message: ends.announced.put(message),
            on_sent=lambda num_bytes, seconds: ends.sent.append((num_bytes, seconds)),
            **how,
        )
        receiver = LinkReceiver(
            "kv/1",
            pair_key=keys[1],
            store=store,
            interface=interface,
            timeout_s=timeout_s,
            open_group=BACKENDS[receiving or backend],
            on_poisoned=lambda _, reason: ends.poisoned.put(("receiver", reason)),
            on_arrival=lambda arrival: ends.arrivals.put(arrival),
            send_credit=lambda seq: sender.credit(seq, True),
        )
        ends = Ends(store, sender, receiver)
        made.append(ends)
        sender.start()
        receiver.start()
        return ends

    yield make
    for ends in made:
        ends.sender.close()
        ends.receiver.close()
        for end in (ends.sender, ends.receiver):
            end._thread.join(LIMIT_S)
            assert not end._thread.is_alive(), "a link's thread outlived it"


def some_rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (1, 2, 2, 5, 8), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_arrive_in_order_and_intact(link: Link, backend: str) -> None:
    """Of different sizes, several announced before the first is received, each with the digest of its rows."""
    ends = link(backend)
    pushed = [some_rows(i, 1, 2, 2, num, 8) for i, num in enumerate((5, 1, 700, 3, 64))]
    for rows in pushed:
        ends.sender.push(PLACE, rows)
    said = threading.Event()
    ends.sender.after(said.set)

    assert said.wait(LIMIT_S)
    for rows in pushed:
        ends.pass_on(rows)
    arrivals = [ends.arrivals.get(timeout=LIMIT_S) for _ in pushed]
    assert [arrival.message.seq for arrival in arrivals] == list(range(len(pushed)))
    for arrival, rows in zip(arrivals, pushed, strict=True):
        assert torch.equal(arrival.rows, rows)
        place = msgspec.structs.replace(PLACE, digest_by="gmac")  # by a processor
        assert arrival.message.digest == digest(KEY, place, rows)
    assert ends.poisoned.empty()


@pytest.mark.parametrize("backend", BACKENDS)
def test_refused_messages_are_released_and_the_next_ones_arrive(link: Link, backend: str) -> None:
    """What nobody wants any more is not sent, and nobody waits for it."""
    ends = link(backend)
    rows = [some_rows(i) for i in range(3)]
    for one in rows:
        ends.sender.push(PLACE, one)
    ends.pass_on(rows[0])
    ends.sender.credit(ends.announced.get(timeout=LIMIT_S).seq, False)
    ends.pass_on(rows[2])

    arrived = [ends.arrivals.get(timeout=LIMIT_S) for _ in range(2)]
    assert [arrival.message.seq for arrival in arrived] == [0, 2]
    assert torch.equal(arrived[1].rows, rows[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plain_link_returns_when_the_rows_are_there(link: Link, backend: str) -> None:
    """Without overlap `push` waits for credit and transfer; with it, it waits for nothing."""
    ends = link(backend, overlap=False)
    rows = some_rows(0)
    passing = threading.Thread(target=ends.pass_on, args=(rows,))
    passing.start()
    ends.sender.push(PLACE, rows)
    passing.join()

    assert [num_bytes for num_bytes, _ in ends.sent] == [rows.nbytes]
    assert torch.equal(ends.arrivals.get(timeout=LIMIT_S).rows, rows)
    overlapped = link(backend)
    overlapped.sender.push(PLACE, rows)
    assert overlapped.sent == []


def test_a_plain_link_does_not_wait_for_a_peer_that_is_gone(link: Link) -> None:
    """The engine's thread comes back within the link's time limit."""
    ends = link(overlap=False, timeout_s=0.5)
    ends.sender.push(PLACE, some_rows(0))  # no credit will come

    assert ends.sent == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (1, 2, 2, 6, 8)},
        {"shape": (1, 2, 2, 4, 8)},
        {"dtype": torch.float64},
        {"seq": 1},
    ],
    ids=["longer", "shorter", "wider", "out of order"],
)
def test_strict_order_and_size(link: Link, wrong: dict[str, object]) -> None:
    """Whatever NCCL would hang on, or take for something else, ends the strict link by name and delivers nothing."""
    ends = link("strict_fifo")
    rows = some_rows(0)
    ends.sender.push(PLACE, rows)
    message = ends.announced.get(timeout=LIMIT_S)
    shape = torch.Size(wrong.get("shape", rows.shape))  # type: ignore[arg-type]
    dtype = wrong.get("dtype", rows.dtype)
    if "seq" in wrong:  # the receiver believes that another message comes first
        message = msgspec.structs.replace(message, seq=1)
        ends.receiver._send_credit = lambda _: ends.sender.credit(0, True)
    ends.receiver.expect(message, shape, dtype)  # type: ignore[arg-type]

    assert ends.poisoned.get(timeout=LIMIT_S) == ("receiver", "fifo_mismatch")
    assert ends.arrivals.empty() and not ends.receiver.is_usable


def test_gloo_itself_sets_right_what_the_strict_link_refuses(link: Link) -> None:
    """The negative control: two transfers in swapped order pass over gloo's tags, and not over the strict link."""
    outcomes = {}
    for name in ("gloo", "strict_fifo"):
        group = BACKENDS[name]
        store = LinkStore("127.0.0.1", 5.0)
        groups: list[object] = [None, None]

        def join(
            rank: int, store: LinkStore = store, group: object = group, into: list[object] = groups
        ) -> None:
            own = store.store if rank else connect_store(store.host, store.port, 5.0)
            into[rank] = group(own, "x", rank, "127.0.0.1", 5.0)  # type: ignore[operator]

        threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        sender, receiver = groups
        first, second = torch.full((4,), 1.0), torch.full((4,), 2.0)
        sending = threading.Thread(target=_send_both, args=(sender, first, second), daemon=True)
        sending.start()
        into = torch.zeros(4)
        try:
            receiver.recv(into, 2).wait()  # type: ignore[attr-defined]
            receiver.recv(torch.zeros(4), 1).wait()  # type: ignore[attr-defined]
            outcomes[name] = into.tolist() == [2.0] * 4
        except Exception as error:  # noqa: BLE001
            outcomes[name] = getattr(error, "reason", str(error))
        del sender, receiver, groups[:]
        sending.join(LIMIT_S)

    assert outcomes == {"gloo": True, "strict_fifo": "fifo_mismatch"}


def _send_both(sender: object, first: Tensor, second: Tensor) -> None:
    try:
        works = [sender.send(first, 1), sender.send(second, 2)]  # type: ignore[attr-defined]
        for work in works:
            work.wait()
    except RuntimeError:
        return  # the strict receiver left


def test_a_credit_for_nothing_poisons_the_link(link: Link) -> None:
    """A receiver that credits what was never announced has lost count."""
    ends = link()
    ends.sender.credit(7, True)

    assert ends.poisoned.get(timeout=LIMIT_S) == ("sender", "bad_credit")
    assert not ends.sender.is_usable


def test_who_does_not_know_the_pairs_key_finds_nobody(link: Link) -> None:
    """The store lets anybody in, the group's name does not."""
    ends = link(keys=(KEY, bytes(32)), timeout_s=0.5)

    assert {ends.poisoned.get(timeout=LIMIT_S)[1] for _ in range(2)} == {"link_setup"}


def test_nothing_listens_off_the_configured_interface(link: Link) -> None:
    """Store and group of a link on 127.0.0.2 open no listening socket on any other address."""
    before = listeners()
    ends = link(interface="127.0.0.2")
    rows = some_rows(0)
    ends.sender.push(PLACE, rows)
    ends.pass_on(rows)
    assert torch.equal(ends.arrivals.get(timeout=LIMIT_S).rows, rows)
    new = listeners() - before

    assert new and {host for host, _ in new} == {"127.0.0.2"}


def listeners() -> set[tuple[str, int]]:
    """(address, port) of every listening TCP socket of this process, as `ss -ltnp` would say."""
    mine = {_target(entry.path) for entry in os.scandir("/proc/self/fd")}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state != "0A" or f"socket:[{rest[5]}]" not in mine:
                continue
            address, port = local.split(":")
            words = bytes.fromhex(address)
            raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
            found.add((socket.inet_ntop(family, raw), int(port, 16)))
    return found


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # the scan's own, closed again
        return ""
