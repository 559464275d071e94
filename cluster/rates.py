"""requests of an API key, each with the tokens it may cost -> let in, or what it exceeds and when there is room again.

A limit "per minute" holds for every window of 60 seconds, wherever it begins: what was let in leaves the window as a
whole second, 60 to 61 seconds later. No burst beyond the limit is possible, and nothing is owed. Plain data and pure
functions of a clock that the caller gives: the router counts for all gateways with it, and a gateway by itself while
there is no router.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

_MINUTE_S = 60
MEMORY_S = _MINUTE_S + 1
"""What was let in longer ago counts for nothing."""
_BUSY_RETRY_S = 1.0
"""When to come again where requests have to end first: nobody knows how long they take."""

Exceeded = Literal["", "requests", "tokens", "concurrency"]


class Limits(msgspec.Struct, frozen=True):
    """What one API key may use; 0 is no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and answers. A request counts with what it may generate at most until it ends, then with what it did."""
    concurrency: int = 0
    """Requests at once."""

    @property
    def is_any(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrency)

    def over(self, default: Limits) -> Limits:
        """These, and of those not set the default's."""
        return Limits(
            self.requests_per_minute or default.requests_per_minute,
            self.tokens_per_minute or default.tokens_per_minute,
            self.concurrency or default.concurrency,
        )

    def part(self, share: int) -> Limits:
        """One of `share` equal parts, rounded up: nobody's part is nothing.

        >>> Limits(60, 1000, 1).part(3)
        Limits(requests_per_minute=20, tokens_per_minute=334, concurrency=1)
        """
        return Limits(*(math.ceil(value / max(1, share)) for value in msgspec.structs.astuple(self)))


class Standing(msgspec.Struct, frozen=True):
    """How a key stands after it asked; what has no limit is left at 0."""

    exceeded: Exceeded = ""
    """Why it is refused; "" lets it in."""
    retry_after_s: float = 0.0
    """Until what it asked for fits; with "tokens", infinite if it never does."""
    remaining_requests: int = 0
    remaining_tokens: int = 0
    reset_requests_s: float = 0.0
    """Until nothing of the limit is used, if nothing more is asked."""
    reset_tokens_s: float = 0.0


class Window:
    """Amounts of the last minute, by second."""

    def __init__(self) -> None:
        self.used = 0
        self._seconds: deque[list[int]] = deque()
        """[second, amount], oldest first."""

    def expire(self, now: float) -> None:
        """Forget what is older than a minute."""
        while self._seconds and self._seconds[0][0] + MEMORY_S <= now:
            self.used -= self._seconds.popleft()[1]

    def add(self, amount: int, now: float) -> int:
        """Count it in this second, whose number is returned; negative amounts give back."""
        second = math.floor(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0])
        self._seconds[-1][1] += amount
        self.used += amount
        return second

    def give_back(self, amount: int, second: int) -> None:
        """Of what was counted in that second; nothing if it is no longer counted."""
        for entry in self._seconds:
            if entry[0] == second:
                entry[1] -= amount
                self.used -= amount

    def wait_s(self, excess: int, now: float) -> float:
        """Until at least `excess` of what is counted is no longer; infinite if that is more than all of it."""
        if excess <= 0:
            return 0.0
        for second, amount in self._seconds:
            excess -= amount
            if excess <= 0:
                return second + MEMORY_S - now
        return math.inf

    def reset_s(self, now: float) -> float:
        """Until nothing is counted."""
        return self._seconds[-1][0] + MEMORY_S - now if self.used else 0.0


@dataclass(slots=True)
class _Use:
    """What one key uses."""

    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    open: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    """Request -> (second in which its tokens were counted, how many)."""


class Rates:
    """What all keys use. Requests are known by whom they came through and what they are called there."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}
        self._swept = 0.0

    def admit(
        self, key: str, limits: Limits, who: Hashable, tokens: int, now: float, *, is_let_in: bool = False
    ) -> Standing:
        """Count a request, or say why not: what is refused costs nothing.

        Args:
            tokens: that it may cost at most.
            is_let_in: by somebody else, already: it is counted whatever the limits say.
        """
        self._sweep(now)
        use = self._uses.setdefault(key, _Use())
        use.requests.expire(now)
        use.tokens.expire(now)
        exceeded: Exceeded = ""
        wait_s = 0.0
        if not is_let_in:
            exceeded, wait_s = self._exceeded(use, limits, tokens, now)
        if not exceeded:
            use.requests.add(1, now)
            use.open[who] = use.tokens.add(tokens, now), tokens
        return Standing(
            exceeded,
            wait_s,
            max(0, limits.requests_per_minute - use.requests.used) if limits.requests_per_minute else 0,
            max(0, limits.tokens_per_minute - use.tokens.used) if limits.tokens_per_minute else 0,
            use.requests.reset_s(now) if limits.requests_per_minute else 0.0,
            use.tokens.reset_s(now) if limits.tokens_per_minute else 0.0,
        )

    def _exceeded(self, use: _Use, limits: Limits, tokens: int, now: float) -> tuple[Exceeded, float]:
        """The first limit that has no room, and when all of them have."""
        found: list[tuple[Exceeded, float]] = []
        excess = use.requests.used + 1 - limits.requests_per_minute
        if limits.requests_per_minute and excess > 0:
            found.append(("requests", use.requests.wait_s(excess, now)))
        excess = use.tokens.used + tokens - limits.tokens_per_minute
        if limits.tokens_per_minute and excess > 0:
            found.append(("tokens", use.tokens.wait_s(excess, now)))
        if limits.concurrency and len(use.open) >= limits.concurrency:
            found.append(("concurrency", _BUSY_RETRY_S))
        return (found[0][0], max(wait_s for _, wait_s in found)) if found else ("", 0.0)

    def settle(self, key: str, who: Hashable, tokens: int) -> None:
        """A request ended and has cost this many: what it was counted with beyond that is given back."""
        use = self._uses.get(key)
        found = use.open.pop(who, None) if use is not None else None
        if use is not None and found is not None:
            second, counted = found
            use.tokens.give_back(max(0, counted - tokens), second)

    def drop(self, is_gone: Hashable) -> None:
        """Requests `(is_gone, anything)` will never be settled: they are no longer running."""
        for use in self._uses.values():
            for who in [who for who in use.open if isinstance(who, tuple) and who[0] == is_gone]:
                del use.open[who]

    def _sweep(self, now: float) -> None:
        """Once a minute: forget keys that use nothing."""
        if now - self._swept < _MINUTE_S:
            return
        self._swept = now
        for key, use in list(self._uses.items()):
            use.requests.expire(now)
            use.tokens.expire(now)
            if not (use.open or use.requests.used or use.tokens.used):
                del self._uses[key]
