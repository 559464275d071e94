"""Prompts that begin alike -> the worker that was sent the first; nothing about tokens of other salts."""

from __future__ import annotations

import random

import pytest

from paceline.cluster.prefixes import MARK_BYTES, MAX_MARKS, PrefixIndex, prefix_marks


def common(a: bytes, b: bytes) -> int:
    """Leading marks that two prompts share."""
    num = 0
    while (
        num < min(len(a), len(b)) // MARK_BYTES and a[: (num + 1) * MARK_BYTES] == b[: (num + 1) * MARK_BYTES]
    ):
        num += 1
    return num


@pytest.mark.parametrize(
    "num_tokens, num_marks", [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (10**5, MAX_MARKS)]
)
def test_only_full_blocks_before_the_last_token_have_marks(num_tokens: int, num_marks: int) -> None:
    """The last token has to be computed anyway; a very long prompt has marks for its beginning."""
    assert len(prefix_marks([7] * num_tokens, 16, "")) == num_marks * MARK_BYTES


def test_marks_agree_as_far_as_the_tokens_and_not_across_salts() -> None:
    """A change in one block changes its mark and all behind it."""
    one = list(range(100))
    other = [*one[:40], 999, *one[41:]]

    assert common(prefix_marks(one, 16, "t"), prefix_marks(other, 16, "t")) == 2
    assert common(prefix_marks(one, 16, "t"), prefix_marks(one, 16, "u")) == 0
    assert prefix_marks(one, 16, "t") == prefix_marks([*one, 5], 16, "t")


def test_the_index_knows_what_a_cache_of_that_size_would_hold() -> None:
    """Against a plain list of the prompts sent, over random ones: hits are the longest common beginning, never more."""
    rng = random.Random(0)
    index, sent = PrefixIndex(), []
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 90))]
        marks = prefix_marks(tokens, 4, "")
        assert index.num_hit(1, marks) == max((common(marks, old) for old in sent), default=0)
        index.note(1, marks, 10**6)
        sent.append(marks)

    assert index.num_hit(2, sent[-1]) == 0
    index.drop(1)
    assert index.num_hit(1, sent[-1]) == 0


def test_the_oldest_are_forgotten_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    """No more marks are kept than the worker has blocks; what is kept is never without what it stands on."""
    index = PrefixIndex()
    first, second = (prefix_marks([seed, *range(100)], 10, "") for seed in (1, 2))
    index.note(1, first, 14)
    index.note(1, second, 14)

    assert index.num_hit(1, second) == 10
    assert index.num_hit(1, first) == 4
