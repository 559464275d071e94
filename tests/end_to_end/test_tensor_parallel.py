"""A cluster whose prefill and decode workers have two ranks each -> the texts of one rank, also when a rank is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

import oracle
from bundled import TARGET
from paceline.cluster.gateway.text import Tokenizer
from paceline.deploy import local

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROLES = ("prefill", "decode")


@pytest.fixture(scope="module")
def gangs(start_cluster: Callable[..., Any]) -> Any:
    """One prefill and two decode workers of two ranks: six processes that hold halves of the target."""
    ranks = ("prefill.tp=2", "decode.tp=2", "decode.replicas=2")
    return start_cluster("gangs", *ranks, "speculation.control=fixed", "speculation.sources=[draft]")


def complete(cluster: Any, seed: int, num_tokens: int, **how: Any) -> dict[str, Any]:
    """A whole answer to a prompt of its own."""
    prompt = f"def function_{seed}(first, second):\n" * 4
    body = {"prompt": prompt, "max_tokens": num_tokens, "seed": seed, "ignore_eos": True, **how}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120.0)
    assert answer.status_code == 200, answer.text
    return dict(answer.json(), prompt=prompt)


def ranks_of(cluster: Any) -> list[psutil.Process]:
    """Processes that are ranks but do not lead."""
    state = json.loads((cluster.home / "run" / cluster.name / "state.json").read_text())
    found = local.processes_of(state["run_id"])
    return [process for process in found if "RankActor" in " ".join(process.cmdline())]


def leader_of(rank: psutil.Process, workers: list[dict[str, Any]]) -> dict[str, Any]:
    """The worker with which the rank has most connections: one that prefills has a link to each decode worker as well."""

    def ports(process: psutil.Process) -> set[tuple[int, int]]:
        return {(c.laddr.port, c.raddr.port) for c in process.net_connections("tcp") if c.raddr}

    mine = {(there, here) for here, there in ports(rank)}
    return max(workers, key=lambda worker: len(mine & ports(psutil.Process(worker["pid"]))))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_ranks_say_what_the_oracle_says(gangs: Any, temperature: float) -> None:
    """The prompt's KV came over the links of both ranks; remote drafts were verified by both; every token is right."""
    how = {"temperature": temperature, "top_p": 0.95, "cache_salt": f"at {temperature}"}
    answer = complete(gangs, 3, 40, **how, return_token_ids=True)
    metrics, choice = answer["metrics"], answer["choices"][0]

    assert metrics["kv_source"] == ["link"] and metrics["tokens_by_source"]["draft"] > 0
    params = oracle.Params(3, temperature, top_p=0.95)
    prompt = Tokenizer(TARGET).encode(answer["prompt"])
    oracle.assert_same_text(choice["token_ids"], oracle.load(str(TARGET)), list(prompt), params, 40)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_rank_restarts_its_gang_only_and_no_stream_fails(gangs: Any, role: str) -> None:
    """In mid-stream: all texts are whole; its leader is replaced with another rank beside it; the others go on."""
    expected = [complete(gangs, 40 + i, 200, temperature=0.7) for i in range(4)]
    before = gangs.ready(*ROLES)
    rank, leader = next(
        (rank, leader) for rank in ranks_of(gangs) if (leader := leader_of(rank, before))["role"] == role
    )
    with ThreadPoolExecutor(4) as pool:
        running = [
            pool.submit(complete, gangs, 40 + i, 200, temperature=0.7, cache_salt=role) for i in range(4)
        ]
        wait_for(lambda: sum(w["streams"] for w in gangs.ready("decode")) >= 2)
        os.kill(rank.pid, signal.SIGKILL)
        got = [future.result() for future in running]

    texts = [answer["choices"][0]["text"] for answer in expected]
    assert [answer["choices"][0]["text"] for answer in got] == texts
    began = time.monotonic()
    wait_for(lambda: len(gangs.ready(*ROLES)) == 3 and leader["id"] not in ids(gangs), 150.0)
    print(f"{role}: another gang {time.monotonic() - began:.1f} s after the last of its streams ended")
    assert {w["id"] for w in before} - ids(gangs) == {leader["id"]}
    wait_for(lambda: len(ranks_of(gangs)) == 3)
    assert not psutil.pid_exists(leader["pid"])


def ids(cluster: Any) -> set[str]:
    return {w["id"] for w in cluster.workers()}


def wait_for(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s:g} s"
        time.sleep(0.1)
