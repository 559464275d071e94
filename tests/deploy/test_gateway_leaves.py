"""Gateways behind something that balances, replaced one after the other under load -> no request is refused or broken."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import scripted_gateway
from paceline.cluster.config import ClusterConfig, GatewayConfig
from paceline.cluster.gateway.fakes import ScriptedStreams, say
from paceline.cluster.gateway.ingress import build_app
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.metrics import Metrics
from paceline.deploy import replicas

BODY = {"prompt": "hi", "max_tokens": 4}
PROBE_S, FAILURES = 0.1, 2
NUM_CLIENTS = 8


class Streams(ScriptedStreams):
    """A gateway's streams, of 20 ms each."""

    def __init__(self) -> None:
        super().__init__([0.02, *say([65], [66])])
        self.has_drained = False

    def give_notice(self) -> None:
        self._is_ready = False

    def drain(self) -> None:
        self._is_ready, self.has_drained = False, True


class Gateway:
    """One listener, as a replica has it."""

    def __init__(self, tokenizer: Tokenizer, port: int) -> None:
        self.streams = Streams()
        app = build_app(ClusterConfig(), self.streams, tokenizer, Metrics(), max_context=100)
        self.url = f"http://127.0.0.1:{port}"
        self.http = replicas._HttpListener(app, "127.0.0.1", port, 5.0)

    async def end(self, notice_s: float) -> None:
        await replicas.leave_clients(self.streams, self.http, notice_s)  # type: ignore[arg-type]
        await self.http.close(5.0)


class Balancer:
    """Asks each address whether it is ready, as Kubernetes does for a Service; knows what it was last told."""

    def __init__(self, urls: list[str]) -> None:
        self.healthy = list(urls)
        self._tasks = [asyncio.create_task(self._probe(url)) for url in urls]

    async def _probe(self, url: str) -> None:
        failures = 0
        async with httpx.AsyncClient() as client:
            while True:
                try:
                    is_ready = (await client.get(f"{url}/ready", timeout=1.0)).status_code == 200
                except httpx.TransportError:
                    is_ready = False
                failures = 0 if is_ready else failures + 1
                if failures >= FAILURES and url in self.healthy:
                    self.healthy.remove(url)
                elif is_ready and url not in self.healthy:
                    self.healthy.append(url)
                await asyncio.sleep(PROBE_S)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def clients(balancer: Balancer) -> AsyncIterator[tuple[list[int], list[str]]]:
    """Many that ask without a pause and keep their connections; how often each address answered, and what failed."""
    answers, failures, is_over = [0], [], asyncio.Event()

    async def ask(number: int) -> None:
        async with httpx.AsyncClient(timeout=5.0) as client:
            while not is_over.is_set():
                number += 1
                url = balancer.healthy[number % len(balancer.healthy)]
                try:
                    answer = await client.post(f"{url}/v1/completions", json=BODY)
                except httpx.TransportError as error:
                    failures.append(repr(error))
                    await asyncio.sleep(0.02)
                    continue
                answers[0] += answer.status_code == 200
                if answer.status_code != 200:
                    failures.append(answer.text)

    tasks = [asyncio.create_task(ask(number)) for number in range(NUM_CLIENTS)]
    try:
        yield answers, failures
    finally:
        is_over.set()
        await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("bytes")
    return scripted_gateway.byte_tokenizer(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def replace_each(tokenizer: Tokenizer, notice_s: float) -> tuple[int, list[str]]:
    """Two gateways, each replaced on its own port as Serve does it: the old one ends, then the new one starts."""
    gateways = [Gateway(tokenizer, free_port()) for _ in range(2)]
    for gateway in gateways:
        await gateway.http.start()
    balancer = Balancer([gateway.url for gateway in gateways])
    try:
        async with clients(balancer) as (answers, failures):
            await asyncio.sleep(0.3)
            for index, old in enumerate(gateways):
                await old.end(notice_s)
                assert old.streams.has_drained and old.streams.num_open == 0
                gateways[index] = Gateway(tokenizer, int(old.url.rpartition(":")[2]))
                await asyncio.sleep(0.2)  # it loads
                await gateways[index].http.start()
            await asyncio.sleep(0.5)
    finally:
        await balancer.close()
        for gateway in gateways:
            await gateway.http.close(1.0)
    return answers[0], failures


async def test_gateways_are_replaced_one_by_one_without_a_refusal(tokenizer: Tokenizer) -> None:
    num_answers, failures = await replace_each(tokenizer, notice_s=1.0)

    assert failures == [] and num_answers > 100


async def test_without_notice_requests_are_refused(tokenizer: Tokenizer) -> None:
    """The negative control: nobody tells the balancer, so it sends clients to a port where nobody listens."""
    _, failures = await replace_each(tokenizer, notice_s=0.0)

    assert any("ConnectError" in failure for failure in failures)


async def test_one_that_replaces_another_on_its_port_lets_nobody_wait(tokenizer: Tokenizer) -> None:
    """A single gateway: its successor listens already, and connections that are kept move there."""
    port = free_port()
    old, new = Gateway(tokenizer, port), Gateway(tokenizer, port)
    await old.http.start()
    balancer = Balancer([old.url])
    try:
        async with clients(balancer) as (answers, failures):
            await asyncio.sleep(0.3)
            await new.http.start()
            await old.end(0.0)
            await asyncio.sleep(0.3)
    finally:
        await balancer.close()
        await new.http.close(1.0)

    assert failures == [] and answers[0] > 50
    assert len(new.streams.finished) > 10


def test_only_one_of_several_gives_notice() -> None:
    config: dict[str, Any] = {"notice_s": 4}

    assert replicas.notice_s(GatewayConfig(**config)) == 0.0
    assert replicas.notice_s(GatewayConfig(**config, replicas=2)) == 4.0
