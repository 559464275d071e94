"""KV rows of one worker -> another on the same node, through memory that both have mapped: host memory, or a GPU's.

The receiver listens on a socket of the link's interface; the sender connects, says that it knows the link's secret name, and
hands over the handle of a staging area of its own. A transfer is a header (tag, bytes) and then pieces, by turns in the
area's two halves: the sender copies one in and says so, the receiver copies it out and says so. No bytes of KV go
through the socket, and the order is strict, as NCCL's is.

`shm` is a file in memory that has no name any more once both have it. `cuda_ipc` is device memory that another process
maps by its IPC handle: the only way between two workers on one GPU, where NCCL refuses two ranks.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import socket
import struct
import weakref
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not declared so

from paceline.cluster.errors import LinkPoisoned

_HALF_BYTES = 4 << 20
_HEADER = struct.Struct("<qq")
_WORD = struct.Struct("<i")
_TOKEN_BYTES = 32


class Area(Protocol):
    """Memory of two processes."""

    octets: Tensor
    """uint8 [2, half]."""

    def handle(self) -> bytes:
        """What the other process opens it by."""
        ...

    def opened(self) -> None:
        """The other process has it."""

    def wait(self) -> None:
        """Until copies into or out of it are done."""


class HostArea:
    """A file in memory, readable by this user alone, and by nobody once it is opened."""

    def __init__(self, path: str = "") -> None:
        self._path = Path(path or f"/dev/shm/paceline-{secrets.token_hex(16)}")
        size = 2 * _HALF_BYTES
        flags = os.O_RDWR if path else os.O_RDWR | os.O_CREAT | os.O_EXCL
        fd = os.open(self._path, flags, 0o600)
        try:
            if not path:
                os.ftruncate(fd, size)
                self._unlink = weakref.finalize(self, self._path.unlink, missing_ok=True)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.octets = torch.from_numpy(np.frombuffer(self._map, np.uint8)).view(2, _HALF_BYTES)

    def handle(self) -> bytes:
        return str(self._path).encode()

    @classmethod
    def open(cls, handle: bytes) -> HostArea:
        return cls(handle.decode())

    def opened(self) -> None:
        self._unlink()

    def wait(self) -> None:
        """Copies of host memory are done when they return."""


class CudaArea:
    """Memory of the current CUDA device."""

    def __init__(self, octets: Tensor | None = None) -> None:
        self.octets = (
            torch.empty(2, _HALF_BYTES, dtype=torch.uint8, device="cuda") if octets is None else octets
        )

    def handle(self) -> bytes:
        return msgspec.msgpack.encode(self.octets.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]

    @classmethod
    def open(cls, handle: bytes) -> CudaArea:
        # The device's number is the sender's; here the same card may have another one.
        _, *rest = msgspec.msgpack.decode(handle)
        device = torch.cuda.current_device()
        storage = torch.UntypedStorage._new_shared_cuda(device, *rest)
        octets = torch.empty(0, dtype=torch.uint8, device="cuda").set_(
            storage, 0, (2, _HALF_BYTES), (_HALF_BYTES, 1)
        )
        return cls(octets)

    def opened(self) -> None:
        """The handle counts who has it."""

    def wait(self) -> None:
        torch.cuda.current_stream().synchronize()


class OneNodeGroup:
    """Two ranks with a common staging area. Building it blocks until the other side joins.

    Raises:
        LinkPoisoned: it did not join in time, is not who it should be, or is on another node.
    """

    area_kind: type[HostArea | CudaArea] = HostArea
    device = "cpu"
    """Where received rows are to lie."""

    def __init__(self, store: TCPStore, name: str, rank: int, interface: str, timeout_s: float) -> None:
        try:
            token = name.encode()[:_TOKEN_BYTES].ljust(_TOKEN_BYTES, b"\0")
            self._socket = (
                _connect(store, name, timeout_s) if rank == 0 else _accept(store, name, interface, timeout_s)
            )
            self._end = weakref.finalize(self, self._socket.close)
            if rank == 0:
                area: Area = self.area_kind()
                handle = area.handle()
                self._socket.sendall(token + _WORD.pack(len(handle)) + handle)
                self._take(_WORD.size)
                area.opened()
            else:
                if not hmac.compare_digest(self._take(_TOKEN_BYTES), token):
                    raise LinkPoisoned("link_setup", "the other side does not know the link's name")
                (size,) = _WORD.unpack(self._take(_WORD.size))
                area = self.area_kind.open(self._take(size))
                self._socket.sendall(_WORD.pack(0))
        except (OSError, RuntimeError) as error:
            if isinstance(error, LinkPoisoned):
                raise
            raise LinkPoisoned("link_setup", str(error)[:200]) from error
        self._area = area

    def send(self, rows: Tensor, tag: int) -> _Done:
        """Rank 0. Returns when the receiver has them."""
        octets = _octets(rows)
        self._put(_HEADER.pack(tag, octets.numel()))
        pieces = torch.split(octets, _HALF_BYTES)
        for index, piece in enumerate(pieces):
            if index >= 2:
                self._take(_WORD.size)
            self._area.octets[index % 2, : piece.numel()].copy_(piece)
            self._area.wait()
            self._put(_WORD.pack(piece.numel()))
        for _ in pieces[:2]:
            self._take(_WORD.size)
        return _Done()

    def recv(self, rows: Tensor, tag: int) -> _Receive:
        """Rank 1. `rows` is filled when the work was waited for; several are to be waited for in order."""
        return _Receive(self, rows, tag)

    def receive(self, rows: Tensor, tag: int) -> None:
        """Fill `rows` with the next transfer, which must be this one."""
        octets = _octets(rows)
        expected = (tag, octets.numel())
        found = _HEADER.unpack(self._take(_HEADER.size))
        if found != expected:
            raise LinkPoisoned("fifo_mismatch", f"expected (tag, bytes) {expected}, got {found}")
        for index, piece in enumerate(torch.split(octets, _HALF_BYTES)):
            self._take(_WORD.size)
            piece.copy_(self._area.octets[index % 2, : piece.numel()])
            self._area.wait()
            self._put(_WORD.pack(0))

    def _put(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise LinkPoisoned("link_lost", str(error)[:200]) from error

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                more = self._socket.recv(size - len(data))
            except OSError as error:
                raise LinkPoisoned("link_lost", str(error)[:200]) from error
            if not more:
                raise LinkPoisoned("link_lost", "the other side closed the link")
            data += more
        return data


class CudaIpcGroup(OneNodeGroup):
    """The same through device memory; rows are on the GPU at both ends."""

    area_kind = CudaArea
    device = "cuda"


class _Done:
    def wait(self) -> object:
        """It is done."""
        return None


class _Receive:
    def __init__(self, group: OneNodeGroup, rows: Tensor, tag: int) -> None:
        self._group, self._rows, self._tag = group, rows, tag

    def wait(self) -> object:
        """Block until the rows are here."""
        self._group.receive(self._rows, self._tag)
        return None


def _octets(rows: Tensor) -> Tensor:
    assert rows.is_contiguous(), "rows on a link are contiguous"
    return rows.view(-1).view(torch.uint8)


def _accept(store: TCPStore, name: str, interface: str, timeout_s: float) -> socket.socket:
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((interface, 0))
        listener.listen(1)
        listener.settimeout(timeout_s)
        store.set(f"{name}/address", f"{interface} {listener.getsockname()[1]}")
        connection, _ = listener.accept()
    return _ready(connection, timeout_s)


def _connect(store: TCPStore, name: str, timeout_s: float) -> socket.socket:
    host, port = store.get(f"{name}/address").decode().split()
    return _ready(socket.create_connection((host, int(port)), timeout_s), timeout_s)


def _ready(connection: socket.socket, timeout_s: float) -> socket.socket:
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
