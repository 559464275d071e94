"""Every order of messages, good and bad -> committed only when whole; dropped for good."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.handoff import Handoff, HandoffState, exchange, head_ranges
from paceline.cluster.types import Commit, HeadRange, KVLayout, KVPart, KVReady, Reserve

LAYERS, TOKENS, EPOCH, SENDER = 2, 2, 3, 77
LAYOUT = KVLayout(LAYERS, 1, 8, "float32", "v")
PARTS = (KVPart(0, 0, 0, 1, "k"),)
Piece = tuple[int, int, int]
"""layer, start, num_tokens"""


def fresh(num_tokens: int = TOKENS) -> Handoff:
    return Handoff("r", EPOCH, "prefill-0", SENDER, num_tokens, LAYERS, deadline=0.0)


def reserve(*, epoch: int = EPOCH, sender: int = SENDER, num_tokens: int = TOKENS) -> Reserve:
    return Reserve("r", epoch, "prefill-0", sender, num_tokens, LAYOUT, head_ranges(1, 1))


def ready(piece: Piece, *, epoch: int = EPOCH, key: str = "k") -> KVReady:
    layer, start, num_tokens = piece
    return KVReady("r", epoch, key, layer, 1, 0, 1, start, num_tokens)


def commit(
    num_messages: int, *, epoch: int = EPOCH, sender: int = SENDER, num_tokens: int = TOKENS
) -> Commit:
    return Commit("r", epoch, sender, num_tokens, num_messages)


def slots(pieces: tuple[Piece, ...]) -> list[tuple[int, int]]:
    """Every (layer, token) of some pieces, as often as it occurs."""
    return sorted((layer, t) for layer, start, num in pieces for t in range(start, start + num))


@dataclass
class World:
    """A hand-off and what an all-knowing observer saw: pieces on the way, pieces in the pool, valid commits."""

    handoff: Handoff
    pending: tuple[Piece, ...] = ()
    arrived: tuple[Piece, ...] = ()

    def clone(self) -> "World":
        handoff = copy.copy(self.handoff)
        handoff._next_start = list(handoff._next_start)
        return World(handoff, self.pending, self.arrived)

    def key(self) -> tuple[object, ...]:
        h = self.handoff
        return (h.state, h.parts, h.commit, tuple(h._next_start), h.announced, self.pending, self.arrived)

    def is_whole(self) -> bool:
        """Every (layer, token) is in the pool exactly once."""
        return slots(self.arrived) == [(layer, t) for layer in range(LAYERS) for t in range(TOKENS)]


Event = Callable[[World], str]
"""Applies itself; the refusal, or an empty string."""


def announcement(piece: Piece, **how: object) -> Event:
    def event(world: World) -> str:
        refusal = world.handoff.announce(ready(piece, **how), 0.0)  # type: ignore[arg-type]
        if not refusal:
            world.pending = (*world.pending, piece)
        return refusal

    return event


def arrival(index: int) -> Event:
    def event(world: World) -> str:
        piece = world.pending[index]
        world.pending = world.pending[:index] + world.pending[index + 1 :]
        # As the worker does: rows of a hand-off that is not streaming never touch the pool.
        if world.handoff.state is HandoffState.STREAMING:
            world.arrived = tuple(sorted((*world.arrived, piece)))
            world.handoff.arrived(1, 0.0)
        return ""

    return event


def events(world: World) -> Iterator[tuple[str, Event]]:
    """Everything that could happen next, sensible or not."""
    for how in ({}, {"epoch": EPOCH - 1}, {"sender": SENDER + 1}, {"num_tokens": 1}, {"num_tokens": 3}):
        yield f"reserve {how}", lambda w, how=how: w.handoff.reserve(reserve(**how), PARTS, 0.0)
    for layer in range(-1, LAYERS + 1):
        for start in range(-1, TOKENS + 1):
            for num in range(TOKENS + 2):
                yield f"ready {layer, start, num}", announcement((layer, start, num))
    for layer in range(LAYERS):
        yield "ready stale", announcement((layer, 0, TOKENS), epoch=EPOCH - 1)
        yield "ready other link", announcement((layer, 0, TOKENS), key="k2")
    for index in range(len(world.pending)):
        yield f"arrival {index}", arrival(index)
    for num_messages in range(LAYERS * TOKENS + 2):
        yield f"commit {num_messages}", lambda w, n=num_messages: w.handoff.note_commit(commit(n))
    for how in ({"epoch": EPOCH + 1}, {"sender": SENDER + 1}, {"num_tokens": 1}):
        yield f"commit {how}", lambda w, how=how: w.handoff.note_commit(commit(w.handoff.announced, **how))
    yield "drop", lambda w: "" if w.handoff.drop("test") else "closed"


def test_no_order_of_messages_commits_a_prompt_that_is_not_whole() -> None:
    """The whole reachable state space: refusals change nothing, closed states stay, COMMITTED means complete."""
    start = World(fresh())
    seen = {start.key()}
    frontier = [start]
    num_committed = 0
    while frontier:
        world = frontier.pop()
        was = world.handoff.state
        for name, event in events(world):
            after = world.clone()
            refusal = event(after)
            if refusal:
                assert after == world, f"{name} was refused and changed the state"
            expected = slots(after.pending + after.arrived)
            assert len(expected) == len(set(expected)), f"{name}: a token was announced twice"
            if was in (HandoffState.DROPPED, HandoffState.COMMITTED):
                assert after.handoff == world.handoff, f"{name} moved a closed hand-off"
                assert refusal or name.startswith("arrival")
            is_done = after.handoff.try_complete()
            assert is_done == (after.handoff.state is HandoffState.COMMITTED)
            if is_done and was is not HandoffState.COMMITTED:
                num_committed += 1
                assert after.is_whole() and not after.pending, f"{name} committed {after.arrived}"
                assert after.handoff.commit == commit(len(after.arrived))
            elif after.is_whole() and after.handoff.commit is not None and after.handoff.is_open:
                raise AssertionError(f"{name}: whole and confirmed, yet not committed")
            if after.key() not in seen:
                seen.add(after.key())
                frontier.append(after)

    assert num_committed > 0
    assert len(seen) > 150


def test_a_prompt_in_two_chunks_is_committed_once_all_is_in_the_pool() -> None:
    """Reserve, announce, arrive, commit: the commit may come before the last arrival."""
    handoff = fresh(num_tokens=5)
    assert handoff.reserve(reserve(num_tokens=5), PARTS, 7.0) == ""
    assert (handoff.state, handoff.parts, handoff.deadline) == (HandoffState.STREAMING, PARTS, 7.0)
    for piece in [(0, 0, 3), (1, 0, 3), (1, 3, 2), (0, 3, 2)]:
        assert handoff.announce(ready(piece), 8.0) == ""
    for _ in range(3):
        handoff.arrived(100, 9.0)
    assert handoff.note_commit(commit(4, num_tokens=5)) == ""
    assert not handoff.try_complete()
    handoff.arrived(100, 9.5)

    assert handoff.try_complete()
    assert (handoff.state, handoff.num_bytes, handoff.deadline) == (HandoffState.COMMITTED, 400, 9.5)


@pytest.mark.parametrize(
    "message, reason",
    [
        (reserve(epoch=EPOCH - 1), "stale_epoch"),
        (reserve(sender=SENDER + 1), "wrong_incarnation"),
        (reserve(num_tokens=TOKENS + 1), "wrong_length"),
        (reserve(), "reserved_twice"),
    ],
)
def test_a_reservation_that_does_not_match_is_refused_by_name(message: Reserve, reason: str) -> None:
    """Each refusal is a short label for metrics and moves neither state nor deadline."""
    handoff = fresh()
    if reason == "reserved_twice":
        handoff.reserve(reserve(), PARTS, 1.0)
    state, deadline = handoff.state, handoff.deadline

    assert handoff.reserve(message, (), 99.0) == reason
    assert (handoff.state, handoff.deadline) == (state, deadline)


@pytest.mark.parametrize(
    "message, reason",
    [
        (ready((0, 0, 1), epoch=EPOCH + 1), "stale_epoch"),
        (ready((0, 0, 1), key="k2"), "not_reserved"),
        (ready((0, 1, 1)), "bad_range"),
        (ready((0, 0, 3)), "bad_range"),
        (ready((2, 0, 1)), "bad_range"),
        (ready((-1, 0, 1)), "bad_range"),
        (ready((0, 0, 0)), "bad_range"),
    ],
)
def test_an_announcement_that_does_not_fit_is_refused_by_name(message: KVReady, reason: str) -> None:
    """Gaps, overlaps, unknown layers, empty ranges, other links and other epochs are no progress."""
    handoff = fresh()
    handoff.reserve(reserve(), PARTS, 1.0)

    assert handoff.announce(message, 99.0) == reason
    assert (handoff.announced, handoff.deadline) == (0, 1.0)


def test_a_commit_before_the_last_announcement_is_refused() -> None:
    """A sender that says "that was all" too early is told what is wrong, and nothing is committed."""
    handoff = fresh()
    handoff.reserve(reserve(), PARTS, 1.0)
    handoff.announce(ready((0, 0, 2)), 1.0)
    handoff.arrived(1, 1.0)

    assert handoff.note_commit(commit(1)) == "incomplete"
    assert not handoff.try_complete() and handoff.state is HandoffState.STREAMING


def test_a_dropped_hand_off_keeps_its_first_reason() -> None:
    """Dropping is final and done once: its caller frees the blocks exactly then."""
    handoff = fresh()

    assert handoff.drop("lease") and not handoff.drop("cancelled")
    assert (handoff.state, handoff.reason, handoff.is_open) == (HandoffState.DROPPED, "lease", False)


# --- skipped tokens, layers together, heads apart -------------------------------------------------------


def test_tokens_that_are_here_already_are_not_awaited() -> None:
    """Announcements begin where the receiver said; what is before is refused, and the rest is a whole."""
    handoff = fresh(num_tokens=5)
    assert handoff.reserve(reserve(num_tokens=5), PARTS, 1.0, num_skipped=3) == ""

    assert handoff.announce(ready((0, 0, 5)), 1.0) == "bad_range"
    for layer in range(LAYERS):
        assert handoff.announce(ready((layer, 3, 2)), 1.0) == ""
        handoff.arrived(8, 1.0)
    assert handoff.note_commit(commit(2, num_tokens=5)) == ""
    assert handoff.try_complete()


def piece_of(part: KVPart, layer: int, num_layers: int, start: int, num_tokens: int) -> KVReady:
    return KVReady(
        "r", EPOCH, part.link_key, layer, num_layers, part.head_start, part.num_heads, start, num_tokens
    )


def test_layers_may_come_together_and_heads_over_links_of_their_own() -> None:
    """Two parts over two links, each in its own order: whole when both are, and heads of one do not count for the other."""
    parts = (KVPart(0, 0, 0, 2, "a"), KVPart(1, 0, 2, 1, "b"))
    handoff = fresh(num_tokens=4)
    assert handoff.reserve(reserve(num_tokens=4), parts, 1.0) == ""
    assert handoff.announce(piece_of(parts[0], 0, LAYERS, 0, 4), 1.0) == ""
    handoff.arrived(8, 1.0)
    foreign = KVPart(1, 0, 0, 2, "b")

    assert handoff.announce(piece_of(foreign, 0, 1, 0, 4), 1.0) == "bad_range"
    assert handoff.announce(piece_of(parts[0], 0, 1, 0, 4), 1.0) == "bad_range"
    assert handoff.note_commit(commit(1, num_tokens=4)) == "incomplete"
    assert handoff.announce(piece_of(parts[1], 0, LAYERS + 1, 0, 4), 1.0) == "bad_range"
    assert handoff.announce(piece_of(parts[1], 0, 1, 0, 4), 1.0) == ""
    assert handoff.announce(piece_of(parts[1], 0, LAYERS, 0, 4), 1.0) == "bad_range"
    assert handoff.announce(piece_of(parts[1], 1, 1, 0, 4), 1.0) == ""
    for _ in range(2):
        handoff.arrived(8, 1.0)
    assert handoff.note_commit(commit(3, num_tokens=4)) == ""
    assert handoff.try_complete()
    assert handoff.uses("a") and handoff.uses("b") and not handoff.uses("k")


degrees = st.integers(1, 16)


def covered(held: HeadRange) -> set[int]:
    return set(range(held.start, held.start + held.num))


@given(st.integers(1, 32), degrees)
def test_ranks_hold_the_heads_their_queries_read(num_kv_heads: int, tp_size: int) -> None:
    """Together all heads; of each its share, and no more than the one or two it has in common with a neighbour."""
    ranges = head_ranges(num_kv_heads, tp_size)

    assert len(ranges) == tp_size
    assert set().union(*map(covered, ranges)) == set(range(num_kv_heads))
    for rank, held in enumerate(ranges):
        # With as many query heads as makes both numbers divide: query head q reads KV head q * G // Q.
        num_queries = num_kv_heads * tp_size
        mine = range(rank * num_queries // tp_size, (rank + 1) * num_queries // tp_size)
        assert covered(held) == {query * num_kv_heads // num_queries for query in mine}
    if num_kv_heads % tp_size == 0:
        assert {held.num for held in ranges} == {num_kv_heads // tp_size}
    elif tp_size % num_kv_heads == 0:
        assert [held.start for held in ranges] == [r * num_kv_heads // tp_size for r in range(tp_size)]
        assert {held.num for held in ranges} == {1}


@given(st.integers(1, 32), degrees, degrees)
def test_every_receiver_gets_each_of_its_heads_once_from_one_that_has_it(
    num_kv_heads: int, tp_prefill: int, tp_decode: int
) -> None:
    """Whatever divides what: whole, without overlap, in order; equal degrees pair rank with rank."""
    sender, receiver = head_ranges(num_kv_heads, tp_prefill), head_ranges(num_kv_heads, tp_decode)
    parts = exchange(sender, receiver)

    for rank, wanted in enumerate(receiver):
        heads = [
            head
            for part in parts
            if part.receiver_rank == rank
            for head in range(part.head_start, part.head_start + part.num_heads)
        ]
        assert heads == sorted(covered(wanted))
    for part in parts:
        given_heads = covered(HeadRange(part.head_start, part.num_heads))
        assert given_heads <= covered(sender[part.sender_rank])
    pairs = [(part.sender_rank, part.receiver_rank) for part in parts]
    assert len(set(pairs)) == len(pairs), "one message could have carried both"
    if tp_prefill == tp_decode:
        assert pairs == [(rank, rank) for rank in range(tp_prefill)]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
def test_copies_of_a_head_share_the_work(num_kv_heads: int, copies: int, per_copy: int) -> None:
    """Each of a head's holders serves as many of its receivers as the others."""
    sender = head_ranges(num_kv_heads, num_kv_heads * copies)
    receiver = head_ranges(num_kv_heads, num_kv_heads * copies * per_copy)
    parts = exchange(sender, receiver)
    load = [sum(part.sender_rank == rank for part in parts) for rank in range(len(sender))]

    assert max(load) - min(load) <= 2 * per_copy


def test_heads_that_nobody_holds_cannot_be_exchanged() -> None:
    """A sender of another model, or of half of one."""
    with pytest.raises(ValueError, match="no sender holds KV head 2"):
        exchange(head_ranges(2, 1), head_ranges(3, 1))
