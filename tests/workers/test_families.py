"""Eight families through the packed pool against the plain Hugging Face forward: prompts, chunks, batches, trees."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, PreTrainedModel

from paceline.cluster.speculation import Tree
from paceline.workers.layers import can_pack
from paceline.workers.model_batch import BatchBuilder
from paceline.workers.model_runner import ModelRunner

RunnerFactory = Callable[..., ModelRunner]
OracleFactory = Callable[[str], PreTrainedModel]

FAMILIES = ["llama", "qwen3", "mistral", "gemma3", "gemma2", "mixtral", "phi3", "gpt_oss"]
LEAN = ["llama", "qwen3", "mistral"]
ATOL = 1e-4
"""Logits are up to about 5; sums in another order differ by a few 1e-6."""
IDS = np.random.default_rng(7).integers(3, 211, 64).astype(np.int32)
OTHERS = np.random.default_rng(8).integers(3, 211, (3, 64)).astype(np.int32)
TABLE = list(range(16))
"""Blocks of 4 tokens for the longest stream; windows of 8 and 11 tokens are far shorter than it."""
TREE = (
    [11, 12, 13, 14, 15, 16, 17, 18],
    [-1, 0, 1, -1, 3, 3, 0, 6],
)
"""Tokens and parents: a spine of three, a sibling subtree with two leaves, and a branch off the spine."""


def plain(model: PreTrainedModel, ids: npt.ArrayLike) -> torch.Tensor:
    """Logits [n, V] of the whole sequence at once, eager attention, no cache."""
    with torch.inference_mode():
        tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits[0]
    return logits


def chain(runner: ModelRunner, table: list[int], ids: npt.NDArray[np.int32], start: int) -> torch.Tensor:
    """Logits of all tokens from position `start` on: a tree without branches keeps every row."""
    builder = BatchBuilder(runner.cache)
    builder.add_tree(table, Tree.build(int(ids[0]), ids[1:].tolist(), range(-1, len(ids) - 2)), start)
    return runner.forward(builder.build()[0])


def same(family: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Bit for bit where rows are independent of their batch, else within rounding."""
    if family in LEAN and can_pack():
        assert torch.equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=0, atol=ATOL)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_prompt_has_the_plain_logits(
    make_runner: RunnerFactory, oracle_model: OracleFactory, family: str
) -> None:
    """Every position, as a chunk that keeps its last row and as rows that are all kept."""
    runner = make_runner(family)
    wanted = plain(oracle_model(family), IDS)
    builder = BatchBuilder(runner.cache)
    builder.add_chunk(TABLE, IDS, 0, keep_last=True)

    assert runner.path.startswith("whole step, ") == (family in LEAN)
    torch.testing.assert_close(runner.forward(builder.build()[0])[0], wanted[-1], rtol=0, atol=ATOL)
    torch.testing.assert_close(chain(runner, TABLE, IDS, 0), wanted, rtol=0, atol=ATOL)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", [[0, 1, 4, 11, 12, 29, 64], [0, 7, 14, 21, 63, 64], [0, 33, 64]])
def test_chunks_of_odd_sizes_have_the_plain_logits(
    make_runner: RunnerFactory, oracle_model: OracleFactory, family: str, cuts: list[int]
) -> None:
    """Chunks that cross blocks and windows anywhere; the last one alone keeps a row, as in prefill."""
    runner = make_runner(family)
    wanted = plain(oracle_model(family), IDS)[-1:]
    for start, stop in pairwise(cuts):
        builder = BatchBuilder(runner.cache)
        builder.add_chunk(TABLE, IDS[start:stop], start, keep_last=stop == len(IDS))
        found = runner.forward(builder.build()[0])

    assert len(found) == 1
    torch.testing.assert_close(found, wanted, rtol=0, atol=ATOL)


