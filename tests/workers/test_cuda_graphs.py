"""Steps through buffers that never move -> the logits and tokens of the plain forward, whatever fits where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel

import harness as h
from paceline.cluster.speculation import Tree
from paceline.kernels.attention_pieces import Cut
from paceline.workers.cuda_graphs import BUCKETS, StepShape, windows_of
from paceline.workers.drafters.base import Drafter
from paceline.workers.engine import Engine
from paceline.workers.model_batch import BatchBuilder, PackedBatch
from paceline.workers.model_runner import ModelRunner

TOLERANCE = 2e-5
BLOCK = 4


def llama(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return finished(AutoModelForCausalLM.from_config(config, attn_implementation="paceline"))


def gemma() -> PreTrainedModel:
    """Windows of 8 in some layers, none in others."""
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attn_implementation="paceline",
    )
    return finished(AutoModelForCausalLM.from_config(config))


def finished(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("paceline")
    return model.eval().requires_grad_(False)


def runner(model: PreTrainedModel, graphs: str = "off") -> ModelRunner:
    return ModelRunner(
        model,
        "v",
        num_blocks=64,
        block_size=BLOCK,
        lean=False,
        graphs=graphs,
        max_streams=6,  # type: ignore[arg-type]
    )


def steps(ours: ModelRunner) -> list[PackedBatch]:
    """Chunks, plain tokens and trees of five streams, two of them behind a common prefix, in batches of all sizes."""
    ids = (np.arange(400) * 31 % 96 + 1).astype(np.int32)
    tables = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 8, 9, 10], [20, 22, 21], [40], [50, 33, 34, 35]]
    wide = Tree.build(5, [6, 7, 8, 9, 11, 12], [-1, 0, -1, 1, 3, 4])

    def batch(*parts: Callable[[BatchBuilder], None]) -> PackedBatch:
        builder = BatchBuilder(ours.cache)
        for part in parts:
            part(builder)
        return builder.build()[0]

    def chunk(stream: int, start: int, num: int) -> Callable[[BatchBuilder], None]:
        return lambda builder: builder.add_chunk(
            tables[stream], ids[stream * 50 + start :][:num], start, keep_last=True
        )

    def tree(stream: int, start: int) -> Callable[[BatchBuilder], None]:
        return lambda builder: builder.add_tree(tables[stream], wide, start)

    def token(stream: int, at: int) -> Callable[[BatchBuilder], None]:
        return lambda builder: builder.add_token(tables[stream], int(ids[at]), at)

    return [
        batch(chunk(0, 0, 13)),
        batch(chunk(1, 12, 2), chunk(2, 0, 3)),
        batch(chunk(4, 0, 9), tree(0, 13)),
        batch(token(3, 0)),
        batch(tree(0, 13), tree(1, 14), token(2, 3), tree(4, 9), token(3, 1)),
        batch(token(2, 4)),
        batch(tree(0, 16)),
    ]


@pytest.mark.parametrize("family", [llama, gemma])
def test_buffers_give_the_logits_of_the_plain_forward(family: Callable[[], PreTrainedModel]) -> None:
    """Step after step: nothing of an earlier, larger step is left over, and the pool stays the same."""
    model = family()
    plain, static = runner(family()), runner(model, "eager")  # a plain runner repacks the model it is given
    for plain_batch, batch in zip(steps(plain), steps(static), strict=True):
        expected, found = plain.forward(plain_batch), static.forward(batch)

        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) < TOLERANCE * float(expected.abs().max())
    assert static._graphed is not None and static._graphed.num_too_large == 0
    assert sorted(static._graphed._steps) == [1, 8, 16, 24]
    used = static.cache._pool[:, :, :, : static.cache.scratch_slot]
    torch.testing.assert_close(used, plain.cache._pool, rtol=1e-4, atol=1e-5)
    assert windows_of(model) == ({None} if family is llama else {None, 8})


def test_a_left_over_of_the_step_before_would_be_noticed() -> None:
    """Negative control: a small step in the buffers of a large one is right, and with another's table it is not."""
    plain, static = runner(llama()), runner(llama(), "eager")
    large, small = steps(static)[4], steps(static)[5]
    for batch in steps(plain)[:5]:
        plain.forward(batch)
        static.forward(batch)
    expected = plain.forward(small)
    assert static._graphed is not None
    step = static._graphed._steps[24]
    step.load(small)
    right = step.run()[:1]
    with torch.inference_mode():
        step._pieces[None].pieces.segment_start.zero_()  # nothing reads this here
        harmless = step.run()[:1]
        step._pieces[None].pieces.tables.zero_()
        wrong = step.run()[:1]

    assert large.slots.size > small.slots.size
    assert float((right - expected).abs().max()) < TOLERANCE * float(expected.abs().max())
    assert torch.equal(harmless, right)
    assert float((wrong - expected).abs().max()) > 100 * TOLERANCE


class EveryTree(Drafter):
    """Drafts that are sometimes right: the stream's own last tokens again, in two branches."""

    name = "every-tree"

    def propose(self, streams):  # type: ignore[no-untyped-def]
        trees = []
        for stream in streams:
            tail = stream.token_ids[-4:].tolist()
            trees.append(Tree.build(tail[-1], [*tail[:3], *tail[1:3]], [-1, 0, 1, -1, 3]))
        return trees


