"""Two workers of each role on two nodes -> all of them serve, none is overrun, any of them may go at any time."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # two raylets and eight workers start first

ROLES = ("prefill", "decode", "draft")
CAPACITY = 8
"""Streams that run or wait in both decode workers, as the fixture configures them."""
PACE_FACTOR = 3.0
"""How much slower running streams may get while ten times as many ask, on two cores that also serve those who ask."""


def until(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s:g} s"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """It ended, whether or not its parent took note."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def body(seed: int, num_tokens: int, **how: Any) -> dict[str, Any]:
    """A request of its own prompt, 40 tokens or so, that runs to its length."""
    prompt = f"def function_{seed}(first, second):\n" * 4
    return {"prompt": prompt, "max_tokens": num_tokens, "seed": seed, "ignore_eos": True, **how}


def complete(cluster: Any, what: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A whole answer: text and metrics."""
    answer = httpx.post(f"{cluster.url}/v1/completions", json=what, timeout=120.0)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["metrics"]


def stream(
    cluster: Any, what: dict[str, Any], on_text: Callable[[str], None] = lambda _: None
) -> tuple[str, dict[str, Any], list[float]]:
    """A streamed answer: text, metrics and the seconds between its events. `on_text` sees the text so far."""
    text, metrics, gaps, last = "", {}, [], None
    with httpx.stream(
        "POST", f"{cluster.url}/v1/completions", json={**what, "stream": True}, timeout=120.0
    ) as r:
        assert r.status_code == 200
        for line in r.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            metrics = event.get("metrics") or metrics
            now = time.monotonic()
            if last is not None:
                gaps.append(now - last)
            last = now
            text += "".join(choice["text"] for choice in event["choices"])
            on_text(text)
    return text, metrics, gaps


def test_every_worker_is_listed_and_each_node_has_one_of_each_role(two_nodes: Any) -> None:
    """`paceline status`, for people and for programs; routers and workers found each other from wherever they are."""
    listed = two_nodes.status()["workers"]
    table = two_nodes.cli("status").stdout
    nodes = {w["node"] for w in listed}

    assert len(nodes) == 2
    for role in ROLES:
        mine = [w for w in listed if w["role"] == role]
        assert len(mine) == 2 and {w["node"] for w in mine} == nodes
        assert all(w["id"] in table for w in mine)
    gateway, control = two_nodes.worker("gateway"), two_nodes.worker("control")
    assert gateway["node"] == control["node"]


def test_all_of_them_serve_and_the_texts_are_those_of_one_at_a_time(two_nodes: Any) -> None:
    """Eight at once: both prefill and both decode workers are used, KV comes over links, drafts from draft workers."""
    asked = [body(seed, 40, temperature=0.8) for seed in range(CAPACITY)]
    with ThreadPoolExecutor(CAPACITY) as pool:
        together = list(pool.map(lambda what: complete(two_nodes, what), asked))
    apart = [complete(two_nodes, {**what, "cache_salt": "apart"}) for what in asked]

    assert [text for text, _ in together] == [text for text, _ in apart]
    for role in ("prefill_worker", "decode_worker"):
        assert len({metrics[role] for _, metrics in together}) == 2
    assert all(metrics["kv_source"] == ["link"] for _, metrics in together)
    assert sum(metrics["tokens_by_source"]["draft"] for _, metrics in together) > 0


def test_a_prompt_goes_where_its_beginning_is_and_only_for_the_same_salt(two_nodes: Any) -> None:
    """The second time nothing is sent and little computed; for another salt it is as new."""
    what = body(500, 4, cache_salt="mine")
    first = complete(two_nodes, what)[1]
    again = complete(two_nodes, what)[1]
    other = complete(two_nodes, {**what, "cache_salt": "yours"})[1]

    assert first["kv_source"] == ["link"]
    assert again["decode_worker"] == first["decode_worker"] and again["kv_source"] == ["local:prefix_hit"]
    assert other["kv_source"] == ["link"]


def test_ten_times_too_many_get_429_and_a_time_while_the_running_keep_their_pace(two_nodes: Any) -> None:
    """Four streams run, four more may wait; everybody else is told when to come back, in OpenAI's shape."""
    # Long enough that none of those who are let in has ended before the last has asked.
    asked = [body(600 + seed, 600, cache_salt="pace") for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        calm = list(pool.map(lambda what: stream(two_nodes, what), asked))

    begun = threading.Semaphore(0)

    def run_crowded(what: dict[str, Any]) -> tuple[str, dict[str, Any], list[float]]:
        told = []

        def tell(text: str) -> None:
            if not told and len(text) > 20:
                told.append(True)
                begun.release()

        return stream(two_nodes, what, tell)

    # One client for all: each of its own would take its time to set up, and the crowd would come one by one.
    asking = httpx.Client(timeout=120.0, limits=httpx.Limits(max_connections=80))

    def one_more(index: int) -> httpx.Response:
        return asking.post(f"{two_nodes.url}/v1/completions", json=body(700 + index, 600))

    with asking, ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(80) as crowd:
        running = [pool.submit(run_crowded, {**what, "cache_salt": "crowd"}) for what in asked]
        for _ in running:
            assert begun.acquire(timeout=60)
        answers = list(crowd.map(one_more, range(80)))
        crowded = [future.result() for future in running]

    refused = [answer for answer in answers if answer.status_code != 200]
    # Whole durations: single gaps are those of a client that reads with 84 threads.
    pace = sum(sum(gaps) for _, _, gaps in crowded) / sum(sum(gaps) for _, _, gaps in calm)
    waits = sorted(int(answer.headers["retry-after"]) for answer in refused)
    print(f"{len(refused)} of 80 refused, told {waits[0]}-{waits[-1]} s; pace {pace:.2f} times the calm one")
    assert [text for text, _, _ in crowded] == [text for text, _, _ in calm]
    assert len(refused) >= 40
    for answer in refused:
        error = answer.json()["error"]
        assert answer.status_code == 429 and set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert waits[0] >= 1 and pace < PACE_FACTOR


def test_a_client_that_leaves_frees_its_blocks_within_a_second(two_nodes: Any) -> None:
    """Over real HTTP, in mid-stream: the connection closes and all workers forget the stream."""
    until(lambda: held(two_nodes) == 0)
    what = {**body(800, 1500), "stream": True}
    with httpx.stream("POST", f"{two_nodes.url}/v1/completions", json=what, timeout=60.0) as answer:
        lines = answer.iter_lines()
        next(lines)
        until(lambda: held(two_nodes) > 0)
    began = time.monotonic()
    until(lambda: held(two_nodes) == 0, 5.0)

    # What control shows is what workers pushed: up to a second old.
    print(f"blocks shown free after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 2.1


def held(cluster: Any) -> int:
    """Blocks and streams that prefill and decode workers hold, as they last said."""
    mine = [w for w in cluster.workers() if w["role"] in ("prefill", "decode")]
    assert mine
    return sum(w["kv_blocks_used"] + w["streams"] for w in mine)


@pytest.mark.parametrize("role", ["decode", "prefill", "draft"])
def test_sigterm_to_a_worker_is_not_seen_by_clients(two_nodes: Any, role: str) -> None:
    """In mid-stream: it drains, ends and is replaced; texts are what they are without that."""
    until(lambda: len(two_nodes.ready(*ROLES)) == 6, 60.0)
    salt = f"sigterm-{role}"
    asked = [body(900 + seed, 300, cache_salt=salt, temperature=0.7) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(lambda what: complete(two_nodes, what)[0], asked))
        victim = two_nodes.ready(role)[0]
        running = [pool.submit(stream, two_nodes, {**what, "cache_salt": f"{salt}2"}) for what in asked]
        until(lambda: sum(w["streams"] for w in two_nodes.ready("decode")) >= 2)
        os.kill(victim["pid"], signal.SIGTERM)
        until(lambda: victim["id"] not in {w["id"] for w in two_nodes.ready(role)}, 5.0)
        got = [future.result() for future in running]

    assert [text for text, _, _ in got] == expected
    until(lambda: is_gone(victim["pid"]), 20.0)
    until(lambda: len(two_nodes.ready(role)) == 2, 90.0)


def test_a_gateway_that_is_told_to_go_finishes_its_answers(two_nodes: Any) -> None:
    """The open stream ends as it should, a new request is refused at once, and another gateway comes to the same port."""
    what = body(1000, 200, cache_salt="gateway")
    expected = complete(two_nodes, what)[0]
    victim = two_nodes.worker("gateway")
    refusals: list[str] = []

    def end_it(text: str) -> None:
        if len(text) > 20 and not refusals:
            os.kill(victim["pid"], signal.SIGTERM)
            until(lambda: two_nodes.ready("gateway") == [], 5.0)
            try:
                refusals.append(str(httpx.get(f"{two_nodes.url}/ready", timeout=5.0).status_code))
            except httpx.TransportError as error:
                refusals.append(type(error).__name__)

    text, _, _ = stream(two_nodes, {**what, "cache_salt": "gateway2"}, end_it)

    assert text == expected
    assert refusals in (["503"], ["ConnectError"])
    until(lambda: is_gone(victim["pid"]), 20.0)
    until(lambda: len(two_nodes.ready("gateway")) == 1, 90.0)
    assert complete(two_nodes, what)[0] == expected


def test_a_node_s_death_is_not_seen_by_clients(two_nodes: Any) -> None:
    """One of each role dies at once, the router perhaps among them: the other node's workers take over."""
    until(lambda: len(two_nodes.ready(*ROLES, "gateway")) == 7, 60.0)
    gone = {w["node"] for w in two_nodes.ready(*ROLES)} - {two_nodes.worker("gateway")["node"]}
    asked = [body(1100 + seed, 300, cache_salt="node", temperature=0.7) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(lambda what: complete(two_nodes, what)[0], asked))
        running = [pool.submit(stream, two_nodes, {**what, "cache_salt": "node2"}) for what in asked]
        until(lambda: sum(w["streams"] for w in two_nodes.ready("decode")) >= 2)
        two_nodes.supervisor.send_signal(signal.SIGUSR1)
        got = [future.result() for future in running]

    assert [text for text, _, _ in got] == expected
    until(lambda: {w["node"] for w in two_nodes.ready(*ROLES)} & gone == set(), 30.0)
    assert complete(two_nodes, body(1200, 8))[0]
