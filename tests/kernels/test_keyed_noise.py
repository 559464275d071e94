"""Keyed noise -> published Philox words, the oracle's float64 noise, and the Gumbel law."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from paceline.kernels.keyed_noise import gumbel, gumbel_vocabulary
from paceline.kernels.keyed_noise_reference import noise_from_words, philox4x32

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, words.
PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
TOP = 2**32 - 1
VOCAB = 150_000


def words(text: str) -> list[int]:
    """Hexadecimal words, as the vectors are published."""
    return [int(word, 16) for word in text.split()]


def keys(seed: int, position: int, choice: int = 0, prompt: int = 0) -> tuple[Tensor, ...]:
    """One row's key as the kernel takes it; the seed is unsigned 64 bit."""
    signed = seed - 2**64 if seed >= 2**63 else seed
    return tuple(torch.tensor([value]) for value in (signed, position, choice, prompt))


def exact(word: int) -> float:
    """The documented formula in float64."""
    return -math.log(-math.log1p(-(word + 0.5) * 2.0**-32))


def naive(word: Tensor) -> Tensor:
    """What most code does, in float32: -log(-log(u))."""
    u = ((word.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32)
    return -torch.log(-torch.log(u))


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_philox_words_equal_the_published_vectors(counter: str, key: str, expected: str) -> None:
    """Both the kernel's and the oracle's integers are the published ones."""
    c, k = words(counter), words(key)
    ours = philox4x32(tuple(torch.tensor([w]) for w in c), (torch.tensor([k[0]]), torch.tensor([k[1]])))

    assert [int(word) for word in ours] == words(expected)
    assert oracle.philox(c, k) == words(expected)


@pytest.mark.parametrize("num_ids", [1, 2, 3, 4, 5, 211, 1030])
def test_the_vocabulary_form_equals_the_general_form_bit_for_bit(num_ids: int) -> None:
    """Sharing counters between four ids changes nothing."""
    generator = torch.Generator().manual_seed(num_ids)
    seeds = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator)
    positions, choices, prompts = (torch.randint(0, 2**32, (5,), generator=generator) for _ in range(3))
    whole = gumbel_vocabulary(seeds, positions, choices, prompts, num_ids)
    single = gumbel(seeds, positions, choices, prompts, torch.arange(num_ids))
    plain = gumbel_vocabulary(seeds, positions, choices, prompts, num_ids, backend="reference")

    assert torch.equal(plain.view(torch.int32), whole.view(torch.int32))
    assert whole.dtype == torch.float32 and whole.shape == (5, num_ids)
    assert torch.equal(whole.view(torch.int32), single.view(torch.int32))


@pytest.mark.parametrize("split", [1, 2, 3, 4, 77, 210])
def test_vocabulary_shards_agree_with_the_whole(split: int) -> None:
    """Noise is counted by global id: ids 0..k and k..V computed apart are the whole."""
    key = keys(2**64 - 3, 17, 2, 1)
    whole = gumbel_vocabulary(*key, 211)
    parts = [gumbel(*key, torch.arange(split)), gumbel(*key, torch.arange(split, 211))]

    assert torch.equal(torch.cat(parts, dim=1), whole)
    if split % 4 == 0:
        for backend in ("jit", "reference"):
            part = gumbel_vocabulary(*key, 211 - split, first_id=split, backend=backend)
            assert torch.equal(part, whole[:, split:])


def test_noise_agrees_with_the_oracle() -> None:
    """All four key parts, seeds above 2^63 and large ids: within float32 rounding of the oracle's float64."""
    generator = np.random.default_rng(5)
    worst = 0.0
    for _ in range(40):
        seed = int(generator.integers(0, 2**64, dtype=np.uint64))
        position, choice, prompt = (int(v) for v in generator.integers(0, 2**32, 3))
        ids = generator.integers(0, 2**33, 50)
        ours = gumbel(*keys(seed, position, choice, prompt), torch.from_numpy(ids))[0]
        params = oracle.Params(seed, choice=choice, prompt_index=prompt)
        for value, token in zip(ours.tolist(), ids.tolist(), strict=True):
            expected = oracle.gumbel(params, position, token)
            worst = max(worst, abs(value - expected) / max(1.0, abs(expected)))

    assert worst < 1e-6


