"""Limits of API keys at the gateway: OpenAI's headers, 429s that say when, and one count for all gateways."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import openai
import pytest

from paceline.cluster import wire
from paceline.cluster.errors import RateLimited
from paceline.cluster.gateway.fakes import ScriptedStreams
from paceline.cluster.gateway.limits import Door, LocalCounter, RouterCounter, duration
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.keys import Key, KeyFile
from paceline.cluster.metrics import Metrics
from paceline.cluster.rates import Limits, Rates
from paceline.cluster.types import Admit, Admitted, Message, Settle
from scripted_gateway import NEVER, TEXT, client_for, error_of, inside, listening, spell, until


@pytest.fixture
def store(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json", recheck_s=0.0)


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


# --- over HTTP --------------------------------------------------------------------------------------------


async def test_a_key_s_answers_say_how_it_stands(
    tokenizer: Tokenizer, metrics: Metrics, store: KeyFile
) -> None:
    """Before the request has ended, as OpenAI's do: what it may still generate is reserved."""
    _, text = store.create("ci", limits=Limits(2, 1000, 0))
    async with inside(tokenizer, metrics, ScriptedStreams(spell(tokenizer, "xy")), store) as client:
        first = await client.post("/v1/completions", json={**TEXT, "max_tokens": 50}, headers=bearer(text))
        second = await client.post(
            "/v1/completions", json={**TEXT, "max_tokens": 50, "stream": True}, headers=bearer(text)
        )
        third = await client.post("/v1/completions", json=TEXT, headers=bearer(text))
        models = await client.get("/v1/models", headers=bearer(text))

    told = {name: value for name, value in first.headers.items() if name.startswith("x-ratelimit")}
    assert told.keys() == {
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    }
    assert (told["x-ratelimit-limit-requests"], told["x-ratelimit-remaining-requests"]) == ("2", "1")
    assert told["x-ratelimit-remaining-tokens"] == str(1000 - 2 - 50)
    assert told["x-ratelimit-reset-requests"] in ("1m0s", "1m1s")
    used = first.json()["usage"]["total_tokens"]
    assert second.headers["x-ratelimit-remaining-tokens"] == str(1000 - used - 52)
    error = error_of(third, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "2 requests in a minute" in error["message"]
    assert 50 <= int(third.headers["retry-after"]) <= 61
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    assert models.status_code == 200, "asking what there is costs nothing"
    assert b'streams_turned_away_total{reason="key_limit"} 1.0' in metrics.text()


async def test_the_real_client_reads_the_refusal_as_a_rate_limit(
    tokenizer: Tokenizer, metrics: Metrics, store: KeyFile
) -> None:
    """RateLimitError, and the headers through its raw response."""
    _, text = store.create("ci", limits=Limits(1, 0, 0))
    async with (
        listening(tokenizer, metrics, ScriptedStreams(spell(tokenizer, "x")), store) as url,
        client_for(url, text) as client,
    ):
        raw = await client.completions.with_raw_response.create(**TEXT)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**TEXT)

    assert raw.headers["x-ratelimit-limit-requests"] == "1"
    assert "x-ratelimit-limit-tokens" not in raw.headers, "what has no limit is not named"
    assert caught.value.code == "rate_limit_exceeded"
    assert int(caught.value.response.headers["retry-after"]) > 1


async def test_only_so_many_requests_of_a_key_run_at_once_however_they_end(
    tokenizer: Tokenizer, metrics: Metrics, store: KeyFile
) -> None:
    """Answered, streamed, refused or left by their client: each gives its place back."""
    _, text = store.create("ci", limits=Limits(0, 0, 1))
    streams = ScriptedStreams([NEVER])
    async with inside(tokenizer, metrics, streams, store) as client:

        async def ask(**body: Any) -> httpx.Response:
            return await client.post("/v1/completions", json={**TEXT, **body}, headers=bearer(text))

        for body in ({}, {"stream": True}):
            waiting = asyncio.create_task(ask(**body))
            await until(lambda: bool(streams.requests))
            refused = await ask()
            assert error_of(refused, 429)["message"].startswith("this API key may use 1 requests at once")
            assert refused.headers["retry-after"] == "1"
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            streams.requests.clear()
        for body in ({"max_tokens": -1}, {"model": "nope"}, {"temperature": 99}):
            assert (await ask(**body)).status_code in (400, 404)
    streams = ScriptedStreams(spell(tokenizer, "x"))
    async with inside(tokenizer, metrics, streams, store) as client:
        for body in ({}, {"stream": True}, {"n": 2}):
            answer = await client.post("/v1/completions", json={**TEXT, **body}, headers=bearer(text))
            assert answer.status_code == 200


