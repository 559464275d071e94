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

INIT_STD = 0.03
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


def llama(shape: Shape) -> LlamaForCausalLM:
    """A fresh float32 Llama over our vocabulary."""
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
    return model


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
    """Linear warm-up over the first 3 % of the budget, then a cosine down to 2 % of the peak."""
    warm = min(progress / 0.03, 1.0)
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
