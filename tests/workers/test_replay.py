"""What is said of a stored text is what the engine really does: the bundled pair, live, against both forms of replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from bundled import TARGET
from paceline.cluster.config import ModelConfig, model_folder
from paceline.cluster.learning.config import GateConfig
from paceline.cluster.learning.counterfactual import Costs, Policy
from paceline.cluster.types import Request, Sampling
from paceline.deploy.bench.workload import Workload
from paceline.workers.drafters.base import Drafter
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner, load_runner
from paceline.workers.replay import ModelClock, Text, TimedRunner, drafters_of, replay_policy
from paceline.workers.scoring import (
    load_draft,
    measure_draft_cost,
    measure_slowdown,
    rank,
    score,
    score_requests,
)

COSTS = Costs(
    (1, 2, 4, 8, 16, 32, 64),
    (3.0e-3, 3.0e-3, 3.1e-3, 3.4e-3, 4.3e-3, 6.6e-3, 12e-3),
    (1, 2, 4, 8, 16),
    (0.25e-3, 0.33e-3, 0.5e-3, 0.9e-3, 1.3e-3),
    suffix_s=30e-6,
)
FIXED = Policy(control="fixed", sources=("draft",), streams=3, first_is_plain=True)
DRAFT = model_folder(ModelConfig().draft)


@pytest.fixture(scope="module")
def target() -> ModelRunner:
    return load_runner(TARGET, kv_memory_mb=48, block_size=16)[0]


@pytest.fixture(scope="module")
def draft() -> ModelRunner:
    return load_draft(DRAFT)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Tasks the draft knows and tasks it does not, greedy and sampled; some with filters, penalties, bias."""
    workload = Workload(TARGET)
    plain = [
        *workload.requests("domains", 0, 8, max_tokens=48),
        *workload.requests("unseen", 0, 4, max_tokens=32),
    ]
    changed = [
        {"top_p": 0.9, "temperature": 0.9},
        {"top_k": 20, "temperature": 1.2, "seed": 1 << 63},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"presence_penalty": 0.5, "temperature": 0.7, "min_p": 0.02},
        {"logit_bias": ((300, 4.0), (301, -3.0)), "temperature": 1.0, "min_tokens": 20, "choice": 3},
    ]
    extra = workload.requests("domains", 20, len(changed), max_tokens=32)
    return plain + [
        msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **fields))
        for request, fields in zip(extra, changed, strict=True)
    ]


@dataclass
class Live:
    """What the engine did."""

    texts: list[Text]
    steps: list[int]
    drafted: list[int]


def run_live(
    target: ModelRunner,
    drafter: Drafter | None,
    requests: Sequence[Request],
    policy: Policy,
    clock: ModelClock,
) -> Live:
    """The real engine with the real target, step times by the clock."""
    timed = cast(ModelRunner, TimedRunner(target, COSTS.target, clock))
    engine = Engine(timed, token_budget=256, max_streams=8, drafter=drafter, prefix_cache=False, clock=clock)
    waiting, outputs = list(requests), {request.id: list[int]() for request in requests}
    steps, drafted = dict.fromkeys(outputs, 0), dict.fromkeys(outputs, 0)
    while waiting or len(engine.scheduler):
        while waiting and len(engine.scheduler) < policy.streams:
            engine.add(waiting.pop(0))
        for emission in engine.step().emissions:
            key = emission.stream.request.id
            outputs[key].extend(emission.tokens)
            steps[key] += bool(emission.tokens)
            drafted[key] += emission.num_drafted
    texts = [Text(request, tuple(outputs[request.id])) for request in requests]
    return Live(texts, list(steps.values()), list(drafted.values()))


@pytest.fixture(scope="module")
def live(target: ModelRunner, draft: ModelRunner, requests: list[Request]) -> Live:
    """A run that always asks the draft model."""
    clock = ModelClock()
    return run_live(target, drafters_of(draft, FIXED, COSTS, clock, 4096), requests, FIXED, clock)


@pytest.fixture(autouse=True, scope="module")
def quietly() -> Iterator[None]:
    """No gradient is ever wanted here."""
    with torch.inference_mode():
        yield


def test_replay_takes_the_steps_that_the_engine_took(live: Live, draft: ModelRunner) -> None:
    """Request by request, and the same number of drafted nodes verified."""
    replayed = replay_policy(live.texts, draft, policy=FIXED, costs=COSTS, vocab_size=4096).texts

    assert [taken.num_steps for taken in replayed] == live.steps
    assert sum(live.steps) < 0.6 * sum(len(text.output) for text in live.texts)  # drafts were of use
    # Behind a stop token nothing is known, and nothing else is missing.
    assert [taken.num_drafted for taken in replayed] == live.drafted


