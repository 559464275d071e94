"""Prompts through prefill and decode workers of different numbers of ranks -> the same text, each rank's heads by its link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

import harness as h
from paceline.cluster.errors import GangLost
from paceline.cluster.types import KVReady, Request
from paceline.workers.decode import DecodeWorker
from paceline.workers.engine import Engine
from paceline.workers.model_runner import load_runner
from paceline.workers.parallel.links import FarReceiver, FarSender
from paceline.workers.parallel.runner import ParallelRunner
from paceline.workers.prefill import PrefillWorker

LAYERS, HEADS, DIM = 3, 2, 16
TOKEN_BYTES = 2 * LAYERS * HEADS * DIM * 4
PROMPTS = [h.prompt(150, seed=3), h.prompt(90, seed=4)]
QUIET = ("speculation.enabled=false", "prefill.token_budget=64")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    h.tiny_model(folder / "target", seed=0)
    h.tiny_model(folder / "draft", seed=0)
    return folder


@pytest.fixture(scope="module")
def texts(models: Path) -> list[list[int]]:
    """What one rank that computes everything itself says."""
    runner, _ = load_runner(models / "target", kv_memory_mb=4, block_size=16)
    engine = Engine(runner, token_budget=256, max_streams=1, prefix_cache=False)
    return [engine.run([asked(f"r{i}", ids)])[f"r{i}"] for i, ids in enumerate(PROMPTS)]


def asked(name: str, ids: tuple[int, ...]) -> Request:
    return h.request(name, ids, 12, temperature=0.9, top_k=60)


async def pair(cluster: h.Harness, rank_pool: Callable[..., object]) -> tuple[PrefillWorker, DecodeWorker]:
    prefill = await cluster.add(PrefillWorker, "0", launch=rank_pool)
    decode = await cluster.add(DecodeWorker, "0", launch=rank_pool)
    assert isinstance(prefill, PrefillWorker) and isinstance(decode, DecodeWorker)
    return prefill, decode


@pytest.mark.parametrize(
    "backend, prefill_tp, decode_tp",
    [
        ("gloo", 2, 2),
        ("strict_fifo", 2, 1),
        ("gloo", 1, 2),
        pytest.param("gloo", 4, 2, marks=pytest.mark.slow),
    ],
)
async def test_texts_are_those_of_one_rank(
    models: Path,
    texts: list[list[int]],
    rank_pool: Callable[..., object],
    backend: str,
    prefill_tp: int,
    decode_tp: int,
) -> None:
    """Whatever the degrees at both ends: every byte comes over a link, once, and every digest holds."""
    degrees = (f"prefill.tp={prefill_tp}", f"decode.tp={decode_tp}", f"link.backend={backend}")
    async with h.cluster(models, *QUIET, *degrees) as cluster:
        prefill, decode = await pair(cluster, rank_pool)
        for index, ids in enumerate(PROMPTS):
            tokens, report = await cluster.run(asked(f"r{index}", ids))

            assert tokens == texts[index]
            assert report.kv_sources == ["link"]
            assert report.kv_bytes == (len(ids) - 1) * TOKEN_BYTES
        places = {place[1:] for place in decode._receiver._links}
        assert len({sender for sender, _ in places}) == min(prefill_tp, HEADS)
        far = sum(isinstance(link, FarSender) for link in prefill._links.values())
        near = sum(isinstance(link, FarReceiver) for link in decode._receiver._links.values())
        assert (far > 0) == (prefill_tp > 1) and (near > 0) == (decode_tp > 1)


async def test_rows_that_a_rank_got_wrong_are_refused_and_computed_here(
    models: Path, texts: list[list[int]], rank_pool: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digest that does not hold in the other rank's pool: it says so, nothing of it is used, the text is the same."""
    announced = FarReceiver.expect

    def spoilt(self: FarReceiver, message: KVReady, shape: torch.Size, dtype: torch.dtype) -> None:
        announced(self, msgspec.structs.replace(message, digest=bytes(16)), shape, dtype)

    async with h.cluster(models, *QUIET, "decode.tp=2") as cluster:
        _, decode = await pair(cluster, rank_pool)
        with monkeypatch.context() as patch:
            patch.setattr(FarReceiver, "expect", spoilt)
            tokens, report = await cluster.run(asked("r0", PROMPTS[0]))
        assert (tokens, report.kv_sources) == (texts[0], ["local:digest"])
        again, report = await cluster.run(asked("r1", PROMPTS[1]))

        assert (again, report.kv_sources) == (texts[1], ["link"])
        assert not decode._receiver._placing


async def test_a_rank_s_death_ends_its_worker_and_no_stream(
    models: Path, texts: list[list[int]], rank_pool: Callable[..., object]
) -> None:
    """In mid-stream: the worker of two ranks is gone as a whole, its stream goes on in another with the same text."""
    async with h.cluster(models, *QUIET, "decode.tp=2", "decode.max_streams=1") as cluster:
        first = await cluster.add(DecodeWorker, "0", launch=rank_pool)
        what = h.request("long", PROMPTS[1], 60, temperature=0.8)
        alone = (await cluster.run(h.request("alone", PROMPTS[1], 60, temperature=0.8)))[0]
        second = await cluster.add(DecodeWorker, "1", launch=rank_pool)
        running = asyncio.ensure_future(cluster.run(what))
        await cluster.until(lambda: first.num_streams() + second.num_streams() == 1)
        victim = first if first.num_streams() else second
        assert isinstance(victim._runner, ParallelRunner) and victim._runner.gang is not None
        victim._runner.gang._ranks[0].process.end(0.0)  # type: ignore[attr-defined]
        tokens, _ = await running
        await cluster.until(lambda: victim.failure is not None)

        assert tokens == alone
        with pytest.raises(RuntimeError, match="died"):
            victim.check()
        assert isinstance(victim.failure, GangLost)
        await cluster.until(
            lambda: victim.member.me.worker_id not in {w.worker_id for w in cluster.gateway.directory.workers}
        )
        cluster.workers.remove(victim)
        await victim.close()
