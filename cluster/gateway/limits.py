"""a key's request and what it may cost -> let in, with headers that say how the key stands, or a 429 that says until when.

The router counts for all gateways together, exactly: each request of a key with limits asks it once. While there is no
router, each gateway counts by itself, with one of as many equal parts of each limit as there are gateways, rounded up, and
goes on from what it let in itself in the minute before. All together they then let in less than twice a key's limits in
any minute, however unevenly its requests came before. A new router is told of all that was let in within a minute, and
is exact again.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog

from paceline.cluster import wire
from paceline.cluster.errors import RateLimited, RequestError
from paceline.cluster.keys import Key
from paceline.cluster.rates import MEMORY_S, Limits, Rates, Standing
from paceline.cluster.types import Admit, Admitted, Settle

log = structlog.get_logger(__name__)

_SWEEP_S = 10.0
_ANSWER_S = 1.0
"""For a router that is connected but does not answer."""


class Counter(Protocol):
    """Who counts requests of keys."""

    async def admit(self, request_id: str, key: str, limits: Limits, tokens: int) -> Standing:
        """Count a request, or say why not; `request_id` is one that no other open request here has."""
        ...

    def settle(self, request_id: str, key: str, tokens: int) -> None:
        """It ended, and did cost this many tokens."""
        ...


class LocalCounter:
    """A Counter in this process: exact for a single gateway."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._rates = Rates()
        self._clock = clock

    async def admit(self, request_id: str, key: str, limits: Limits, tokens: int) -> Standing:
        """See `Counter.admit`."""
        return self._rates.admit(key, limits, request_id, tokens, self._clock())

    def settle(self, request_id: str, key: str, tokens: int) -> None:
        """See `Counter.settle`."""
        self._rates.settle(key, request_id, tokens)


@dataclass(slots=True)
class _LetIn:
    """A request that is running, or ended less than a minute ago."""

    at: float
    message: Admit
    told: wire.Identity | None
    """The router that counted it."""
    used: int | None = None
    """Tokens it did cost; None while it runs."""


