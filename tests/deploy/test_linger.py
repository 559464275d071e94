"""A port -> the end of its last connection: what a pod waits for before it is stopped."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.deploy.linger import connections, linger


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        found.listen()
        yield found


def test_it_waits_for_those_who_are_connected(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    server, _ = listener.accept()
    assert connections(port) == 1

    def end() -> None:
        time.sleep(0.3)
        client.close()
        server.close()

    ending = threading.Thread(target=end)
    began = time.monotonic()
    ending.start()
    left = linger(port, 10.0)
    ending.join()

    assert left == 0 and 0.2 < time.monotonic() - began < 5.0


def test_it_does_not_wait_for_ever(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):
        server, _ = listener.accept()
        with server:
            assert linger(port, 0.1) == 1


def test_a_port_that_nobody_uses_keeps_nobody(listener: socket.socket) -> None:
    """Connections from that port, or a listener on it, are none to it."""
    began = time.monotonic()

    assert linger(listener.getsockname()[1], 10.0) == 0
    assert time.monotonic() - began < 1.0


def test_those_who_do_not_know_yet_find_it(listener: socket.socket) -> None:
    """Nobody is connected, and somebody may be sent here until all have heard."""
    began = time.monotonic()

    assert linger(listener.getsockname()[1], 10.0, notice_s=0.6) == 0
    assert 0.6 <= time.monotonic() - began < 5.0
