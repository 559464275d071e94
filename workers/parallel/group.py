"""Tensors of the ranks of one gang -> their sum everywhere, the leader's bytes everywhere, or all of them at the leader.

The group is the gang's own and belongs to no other: it is not the process's default group, KV links have groups of two
of their own, and a process may be in several gangs. All ranks live on one node, so it binds to loopback.
"""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # exported, but not declared so
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from paceline.cluster.errors import GangLost

INTERFACE = "127.0.0.1"
_FIRST_BYTES = 4096
"""A frame up to this long is one broadcast: most decode steps are."""
_LENGTH = struct.Struct(">I")
_IDLE = timedelta(days=365)
"""Ranks wait for their leader's next frame as long as it lives: that it died is seen by its closed connection."""


class Group:
    """Rank `rank` of `size`; rank 0 leads. Every call is made by all ranks in the same order, from one thread of each."""

    def __init__(self, rank: int, size: int, device: str = "cpu") -> None:
        """`device`: where what is summed lies. On GPUs NCCL sums, in an order of its own; frames and gathers stay on gloo."""
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self._group: Any = None
        self._gpus: Any = None
        self._from_leader = BroadcastOptions()
        self._from_leader.rootRank = 0
        if rank:
            self._from_leader.timeout = _IDLE
        self._to_leader = GatherOptions()
        self._to_leader.rootRank = 0

    def join(self, store: TCPStore, name: str, timeout_s: float) -> None:
        """Meet the others; `timeout_s`: how long a rank may keep the others waiting, here and in each call.

        Raises:
            GangLost: not all came in time.
        """
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        options._devices = [ProcessGroupGloo.create_device(hostname=INTERFACE)]
        try:
            self._group = ProcessGroupGloo(PrefixStore(name, store), self.rank, self.size, options)
        except RuntimeError as error:
            raise GangLost(
                f"rank {self.rank} of {self.size}: not all ranks came: {str(error)[:200]}"
            ) from error
        if self.device.type == "cuda":
            self._gpus = _nccl(PrefixStore(f"{name}/gpus", store), self.rank, self.size, timeout_s)

    def sum(self, mine: Tensor) -> Tensor:
        """The sum of every rank's tensor of this shape, equal bit for bit on all ranks; overwrites `mine`.

        An element's bits depend on no other element: with more than two ranks gloo would add in an order that depends
        on where in the buffer it stands, and a row's logits on how many rows are computed with it.
        """
        mine = mine.contiguous()
        if mine.is_cuda:
            _wait(self._gpus.allreduce([mine]))
            return mine
        if self.size == 2:
            _wait(self._group.allreduce([mine]))
            return mine
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        _wait(self._group.allgather([parts], [mine]))
        total = torch.add(parts[0], parts[1], out=mine)
        for part in parts[2:]:
            total += part
        return total

    def send(self, frame: bytes) -> None:
        """The leader's bytes, to all ranks."""
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        data = _LENGTH.pack(len(frame)) + frame
        num = min(len(data), _FIRST_BYTES)
        first[:num] = torch.frombuffer(bytearray(data[:num]), dtype=torch.uint8)
        _wait(self._group.broadcast([first], self._from_leader))
        if len(data) > _FIRST_BYTES:
            rest = torch.frombuffer(bytearray(data[_FIRST_BYTES:]), dtype=torch.uint8)
            _wait(self._group.broadcast([rest], self._from_leader))

    def receive(self) -> bytes:
        """What the leader sends next; other ranks only."""
        first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        _wait(self._group.broadcast([first], self._from_leader))
        (length,) = _LENGTH.unpack(first[: _LENGTH.size].numpy().tobytes())
        frame: bytes = first[_LENGTH.size : _LENGTH.size + length].numpy().tobytes()
        if len(frame) < length:
            rest = torch.empty(length - len(frame), dtype=torch.uint8)
            _wait(self._group.broadcast([rest], self._from_leader))
            frame += rest.numpy().tobytes()
        return frame

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor of this shape, by rank, at the leader; an empty list elsewhere."""
        parts = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else []
        _wait(self._group.gather([parts] if parts else [], [mine.contiguous()], self._to_leader))
        return parts


def _nccl(store: PrefixStore, rank: int, size: int, timeout_s: float) -> Any:
    """NCCL among the gang's GPUs, one each; this process has chosen its own (`torch.cuda.set_device`)."""
    from torch.distributed import ProcessGroupNCCL  # not in builds for CPUs

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupNCCL(store, rank, size, options)


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise GangLost(f"a rank is gone or hangs: {str(error)[:200]}") from error
