"""HTTP requests -> the same answers a user of the README gets, from real processes, by the paths they are meant to take."""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import time
from typing import Any

import httpx
import psutil
import pytest

import oracle
from bundled import MODEL, TARGET
from paceline.cluster.gateway.text import Tokenizer

HEAD = 'def total_price(orders):\n    """Sum of the price of all orders."""\n'
QUESTION = [{"role": "user", "content": f"Complete this function:\n\n{HEAD}"}]
CODE = 'def read_lines(path):\n    """Return the lines of a file.'


def test_a_chat_answer_took_the_remote_path_and_remote_drafts_were_accepted(cluster: Any) -> None:
    """KV over the link, tokens from the remote draft: the test fails if either silently stops being so."""
    answer = cluster.client().chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=64, temperature=0
    )

    metrics = answer.model_extra["metrics"]
    assert answer.choices[0].message.content.startswith(HEAD)
    assert metrics["kv_source"] == ["link"] and metrics["kv_bytes"] > 0
    assert metrics["tokens_by_source"]["draft"] >= 0.3 * answer.usage.completion_tokens
    assert metrics["prefill_worker"].startswith("prefill-") and metrics["decode_worker"].startswith("decode-")
    assert metrics["draft_version"] == cluster.worker("draft")["version"] != ""
    assert metrics["speculative_decoding"]["mean_acceptance_length"] > 1.5


def test_streamed_and_whole_answers_are_equal(cluster: Any) -> None:
    """One request, one seed, one text, with and without speculation, streamed or not."""
    texts = set()
    for extra in ({}, {"speculation": False}):
        how = {"model": MODEL, "messages": QUESTION, "max_tokens": 48, "temperature": 0.9, "seed": 5}
        whole = cluster.client().chat.completions.create(**how, extra_body=extra)
        parts = cluster.client().chat.completions.create(**how, extra_body=extra, stream=True)
        pieces = [c.choices[0].delta.content or "" for c in parts if c.choices]
        texts |= {whole.choices[0].message.content, "".join(pieces)}
        drafted = whole.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"]
        assert (drafted == 0) == (extra == {"speculation": False})
        assert len(pieces) > 3

    assert len(texts) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_completions_say_what_the_oracle_says(cluster: Any, temperature: float) -> None:
    """The whole system against `transformers` eager without cache, token by token, teacher-forced."""
    tokenizer = Tokenizer(TARGET)
    prompt = tokenizer.encode(CODE)
    answer = cluster.client().completions.create(
        model=MODEL, prompt=prompt, max_tokens=64, temperature=temperature, top_p=0.95, seed=9, extra_body={"ignore_eos": True}
    )  # fmt: skip

    params = oracle.Params(seed=9, temperature=temperature, top_p=0.95)
    tokens, gaps = oracle.generate(oracle.load(str(TARGET)), prompt, params, 64)
    assert min(gaps) > oracle.NEAR_TIE, "choose another prompt: a near-tie would make the comparison moot"
    assert answer.choices[0].text == tokenizer.decode(tokens)
    assert answer.usage.completion_tokens == 64


def test_routes_a_client_looks_at_first(cluster: Any) -> None:
    """Models, health, readiness, and an error in OpenAI's shape."""
    assert [m.id for m in cluster.client().models.list()] == [MODEL]
    assert httpx.get(f"{cluster.url}/health").status_code == 200
    assert httpx.get(f"{cluster.url}/ready").status_code == 200
    wrong = httpx.post(f"{cluster.url}/v1/completions", json={"model": "nope", "prompt": "x"})

    assert wrong.status_code == 404
    assert wrong.json()["error"]["code"] == "model_not_found"


def test_status_and_metrics_show_every_worker(cluster: Any) -> None:
    """`paceline status --json` has the promised fields; /metrics has samples of all roles."""
    report = cluster.status()
    text = httpx.get(f"{cluster.control}/metrics").text

    fields = {"role", "pid", "node", "state", "incarnation", "version", "kv_blocks_used", "kv_blocks_free"}
    assert {w["role"] for w in report["workers"]} == {
        "gateway",
        "router",
        "prefill",
        "decode",
        "draft",
        "control",
    }
    assert all(fields <= set(w) for w in report["workers"])
    assert all(psutil.pid_exists(w["pid"]) for w in report["workers"])
    assert report["resident_mb"] < 6 * 1024
    for role in ("gateway", "prefill", "decode", "draft"):
        assert f'role="{role}"' in text
    assert re.search(r'paceline_kv_prompts_total\{role="decode",[^}]*source="link"', text)


def test_the_cluster_was_ready_in_time(cluster: Any) -> None:
    """Start to ready, measured from outside; generous, since this machine may be busy."""
    assert cluster.start_seconds < 60.0


def test_a_sigkilled_decode_worker_is_not_seen_by_the_client(cluster: Any) -> None:
    """SIGKILL in mid-stream: the stream waits for the replacement and goes on with the same text."""
    how = {"model": MODEL, "prompt": CODE, "max_tokens": 200, "temperature": 0.8, "seed": 21}
    extra = {"ignore_eos": True}
    expected = cluster.client().completions.create(**how, extra_body=extra).choices[0].text
    victim = cluster.worker("decode")["pid"]

    text, killed_at, longest, last = "", None, 0.0, time.monotonic()
    metrics: dict[str, Any] = {}
    for chunk in cluster.client().completions.create(**how, extra_body=extra, stream=True):
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        metrics = (chunk.model_extra or {}).get("metrics") or metrics
        text += chunk.choices[0].text if chunk.choices else ""
        if killed_at is None and len(text) > 20:
            os.kill(victim, signal.SIGKILL)
            killed_at = now

    print(f"recovery: {longest:.2f} s without a token")
    assert killed_at is not None
    assert text == expected
    assert metrics["recoveries"] == 1 and len(set(metrics["decode_workers"])) == 2
    assert cluster.wait_for("decode", not_pid=victim)["pid"] != victim


def test_a_hung_prefill_worker_is_given_up_in_under_five_seconds(cluster: Any) -> None:
    """SIGSTOP: the process lives and says nothing. The decode worker computes the prompt itself."""
    how = {"model": MODEL, "prompt": CODE * 4, "max_tokens": 8, "temperature": 0}
    expected = cluster.client().completions.create(**how).choices[0].text
    pid = cluster.worker("prefill")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        # Another salt: its KV is nowhere yet.
        answer = cluster.client().completions.create(**how, extra_body={"cache_salt": "hung"})
        seconds = time.monotonic() - began
    finally:
        os.kill(pid, signal.SIGCONT)

    assert answer.choices[0].text == expected
    assert answer.model_extra["metrics"]["kv_source"][0].startswith("local:")
    assert seconds < 6.0  # silent for 4 s, noticed within one ping
    assert psutil.pid_exists(pid)


def test_all_sockets_listen_on_loopback_only(cluster: Any) -> None:
    """No process of the cluster accepts connections from other machines."""
    open_to_others = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("PACELINE_RUN") is not None
            connections = process.net_connections("inet") if mine else []
        except (psutil.Error, OSError):
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN and not _is_loopback(connection.laddr.ip):
                open_to_others.append((process.name(), connection.laddr))

    assert open_to_others == []


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
