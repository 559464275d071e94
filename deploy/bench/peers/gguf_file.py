"""A Hugging Face folder of the Llama family -> one GGUF file of the same weights, without a tokenizer.

    python gguf_file.py FOLDER FILE [f32 | bf16]

Token ids go in and come out, so no tokenizer is written. Runs where only numpy and `gguf` are installed: safetensors
are read by hand, bfloat16 becomes float32 bit for bit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Array = Any
"""A numpy array of float32."""

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Name in a Hugging Face layer -> name in a GGUF block."""


def convert(folder: Path, file: Path, kind: str = "f32") -> None:
    """Write the file; norms stay float32 whatever the kind.

    Raises:
        ValueError: the family, its rotation or one of its tensors is not what llama.cpp calls `llama`.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    config = json.loads((folder / "config.json").read_text())
    check(config)
    writer = GGUFWriter(str(file), "llama")
    write_sizes(writer, config)
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    for name, tensor in tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if ".q_proj." in name:
            tensor = interleaved(tensor, heads)
        elif ".k_proj." in name:
            tensor = interleaved(tensor, kv_heads or heads)
        if kind == "bf16" and tensor.ndim == 2:
            half = GGMLQuantizationType.BF16
            writer.add_tensor(gguf_name(name), quantize(tensor, half), raw_dtype=half)
        else:
            writer.add_tensor(gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check(config: dict[str, Any]) -> None:
    """Only what is written below."""
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"family {config['architectures']}: only LlamaForCausalLM is converted")
    if rotation(config).get("rope_type", "default") != "default":
        raise ValueError(f"rotation {rotation(config)}: only the default one is converted")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError("attention_bias, mlp_bias: layers with biases are not converted")


def rotation(config: dict[str, Any]) -> dict[str, Any]:
    """Parameters of the rotary embedding, where either generation of configurations keeps them."""
    found: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", 10000.0), **found}


def write_sizes(writer: Any, config: dict[str, Any]) -> None:
    """Everything of the configuration that llama.cpp computes with."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rotation(config)["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    if name in NAMES:
        return NAMES[name]
    _, layers, number, rest = name.split(".", 3)
    stem, _, end = rest.rpartition(".")
    if layers != "layers" or stem not in LAYER_NAMES or end != "weight":
        raise ValueError(f"tensor {name}: unknown")
    return f"blk.{number}.{LAYER_NAMES[stem]}.weight"


def interleaved(weight: Array, num_heads: int) -> Array:
    """Rows of each head reordered: Hugging Face rotates halves (i, i + d/2), llama.cpp neighbours (2i, 2i + 1)."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def tensors(folder: Path) -> Iterator[tuple[str, Array]]:
    """(name, float32 array) of every safetensors file, in the order of names."""
    for file in sorted(folder.glob("*.safetensors")):
        data = np.memmap(file, np.uint8, "r")
        start = 8 + int(data[:8].view(np.uint64)[0])
        header = json.loads(data[8:start].tobytes())
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items()):
            first, last = entry["data_offsets"]
            raw = data[start + first : start + last].tobytes()
            yield name, as_float32(raw, entry["dtype"]).reshape(entry["shape"])


def as_float32(raw: bytes, dtype: str) -> Array:
    """Bytes of a safetensors type -> float32, without rounding."""
    if dtype == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F32", "F16"):
        return np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)
    raise ValueError(f"weights of type {dtype}: expected F32, F16 or BF16")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4])
