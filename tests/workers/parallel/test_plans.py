"""Families and numbers of ranks -> cuts, or a refusal that says what was expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
)

from paceline.cluster.errors import GangLost, ModelError
from paceline.cluster.types import Request, Sampling
from paceline.workers.engine import Engine
from paceline.workers.kv_link import LinkStore
from paceline.workers.parallel import plans
from paceline.workers.parallel.gang import load_parallel_runner
from paceline.workers.parallel.group import Group
from paceline.workers.parallel.plans import Cut, plan_for
from paceline.workers.parallel.runner import ParallelRunner
from paceline.workers.parallel.shards import Shape, cut_model, even, vocabulary

SIZES = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def model_of(config: type[PreTrainedConfig], **how: object) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config(**{**SIZES, **how}))
    return model.eval().requires_grad_(False)


def test_every_weight_of_a_layer_but_norms_and_routers_is_cut() -> None:
    """What no rule names is whole on each rank, so a rule that is missing is memory and time that is not saved."""
    for config in (LlamaConfig, MixtralConfig, Phi3Config, GptOssConfig):
        model = model_of(config)
        plan = plan_for(model)
        layer = [name for name, p in model.named_parameters() if ".layers." in name and p.ndim > 1]
        left = [name for name in layer if name not in plan and name.rpartition(".")[0] not in plan]

        assert all("router" in name or "gate.weight" in name for name in left), left
        assert plan["lm_head"] is Cut.VOCABULARY


def test_parts_of_all_ranks_are_the_whole() -> None:
    """Nothing is lost or had twice, whatever divides; shards of token ids begin where noise can."""
    for total in (1, 3, 24, 211, 5003):
        for size in (1, 2, 3, 8):
            for cut in (even, vocabulary):
                parts = [cut(total, rank, size) for rank in range(size)]
                assert [i for part in parts for i in range(total)[part]] == list(range(total))
            assert all(part.start % 4 == 0 for part in parts if part.start < total)


@pytest.mark.parametrize("config", [LlamaConfig, Phi3Config, GptOssConfig, MixtralConfig])
@pytest.mark.parametrize("size", [2, 4])
def test_cut_linears_add_up(config: type[PreTrainedConfig], size: int) -> None:
    """The ranks' parameters together are the model's, KV heads that are shared counted as often as they are held."""
    whole = model_of(config)
    shape = Shape(4, 2, whole.model.layers[0].self_attn.head_dim, 30)
    ranks = []
    for rank in range(size):
        torch.manual_seed(0)
        mine = model_of(config)
        mine.load_state_dict(whole.state_dict())
        cut_model(mine, shape, Group(rank, size))
        ranks.append(mine)
    attention = [rank.model.layers[0].self_attn for rank in ranks]
    plain = whole.model.layers[0].self_attn
    dim = shape.head_dim

    o = torch.cat([a.o_proj.inner.weight for a in attention], dim=1)
    assert torch.equal(o, plain.o_proj.weight)
    heads = torch.cat([rank.lm_head.weight for rank in ranks])
    assert torch.equal(heads, whole.lm_head.weight)
    if hasattr(plain, "k_proj"):
        assert torch.equal(torch.cat([a.q_proj.weight for a in attention]), plain.q_proj.weight)
        copies = [a.k_proj.weight for a in attention][:: size // 2]
        assert torch.equal(torch.cat(copies), plain.k_proj.weight)
    else:
        q = torch.cat([a.qkv_proj.weight[: 4 * dim // size] for a in attention])
        assert torch.equal(q, plain.qkv_proj.weight[: 4 * dim])


@pytest.mark.parametrize(
    "how, tp, expected",
    [
        ({}, 3, "tp=3: expected a divisor of num_attention_heads=4"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}, 2, "num_key_value_heads=3"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(how: dict[str, int], tp: int, expected: str) -> None:
    """Before anything is loaded by anybody else."""
    sizes = {**SIZES, **how}
    shape = Shape(sizes["num_attention_heads"], sizes["num_key_value_heads"], 8, 30)

    with pytest.raises(ModelError, match=expected):
        cut_model(model_of(LlamaConfig, **how), shape, Group(0, tp))


def test_a_family_whose_attention_is_not_cut_by_heads_is_refused() -> None:
    """OLMo 2 norms all heads of q and k together."""
    with pytest.raises(ModelError, match="q_proj is 'colwise_gather_output'.*runs with tp=1"):
        plan_for(model_of(Olmo2Config))


def test_the_leader_says_that_a_model_cannot_be_cut(model_folder: Callable[[str], Path]) -> None:
    """Nobody is started for it."""

    def launch(_: object) -> None:
        raise AssertionError("a rank was started")

    with pytest.raises(ModelError, match="tp=3: expected a divisor"):
        load_parallel_runner(
            model_folder("llama"),
            tp=3,
            kv_memory_mb=1,
            block_size=4,
            launch=launch,  # type: ignore[arg-type]
        )


def test_a_wrong_plan_is_found_when_it_is_loaded(
    make_parallel: Callable[..., ParallelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: one rank, here the leader, cuts q, k and v in one as if they were one thing."""
    wrong = {**plans.OWN["phi3"], "layers.*.mlp.gate_up_proj": Cut.COLUMNS}
    monkeypatch.setitem(plans.OWN, "phi3", wrong)

    with pytest.raises(ModelError, match="tp=2: logits of the ranks differ from the whole model's"):
        make_parallel("phi3")


def test_a_rank_that_dies_is_lost_in_the_next_call(make_parallel: Callable[..., ParallelRunner]) -> None:
    """The leader learns it from the closed connection, at once; its gang can still be closed."""
    many = make_parallel("llama")
    assert many.gang is not None and many.gang.lost() == ""
    process = many.gang._ranks[0].process  # type: ignore[attr-defined]
    process.end(0.0)

    assert many.gang.lost() == "rank 1 of 2 is gone"
    with pytest.raises(GangLost):
        Engine(many, token_budget=32, max_streams=1).run([Request("r", (5, 6, 7), Sampling(1), 4)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_starts_with_one_rank_on_this_gpu() -> None:
    """All that can be seen of it on one card: two ranks on one are refused by NCCL itself."""
    store = LinkStore("127.0.0.1", 30.0)
    group = Group(0, 1, "cuda:0")
    group.join(store.store, "alone", 30.0)
    mine = torch.arange(6.0, device="cuda:0")

    assert torch.equal(group.sum(mine).cpu(), torch.arange(6.0))
