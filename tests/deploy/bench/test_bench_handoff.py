"""A prompt's KV copied behind each layer -> a share of its time, and the same KV in the other pool."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import harness as h
from paceline.cluster.errors import TransferError
from paceline.deploy.bench.handoff import Handoff
from paceline.workers import kv_cache
from paceline.workers.model_runner import load_runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return h.tiny_model(tmp_path_factory.mktemp("models") / "target", seed=0)


def test_the_share_covers_gather_digests_and_scatter(folder: Path) -> None:
    """All layers of all chunks arrive; the parts are of the whole."""
    runner, _ = load_runner(folder, kv_memory_mb=4, block_size=16)
    made = Handoff(runner, num_tokens=200, chunk=64)
    share = made.share(3)

    assert 0 < share.lo <= share.value <= share.hi < 1
    assert made.num_bytes == 200 * 3 * 2 * 2 * 16 * 4
    assert min(made.gather_s, made.digest_s, made.scatter_s) > 0
    assert torch.equal(made._there._pool, runner.cache._pool) and bool(runner.cache._pool.any())


def test_kv_that_changes_on_the_way_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what is timed is a check that can fail."""
    runner, _ = load_runner(folder, kv_memory_mb=4, block_size=16)
    plain = kv_cache.KVCache.pack
    monkeypatch.setattr(kv_cache.KVCache, "pack", lambda *how: plain(*how) + 1)
    made = Handoff(runner, num_tokens=40, chunk=64)
    monkeypatch.setattr("paceline.deploy.bench.handoff.digest", lambda *_: bytes(16))

    with pytest.raises(TransferError, match="not what arrived"):
        made.share(1)
