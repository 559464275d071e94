"""A model folder and packed segments -> logits of the wanted rows, with K and V written to the paged pool.

Any Hugging Face decoder that uses the attention interface runs unforked: its attention calls come to
`_attention`, which stores K and V in our pool and attends through `paceline.kernels.tree_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from paceline.cluster.errors import ModelError
from paceline.cluster.model_files import check_model_files, read_object, served_version
from paceline.cluster.speculation import Tree
from paceline.cluster.types import HeadRange
from paceline.kernels.compiled import one_at_a_time
from paceline.kernels.decide import best, decide, decide_drawn
from paceline.kernels.keyed_noise import gumbel_vocabulary
from paceline.kernels.step_jit import step
from paceline.kernels.tree_attention import tree_attention
from paceline.workers.cuda_graphs import GraphedDecoder, StaticStep
from paceline.workers.device_step import verify_step, warm_up
from paceline.workers.kv_cache import KVCache
from paceline.workers.layers import can_pack, pack_linears
from paceline.workers.lean import LeanDecoder, rotations
from paceline.workers.model_batch import BatchBuilder, PackedBatch, Spine
from paceline.workers.whole_step import WholeStepDecoder, round_to_int8

Graphs = Literal["off", "eager", "cuda"]


@dataclass(slots=True)
class _Step:
    cache: KVCache
    batch: PackedBatch
    slots: Tensor
    """The batch's, where the pool is: every layer needs them."""
    attention: str


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paceline_step: _Step | StaticStep | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention hook. query [1, H, T, D], key and value [1, G, T, D], keys rotated already."""
    assert paceline_step is not None, "the paceline attention needs a step; use ModelRunner.forward"
    if not getattr(module, "is_causal", True):
        raise ModelError("is_causal=False: expected a decoder, whose tokens see only what stands before them")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if isinstance(paceline_step, StaticStep):
        out = paceline_step.attend(
            layer,
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
            window=sliding_window,
            softcap=softcap,
            sinks_H=None if s_aux is None else s_aux.detach(),
        )
        return out[None], None
    cache, batch = paceline_step.cache, paceline_step.batch
    cache.write(layer, paceline_step.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if batch.on_layer is not None:
        batch.on_layer(layer)
    out = tree_attention(
        query[0].transpose(0, 1),
        cache.keys(layer),
        cache.values(layer),
        batch.attention,
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks_H=None if s_aux is None else s_aux.detach(),
        backend=paceline_step.attention,
    )
    return out[None], None


AttentionInterface.register("paceline", _attention)

_LEAN_TOLERANCE = 1e-4
"""Largest difference of lean and plain logits, relative to the largest logit: rounding, nothing else."""
_HOOK_TOLERANCE = 1e-3
"""The same for our attention and the family's own: sums in another order."""
_HALF_TOLERANCE = 5e-2
"""Instead of either where weights have eight bits of mantissa."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
"""What a layer may be: everything it keeps of earlier tokens is K and V of each."""
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_MIN_CONTEXT = 8


class ModelRunner:
    """One model and its KV pool on one device."""

    def __init__(
        self,
        model: PreTrainedModel,
        version: str,
        *,
        num_blocks: int,
        block_size: int,
        lean: bool = True,
        whole_step: bool = True,
        int8_weights: bool = False,
        many_rows: bool = False,
        attention: str = "jit",
        heads: HeadRange | None = None,
        graphs: Graphs = "off",
        max_streams: int = 64,
    ) -> None:
        """See `load_runner`. `heads`: KV heads of a model that was cut already; it is not checked here, and not repacked.

        The pool lies where the model's weights do, and is of their type. `graphs`: "cuda" replays captured steps of up to
        `max_streams` streams; "eager" is its plain twin, the same buffers without a capture.
        """
        config = text_config(model.config)
        if int8_weights:
            round_to_int8(model)
        self.version = version
        self.vocab_size = int(config.vocab_size)
        self.max_context = int(config.max_position_embeddings)
        layers, num_kv_heads, dim = kv_shape(config)
        self.cache = KVCache(
            num_layers=layers,
            num_kv_heads=num_kv_heads,
            head_dim=dim,
            num_blocks=num_blocks,
            block_size=block_size,
            model_version=version,
            heads=heads,
            dtype=model.dtype,
            device=model.device,
            has_scratch=graphs != "off",
        )
        self._is_on_gpu = model.device.type == "cuda"
        self.decides = graphs != "off"
        """Whether steps that say how their rows are drawn are decided and committed where the logits are."""
        self._attention = "triton" if self._is_on_gpu else attention
        self._graphed: GraphedDecoder | None = None
        self._model: PreTrainedModel | None = model
        self._lean: LeanDecoder | None = None
        self._whole: WholeStepDecoder | None = None
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        """Of what a step of one row reads, more or less: an embedding that is not the head's is read by rows."""
        self._refused = ""
        self.path = "transformers"
        """Which forward runs: "whole step" and its arithmetic, or "lean", or "transformers" and why neither."""
        if heads is None:
            self._check_hook(model)
            if lean and graphs == "off" and not self._is_on_gpu:
                if whole_step and attention == "jit":
                    self._try_whole(config, int8_weights, many_rows)
                if self._whole is None:
                    self._try_lean(config)
        if self._whole is not None or self._lean is not None:
            self._model = None  # its weights live on, repacked
        if graphs != "off":
            self._try_graphs(model, graphs, max_streams)
        elif can_pack() and self._model is not None and not self._is_on_gpu:
            pack_linears(model)
        self._warm_up()

    @torch.inference_mode()
    def _check_hook(self, model: PreTrainedModel) -> None:
        """Our attention and pool give the logits of the family's own attention, whatever it asks of a hook.

        A family that keeps more than K and V of a token, or that passes its attention something new, would load and
        answer nonsense. A chunk and one token behind it are enough to see it.
        """
        ids, num = self._probe_ids()
        model.set_attn_implementation("eager")
        tokens = torch.from_numpy(ids[None, : num + 1].astype(np.int64)).to(model.device)
        wanted: Tensor = model(input_ids=tokens, use_cache=False).logits[0, num - 1 :].float().cpu()
        model.set_attn_implementation("paceline")
        difference = float((self._probe()[:2] - wanted).abs().max())
        tolerance = _HOOK_TOLERANCE if model.dtype == torch.float32 else _HALF_TOLERANCE
        if not difference <= tolerance * float(wanted.abs().max()):  # NaN is refused too
            raise ModelError(
                f"model_type={text_config(model.config).model_type!r}: logits through the paged pool differ from "
                f"those of transformers by {difference:.1e}, expected at most {tolerance:.0e} of the largest; "
                "the family needs something our attention does not have"
            )

    @property
    def gains_from_many_rows(self) -> bool:
        """Whether it would be faster over whole texts if it were loaded for `many_rows`."""
        return self._whole is not None and self._whole.gains_from_many_rows

    def _try_whole(self, config: Any, int8_weights: bool, many_rows: bool) -> None:
        """Take whole steps if the family allows it and their logits are the plain ones."""
        assert self._model is not None
        reason = LeanDecoder.why_not(config) or WholeStepDecoder.why_not(self._model)
        if reason:
            self._refused = f", whole step not: {reason}"
            return
        plain = self._probe()
        tables = rotations(self._model, self.max_context)
        self._whole = whole = WholeStepDecoder(
            self._model, tables, int8_weights=int8_weights, many_rows=many_rows
        )
        with one_at_a_time(step, whole.arithmetic.replace(" ", "-")):  # half a minute, the first time
            found = self._probe()
        reason = _difference(found, plain)
        if reason:
            self._whole, self._refused = None, f", whole step not: {reason}"
        else:
            self.path, self.weight_bytes = f"whole step, {whole.arithmetic}", whole.weight_bytes

    def _try_lean(self, config: Any) -> None:
        """Take the lean path if the family allows it and its logits are the plain ones; else say why not."""
        assert self._model is not None
        reason = LeanDecoder.why_not(config) if can_pack() else "no oneDNN"
        if not reason:
            plain = self._probe()
            self._lean = LeanDecoder(self._model, self.max_context)
            reason = _difference(self._probe(), plain)
        if reason:
            self._lean = None
            self.path = f"transformers: {reason}"
        else:
            self.path = f"lean{self._refused}"

    def _try_graphs(self, model: PreTrainedModel, graphs: Graphs, max_streams: int) -> None:
        """Take steps through fixed buffers if the model can be captured and its logits are the same; else say why not."""
        plain = self._probe()
        self._graphed = GraphedDecoder(
            model,
            self.cache,
            max_streams,
            self.max_context,
            capture=graphs == "cuda",
            backend="triton" if self._is_on_gpu else "pieces",
        )
        try:
            difference = float((self._probe() - plain).abs().max())
            reason = f"logits differ by {difference:.1e}"
        except RuntimeError as error:  # something in the forward waits for the device
            difference, reason = math.inf, str(error).partition("\n")[0]
        tolerance = _LEAN_TOLERANCE if model.dtype == torch.float32 else _HALF_TOLERANCE
        if difference <= tolerance * max(1.0, float(plain.abs().max())):
            self.path = f"transformers, {graphs} graphs"
            if self._graphed.capture:
                self._graphed.capture_all()
                warm_up(self.cache, self.vocab_size)
        else:
            self._graphed = None
            self.path = f"transformers, graphs not: {reason}"

    def _probe_ids(self) -> tuple[np.ndarray, int]:
        """Fixed tokens that fit the smallest pool and context, and how many of them are the chunk."""
        room = min(self.cache.num_blocks * self.cache.block_size, self.max_context)
        num = min(24, room - 5)
        return ((np.arange(num + 5) * 7919 + 13) % self.vocab_size).astype(np.int32), num

    def _probe(self) -> Tensor:
        """Logits of a chunk and a tree of fixed tokens, on blocks that nobody owns yet."""
        ids, num = self._probe_ids()
        table = list(range(-(-len(ids) // self.cache.block_size)))
        chunk, tree = BatchBuilder(self.cache), BatchBuilder(self.cache)
        chunk.add_chunk(table, ids[:num], 0, keep_last=True)
        tree.add_tree(table, Tree.build(int(ids[num]), ids[num + 1 :].tolist(), [-1, 0, -1, 0]), num)
        return torch.cat([self.forward(chunk.build()[0]), self.forward(tree.build()[0])])

    def _warm_up(self) -> None:
        """Compile what sampling needs now, not in the first request."""
        decide(torch.zeros(1, 2))
        ones = np.ones(1, np.float32)
        decide_drawn(torch.zeros(1, 2), ones, np.zeros(1, np.int64), np.zeros((1, 2), np.float32))
        best(torch.zeros(1, 2), 1)
        zero = torch.zeros(1, dtype=torch.int64)
        gumbel_vocabulary(zero, zero, zero, zero, 4)

    def warm_up_levels(self) -> None:
        """Compile `levels` now, not in the first proposal. Writes into a block that nobody owns yet."""
        builder = BatchBuilder(self.cache)
        builder.add_token([0], 0, 0)
        ones = np.ones(1, np.float32)
        spine = Spine(1, 1, 0.0, np.zeros((1, 1, self.vocab_size), np.float32), ones, ones.astype(np.float64))
        with one_at_a_time(step, "levels"):
            self.levels(builder.build()[0], spine)

    def levels(
        self, batch: PackedBatch, spine: Spine
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        """Level after level behind these rows, which stand alone: best tokens [levels, B, width], and their shares alike.

        None where no path can do that. The batch's arrays are changed in place.
        """
        if self._graphed is not None:
            return self._graphed.levels(batch, spine)
        return None if self._whole is None else self._whole.levels(batch, self.cache, spine)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> Tensor:
        """Run one packed batch; float32 logits [len(keep), V].

        Where this runner `decides` and the batch says how its rows are drawn, `RawLogits` that are decided, and nothing
        has been waited for.
        """
        if self._whole is not None:
            return self._whole.forward(batch, self.cache)
        if self._lean is not None:
            return self._lean.forward(batch, self.cache, self._attention)
        logits = self.launch(batch)
        if self.decides and batch.sample is not None:
            return verify_step(logits, batch.sample, self.cache)  # type: ignore[return-value]  # see above
        return logits.float().cpu()

    @torch.inference_mode()
    def launch(self, batch: PackedBatch) -> Tensor:
        """Logits [len(keep), V] of the model's type on the pool's device, not waited for; good until the next launch."""
        assert self._model is not None
        if self._graphed is not None and self._graphed.takes(batch):
            logits = self._graphed.forward(batch)
            if logits is not None:
                return logits
        device = self.cache.device
        slots = torch.from_numpy(batch.slots).to(device, non_blocking=True)
        common = {
            "input_ids": batch.input_ids[None].to(device, non_blocking=True),
            "position_ids": batch.position_ids[None].to(device, non_blocking=True),
            "use_cache": False,
            "paceline_step": _Step(self.cache, batch, slots, self._attention),
        }
        if len(batch.keep) == 0:
            self._model.base_model(**common)
            return torch.empty(0, self.vocab_size, dtype=self.cache.dtype, device=device)
        keep = batch.keep.to(device, non_blocking=True)
        out: Tensor = self._model(**common, logits_to_keep=keep).logits[0]
        return out

    def share(self, cache: KVCache) -> None:
        """Keep K and V in another runner's pool, of the same layout, from now on."""
        self.cache = cache
        if self._graphed is not None:
            self._graphed = self._graphed.on(cache)

    @torch.no_grad()
    def take_graphs(self, other: ModelRunner) -> None:
        """Between two steps: what `other` captured is replayed with our weights, and `other` goes on without graphs.

        The weights of both change places, in place: addresses are part of what was captured, weights are not. Two runners
        of one shape and pool; without captured graphs nothing changes but the time of a step.
        """
        theirs, ours = other._graphed, self._graphed
        if self is other or theirs is None or ours is None or not theirs.capture:
            return
        assert self.cache is other.cache, "graphs write into the pool that they were captured with"
        theirs.exchange(ours)
        self._model, other._model = other._model, self._model
        self._graphed, other._graphed = theirs, ours


def _difference(found: Tensor, plain: Tensor) -> str:
    """Why logits are not those of the plain path; empty if rounding is all that differs."""
    difference = float((found - plain).abs().max())
    if difference <= _LEAN_TOLERANCE * max(1.0, float(plain.abs().max())):  # NaN is refused too
        return ""
    return f"logits differ by {difference:.1e}"


def load_runner(
    folder: Path,
    *,
    kv_memory_mb: int,
    block_size: int,
    lean: bool = True,
    whole_step: bool = True,
    int8_weights: bool = False,
    many_rows: bool = False,
    attention: str = "jit",
    device: str = "cpu",
) -> tuple[ModelRunner, str]:
    """Load weights and make the pool; also returns why the pool has the size it has.

    `lean=False` keeps to the plain Hugging Face forward, `whole_step=False` to the lean one. `int8_weights` rounds every
    linear's weights, which changes what the model says. `many_rows`: for whole texts, not for steps; see
    `WholeStepDecoder`. `attention` is a backend of `tree_attention`. On `device` "cuda"
    weights and pool are bfloat16 and steps run from CUDA graphs.

    Raises:
        ModelError: the folder, its weights or its family cannot be used.
    """
    config = load_model_config(folder)
    layers, heads, dim = kv_shape(text_config(config))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    per_block = KVCache.bytes_per_token(layers, heads, dim, dtype) * block_size
    num_blocks = (kv_memory_mb << 20) // per_block
    if num_blocks < 1:
        raise ModelError(
            f"kv_memory_mb={kv_memory_mb}: expected at least {-(-per_block // (1 << 20))}; "
            f"one block of {block_size} tokens takes {per_block} bytes"
        )
    reason = f"{kv_memory_mb} MB / ({per_block} bytes a block of {block_size} tokens)"
    model = load_model(folder, config)
    if device != "cpu":
        model = placed(model, torch.device(device), dtype)
    version = served_version(folder, int8_weights=int8_weights)
    try:
        runner = ModelRunner(
            model,
            version,
            num_blocks=num_blocks,
            block_size=block_size,
            lean=lean,
            whole_step=whole_step,
            int8_weights=int8_weights,
            many_rows=many_rows,
            attention=attention,
            graphs="off" if device == "cpu" else "cuda",
        )
    except ModelError as error:
        raise ModelError(f"model folder {folder}: {error}") from error
    return runner, reason


def load_model_config(folder: Path) -> PreTrainedConfig:
    """config.json of a model folder, of a family that can be served.

    Raises:
        ModelError: a file of the folder is damaged, or names field, value and what was expected.
    """
    check_model_files(folder)
    try:
        _check_numbers(read_object(folder / "config.json"))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        _check_family(config)
    except (
        ValueError,
        TypeError,
        KeyError,
        ArithmeticError,
        OSError,
        StrictDataclassError,
        ModelError,
    ) as error:
        raise ModelError(f"{folder}/config.json: {error}") from error
    return config


def _check_numbers(tree: dict[str, Any]) -> None:
    """Sizes as they stand in the file: transformers divides by them before it looks at them."""
    text = tree.get("text_config")
    for section in (tree, text if isinstance(text, dict) else {}):
        for name in _SIZES:
            value = section.get(name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ModelError(f"{name}={value!r}: expected an integer of at least 1")


def _check_family(config: PreTrainedConfig) -> None:
    """A decoder whose attention is a hook and whose memory is K and V."""
    if config.is_encoder_decoder:
        raise ModelError(f"model_type={config.model_type!r}: expected a decoder, this is an encoder-decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"model_type={config.model_type!r}: expected a model for causal language modelling")
    if not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_attention_backend:
        raise ModelError(
            f"model_type={config.model_type!r}: expected a family on transformers' attention interface"
        )
    text = text_config(config)
    for name, least in (
        ("num_hidden_layers", 1),
        ("vocab_size", 2),
        ("max_position_embeddings", _MIN_CONTEXT),
    ):
        _at_least(text, name, least)
    kv_shape(text)
    others = set(getattr(text, "layer_types", None) or ()) - set(_LAYER_TYPES)
    if others:
        raise ModelError(
            f"layer_types: expected {' or '.join(_LAYER_TYPES)}, got {', '.join(sorted(others))}"
        )


def load_model(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Weights from safetensors only, every one of them, computed in float32, attention through our hook.

    Raises:
        ModelError: names the folder and the tensor that is missing, too many, of another shape, or not finite.
    """
    check_model_files(folder)
    try:
        with _quiet():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                attn_implementation="paceline",
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are listed; they are refused below
            )
    except (
        ValueError,
        TypeError,
        KeyError,
        ArithmeticError,
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:
        raise ModelError(f"model folder {folder}: {error}") from error
    _check_tensors(folder, model, found)
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def placed(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model on this device in this type; the frequencies of rotations stay what they are.

    Rounded to eight bits of mantissa they would turn a token at position 8,192 by tens of radians too far or too little.
    """
    exact = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    model = model.to(device=device, dtype=dtype)
    for name, buffer in exact.items():
        place, _, last = name.rpartition(".")
        setattr(model.get_submodule(place), last, buffer.to(device))
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar, and no report of tensors: each of its lines is an error here, with a message of its own."""
    level, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bar:
            logging.enable_progress_bar()


def _check_tensors(folder: Path, model: PreTrainedModel, found: dict[str, Any]) -> None:
    """What was loaded is the whole model. transformers only warns, and fills what is missing with random numbers."""
    for name, in_file, in_model in sorted(found["mismatched_keys"]):
        raise ModelError(
            f"model folder {folder}: tensor {name} has shape {list(in_file)}, expected {list(in_model)}"
        )
    for kind, text in (
        ("missing_keys", "is not in the weights"),
        ("unexpected_keys", "is not part of the model"),
    ):
        names = sorted(found[kind])
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ModelError(
                f"model folder {folder}: tensor {names[0]}{more} {text} that config.json describes"
            )
    for name, tensor in model.named_parameters():
        low, high = torch.aminmax(tensor.detach())  # NaN goes through; no copy the size of the tensor
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise ModelError(
                f"model folder {folder}: tensor {name} has NaN or infinite values, expected none"
            )


def text_config(config: PreTrainedConfig) -> Any:
    """The decoder's part of a configuration."""
    return config.get_text_config()


def kv_shape(config: Any) -> tuple[int, int, int]:
    """(layers, KV heads, head size).

    Raises:
        ModelError: names the field, its value and what was expected.
    """
    heads = _at_least(config, "num_attention_heads", 1)
    kv_heads = heads
    if getattr(config, "num_key_value_heads", None) is not None:
        kv_heads = _at_least(config, "num_key_value_heads", 1)
    if heads % kv_heads:
        raise ModelError(f"num_key_value_heads={kv_heads}: expected a divisor of num_attention_heads={heads}")
    if getattr(config, "head_dim", None) is not None:
        dim = _at_least(config, "head_dim", 1)
    else:
        hidden = _at_least(config, "hidden_size", 1)
        if hidden % heads:
            raise ModelError(f"hidden_size={hidden}: expected a multiple of num_attention_heads={heads}")
        dim = hidden // heads
    return _at_least(config, "num_hidden_layers", 1), kv_heads, dim


def _at_least(config: Any, name: str, least: int) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < least:
        raise ModelError(f"{name}={value!r}: expected an integer of at least {least}")
    return value