async def test_a_request_that_can_never_fit_is_told_so(
    tokenizer: Tokenizer, metrics: Metrics, store: KeyFile
) -> None:
    """A 400: trying again would not help, and clients do that with a 429. All its choices count."""
    _, text = store.create("ci", limits=Limits(0, 30, 0))
    async with inside(tokenizer, metrics, ScriptedStreams(spell(tokenizer, "x")), store) as client:
        fits = await client.post("/v1/completions", json={**TEXT, "max_tokens": 28}, headers=bearer(text))
        never = await client.post(
            "/v1/completions", json={**TEXT, "max_tokens": 10, "n": 3}, headers=bearer(text)
        )

    assert fits.status_code == 200
    error = error_of(never, 400)
    assert (error["code"], error["param"]) == ("tokens_per_minute_exceeded", "max_tokens")
    assert "may cost 32 tokens" in error["message"]


async def test_the_configuration_s_limits_are_those_of_keys_without_their_own(
    tokenizer: Tokenizer, metrics: Metrics, store: KeyFile
) -> None:
    """Each key for itself; without keys nobody is counted."""
    door = Door(LocalCounter(lambda: 0.0), Limits(1, 0, 0))
    plain, other, larger = (
        Key(name, name, "", "", limits=limits)
        for name, limits in (("a", Limits()), ("b", Limits()), ("c", Limits(2, 0, 0)))
    )
    for key in (plain, other, larger, larger):
        await door.enter(key, 1)
    for key in (plain, other, larger):
        with pytest.raises(RateLimited):
            await door.enter(key, 1)
    for _ in range(5):
        assert (await door.enter(None, 1)).headers == {}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.0004, "1ms"), (0.5, "500ms"), (1, "1s"), (59.2, "1m0s"), (61, "1m1s")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- several gateways -------------------------------------------------------------------------------------


class FakeRouter:
    """The router's side of a connection, without a socket: it answers at once, later, or never."""

    def __init__(self, name: str, rates: Rates) -> None:
        self.identity = wire.Identity(name, 1)
        self.is_open = True
        self.rates = rates
        self.sent: list[Message] = []

    def connect(self, gateway: int, clock: Callable[[], float]) -> "FakeConnection":
        return FakeConnection(self, gateway, clock)


@dataclasses.dataclass
class FakeConnection:
    router: FakeRouter
    gateway: int
    clock: Callable[[], float]
    counter: RouterCounter | None = None
    is_deaf: bool = False

    @property
    def identity(self) -> wire.Identity:
        return self.router.identity

    @property
    def is_open(self) -> bool:
        return self.router.is_open

    def send(self, message: Message) -> None:
        self.router.sent.append(message)
        match message:
            case Admit():
                standing = self.router.rates.admit(
                    message.key,
                    message.limits,
                    (self.gateway, message.request_id),
                    message.tokens,
                    self.clock(),
                    is_let_in=message.is_let_in,
                )
                if not self.is_deaf:
                    assert self.counter is not None
                    answer = msgspec.msgpack.decode(
                        msgspec.msgpack.encode(Admitted(message.request_id, standing)), type=Admitted
                    )
                    asyncio.get_running_loop().call_soon(self.counter.on_answer, answer)
            case Settle(request_id, key, tokens):
                self.router.rates.settle(key, (self.gateway, request_id), tokens)


class Gateways:
    """Some gateways' counters, and the router that they are connected to or not."""

    def __init__(self, num: int) -> None:
        self.now = 100.0
        self.routers = [FakeRouter("router-a", Rates())]
        self.connections: list[FakeConnection | None] = []
        self.counters = [
            RouterCounter(
                router=lambda at=at: cast(wire.Peer, self.connections[at]),  # type: ignore[misc]
                num_gateways=lambda: num,
                clock=lambda: self.now,
            )
            for at in range(num)
        ]
        self.connections = [None] * num
        self.connect()

    def connect(self, router: FakeRouter | None = None) -> None:
        router = router or self.routers[0]
        for at, counter in enumerate(self.counters):
            connection = router.connect(at, lambda: self.now)
            connection.counter = counter
            self.connections[at] = connection
            counter.on_router(cast(wire.Peer, connection))

    def disconnect(self) -> None:
        self.connections = [None] * len(self.connections)
        for counter in self.counters:
            counter.on_router_lost()

    async def ask(self, at: int, name: str, limits: Limits, tokens: int = 1) -> bool:
        return not (await self.counters[at].admit(name, "k", limits, tokens)).exceeded


