"""Whole steps: the plain logits and KV in every arithmetic, and bits that depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from paceline.cluster.config import model_folder as bundled
from paceline.cluster.model_files import weights_version
from paceline.cluster.speculation import Tree
from paceline.workers import whole_step
from paceline.workers.lean import rotations
from paceline.workers.model_batch import BatchBuilder, PackedBatch
from paceline.workers.model_runner import ModelRunner, load_model, load_model_config, load_runner
from paceline.workers.whole_step import WholeStepDecoder, has_tiles, round_to_int8

TABLE = list(range(16))
IDS = ((np.arange(120) * 37 + 11) % 200).astype(np.int32)
ARITHMETIC = ["vectors float32", "vectors bfloat16", "vectors int8", "tiles bfloat16", "tiles int8"]
SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Set back by the module's own fixture."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """The same with weights that bfloat16 can hold."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def make_model(family: str, model_folder: Callable[[str], Path]) -> PreTrainedModel:
    """A small random one; odd sizes where a vector or tile is not full."""
    if family == "qwen2":
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
        for layer in model.model.layers:
            nn.init.normal_(layer.self_attn.k_proj.bias)
    elif family == "odd":  # 3 KV heads of 48, 72 and 56 inputs, weights that are tied
        torch.manual_seed(4)
        odd = {"hidden_size": 72, "intermediate_size": 56, "num_attention_heads": 6, "num_key_value_heads": 3}
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**SIZES | odd, head_dim=48, tie_word_embeddings=True, attention_bias=True)
        )
    else:
        folder = model_folder(family)
        return load_model(folder, load_model_config(folder))
    model.set_attn_implementation("paceline")
    return model.eval().requires_grad_(False)


def runner_of(model: PreTrainedModel, arithmetic: str, patch: pytest.MonkeyPatch) -> ModelRunner:
    """The model run by whole steps in one arithmetic, or a skip where this machine does not have it."""
    kind, weights = arithmetic.split()
    if kind == "tiles" and not has_tiles():
        pytest.skip("this machine has no AMX")
    patch.setattr(whole_step, "_LARGE", 0)
    patch.setattr(whole_step, "has_tiles", lambda: kind == "tiles" and has_tiles())
    if weights == "bfloat16":
        rounded(model)
    made = ModelRunner(model, "v", num_blocks=64, block_size=8, int8_weights=weights == "int8")
    assert made.path == f"whole step, {arithmetic}"
    return made


def tree_of(first: int, num: int) -> Tree:
    """A chain of known tokens."""
    return Tree.build(int(IDS[first]), IDS[first + 1 : first + num].tolist(), list(range(-1, num - 2)))


