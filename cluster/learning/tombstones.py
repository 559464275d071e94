"""What was ordered to be deleted -> whether a record may still be seen: small files that every reader asks first.

A tombstone is written before anything is deleted, so what is still in a worker's memory then, or in a shard that nobody
has rewritten yet, is gone for every reader at once. One of a tenant covers what was captured before its time (a request
counts from when it began), one of a request covers that request for ever. They are kept: storage of one is nothing.
"""

from __future__ import annotations

import re
import secrets
import threading
import time

import msgspec

from paceline.cluster.errors import StorageError
from paceline.cluster.learning.storage import FileSystem, files, read_whole, write_whole

_SKEW_S = 1.0
"""Clocks of workers may differ by this much; a tenant's request that began so shortly after its deletion goes as well."""
_STREAM = re.compile(r"(?:\.[0-9a-f]{8})?-[0-9]+-[0-9]+\Z")
"""What the gateway puts behind a request's id: of a repetition, and the indices of prompt and choice."""
_RUN = "@"
"""Behind it, and behind all of that, which run of which gateway it is: no client's id has one."""


class Tombstone(msgspec.Struct, frozen=True, omit_defaults=True):
    """An order to delete: a tenant's records, one request's, or one request's of one tenant."""

    time: float
    """Unix seconds."""
    tenant: str | None = None
    request_id: str | None = None


def request_of(stream_id: str) -> str:
    """The id that the client knows, of a stream's: all choices of one request share it.

    >>> request_of("order-7-0-1"), request_of("order-7.0badcafe-0-0"), request_of("order-7-0-0@18ea3472.12")
    ('order-7', 'order-7', 'order-7')
    """
    return _STREAM.sub("", choice_of(stream_id))


def choice_of(stream_id: str) -> str:
    """The id of one choice of a request, the same on every gateway and in every attempt.

    >>> choice_of("order-7-0-1@18ea3472.12")
    'order-7-0-1'
    """
    return stream_id.partition(_RUN)[0]


def is_of(stone: Tombstone, request_id: str, tenant: str, created: float) -> bool:
    """Whether a tombstone covers a record; `created` in Unix seconds, by the clock of whoever captured it.

    >>> is_of(Tombstone(9.0, tenant="acme"), "order-7-0-0", "acme", 8.0)
    True
    """
    if stone.request_id is not None:
        is_whose = stone.tenant is None or stone.tenant == tenant
        return is_whose and stone.request_id in (choice_of(request_id), request_of(request_id))
    return stone.tenant == tenant and created <= stone.time + _SKEW_S


def bury(
    fs: FileSystem,
    root: str,
    *,
    tenant: str | None = None,
    request_id: str | None = None,
    at: float | None = None,
) -> tuple[str, Tombstone]:
    """Write a tombstone; its path and itself. `at`: Unix seconds when it was asked for; None is now.

    Raises:
        StorageError: the storage cannot be used. Nothing is deleted then.
    """
    assert tenant is not None or request_id is not None, "a tombstone is somebody's"
    stone = Tombstone(time.time() if at is None else at, tenant, request_id)
    path = f"{root}/deleted/{int(stone.time * 1000):013d}-{secrets.token_hex(4)}.json"
    write_whole(fs, path, msgspec.json.encode(stone))
    return path, stone


class Tombstones:
    """All of a folder's. Files are read once; `refresh` looks for new ones. Safe for several threads."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._folder = f"{root}/deleted"
        self._seen: set[str] = set()
        self._tenants: dict[str, float] = {}
        self._requests: dict[str, set[str | None]] = {}
        """By request id, for which tenants; None is all."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._seen)

    def refresh(self) -> None:
        """Read what is new.

        Raises:
            StorageError: one cannot be read. Without all of them nobody knows what may be seen.
        """
        with self._lock:
            for path in sorted(files(self._fs, self._folder).keys() - self._seen):
                data = read_whole(self._fs, path)
                if data is None:
                    continue
                try:
                    self._add(msgspec.json.decode(data, type=Tombstone))
                except msgspec.MsgspecError as error:
                    raise StorageError(f"{path}: not a tombstone: {error}") from error
                self._seen.add(path)

    def _add(self, stone: Tombstone) -> None:
        if stone.request_id is not None:
            self._requests.setdefault(stone.request_id, set()).add(stone.tenant)
        elif stone.tenant is not None:
            self._tenants[stone.tenant] = max(stone.time, self._tenants.get(stone.tenant, 0.0))

    def covers(self, request_id: str, tenant: str, created: float) -> bool:
        """Whether a record must not be seen; `created` in Unix seconds, by the clock of whoever captured it."""
        if created <= self._tenants.get(tenant, float("-inf")) + _SKEW_S:
            return True
        return any(
            None in whose or tenant in whose
            for name in {choice_of(request_id), request_of(request_id)}
            if (whose := self._requests.get(name)) is not None
        )
