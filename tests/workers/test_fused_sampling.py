"""Parameters, changes and trees of a step -> what the kernels take; they decide what the engine's own sampling decides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.cluster.speculation import Tree
from paceline.cluster.types import Sampling
from paceline.workers import fused_sampling
from paceline.workers.adjust import Changes, apply_changes
from paceline.workers.sampling import SamplingRows, choose
from paceline.workers.verifiers.match import match

CPU = torch.device("cpu")
SAMPLINGS = [
    Sampling(temperature=0.0, seed=1),
    Sampling(temperature=0.7, seed=2**64 - 3, choice=2, prompt_index=1),
    Sampling(temperature=1.0, seed=9, top_k=7, top_p=0.9),
    Sampling(temperature=1.3, seed=10, min_p=0.05),
]
POSITIONS = [3, 2**31 + 5, 17, 4]


def logits_of(num: int, vocab: int = 300) -> torch.Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(0)) * 3


def changes_of(num: int) -> Changes:
    """Entries of rows in no order."""
    draw = np.random.default_rng(0)
    rows = draw.permutation(np.repeat(np.arange(num), 20))
    ids = np.concatenate([draw.permutation(300)[: len(rows)]])
    return Changes(
        rows, ids, draw.normal(size=len(rows)) * 5, np.full(len(rows), 1.3), draw.random(len(rows)) * 3
    )


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_rows_decide_what_sampling_decides(backend: str, is_changed: bool) -> None:
    """Greedy, sampled and filtered rows with large seeds and positions; bias and penalties in any order."""
    from paceline.kernels.verify import decide_rows

    if backend == "triton":
        pytest.importorskip("triton")
    logits, changes = logits_of(4), changes_of(4) if is_changed else None
    rows = fused_sampling.rows_on(SAMPLINGS, POSITIONS, CPU, changes)
    ids, usable = decide_rows(logits, rows, backend=backend)  # type: ignore[arg-type]
    adjusted = logits if changes is None else apply_changes(logits, [changes], [0])
    expected, expected_usable = choose(adjusted, SamplingRows(SAMPLINGS, POSITIONS))

    assert rows.is_filtered
    assert ids.tolist() == expected.tolist() and usable.tolist() == expected_usable.tolist()


def test_the_choice_of_a_device_has_the_engine_s_form() -> None:
    """Ids int64 and flags, in the host's memory."""
    ids, usable = fused_sampling.choose(logits_of(4), SAMPLINGS, POSITIONS)
    expected, _ = choose(logits_of(4), SamplingRows(SAMPLINGS, POSITIONS))

    assert ids.dtype == np.int64 and usable.dtype == np.bool_
    assert ids.tolist() == expected.tolist() and usable.all()


def test_trees_of_several_streams_are_walked_as_match_walks_them() -> None:
    """A root alone, a chain, siblings."""
    from paceline.kernels.verify import verify
    from paceline.kernels.verify_reference import greedy_rows

    trees = [
        Tree.build(5, [], []),
        Tree.build(5, [7, 8], [-1, 0]),
        Tree.build(5, [7, 8, 9], [-1, -1, 1]),
    ]
    logits = torch.nn.functional.one_hot(torch.tensor([3, 7, 1, 2, 8, 0, 9, 4]), 12).float()
    packed = fused_sampling.trees_on(trees, CPU)
    verdict = verify(logits, greedy_rows(8), packed, backend="reference")

    assert (packed.max_nodes, packed.max_depth) == (4, 3)
    first = 0
    for stream, tree in enumerate(trees):
        expected = match(tree, verdict.decided_N[first : first + len(tree)].numpy())
        num = int(verdict.num_S[stream])
        assert verdict.rows_SD[stream, :num].tolist() == [first, *(first + n for n in expected.path)]
        assert int(verdict.tokens_SD[stream, num - 1]) == expected.emitted
        first += len(tree)