class RouterCounter:
    """A Counter that asks the router, and counts by itself while there is none."""

    def __init__(
        self,
        *,
        router: Callable[[], wire.Peer | None],
        num_gateways: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`router`: the connection to it, if there is one now. `num_gateways`: alive now, as far as is known."""
        self._router = router
        self._num_gateways = num_gateways
        self._clock = clock
        self._own = Rates()
        """What this gateway let in, whoever allowed it."""
        self._asked: dict[str, asyncio.Future[Standing | None]] = {}
        self._let_in: dict[str, _LetIn] = {}
        self._swept = 0.0

    async def admit(self, request_id: str, key: str, limits: Limits, tokens: int) -> Standing:
        """See `Counter.admit`."""
        message = Admit(request_id, key, limits, tokens)
        standing = await self._ask(message)
        now, told = self._clock(), None
        if standing is None:
            share = limits.part(self._num_gateways())
            standing = self._own.admit(key, share, request_id, tokens, now)
            if standing.exceeded:
                self._send(Settle(request_id, key, 0))  # should the router let it in after all
        elif not standing.exceeded:
            told = self._identity()
            self._own.admit(key, limits, request_id, tokens, now, is_let_in=True)
        if not standing.exceeded:
            self._let_in[request_id] = _LetIn(now, message, told)
        self._sweep(now)
        return standing

    def settle(self, request_id: str, key: str, tokens: int) -> None:
        """See `Counter.settle`."""
        self._own.settle(key, request_id, tokens)
        if request_id in self._let_in:
            self._let_in[request_id].used = tokens
        self._send(Settle(request_id, key, tokens))

    async def _ask(self, message: Admit) -> Standing | None:
        """The router's answer; None if it died, is not there or takes too long."""
        router = self._router()
        if router is None:
            return None
        waiting: asyncio.Future[Standing | None] = asyncio.get_running_loop().create_future()
        self._asked[message.request_id] = waiting
        router.send(message)
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await waiting
        except TimeoutError:
            log.warning("router_slow", request=message.request_id)
            return None
        except asyncio.CancelledError:  # the client left
            self._send(Settle(message.request_id, message.key, 0))
            raise
        finally:
            del self._asked[message.request_id]

    def _send(self, message: Admit | Settle) -> None:
        router = self._router()
        if router is not None:
            router.send(message)

    def _sweep(self, now: float) -> None:
        if now - self._swept > _SWEEP_S:
            self._swept = now
            self._let_in = {
                name: one
                for name, one in self._let_in.items()
                if one.used is None or now - one.at <= MEMORY_S
            }

    def on_answer(self, message: Admitted) -> None:
        """The router said so."""
        waiting = self._asked.get(message.request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.standing)

    def on_router_lost(self) -> None:
        """Nobody will answer."""
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_result(None)

    def on_router(self, router: wire.Peer) -> None:
        """A connection to a new one that knows nothing yet, or to the same one, which has forgotten what runs here."""
        now = self._clock()
        for name, one in self._let_in.items():
            is_running, is_counted = one.used is None, one.told == router.identity
            if not is_running and (is_counted or now - one.at > MEMORY_S):
                continue
            tokens = 0 if is_counted else one.message.tokens
            router.send(msgspec.structs.replace(one.message, tokens=tokens, is_let_in=True))
            if one.used is not None:
                router.send(Settle(name, one.message.key, one.used))
            one.told = router.identity

    def _identity(self) -> wire.Identity | None:
        router = self._router()
        return router.identity if router is not None else None


@dataclass(frozen=True, slots=True)
class Pass:
    """A request that was let in."""

    headers: dict[str, str]
    """What its answer says of the key's limits."""
    settle: Callable[[int], None]
    """To be called once when it ended, with the tokens that it did cost."""


class Door:
    """Lets requests of keys in, as far as their limits go."""

    def __init__(self, counter: Counter, default: Limits) -> None:
        """`default`: of keys that have none of their own."""
        self._counter = counter
        self._default = default
        self._numbers = itertools.count(1)

    async def enter(self, key: Key | None, tokens: int) -> Pass:
        """One request that costs `tokens` at most.

        Raises:
            RateLimited: not now.
            RequestError: never: it is larger than what the key may use in a minute.
        """
        limits = Limits() if key is None else key.limits.over(self._default)
        if key is None or not limits.is_any:
            return Pass({}, lambda tokens: None)
        if limits.tokens_per_minute and tokens > limits.tokens_per_minute:
            message = (
                f"the request may cost {tokens} tokens, prompt and max_tokens together; expected at most "
                f"{limits.tokens_per_minute}, what this API key may use in a minute"
            )
            raise RequestError(message, param="max_tokens", code="tokens_per_minute_exceeded")
        request_id, id = f"door-{next(self._numbers)}", key.id
        standing = await self._counter.admit(request_id, id, limits, tokens)
        headers = _headers(limits, standing)
        if standing.exceeded:
            raise _refusal(limits, standing, headers)
        return Pass(headers, lambda used: self._counter.settle(request_id, id, used))


def _refusal(limits: Limits, standing: Standing, headers: dict[str, str]) -> RateLimited:
    wait_s = standing.retry_after_s if math.isfinite(standing.retry_after_s) else 60.0
    field = {"requests": "requests_per_minute", "tokens": "tokens_per_minute"}.get(
        standing.exceeded, "concurrency"
    )
    words = {
        "requests_per_minute": "requests in a minute",
        "tokens_per_minute": "tokens in a minute",
        "concurrency": "requests at once",
    }
    message = f"this API key may use {getattr(limits, field)} {words[field]}; try again in {max(1, math.ceil(wait_s))} s"
    return RateLimited(message, wait_s, headers)


def _headers(limits: Limits, standing: Standing) -> dict[str, str]:
    """As OpenAI names them; what has no limit is not named."""
    headers = {}
    for name, limit, remaining, reset_s in (
        ("requests", limits.requests_per_minute, standing.remaining_requests, standing.reset_requests_s),
        ("tokens", limits.tokens_per_minute, standing.remaining_tokens, standing.reset_tokens_s),
    ):
        if limit:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(remaining)
            headers[f"x-ratelimit-reset-{name}"] = duration(reset_s)
    return headers


def duration(seconds: float) -> str:
    """As OpenAI writes them.

    >>> duration(0.5), duration(12), duration(61), duration(0)
    ('500ms', '12s', '1m1s', '0s')
    """
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
