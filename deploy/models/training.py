"""Batches of token ids -> trained weights: the target from text, the draft from the target.

The budget is CPU seconds of this process on a CPU and seconds on a GPU, so a machine that is shared trains as far
as an idle one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from paceline.deploy.models.corpus import (
    BOS_ID,
    END_ID,
    EOS_ID,
    MAX_POSITIONS,
    NO_LOSS,
    PAD_ID,
    VOCAB_SIZE,
    write_tokenizer,
)

# Legend of shape suffixes: B sequences, L positions, V vocabulary, N positions that are learnt.

INIT_STD = 0.02
ROPE_THETA = (
    500_000.0  # half of the frequencies hardly turn within a thousand tokens: `lay_out_induction` needs them
)
_CONSTANT = 12.0  # of the constant component, in standard deviations of a token's components
_SHARPNESS_BACK = 7.0  # of the constant query and key, at each of the fast frequencies
_SHARPNESS_MATCH = 40.0  # score of a key that stands behind the same token
KL_WEIGHT = 0.8  # the rest is cross-entropy on the text, which steadies the start
SNAPSHOT_S = 600.0  # of budget; an interrupted run leaves weights that can be used

Batches = Iterator[tuple[Tensor, Tensor]]
LossFunction = Callable[[Tensor, Tensor], Tensor]
Snapshot = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama with tied embeddings and heads of 64."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run of `train` cost and reached."""

    num_params: int
    num_steps: int
    num_tokens: int
    budget_s: float
    wall_s: float
    loss: float


def llama(shape: Shape, seed: int) -> LlamaForCausalLM:
    """A fresh float32 Llama over our vocabulary, its first two layers laid out to copy."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=64,
        intermediate_size=shape.intermediate,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=ROPE_THETA,
        initializer_range=INIT_STD,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # what joins the residual stream starts smaller, so that depth does not widen it
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_((2 * shape.layers) ** -0.5)
    lay_out_induction(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def lay_out_induction(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Begin with an induction circuit: a head that looks one token back, and heads that say what came next last time.

    Copying a name from the request is most of every task here. Ten million tokens of training from random weights
    did not find it; from this beginning a hundred steps do. The circuit is that of Olsson et al. (2022), "In-context
    learning and induction heads". The residual stream gives up one component for a constant and the last D for the
    token before:

        layer 0, head 0          query and key are constants, rotated apart by one position; value: a projection P of
                                 the token; output: the last D components
        layer 1, first head of   query: P of the token; key: the last D components; both in the slow half of the
        each KV group            rotary frequencies; value: the token there, projected; output: back to the tokens
    """
    config = model.config
    size, dim, num_kv = config.hidden_size, config.head_dim, config.num_key_value_heads
    group, half, std = config.num_attention_heads // num_kv, dim // 2, config.initializer_range
    embedding = model.model.embed_tokens.weight
    embedding[:, size - dim :] = 0
    embedding[:, 0] = _CONSTANT * std
    rms = std * math.sqrt((size - dim - 1 + _CONSTANT**2) / size)  # of an embedding
    unit = std / rms  # a component of a token behind the norm

    def projection() -> Tensor:
        """[D, E], orthonormal rows over the components of a token."""
        rows = torch.linalg.qr(torch.randn(size - dim - 1, dim, generator=generator))[0].T
        return F.pad(rows, (1, dim))

    look_back = model.model.layers[0].self_attn
    token = projection()
    fast = torch.arange(8)
    turn = ROPE_THETA ** (-fast / half)  # of a frequency, from one position to the next
    amplitude = _SHARPNESS_BACK / (_CONSTANT * unit)
    look_back.q_proj.weight[:dim] = look_back.k_proj.weight[:dim] = look_back.o_proj.weight[:, :dim] = 0
    look_back.k_proj.weight[fast, 0] = amplitude
    look_back.q_proj.weight[fast, 0] = amplitude * turn.cos()
    look_back.q_proj.weight[fast + half, 0] = -amplitude * turn.sin()
    look_back.v_proj.weight[:dim] = token
    look_back.o_proj.weight[range(size - dim, size), range(dim)] = std / unit

    induce = model.model.layers[1].self_attn
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half // 2, half) + half])
    gain = math.sqrt(_SHARPNESS_MATCH * math.sqrt(dim) / len(slow)) / unit
    for kv_head in range(num_kv):
        mix = torch.linalg.qr(torch.randn(dim, len(slow), generator=generator))[0].T
        value, first = projection(), kv_head * group * dim
        keys = slice(kv_head * dim, (kv_head + 1) * dim)
        induce.k_proj.weight[keys] = induce.q_proj.weight[first : first + dim] = 0
        induce.k_proj.weight[kv_head * dim + slow, size - dim :] = gain * mix
        induce.q_proj.weight[first + slow] = gain * mix @ token
        induce.v_proj.weight[keys] = value
        induce.o_proj.weight[:, first : first + dim] = value.T * (4 * std / unit)


