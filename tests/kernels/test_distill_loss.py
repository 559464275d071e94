"""Rows cut to their top and a rest bucket -> losses that agree with the plain twin and bound those over all tokens."""

import doctest

import pytest
import torch
from torch.nn import functional as F

from paceline.kernels import distill_loss
from paceline.kernels.distill_loss import (
    Shares,
    depth_weights,
    draft_shares,
    forward_kl,
    hybrid,
    learnable,
    log_overlap,
    overlap,
    target_shares,
    total_variation,
)
from paceline.kernels.distill_loss_reference import divergences_reference

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def case(num: int, kept: int, vocab: int, seed: int, *, spread: float = 2.0) -> tuple[torch.Tensor, Case]:
    """(target logits of all tokens, (draft logits, ids, top logits, log sums, temperatures))."""
    generator = torch.Generator().manual_seed(seed)
    target = spread * torch.randn(num, vocab, generator=generator)
    draft = (target + spread * torch.randn(num, vocab, generator=generator)).requires_grad_()
    top, ids = target.topk(kept, -1)
    temperatures = torch.tensor([1.0, 0.7, 0.3, 1.5])[torch.arange(num) % 4]
    return target, (draft, ids, top, target.logsumexp(-1), temperatures)


def shares(data: Case) -> tuple[Shares, Shares]:
    draft, ids, top, sums, temperatures = data
    return target_shares(top, sums, temperatures, draft.shape[1]), draft_shares(draft, ids, temperatures)


