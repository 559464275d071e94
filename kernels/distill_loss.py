"""Captured target rows and draft logits -> divergences of each row, their mixes, and which rows count.

A captured row holds the m largest target logits before temperature and the log of the sum over all of them. What is not
kept is one bucket, the rest: no share is renormalised, so each divergence here is a lower bound of the one over the whole
vocabulary, and the overlap an upper bound. Filters, penalties and bias of a request are not part of it.

Legend: N rows, M kept target logits of each, V vocabulary. p is the target, q the draft, r the rest bucket.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels.dispatch import Backend, backend_of

_SMALLEST = 1e-7
"""A share of the rest bucket below this is rounding of float32 sums."""


class Shares(NamedTuple):
    """A distribution over the kept tokens and the rest bucket."""

    log_kept_NM: Tensor
    rest_N: Tensor


def target_shares(top_logits_NM: Tensor, log_sums_N: Tensor, temperatures_N: Tensor, vocab: int) -> Shares:
    """Captured rows -> the target's shares at each row's own temperature.

    The kept shares need the rest's mass at that temperature, and the capture knows it at 1 only. Between two bounds it
    is free: all of it on tokens as probable as the last kept one, or spread evenly over the V - M others. The geometric
    mean of the bounds is taken; it is exact at temperature 1 and wherever nothing is left out.

    Args:
        top_logits_NM: float32, before temperature; each row's M largest, in any order.
        log_sums_N: float32, log-sum-exp of the row's V logits at temperature 1.
        temperatures_N: float32 > 0.
    Returns:
        Shares; kept and rest sum to 1.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    >>> half = target_shares(logits[:, :2], logits.logsumexp(-1), torch.tensor([1.0]), 4)
    >>> half.log_kept_NM.exp().round(decimals=3), half.rest_N.round(decimals=3)
    (tensor([[0.6440, 0.2370]]), tensor([0.1190]))
    """
    sharpness_N = 1 / temperatures_N
    log_kept_NM = top_logits_NM - log_sums_N[:, None]
    others = max(vocab - top_logits_NM.shape[1], 0)
    rest_N = (1 - log_kept_NM.exp().sum(-1)).clamp_min(0)
    if others == 0:
        rest_N = torch.zeros_like(rest_N)
    log_rest_N = rest_N.clamp_min(1e-30).log()
    last_N, even_N = log_kept_NM.amin(-1), log_rest_N - torch.log(torch.tensor(float(max(others, 1))))
    log_rest_N = log_rest_N + (sharpness_N - 1) * (last_N + even_N) / 2
    scaled_NM = sharpness_N[:, None] * log_kept_NM
    log_rest_N = torch.where(rest_N > 0, log_rest_N, -torch.inf)
    total_N = torch.logaddexp(scaled_NM.logsumexp(-1), log_rest_N)
    return Shares(scaled_NM - total_N[:, None], (log_rest_N - total_N).exp())


class _KeptLogShares(torch.autograd.Function):
    """Logits -> log q of the kept tokens, with one pass over V in each direction and nothing of size V kept but logits."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_NM: Tensor, temperatures_N: Tensor) -> Tensor:
        sharpness_N1 = (1 / temperatures_N)[:, None]
        scaled_NV = logits_NV * sharpness_N1
        log_sums_N1 = scaled_NV.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(scaled_NV, log_sums_N1, ids_NM, sharpness_N1)
        return scaled_NV.gather(-1, ids_NM) - log_sums_N1

    @staticmethod
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor, None, None]:
        scaled_NV, log_sums_N1, ids_NM, sharpness_N1 = ctx.saved_tensors
        # d log q_v / d z_u = (1[u = v] - q_u) / T
        grad_NM = grad_NM * sharpness_N1
        grad_NV = (scaled_NV - log_sums_N1).exp_().mul_(-grad_NM.sum(-1, keepdim=True))
        return grad_NV.scatter_add_(-1, ids_NM, grad_NM), None, None


def draft_shares(
    logits_NV: Tensor, top_ids_NM: Tensor, temperatures_N: Tensor, *, backend: Backend | None = None
) -> Shares:
    """The draft's shares of the tokens that the target's row kept, exact at any temperature.

    Args:
        logits_NV: float32, gradients flow to it.
        top_ids_NM: int64, each id once in a row.
        temperatures_N: float32 > 0.
        backend: "triton" or "reference"; the default is Triton on a GPU, where bfloat16 logits will do as well.
    """
    if backend_of(logits_NV, backend) == "triton":
        from paceline.kernels.distill_loss_triton import KeptLogShares

        log_kept_NM: Tensor = KeptLogShares.apply(logits_NV, top_ids_NM, temperatures_N)  # type: ignore[no-untyped-call]
    else:
        log_kept_NM = _KeptLogShares.apply(logits_NV, top_ids_NM, temperatures_N)  # type: ignore[no-untyped-call]
    return Shares(log_kept_NM, 1 - log_kept_NM.exp().sum(-1))


