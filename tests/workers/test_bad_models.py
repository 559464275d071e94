"""Damaged, foreign and mismatched model folders -> one ModelError each, with the field or file and what was expected."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BloomConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    T5Config,
)

from bundled import TARGET
from paceline.cluster.errors import ModelError, PacelineError, RequestError
from paceline.cluster.model_files import INDEX, WEIGHTS
from paceline.cluster.types import Request, Sampling
from paceline.workers import model_runner
from paceline.workers.engine import Engine
from paceline.workers.model_runner import ModelRunner, load_model, load_model_config, load_runner

FolderFactory = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(model_folder: FolderFactory, tmp_path: Path) -> Path:
    """A copy of a small Llama that a test may damage."""
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))


def refused(folder: Path, *, kv_memory_mb: int = 2) -> str:
    """What loading the folder is refused with."""
    with pytest.raises(ModelError) as caught:
        load_runner(folder, kv_memory_mb=kv_memory_mb, block_size=8)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrite the weights; the old file is mapped, so it is moved aside before."""
    old = (folder / WEIGHTS).rename(folder.parent / "old.safetensors")
    tensors = {name: tensor.clone() for name, tensor in load_file(old).items()}
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def edit_config(folder: Path, **fields: object) -> None:
    """Replace fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_the_undamaged_copy_loads(folder: Path) -> None:
    """What the tests below damage is whole before."""
    runner, _ = load_runner(folder, kv_memory_mb=2, block_size=8)

    assert runner.vocab_size == 211


# --- files ----------------------------------------------------------------------------------------------


def test_a_missing_folder_and_a_missing_config_are_named(folder: Path) -> None:
    """The folder, or the file that is not in it."""
    (folder / "config.json").unlink()
    assert "no config.json there" in refused(folder)

    shutil.rmtree(folder)
    assert "no such folder" in refused(folder)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "Expecting property name"), ("[]", "got list"), ("\ufeff", "BOM"), ("{}", "model_type")],
)
def test_a_config_that_is_no_json_object_is_named(folder: Path, text: str, expected: str) -> None:
    """The file and what a JSON reader found."""
    (folder / "config.json").write_text(text)
    message = refused(folder)

    assert "config.json: " in message and expected in message


class Payload:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", WEIGHTS])
@pytest.mark.parametrize("kind", ["torch.save", "pickle"])
def test_a_pickle_is_never_opened_whatever_its_name(
    folder: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """Alone in the folder, or called safetensors: refused, named, and its code has not run."""
    (folder / WEIGHTS).unlink()
    trace = tmp_path / "was unpickled"
    with (folder / name).open("wb") as file:
        torch.save(Payload(trace), file) if kind == "torch.save" else pickle.dump(Payload(trace), file)
    message = refused(folder)

    assert name in message and "pickle" in message
    assert not trace.exists()


@pytest.mark.parametrize("model_type", ["llama", "mine"])
def test_code_in_a_model_folder_never_runs(folder: Path, tmp_path: Path, model_type: str) -> None:
    """`auto_map` names a file beside the weights: it stays a file, whether transformers knows the family or not."""
    trace = tmp_path / "was imported"
    (folder / "mine.py").write_text(
        f"import os; os.mkdir({str(trace)!r})\n"
        "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model\n"
    )
    auto_map = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    edit_config(folder, auto_map=auto_map, model_type=model_type)
    if model_type == "llama":
        load_runner(folder, kv_memory_mb=2, block_size=8)
    else:
        refused(folder)

    assert not trace.exists()


@pytest.mark.parametrize("num_left", [0, 7, 100, 20_000, -1])
def test_a_truncated_file_is_named_with_its_size(folder: Path, num_left: int) -> None:
    """Cut in the length, in the header, in the data, or by one byte."""
    whole = (folder / WEIGHTS).read_bytes()
    cut = whole[:num_left]
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).write_bytes(cut)
    message = refused(folder)

    assert f"{folder / WEIGHTS}: " in message and str(len(cut)) in message


def with_header(folder: Path, header: bytes, num_data: int = 0, *, length: int | None = None) -> str:
    """A file with this header and so many bytes behind it, and how it is refused."""
    (folder / WEIGHTS).unlink()
    start = (len(header) if length is None else length).to_bytes(8, "little")
    (folder / WEIGHTS).write_bytes(start + header + bytes(num_data))
    return refused(folder)


def test_a_header_that_promises_too_much_is_refused(folder: Path) -> None:
    """A header longer than the file; tensors beyond its end; bytes that belong to no tensor."""
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    header = json.dumps({"a": entry}).encode()

    assert f"header length {1 << 60}" in with_header(folder, b"{}", length=1 << 60)
    assert f"expected {len(header) + 24} bytes" in with_header(folder, header, 12)
    assert f"found {len(header) + 28}" in with_header(folder, header, 20)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}',
        b'{"a": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}',
    ],
)
def test_a_header_that_makes_no_sense_is_refused(folder: Path, header: bytes) -> None:
    """Not JSON, no tensors, offsets backwards, shapes and types that do not fit their bytes."""
    with_header(folder, header, 16)


def test_a_git_lfs_pointer_says_so(folder: Path) -> None:
    """The commonest broken download."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")

    assert "git lfs pull" in refused(folder)


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        ("model-00002-of-00002.safetensors", "no such file"),
        ("../old.safetensors", "beside it"),
        (3, "beside it"),
    ],
)
def test_an_index_that_names_absent_or_outer_shards_is_refused(
    folder: Path, shard: object, expected: str
) -> None:
    """The tensor, the shard and the index are named; a path out of the folder is not followed."""
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder.parent / "old.safetensors")
    names = {"model.norm.weight": "model-00001-of-00002.safetensors", UP: shard}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    message = refused(folder)

    assert INDEX in message and UP in message and repr(shard) in message and expected in message


