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


class Clock:
    """Stands still."""

    def __init__(self, now: float) -> None:
        self._now = now

    def monotonic(self) -> float:
        return self._now


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


def outcome(drafter: RemoteDrafter, name: str) -> float:
    """How many replies fared so."""
    value: float = drafter._metrics.draft_replies.labels(name)._value.get()
    return value


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_len": 2},
        {"base_len": 0},
        {"base_len": -1},
        {"base_len": 2**40},
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

    drafter.reroute([stream], [msgspec.structs.replace(WORKER, version="v2", beside=("v3",))])

    assert (drafter.weights, drafter.beside) == ("v2", "v3")


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


OTHER = msgspec.structs.replace(WORKER, worker_id="draft-1", incarnation=6)


@pytest.mark.parametrize(
    ("committed", "expected"),
    [
        ([7], [7, 8]),
        ([7, 8], None),
        ([9], [9]),
        ([8], None),
    ],
)
def test_a_late_answer_that_foretold_what_was_committed_is_the_next_draft(
    ready: tuple[RemoteDrafter, Wire, Stream], committed: list[int], expected: list[int] | None
) -> None:
    """Its rest stands behind the new end; one that foretold something else, or no more than that, is dropped."""
    drafter, _, stream = ready
    late = answer(stream, tokens=(7, 8, 9), parents=(-1, 0, -1), scores=(0.5, 0.25, 0.5))
    assert drafter.propose([stream]) == [None]
    stream.append(committed)
    drafter.observe([stream])
    drafter.deliver(5, late)
    (tree,) = drafter.propose([stream])

    if expected is None or len(expected) == 1:
        assert tree is None and outcome(drafter, "late") == 2
    else:
        assert tree is not None and tree.tokens.tolist() == expected
        assert tree.scores.tolist() == [1.0, 0.25]
        assert outcome(drafter, "rerooted") == 1 and outcome(drafter, "late") == 1


def test_late_answers_are_a_share_of_what_was_asked(ready: tuple[RemoteDrafter, Wire, Stream]) -> None:
    """Each asked stream of each step is counted once, by what came; a stream without a draft worker is not asked."""
    drafter, _, stream = ready
    stranger = Stream(Request("s", (1,), Sampling(0), 5), 0, np.zeros(9, np.int32), 1, 1, 1)
    for step in range(1, 11):
        if step % 2:
            drafter.deliver(5, msgspec.structs.replace(answer(stream), step=step))
        drafter.propose([stream, stranger])
        stream.append([4])
        drafter.observe([stream])

    assert (outcome(drafter, "used"), outcome(drafter, "late"), outcome(drafter, "unasked")) == (5, 5, 10)


def test_streams_of_a_lost_draft_worker_go_to_another_at_once(
    ready: tuple[RemoteDrafter, Wire, Stream],
) -> None:
    """Opened there with all their tokens, in time for the very next step; without another they just go on."""
    drafter, wire, stream = ready
    drafter.reroute([stream], [WORKER, OTHER])
    assert len(wire.sent) == 1  # a stream that has a draft worker stays there
    stream.append([4])
    drafter.lost(5)
    elsewhere = Wire()
    drafter.connected(OTHER, elsewhere)  # type: ignore[arg-type]

    (ask,) = elsewhere.sent
    assert ask.opens[0].token_ids == (1, 2, 3, 4)
    drafter.deliver(6, answer(stream))
    (tree,) = drafter.propose([stream])
    assert tree is not None

    drafter.lost(6)
    assert drafter.propose([stream]) == [None]
    drafter.reroute([stream], [msgspec.structs.replace(WORKER, incarnation=7)])
    back = Wire()
    drafter.connected(msgspec.structs.replace(WORKER, incarnation=7), back)  # type: ignore[arg-type]
    assert len(back.sent[0].opens) == 1


def test_streams_of_a_draft_worker_that_leaves_are_handed_over(
    ready: tuple[RemoteDrafter, Wire, Stream],
) -> None:
    """It is told to forget them, so that it can end; while there is no other they stay. A gap in the directory (the
    router began anew) moves nobody."""
    drafter, wire, stream = ready
    leaving = msgspec.structs.replace(WORKER, state="draining")
    for workers in ([leaving], [], [OTHER]):
        drafter.reroute([stream], workers)
        drafter.deliver(5, answer(stream))
        assert len(wire.sent) == 1 and drafter.propose([stream]) != [None]

    drafter.reroute([stream], [leaving, OTHER])
    elsewhere = Wire()
    drafter.connected(OTHER, elsewhere)  # type: ignore[arg-type]

    assert wire.sent[-1].closes == (stream.key,) and not wire.sent[-1].advances
    assert [opened.request_id for opened in elsewhere.sent[0].opens] == [stream.key]
    drafter.close(stream)
    assert elsewhere.sent[-1].closes == (stream.key,) and len(wire.sent) == 2


def test_one_hung_draft_worker_holds_up_no_stream_of_another() -> None:
    """The first step waits for the worker that hangs; after that it is asked and not waited for."""
    drafter = RemoteDrafter(SpeculationConfig(max_wait_ms=300), Metrics(), 100, lambda worker: None)
    wires = {5: Wire(), 6: Wire()}
    streams = [
        Stream(Request(name, (1, 2), Sampling(0), 50), 0, np.zeros(60, np.int32), 2, 2, 1) for name in "gh"
    ]
    for stream, worker in zip(streams, (WORKER, OTHER), strict=True):
        stream.buffer[:2] = (1, 2)
        drafter.route(stream.key, worker)
        drafter.open(stream)
        drafter.connected(worker, wires[worker.incarnation])  # type: ignore[arg-type]
    for _ in range(20):
        drafter.deliver(5, answer(streams[0]))
        assert [tree is not None for tree in drafter.propose(streams)] == [True, False]
        for stream in streams:
            stream.append([4])
        drafter.observe(streams)

    assert drafter._metrics.draft_wait_seconds._sum.get() < 4 * 0.3
    assert [len(wire.sent) for wire in wires.values()] == [21, 21]


