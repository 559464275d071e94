"""Synthetic blocks, seeded prompts and tiny random models -> figures that are right, repeatable and all there."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

from bundled import TARGET
from paceline.cluster.config import SpeculationConfig
from paceline.cluster.errors import ConfigError
from paceline.cluster.types import SOURCE_DRAFT, Request, Sampling
from paceline.deploy.bench import inprocess, main, report, suite
from paceline.deploy.bench.check import Exactness, Judge
from paceline.deploy.bench.figures import (
    Count,
    Figure,
    alternate,
    ceiling_verdict,
    median,
    rate,
    ratio,
    unit_seconds,
    verdict,
)
from paceline.deploy.bench.workload import SCENARIOS, Workload


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower on two threads than on one."""
    with inprocess.threads(1):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that takes the bundled tokenizer's ids."""
    made = tmp_path_factory.mktemp("random")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / file, made / file)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    return made


# --- figures --------------------------------------------------------------------------------------------


def noisy_blocks(true_ratio: float, noise: float, seed: int) -> dict[str, Any]:
    """Two sides whose machine slows down to a third during the run, each block with noise of its own."""
    rng = np.random.default_rng(seed)

    def block(rate_of_side: float) -> Any:
        return lambda index: Count(100, 100 / rate_of_side * (1 + index / 15) * rng.lognormal(0, noise))

    return {"baseline": block(1000.0), "ours": block(1000.0 * true_ratio)}


def test_blocks_alternate_and_share_their_round() -> None:
    """A B A B, and both sides of a pair are told the same index."""
    order: list[tuple[str, int]] = []

    def block(name: str) -> Any:
        return lambda index: order.append((name, index)) or Count(1, 1.0)

    alternate({"a": block("a"), "b": block("b")}, 3)

    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_a_known_ratio_is_recovered_from_a_drifting_machine() -> None:
    """The drift is common to both sides of a pair, so the ratio does not see it."""
    counts = alternate(noisy_blocks(1.4, 0.02, seed=1), 30)

    figure = ratio(counts["ours"], counts["baseline"])

    assert figure.lo <= 1.4 <= figure.hi
    assert figure.value == pytest.approx(1.4, rel=0.02)
    assert rate(counts["ours"]).width / rate(counts["ours"]).value > 5 * figure.width


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    """95 % nominal; a percentile bootstrap of a median of 30 comes close."""
    hits = 0
    for seed in range(200):
        counts = alternate(noisy_blocks(0.98, 0.05, seed), 30)
        figure = ratio(counts["ours"], counts["baseline"])
        hits += figure.lo <= 0.98 <= figure.hi

    assert 0.89 <= hits / 200 <= 0.995


def test_the_same_measurements_give_the_same_interval() -> None:
    """The bootstrap is seeded."""
    values = np.random.default_rng(3).normal(1.0, 0.1, 30).tolist()

    assert median(values) == median(values)
    assert median(values).lo < median(values).value < median(values).hi


def test_seconds_a_unit_are_not_the_reciprocal_of_a_mean() -> None:
    """Medians of what was measured, in either unit."""
    counts = [Count(10, 1.0), Count(10, 2.0), Count(10, 4.0)]

    assert unit_seconds(counts).value == pytest.approx(0.2)
    assert unit_seconds(counts).times(1e6).value == pytest.approx(2e5)
    assert rate(counts).value == pytest.approx(5.0)


@pytest.mark.parametrize(
    "figure, outcome",
    [
        (Figure(0.98, 0.965, 0.99), "pass"),
        (Figure(0.98, 0.9599, 0.985), "fail"),
        (Figure(0.975, 0.96, 0.99), "pass"),
        (Figure(0.98, 0.96, 1.0), "not resolved"),
        (Figure(2.0, 1.9, 2.1), "pass"),
        (Figure(0.5, 0.4, 0.6), "fail"),
    ],
    ids=["inside", "below", "just", "wide", "wide and far above", "wide and far below"],
)
def test_a_floor_is_passed_missed_or_not_resolved(figure: Figure, outcome: str) -> None:
    """An interval wider than 0.03 with the floor in it decides nothing; a ceiling is the mirror."""
    assert verdict(figure, 0.97) == outcome
    mirrored = Figure(2 - figure.value, 2 - figure.hi, 2 - figure.lo)
    assert ceiling_verdict(mirrored, 1.03) == outcome


def test_floors_belong_to_whole_names() -> None:
    """16 streams have not the floor of one; kinds without a floor of their own have their kind's."""
    found = report.Report({}, False, 3, {})
    names = ("spec.on_off.domains.1", "spec.on_off.domains.16", "engine.vs_hf.1", "engine.vs_hf_assisted.1")
    found.figures = {name: Figure.exactly(1.1) for name in (*names, "step.floor", "prefill.tokens_s")}

    assert [found.verdicts().get(name) for name in names] == ["fail", "pass", "fail", "pass"]
    assert found.verdicts()["step.floor"] == "pass" and "prefill.tokens_s" not in found.verdicts()