@pytest.mark.parametrize("tree", [{}, {"weight_map": []}, []])
def test_an_index_without_shards_is_refused(folder: Path, tree: object) -> None:
    """An empty or foreign index names itself."""
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps(tree))

    assert INDEX in refused(folder)


def test_whole_shards_load(folder: Path) -> None:
    """Positive control: two files behind an index are the same model."""
    alone, _ = load_runner(folder, kv_memory_mb=2, block_size=8)
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name].clone() for name in held}, folder / shard, metadata={"format": "pt"})
    (folder / WEIGHTS).unlink()
    found = {name: shard for shard, held in shards.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": found}))
    sharded, _ = load_runner(folder, kv_memory_mb=2, block_size=8)

    assert torch.equal(alone._probe(), sharded._probe())


# --- tensors --------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_refused_instead_of_drawn_at_random(folder: Path) -> None:
    """transformers warns and initialises it; the texts would be nonsense, and other nonsense each start."""
    edit_tensors(folder, lambda tensors: tensors.pop(UP))

    assert f"tensor {UP} is not in the weights" in refused(folder)


def test_a_missing_head_is_refused_unless_it_is_tied(folder: Path) -> None:
    """A tied head is the embedding, so files leave it out."""
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "tensor lm_head.weight is not in the weights" in refused(folder)

    edit_config(folder, tie_word_embeddings=True)
    assert load_runner(folder, kv_memory_mb=2, block_size=8)[0].path


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(folder: Path) -> None:
    """Name, shape in the file, shape that config.json asks for."""
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))

    assert "tensor model.norm.weight has shape [63], expected [64]" in refused(folder)


def test_a_tensor_the_model_has_no_place_for_is_refused(folder: Path) -> None:
    """A bias that is dropped silently changes every logit; so do layers that config.json does not count."""
    bias = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(folder, lambda tensors: tensors.update({bias: torch.ones(64)}))
    assert f"tensor {bias} is not part of the model" in refused(folder)

    edit_tensors(folder, lambda tensors: tensors.pop(bias))
    edit_config(folder, num_hidden_layers=2)
    assert "tensor model.layers.2.input_layernorm.weight (and 8 more) is not part" in refused(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(folder: Path, value: float) -> None:
    """One number in one tensor is enough."""
    edit_tensors(folder, lambda tensors: tensors[UP][5].__setitem__(3, value))

    assert f"tensor {UP} has NaN or infinite values" in refused(folder)


# --- config.json ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: expected a divisor of num_attention_heads=4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0: expected an integer of at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: expected an integer of at least 1"),
        ({"num_attention_heads": "four"}, "num_attention_heads='four': expected an integer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1: expected an integer of at least 1"),
        ({"vocab_size": 0}, "vocab_size=0: expected an integer of at least 1"),
        ({"max_position_embeddings": 4}, "max_position_embeddings=4: expected an integer of at least 8"),
        ({"hidden_size": 32}, "has shape"),
        ({"head_dim": None, "hidden_size": 66}, "66"),
        ({"model_type": "frobnicate"}, "frobnicate"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "configuration_x.X"}}, "custom code"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
    ],
)
def test_a_config_value_out_of_range_is_named(folder: Path, fields: dict[str, object], expected: str) -> None:
    """Field, value, what was expected; a model's own code is never run."""
    edit_config(folder, **fields)

    assert expected in refused(folder)


