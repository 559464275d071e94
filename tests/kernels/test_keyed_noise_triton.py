"""Triton's noise -> the words of the CPU bit for bit, and its noise to a millionth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl

from paceline.kernels import keyed_noise_reference as reference
from paceline.kernels.keyed_noise_triton import gumbel_of, gumbel_vocabulary

# The naive formula, interpreted.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOP = 2**32 - 1


@triton.jit
def naive(words):  # type: ignore[no-untyped-def]
    """What most code does: -log(-log(1 - u)) in float32."""
    return -tl.log(-tl.log(1.0 - (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10))


@triton.jit
def _apply(words, exact, rounded, num, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    word = tl.load(words + i, mask=i < num, other=1).to(tl.uint32, bitcast=True)
    tl.store(exact + i, gumbel_of(word), mask=i < num)
    tl.store(rounded + i, naive(word), mask=i < num)


def noise_of(words: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's noise of some words, and the naive formula's."""
    bits = torch.where(words > 2**31 - 1, words - 2**32, words).to(torch.int32).to(DEVICE)
    exact, rounded = (torch.empty(len(words), device=DEVICE) for _ in range(2))
    _apply[(1,)](bits, exact, rounded, len(words), BLOCK=triton.next_power_of_2(len(words)))
    return exact.cpu(), rounded.cpu()


@pytest.mark.parametrize(("num_ids", "first_id"), [(1, 0), (1030, 0), (2049, 8)])
def test_words_are_those_of_the_cpu(num_ids: int, first_id: int) -> None:
    """Whole keys: seeds of 64 bits, positions, choices and prompts of 32; shards from any multiple of four."""
    generator = torch.Generator().manual_seed(num_ids)
    keys = [torch.randint(-(2**63), 2**63 - 1, (3,), generator=generator)]
    keys += [torch.randint(0, 2**32, (3,), generator=generator) for _ in range(3)]
    on_device = [key.to(DEVICE) for key in keys]
    words = gumbel_vocabulary(*on_device, num_ids, first_id, as_words=True).cpu().long() & TOP
    noise = gumbel_vocabulary(*on_device, num_ids, first_id).cpu()
    groups = first_id // 4 + torch.arange((num_ids + 3) // 4)
    counter = (groups[None], *(key[:, None] for key in keys[1:]))
    expected = torch.stack(reference.philox4x32(counter, reference._key(keys[0])), -1).reshape(3, -1)

    assert torch.equal(words, expected[:, :num_ids])
    assert torch.allclose(noise, reference.noise_from_words(words), rtol=1e-6, atol=1e-6)


def test_noise_keeps_its_precision_where_the_naive_formula_has_none() -> None:
    """Around every seam of the formula, and where it decides: small words. Negative control: the naive one is infinite."""
    seams = [2**27, 2**31, 2**32 // 100]
    words = torch.tensor(
        [*range(64), *(s + d for s in seams for d in range(-32, 32)), *range(TOP - 64, TOP + 1)]
    )
    noise, rounded = noise_of(words)
    exact = reference.noise_from_words(words)

    assert torch.allclose(noise, exact, rtol=2e-7, atol=5e-7)
    assert not torch.isfinite(rounded[:64]).all()
    assert (rounded[64:] - exact[64:]).abs().max() > 1e-6


def test_no_noise_is_above_what_the_scan_takes_for_the_largest() -> None:
    """`verify` leaves tiles alone that are further below the best."""
    assert noise_of(torch.tensor([0]))[0].item() < 22.9
