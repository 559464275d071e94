"""Steps that are decided and committed where their logits are -> the texts of the plain path; drafts from one loop alike.

On a CPU all of it runs through the kernels' plain twins; where there is a GPU, the last tests run the captured steps there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel

from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_DRAFT, DraftOpen, DraftTree, Request, Sampling
from paceline.workers.device_step import DeviceRows, Pending, children_of, verify_step, warm_up
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.drafters.base import Drafter
from paceline.workers.engine import Engine, StepResult
from paceline.workers.fused_sampling import Walk
from paceline.workers.kv_cache import KVCache
from paceline.workers.model_runner import ModelRunner, placed
from paceline.workers.sampling import Sample, SamplingRows, choose, perturb
from paceline.workers.verifiers.match import match

VOCAB, LENGTH = 97, 14
SAMPLINGS = {
    "greedy": Sampling(1, 0.0),
    "sampled": Sampling(2**64 - 2, 1.0),
    "filtered": Sampling(3, 0.8, 20, 0.9, 0.02, choice=2, prompt_index=1),
    "adjusted": Sampling(4, 0.7, repetition_penalty=1.2, presence_penalty=0.4, logit_bias=((5, 2.0),)),
}
REQUESTS = [
    Request(name, tuple(range(3 + at, 9 + 4 * at)), sampling, LENGTH, **how)  # type: ignore[arg-type]
    for at, (name, sampling) in enumerate(SAMPLINGS.items())
    for how in ({"logprobs": 2, "prompt_logprobs": 1} if name == "sampled" else {},)
]


def model_of(family: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    config: Any = LlamaConfig(**sizes)
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**sizes, head_dim=8, sliding_window=6, layer_types=kinds)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="paceline")
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


def runner(family: str = "llama", graphs: str = "eager", seed: int = 0, device: str = "cpu") -> ModelRunner:
    model = model_of(family, seed).to(device)
    return ModelRunner(
        model,
        f"{family}{seed}",
        num_blocks=96,
        block_size=4,
        lean=False,
        graphs=graphs,  # type: ignore[arg-type]
        max_streams=8,
    )


class Branches(Drafter):
    """Knows the text; a wrong sibling comes before the right node, so that accepted KV has to be moved."""

    name = "branches"

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self._texts = texts

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        return [self._tree(stream) for stream in streams]

    def _tree(self, stream: Stream) -> Tree | None:
        future = self._texts[stream.request.id][stream.num_output :][:3]
        if len(future) < 3:
            return None
        wrong = [(token + 1) % VOCAB for token in future]
        third = future[2] if stream.num_output % 2 else wrong[2]
        tokens = [wrong[0], future[0], wrong[1], future[1], third]
        return Tree.build(int(stream.token_ids[-1]), tokens, [-1, -1, 1, 1, 3])


def texts_of(
    ours: ModelRunner, drafter: Drafter | None = None
) -> tuple[dict[str, list[int]], list[Any], int]:
    """Texts, log-probabilities, and how many draft tokens were accepted."""
    engine = Engine(ours, token_budget=16, max_streams=4, drafter=drafter)
    texts: dict[str, list[int]] = {request.id: [] for request in REQUESTS}
    told, num = [], 0
    for request in REQUESTS:
        engine.add(request)
    while len(engine.scheduler):
        for emission in engine.step().emissions:
            assert emission.finish != "error", emission.error
            texts[emission.stream.request.id].extend(emission.tokens)
            num += emission.sources.count(SOURCE_DRAFT)
            told += [found.own for found in (emission.prompt_logprobs, emission.logprobs) if found]
    return texts, told, num


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_is_decided_on_the_device_is_what_the_host_decides(family: str) -> None:
    """Greedy, sampled, filtered and penalised streams together; trees whose accepted KV moves; log-probabilities too."""
    plain, ours = runner(family, "off"), runner(family)
    texts, _, _ = texts_of(plain)
    moves: list[int] = []
    commit = ours.cache.commit

    def counted(tables: torch.Tensor, starts: torch.Tensor, paths: torch.Tensor, **how: Any) -> None:
        moves.append(int((paths >= 0).sum()))
        commit(tables, starts, paths, **how)

    ours.cache.commit = counted  # type: ignore[method-assign]
    ours.cache.move = None  # type: ignore[assignment, method-assign]  # the host moves nothing

    assert texts_of(ours)[0] == texts and not moves
    drafted, drafted_told, num_accepted = texts_of(ours, Branches(texts))
    assert drafted == texts and num_accepted > 20 and sum(moves) >= num_accepted
    assert all(
        np.allclose(np.frombuffer(a, "<f4"), np.frombuffer(b, "<f4"), atol=1e-4)
        for a, b in zip(drafted_told, texts_of(plain, Branches(texts))[1], strict=True)
    )


def test_kv_that_is_not_moved_changes_the_text() -> None:
    """Negative control: the commit is what makes branches right."""
    ours = runner()
    texts = texts_of(ours)[0]
    ours.cache.commit = lambda *_, **__: None  # type: ignore[method-assign]

    assert texts_of(ours, Branches(texts))[0] != texts


def test_nothing_is_waited_for_before_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be done meanwhile is done between the launch and the first look at the verdict."""
    order: list[str] = []
    decided = Pending.decided

    def looked(self: Pending) -> Any:
        order.append("looked")
        return decided(self)

    monkeypatch.setattr(Pending, "decided", looked)
    engine = Engine(runner(), token_budget=16, max_streams=4)
    engine.meanwhile = lambda: order.append("meanwhile")
    engine.add(REQUESTS[0])
    for _ in range(3):
        engine.step()

    assert [a for a, b in zip(order, [""] + order, strict=False) if a != b] == ["meanwhile", "looked"] * 3


