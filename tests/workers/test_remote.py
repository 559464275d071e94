"""Replies of a draft worker -> trees, or nothing: late, unknown and malformed ones cost no more than a draft."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.cluster.config import SpeculationConfig
from paceline.cluster.metrics import Metrics
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import prefix_hash
from paceline.cluster.types import DraftAsk, Drafts, DraftTree, Request, Sampling, WorkerInfo
from paceline.workers.drafters.remote import RemoteDrafter

WORKER = WorkerInfo("draft-0", "draft", 5, "127.0.0.1", 1, 1, "here", "ready")


class Wire:
    """A connection that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[DraftAsk] = []

    def send_threadsafe(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture
def ready() -> tuple[RemoteDrafter, Wire, Stream]:
    """A drafter whose worker is connected, and a stream that was opened there."""
    wire = Wire()
    drafter = RemoteDrafter(SpeculationConfig(max_wait_ms=5), Metrics(), 100, lambda worker: None)
    stream = Stream(Request("r", (1, 2, 3), Sampling(0), 50), 0, np.zeros(60, np.int32), 3, 3, 0)
    stream.buffer[:3] = (1, 2, 3)
    drafter.route(stream.key, WORKER)
    drafter.open(stream)
    drafter.connected(WORKER, wire)  # type: ignore[arg-type]
    drafter.observe([stream])
    return drafter, wire, stream


def answer(stream: Stream, **changes: Any) -> Drafts:
    fields = {
        "request_id": stream.key,
        "base_len": stream.num_tokens,
        "prefix_hash": prefix_hash(stream.token_ids),
        "tokens": (7, 8),
        "parents": (-1, 0),
        "scores": (0.5, 0.5),
    }
    return Drafts(1, "v1", (DraftTree(**{**fields, **changes}),))


def test_a_timely_answer_is_a_tree_behind_the_last_token(ready: tuple[RemoteDrafter, Wire, Stream]) -> None:
    """The root is the pending token; the version is remembered."""
    drafter, wire, stream = ready
    drafter.deliver(5, answer(stream))
    (tree,) = drafter.propose([stream])

    assert wire.sent[0].opens[0].token_ids == (1, 2, 3)
    assert tree is not None and tree.tokens.tolist() == [3, 7, 8]
    assert drafter.version(stream) == "v1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_len": 2},
        {"prefix_hash": 1},
        {"tokens": (7, 100)},
        {"parents": (-1, 1)},
        {"scores": (0.5,)},
        {"scores": (0.5, float("nan"))},
    ],
)
def test_a_late_or_malformed_answer_is_no_draft(
    ready: tuple[RemoteDrafter, Wire, Stream], wrong: dict[str, Any]
) -> None:
    """Nothing a draft worker sends can do more than not help."""
    drafter, _, stream = ready
    drafter.deliver(5, answer(stream, **wrong))

    assert drafter.propose([stream]) == [None]


def test_a_stream_that_a_draft_worker_cannot_hold_is_given_up(
    ready: tuple[RemoteDrafter, Wire, Stream],
) -> None:
    """It is opened again twice, with all its tokens, and then left alone."""
    drafter, wire, stream = ready
    for token in range(10, 20):
        drafter.deliver(5, Drafts(len(wire.sent), "v1", (), (stream.key,)))
        drafter.propose([stream])
        stream.append([token])
        drafter.observe([stream])

    assert [len(ask.opens) for ask in wire.sent] == [1, 1, 1]
    assert len(wire.sent[-1].opens[0].token_ids) == 5


def test_weights_are_those_of_the_draft_workers_in_the_directory(
    ready: tuple[RemoteDrafter, Wire, Stream],
) -> None:
    """A new version is noticed although nobody asks; that all are gone for a moment is none."""
    drafter, _, stream = ready
    seen = []
    for versions in (["v1"], ["v1", "v1"], [], ["v1", "v2"], ["v2", "v2"]):
        workers = [
            msgspec.structs.replace(WORKER, incarnation=9 + i, version=v) for i, v in enumerate(versions)
        ]
        drafter.reroute([stream], workers)
        seen.append(drafter.weights)

    assert seen == ["v1", "v1", "v1", "v1,v2", "v2"]


def test_answers_for_streams_that_ended_are_not_kept(ready: tuple[RemoteDrafter, Wire, Stream]) -> None:
    """A draft is often on its way when its stream ends, and a worker may never answer: neither fills the memory."""
    drafter, _, stream = ready
    for index in range(300):
        drafter.deliver(5, answer(stream, request_id=f"gone-{index}/0"))
        drafter.deliver(5, Drafts(1, "v1", (), (f"gone-{index}/0",)))
        stream.append([4]) if index < 40 else None
        drafter.observe([stream])
    drafter.propose([stream])

    assert len(drafter._mailbox) + len(drafter._unknown) <= 2
    assert all(len(source.asked_at) <= 64 for source in drafter._sources.values())
