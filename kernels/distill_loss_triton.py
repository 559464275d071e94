"""Draft logits and the ids a captured row kept -> the log shares of those ids, and their gradient (Triton).

The only part of `distill_loss` that is as wide as the vocabulary; all divergences work on [N, M] behind it. No dense
teacher, and nothing of the vocabulary's size is kept for the backward pass but the logits themselves, which the draft's
head keeps anyway; plain torch writes and keeps a scaled copy.

    forward    reads the logits once: m = max z / T, s = sum exp(z / T - m), online; log q_k = z_k / T - m - log s
    backward   reads them once, writes the gradient once: (1[u = k] g_k - q_u sum g) / T, the first term by a second,
               tiny launch, so that ids need not be searched for in every tile

Versions: 1, this: three times the logits' bytes forward and backward, the least there is unless the head's product is
computed twice. Not timed on a card yet.

Legend: N rows, M kept ids of each, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _forward(
    logits, stride, ids, temperatures, kept, log_sums, num_ids, num_kept,
    BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One program: a row."""
    row = tl.program_id(0)
    begin = row.to(tl.int64) * stride
    sharpness = 1.0 / tl.load(temperatures + row)
    top = tl.full([], -3.0e38, tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(0, num_ids, BLOCK):
        i = start + tl.arange(0, BLOCK)
        z = tl.load(logits + begin + i, mask=i < num_ids, other=float("-inf")).to(tl.float32) * sharpness
        higher = tl.maximum(top, tl.max(z))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher))
        top = higher
    log_sum = top + tl.log(total)
    tl.store(log_sums + row, log_sum)
    k = tl.arange(0, KEPT)
    at = row.to(tl.int64) * num_kept + k
    id = tl.load(ids + at, mask=k < num_kept, other=0)
    z = tl.load(logits + begin + id, mask=k < num_kept, other=0).to(tl.float32) * sharpness
    tl.store(kept + at, z - log_sum, mask=k < num_kept)


@triton.jit
def _backward(
    logits,
    stride,
    grads,
    temperatures,
    log_sums,
    out,
    num_ids,
    num_kept,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
):
    """One program: a tile of a row; what flows to all ids through the sum."""
    row = tl.program_id(0)
    k = tl.arange(0, KEPT)
    grad = tl.sum(tl.load(grads + row.to(tl.int64) * num_kept + k, mask=k < num_kept, other=0))
    sharpness = 1.0 / tl.load(temperatures + row)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < num_ids, other=0).to(tl.float32) * sharpness
    flow = tl.exp(z - tl.load(log_sums + row)) * (-grad * sharpness)
    tl.store(out + row.to(tl.int64) * num_ids + i, flow.to(out.dtype.element_ty), mask=i < num_ids)


@triton.jit
def _backward_kept(
    logits, stride, ids, grads, temperatures, log_sums, out, num_ids, num_kept, KEPT: tl.constexpr
):
    """One program: a row; the kept ids again, with what flows to them directly, rounded once."""
    row = tl.program_id(0)
    k = tl.arange(0, KEPT)
    at = row.to(tl.int64) * num_kept + k
    grad = tl.load(grads + at, mask=k < num_kept, other=0)
    id = tl.load(ids + at, mask=k < num_kept, other=0)
    sharpness = 1.0 / tl.load(temperatures + row)
    z = (
        tl.load(logits + row.to(tl.int64) * stride + id, mask=k < num_kept, other=0).to(tl.float32)
        * sharpness
    )
    flow = (grad - tl.exp(z - tl.load(log_sums + row)) * tl.sum(grad)) * sharpness
    tl.store(out + row.to(tl.int64) * num_ids + id, flow.to(out.dtype.element_ty), mask=k < num_kept)


class KeptLogShares(torch.autograd.Function):
    """`distill_loss`'s `_KeptLogShares`: logits, ids, temperatures -> log q of the kept ids, float32 [N, M]."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_NM: Tensor, temperatures_N: Tensor) -> Tensor:
        num, num_ids = logits_NV.shape
        num_kept = ids_NM.shape[1]
        assert logits_NV.stride(-1) == 1, "logits_NV: expected the last dimension to be contiguous"
        ids_NM, temperatures_N = ids_NM.contiguous(), temperatures_N.contiguous()
        kept_NM = torch.empty(num, num_kept, dtype=torch.float32, device=logits_NV.device)
        log_sums_N = torch.empty(num, dtype=torch.float32, device=logits_NV.device)
        if num:
            _forward[(num,)](
                *(
                    logits_NV,
                    logits_NV.stride(0),
                    ids_NM,
                    temperatures_N,
                    kept_NM,
                    log_sums_N,
                    num_ids,
                    num_kept,
                ),
                BLOCK=_BLOCK,
                KEPT=triton.next_power_of_2(num_kept),
                num_warps=8,
            )
        ctx.save_for_backward(logits_NV, ids_NM, temperatures_N, log_sums_N)
        return kept_NM

    @staticmethod
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, ids_NM, temperatures_N, log_sums_N = ctx.saved_tensors
        num, num_ids = logits_NV.shape
        num_kept = ids_NM.shape[1]
        grad_NM = grad_NM.contiguous()
        out_NV = torch.empty(num, num_ids, dtype=logits_NV.dtype, device=logits_NV.device)
        if num:
            kept = triton.next_power_of_2(num_kept)
            common = (temperatures_N, log_sums_N, out_NV, num_ids, num_kept)
            _backward[(num, triton.cdiv(num_ids, _BLOCK))](
                *(logits_NV, logits_NV.stride(0), grad_NM), *common, BLOCK=_BLOCK, KEPT=kept, num_warps=4
            )
            _backward_kept[(num,)](
                *(logits_NV, logits_NV.stride(0), ids_NM, grad_NM), *common, KEPT=kept, num_warps=1
            )
        return out_NV, None, None