def test_a_row_without_usable_logits_ends_its_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in the rows of one stream: the others' texts are what they are."""
    ours = runner()
    texts = texts_of(ours)[0]
    engine = Engine(ours, token_budget=64, max_streams=4)
    streams = [engine.add(request) for request in REQUESTS]
    launch = ours.launch

    def spoilt(batch: Any) -> torch.Tensor:
        logits = launch(batch).clone()
        logits[-1] = torch.nan  # the last stream's
        return logits

    monkeypatch.setattr(ours, "launch", spoilt)
    result: StepResult = engine.step()

    ends = {e.stream.request.id: e.finish for e in result.emissions}
    assert ends[streams[-1].request.id] == "error"
    others = [e for e in result.emissions if e.finish != "error"]
    assert len(others) == 3 and all(list(e.tokens) == texts[e.stream.request.id][:1] for e in others)


def rows_and_trees() -> tuple[torch.Tensor, Sample]:
    draw = torch.Generator().manual_seed(0)
    trees = [
        Tree.build(1, [5, 6, 7], [-1, -1, 1]),
        Tree.root_only(2),
        Tree.build(3, [8, 9, 10], [-1, -1, 1]),
    ]
    num = sum(map(len, trees))
    logits = torch.randn(num, VOCAB, generator=draw) * 3
    logits[0, 6] = logits[2, 7] = logits[5, 9] = logits[7, 10] = 40.0  # the right children, behind wrong ones
    samplings = list(SAMPLINGS.values())[:3]
    params = SamplingRows.build(samplings, [len(tree) for tree in trees], np.arange(num) + 20)
    walk = Walk(trees, [[3, 4, 5], [7, 8], [9, 10, 11]], [4, 6, 5])
    return logits, Sample(None, params, [], [], walk)


def pool() -> KVCache:
    cache = KVCache(
        num_layers=2,
        num_kv_heads=1,
        head_dim=4,
        num_blocks=12,
        block_size=4,
        model_version="",
        has_scratch=True,
    )
    cache._pool.copy_(torch.arange(cache._pool.numel()).view(cache._pool.shape))
    return cache


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_paths_and_kv_are_those_of_the_host(backend: Any) -> None:
    """The verdict of `match` for each tree, and each accepted node's K and V at the slot of its position."""
    logits, sample = rows_and_trees()
    cache, wanted = pool(), pool()
    found = verify_step(logits, sample, cache, backend=backend)
    tokens, usable = choose(logits, sample.params)
    assert sample.walk is not None and found.decided is not None
    at, verdicts = 0, []
    for tree, table, start in zip(sample.walk.trees, sample.walk.tables, sample.walk.starts, strict=True):
        verdict = match(tree, tokens[at : at + len(tree)])
        at += len(tree)
        verdicts.append(verdict)
        slots = wanted.slots(list(table), start, start + len(tree))
        if verdict.path:
            wanted.move(slots[list(verdict.path)], slots[1 : 1 + len(verdict.path)])

    assert verdicts[0].path == verdicts[2].path == (2, 3)
    assert found.decided[0].tolist() == tokens.tolist() and found.decided[1].all() and usable.all()
    assert found.verdicts == verdicts
    assert torch.equal(cache._pool, wanted._pool) and not torch.equal(cache._pool, pool()._pool)


