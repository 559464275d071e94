"""Ends of streams -> when one that was turned away should come back; requests that end workers -> a quarantine.

All times are seconds of one monotonic clock, given by the caller.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec

from paceline.cluster.types import Request

_FORGET = 0.05
"""Share of the newest stream in the mean time a stream takes."""
_GUESS_S = 5.0
"""That time before any stream has ended."""
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
QUARANTINE_S = 600.0
MAX_QUARANTINED = 1024


class DrainRate:
    """How fast places become free, and how many are already waiting outside for them.

    By Little's law: the streams in the workers over the mean time one stays there. That holds from the first second of
    a burst, when a count of ends per second would still be that of the calm before it.
    """

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._outside = 0.0
        self._last = 0.0

    def ended(self, seconds: float) -> None:
        """A stream ended that was in a worker for this long, queued or running."""
        self._mean_s = seconds if self._mean_s is None else self._mean_s + _FORGET * (seconds - self._mean_s)

    def turn_away(self, now: float, num_streams: int) -> float:
        """One more is told to come back; seconds until those told before it and it should find places.

        Without the count of those outside, everybody would be sent away for the same second and come back together.
        """
        rate = num_streams / max(self._mean_s or _GUESS_S, 1e-3)  # ends per second
        self._outside = max(0.0, self._outside - rate * max(0.0, now - self._last)) + 1
        self._last = now
        wait = self._outside / rate if rate > 0 else MIN_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, wait))


class Quarantine:
    """Digests of requests that nobody serves, each for ten minutes; the oldest make way when there are too many."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, digest: bytes, now: float) -> None:
        self._until[digest] = now + QUARANTINE_S
        self._until.move_to_end(digest)
        while len(self._until) > MAX_QUARANTINED:
            self._until.popitem(last=False)

    def holds(self, digest: bytes, now: float) -> bool:
        return self._until.get(digest, 0.0) > now

    def living(self, now: float) -> tuple[bytes, ...]:
        """Everything still in force, oldest first."""
        return tuple(digest for digest, until in self._until.items() if until > now)


def request_digest(request: Request) -> bytes:
    """What a request asks for, whoever asks under whatever id and seed: the same again has the same digest (16 bytes)."""
    sampling = msgspec.structs.replace(request.sampling, seed=0, choice=0, prompt_index=0)
    bare = msgspec.structs.replace(request, id="", sampling=sampling, priority=0, cache_salt="")
    return hashlib.blake2b(msgspec.msgpack.encode(bare), digest_size=16).digest()