def test_replay_with_every_source_takes_the_steps_that_the_engine_took(
    target: ModelRunner, draft: ModelRunner, requests: list[Request]
) -> None:
    policy = msgspec.structs.replace(FIXED, sources=("suffix", "draft"))
    clock = ModelClock()
    live = run_live(target, drafters_of(draft, policy, COSTS, clock, 4096), requests, policy, clock)
    replayed = replay_policy(live.texts, draft, policy=policy, costs=COSTS, vocab_size=4096)

    assert [taken.num_steps for taken in replayed.texts] == live.steps


@pytest.mark.slow
@pytest.mark.parametrize("streams", [1, 4])
def test_under_the_controller_replay_decides_as_the_engine_does(
    target: ModelRunner, draft: ModelRunner, requests: list[Request], streams: int
) -> None:
    """On one clock: the same decisions, so the same steps, but for what would have stood behind stop tokens."""
    policy = Policy(streams=streams, first_is_plain=True)
    clock = ModelClock()
    live = run_live(target, drafters_of(draft, policy, COSTS, clock, 4096), requests, policy, clock)
    seconds = clock()
    replayed = replay_policy(live.texts, draft, policy=policy, costs=COSTS, vocab_size=4096)

    assert abs(sum(t.num_steps for t in replayed.texts) / sum(live.steps) - 1) < 0.01
    assert abs(replayed.seconds / seconds - 1) < 0.03
    assert sum(live.steps) < sum(len(text.output) for text in live.texts)


def test_without_stop_tokens_the_decisions_are_equal(
    target: ModelRunner, draft: ModelRunner, requests: list[Request]
) -> None:
    endless = [msgspec.structs.replace(request, stop_ids=(), max_tokens=40) for request in requests[:8]]
    policy = Policy(streams=2, first_is_plain=True)
    clock = ModelClock()
    live = run_live(target, drafters_of(draft, policy, COSTS, clock, 4096), endless, policy, clock)
    replayed = replay_policy(live.texts, draft, policy=policy, costs=COSTS, vocab_size=4096)

    assert [(t.num_steps, t.num_drafted) for t in replayed.texts] == list(
        zip(live.steps, live.drafted, strict=True)
    )
    assert replayed.seconds == pytest.approx(clock(), rel=1e-9)


def test_one_forward_gives_the_steps_of_the_deployed_code(live: Live, draft: ModelRunner) -> None:
    """Request by request; tested and accepted by depth; seconds as far as they follow from the text."""
    alone = msgspec.structs.replace(FIXED, streams=1)
    slow = replay_policy(live.texts, draft, policy=alone, costs=COSTS, vocab_size=4096).scores("", 8)
    (fast,) = score_requests(live.texts, [draft], policy=alone, costs=[COSTS])

    assert fast.version == draft.version
    assert fast.steps.tolist() == slow.steps.tolist() == live.steps
    assert fast.accepted.sum(axis=0).tolist() == slow.accepted.sum(axis=0).tolist()
    assert fast.tested.sum(axis=0).tolist() == slow.tested.sum(axis=0).tolist()
    assert abs(fast.seconds.sum() / slow.seconds.sum() - 1) < 0.04


def test_pieces_of_a_text_give_what_the_whole_gives(live: Live, draft: ModelRunner) -> None:
    """However small the pieces, and whichever other draft is scored beside it."""
    from paceline.workers.scoring import TextScorer

    whole, pieces = TextScorer([draft], 2), TextScorer([draft, draft], 2)
    pieces._piece = 7
    num_calls = 0

    def between() -> None:
        nonlocal num_calls
        num_calls += 1

    for text in live.texts:
        (one,) = whole.children(text)
        for other in pieces.children(text, between):
            assert one.ids[:, 0].tolist() == other.ids[:, 0].tolist()
            np.testing.assert_allclose(one.chances, other.chances, atol=1e-4)
    assert num_calls > 2 * len(live.texts)


@pytest.mark.parametrize("change", ["another seed", "another token", "another bias"])
def test_what_is_not_the_request_is_noticed(live: Live, draft: ModelRunner, change: str) -> None:
    """Negative control: with noise, text or parameters of somebody else the steps are others."""
    texts = []
    for text in live.texts:
        request, output = text.request, text.output
        if change == "another seed":
            sampling = msgspec.structs.replace(request.sampling, seed=request.sampling.seed ^ 1)
        elif change == "another bias":
            sampling = msgspec.structs.replace(
                request.sampling, logit_bias=tuple((token, -9.0) for token in sorted(set(output[:20])))
            )
        else:
            sampling = request.sampling
            output = tuple(4000 + i if i % 7 == 3 else token for i, token in enumerate(output))
        texts.append(Text(msgspec.structs.replace(request, sampling=sampling), output))
    (fast,) = score_requests(texts, [draft], policy=FIXED, costs=[COSTS])

    assert fast.steps.sum() > 1.02 * sum(live.steps)


