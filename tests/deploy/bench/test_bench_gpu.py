"""The GPU's figures -> named where there is no GPU; the steps' bench runs a small model on a CPU."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from paceline.deploy.bench import gpu, gpu_steps


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_every_figure_says_that_it_was_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are wanted and those that are not; the last line is JSON."""
    found = gpu.run(out=Console(quiet=True))

    assert set(gpu.WANTED) <= set(found["figures"]) and set(found["figures"].values()) == {"not run"}
    assert set(found["outcomes"].values()) == {"not run"} and found["outcomes"].keys() == gpu.WANTED.keys()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found


def test_outcomes_follow_from_the_intervals() -> None:
    """A floor and a ceiling, reached, missed and undecided."""

    def entries(name: str, lo: float, value: float, hi: float) -> dict[str, float]:
        return {name: value, f"{name}.lo": lo, f"{name}.hi": hi}

    figures = (
        entries("gpu.verify_floor", 1.3, 1.31, 1.32)
        | entries("gpu.verify_vs_torch", 4.0, 4.01, 4.02)
        | entries("gpu.step_floor", 1.1, 1.25, 1.4)
    )
    found = gpu.outcomes(figures)

    assert found["gpu.verify_floor"] == "pass" and found["gpu.verify_vs_torch"] == "fail"
    assert found["gpu.step_floor"] == "not resolved" and found["gpu.t64_t1"] == "not run"


def test_steps_are_measured_on_whatever_device() -> None:
    """On a CPU the figures mean nothing; they are there, and the streams are gone afterwards."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    size = gpu_steps.Size(pairs=2, block_s=0.003, context=8, copy_bytes=1 << 16, new_tokens=2)
    bench = gpu_steps.StepBench(config, torch.device("cpu"), size, block_size=16)
    found = bench.measure()

    assert set(found) == set(gpu_steps.FIGURES) and all(figure.lo > 0 for figure in found.values())
    assert bench.runner.path == "transformers, eager graphs"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_command_measures_this_gpu() -> None:
    """One kernel's row, against its floor and torch."""
    found = gpu.run(only=["verify sampled alone", "kv commit"], out=Console(quiet=True))

    assert found["device"] and any("kernel." in name for name in found["figures"])
