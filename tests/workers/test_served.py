"""Emissions -> figures of each stream: what of the draft model's proposals met the text, and how far it was right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree, depths_met
from paceline.cluster.types import SOURCE_DRAFT, SOURCE_SUFFIX, Request, Sampling
from paceline.workers.drafters.base import Drafter
from paceline.workers.drafters.fused import FusedDrafter
from paceline.workers.engine import Emission, Engine
from paceline.workers.model_runner import ModelRunner
from paceline.workers.served import ServedBook, StreamFigures

LENGTH = 40
REQUEST = Request("a-0-0", (5, 9, 7), Sampling(3), LENGTH, tenant="acme", domain="notes")


def stream() -> Stream:
    return Stream(REQUEST, 0, np.zeros(64, np.int32), 3, 3, 0)


def emission(tokens: Sequence[int], tested: int, right: int, version: str = "") -> Emission:
    return Emission(
        stream(), 0, tuple(tokens), b"", 0, draft_version=version, num_tested=tested, num_right=right
    )


def test_only_the_source_asked_for_counts() -> None:
    """A place that another source filled says nothing; a wrong one behind a right one does."""
    tree = Tree.build(5, [7, 8, 9], [-1, 0, 1])
    tree.sources[2] = SOURCE_SUFFIX

    assert depths_met(tree, [7, 8, 9, 4], SOURCE_DRAFT) == (1, 1)
    assert depths_met(tree, [1], SOURCE_DRAFT) == (1, 0)
    assert depths_met(tree, [1], SOURCE_SUFFIX) == (0, 0)
    assert depths_met(Tree.root_only(5), [1], SOURCE_DRAFT) == (0, 0)


def test_figures_add_up_by_depth() -> None:
    """A and A + R by depth, the version that drafted last, the longest gap."""
    figures = StreamFigures()
    for at, one in (
        (10.0, emission([1], 0, 0)),
        (10.5, emission([], 0, 0)),
        (12.0, emission([1, 2, 3], 3, 2, "v1")),
        (12.5, emission([1], 1, 0, "v2")),
        (13.0, emission([1, 2], 1, 1)),
    ):
        figures.add(one, at)
    told = figures.summary(stream())

    assert (told.request_id, told.tenant, told.domain, told.draft_version) == ("a-0-0", "acme", "notes", "v2")
    assert (told.num_tokens, told.num_steps) == (7, 4)
    assert (told.tested, told.accepted) == ((3, 1, 1), (2, 1, 0))
    assert (told.seconds, told.max_gap_s, told.temperature) == (3.0, 2.0, 1.0)


def test_a_report_is_bounded_and_says_what_it_left_out() -> None:
    """Each stream once; nothing to say is no report."""
    book = ServedBook(max_items=3)
    assert book.take("decode-1") == []
    figures = StreamFigures()
    figures.add(emission([1], 0, 0), 1.0)
    for _ in range(5):
        book.add(figures.summary(stream()))
    [report] = book.take("decode-1")

    assert (report.worker_id, len(report.items), report.num_left_out) == ("decode-1", 3, 2)
    assert book.take("decode-1") == []


class Proposes(Drafter):
    """A chain of the text to come, or of what is surely wrong."""

    def __init__(
        self, name: str, source: int, text: list[int], num: int, wrong_at: int = -1, score: float = 0.9
    ) -> None:
        self.name, self.source = name, source
        self._text, self._num, self._wrong_at, self._score = text, num, wrong_at, score

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        return [self._tree(one) for one in streams]

    def _tree(self, one: Stream) -> Tree | None:
        chain = self._text[one.num_output : one.num_output + self._num]
        chain = [token + (at == self._wrong_at) for at, token in enumerate(chain)]
        root = int(one.token_ids[-1])
        parents = range(-1, len(chain) - 1)
        return (
            Tree.build(root, chain, list(parents), self.source, [self._score] * len(chain)) if chain else None
        )


@pytest.mark.parametrize("score", [0.5, 0.95])
def test_a_draft_that_another_source_agrees_with_is_not_counted_as_wrong(
    score: float, make_runner: Callable[..., ModelRunner]
) -> None:
    """Merged, a node carries the name of whoever was surer of it. The draft's own tree tells what it proposed."""
    runner = make_runner("llama", num_blocks=100)
    [text] = Engine(runner, token_budget=64, max_streams=2).run([REQUEST]).values()
    fused = FusedDrafter(
        [
            Proposes("suffix", SOURCE_SUFFIX, text, 4, score=score),
            Proposes("draft", SOURCE_DRAFT, text, 3, wrong_at=2, score=0.7),
        ]
    )
    engine = Engine(runner, token_budget=64, max_streams=2, drafter=fused, compares_drafts=True)
    figures = StreamFigures()
    added = engine.add(REQUEST)
    while engine.has_work:
        for one in engine.step().emissions:
            figures.add(one, 0.0)
    told = figures.summary(added)

    full = told.num_tokens // 5  # the suffix is right to its end: five tokens a step
    assert told.num_tokens == LENGTH
    assert told.accepted[:2] == told.tested[:2] and told.accepted[0] >= full - 1
    assert told.accepted[2] == 0 and told.tested[2] >= full - 1
