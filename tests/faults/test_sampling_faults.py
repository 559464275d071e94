"""Penalties and log-probabilities over real workers -> the oracle's text, also when a worker dies under it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import harness as h
import oracle
from paceline.cluster.gateway.streams import StreamReport
from paceline.cluster.types import Generate, Logprobs, Request, Sampling
from paceline.workers.decode import DecodeWorker
from paceline.workers.draft import DraftWorker

NUM = 40
PROMPT = h.prompt(150, seed=3)
SAMPLING = Sampling(
    11,
    0.8,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.9,
    logit_bias=tuple((token, 6.0) for token in (30, 60, 90, 120, 150, 180)),
    min_tokens=NUM,
)
STOPS = (5, 60)
REQUEST = Request("r", PROMPT, SAMPLING, NUM, STOPS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    h.tiny_model(folder / "target", seed=0)
    h.tiny_model(folder / "draft", seed=0)
    return folder


@pytest.fixture(scope="module")
def expected(models: Path) -> tuple[list[int], torch.Tensor]:
    """What the oracle says, and the log-probabilities of prompt and text without the first token."""
    model = oracle.load(str(models / "target"))
    params = oracle.Params(**msgspec.structs.asdict(SAMPLING))
    tokens, gaps = oracle.generate(model, list(PROMPT), params, NUM, STOPS)
    assert len(tokens) == NUM and min(gaps) > oracle.NEAR_TIE, "choose another prompt: this one is moot"
    ids = torch.tensor([[*PROMPT, *tokens]])
    with torch.no_grad():
        all_NV = model(ids).logits[0, :-1].double().log_softmax(-1)
    return tokens, all_NV.gather(-1, ids[0, 1:, None])[:, 0]


async def collect(
    cluster: h.Harness, what: Request
) -> tuple[list[int], list[Logprobs], list[Logprobs], StreamReport]:
    """Tokens, and the log-probabilities as the gateway gets them."""
    report = StreamReport()
    tokens: list[int] = []
    output: list[Logprobs] = []
    prompts: list[Logprobs] = []
    async for event in cluster.streams.run(what, report):
        assert event.finish != "error", event.error
        tokens.extend(event.tokens)
        output.extend([event.logprobs] if event.logprobs is not None else [])
        prompts.extend([event.prompt_logprobs] if event.prompt_logprobs is not None else [])
    return tokens, output, prompts, report


def own(found: list[Logprobs]) -> np.ndarray:
    return np.frombuffer(b"".join(part.own for part in found), "<f4")


async def test_remote_drafts_know_the_penalties(
    models: Path, expected: tuple[list[int], torch.Tensor]
) -> None:
    """KV over the link and drafts over a socket: the oracle's text, and a draft equal to the target is not misled."""
    async with h.cluster(models) as cluster:
        for kind in h.ALL:
            await cluster.add(kind, "0")
        tokens, output, prompts, report = await collect(cluster, REQUEST)

    assert tokens == expected[0]
    assert report.kv_sources == ["link"] and not output and not prompts
    assert report.tokens_by_source["draft"] > NUM // 3


async def test_a_prompt_whose_logits_are_wanted_is_computed_where_it_runs(
    models: Path, expected: tuple[list[int], torch.Tensor]
) -> None:
    """No prefill worker is asked, though one is there; twice, so that a known prefix would show."""
    async with h.cluster(models, "decode.token_budget=64") as cluster:
        for kind in h.ALL:
            await cluster.add(kind, "0")
        for name in ("one", "two"):
            what = msgspec.structs.replace(REQUEST, id=name, logprobs=2, prompt_logprobs=3)
            tokens, output, prompts, report = await collect(cluster, what)

            assert tokens == expected[0]
            assert report.kv_sources == ["local:prompt_logits"] and report.prefill_worker == ""
            assert np.abs(own(output) - expected[1][len(PROMPT) - 1 :].numpy()).max() < 1e-4
            assert np.abs(own(prompts) - expected[1][: len(PROMPT) - 1].numpy()).max() < 1e-4
            assert {part.num_top for part in output} == {2} and [p.num_top for p in prompts] == [3]


async def test_a_prefill_worker_assigned_by_mistake_is_not_waited_for(
    models: Path, expected: tuple[list[int], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router of another opinion: the decode worker knows better."""
    async with h.cluster(models) as cluster:
        decode = await cluster.add(DecodeWorker, "0")
        generate = decode._generate

        def misled(gateway: object, message: Generate) -> None:
            me = next(w for w in cluster.gateway.directory.workers if w.role == "decode")
            generate(gateway, msgspec.structs.replace(message, prefill=me))

        monkeypatch.setattr(decode, "_generate", misled)
        what = msgspec.structs.replace(REQUEST, prompt_logprobs=0)
        tokens, _, prompts, _ = await asyncio.wait_for(collect(cluster, what), 30)

    assert tokens == expected[0]
    assert len(own(prompts)) == len(PROMPT) - 1


async def test_a_decode_worker_that_dies_takes_no_count_with_it(
    models: Path, expected: tuple[list[int], torch.Tensor]
) -> None:
    """The next one counts the tokens already said as output, and tells of each token once."""
    async with h.cluster(models) as cluster:
        for kind, name in ((DecodeWorker, "a"), (DecodeWorker, "b"), (DraftWorker, "0")):
            await cluster.add(kind, name)
        what = msgspec.structs.replace(REQUEST, logprobs=1, prompt_logprobs=0)
        report = StreamReport()
        tokens: list[int] = []
        found: list[Logprobs] = []
        async for event in cluster.streams.run(what, report):
            tokens.extend(event.tokens)
            found.extend([event.logprobs] if event.logprobs is not None else [])
            if len(report.decode_workers) == 1 and len(tokens) >= 5:
                victim = next(w for w in cluster.workers if w.member.me.worker_id == report.decode_workers[0])
                await cluster.kill(victim)

    assert report.num_recoveries == 1
    assert tokens == expected[0]
    assert np.abs(own(found) - expected[1][len(PROMPT) - 1 :].numpy()).max() < 1e-4