def test_a_draft_worker_that_does_not_know_a_stream_is_not_waited_for(
    ready: tuple[RemoteDrafter, Wire, Stream],
) -> None:
    """It has answered; the stream is told it anew with the next step, and it stays in favour."""
    drafter, wire, stream = ready
    drafter.deliver(5, Drafts(1, "v1", (), (stream.key,)))
    assert drafter.propose([stream]) == [None]
    stream.append([4])
    drafter.observe([stream])

    assert outcome(drafter, "unknown") == 1
    assert wire.sent[-1].opens[0].token_ids == (1, 2, 3, 4)
    assert drafter._streams[stream.key].source.patience.wait_s() > 0


def running(drafter: RemoteDrafter, wire: Wire, name: str, prompt: int = 3, **origin: str) -> Stream:
    """A stream at a draft worker that is connected, two tokens behind its prompt."""
    stream = Stream(
        Request(name, (1,) * prompt, Sampling(0), 50, **origin), 0, np.zeros(90, np.int32), prompt, prompt, 0
    )
    stream.buffer[:prompt] = 1
    drafter.route(stream.key, WORKER)
    drafter.open(stream)
    stream.append([5, 6])
    return stream


def test_no_prompt_is_sent_for_nothing(
    ready: tuple[RemoteDrafter, Wire, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nobody is asked for a stream is told only when it is; that step does not wait for the whole prompt."""
    drafter, wire, first = ready
    drafter._config = SpeculationConfig(max_wait_ms=900)
    first.append([4])
    now = 1000.0
    monkeypatch.setattr("paceline.workers.drafters.remote.time", Clock(now))
    drafter._last_asked = (now - 2.0, 1)
    late = running(drafter, wire, "late", tenant="acme", domain="sql")
    assert len(wire.sent) == 1

    drafter.observe([late])
    (opened,) = wire.sent[-1].opens
    assert (opened.request_id, opened.token_ids) == (late.key, (1, 1, 1, 5, 6))
    assert (opened.tenant, opened.domain) == ("acme", "sql")
    assert drafter.propose([late]) == [None]  # at once: the clock stands still, and a wait would never end
    late.append([7])
    drafter.observe([late])
    assert not wire.sent[-1].opens and wire.sent[-1].advances[0].token_ids == (7,)
    drafter.deliver(5, answer(late))
    assert drafter.propose([late]) != [None]


def test_an_answer_to_a_late_open_is_taken_if_it_is_there(ready: tuple[RemoteDrafter, Wire, Stream]) -> None:
    drafter, wire, first = ready
    first.append([4])
    drafter._last_asked = (-100.0, 1)
    late = running(drafter, wire, "late")
    drafter.observe([late])
    drafter.deliver(5, answer(late))

    (tree,) = drafter.propose([late])
    assert tree is not None and tree.tokens.tolist() == [6, 7, 8]


def test_while_drafts_are_in_use_a_stream_is_told_when_it_is_admitted(
    ready: tuple[RemoteDrafter, Wire, Stream],
) -> None:
    """Both models compute its prompt at the same time, and the first step waits as any other."""
    drafter, wire, first = ready
    first.append([4])
    drafter.observe([first])
    sent = len(wire.sent)
    running(drafter, wire, "a")

    assert [opened.request_id for opened in wire.sent[sent].opens] == ["a/0"]
    assert wire.sent[sent].opens[0].token_ids == (1, 1, 1)


def test_a_few_trials_do_not_count_as_use(ready: tuple[RemoteDrafter, Wire, Stream]) -> None:
    """One of many is tried now and then: the prompts of the others are not sent for that."""
    drafter, wire, first = ready
    streams = [running(drafter, wire, name) for name in "abcdefg"]
    first.append([4])
    drafter.observe([first])
    sent = len(wire.sent)
    running(drafter, wire, "h")
    assert len(wire.sent) == sent

    drafter.observe(streams)
    sent = len(wire.sent)
    running(drafter, wire, "i")
    assert len(wire.sent) == sent + 1


def test_streams_that_nobody_asked_for_move_without_a_word(ready: tuple[RemoteDrafter, Wire, Stream]) -> None:
    """Their draft worker never heard of them, nor need the next one."""
    drafter, wire, first = ready
    first.append([4])
    drafter._last_asked = (-100.0, 1)
    running(drafter, wire, "quiet")
    drafter.reroute([first], [WORKER, OTHER])
    drafter.lost(5)
    elsewhere = Wire()
    drafter.connected(OTHER, elsewhere)  # type: ignore[arg-type]

    assert [opened.request_id for ask in elsewhere.sent for opened in ask.opens] == [first.key]


def test_the_version_is_that_of_each_tree(ready: tuple[RemoteDrafter, Wire, Stream]) -> None:
    """Streams of one draft worker may draft with different weights; only what is live counts as its weights."""
    drafter, wire, first = ready
    other = running(drafter, wire, "other")
    drafter.observe([first, other])
    live = answer(first)
    canary = msgspec.structs.replace(answer(other).trees[0], version="v2")
    drafter.deliver(5, Drafts(9, "v1", (*live.trees, canary)))
    drafter.reroute([first, other], [msgspec.structs.replace(WORKER, version="v1")])
    drafter.propose([first, other])

    assert (drafter.version(first), drafter.version(other), drafter.weights) == ("v1", "v2", "v1")
