"""The lean forward against its plain twin, and cached noise against computed noise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from paceline.cluster.speculation import Tree
from paceline.cluster.types import Sampling
from paceline.kernels.layer_jit import rms_norm
from paceline.workers import lean, sampling
from paceline.workers.model_batch import BatchBuilder
from paceline.workers.model_runner import ModelRunner, load_runner
from paceline.workers.sampling import CachedNoise, DirectNoise, SamplingRows

TABLE = list(range(16))
IDS = ((np.arange(60) * 37 + 11) % 200).astype(np.int32)


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """A prompt in two chunks, then a tree behind it."""
    first, second, tree = (BatchBuilder(runner.cache) for _ in range(3))
    first.add_chunk(TABLE, IDS[:20], 0, keep_last=True)
    second.add_chunk(TABLE, IDS[20:33], 20, keep_last=True)
    tree.add_tree(TABLE, Tree.build(int(IDS[33]), IDS[34:40].tolist(), [-1, 0, 1, -1, 3, 0]), 33)
    return torch.cat([runner.forward(builder.build()[0]) for builder in (first, second, tree)])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_lean_logits_are_the_plain_ones(model_folder: Callable[[str], Path], family: str) -> None:
    """Chunks and trees, windows and query norms; and the lean path was really taken."""
    fast, _ = load_runner(model_folder(family), kv_memory_mb=2, block_size=8, whole_step=False)
    plain, _ = load_runner(model_folder(family), kv_memory_mb=2, block_size=8, lean=False)

    assert (fast.path, plain.path) == ("lean", "transformers")
    torch.testing.assert_close(logits_of(fast), logits_of(plain), rtol=0, atol=1e-5)


def test_biases_are_kept(tmp_path: Path) -> None:
    """Qwen2 has biases on q, k and v."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias)
    model.save_pretrained(tmp_path)
    fast, _ = load_runner(tmp_path, kv_memory_mb=2, block_size=8, whole_step=False)
    plain, _ = load_runner(tmp_path, kv_memory_mb=2, block_size=8, lean=False)

    assert fast.path == "lean"
    torch.testing.assert_close(logits_of(fast), logits_of(plain), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma3", "mixtral"])
def test_other_families_say_why_they_run_plainly(model_folder: Callable[[str], Path], family: str) -> None:
    """The reason is in the path, not in silence."""
    runner, _ = load_runner(model_folder(family), kv_memory_mb=2, block_size=8)

    assert runner.path.startswith("transformers: model_type ")


def spoiled_norm(x: Any, weight: Any, eps: Any, out: Any, *, wrong: float) -> None:
    """RMS norm off by a factor."""
    rms_norm(x, weight, eps, out)
    out *= wrong


def test_a_lean_path_with_other_logits_is_refused(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison at load has teeth: an error in the lean maths, or NaN, keeps the plain path."""
    for wrong in (1.001, float("nan")):
        with monkeypatch.context() as patch:
            patch.setattr(lean, "rms_norm", lambda *a, wrong=wrong: spoiled_norm(*a, wrong=wrong))
            runner, _ = load_runner(model_folder("llama"), kv_memory_mb=2, block_size=8, whole_step=False)

        assert runner.path.startswith("transformers: logits differ by ")


def test_cached_noise_is_computed_noise_bit_for_bit() -> None:
    """Any order of positions and streams, across blocks of positions, with seeds of all 64 bits."""
    generator = np.random.default_rng(0)
    num = 200
    samplings = [
        Sampling(int(seed), choice=int(choice), prompt_index=int(prompt))
        for seed, choice, prompt in zip(
            generator.choice(np.asarray([3, 2**64 - 5, 2**62], np.uint64), num),
            generator.integers(0, 2, num),
            generator.integers(0, 2, num),
            strict=True,
        )
    ]
    rows = SamplingRows(samplings, generator.integers(0, 100, num).tolist())
    cache = CachedNoise(max_bytes=40 * 16 * 211 * 4, span=16)

    assert torch.equal(cache.rows(rows, 211), DirectNoise().rows(rows, 211))
    assert cache._bytes <= 40 * 16 * 211 * 4


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3"])
def test_logits_have_the_same_bits_whatever_the_chunks_and_trees(
    model_folder: Callable[[str], Path], family: str
) -> None:
    """A prompt at once, in chunks, token by token, and verified as a draft with wrong siblings."""
    runner, _ = load_runner(model_folder(family), kv_memory_mb=2, block_size=8)
    num = 40

    def last_rows(cuts: list[int]) -> torch.Tensor:
        found = []
        for start, stop in pairwise(cuts):
            builder = BatchBuilder(runner.cache)
            chain = list(range(-1, stop - start - 2))
            builder.add_tree(TABLE, Tree.build(int(IDS[start]), IDS[start + 1 : stop].tolist(), chain), start)
            found.append(runner.forward(builder.build()[0]))
        return torch.cat(found)

    whole = last_rows([0, num])
    mixed = last_rows([0, 1, 2, 7, 23, 24, num])
    single = last_rows(list(range(num + 1)))
    builder = BatchBuilder(runner.cache)
    builder.add_chunk(TABLE, IDS[:num], 0, keep_last=True)
    chunk = runner.forward(builder.build()[0])
    tree = BatchBuilder(runner.cache)
    # The right path is a side branch, its nodes apart from each other: no row may care where its keys lie.
    right = [int(IDS[37]), int(IDS[38])]
    tree.add_tree(TABLE, Tree.build(int(IDS[36]), [5, right[0], 6, 7, right[1]], [-1, -1, 0, 1, 1]), 36)
    verified = runner.forward(tree.build()[0])

    assert torch.equal(mixed, whole) and torch.equal(single, whole)
    assert torch.equal(chunk[0], whole[-1])
    assert torch.equal(verified[[0, 2, 5]], whole[36:39])


def test_noise_is_computed_once_however_many_streams_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little room blocks get shorter, so that streams in turn do not push each other's out."""
    computed = 0
    plain = sampling.gumbel_vocabulary

    def counted(seeds: torch.Tensor, *rest: Any, **how: Any) -> torch.Tensor:
        nonlocal computed
        computed += len(seeds)
        return plain(seeds, *rest, **how)

    monkeypatch.setattr(sampling, "gumbel_vocabulary", counted)
    for num_streams in (1, 3, 4, 9, 40):
        cache, computed = CachedNoise(max_bytes=8 * 16 * 211 * 4), 0
        for position in range(64):
            rows = SamplingRows.build(
                [Sampling(seed) for seed in range(num_streams)],
                [1] * num_streams,
                np.full(num_streams, position),
            )
            assert torch.equal(cache.rows(rows, 211), DirectNoise().rows(rows, 211))
        # DirectNoise computed one row for each as well.
        assert computed <= 2 * 64 * num_streams
