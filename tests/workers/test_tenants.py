"""Two tenants on one worker: what one computed, wrote or was proposed tells the other nothing, and costs it nothing less.

Free of timing: what counts is what the engine says it found, computed and copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np
import pytest

import harness
from paceline.cluster.blocks import BlockPool
from paceline.cluster.config import load_config
from paceline.cluster.gateway.envelope import Caller
from paceline.cluster.gateway.journal import Record
from paceline.cluster.keys import Key
from paceline.cluster.metrics import Metrics
from paceline.cluster.prefixes import prefix_marks
from paceline.cluster.types import DraftOpen, Request, Sampling
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.drafters.base import Context
from paceline.workers.drafters.suffix import SuffixDrafter, _make
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner, load_model, load_model_config

PROMPT = harness.prompt(41, 3)


def key(id: str, tenant: str) -> Key:
    return Key(id * 12, f"key {id}", "", "", tenant=tenant)


A, A_TOO, B = key("a", "acme"), key("c", "acme"), key("b", "beta")


def caller_of(name: str, owner: Key) -> Caller:
    """Who sent a request with this id."""
    return Caller(name, name, 0.0, owner, record=Record(name, "POST", "/v1/completions", 0.0))


def asked(owner: Key, name: str, *, salt: str = "", seed: int = 5) -> Request:
    """The same prompt, as the gateway sends it for a key."""
    bare = harness.request(name, PROMPT, 24, temperature=0.8, seed=seed)
    caller = caller_of(name, owner)
    return msgspec.structs.replace(bare, cache_salt=caller.salt(salt), tenant=owner.owner)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = harness.tiny_model(tmp_path_factory.mktemp("target"), seed=3)
    return ModelRunner(load_model(folder, load_model_config(folder)), "v", num_blocks=256, block_size=4)


def figures(metrics: Metrics) -> dict[str, float]:
    """All that Prometheus would see, without what depends on time."""
    lines = [line for line in metrics.text().decode().splitlines() if line and line[0] != "#"]
    pairs = [line.rsplit(" ", 1) for line in lines if "_created" not in line and "seconds" not in line]
    return {name: float(value) for name, value in pairs}


def observe(
    runner: ModelRunner, before: Sequence[Request], request: Request
) -> tuple[list[int], dict[str, float]]:
    """The text of a request, and what all figures grew by while it ran, on a worker that served others before."""
    metrics = Metrics()
    drafter = SuffixDrafter(
        tenant_of=lambda stream: stream.request.tenant
    )  # with the store of finished outputs
    engine = Engine(runner, token_budget=64, max_streams=8, drafter=drafter, metrics=metrics)
    for one in before:
        engine.run([one])
    start = figures(metrics)
    text = engine.run([request])[request.id]
    return text, {name: value - start.get(name, 0.0) for name, value in figures(metrics).items()}


def test_one_tenant_sees_nothing_of_what_another_asked_and_got(runner: ModelRunner) -> None:
    """Not one figure differs from those of a worker that nobody used before: cached tokens, drafts, steps, rows."""
    fresh = observe(runner, [], asked(A, "mine"))
    after_b = observe(runner, [asked(B, "theirs"), asked(B, "again", salt="x")], asked(A, "mine"))

    assert after_b == fresh
    assert fresh[1]["paceline_prefix_hit_tokens_total"] == 0


def test_the_same_would_be_seen_within_a_tenant(runner: ModelRunner) -> None:
    """Negative control: another key of the tenant finds the prompt in the cache, and the answer in the drafter's store."""
    text, fresh = observe(runner, [], asked(A, "mine"))
    same_text, shared = observe(runner, [asked(A_TOO, "ours")], asked(A, "mine"))

    assert same_text == text
    assert shared["paceline_prefix_hit_tokens_total"] >= 40
    copied = 'paceline_tokens_total{source="suffix",version="none"}'
    assert shared.get(copied, 0.0) > fresh.get(copied, 0.0)


def test_no_salt_a_client_sends_makes_it_another_tenant() -> None:
    """Whatever it puts there, names of tenants included; with hashes of its own for worker and router."""
    tenants = ["acme", "beta", "acme/x", "a", "acm"]
    salts = ["", "x", "/x", "e", "e\0", "\0", "\0x", "beta", "beta\0", "acme\0x", "\0beta\0", "x/acme"]
    owners = {tenant: caller_of("r", key("d", tenant)) for tenant in tenants}
    made = {(tenant, salt): caller.salt(salt) for tenant, caller in owners.items() for salt in salts}
    pool = BlockPool(8, 4)

    for found in (
        set(made.values()),
        {pool.root_hash(salt) for salt in made.values()},
        {prefix_marks(PROMPT, 4, salt) for salt in made.values()},
    ):
        assert len(found) == len(tenants) * len(salts)
    assert caller_of("r", A).salt("s") == caller_of("q", A_TOO).salt("s")


def test_a_draft_worker_computes_another_tenant_s_prompt_anew(runner: ModelRunner) -> None:
    """Its own cache is kept apart by the same salt."""
    metrics = Metrics()
    engine = DraftEngine(runner, token_budget=64, metrics=metrics)
    found = []
    for owner in (B, A, A_TOO):
        salt = caller_of("r", owner).salt("")
        engine.open("s", DraftOpen("s", tuple(PROMPT), Sampling(1), len(PROMPT), cache_salt=salt))
        engine.propose(["s"], 3, 2)
        engine.close("s")
        found.append(figures(metrics)["paceline_prefix_hit_tokens_total"])

    assert found[:2] == [0, 0] and found[2] >= 36


def test_no_worker_keeps_finished_answers_for_drafting_at_all() -> None:
    """As deployed the suffix drafter's store has no room: nothing of a request outlives it, whoever's it is."""
    drafter = _make(cast(Context, None))
    assert isinstance(drafter, SuffixDrafter)
    drafter.store.add(np.arange(50, dtype=np.int32), "acme")

    assert drafter.store.num_tokens == 0
    assert load_config(None).speculation.sources[0] == "suffix"
