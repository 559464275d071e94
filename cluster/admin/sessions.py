"""Sign-ins and their cookies -> who is signed in, until it ends; addresses with wrong keys -> who has to wait.

Both live in Control's memory: a restart signs everybody out.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

IDLE_S = 3600.0
"""A session that asked for nothing for so long is over; a stream of events is no asking."""
MAX_AGE_S = 12 * 3600.0
_MAX_SESSIONS = 64
_MAX_ADDRESSES = 4096
_TOKEN_BYTES = 32

Clock = Callable[[], float]


@dataclass(slots=True)
class Session:
    """One browser that showed the key."""

    id: str
    """For the audit trail; the cookie cannot be told from it."""
    csrf: str
    """What a page of ours sends with each request that changes something, and no other page knows."""
    began: float
    used: float
    is_closed: bool = False
    address: str = ""
    key_id: str = ""
    """Of the key that opened it."""

    def allows(self, token: str) -> bool:
        """Whether `token` is this session's own, in the same time wherever it differs."""
        return hmac.compare_digest(token.encode(errors="replace"), self.csrf.encode())


@dataclass
class Sessions:
    """All sessions, by the hash of their cookie."""

    clock: Clock
    _all: dict[bytes, Session] = field(default_factory=dict)

    def open(self, address: str, key_id: str = "") -> tuple[Session, str]:
        """A new session and its cookie. Its name is never taken from outside: nobody can fix one in advance."""
        self._sweep()
        while len(self._all) >= _MAX_SESSIONS:
            oldest = min(self._all, key=lambda digest: self._all[digest].used)
            self._all.pop(oldest).is_closed = True
        now = self.clock()
        cookie = secrets.token_urlsafe(_TOKEN_BYTES)
        session = Session(
            secrets.token_hex(4),
            secrets.token_urlsafe(_TOKEN_BYTES),
            now,
            now,
            address=address,
            key_id=key_id,
        )
        self._all[_digest(cookie)] = session
        return session, cookie

    def find(self, cookie: str, *, touch: bool = True) -> Session | None:
        """The living session of a cookie."""
        session = self._all.get(_digest(cookie))
        if session is None or not self.is_alive(session):
            return None
        if touch:
            session.used = self.clock()
        return session

    def is_alive(self, session: Session) -> bool:
        """Whether it is neither closed, nor idle for too long, nor too old."""
        return not session.is_closed and self.seconds_left(session) > 0

    def seconds_left(self, session: Session) -> float:
        """Until it ends if nothing more is asked."""
        now = self.clock()
        return min(session.used + IDLE_S, session.began + MAX_AGE_S) - now

    def close(self, session: Session) -> None:
        """Sign out."""
        session.is_closed = True
        self._sweep()

    def keep_only(self, is_valid: Callable[[str], bool]) -> None:
        """End the sessions of keys that are valid no longer."""
        for session in self._all.values():
            session.is_closed = session.is_closed or not is_valid(session.key_id)
        self._sweep()

    def _sweep(self) -> None:
        self._all = {digest: session for digest, session in self._all.items() if self.is_alive(session)}


class Attempts:
    """Tokens by address: each wrong key takes one, and without one no key is looked at."""

    def __init__(self, clock: Clock, *, burst: int, every_s: float) -> None:
        """An address may fail `burst` times at once, then once in `every_s`."""
        self._clock = clock
        self._burst, self._every_s = burst, every_s
        self._debts: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, address: str) -> float:
        """How long this address has to wait; 0 if it may try now."""
        return max(0.0, (self._debt(address) - (self._burst - 1)) * self._every_s)

    def take(self, address: str) -> None:
        """One was used up."""
        self._debts[address] = (self._clock(), min(self._debt(address) + 1, float(self._burst)))
        self._debts.move_to_end(address)
        while len(self._debts) > _MAX_ADDRESSES:
            self._debts.popitem(last=False)

    def _debt(self, address: str) -> float:
        when, debt = self._debts.get(address, (0.0, 0.0))
        return max(0.0, debt - (self._clock() - when) / self._every_s)


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode(errors="replace")).digest()