def test_noise_is_finite_and_right_at_the_extreme_words() -> None:
    """Where u rounds to 0 or 1 in float32 the noise is still the exact one."""
    low = [0, 1, 2, 255]
    high = [TOP - 3000, TOP - 128, TOP - 127, TOP - 1, TOP]  # the last 128 words are 1.0 in float32
    noise = noise_from_words(torch.tensor(low + high))

    assert torch.isfinite(noise).all()
    assert noise.tolist() == pytest.approx([exact(word) for word in low + high], rel=1e-6)
    assert noise.argmax() == 0 and noise.argmin() == len(low + high) - 1


def test_noise_falls_as_the_word_grows() -> None:
    """The transform is monotone: no word jumps over another."""
    around = [0, 2**8, 2**16, 2**24, 2**31, TOP - 2**16, TOP - 2**8 + 1]
    for start in around:
        noise = noise_from_words(torch.arange(start, min(start + 256, TOP + 1)))

        assert (noise.diff() <= 0).all()


def test_a_million_draws_follow_the_gumbel_law() -> None:
    """Mean, variance and the Kolmogorov-Smirnov distance, over ten keys of 100k ids."""
    rows = torch.arange(10)
    draws = gumbel_vocabulary(rows * 7919, rows, rows % 2, rows % 3, 100_000).flatten().double()
    n = len(draws)
    cdf = torch.exp(-torch.exp(-draws.sort().values))
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = torch.maximum((cdf - steps[:-1]).max(), (steps[1:] - cdf).max())

    assert abs(float(draws.mean()) - 0.5772156649) < 5 * math.pi / math.sqrt(6 * n)
    assert abs(float(draws.var()) - math.pi**2 / 6) < 5 * math.sqrt(4.4 / n) * math.pi**2 / 6
    assert float(distance) < 2.23 / math.sqrt(n)  # p = 1e-4


def test_the_largest_of_150k_draws_is_fine_grained_where_the_naive_formula_is_not() -> None:
    """Negative control. The naive form decides the argmax at u near 1, on a grid of 6e-8, and can be infinite."""
    generator = np.random.default_rng(11)
    smallest, largest = [], []
    for _ in range(1000):
        row = generator.integers(0, 2**32, VOCAB, dtype=np.uint32)
        smallest.append(int(row.min()))
        largest.append(int(row.max()))
    ours = noise_from_words(torch.tensor(smallest))
    theirs = naive(torch.tensor(largest))
    words_apart = len(set(smallest))

    assert len(torch.unique(ours)) == words_apart > 950  # nothing is lost
    assert len(torch.unique(theirs)) < 500  # more than half the maxima collide with another
    assert not torch.isfinite(naive(torch.tensor([TOP]))).any()
    # The maximum of V draws is Gumbel shifted by log V: ours has that law.
    shifted = (ours.double() - math.log(VOCAB)).sort().values
    cdf = torch.exp(-torch.exp(-shifted))
    assert float((cdf - torch.arange(1000) / 1000).abs().max()) < 2.23 / math.sqrt(1000)


def test_each_part_of_the_key_changes_all_of_the_noise() -> None:
    """Seed (both halves), position, choice and prompt each give an unrelated row."""
    base = (12345, 7, 0, 0)
    others = [
        (12346, 7, 0, 0),
        (12345 + 2**32, 7, 0, 0),
        (12345, 8, 0, 0),
        (12345, 7, 1, 0),
        (12345, 7, 0, 1),
        (12345, 0, 7, 0),
    ]
    rows = torch.stack([gumbel_vocabulary(*keys(*key), 4096)[0] for key in (base, *others)])
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))

    assert float(correlation.abs().max()) < 0.08  # five standard errors
    assert all((rows[0] == row).float().mean() < 0.01 for row in rows[1:])


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    """Noise is a pure function of its key: batched and alone are the same bits."""
    many = torch.arange(9)
    batch = gumbel_vocabulary(many, many * 3, many % 2, many % 4, 211)
    alone = torch.cat([gumbel_vocabulary(*keys(row, row * 3, row % 2, row % 4), 211) for row in range(9)])

    assert torch.equal(batch, alone)


def test_a_key_of_the_wrong_type_is_refused() -> None:
    """int32 positions would wrap silently in the Philox multiplication."""
    good = torch.zeros(2, dtype=torch.int64)

    with pytest.raises(AssertionError, match="positions_R must be int64"):
        gumbel(good, good.int(), good, good, torch.arange(4))
