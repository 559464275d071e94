"""Operator, tenant and request -> kept or not: all 3 x 4 x 3 cases, through the gateway too."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cluster.config import ClusterConfig
from paceline.cluster.gateway.fakes import ScriptedStreams
from paceline.cluster.gateway.ingress import build_app
from paceline.cluster.gateway.text import Tokenizer
from paceline.cluster.keys import Key, KeyFile
from paceline.cluster.learning.config import CaptureConfig, LearningConfig
from paceline.cluster.learning.consent import DECISIONS, decide, tenant_of, who_is_kept
from paceline.cluster.metrics import Metrics
from scripted_gateway import CHAT, MAX_CONTEXT, TEXT, byte_tokenizer, spell

TABLE = [
    ("never", None, "tenant"),
    ("never", True, "tenant"),
    ("never", False, "request"),
    ("asked", None, "tenant"),
    ("asked", True, "kept"),
    ("asked", False, "request"),
    ("default", None, "kept"),
    ("default", True, "kept"),
    ("default", False, "request"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@contextlib.asynccontextmanager
async def gateway(
    tokenizer: Tokenizer, streams: ScriptedStreams, metrics: Metrics, keys: KeyFile | None, **learning: Any
) -> AsyncIterator[httpx.AsyncClient]:
    config = ClusterConfig.model_validate({"learning": learning})
    app = build_app(config, streams, tokenizer, metrics, max_context=MAX_CONTEXT, keys=keys)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def count(metrics: Metrics, outcome: str) -> float:
    return metrics.registry.get_sample_value("paceline_capture_consent_total", {"outcome": outcome}) or 0.0


@pytest.mark.parametrize(("rule", "store", "expected"), TABLE)
def test_all_three_must_agree(rule: Any, store: bool | None, expected: str) -> None:
    """And the operator comes first: without it nothing is kept, whatever the others say."""
    assert decide(True, rule, store) == expected
    assert decide(False, rule, store) == "operator"


def test_who_sent_a_request() -> None:
    """The key's tenant, or its name; without keys, whoever is on this machine."""
    config = LearningConfig(capture=CaptureConfig(local_consent="asked"))

    assert tenant_of(None, config) == ("local", "asked")
    assert tenant_of(Key("i", "ci", "", "", tenant="acme", capture="default"), config) == ("acme", "default")
    assert tenant_of(Key("i", "ci", "", ""), config) == ("ci", "never")
    assert LearningConfig().enabled is False


def test_the_operator_is_told_whose_requests_are_kept_and_for_how_long() -> None:
    """In one sentence."""
    config = LearningConfig(capture=CaptureConfig(ttl_h=5))

    assert who_is_kept(config, needs_keys=False) == "all requests but those with store=false, for 5 h"
    assert "--capture asked or default" in who_is_kept(config, needs_keys=True)
    never = LearningConfig(capture=CaptureConfig(local_consent="never"))
    assert "none" in who_is_kept(never, needs_keys=False)


@pytest.mark.parametrize(("rule", "store", "expected"), TABLE)
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("has_key", [True, False])
async def test_the_gateway_marks_each_stream(
    tokenizer: Tokenizer,
    tmp_path: Path,
    rule: str,
    store: bool | None,
    expected: str,
    enabled: bool,
    has_key: bool,
) -> None:
    """With keys the tenant's rule counts, without them the configuration's; every request is counted once."""
    keys, headers = None, {}
    if has_key:
        keys = KeyFile(tmp_path / "keys.json", recheck_s=0.0)
        headers = {"authorization": f"Bearer {keys.create('ci', tenant='acme', capture=rule)[1]}"}
    metrics, streams = Metrics(), ScriptedStreams(spell(tokenizer, "x"))
    # With keys, what the configuration says of requests without one must not matter.
    capture = {"local_consent": rule if not has_key else {"never": "default"}.get(rule, "never")}
    async with gateway(tokenizer, streams, metrics, keys, enabled=enabled, capture=capture) as client:
        body = {**CHAT, "n": 2} | ({} if store is None else {"store": store})
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text

    outcome = expected if enabled else "operator"
    assert [request.capture for request in streams.requests] == [outcome == "kept"] * 2
    assert {request.tenant for request in streams.requests} == {"acme" if has_key else "local"}
    assert {name: count(metrics, name) for name in DECISIONS} == {
        name: float(name == outcome) for name in DECISIONS
    }


async def test_consent_that_is_withdrawn_counts_from_the_next_request_on(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """`paceline keys consent ID --capture never` while the gateway runs."""
    keys = KeyFile(tmp_path / "keys.json", recheck_s=0.0)
    key, text = keys.create("ci", capture="default")
    headers = {"authorization": f"Bearer {text}"}
    streams = ScriptedStreams(spell(tokenizer, "x"))
    async with gateway(tokenizer, streams, Metrics(), keys, enabled=True) as client:
        await client.post("/v1/completions", json=TEXT, headers=headers)
        keys.change(key.id, capture="never")
        await client.post("/v1/completions", json={**TEXT, "store": True}, headers=headers)

    assert [request.capture for request in streams.requests] == [True, False]


async def test_a_domain_travels_with_the_streams(tokenizer: Tokenizer) -> None:
    """Of what clients say about a request, this one is used."""
    streams = ScriptedStreams(spell(tokenizer, "x"))
    async with gateway(tokenizer, streams, Metrics(), None) as client:
        for metadata in ({"domain": " legal notes ", "other": "y"}, {"other": "y"}, {}):
            await client.post("/v1/completions", json={**TEXT, "metadata": metadata})
        refused = await client.post("/v1/completions", json={**TEXT, "metadata": {"domain": "a\nb"}})

    assert [request.domain for request in streams.requests] == ["legal notes", "", ""]
    assert refused.status_code == 400
    assert json.loads(refused.text)["error"]["param"] == "metadata"
