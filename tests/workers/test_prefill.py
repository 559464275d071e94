"""Prompts through a prefill and a decode worker -> the same pool and text, whatever was sent how, or not sent at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor

import harness as h
from paceline.cluster.prefixes import PrefixIndex
from paceline.workers.decode import DecodeWorker
from paceline.workers.engine import Engine
from paceline.workers.kv_link import BACKENDS
from paceline.workers.prefill import PrefillWorker

LAYERS, HEADS, DIM = 3, 2, 16
TOKEN_BYTES = 2 * LAYERS * HEADS * DIM * 4
PROMPT = h.prompt(150, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    h.tiny_model(folder / "target", seed=0)
    h.tiny_model(folder / "draft", seed=0)
    return folder


async def pair(cluster: h.Harness) -> tuple[PrefillWorker, DecodeWorker]:
    prefill = await cluster.add(PrefillWorker, "0")
    decode = await cluster.add(DecodeWorker, "0")
    assert isinstance(prefill, PrefillWorker) and isinstance(decode, DecodeWorker)
    return prefill, decode


def alone(worker: PrefillWorker | DecodeWorker, num: int, *prompts: tuple[int, ...]) -> list[list[int]]:
    """What one engine without cache or neighbours says to the prompts."""
    engine = Engine(worker._engine.runner, token_budget=256, max_streams=1, prefix_cache=False)
    return [engine.run([h.request("alone", ids, num)])["alone"] for ids in prompts]


def counted(worker: PrefillWorker | DecodeWorker, name: str) -> float:
    """A counter's or histogram's sum over all labels."""
    samples = [s for family in worker.metrics.registry.collect() for s in family.samples]
    return sum(s.value for s in samples if s.name in (f"paceline_{name}_total", f"paceline_{name}_count"))


async def pool_after(models: Path, *settings: str) -> tuple[Tensor, int]:
    """The decode worker's pool after one hand-off, [layers, 2, n, G, D], and how many messages it took."""
    fixed = ("speculation.enabled=false", "prefill.token_budget=64")
    async with h.cluster(models, *fixed, *settings) as cluster:
        prefill, decode = await pair(cluster)
        tokens, report = await cluster.run(h.request("r", PROMPT, 8))

        assert report.kv_sources == ["link"]
        assert report.kv_bytes == (len(PROMPT) - 1) * TOKEN_BYTES
        assert counted(decode, "kv_links") == 1
        slots = torch.arange(len(PROMPT) - 1)
        pool = torch.stack([decode._engine.runner.cache.gather(layer, slots) for layer in range(LAYERS)])
        num_messages = int(counted(decode, "kv_messages"))
        await cluster.until(
            lambda: counted(prefill, "kv_messages") == num_messages
        )  # a thread of its own counts
        assert [tokens] == alone(decode, 8, PROMPT)
        return pool, num_messages


@pytest.mark.parametrize("backend", BACKENDS)
async def test_plain_and_overlapped_sending_fill_the_same_pool(models: Path, backend: str) -> None:
    """Overlap, and what carries the rows, decide when they arrive and nothing else."""
    overlapped, _ = await pool_after(models, f"link.backend={backend}")
    plain, _ = await pool_after(models, f"link.backend={backend}", "link.overlap=false")

    assert torch.equal(overlapped, plain)
    assert overlapped.abs().sum(dim=(1, 3, 4)).all(), "a row is missing"