@pytest.mark.parametrize(
    ("kept", "vocab", "spread"), [(3, 11, 2.0), (8, 97, 1.0), (1, 5, 4.0), (13, 13, 2.0)]
)
def test_agrees_with_the_plain_twin(kept: int, vocab: int, spread: float) -> None:
    """At every temperature, with one kept token, with all of them."""
    _, data = case(9, kept, vocab, seed=kept, spread=spread)
    p, q = shares(data)
    kl, tv = divergences_reference(data[0].detach(), *data[1:4], data[4].tolist())

    # The draft's rest is 1 - a float32 sum: where it is tiny, its log is not exact.
    torch.testing.assert_close(forward_kl(p, q).double(), kl, rtol=2e-4, atol=1e-3)
    torch.testing.assert_close(total_variation(p, q).double(), tv, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kept", [2, 16, 64])
def test_bounds_the_losses_over_the_whole_vocabulary(kept: int) -> None:
    """Less is known of a cut row, never more: KL and TV only grow when buckets are opened. Exact at temperature 1."""
    target, data = case(40, kept, 64, seed=1)
    data = (*data[:4], torch.ones(40))
    p, q = shares(data)
    full_p, full_q = target.softmax(-1), data[0].softmax(-1)
    full_kl = (full_p * (full_p / full_q).log()).sum(-1)
    full_overlap = torch.minimum(full_p, full_q).sum(-1)

    assert bool((forward_kl(p, q) <= full_kl + 1e-4).all())
    assert bool((overlap(p, q) >= full_overlap - 1e-5).all())
    if kept == 64:
        torch.testing.assert_close(forward_kl(p, q), full_kl, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(overlap(p, q), full_overlap, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.6])
def test_temperature_changes_captured_rows_as_it_changes_whole_ones(temperature: float) -> None:
    """The rest's mass at a temperature is guessed between two bounds; on a row like a language model's that is close."""
    generator = torch.Generator().manual_seed(3)
    target = -2.5 * torch.arange(1, 513).log() + 0.3 * torch.randn(20, 512, generator=generator)
    top, _ = target.topk(64, -1)
    p = target_shares(top, target.logsumexp(-1), torch.full((20,), temperature), 512)
    whole = (target / temperature).log_softmax(-1).topk(64, -1).values

    torch.testing.assert_close(p.log_kept_NM.exp().sum(-1) + p.rest_N, torch.ones(20))
    worst = (p.log_kept_NM.exp() - whole.exp()).abs().max()
    assert worst < (1e-5 if temperature == 1 else 0.02), worst
    ignored = top.sub(
        target.logsumexp(-1)[:, None]
    ).exp()  # the shares at temperature 1, as a negative control
    if temperature != 1:
        assert (ignored - whole.exp()).abs().max() > 0.05


def test_gradients_are_those_of_plain_softmax() -> None:
    """The one-pass backward against autograd through log_softmax, for every loss."""
    _, data = case(12, 6, 33, seed=5)
    draft, ids, top, sums, temperatures = data
    p = target_shares(top, sums, temperatures, 33)
    for loss in (forward_kl, total_variation, log_overlap):
        (ours,) = torch.autograd.grad(loss(p, draft_shares(draft, ids, temperatures)).sum(), draft)
        logs = F.log_softmax(draft / temperatures[:, None], -1).gather(-1, ids)
        (plain,) = torch.autograd.grad(loss(p, Shares(logs, 1 - logs.exp().sum(-1))).sum(), draft)

        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
        assert plain.abs().max() > 1e-3


def test_equal_models_have_no_loss_and_no_gradient() -> None:
    """Also at temperatures where the rest's mass is only guessed, as long as all is kept."""
    target, data = case(8, 20, 20, seed=7)
    draft = target.clone().requires_grad_()
    p, q = target_shares(*data[2:5], 20), draft_shares(draft, data[1], data[4])
    loss = forward_kl(p, q)
    (grad,) = torch.autograd.grad(loss.sum(), draft)

    assert loss.abs().max() < 1e-5
    assert overlap(p, q).min() > 1 - 1e-5
    assert grad.abs().max() < 1e-5


def test_renormalising_the_top_would_be_another_loss() -> None:
    """Negative control: without a rest bucket a draft that wastes its mass outside of the top looks perfect."""
    _, (_, ids, top, sums, ones) = case(6, 4, 50, seed=9)
    ones = torch.ones_like(ones)
    draft = torch.zeros(6, 50).scatter(-1, ids, top)  # right inside of the top, far too much outside
    p, q = target_shares(top, sums, ones, 50), draft_shares(draft, ids, ones)
    renormalised = (top.softmax(-1) * (top.log_softmax(-1) - q.log_kept_NM.log_softmax(-1))).sum(-1)

    assert renormalised.abs().max() < 1e-5
    assert forward_kl(p, q).max() > 0.05


def test_extreme_rows_stay_finite() -> None:
    """A target that is certain, a draft that is certain of something else, half-precision logits that sum to above 1."""
    draft = torch.zeros(3, 9).scatter(-1, torch.tensor([[0], [8], [1]]), 80.0).requires_grad_()
    top = torch.tensor([[60.0, 0.0], [60.0, 0.0], [5.01, 5.01]])
    sums = torch.tensor([60.0, 60.0, 5.69])
    for temperature in (0.05, 0.3, 1.0, 2.0):
        at = torch.full((3,), temperature)
        p = target_shares(top, sums, at, 9)
        for loss in (forward_kl, total_variation, log_overlap):
            value = loss(p, draft_shares(draft, torch.tensor([[0, 1]] * 3), at))
            (grad,) = torch.autograd.grad(value.sum(), draft)
            assert bool(torch.isfinite(value).all() and torch.isfinite(grad).all()), (temperature, loss)


def test_selection_keeps_what_a_reference_learnt_and_the_draft_did_not() -> None:
    """0.4 of the rows; ties in order; one row at least."""
    kl, reference = torch.rand(50, generator=torch.Generator().manual_seed(0)), torch.full((50,), 0.5)
    chosen = learnable(kl, reference)

    assert int(chosen.sum()) == 20
    assert kl[chosen].min() >= kl[~chosen].max()
    assert learnable(torch.zeros(5), torch.zeros(5)).tolist() == [True, True, False, False, False]
    assert learnable(torch.zeros(1), torch.zeros(1)).tolist() == [True]


def test_hybrid_and_weights() -> None:
    """Pure kl while far away; weights fall by e every four tokens of depth."""
    kl, tv = torch.tensor([3.0, 1.0]), torch.tensor([0.9, 0.2])

    assert torch.equal(hybrid(kl, tv, 0.5), kl)
    torch.testing.assert_close(hybrid(kl, tv, 0.99, decay=100.0), tv)
    torch.testing.assert_close(depth_weights(torch.tensor([0, 4])), torch.tensor([1.0, 0.36788]))


def test_examples() -> None:
    """The docstrings' examples."""
    found = doctest.testmod(distill_loss, extraglobs={"torch": torch})

    assert found.attempted >= 6
    assert found.failed == 0