def hidden_of(model: LlamaForCausalLM, inputs_BL: Tensor) -> Tensor:
    """Final hidden states [B, L, H] of one forward pass that keeps no cache; bfloat16 where that is fast."""
    with torch.autocast(inputs_BL.device.type, torch.bfloat16, enabled=has_fast_bfloat16(inputs_BL.device)):
        hidden: Tensor = model.model(input_ids=inputs_BL, use_cache=False).last_hidden_state
    return hidden


def head_logits(model: LlamaForCausalLM, hidden_NH: Tensor) -> Tensor:
    """float32 logits [N, V]."""
    with torch.autocast(hidden_NH.device.type, torch.bfloat16, enabled=has_fast_bfloat16(hidden_NH.device)):
        logits: Tensor = model.lm_head(hidden_NH)
    return logits.float()


def has_fast_bfloat16(device: torch.device) -> bool:
    """The device multiplies bfloat16 in hardware."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def text_loss(model: LlamaForCausalLM) -> LossFunction:
    """Cross-entropy with the text."""

    def loss(inputs_BL: Tensor, labels_BL: Tensor) -> Tensor:
        learnt = labels_BL != NO_LOSS
        return F.cross_entropy(head_logits(model, hidden_of(model, inputs_BL)[learnt]), labels_BL[learnt])

    return loss


def distill_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> LossFunction:
    """Forward KL(target || draft) mixed with cross-entropy.

    Sampling accepts a drafted token with chance sum(min(p, q)), and greedy decoding when the two argmaxes
    agree; both follow from q near p, whatever the text says.
    """

    def loss(inputs_BL: Tensor, labels_BL: Tensor) -> Tensor:
        learnt = labels_BL != NO_LOSS
        with torch.no_grad():
            target_logp = head_logits(target, hidden_of(target, inputs_BL)[learnt]).log_softmax(-1)
        draft_logp = head_logits(draft, hidden_of(draft, inputs_BL)[learnt]).log_softmax(-1)
        kl = F.kl_div(draft_logp, target_logp, log_target=True, reduction="batchmean")
        return KL_WEIGHT * kl + (1 - KL_WEIGHT) * F.nll_loss(draft_logp, labels_BL[learnt])

    return loss


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up over the first 4 % of the budget (a faster one tears the circuit of copying apart), then a cosine down to 2 % of the peak."""
    warm = min(progress / 0.04, 1.0)
    return peak * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * min(progress, 1.0))) / 2)


def adamw(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def train(
    name: str,
    model: LlamaForCausalLM,
    loss_of: LossFunction,
    data: Batches,
    *,
    budget_s: float,
    peak: float,
    snapshot: Snapshot,
) -> Cost:
    """Train model in place until the budget is spent; a line of progress every fifteen seconds."""
    clock = time.perf_counter if next(model.parameters()).is_cuda else time.process_time
    optimizer = adamw(model)
    begin, begin_wall, said, saved = clock(), time.monotonic(), clock(), clock()
    spent, loss, num_steps, num_tokens = 0.0, math.nan, 0, 0
    while spent < budget_s:
        inputs, labels = next(data)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(peak, spent / budget_s)
        step_loss = loss_of(inputs, labels)
        torch.autograd.backward(step_loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = step_loss.item()
        loss = value if math.isnan(loss) else 0.98 * loss + 0.02 * value  # smoothed over about 50 steps
        num_steps, num_tokens = num_steps + 1, num_tokens + inputs.numel()
        now = clock()
        spent = now - begin
        if now - said >= 15 or spent >= budget_s:
            said = now
            speed, left = num_tokens / (time.monotonic() - begin_wall), max(budget_s - spent, 0.0)
            print(
                f"{name}  step {num_steps}  loss {loss:.3f}  {speed:,.0f} tok/s  {left:.0f} s left",
                flush=True,
            )
        if now - saved >= SNAPSHOT_S:
            saved = now
            snapshot()
    return Cost(model.num_parameters(), num_steps, num_tokens, spent, time.monotonic() - begin_wall, loss)


def write_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights in bfloat16 with settings and tokenizer; the model itself stays as it is."""
    write_tokenizer(tokenizer, folder)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=[EOS_ID, END_ID]
    )
    copy.to(dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for its owner alone; these ship


def read_model(folder: Path, device: torch.device) -> LlamaForCausalLM:
    """What a reader gets, in float32."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()