def test_an_engine_says_the_same_with_buffers_and_without() -> None:
    """Chunked prompts, drafts that are accepted and refused, more streams than fit: the same tokens."""
    requests = [h.request(str(i), tuple(range(3 + i, 3 + i + 17 * (i + 1) % 40 + 5)), 12) for i in range(5)]
    texts = []
    for graphs in ("off", "eager"):
        ours = runner(llama(), graphs)
        engine = Engine(ours, token_budget=24, max_streams=5, drafter=EveryTree())
        texts.append(engine.run(requests))
        if ours._graphed is not None:
            assert ours._graphed.num_too_large == 0 and len(ours._graphed._steps) >= 3

    assert texts[0] == texts[1]


def test_what_does_not_fit_runs_without_buffers() -> None:
    """More rows than the largest bucket, more streams than there is room for, or somebody looking into the step."""
    ours = runner(llama(), "eager")
    graphed = ours._graphed
    assert graphed is not None
    batch = steps(ours)[0]
    assert graphed.takes(batch)
    graphed.buckets = (4,)
    assert not graphed.takes(batch)
    graphed.buckets = BUCKETS
    graphed.max_streams = 0
    assert not graphed.takes(batch)
    graphed.max_streams = 6
    batch.on_layer = lambda layer: None
    assert not graphed.takes(batch)
    batch.on_layer = None
    graphed.cut = Cut(rows_per_tile=4, block_keys=16, num_programs=1, split=16)
    graphed.max_context = 4  # tables of one block
    expected = runner(llama()).forward(steps(ours)[0])

    assert torch.allclose(ours.forward(batch), expected, atol=1e-5)
    assert graphed.num_too_large == 1


@pytest.mark.parametrize("split", [None, 16, 512])
@pytest.mark.parametrize("rows", BUCKETS)
def test_a_bucket_has_room_for_the_worst_step_of_its_size(rows: int, split: int | None) -> None:
    """All rows of one tree, or each a stream of its own with the longest context."""
    from paceline.kernels.attention_pieces import plan_pieces
    from paceline.workers.kv_cache import KVCache

    size, blocks = 16, 16
    cache = KVCache(
        num_layers=1, num_kv_heads=1, head_dim=2, num_blocks=rows * blocks, block_size=size, model_version=""
    )
    shape = StepShape(rows, rows, blocks, size)
    cut = Cut(rows_per_tile=16, block_keys=16, num_programs=11, split=split, min_shared=16)
    alone, together = BatchBuilder(cache), BatchBuilder(cache)
    parents = [-1 if i % 3 == 0 else i - 1 for i in range(rows - 1)]
    start = min(100, size * blocks - rows)
    together.add_tree(list(range(blocks)), Tree.build(1, [2] * (rows - 1), parents), start)
    for stream in range(rows):
        shared = list(range(blocks // 2))
        own = list(range(stream * blocks, (stream + 1) * blocks))[blocks // 2 :]
        alone.add_token(shared + own if stream % 2 else own + shared, 1, size * blocks - 1)
    for builder in (alone, together):
        for window in (None, 20):
            arrays = plan_pieces(builder.build()[0].attention, cut, window=window)
            for name, room in shape.arrays(cut).items():
                assert all(have >= want for have, want in zip(room, arrays[name].shape, strict=True)), name


def test_every_bucket_can_be_made_before_the_first_request() -> None:
    """Those that fit into context and pool; the steps behind it are what they are."""
    ours = runner(llama(), "eager")
    assert ours._graphed is not None
    ours._graphed.capture_all()
    assert sorted(ours._graphed._steps) == list(BUCKETS)

    expected = runner(llama()).forward(steps(ours)[0])
    assert torch.allclose(ours.forward(steps(ours)[0]), expected, atol=1e-5)


def test_two_models_change_places_under_their_buffers() -> None:
    """The same memory, other numbers: each computes what the other did, and the other way round."""
    model = llama(0)
    ours, theirs = runner(model, "eager"), runner(llama(1), "eager")
    assert ours._graphed is not None and theirs._graphed is not None
    places = [tensor.data_ptr() for tensor in model.parameters()]
    before, expected = ([one.forward(batch) for batch in steps(one)[:3]] for one in (ours, theirs))
    ours._graphed.exchange(theirs._graphed)
    after, other = ([one.forward(batch) for batch in steps(one)[:3]] for one in (ours, theirs))

    assert [tensor.data_ptr() for tensor in model.parameters()] == places
    for old, new, wanted, kept in zip(before, after, expected, other, strict=True):
        assert torch.allclose(new, wanted, atol=1e-5) and torch.allclose(kept, old, atol=1e-5)
        assert not torch.allclose(new, old, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_equal_eager_and_never_wait_for_the_device(tmp_path: Path) -> None:
    """Replays give the eager twin's logits bit for bit, also after a swap; only reading the logits synchronises."""
    model = llama(0).to("cuda", torch.bfloat16)
    eager, graphs = runner(model, "eager"), runner(model, "cuda")
    assert graphs._graphed is not None and all(step._graph for step in graphs._graphed._steps.values())
    for eager_batch, batch in zip(steps(eager), steps(graphs), strict=True):
        assert torch.equal(eager.forward(eager_batch), graphs.forward(batch))
    batch = steps(graphs)[5]
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = graphs._graphed.forward(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits is not None and bool(logits.isfinite().all())
    other = runner(llama(1).to("cuda", torch.bfloat16), "eager")
    assert other._graphed is not None
    expected = other.forward(steps(other)[0])
    graphs._graphed.exchange(other._graphed)
    assert torch.equal(expected, graphs.forward(steps(graphs)[0]))
