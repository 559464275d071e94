"""Tiny random models of eight families -> runners and oracles, each loaded once a session."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen3Config,
)

import oracle
from paceline.workers.model_runner import ModelRunner, load_model, load_model_config

VOCAB = 211
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # large enough for the context to decide the next token
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, Callable[[], object]] = {
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=GEMMA_LAYERS,
        tie_word_embeddings=False,  # tied, a random model repeats its last token for ever
    ),
    "llama": lambda: LlamaConfig(**COMMON),
    "mistral": lambda: MistralConfig(**COMMON, head_dim=16, sliding_window=11),
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **COMMON,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=GEMMA_LAYERS,
        attn_logit_softcapping=2.0,  # low enough to bend the scores of a random model
        final_logit_softcapping=3.0,
        tie_word_embeddings=False,
    ),
    "phi3": lambda: Phi3Config(**COMMON, sliding_window=13),
    "gpt_oss": lambda: GptOssConfig(
        **COMMON,
        head_dim=16,
        sliding_window=9,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=GEMMA_LAYERS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
"""A family's place is the seed of its weights: new ones go last."""

RunnerFactory = Callable[..., ModelRunner]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower on two threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> folder of a random model, made when first asked for."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            torch.manual_seed(list(CONFIGS).index(family))
            made[family] = tmp_path_factory.mktemp(family)
            AutoModelForCausalLM.from_config(CONFIGS[family]()).save_pretrained(made[family])
        return made[family]

    return folder


@pytest.fixture(scope="session")
def make_runner(model_folder: Callable[[str], Path]) -> RunnerFactory:
    """(family, num_blocks, block_size) -> a runner with its own pool; a family is loaded once."""
    models: dict[str, PreTrainedModel] = {}

    def make(family: str, *, num_blocks: int = 128, block_size: int = 4) -> ModelRunner:
        if family not in models:
            folder = model_folder(family)
            models[family] = load_model(folder, load_model_config(folder))
        # A runner repacks the weights it is given: each gets a copy.
        return ModelRunner(
            copy.deepcopy(models[family]), family, num_blocks=num_blocks, block_size=block_size
        )

    return make


@pytest.fixture(scope="session")
def oracle_model(model_folder: Callable[[str], Path]) -> Callable[[str], PreTrainedModel]:
    """Family -> the same weights as transformers runs them."""
    models: dict[str, PreTrainedModel] = {}

    def load(family: str) -> PreTrainedModel:
        if family not in models:
            models[family] = oracle.load(str(model_folder(family)))
        return models[family]

    return load