# --- workload -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_requests_depend_on_seed_and_index_alone(scenario: str) -> None:
    """Two workloads agree whatever was asked of them before; another seed gives other requests."""
    ahead, fresh, other = Workload(TARGET, seed=3), Workload(TARGET, seed=3), Workload(TARGET, seed=4)
    ahead.requests(scenario, 0, 5, max_tokens=8)

    assert ahead.requests(scenario, 2, 4, max_tokens=8) == fresh.requests(scenario, 2, 4, max_tokens=8)
    assert fresh.requests(scenario, 0, 4, max_tokens=8) != other.requests(scenario, 0, 4, max_tokens=8)


def test_half_of_the_requests_are_greedy_and_prompts_fit_the_model() -> None:
    """Both kinds of sampling in every block; ids of the vocabulary; lengths the bundled pair was trained on."""
    workload = Workload(TARGET)
    for name, scenario in SCENARIOS.items():
        requests = workload.requests(name, 0, 8, max_tokens=8)

        assert [r.sampling.temperature for r in requests] == [
            0.0,
            0.0,
            scenario.temperature,
            scenario.temperature,
        ] * 2
        assert all(0 <= t < len(workload.tokenizer) for r in requests for t in r.prompt_ids)
        assert all(0 < len(r.prompt_ids) < 600 for r in requests)
        assert len({r.id for r in requests}) == 8
        assert all(
            r.sampling.temperature == 0 for r in workload.requests(name, 0, 8, max_tokens=8, greedy=True)
        )


def test_domains_are_held_out_tasks_in_turn_at_both_temperatures() -> None:
    """Four requests have both domains, each greedy and drawn; they end where the reply does."""
    workload = Workload(TARGET)
    requests = workload.requests("unseen", 0, 4, max_tokens=300)
    texts = [workload.tokenizer.decode(request.prompt_ids) for request in requests]

    assert ["SQL" in text for text in texts] == [True, False, True, False]
    assert [r.sampling.temperature for r in requests] == [0.0, 0.0, 0.8, 0.8]
    assert all(workload.tokenizer.decode(r.stop_ids) == "<|eos|><|end|>" for r in requests)
    assert [r.max_tokens for r in requests] == [256] * 4
    assert all(r.stop_ids == () for r in workload.requests("random", 0, 4, max_tokens=8))
    assert workload.requests("unseen", 0, 1, max_tokens=8, stops=False)[0].stop_ids == ()


# --- engine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_colocated_drafter_changes_the_number_of_steps_and_nothing_else(
    folder: Path, temperature: float
) -> None:
    """Draft == target: every spine token is accepted, in every stream, and the text is that without drafts."""
    runner = inprocess.load(folder)
    requests = [
        Request(f"r{i}", tuple(range(10 + i, 30 + 2 * i)), Sampling(i, temperature), 40) for i in range(5)
    ]
    # A random model is never sure: it drafts to the full depth all the same.
    drafter = inprocess.draft_model(folder, SpeculationConfig(depth=4, floor=0.0))(runner)

    off = inprocess.generate(inprocess.new_engine(runner, None, 3), requests, 3)
    on = inprocess.generate(inprocess.new_engine(runner, drafter, 3), requests, 3)

    assert on.outputs == off.outputs
    assert off.num_drafted == 0 and off.num_turns == off.num_tokens == 5 * 40
    assert on.by_source[SOURCE_DRAFT] / on.num_tokens > 0.7
    assert on.num_turns < off.num_turns / 3


def test_the_colocated_drafter_survives_the_loss_of_its_state(folder: Path) -> None:
    """A stream evicted at the draft engine is opened again; one that ended is forgotten."""
    runner = inprocess.load(folder)
    drafter: Any = inprocess.draft_model(folder)(runner)
    engine = inprocess.new_engine(runner, drafter, 1)
    request = Request("r", tuple(range(10, 30)), Sampling(0, 0.0), 40)
    expected = inprocess.generate(inprocess.new_engine(runner, None, 1), [request], 1).outputs["r"]
    stream = engine.add(request)
    output: list[int] = []
    drafted: list[int] = []
    while len(engine.scheduler):
        if len(drafted) == 4:
            drafter._engine.close(stream.key)
        for emission in engine.step().emissions:
            output.extend(emission.tokens)
            drafted.append(emission.num_drafted)

    assert output == expected
    assert all(drafted[1:-1])
    assert len(drafter._engine) == 0 and drafter._engine.pool.num_used == 0 and drafter._known == {}


def test_a_step_block_takes_its_steps_with_its_nodes(folder: Path) -> None:
    """Eight nodes a step and stream, one token committed: the trees are wrong on purpose."""
    runner = inprocess.load(folder)
    block = inprocess.step_block(runner, 8, 12, 32)

    assert block(0).units == 12
    assert block(1).units == 12  # the stream of the first block is gone