async def test_gateways_count_together() -> None:
    """Exactly, however uneven: the last request that fits is let in, and the one after it nowhere."""
    gateways, limits = Gateways(3), Limits(10, 0, 0)
    came = [await gateways.ask(0 if n < 8 else n % 3, f"r{n}", limits) for n in range(12)]
    assert came == [True] * 10 + [False] * 2

    gateways.now += 62
    assert await gateways.ask(2, "later", limits)


async def test_tokens_and_places_are_given_back_to_all() -> None:
    """What ended at one gateway makes room at the other."""
    gateways, limits = Gateways(2), Limits(0, 100, 1)
    assert await gateways.ask(0, "a", limits, 90)
    assert not await gateways.ask(1, "b", limits, 5)
    gateways.counters[0].settle("a", "k", 20)

    assert await gateways.ask(1, "b", limits, 80)
    assert not await gateways.ask(0, "c", limits, 1)


async def test_without_a_router_all_together_let_in_less_than_twice_the_limit() -> None:
    """Each its part, rounded up, and less where it has let in much before: the bound that is documented."""
    gateways, limits = Gateways(3), Limits(10, 0, 0)
    for n in range(10):  # all of them through one gateway
        assert await gateways.ask(0, f"a{n}", limits)
    gateways.disconnect()
    came = [[await gateways.ask(at, f"b{at}-{n}", limits) for n in range(10)] for at in range(3)]

    assert [sum(one) for one in came] == [0, 4, 4]
    assert 10 + sum(map(sum, came)) < 2 * 10


async def test_a_new_router_knows_what_was_let_in_before_it() -> None:
    """By the old one and by gateways alone, ended or not: the count goes on."""
    gateways, limits = Gateways(2), Limits(10, 100, 6)
    for n in range(3):
        assert await gateways.ask(0, f"a{n}", limits, 10)
    gateways.counters[0].settle("a0", "k", 4)
    gateways.disconnect()
    assert await gateways.ask(1, "b", limits, 20)
    new = FakeRouter("router-b", Rates())
    gateways.connect(new)
    standing = await gateways.counters[0].admit("c", "k", limits, 1)

    assert standing.remaining_requests == 10 - 5
    assert standing.remaining_tokens == 100 - 4 - 10 - 10 - 20 - 1
    assert await gateways.ask(1, "d", limits) and await gateways.ask(1, "e", limits)
    assert not await gateways.ask(1, "f", limits), "five that run were told of, and a sixth came"


async def test_a_connection_that_came_back_counts_nothing_twice() -> None:
    """The same router: it has let go of what ran here, and nothing else."""
    gateways, limits = Gateways(1), Limits(0, 100, 2)
    assert await gateways.ask(0, "a", limits, 40)
    gateways.disconnect()
    gateways.routers[0].rates.drop(0)
    assert await gateways.ask(0, "b", limits, 40)  # the part of one gateway is all of it
    gateways.connect()
    standing = await gateways.counters[0].admit("c", "k", limits, 10)

    assert (standing.exceeded, standing.remaining_tokens) == ("concurrency", 20)


async def test_a_router_that_does_not_answer_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does what it may have let in stay open there when the gateway refused it."""
    monkeypatch.setattr("paceline.cluster.gateway.limits._ANSWER_S", 0.01)
    gateways, limits = Gateways(2), Limits(2, 0, 0)
    connection = gateways.connections[0]
    assert connection is not None
    connection.is_deaf = True
    came = [await gateways.ask(0, f"r{n}", limits) for n in range(2)]

    assert came == [True, False]
    assert Settle("r1", "k", 0) in gateways.routers[0].sent
    assert Settle("r0", "k", 0) not in gateways.routers[0].sent


async def test_a_client_that_leaves_while_the_router_is_asked_holds_no_place() -> None:
    gateways, limits = Gateways(1), Limits(0, 0, 1)
    connection = gateways.connections[0]
    assert connection is not None
    connection.is_deaf = True
    asking = asyncio.create_task(gateways.ask(0, "a", limits))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    connection.is_deaf = False

    assert await gateways.ask(0, "b", limits)