async def test_layers_of_a_short_chunk_travel_together(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message a chunk while they are small, a message a layer and chunk when they are not: the same pool."""
    together, num_together = await pool_after(models)
    monkeypatch.setattr("paceline.workers.prefill._MESSAGE_BYTES", 1)
    apart, num_apart = await pool_after(models)

    num_chunks = -(-(len(PROMPT) - 1) // 64)
    assert (num_together, num_apart) == (num_chunks, num_chunks * LAYERS)
    assert torch.equal(together, apart)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_what_the_decode_worker_holds_is_not_sent(models: Path, backend: str) -> None:
    """A prompt that begins like an earlier one: fewer bytes by exactly the blocks in the cache, and the same text."""
    branch = (*PROMPT[:100], *h.prompt(60, seed=4))
    async with h.cluster(models, f"link.backend={backend}", "prefill.token_budget=64") as cluster:
        prefill, decode = await pair(cluster)
        whole, first = await cluster.run(h.request("a", PROMPT, 12))
        rest, second = await cluster.run(h.request("b", branch, 12))

        assert [whole, rest] == alone(decode, 12, PROMPT, branch)
        assert first.kv_sources == second.kv_sources == ["link"]
        assert (first.kv_skipped_tokens, second.kv_skipped_tokens) == (0, 96)
        assert second.kv_bytes == (len(branch) - 1 - 96) * TOKEN_BYTES
        assert counted(decode, "kv_skipped_tokens") == 96
        assert counted(prefill, "prefix_hit_tokens") == 96, "its own cache held as much"


async def test_a_prefill_worker_without_the_prefix_computes_it_and_sends_the_rest(models: Path) -> None:
    """The two caches need not agree: what is skipped on the link is the decode worker's business alone."""
    branch = (*PROMPT[:100], *h.prompt(60, seed=4))
    async with h.cluster(models, "prefill.token_budget=64") as cluster:
        prefill, decode = await pair(cluster)
        await cluster.run(h.request("a", PROMPT, 12))
        prefill.post(prefill._engine.pool.forget_all)
        tokens, report = await cluster.run(h.request("b", branch, 12))

        assert [tokens] == alone(decode, 12, branch)
        assert report.kv_sources == ["link"] and report.kv_skipped_tokens == 96
        assert report.kv_bytes == (len(branch) - 1 - 96) * TOKEN_BYTES
        assert counted(prefill, "prefix_hit_tokens") == 0


async def test_a_full_prefix_hit_skips_the_hand_off(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the router sent it to a prefill worker: no byte moves, nobody waits, nothing is left over anywhere."""
    monkeypatch.setattr(PrefixIndex, "num_hit", lambda *_: 0)
    async with h.cluster(models) as cluster:
        prefill, decode = await pair(cluster)
        first, _ = await cluster.run(h.request("a", PROMPT, 12))
        sent = (len(PROMPT) - 1) * TOKEN_BYTES
        await cluster.until(lambda: counted(prefill, "kv_bytes") == sent)
        second, report = await cluster.run(h.request("b", PROMPT, 12))

        assert first == second and report.prefill_worker == "prefill-0"
        assert report.kv_sources == ["local:prefix_hit"] and report.kv_skipped_tokens == 144
        assert counted(prefill, "kv_bytes") == sent
        await cluster.until(lambda: not prefill._jobs)
        assert counted(prefill, "kv_handoffs_dropped") == counted(decode, "kv_handoffs_dropped") == 0


async def test_a_prefix_that_became_known_after_the_stream_began_is_found_at_the_reservation(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two equal prompts at once: the second is either sent whole or finds the first one's KV, never half of it."""
    monkeypatch.setattr(PrefixIndex, "num_hit", lambda *_: 0)
    # Less than one prompt is reserved ahead, so the second one asks when the first is nearly done.
    async with h.cluster(models, "prefill.token_budget=16") as cluster:
        _, decode = await pair(cluster)
        runs = await asyncio.gather(*(cluster.run(h.request(f"r{i}", PROMPT, 40)) for i in range(3)))

        assert [tokens for tokens, _ in runs] == alone(decode, 40, PROMPT) * 3
        for _, report in runs:
            skipped, sent = report.kv_skipped_tokens, report.kv_bytes // TOKEN_BYTES
            assert (report.kv_sources, skipped + sent) in (
                (["link"], len(PROMPT) - 1),
                (["local:prefix_hit"], 144),
            )


async def test_figures_of_a_hand_off(models: Path) -> None:
    """Bytes, messages, digests and exposed time are counted at both ends, once for each hand-off."""
    async with h.cluster(models, "kv.prefix_cache=false") as cluster:
        prefill, decode = await pair(cluster)
        reports = [(await cluster.run(h.request(f"r{i}", PROMPT, 4)))[1] for i in range(3)]
        num_bytes = 3 * (len(PROMPT) - 1) * TOKEN_BYTES
        await cluster.until(lambda: not prefill._jobs and counted(prefill, "kv_bytes") == num_bytes)

        assert counted(decode, "kv_bytes") == num_bytes
        assert counted(prefill, "kv_exposed_seconds") == counted(decode, "kv_handoff_seconds") == 3
        for worker in (prefill, decode):
            assert 0 < counted(worker, "kv_digest_seconds") < 1
        assert all(0 < report.kv_exposed_s < 1 for report in reports)


async def test_each_connection_has_a_key_of_its_own(models: Path) -> None:
    """Both ends of a pair know it, no other pair has it, it is not the cluster's secret, and a new life has a new one."""
    async with h.cluster(models) as cluster:
        prefill, decode = await pair(cluster)
        other = await cluster.add(DecodeWorker, "1")
        keys = []
        for worker in (decode, other):
            near = await prefill.member.peer_to(worker.member.info)
            far = next(p for p in worker.member._open if p.identity == prefill.member.me and p.is_open)
            assert near.session_key == far.session_key
            keys.append(near.session_key)
        old = await prefill.member.peer_to(decode.member.info)
        old.close()
        await cluster.until(lambda: not old.is_open)
        keys.append((await prefill.member.peer_to(decode.member.info)).session_key)

        assert len({*keys, cluster.secrets.link}) == 4
        assert {len(key) for key in keys} == {32}


async def test_load_is_time_for_prefill_and_streams_for_decode(models: Path) -> None:
    """What Ray Serve is told where there may be more workers: a prompt at a time fills a prefill worker."""
    async with h.cluster(models, "speculation.enabled=false", "decode.max_streams=4") as cluster:
        prefill, decode = await pair(cluster)
        prefill.load_share()
        await asyncio.sleep(0.2)
        idle = prefill.load_share()
        report, stream = h.StreamReport(), h.request("r", PROMPT, 64)
        shares: list[float] = []
        async for _ in cluster.streams.run(stream, report):
            shares.append(decode.load_share())
        busy = prefill.load_share()

    assert idle == 0.0 and 0.0 < busy <= 1.0
    assert shares[0] == 0.25  # one stream of four
