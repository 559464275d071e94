"""Requests through real workers -> shards of those that may be kept, and figures of all of them for control."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from harness import cluster, prompt, request, tiny_model
from paceline.cluster.learning.capture import ShardReader
from paceline.cluster.types import Served, ServedStream
from paceline.workers.decode import DecodeWorker
from paceline.workers.draft import DraftWorker


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "target", seed=1)
    tiny_model(folder / "draft", seed=2, layers=1)
    return folder


def served(worker: DecodeWorker) -> list[ServedStream]:
    """What control would be told next."""
    reports = list(worker.reports())
    assert all(isinstance(report, Served) for report in reports)
    return [item for report in reports for item in report.items]  # type: ignore[union-attr]


async def test_a_decode_worker_keeps_what_it_may_and_tells_of_everything(
    models: Path, tmp_path: Path
) -> None:
    """Shards are there when it has closed; a report has counts by depth whether or not anything may be kept."""
    settings = [
        "learning.enabled=true",
        f"learning.storage={tmp_path}/learning",
        "learning.capture.holdout=0",
    ]
    async with cluster(models, *settings) as harness:
        worker = await harness.add(DecodeWorker, "d")
        await harness.add(DraftWorker, "s")
        assert isinstance(worker, DecodeWorker)
        for number in range(20):  # until its connection to the draft worker is up
            await harness.run(request(f"warm-{number}-0-0", prompt(5), 8))
            if any(item.tested for item in served(worker)):
                break
        kept = msgspec.structs.replace(
            request("kept-0-0", prompt(9), 30), tenant="acme", domain="notes", capture=True
        )
        secret = msgspec.structs.replace(request("secret-0-0", prompt(11), 20), tenant="acme")
        texts = dict(
            zip(("kept", "secret"), await asyncio.gather(harness.run(kept), harness.run(secret)), strict=True)
        )
        told = {item.request_id.partition("@")[0]: item for item in served(worker)}
        await worker.close()
        harness.workers.remove(worker)
        assert served(worker) == []

    assert {name: item.num_tokens for name, item in told.items()} == {"kept-0-0": 30, "secret-0-0": 20}
    one = told["kept-0-0"]
    assert (one.tenant, one.domain, one.temperature) == ("acme", "notes", 0.0)
    assert 0 < one.num_steps <= 30 and one.seconds > 0 and one.max_gap_s <= one.seconds
    assert one.draft_version and one.tested[0] > 0
    assert len(one.tested) == len(one.accepted)
    assert all(right <= tested for tested, right in zip(one.tested, one.accepted, strict=True))
    [record] = ShardReader.of(harness.config.learning).requests()
    assert record.request_id == "kept-0-0"
    assert record.token_ids.tolist() == [*kept.prompt_ids, *texts["kept"][0]]
    assert (record.num_steps, record.draft_version) == (one.num_steps, one.draft_version)
    assert not record.is_heldout


async def test_without_learning_nothing_is_kept_or_told(models: Path, tmp_path: Path) -> None:
    """Even of a request that is marked by mistake."""
    async with cluster(models, f"learning.storage={tmp_path}/learning") as harness:
        worker = await harness.add(DecodeWorker, "d")
        assert isinstance(worker, DecodeWorker)
        await harness.run(msgspec.structs.replace(request("x-0-0", prompt(9), 10), capture=True))
        told = served(worker)

    assert told == []
    assert not (tmp_path / "learning").exists()
