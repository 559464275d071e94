"""Reports of streams -> what an answer says of its drafts, in the words and with the sums that benchmarks check."""

from __future__ import annotations

from paceline.cluster.gateway.replies import Speculation, metrics, usage
from paceline.cluster.gateway.streams import StreamReport
from paceline.cluster.types import SOURCE_DRAFT, SOURCE_SUFFIX, SOURCE_TARGET


def report(*steps: tuple[tuple[int, ...], int]) -> StreamReport:
    """Of steps, each with its tokens' sources and how many were drafted."""
    found = StreamReport()
    for sources, num_drafted in steps:
        found.count_step(bytes(sources), num_drafted)
    return found


MIXED = report(
    ((SOURCE_DRAFT, SOURCE_DRAFT, SOURCE_TARGET), 5),
    ((SOURCE_SUFFIX, SOURCE_TARGET), 4),
    ((SOURCE_TARGET,), 0),
    ((SOURCE_TARGET,), 3),
)


def test_drafts_are_told_as_vllm_tells_them() -> None:
    """Steps without a draft are none of speculation; whoever drafted, what was accepted is accepted."""
    said = metrics([MIXED])

    assert said.speculative_decoding == Speculation(
        num_spec_steps=3,
        num_draft_tokens=12,
        num_accepted_draft_tokens=3,
        draft_acceptance_rate=0.25,
        mean_acceptance_length=2.0,
        acceptance_histogram=[1, 1, 1],
    )
    assert said.num_steps == 4 and said.tokens_by_source == {"target": 4, "draft": 2, "suffix": 1}
    details = usage(5, 7, [MIXED]).completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 9)  # type: ignore[union-attr]


def test_choices_are_added_up() -> None:
    """The histogram's sums are the totals, whatever the longest run of each choice was."""
    found = metrics([MIXED, report(((SOURCE_DRAFT,) * 4, 4)), report()]).speculative_decoding

    assert found.acceptance_histogram == [1, 1, 1, 0, 1]
    assert sum(found.acceptance_histogram) == found.num_spec_steps == 4
    accepted = sum(num * steps for num, steps in enumerate(found.acceptance_histogram))
    assert accepted == found.num_accepted_draft_tokens == 7 <= found.num_draft_tokens == 16


def test_a_text_without_drafts_has_none_accepted() -> None:
    found = metrics([report(((SOURCE_TARGET,), 0))]).speculative_decoding

    assert (found.num_spec_steps, found.draft_acceptance_rate, found.mean_acceptance_length) == (0, 0.0, 1.0)
    assert found.acceptance_histogram == [0]