def test_the_judge_sees_a_wrong_token(folder: Path) -> None:
    """The engine's own text passes, on or off; one changed token is a mismatch wherever it stands."""
    runner, judge, found = inprocess.load(folder), Judge(folder), Exactness()
    requests = [Request(f"r{i}", tuple(range(10, 30)), Sampling(i, 0.8 * i), 12) for i in range(2)]
    right = inprocess.generate(inprocess.new_engine(runner, None, 2), requests, 2).outputs
    wrong = {name: [*tokens[:5], (tokens[5] + 1) % 4096, *tokens[6:]] for name, tokens in right.items()}

    judge.compare(found, requests, right, right)
    judge.sample(found, requests, right)
    assert (found.mismatches, found.near_ties, found.num_tokens, found.num_judged) == (0, 0, 24, 24)
    judge.compare(found, requests, wrong, right)
    assert found.mismatches == 2 and found.examples == ["r0", "r1"]


# --- the whole run --------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """Arguments of a run of a few seconds."""
    monkeypatch.setattr(inprocess, "thread_counts", lambda: [1])
    models = {"target": str(folder), "draft": str(folder)}
    return {**models, "quick": True, "pairs": 1, "streams": (1, 3), "max_tokens": 8}


def run(json_path: Path, **arguments: Any) -> tuple[str, str]:
    """stdout and stderr of a run."""
    out, err = Console(file=io.StringIO(), width=130), Console(file=io.StringIO(), width=130)
    main.run(out=out, err=err, json_path=json_path, **arguments)
    return out.file.getvalue(), err.file.getvalue()  # type: ignore[attr-defined]


def test_a_quick_run_gives_every_figure_and_ends_in_json(quick: dict[str, Any], tmp_path: Path) -> None:
    """All scenarios, peers, steps and prompts, each with its interval; progress is on stderr."""
    text, progress = run(tmp_path / "bench.json", **quick)

    found = json.loads(text.splitlines()[-1])
    names = {f"spec.on_off.{scenario}.{streams}" for scenario in SCENARIOS for streams in (1, 3, "min")}
    names |= {"engine.vs_hf.1", "engine.vs_hf_batch.3", "engine.vs_hf_assisted.1"}
    names |= {f"step.t{nodes}" for nodes in suite.STEP_NODES} | {"step.t8_t1", "step.t16_t1", "step.floor"}
    names |= {"prefill.tokens_s", "exact.mismatches", "exact.near_ties_per_100k"}
    assert set(found["figures"]) == {f"{name}{end}" for name in names for end in ("", ".lo", ".hi")}
    assert all(
        found["figures"][f"{n}.lo"] <= found["figures"][n] <= found["figures"][f"{n}.hi"] for n in names
    )
    assert found["figures"]["exact.mismatches"] == 0
    assert found["quick"] and not found["interrupted"] and found["versions"]["torch"] == torch.__version__
    assert {row["num_same"] == row["num_requests"] for row in found["peers"]} == {True}
    assert json.loads((tmp_path / "bench.json").read_text()) == found
    assert "quick: too few to decide anything" in text and "transformers, assisted" in progress
    assert str(quick["target"]) not in text


def test_an_interrupted_run_shows_what_is_finished(
    quick: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while steps are timed: the ratio table is there, and the JSON says it is not all."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inprocess, "step_block", interrupt)
    text, _ = run(tmp_path / "bench.json", **{**quick, "scenarios": ["random"], "threads": 1})

    found = json.loads(text.splitlines()[-1])
    assert found["interrupted"] and "interrupted" in text
    assert {"spec.on_off.random.1", "spec.on_off.random.min", "exact.mismatches"} <= set(found["figures"])
    assert "step.t1" not in found["figures"]


def test_threads_are_told_to_sleep_before_torch_is_loaded() -> None:
    """OpenMP reads it when it is loaded; a choice of the caller's own stands."""
    script = (
        "import os, sys\n"
        "from paceline.deploy.bench import main\n"
        "assert 'torch' not in sys.modules\n"
        "print(main._wait_passively(), os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])"
    )
    environment = {k: v for k, v in os.environ.items() if k not in main.PASSIVE}

    command = [sys.executable, "-c", script]
    plain = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    chosen = {**environment, "OMP_WAIT_POLICY": "ACTIVE"}
    active = subprocess.run(command, env=chosen, capture_output=True, text=True, timeout=60, check=True)

    assert plain.stdout.split() == ["idle", "ones", "sleep", "PASSIVE", "0"]
    assert active.stdout.split() == ["idle", "ones", "spin", "ACTIVE", "0"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"scenarios": ["poetry"]}, "scenario 'poetry'"),
        ({"pairs": 0}, "pairs=0"),
        ({"streams": (4, 0)}, "streams=0"),
        ({"target": "nowhere"}, "model folder 'nowhere'"),
    ],
    ids=["scenario", "pairs", "streams", "target"],
)
def test_a_bad_argument_names_itself(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "bench.json", **arguments)