def forward_kl(p: Shares, q: Shares) -> Tensor:
    """KL(p || q) [N] = sum_K p log(p / q) + p_r log(p_r / q_r): at most that over the whole vocabulary.

    Source: Hinton et al. 1503.02531 over top logits; the rest bucket instead of renormalising, by the log-sum inequality.

    >>> p = Shares(torch.tensor([[0.5, 0.3]]).log(), torch.tensor([0.2]))
    >>> forward_kl(p, p), forward_kl(p, Shares(torch.tensor([[0.25, 0.3]]).log(), torch.tensor([0.45])))
    (tensor([0.]), tensor([0.1844]))
    """
    kept_N = (p.log_kept_NM.exp() * (p.log_kept_NM - q.log_kept_NM)).sum(-1)
    rest_N = p.rest_N.clamp_min(_SMALLEST).log() - q.rest_N.clamp_min(_SMALLEST).log()
    return kept_N + p.rest_N * rest_N


def overlap(p: Shares, q: Shares) -> Tensor:
    """sum_K min(p, q) + min(p_r, q_r) [N]: at least the chance sum_V min(p, q) that one drafted token is accepted.

    Source: Leviathan et al. 2211.17192, corollary 3.6.
    """
    kept_N = torch.minimum(p.log_kept_NM, q.log_kept_NM).exp().sum(-1)
    return kept_N + torch.minimum(p.rest_N, q.rest_N.clamp_min(0))


def total_variation(p: Shares, q: Shares) -> Tensor:
    """1 - overlap [N]. Its gradient vanishes where p and q are far apart."""
    return 1 - overlap(p, q)


def log_overlap(p: Shares, q: Shares) -> Tensor:
    """-log of the overlap [N]: total variation whose gradient does not vanish.

    Source: "alpha" in sgl-project/SpecForge, "nla" in vllm-project/speculators.
    """
    return -overlap(p, q).clamp_min(_SMALLEST).log()


def hybrid(
    kl_N: Tensor, tv_N: Tensor, acceptance: float, *, decay: float = 3.0, start: float = 0.5
) -> Tensor:
    """kl until `acceptance` passes `start`, then w kl + (1 - w) tv with w = exp(-decay acceptance) [N].

    Source: the weight is that of vllm-project/speculators (exp(-3 alpha); sgl-project/SpecForge has exp(-alpha)); that tv
    alone does not leave a cold start is why kl comes first.

    >>> kl, tv = torch.tensor([2.0]), torch.tensor([1.0])
    >>> hybrid(kl, tv, 0.4), hybrid(kl, tv, 0.6)
    (tensor([2.]), tensor([1.1653]))
    """
    if acceptance <= start:
        return kl_N
    weight = float(torch.exp(torch.tensor(-decay * acceptance)))
    return weight * kl_N + (1 - weight) * tv_N


def learnable(kl_N: Tensor, reference_kl_N: Tensor, share: float = 0.4) -> Tensor:
    """bool [N]: the `share` of rows with the largest KL(p || q) - KL(p || q_ref); ties go to earlier rows, one at least.

    A reference that was distilled on the same data shows what can be learnt; where the draft is much worse than it,
    there is something left to learn.

    Source: AdaSPEC 2510.19779, section 3; share 0.4 as there.

    >>> learnable(torch.tensor([1.0, 3.0, 2.0, 0.5, 2.5]), torch.tensor([1.0, 0.5, 1.9, 0.0, 2.4]))
    tensor([False,  True, False,  True, False])
    """
    num = max(1, round(share * len(kl_N)))
    order_N = (kl_N - reference_kl_N).sort(descending=True, stable=True).indices
    chosen_N = torch.zeros(len(kl_N), dtype=torch.bool, device=kl_N.device)
    chosen_N[order_N[:num]] = True
    return chosen_N


def depth_weights(depths_N: Tensor, scale: float = 4.0) -> Tensor:
    """exp(-depth / scale) [N]: a token deep in a draft counts only if all before it were accepted.

    For rows whose depth in a draft is known. Captured rows are the target's own text, where each is the first of some
    draft: they all weigh the same.

    Source: DeepSpec's weight exp(-j / 4).
    """
    return torch.exp(-depths_N.to(torch.float32) / scale)