SIZES = {"vocab_size": 211, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FOREIGN: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "encoder-decoder": (
        lambda: T5Config(vocab_size=211, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4),
        "expected a decoder, this is an encoder-decoder",
    ),
    "encoder": (lambda: BertConfig(**SIZES, intermediate_size=32), "expected a decoder"),
    "no attention interface": (
        lambda: BloomConfig(vocab_size=211, hidden_size=32, n_layer=1, n_head=4),
        "attention interface",
    ),
    "no attention": (
        lambda: MambaConfig(vocab_size=211, hidden_size=32, num_hidden_layers=1, state_size=4),
        "attention interface",
    ),
    "linear attention": (
        lambda: Qwen3NextConfig(**SIZES, num_key_value_heads=2, head_dim=8, num_experts=2),
        "attention interface",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_families_that_cannot_be_served_are_refused(tmp_path: Path, kind: str) -> None:
    """Each loads somewhere in transformers, and would fail or answer nonsense here."""
    make, expected = FOREIGN[kind]
    config = make()
    torch.manual_seed(0)
    of_its_kind = {"encoder-decoder": AutoModelForSeq2SeqLM, "encoder": AutoModelForMaskedLM}
    of_its_kind.get(kind, AutoModelForCausalLM).from_config(config).save_pretrained(tmp_path)

    assert expected in refused(tmp_path)


def test_a_hook_that_computes_something_else_is_refused(
    model_folder: FolderFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family unknown today that asks its attention for more: seen at load by its logits."""
    plain = model_runner.tree_attention
    monkeypatch.setattr(
        model_runner, "tree_attention", lambda *args, **how: plain(*args, **{**how, "window": 3})
    )

    assert "differ from those of transformers" in refused(model_folder("llama"))


def test_a_pool_too_small_for_one_block_names_the_smallest(tmp_path: Path) -> None:
    """Field, value, range, and where the range comes from."""
    config = LlamaConfig(**SIZES, intermediate_size=32, head_dim=32_768, max_position_embeddings=64)
    config.save_pretrained(tmp_path)
    shutil.copy(TARGET / WEIGHTS, tmp_path / WEIGHTS)  # never reached
    with pytest.raises(
        ModelError, match=r"^kv_memory_mb=1: expected at least 16; one block of 8 tokens takes"
    ):
        load_runner(tmp_path, kv_memory_mb=1, block_size=8)


@pytest.mark.parametrize("fields", [{"max_position_embeddings": 8}, {}])
def test_the_smallest_context_still_loads(folder: Path, fields: dict[str, object]) -> None:
    """The checks at load fit into what is legal."""
    edit_config(folder, **fields)
    model = load_model(folder, load_model_config(folder))
    engine = Engine(ModelRunner(model, "v", num_blocks=1, block_size=8), token_budget=16, max_streams=1)

    assert len(engine.run([Request("r", (3, 4), Sampling(1), 6)])["r"]) == 6


# --- requests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt_and_new",
    [(250, 7), (257, 0), (0, 4), (1, 256), (1, 1 << 40)],
    ids=["together", "prompt", "empty", "output", "huge"],
)
def test_a_request_over_the_context_is_refused_and_leaves_nothing(
    make_runner: Callable[..., ModelRunner], prompt_and_new: tuple[int, int]
) -> None:
    """The engine goes on with the others; no stream, no block and no token of theirs is lost."""
    engine = Engine(make_runner("llama"), token_budget=64, max_streams=4)
    good = Request("good", tuple(range(3, 20)), Sampling(1), 12)
    alone = engine.run([good])["good"]
    num_prompt, num_new = prompt_and_new
    stream = engine.add(good)
    engine.step()
    with pytest.raises(RequestError) as caught:
        engine.add(Request("bad", (3,) * num_prompt, Sampling(1), num_new))

    assert "expected 1..256 together" in str(caught.value) and f"{num_prompt} prompt" in str(caught.value)
    assert isinstance(caught.value, PacelineError) and caught.value.code == "context_length_exceeded"
    assert len(engine.scheduler) == 1
    while len(engine.scheduler):
        engine.step()
    engine.pool.check_integrity()
    assert (stream.token_ids[17:].tolist(), engine.pool.num_used) == (alone, 0)


@pytest.mark.parametrize("token", [-1, 211, 1 << 31])
def test_a_token_the_model_does_not_have_is_refused(
    make_runner: Callable[..., ModelRunner], token: int
) -> None:
    """The legal range is in the message; nothing was admitted."""
    engine = Engine(make_runner("llama"), token_budget=64, max_streams=4)
    with pytest.raises(RequestError, match=r"must be in 0\.\.210"):
        engine.add(Request("bad", (3, token), Sampling(1), 4))

    assert len(engine.scheduler) == 0
    engine.pool.check_integrity()


def test_a_stream_that_fails_takes_no_block_and_no_neighbour_with_it(
    make_runner: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in one stream's logits ends it; the other's text stays, and all blocks come back."""
    runner = make_runner("llama")
    good = Request("good", tuple(range(3, 20)), Sampling(1), 12)
    alone = Engine(runner, token_budget=64, max_streams=4).run([good])["good"]
    engine = Engine(runner, token_budget=64, max_streams=4)
    forward = runner.forward

    def spoilt(batch: Any) -> torch.Tensor:
        logits = forward(batch).clone()
        logits[batch.input_ids[batch.keep] == 7] = float("nan")
        return logits

    monkeypatch.setattr(runner, "forward", spoilt)
    engine.add(good)
    engine.add(Request("bad", (*np.arange(100, 130).tolist(), 7), Sampling(1), 12))
    ends: dict[str, str] = {}
    tokens: list[int] = []
    while len(engine.scheduler):
        for emission in engine.step().emissions:
            if emission.stream.request.id == "good":
                tokens.extend(emission.tokens)
            if emission.finish is not None:
                ends[emission.stream.request.id] = emission.finish
        engine.scheduler.check_integrity()
        engine.pool.check_integrity()

    assert ends["bad"] == "error"
    assert 7 not in alone and (tokens, ends["good"]) == (alone, "length")
    assert engine.pool.num_used == 0