def packed_streams(runner: ModelRunner, model: PreTrainedModel | None) -> list[torch.Tensor]:
    """Four streams of other lengths, each with its context in the pool: in one batch, a chunk, a tree, two decodes.

    With a model: what each of them should give.
    """
    lengths = [(IDS, 40, 64), (OTHERS[0], 0, 9), (OTHERS[1], 30, 31), (OTHERS[2], 13, 22)]
    if model is not None:
        return [plain(model, ids[:stop])[start:] for ids, start, stop in lengths]
    builder = BatchBuilder(runner.cache)
    for index, (ids, start, stop) in enumerate(lengths):
        table = list(range(index * 16, index * 16 + 16))[
            :: -1 if index % 2 else 1
        ]  # never the order of the pool
        if start:
            chain(runner, table, ids[:start], 0)
        spine = range(-1, stop - start - 2)
        builder.add_tree(table, Tree.build(int(ids[start]), ids[start + 1 : stop].tolist(), spine), start)
    return list(runner.forward(builder.build()[0]).split([stop - start for _, start, stop in lengths]))


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_packed_together_have_the_logits_of_each_alone(
    make_runner: RunnerFactory, oracle_model: OracleFactory, family: str
) -> None:
    """No stream sees another, whatever their lengths, tables and positions."""
    found = packed_streams(make_runner(family), None)

    for mine, wanted in zip(found, packed_streams(make_runner(family), oracle_model(family)), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=ATOL)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", [0, 5, 40])
def test_every_path_of_a_tree_has_the_logits_of_its_text(
    make_runner: RunnerFactory, oracle_model: OracleFactory, family: str, start: int
) -> None:
    """Each root-to-node path, run plainly as a text of its own; the window reaches into the tree and behind it."""
    runner, model = make_runner(family), oracle_model(family)
    if start:
        chain(runner, TABLE, IDS[:start], 0)
    tree = Tree.build(int(IDS[start]), *TREE)
    builder = BatchBuilder(runner.cache)
    builder.add_tree(TABLE, tree, start)
    found = runner.forward(builder.build()[0])

    for node in range(len(tree)):
        path = [node]
        while path[0]:
            path.insert(0, int(tree.parents[path[0]]))
        text = [*IDS[:start], *(int(tree.tokens[i]) for i in path)]
        torch.testing.assert_close(found[node], plain(model, text)[-1], rtol=0, atol=ATOL)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_streams_logits_do_not_depend_on_the_batch(make_runner: RunnerFactory, family: str) -> None:
    """Alone, among others, in chunks and token by token: lean families keep every bit, which is what P1 rests on."""
    runner = make_runner(family)
    packed = packed_streams(runner, None)[0]
    alone = torch.cat([chain(runner, TABLE, IDS[:40], 0), chain(runner, TABLE, IDS[40:], 40)])
    whole = chain(runner, TABLE, IDS, 0)
    single = torch.cat([chain(runner, TABLE, IDS[at : at + 1], at) for at in range(len(IDS))])

    same(family, alone, whole)
    same(family, packed, whole[40:])
    same(family, single, whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_windows_of_these_models_matter(oracle_model: OracleFactory, family: str) -> None:
    """Negative control: with a sliding window the first token is forgotten, without one it is not."""
    model = oracle_model(family)
    changed = IDS.copy()
    changed[0] = (changed[0] + 1) % 211
    differs = not torch.equal(plain(model, IDS)[-1], plain(model, changed)[-1])

    assert differs == (family not in ("mistral", "phi3"))  # the others have layers without a window, or none


def test_the_gemma_models_have_what_makes_the_family_special(oracle_model: OracleFactory) -> None:
    """Local and global layers, a rope of its own for each kind, caps on scores and on logits."""
    three, two = oracle_model("gemma3").config, oracle_model("gemma2").config

    assert isinstance(three, Gemma3TextConfig) and isinstance(two, Gemma2Config)
    assert set(three.layer_types) == {"sliding_attention", "full_attention"} == set(two.layer_types)
    ropes = three.rope_parameters
    assert ropes["sliding_attention"]["rope_theta"] != ropes["full_attention"]["rope_theta"]
    assert two.attn_logit_softcapping and two.final_logit_softcapping
