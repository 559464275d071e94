"""The loop for a few rows of a small draft model: the lean path's logits and KV, and when it is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.cluster.config import model_folder as bundled
from paceline.cluster.speculation import Tree
from paceline.workers.few_rows import MAX_ROWS, FewRowsDecoder
from paceline.workers.model_batch import BatchBuilder, PackedBatch
from paceline.workers.model_runner import ModelRunner, load_runner

IDS = np.random.default_rng(5).integers(5, 4000, 70).astype(np.int32)


@pytest.fixture(scope="module")
def pair() -> tuple[ModelRunner, ModelRunner]:
    """The bundled draft with the loop, and its plain twin."""
    folder = bundled("bundled/draft")
    loop, _ = load_runner(folder, kv_memory_mb=2, block_size=8, few_rows=True)
    lean, _ = load_runner(folder, kv_memory_mb=2, block_size=8)
    assert (loop.path, lean.path) == ("lean, few rows", "lean")
    return loop, lean


@pytest.mark.parametrize("num_streams", range(1, MAX_ROWS + 1))
def test_the_loop_gives_the_lean_logits_and_kv(
    pair: tuple[ModelRunner, ModelRunner], num_streams: int
) -> None:
    """Streams of different lengths in one batch, and the KV that the next step reads."""
    logits: list[list[torch.Tensor]] = []
    for runner in pair:
        found = []
        tables = [list(range(10 * i, 10 * i + 10)) for i in range(num_streams)]
        for index, table in enumerate(tables):
            chunk = BatchBuilder(runner.cache)
            chunk.add_chunk(table, IDS[: 20 + 7 * index], 0, keep_last=False)
            runner.forward(chunk.build()[0])
        for step in range(3):
            tokens = BatchBuilder(runner.cache)
            for index, table in enumerate(tables):
                tokens.add_token(table, int(IDS[-1 - step]), 20 + 7 * index + step)
            batch = tokens.build()[0]
            assert FewRowsDecoder.takes(batch)
            found.append(runner.forward(batch))
        logits.append(found)

    for ours, theirs in zip(*logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))


def test_a_short_chunk_is_causal(pair: tuple[ModelRunner, ModelRunner]) -> None:
    """Rows of one stream see each other only backwards, and only the wanted logits are computed."""
    outs = []
    for runner in pair:
        builder = BatchBuilder(runner.cache)
        builder.add_chunk([3, 1], IDS[:5], 0, keep_last=True, also=range(1, 3))
        outs.append(runner.forward(builder.build()[0]))

    assert outs[0].shape == (3, pair[0].vocab_size)
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=2e-5 * float(outs[1].abs().max()))


def batch(runner: ModelRunner, kind: str) -> PackedBatch:
    """A batch for which there is another path."""
    builder = BatchBuilder(runner.cache)
    if kind == "tree":
        builder.add_tree([0, 1], Tree.build(5, [6, 7, 8], [-1, -1, 0]), 0)
    else:
        builder.add_chunk([0, 1], IDS[: MAX_ROWS + 1], 0, keep_last=True)
    return builder.build((lambda layer: None) if kind == "hook" else None)[0]


@pytest.mark.parametrize("kind", ["tree", "many", "hook"])
def test_other_batches_are_left_to_the_lean_path(pair: tuple[ModelRunner, ModelRunner], kind: str) -> None:
    """Trees, more rows, and steps that report their layers: bit for bit what the twin computes."""
    loop, lean = pair
    assert not FewRowsDecoder.takes(batch(loop, kind))
    assert torch.equal(loop.forward(batch(loop, kind)), lean.forward(batch(lean, kind)))


@pytest.mark.parametrize(
    ("family", "reason"),
    [("llama", "not bfloat16"), ("mistral", "sliding"), ("qwen3", "norms")],
)
def test_a_model_it_cannot_run_says_why(
    model_folder: Callable[[str], Path], tmp_path: Path, family: str, reason: str
) -> None:
    """The worker's log and its gauge carry this path."""
    folder = model_folder(family)
    runner, _ = load_runner(folder, kv_memory_mb=2, block_size=8, few_rows=True)

    assert runner.path.startswith("lean, few rows not: ") and reason in runner.path


def test_weights_in_bfloat16_are_enough(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """What keeps a random model out is the precision of its weights alone."""
    source = model_folder("llama")
    weights = load_file(source / "model.safetensors")
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(rounded, tmp_path / "model.safetensors", {"format": "pt"})

    runner, _ = load_runner(tmp_path, kv_memory_mb=2, block_size=8, few_rows=True)

    assert runner.path == "lean, few rows"


def test_a_loop_that_is_wrong_is_not_taken(
    pair: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison at load has teeth."""
    plain = FewRowsDecoder.forward
    monkeypatch.setattr(FewRowsDecoder, "forward", lambda *a: 1.01 * plain(*a))
    runner, _ = load_runner(bundled("bundled/draft"), kv_memory_mb=2, block_size=8, few_rows=True)

    assert runner.path.startswith("lean, few rows not: logits differ by ")
