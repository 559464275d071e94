"""Prefill, decode and draft workers that step as on a GPU, here eagerly on a CPU -> the texts of those that do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import harness as h
from draft_folders import TARGET, published
from paceline.cluster.config import model_folder as folder_of
from paceline.cluster.learning.publish import fetch
from paceline.cluster.model_files import weights_version
from paceline.cluster.types import Directory, DraftOpen, DraftPlan, DraftRef, Request, Sampling
from paceline.workers.base import Worker
from paceline.workers.decode import DecodeWorker
from paceline.workers.draft import DraftWorker
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.draft_versions import DraftVersions, VersionLoader
from paceline.workers.model_runner import ModelRunner, load_model, load_model_config
from paceline.workers.prefill import PrefillWorker


def eager(folder: Path, **how: Any) -> ModelRunner:
    """A model whose steps go through fixed buffers and are decided where the logits are."""
    model = load_model(folder, load_model_config(folder))
    sizes = {"num_blocks": 128, "block_size": 16, **how}
    return ModelRunner(model, weights_version(folder), graphs="eager", **sizes)


class OnDevice(Worker):
    """As on a GPU."""

    def load_model(self, name: str, *_: object, **__: object) -> ModelRunner:
        self._runner = eager(folder_of(name), block_size=self.config.kv.block_size)
        return self._runner


class DevicePrefill(OnDevice, PrefillWorker): ...


class DeviceDecode(OnDevice, DecodeWorker): ...


class DeviceDraft(OnDevice, DraftWorker): ...


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    h.tiny_model(folder / "target", seed=0)
    h.tiny_model(folder / "draft", seed=0)
    return folder


REQUESTS = [
    h.request("greedy", h.prompt(70, 1), 24),
    h.request("sampled", h.prompt(9, 2), 24, temperature=1.0),
    h.request("filtered", h.prompt(33, 3), 24, temperature=0.8, top_k=30, top_p=0.9, presence_penalty=0.3),
    h.request("alone", h.prompt(20, 4), 24, speculate=False, temperature=0.9),
]


async def answers(models: Path, *kinds: type[Worker]) -> tuple[list[list[int]], int]:
    """All requests at once; their texts, and how many tokens came from the draft worker."""
    async with h.cluster(models) as harness:
        for kind in kinds:
            worker = await harness.add(kind, kind.__name__.lower())
            if isinstance(worker, OnDevice) and isinstance(worker, DecodeWorker):
                assert worker._engine.meanwhile is not None
        for number in range(50):  # until the draft worker is connected
            _, report = await harness.run(h.request(f"warm{number}", h.prompt(5), 8))
            if report.tokens_by_source.get("draft"):
                break
        found = await asyncio.gather(*(harness.run(request) for request in REQUESTS))
    return [tokens for tokens, _ in found], sum(
        report.tokens_by_source.get("draft", 0) for _, report in found
    )


async def test_workers_on_a_device_say_what_the_others_say(models: Path) -> None:
    """Hand-offs, remote drafts, tokens delivered while the next step runs, the last ones at once."""
    plain, _ = await answers(models, *h.ALL)
    ours, num_drafted = await answers(models, DevicePrefill, DeviceDecode, DeviceDraft)

    assert ours == plain
    assert num_drafted > 0


class HearsOfOthers(DeviceDecode):
    """A directory arrives between a step and the delivery of its tokens."""

    def on_directory(self, directory: Directory) -> None:
        self._directory = directory
        super().on_directory(directory)

    def step(self) -> bool:
        has_run = super().step()
        if self._undelivered is not None:
            super().on_directory(self._directory)
        return has_run


async def test_a_stream_that_has_ended_is_not_opened_again(models: Path) -> None:
    """Its last tokens are not delivered yet: a draft worker that heard of it again would keep it for ever.

    That no worker has a stream in the end is what `cluster` looks at.
    """
    ours, num_drafted = await answers(models, DevicePrefill, HearsOfOthers, DeviceDraft)

    assert all(len(tokens) == 24 for tokens in ours)
    assert num_drafted > 0


def test_a_published_version_is_swapped_in_under_the_graphs(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Loaded aside in buffers of its own, probed, then in force at the old one's addresses; and back again."""
    base = model_folder("llama")
    ref = published(base, tmp_path, seed=1, noise=0.3)
    runner = eager(base, block_size=4)
    captured = runner._graphed
    assert captured is not None
    engine = DraftEngine(runner, token_budget=64)
    versions = DraftVersions(
        engine, VersionLoader(base, runner, fetch), limit=3, aside=lambda job: job(), post=lambda job: job()
    )
    request = Request("r", tuple(range(3, 30)), Sampling(1, 0.0), 8)
    engine.open("r", DraftOpen("r", request.prompt_ids, request.sampling, 27))
    first = engine.propose(["r"], 5, 1)[0][0]
    captured.capture = True  # as if they were recorded
    refs = (ref, DraftRef(runner.version, ""))
    found = []
    for revision, live in enumerate((ref.version, runner.version)):
        versions.receive(DraftPlan(revision, TARGET, refs, live))

        assert versions.status().live == live and not versions.status().refused
        assert engine.runner.version == live and engine.runner._graphed is captured
        found.append(engine.propose(["r"], 5, 1)[0][0])

    assert found[0].version == ref.version and found[0].tokens != first.tokens
    assert found[1].tokens == first.tokens
