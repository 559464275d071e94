"""Logits and keys -> the token the oracle decides, whoever else is in the batch, with the right law."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from paceline.cluster.types import Sampling
from paceline.workers.sampling import CachedNoise, SamplingRows, choose, perturb

TABLE = np.array([0.42, 0.27, 0.2, 0.1, 0.01])
NUM_SEEDS = 60_000


def rows_for(samplings: list[Sampling], positions: list[int]) -> SamplingRows:
    """One row for each sampling."""
    return SamplingRows.build(samplings, [1] * len(samplings), np.asarray(positions))


def random_case(generator: np.random.Generator) -> tuple[Sampling, int]:
    """Any mixture of parameters, and a position."""
    sampling = Sampling(
        seed=int(generator.integers(0, 2**64, dtype=np.uint64)),
        temperature=float(generator.choice([0.0, 0.3, 0.8, 1.0, 1.7])),
        top_k=int(generator.choice([0, 0, 1, 5, 40, 1000])),
        top_p=float(generator.choice([1.0, 1.0, 0.95, 0.5, 1e-4])),
        min_p=float(generator.choice([0.0, 0.0, 0.05, 0.5])),
        choice=int(generator.integers(0, 5)),
        prompt_index=int(generator.integers(0, 5)),
    )
    return sampling, int(generator.integers(0, 100_000))


def as_params(sampling: Sampling) -> oracle.Params:
    """The oracle's own record of the same parameters."""
    names = ("seed", "temperature", "top_k", "top_p", "min_p", "choice", "prompt_index")
    return oracle.Params(**{name: getattr(sampling, name) for name in names})


def chi_law(decided: np.ndarray) -> float:
    """p-value of decided tokens against the table."""
    return oracle.g_test(np.bincount(decided, minlength=len(TABLE)), TABLE)


def table_rows(num: int) -> tuple[Tensor, SamplingRows]:
    """The same distribution for many seeds."""
    logits = torch.from_numpy(np.log(TABLE)).float().expand(num, -1) + 3.0  # a constant changes nothing
    return logits, rows_for([Sampling(seed=seed) for seed in range(num)], [5] * num)


@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
def test_decisions_equal_the_oracles(scale: float, record_property) -> None:  # type: ignore[no-untyped-def]
    """All kinds of rows in one batch, flat to peaked; what differs must be a near-tie, and few are."""
    generator = np.random.default_rng(int(scale * 10))
    cases = [random_case(generator) for _ in range(250)]
    logits = (generator.standard_normal((len(cases), 97)) * scale).astype(np.float32)
    decided, usable = choose(torch.from_numpy(logits), rows_for(*map(list, zip(*cases, strict=True))))  # type: ignore[arg-type]
    near_ties = 0
    for row, (sampling, position) in enumerate(cases):
        expected, gap = oracle.decide(logits[row], as_params(sampling), position)
        if decided[row] != expected:
            near = oracle.is_near_tie(int(decided[row]), logits[row], as_params(sampling), position)
            assert near, f"row {row} {sampling}: {decided[row]}, the oracle says {expected}, gap {gap:.1e}"
            near_ties += 1
    record_property("near_ties", near_ties)

    assert usable.all()
    assert near_ties <= 1


def test_a_position_one_off_gives_another_text() -> None:
    """Negative control: noise read at the neighbouring position keeps the law and breaks the promise."""
    generator = np.random.default_rng(9)
    cases = [(Sampling(seed), seed % 7) for seed in range(100)]
    logits = generator.standard_normal((100, 97)).astype(np.float32)
    decided, _ = choose(torch.from_numpy(logits), rows_for([c[0] for c in cases], [c[1] + 1 for c in cases]))
    expected = [
        oracle.decide(logits[i], as_params(sampling), at)[0] for i, (sampling, at) in enumerate(cases)
    ]

    assert np.mean(decided != expected) > 0.8


def test_a_row_without_a_usable_number_is_flagged_alone() -> None:
    """NaN, all minus infinity and plus infinity, greedy and sampled; their neighbours are decided as ever."""
    clean = torch.randn(8, 31, generator=torch.Generator().manual_seed(1))
    broken = clean.clone()
    broken[1, 3] = torch.nan
    broken[3] = torch.nan
    broken[4] = -torch.inf
    broken[6, 2] = torch.inf
    how = [Sampling(1, 0.0), Sampling(2, 1.0), Sampling(3, 0.8, 5), Sampling(4, 1.0, 0, 0.9)] * 2
    how[4] = Sampling(5, 1.0, 4, 0.5, 0.1)
    expected, _ = choose(clean, rows_for(how, list(range(8))))
    decided, usable = choose(broken, rows_for(how, list(range(8))))
    fine = [0, 2, 5, 7]

    assert usable.tolist() == [row in fine for row in range(8)]
    assert decided[fine].tolist() == expected[fine].tolist()


def test_a_nan_in_an_all_greedy_batch_is_flagged() -> None:
    """The path without noise looks too."""
    logits = torch.zeros(3, 9)
    logits[1, 8] = torch.nan
    _, usable = choose(logits, rows_for([Sampling(0, 0.0)] * 3, [1, 2, 3]))

    assert usable.tolist() == [True, False, True]


