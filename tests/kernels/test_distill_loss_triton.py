"""Draft logits and kept ids -> the shares and gradients of the plain autograd function, from Triton."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from paceline.kernels.distill_loss import Shares, _KeptLogShares, forward_kl, target_shares
from paceline.kernels.distill_loss_triton import KeptLogShares

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)]
"""Relative, of a row's largest gradient: one rounding of the dtype, sums in another order."""


def loss_of(function: type[torch.autograd.Function], logits: torch.Tensor, seed: int) -> torch.Tensor:
    """Forward KL of captured rows at three temperatures."""
    generator = torch.Generator().manual_seed(seed)
    target = (torch.randn(len(logits), logits.shape[1], generator=generator) * 2).to(DEVICE)
    top = target.topk(min(12, logits.shape[1]), dim=-1)
    temperatures = torch.tensor([1.0, 0.5, 1.7] * len(logits))[: len(logits)].to(DEVICE)
    p = target_shares(top.values, target.logsumexp(-1), temperatures, logits.shape[1])
    kept = function.apply(logits, top.indices, temperatures)  # type: ignore[no-untyped-call]
    return forward_kl(p, Shares(kept, 1 - kept.exp().sum(-1)))


@pytest.mark.parametrize("shape", [(3, 12), (5, 2047), (2, 4099)])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_loss_and_gradient_are_the_twin_s(
    shape: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    """Vocabularies that are all kept, less than a tile, more than two."""
    raw = (torch.randn(*shape, generator=torch.Generator().manual_seed(shape[1])) * 3).to(dtype).to(DEVICE)
    found, expected = raw.clone().requires_grad_(), raw.float().requires_grad_()
    losses = loss_of(KeptLogShares, found, 1), loss_of(_KeptLogShares, expected, 1)
    for loss in losses:
        loss.sum().backward()
    assert found.grad is not None and expected.grad is not None
    gap = (found.grad.float() - expected.grad).abs().amax(-1) / expected.grad.abs().amax(-1).clamp_min(1e-6)

    assert torch.allclose(*losses, rtol=1e-4, atol=1e-5)
    assert found.grad.dtype == dtype and gap.max() < tolerance


def test_a_gradient_without_the_sum_s_part_would_be_seen() -> None:
    """Negative control for the tolerance: what flows through the log of the sum is far above it."""
    raw = torch.randn(4, 300, generator=torch.Generator().manual_seed(3)).to(DEVICE).requires_grad_()
    loss_of(_KeptLogShares, raw, 1).sum().backward()
    assert raw.grad is not None
    kept = torch.zeros_like(raw.grad, dtype=torch.bool)
    kept.scatter_(1, raw.grad.topk(12, largest=False).indices, True)
    others = raw.grad.masked_fill(kept, 0).abs().amax(-1) / raw.grad.abs().amax(-1)

    assert others.min() > 10 * TOLERANCES[0][1]
