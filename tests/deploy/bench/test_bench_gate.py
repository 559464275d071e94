"""The gate's operating curve: requests that repeat, damage that is what it is called, candidates counted by their truth."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from bundled import TARGET
from paceline.cluster.config import ModelConfig, model_folder
from paceline.cluster.learning.config import GateConfig
from paceline.cluster.learning.counterfactual import Policy, Scores
from paceline.cluster.learning.gate import Interval, decide
from paceline.cluster.types import Request, Sampling
from paceline.deploy.bench.learn.candidates import Workshop
from paceline.deploy.bench.learn.gate import Curve, Size, Trial, part_of, request_of
from paceline.deploy.bench.learn.training import captured
from paceline.workers.model_runner import load_runner
from paceline.workers.replay import Text


def test_parts_share_no_request_and_repeat_exactly() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    made = {
        part: [request_of(tokenizer, part, index, (2,)) for index in range(10)]
        for part in ("fresh", "heldout", "train")
    }

    assert made["fresh"] == [request_of(tokenizer, "fresh", index, (2,)) for index in range(10)]
    prompts = [request.prompt_ids for requests in made.values() for request in requests]
    assert len(set(prompts)) == len(prompts)
    assert {request.domain for request in made["fresh"]} == {
        "sql",
        "json",
        "arithmetic",
        "functions",
        "edits",
    }
    assert {request.sampling.temperature for request in made["fresh"]} == {0.0, 0.8}


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path, TARGET, model_folder(ModelConfig().draft), lambda line: None)


def test_a_wider_draft_says_the_same_and_costs_more(shop: Workshop) -> None:
    """Rows of zeros change no logit; the weights are bfloat16 as published ones are."""
    from paceline.workers.scoring import TextScorer, load_draft

    bundled, wider = load_draft(model_folder(ModelConfig().draft)), load_draft(shop.wider("w", "", 512))
    text = Text(Request("r", (5, 6, 7, 8), Sampling(1), 8), (9, 10, 11, 12, 13, 14, 15, 16))
    one, other = TextScorer([bundled, wider], 2).children(text)

    assert one.ids.tolist() == other.ids.tolist()
    np.testing.assert_allclose(one.chances, other.chances, atol=1e-5)
    assert wider.path == bundled.path and wider.version != bundled.version


def test_mixing_goes_from_one_to_the_other_and_noise_from_a_seed(shop: Workshop) -> None:
    shop.noisy("n", "", 0.3, seed=1)
    shop.noisy("again", "", 0.3, seed=1)
    shop.mix("half", "", "n", 0.5)
    base, noisy, again, half = (shop.state(name) for name in ("", "n", "again", "half"))
    key = "model.layers.0.mlp.up_proj.weight"

    assert torch.equal(noisy[key], again[key]) and not torch.equal(noisy[key], base[key])
    torch.testing.assert_close(half[key], (base[key] + noisy[key]) / 2, rtol=0.02, atol=1e-3)


def test_training_is_the_trainers_own_and_leaves_snapshots(shop: Workshop) -> None:
    """Weights change step by step, from the seed; what is there is not made again."""
    texts = [
        Text(Request(f"r{i}", (1, 20 + i, 3), Sampling(i), 9), tuple(range(10, 18 + i))) for i in range(6)
    ]

    shop.train("two", "", texts, steps=2, snapshots={1: "one"}, seed=0)
    shop.train("again", "", texts, steps=1, snapshots={}, seed=0)
    began = (shop.folder("two") / "done").stat().st_mtime_ns
    shop.train("two", "", texts, steps=2, snapshots={1: "one"}, seed=0)

    key = "model.layers.0.mlp.up_proj.weight"
    base, one, two, again = (shop.state(name)[key] for name in ("", "one", "two", "again"))
    assert torch.equal(one, again) and not torch.equal(one, base) and not torch.equal(two, one)
    assert (shop.folder("two") / "done").stat().st_mtime_ns == began


def test_what_a_text_teaches_stands_at_the_prefix_before_each_token() -> None:
    """Row i of a captured text is what the target says before its output token i, and no row is the prompt's."""
    runner, _ = load_runner(TARGET, kv_memory_mb=16, block_size=16)
    prompt, output = (5, 6, 7, 8), (9, 10, 11)
    record = captured(Request("r", prompt, Sampling(1), 3), output, runner)

    for i in range(3):
        longer = captured(Request("r", (*prompt, *output[:i]), Sampling(1), 1), output[i:], runner)
        np.testing.assert_array_equal(record.top_ids[i], longer.top_ids[0])
        np.testing.assert_allclose(record.top_log_probs[i], longer.top_log_probs[0], rtol=1e-3, atol=1e-4)
    assert record.num_rows == 3


def trial(truth: float, gain: float) -> Trial:
    """A candidate with a true saving, and one that the gate saw."""
    rng = np.random.default_rng(0)
    seconds = rng.uniform(0.5, 2, 200)
    ids = tuple(map(str, range(200)))
    both = [
        Scores(
            name,
            ids,
            ("a",) * 200,
            np.full(200, 9),
            np.full(200, 4),
            s,
            np.zeros((200, 2), int),
            np.zeros((200, 2), int),
        )
        for name, s in (("old", seconds), ("new", seconds * (1 - gain + rng.normal(0, 0.02, 200))))
    ]
    report = decide(*both, GateConfig(), at=0.0, policy=Policy())
    return Trial(f"t{truth}", "better", Interval(truth, truth - 0.01, truth + 0.01), 1.0, report)


def test_candidates_are_counted_by_what_they_truly_are() -> None:
    """One that was meant to be better and is worse counts among the worse; and a deployed one shows."""
    curve = Curve(
        [trial(0.05, 0.05), trial(0.05, 0.0), trial(-0.02, 0.05), trial(0.0, 0.0), trial(0.02, 0)], {}, Size()
    )
    figures = curve.figures()

    assert figures["gate.good_tried"] == 2 and figures["gate.good_deployed"] == 1
    assert figures["gate.bad_tried"] == 1 and figures["gate.bad_deployed"] == 1
    assert figures["gate.null_tried"] == 1 and figures["gate.null_deployed"] == 0
    assert figures["gate.between_tried"] == 1


def test_a_trial_survives_its_line() -> None:
    one = trial(0.05, 0.05)

    assert Trial.decode(one.encode()) == one
    assert msgspec.json.decode(one.encode())["kind"] == "better"


def test_a_share_is_one_of_its_parts() -> None:
    assert part_of("2/3") == (2, 3)
    for wrong in ("0/2", "3/2", "1", "/", "-1/2", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match="1 <= I <= N"):
            part_of(wrong)