def rows(runner: ModelRunner, start: int, num: int) -> Tensor:
    """Logits of so many consecutive tokens."""
    builder = BatchBuilder(runner.cache)
    builder.add_tree(TABLE, tree_of(start, num), start)
    return runner.forward(builder.build()[0])


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "odd"])
def test_logits_and_kv_are_the_plain_ones(
    family: str, arithmetic: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in chunks and a tree; windows, norms of queries, biases, tied weights, and sizes that fill no tile."""
    model = make_model(family, model_folder)
    weights = arithmetic.split()[1]
    plain = ModelRunner(
        rounded(make_model(family, model_folder))
        if weights == "bfloat16"
        else make_model(family, model_folder),
        "v",
        num_blocks=64,
        block_size=8,
        lean=False,
        int8_weights=weights == "int8",
    )
    fast = runner_of(model, arithmetic, monkeypatch)
    found = []
    for runner in (fast, plain):
        chunk, tree = BatchBuilder(runner.cache), BatchBuilder(runner.cache)
        chunk.add_chunk(TABLE, IDS[:33], 0, keep_last=True, also=range(5, 7))
        parents = [-1, 0, 1, -1, 3, 0]
        tree.add_tree(TABLE, Tree.build(int(IDS[33]), IDS[34:40].tolist(), parents), 33)
        logits = torch.cat([runner.forward(builder.build()[0]) for builder in (chunk, tree)])
        found.append((logits, torch.from_numpy(runner.cache.array[:, :, :, :40].copy())))

    (ours, our_kv), (theirs, their_kv) = found
    tolerance = 3e-5
    assert ours.shape == (10, 211)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))
    torch.testing.assert_close(our_kv, their_kv, rtol=0, atol=tolerance * float(their_kv.abs().max()))


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_the_bits_of_a_row_depend_on_the_row_alone(
    arithmetic: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in company of any number, in a chunk, as the side branch of a tree, and by two threads."""
    runner = runner_of(make_model("odd", model_folder), arithmetic, monkeypatch)
    whole = rows(runner, 0, 100)
    for num in [*range(1, 20), 31, 32, 33, 47]:
        start = (num * 5) % (100 - num)
        assert torch.equal(rows(runner, start, num), whole[start : start + num]), num
    chunk, tree = BatchBuilder(runner.cache), BatchBuilder(runner.cache)
    chunk.add_chunk(TABLE, IDS[:97], 0, keep_last=True)
    assert torch.equal(runner.forward(chunk.build()[0])[0], whole[96])
    right = IDS[97:99].tolist()
    tree.add_tree(TABLE, Tree.build(int(IDS[96]), [5, right[0], 6, 7, right[1]], [-1, -1, 0, 1, 1]), 96)
    assert torch.equal(runner.forward(tree.build()[0])[[0, 2, 5]], whole[96:99])
    torch.set_num_threads(3)
    try:
        for _ in range(20):
            assert torch.equal(rows(runner, 0, 100), whole)
            assert torch.equal(rows(runner, 40, 1), whole[40:41])
    finally:
        torch.set_num_threads(1)


def test_a_step_waits_for_no_thread_that_does_not_come(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    """Helpers that sleep for ever, and helpers that come when all is done, which must not write any more."""
    runner = runner_of(make_model("llama", model_folder), "vectors float32", monkeypatch)
    expected = rows(runner, 0, 9)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(whole_step._helpers, "ask", lambda num, shared: asked.extend([shared] * num))
    first = rows(runner, 0, 9)
    before = runner.cache.array.copy()
    second = rows(runner, 0, 9)
    for shared in asked:
        whole_step.step(*shared)

    assert len(asked) == 2
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert np.array_equal(runner.cache.array, before)


def test_layers_are_reported_once_their_keys_are_in_the_pool(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What prefill sends from."""
    runner = runner_of(make_model("llama", model_folder), "vectors float32", monkeypatch)
    builder = BatchBuilder(runner.cache)
    builder.add_chunk(TABLE, IDS[:21], 0, keep_last=True)
    expected = runner.forward(builder.build()[0])
    keys = runner.cache.array[:, :, :, :21].copy()
    runner.cache.array[:] = 0
    seen: list[int] = []

    def look(layer: int) -> None:
        seen.append(layer)
        assert np.array_equal(runner.cache.array[: layer + 1, :, :, :21], keys[: layer + 1])
        assert not runner.cache.array[layer + 1 :].any()

    logits = runner.forward(builder.build(look)[0])

    assert seen == [0, 1, 2]
    assert torch.equal(logits, expected)


def test_rows_without_logits_and_a_row_with_nan(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that keeps nothing gives [0, V]; NaN in one stream's KV stays in that stream, in every arithmetic."""
    for arithmetic in ARITHMETIC:
        with monkeypatch.context() as patch:
            if arithmetic.startswith("tiles") and not has_tiles():
                continue
            runner = runner_of(make_model("llama", model_folder), arithmetic, patch)
            for table in ([0, 1], [2, 3]):
                builder = BatchBuilder(runner.cache)
                builder.add_chunk(table, IDS[:9], 0, keep_last=False)
                assert runner.forward(builder.build()[0]).shape == (0, 211)

            def both(runner: ModelRunner = runner) -> Tensor:
                builder = BatchBuilder(runner.cache)
                for table in ([0, 1], [2, 3]):
                    builder.add_token(table, 7, 9)
                return runner.forward(builder.build()[0])

            clean = both()
            runner.cache.array[0, 0, 0, 3] = np.nan
            spoiled = both()

            assert spoiled[0].isnan().all(), arithmetic
            assert torch.equal(spoiled[1], clean[1]) and not clean.isnan().any()


def test_a_step_that_is_wrong_is_not_taken(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison at load has teeth: an error or NaN leaves the lean path, which says so."""
    plain = WholeStepDecoder.forward
    for wrong in (1.001, float("nan")):
        with monkeypatch.context() as patch:
            patch.setattr(WholeStepDecoder, "forward", lambda *a, wrong=wrong: wrong * plain(*a))
            runner, _ = load_runner(model_folder("llama"), kv_memory_mb=2, block_size=8)

        assert runner.path.startswith("lean, whole step not: logits differ by ")


def test_a_model_it_cannot_run_says_why() -> None:
    """Heads that fill no vector: the lean path runs."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, head_dim=24))
    model.set_attn_implementation("paceline")
    runner = ModelRunner(model.eval().requires_grad_(False), "v", num_blocks=8, block_size=8)

    assert runner.path == "lean, whole step not: head_dim 24, no multiple of 16"


def test_int8_weights_are_another_model() -> None:
    """Each output has its own step, half of which is the largest error; the version and the logits differ."""
    folder = bundled("bundled/draft")
    lossy, _ = load_runner(folder, kv_memory_mb=2, block_size=8, int8_weights=True)
    exact, _ = load_runner(folder, kv_memory_mb=2, block_size=8)
    difference = (rows(lossy, 0, 30) - rows(exact, 0, 30)).abs().max()

    assert exact.path == "whole step, vectors bfloat16" and lossy.path == "whole step, vectors int8"
    assert exact.version == weights_version(folder) != lossy.version
    assert 1e-3 < float(difference) < 2.0
    linear = nn.Linear(20, 3)
    before = linear.weight.detach().clone()
    before[1] = 0
    linear.weight.data[1] = 0
    round_to_int8(nn.Sequential(linear))
    steps = before.abs().amax(1) / 127
    assert ((linear.weight - before).abs() <= steps[:, None] * 0.5001).all()
    assert len(linear.weight[0].div(steps[0]).round().unique()) > 10


def test_packed_weights_are_as_small_as_their_values_allow() -> None:
    """Half of float32 where nothing is lost by it."""
    folder = bundled("bundled/draft")
    model = load_model(folder, load_model_config(folder))
    tables = rotations(model, 64)
    half = WholeStepDecoder(model, tables)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1e-4, requires_grad=False)
    whole = WholeStepDecoder(model, tables)

    assert (half.weights, whole.weights) == ("bfloat16", "float32")
    assert 1.9 < whole.weight_bytes / half.weight_bytes < 2.1


def test_batches_of_many_streams_are_each_streams_own(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seventeen streams of different lengths: one more than a tile has rows."""
    for arithmetic in ("vectors bfloat16", "tiles bfloat16"):
        if arithmetic.startswith("tiles") and not has_tiles():
            continue
        with monkeypatch.context() as patch:
            runner = runner_of(make_model("odd", model_folder), arithmetic, patch)
            lengths = [1 + 2 * i % 13 for i in range(17)]
            tables = [[3 * i, 3 * i + 1] for i in range(17)]

            def batch(
                chosen: list[int], runner: ModelRunner = runner, lengths: list[int] = lengths
            ) -> PackedBatch:
                builder = BatchBuilder(runner.cache)
                for i in chosen:
                    builder.add_token([3 * i, 3 * i + 1], int(IDS[i]), lengths[i])
                return builder.build()[0]

            for table, length in zip(tables, lengths, strict=True):
                builder = BatchBuilder(runner.cache)
                builder.add_chunk(table, IDS[:length], 0, keep_last=False)
                runner.forward(builder.build()[0])
            together = runner.forward(batch(list(range(17))))
            alone = torch.cat([runner.forward(batch([i])) for i in range(17)])

            assert torch.equal(together, alone)