@given(st.integers(0, 1 << 20))
@settings(max_examples=40, deadline=None)
def test_one_pass_decides_what_noise_and_argmax_do(seed: int) -> None:
    """Greedy and sampled rows of one batch, siblings among them, ties, infinities and NaN: the same bits."""
    generator = np.random.default_rng(seed)
    num, num_ids = int(generator.integers(1, 9)), int(generator.integers(2, 300))
    logits = (
        (generator.normal(size=(num, num_ids)) * 4).round(int(generator.integers(0, 4))).astype(np.float32)
    )
    for row in range(num):
        if generator.random() < 0.2:
            logits[row, generator.integers(0, num_ids)] = generator.choice([np.nan, np.inf, -np.inf])
    samplings = [
        Sampling(int(generator.integers(0, 3)), float(generator.choice([0.0, 0.3, 1.0, 1.7])))
        for _ in range(num)
    ]
    rows = rows_for(samplings, generator.integers(0, 5, num).tolist())
    ids, usable = choose(torch.from_numpy(logits), rows, CachedNoise())
    plain_ids, plain_usable = choose(torch.from_numpy(logits), rows, CachedNoise(), fused=False)

    assert np.array_equal(usable, plain_usable)
    assert np.array_equal(ids[usable], plain_ids[usable])


@pytest.mark.parametrize("num_ids", [2, 17, 211, 5000, 150_001])
@pytest.mark.parametrize("mixed", [False, True])
def test_greedy_ties_take_the_lowest_id(num_ids: int, mixed: bool) -> None:
    """With or without a sampled row in the batch, wherever the ties stand."""
    logits = torch.full((4, num_ids), -1.0)
    lowest = [0, num_ids // 2, num_ids - 1, 0]
    for row, first in enumerate(lowest):
        logits[row, first :: max(1, num_ids // 5)] = 2.0
    how = [Sampling(0, 0.0)] * 4 + ([Sampling(1)] if mixed else [])
    decided, _ = choose(
        torch.cat([logits, torch.zeros(1, num_ids)]) if mixed else logits, rows_for(how, [1] * len(how))
    )

    assert decided[:4].tolist() == lowest


def test_the_law_over_seeds_is_the_distribution() -> None:
    """60k seeds on five tokens: G-test against the exact probabilities."""
    decided, _ = choose(*table_rows(NUM_SEEDS))

    assert chi_law(decided) > 1e-4


@pytest.mark.parametrize("key", ["positions", "choices", "prompts"])
def test_the_law_holds_over_every_part_of_the_key(key: str) -> None:
    """One seed, 60k positions, choices or prompts: as good as 60k seeds."""
    logits, _ = table_rows(NUM_SEEDS)
    values = range(NUM_SEEDS)
    samplings = [
        Sampling(77, choice=i if key == "choices" else 0, prompt_index=i if key == "prompts" else 0)
        for i in values
    ]
    decided, _ = choose(logits, rows_for(samplings, list(values) if key == "positions" else [3] * NUM_SEEDS))

    assert chi_law(decided) > 1e-4


@pytest.mark.parametrize("bias", ["weaker noise", "a temperature of 1.03", "a dropped tail"])
def test_a_biased_sampler_fails_the_law(bias: str) -> None:
    """Power check: small mistakes are found by the same test."""
    logits, rows = table_rows(NUM_SEEDS)
    noise = perturb(torch.zeros_like(logits), rows)
    biased = {
        "weaker noise": logits + 0.96 * noise,
        "a temperature of 1.03": logits / 1.03 + noise,
        "a dropped tail": torch.where(torch.arange(5) == 4, -torch.inf, logits) + noise,
    }[bias]

    assert chi_law(biased.argmax(-1).numpy()) < 1e-4


def test_filtered_law_is_the_renormalised_distribution() -> None:
    """Top-k 3 at temperature 0.5: squares of the three largest, renormalised."""
    logits, _ = table_rows(NUM_SEEDS)
    rows = rows_for([Sampling(seed, 0.5, 3) for seed in range(NUM_SEEDS)], [5] * NUM_SEEDS)
    decided, _ = choose(logits, rows)
    probs = np.where(np.arange(5) < 3, TABLE**2, 0)

    assert oracle.g_test(np.bincount(decided, minlength=5), probs / probs.sum()) > 1e-4


def test_a_token_does_not_depend_on_the_rows_beside_it() -> None:
    """Each row alone, all together, and in another order: the same tokens and the same scores, bit for bit."""
    generator = np.random.default_rng(3)
    cases = [random_case(generator) for _ in range(24)]
    samplings, positions = map(list, zip(*cases, strict=True))
    logits = torch.from_numpy(generator.standard_normal((24, 97)).astype(np.float32) * 3)
    together = perturb(logits, rows_for(samplings, positions))
    order = generator.permutation(24)
    shuffled = perturb(logits[order], rows_for([samplings[i] for i in order], [positions[i] for i in order]))

    assert torch.equal(shuffled, together[order])
    for row in range(24):
        alone = perturb(logits[row : row + 1], rows_for([samplings[row]], [positions[row]]))
        assert torch.equal(alone[0], together[row])


def test_siblings_share_their_noise() -> None:
    """Nodes at one depth decide the same position: equal logits give equal tokens."""
    rows = SamplingRows.build([Sampling(5), Sampling(6)], [3, 2], np.array([9, 10, 10, 9, 10]))
    scores = perturb(torch.zeros(5, 50), rows)

    assert torch.equal(scores[1], scores[2])
    assert not torch.equal(scores[0], scores[1]) and not torch.equal(scores[0], scores[3])
    assert [seed for seed, *_ in rows.keys] == [5, 5, 5, 6, 6]


def test_seeds_use_all_64_bits() -> None:
    """The largest unsigned seed is a seed like any other."""
    rows = rows_for([Sampling(2**64 - 1), Sampling(2**63), Sampling(2**63 - 1)], [1, 1, 1])
    logits = np.zeros((3, 97), np.float32)
    decided, _ = choose(torch.from_numpy(logits), rows)
    expected = [oracle.decide(logits[0], oracle.Params(s, 1.0), 1)[0] for s in (2**64 - 1, 2**63, 2**63 - 1)]

    assert decided.tolist() == expected