def test_all_kinds_of_steps_are_tried_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every kind, with trees that move KV, in a pool however small its blocks are."""
    moved: list[tuple[int, ...]] = []
    cache = pool()
    monkeypatch.setattr(cache, "commit", lambda _, __, paths, **___: moved.append(tuple(paths.shape)))
    warm_up(cache, VOCAB)

    assert set(moved) == {(s, d) for s in (1, 8) for d in (1, 3, 7)}


def test_rows_that_stay_on_the_device_give_what_is_asked_for() -> None:
    """Some rows, their largest logits, all of them."""
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = DeviceRows(logits)
    ids, log_probs, log_sums = rows.top([3, 1], 4)
    wanted = logits[[3, 1]].topk(4)

    assert len(rows) == 5 and rows.decided is None and rows.verdicts is None
    assert torch.equal(rows[[4, 0]].gather(), logits[[4, 0]]) and torch.equal(rows[1:3].gather(), logits[1:3])
    assert ids.tolist() == wanted.indices.tolist()
    assert np.allclose(log_probs, wanted.values - logits[[3, 1]].logsumexp(-1)[:, None], atol=1e-5)
    assert np.allclose(log_sums, logits[[3, 1]].logsumexp(-1), atol=1e-5)


# -- drafts ------------------------------------------------------------------------------------------------


def proposals(ours: ModelRunner, floor: float, *, repeats: bool) -> list[list[DraftTree]]:
    """What several rounds propose, a few tokens of the first spine committed in between."""
    engine = DraftEngine(ours, token_budget=64, prefix_cache=False, repeats=repeats)
    for at, (name, sampling) in enumerate(SAMPLINGS.items()):
        engine.open(name, DraftOpen(name, tuple(range(3, 12 + 5 * at)), sampling, 4))
    found = []
    for index in range(3):
        trees, dropped = engine.propose(list(SAMPLINGS), 5, 2, floor)
        assert not dropped
        found.append(trees)
        for tree in trees:
            engine.advance(tree.request_id, tree.base_len, tree.prefix_hash, (*tree.tokens[:index], 9))
    return found


def shown(trees: list[list[DraftTree]]) -> list[Any]:
    return [(tree.tokens, tree.parents) for part in trees for tree in part]


@pytest.mark.parametrize("family, floor", [("llama", 0.0), ("llama", 0.02), ("gemma3", 0.0)])
def test_levels_from_one_loop_make_the_same_trees(family: str, floor: float) -> None:
    """As level by level on the device, and as on the host; with windows; where streams end at different depths."""
    ours, host = runner(family), runner(family, "off")
    plain = proposals(ours, floor, repeats=False)
    assert ours._graphed is not None and not ours._graphed._loops
    quick = proposals(ours, floor, repeats=True)
    of_host = proposals(host, floor, repeats=False)

    assert shown(quick) == shown(plain) == shown(of_host)
    scores = [[s for part in found for tree in part for s in tree.scores] for found in (quick, of_host)]
    assert np.allclose(*scores, atol=1e-4)
    # The greedy stream and the sampled one: those whose draw is plain.
    assert ours._graphed._loops and all(rows <= 2 for rows, *_ in ours._graphed._loops)
    if floor:
        assert len({len(tree.tokens) for part in plain for tree in part}) > 1


def test_children_are_those_of_the_host() -> None:
    """Noise, temperature, filters; of equal scores the lower id first; a filtered token has no chance."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    logits[0, 30] = logits[0, 12] = logits[0].max() + 1
    rows = SamplingRows(list(SAMPLINGS.values()), [3, 9, 2**20, 5])
    ids, shares = children_of(logits, rows, 3, ([], []))
    scores = perturb(logits, rows)
    wanted = scores.sort(dim=-1, descending=True, stable=True)

    assert ids == wanted.indices[:, :3].tolist() and ids[0][:2] == [12, 30]
    assert np.allclose(shares, scores.softmax(-1).gather(1, wanted.indices[:, :3]), atol=1e-5)


