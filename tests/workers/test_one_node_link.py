"""Two ends of shared memory -> rows intact and in order, of any size; strangers, strays and the dead are noticed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.cluster.errors import ConfigError, LinkPoisoned
from paceline.workers import one_node_link
from paceline.workers.kv_link import LinkStore, check_backend, connect_store
from paceline.workers.one_node_link import CudaIpcGroup, OneNodeGroup

NAME = "a" * 32
Pair = tuple[OneNodeGroup, OneNodeGroup]


def in_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("paceline-")}


def joined(names: tuple[str, str] = (NAME, NAME), timeout_s: float = 5.0) -> list[object]:
    """Both ends, or what each raised instead."""
    store = LinkStore("127.0.0.1", timeout_s)
    ends: list[object] = [None, None]

    def join(rank: int) -> None:
        own = store.store if rank else connect_store(store.host, store.port, timeout_s)
        try:
            ends[rank] = OneNodeGroup(own, names[rank], rank, "127.0.0.1", timeout_s)
        except LinkPoisoned as error:
            ends[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * timeout_s)
    return ends


@pytest.fixture
def pair() -> Iterator[Pair]:
    sender, receiver = joined()
    assert isinstance(sender, OneNodeGroup) and isinstance(receiver, OneNodeGroup)
    yield sender, receiver


def together(*actions: Callable[[], object]) -> list[object]:
    """Run these in threads; what each returned or raised."""
    outcomes: list[object] = [None] * len(actions)

    def run(index: int) -> None:
        try:
            outcomes[index] = actions[index]()
        except LinkPoisoned as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return outcomes


def test_rows_of_any_size_arrive(pair: Pair) -> None:
    """Smaller than half the area, exactly half, several halves with an odd rest; several types."""
    sender, receiver = pair
    half = one_node_link._HALF_BYTES
    sizes = [1, 4096, half, half + 1, 3 * half + 5]
    sent = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    sent += [torch.randn(2, 3, 5), torch.randn(7, 2).bfloat16()]
    got: list[Tensor] = [torch.empty_like(rows) for rows in sent]

    def receive() -> None:
        posted = [receiver.recv(rows, tag) for tag, rows in enumerate(got)]
        for work in posted:
            work.wait()

    together(lambda: [sender.send(rows, tag).wait() for tag, rows in enumerate(sent)], receive)

    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


@pytest.mark.parametrize(("tag", "size"), [(1, 8), (0, 9)])
def test_what_is_not_the_next_transfer_is_refused(pair: Pair, tag: int, size: int) -> None:
    """Another number or another size: both ends may only give the link up."""
    sender, receiver = pair
    thread = threading.Thread(
        target=lambda: _ignore(lambda: sender.send(torch.zeros(8, dtype=torch.uint8), 0))
    )
    thread.start()

    with pytest.raises(LinkPoisoned, match="fifo_mismatch"):
        receiver.recv(torch.empty(size, dtype=torch.uint8), tag).wait()
    receiver._socket.close()
    thread.join(10)
    assert not thread.is_alive()


def _ignore(action: Callable[[], object]) -> None:
    try:
        action()
    except LinkPoisoned:
        pass


def test_a_peer_that_is_gone_is_noticed(pair: Pair) -> None:
    """Its socket closes with its process: no waiting for a time limit."""
    sender, receiver = pair
    sender._end()

    with pytest.raises(LinkPoisoned, match="link_lost"):
        receiver.recv(torch.empty(4), 0).wait()


def test_a_peer_that_hangs_is_given_up() -> None:
    """Nothing comes within the link's time limit."""
    _, receiver = ends = joined(timeout_s=0.3)
    assert all(isinstance(end, OneNodeGroup) for end in ends)

    with pytest.raises(LinkPoisoned, match="link_lost"):
        receiver.recv(torch.empty(4), 0).wait()  # type: ignore[attr-defined]


def test_nobody_without_the_links_name_gets_in() -> None:
    """The name is made of the pair's key: who does not have it finds no address, and the receiver waits in vain."""
    sender, receiver = joined(("b" * 32, NAME), timeout_s=0.5)

    assert isinstance(sender, LinkPoisoned) and isinstance(receiver, LinkPoisoned)


def test_no_file_is_left_and_none_can_be_opened_later(pair: Pair) -> None:
    """The area has no name as soon as both have it."""
    before = in_memory()
    others = joined()

    assert all(isinstance(end, OneNodeGroup) for end in others)
    assert in_memory() == before


def test_an_area_that_nobody_took_is_removed() -> None:
    """The receiver never came: the file goes with the sender's end."""
    before = in_memory()
    area = one_node_link.HostArea()
    assert Path(area.handle().decode()).stat().st_mode & 0o777 == 0o600
    assert len(in_memory() - before) == 1
    del area

    assert in_memory() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_back_end_that_cannot_be_had_is_a_configuration_error() -> None:
    """cuda_ipc without CUDA: named when the worker starts, not at its first prompt."""
    check_backend("shm")

    with pytest.raises(ConfigError, match="cuda_ipc"):
        check_backend("cuda_ipc")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_process_reads_device_memory_by_its_handle() -> None:
    """Two processes on one card: the rows arrive through memory that the first one owns. (A handle opens in another process only.)"""
    import multiprocessing

    store = LinkStore("127.0.0.1", 20.0)
    process = multiprocessing.get_context("spawn").Process(
        target=_send_from_gpu, args=(store.host, store.port)
    )
    process.start()
    receiver = CudaIpcGroup(store.store, NAME, 1, "127.0.0.1", 60.0)
    rows = torch.empty(3, one_node_link._HALF_BYTES // 4, device="cuda")
    receiver.recv(rows, 5).wait()
    process.join(60)

    assert torch.equal(rows.cpu().flatten(), torch.arange(rows.numel(), dtype=torch.float32))


def _send_from_gpu(host: str, port: int) -> None:
    sender = CudaIpcGroup(connect_store(host, port, 20.0), NAME, 0, "127.0.0.1", 60.0)
    rows = torch.arange(3 * one_node_link._HALF_BYTES // 4, dtype=torch.float32, device="cuda")
    sender.send(rows, 5).wait()