def test_a_text_that_was_cut_off_ends_where_it_ends(live: Live, draft: ModelRunner) -> None:
    """Neither a stop token nor the limit: the client went away. Prompts that were computed elsewhere have no plain step."""
    cut = [Text(text.request, text.output[:11]) for text in live.texts]
    policy = Policy(control="fixed", sources=("draft",))
    replayed = replay_policy(cut, draft, policy=policy, costs=COSTS, vocab_size=4096)
    (fast,) = score_requests(cut, [draft], policy=policy, costs=[COSTS])

    assert [taken.num_tokens for taken in replayed.texts] == [11] * len(cut)
    assert [taken.num_steps for taken in replayed.texts] == fast.steps.tolist()


@pytest.mark.parametrize("sources", [("draft",), ()])
def test_without_a_draft_every_token_is_a_step(live: Live, sources: tuple[str, ...]) -> None:
    policy = msgspec.structs.replace(FIXED, sources=sources)
    replayed = replay_policy(live.texts, None, policy=policy, costs=COSTS, vocab_size=4096)

    assert [t.num_steps for t in replayed.texts] == [t.num_tokens for t in replayed.texts]


# --- the gate's own calls -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What the gate needs of a captured request."""

    request_id: str
    domain: str
    created: float
    target_version: str
    sampling: Sampling
    num_prompt: int
    token_ids: npt.NDArray[np.int32]


@pytest.fixture(scope="module")
def held(live: Live) -> list[Held]:
    return [
        Held(
            text.request.id,
            "known" if index < 8 else "other",
            float(index),
            "t1",
            text.request.sampling,
            len(text.request.prompt_ids),
            np.asarray([*text.request.prompt_ids, *text.output], np.int32),
        )
        for index, text in enumerate(live.texts)
        if not text.request.sampling.min_tokens
    ]


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The bundled draft with noise on its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.5 * weight.std() * torch.randn_like(weight)
    folder = tmp_path_factory.mktemp("spoilt")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_the_gate_refuses_what_is_no_better_and_what_is_worse(held: list[Held], spoilt: object) -> None:
    config = GateConfig(min_requests=10, max_slowdown=3.0)
    num_calls = 0

    def between() -> None:
        nonlocal num_calls
        num_calls += 1

    policy = Policy(control="fixed", sources=("draft",))
    same, worse, better = (
        score(
            held,
            champion,  # type: ignore[arg-type]
            candidate,  # type: ignore[arg-type]
            target_version="t1",
            policy=policy,
            costs=COSTS,
            config=config,
            at=1.0,
            between=between,
        )
        for champion, candidate in ((DRAFT, DRAFT), (DRAFT, spoilt), (spoilt, DRAFT))
    )

    assert not same.passed and same.champion_tokens_per_step == same.candidate_tokens_per_step
    assert not worse.passed and worse.candidate_tokens_per_step < worse.champion_tokens_per_step
    assert better.passed, better.reason
    assert {d.domain for d in worse.domains} == {"known", "other"}
    assert num_calls > 3 * len(held)
    assert same.costs == COSTS and same.policy == policy


def test_only_texts_of_this_target_count_and_the_newest_of_each_domain(held: list[Held]) -> None:
    from paceline.workers.scoring import newest

    stale = [replace(request, target_version="t0") for request in held]

    assert newest(stale, "t1", 100) == []
    assert [t.request.id for t in newest(held, "t1", None, 3)] == [r.request_id for r in held[-3:]]
    report = score(
        stale, DRAFT, DRAFT, target_version="t1", policy=FIXED, costs=COSTS, config=GateConfig(), at=1.0
    )
    assert not report.passed and "too few held-out requests: 0" in report.reason
    assert [t.request.id for t in newest(held, "t1", 2)] == [
        held[i].request_id for i in (6, 7, len(held) - 2, len(held) - 1)
    ]


def test_the_pool_is_ranked_on_the_latest_texts(held: list[Held], spoilt: object) -> None:
    ranked = rank([spoilt, DRAFT], held, target_version="t1", policy=FIXED, costs=COSTS)  # type: ignore[list-item]

    assert ranked[0].version == load_draft(DRAFT).version
    assert ranked[0].saving.mean > 0 and ranked[1].saving.mean == 0


def test_times_are_measured_on_the_code_that_drafts(draft: ModelRunner) -> None:
    """Against itself about 1; a table of seconds by rows."""
    rows, seconds = measure_draft_cost(draft, (1, 2))

    assert rows == (1, 2) and all(0 < s < 1 for s in seconds)
    assert 0.5 < measure_slowdown(draft, draft, pairs=9).mean < 2.0
