"""Logits in shards of the vocabulary -> the tokens that whole rows give, whatever filters, penalties and ties there are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.cluster.types import Sampling
from paceline.workers.adjust import Changes
from paceline.workers.parallel import logits as parted
from paceline.workers.parallel.logits import draws_of, merge, rank_part
from paceline.workers.parallel.shards import vocabulary
from paceline.workers.sampling import CachedNoise, DirectNoise, Sample, SamplingRows

NO_CHANGES = ([], [])
FILTERS = [
    Sampling(seed, temperature, top_k, top_p, min_p)
    for seed, (temperature, top_k, top_p, min_p) in enumerate(
        product((0.0, 0.7, 1.0), (0, 1, 5, 300), (1.0, 0.9, 0.3), (0.0, 0.1))
    )
]


def sample_of(samplings: list[Sampling], changes: tuple[list[Changes], list[int]] = NO_CHANGES) -> Sample:
    return Sample(None, SamplingRows(samplings, [40 + i for i in range(len(samplings))]), *changes)


def decide_parted(logits_RV: Tensor, sample: Sample, size: int) -> tuple[np.ndarray, np.ndarray, int]:
    """As `size` ranks and their leader do it: tokens, usable, and how many rows had to be fetched whole."""
    draws = draws_of(sample, len(logits_RV))
    mine = [vocabulary(logits_RV.shape[1], rank, size) for rank in range(size)]
    parts = [
        rank_part(logits_RV[:, ids].contiguous(), draws, CachedNoise(first_id=ids.start), ids.start)
        for ids in mine
    ]
    found = merge(parts, [ids.stop - ids.start for ids in mine], draws, sample)
    whole, usable = sample.decide(logits_RV, DirectNoise())
    found.tokens[found.undecided] = whole[found.undecided]
    found.usable[found.undecided] = usable[found.undecided]
    return found.tokens, found.usable, len(found.undecided)


def random_logits(rows: int, num_ids: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, num_ids, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("num_ids", [3, 211, 5003])
def test_every_filter_gives_the_token_of_the_whole_row(num_ids: int, size: int) -> None:
    """All combinations, greedy rows among them; vocabularies that do not divide, and shards with nothing in them."""
    sample = sample_of(FILTERS)
    for seed in range(4):
        logits = random_logits(len(FILTERS), num_ids, seed)
        wanted, usable = sample.decide(logits, DirectNoise())
        tokens, is_usable, _ = decide_parted(logits, sample, size)

        assert tokens.tolist() == wanted.tolist()
        assert is_usable.all() and usable.all()


def test_few_rows_are_fetched_and_those_that_are_must_be() -> None:
    """Where a model knows something, what was sent is enough; a flat row keeps more than that, and is found out."""
    sharp = random_logits(64, 5003, 1, scale=4.0)
    flat = random_logits(64, 5003, 2, scale=0.01)
    nucleus = sample_of([Sampling(i, 1.0, 0, 0.9) for i in range(64)])
    many = sample_of([Sampling(i, 1.0, 600) for i in range(64)])

    assert decide_parted(sharp, nucleus, 2)[2] == 0
    assert decide_parted(flat, nucleus, 2)[2] == 64
    assert decide_parted(sharp, many, 2)[2] == 64
    assert decide_parted(sharp, many, 8)[2] < 64  # 8 parts sent 2,048 of them


def test_ties_at_a_filters_boundary_are_all_kept() -> None:
    """Of equal logits none is preferred by the part it lies in; equal scores go to the lowest id."""
    logits = torch.zeros(40, 211)
    logits[:, 100:200] = 2.0
    logits[:, 7] = 5.0
    sample = sample_of([Sampling(seed, 1.0, 3) for seed in range(40)])
    wanted, _ = sample.decide(logits, DirectNoise())

    assert decide_parted(logits, sample, 2)[0].tolist() == wanted.tolist()
    assert len(set(wanted.tolist()) & set(range(100, 200))) > 5, "the tie is no tie"
    greedy = sample_of([Sampling(0, 0.0)])
    assert decide_parted(torch.zeros(1, 211), greedy, 4)[0].tolist() == [0]


def test_more_ties_than_are_sent_are_fetched() -> None:
    """A floor that equals the smallest logit that was sent may have more tokens on it."""
    logits = torch.zeros(1, 2000)

    assert decide_parted(logits, sample_of([Sampling(1, 1.0, 5)]), 2)[2] == 1


def test_rows_that_cannot_be_used_are_known_wherever_the_reason_lies() -> None:
    """NaN in any shard, all at minus infinity, plus infinity; a shard at minus infinity is no reason."""
    samplings = [Sampling(0, 0.0), Sampling(1), Sampling(2, 0.8, 20, 0.9)]
    for place in (0, 210):
        for value, is_usable in ((float("nan"), False), (float("inf"), False), (1.0, True)):
            logits = random_logits(3, 211, 3)
            logits[:, place] = value
            assert decide_parted(logits, sample_of(samplings), 2)[1].tolist() == [is_usable] * 3
    assert not decide_parted(torch.full((3, 211), -torch.inf), sample_of(samplings), 2)[1].any()
    half = random_logits(3, 211, 4)
    half[:, :108] = -torch.inf
    wanted = sample_of(samplings).decide(half, DirectNoise())[0]
    assert decide_parted(half, sample_of(samplings), 2)[0].tolist() == wanted.tolist()


def test_changed_entries_are_changed_in_the_shard_that_has_them() -> None:
    """Bias, penalties and bans near the seam of two shards, for rows of two streams."""
    ids = np.asarray([0, 107, 108, 109, 210])
    changes = [
        Changes(np.repeat(np.arange(3), 5), np.tile(ids, 3), np.linspace(-8, 9, 15), np.full(15, 1.4), minus)
        for minus in (np.linspace(0, 2, 15), np.where(np.arange(15) % 4 == 0, np.inf, 0.0))
    ]
    samplings = [Sampling(0, 0.0), Sampling(1, 0.9), Sampling(2, 1.0, 30, 0.8)] * 2
    sample = sample_of(samplings, (changes, [0, 3]))
    for seed in range(20):
        logits = random_logits(6, 211, seed, scale=1.0)
        wanted = sample.decide(logits, DirectNoise())[0]
        assert decide_parted(logits, sample, 2)[0].tolist() == wanted.tolist()


def test_noise_of_another_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a shard that draws with the ids of another one decides otherwise."""
    sample = sample_of([Sampling(seed) for seed in range(32)])
    logits = random_logits(32, 211, 5, scale=0.5)
    wanted = sample.decide(logits, DirectNoise())[0].tolist()
    monkeypatch.setattr(
        parted, "_perturbed", lambda z, draws, noise: z + DirectNoise().rows(sample.params, z.shape[1])
    )

    assert decide_parted(logits, sample, 2)[0].tolist() != wanted


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_on_gpus_decide_what_whole_rows_decide(size: int) -> None:
    """The fused kernels and what is sent of them, interpreted: plain, greedy, filtered, changed rows; an empty shard; one
    row that keeps more than is sent is named."""
    from paceline.workers.parallel import device_logits

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    samplings = [
        Sampling(1, 1.0),
        Sampling(2, 0.0),
        Sampling(3, 0.7, 20, 0.9),
        Sampling(4, 1.0, 0, 0.7, choice=2, prompt_index=1),
        Sampling(5, 1.0, 0, 0.999),
        Sampling(6, 1.2, 0, 1.0, 0.1),
    ]
    ids = np.asarray([7, 150, 3])
    changed = Changes(
        np.asarray([0, 0, 2]), ids, np.asarray([5.0, 0, 9]), np.ones(3), np.asarray([0, 1.0, 0])
    )
    num_ids = 1301 if size == 2 else 8  # the third of three shards is empty
    if num_ids < 200:
        changed = Changes(*(column[[0, 2]] for column in changed))
    sample = sample_of(samplings, ([changed], [0]))
    logits = random_logits(len(samplings), num_ids, 3)
    logits[4] *= 0.01  # flat: nearly everything is kept
    wanted, usable = sample.decide(logits, DirectNoise())
    draws = draws_of(sample, len(logits))
    shards = [vocabulary(num_ids, rank, size) for rank in range(size)]
    parts = [
        device_logits.rank_part(logits[:, s].contiguous().to(device), draws, s.start, capacity=128)
        for s in shards
    ]
    found = device_logits.merge(parts, draws, sample, device, capacity=128)

    assert found.undecided == ([4] if size == 2 else [])
    assert np.delete(found.tokens, found.undecided).tolist() == np.delete(wanted, found.undecided).tolist()
    assert found.usable[[0, 1, 2, 3, 5]].all() and usable.all()
    assert len({part.numel() for part in parts}) == 1, "a gather takes parts of one size"