def test_a_swap_keeps_the_graphs_and_changes_the_weights() -> None:
    """What was captured goes to the version in force, at the same addresses; back again it is as it was."""
    old, new = runner(seed=0), runner(seed=1)
    fresh = {0: proposals(runner(seed=0), 0.0, repeats=True), 1: proposals(runner(seed=1), 0.0, repeats=True)}
    assert shown(fresh[0]) != shown(fresh[1])
    captured = old._graphed
    assert captured is not None and captured.model is old._model
    places = {name: tensor.data_ptr() for name, tensor in captured.model.named_parameters()}
    engine = DraftEngine(old, token_budget=64)
    engine.attach(new)
    proposals(old, 0.0, repeats=True)
    captured.capture = True  # as if these buffers were recorded: nothing new is made below
    loops = dict(captured._loops)
    for live, other, seed in ((new, old, 1), (old, new, 0)):
        engine.switch(live, lambda *_, live=live: live)

        assert live._graphed is captured and captured.model is live._model is not other._model
        assert {name: tensor.data_ptr() for name, tensor in captured.model.named_parameters()} == places
        engine.pool.forget_all()
        assert shown(proposals(live, 0.0, repeats=True)) == shown(fresh[seed])
        assert shown(proposals(other, 0.0, repeats=False)) == shown(fresh[1 - seed])
    assert captured._loops == loops


def test_rotations_keep_their_precision_in_bfloat16() -> None:
    """Weights are rounded, frequencies are not: at a far position they would be off by whole turns."""
    model = model_of("llama")
    exact = model.model.rotary_emb.inv_freq.clone()
    rounded = copy.deepcopy(model).to(torch.bfloat16).model.rotary_emb.inv_freq.float()
    small = placed(model, torch.device("cpu"), torch.bfloat16)

    assert torch.equal(small.model.rotary_emb.inv_freq, exact) and not torch.equal(rounded, exact)
    assert small.dtype == torch.bfloat16 and small.model.embed_tokens.weight.dtype == torch.bfloat16


# -- on a GPU ----------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_captured_steps_say_what_the_cpu_says(family: str) -> None:
    """float32 on both: graphs, fused kernels and the commit on the card give the host's texts, drafted or not."""
    texts, _, _ = texts_of(runner(family, "off"))
    ours = runner(family, "cuda", device="cuda")
    assert ours.path == "transformers, cuda graphs"

    assert texts_of(ours)[0] == texts
    drafted, _, num_accepted = texts_of(ours, Branches(texts))
    assert drafted == texts and num_accepted > 20


@pytest.mark.gpu
@needs_gpu
def test_a_step_waits_for_nothing_before_the_verdict_is_looked_at() -> None:
    """From the batch to the commit of its KV: a synchronisation anywhere is an error."""
    ours = runner(graphs="cuda", device="cuda")
    engine = Engine(ours, token_budget=64, max_streams=4, drafter=Branches(texts_of(ours)[0]))
    for request in REQUESTS[::2]:
        engine.add(request)
    for _ in range(3):
        engine.step()
    forward = ours.forward

    def strictly(batch: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return forward(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    ours.forward = strictly  # type: ignore[method-assign]

    assert all(emission.finish != "error" for _ in range(3) for emission in engine.step().emissions)


@pytest.mark.gpu
@needs_gpu
def test_a_captured_loop_drafts_what_the_eager_one_drafts_and_can_be_swapped() -> None:
    """The same trees; after a swap under the graphs those of the other weights, and back again."""
    eager = {seed: proposals(runner(seed=seed, device="cuda"), 0.0, repeats=True) for seed in (0, 1)}
    old, new = runner(graphs="cuda", seed=0, device="cuda"), runner(graphs="eager", seed=1, device="cuda")
    engine = DraftEngine(old, token_budget=64)
    engine.attach(new)
    assert shown(proposals(old, 0.0, repeats=True)) == shown(eager[0]) != shown(eager[1])
    for live, seed in ((new, 1), (old, 0)):
        engine.switch(live, lambda *_, live=live: live)
        engine.pool.forget_all()

        assert shown(proposals(live, 0.0, repeats=True)) == shown(eager[seed])
