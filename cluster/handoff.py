"""Reserve, KVReady, Commit -> a prompt's KV that is whole and from the right sender, or nothing; who sends which heads.

The receiving (decode) side's state of one hand-off. Ownership of the destination blocks, by state:

    state       blocks are              who frees them
    EXPECTED    not taken yet           -
    STREAMING   reserved, unreadable    `drop`'s caller, after the link's last receive into them ended
    COMMITTED   the stream's            the stream, when it ends
    DROPPED     given back              -

No transition leads from DROPPED anywhere: a late message of a dropped hand-off, an older epoch or another
incarnation finds no open hand-off and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby

from paceline.cluster.types import Commit, HeadRange, KVPart, KVReady, Reserve


def head_ranges(num_kv_heads: int, tp_size: int) -> tuple[HeadRange, ...]:
    """The KV heads that each of `tp_size` ranks holds: those its share of the query heads reads.

    Where the one number does not divide the other, neighbours hold a head twice: 2 heads on 4 ranks are 0, 0, 1, 1.
    """
    bounds = [
        (rank * num_kv_heads // tp_size, -(-(rank + 1) * num_kv_heads // tp_size)) for rank in range(tp_size)
    ]
    return tuple(HeadRange(start, stop - start) for start, stop in bounds)


def exchange(sender: Sequence[HeadRange], receiver: Sequence[HeadRange]) -> tuple[KVPart, ...]:
    """What each sending rank gives to each receiving rank, so that each of those gets each of its heads once.

    Of several senders that hold a head the one gives it whose place among the senders is nearest to the receiver's among
    the receivers: equal degrees pair rank with rank, and copies share the work.

    Raises:
        ValueError: no sender holds a head that a receiver needs.

    Examples:
        >>> [(p.sender_rank, p.receiver_rank, p.head_start, p.num_heads)
        ...  for p in exchange(head_ranges(4, 1), head_ranges(4, 2))]
        [(0, 0, 0, 2), (0, 1, 2, 2)]
    """
    parts = []
    for rank, wanted in enumerate(receiver):
        place = rank / len(receiver)

        def giver(head: int, place: float = place) -> int:
            holders = [i for i, held in enumerate(sender) if held.start <= head < held.start + held.num]
            if not holders:
                raise ValueError(f"no sender holds KV head {head}")
            return min(holders, key=lambda i: (abs(i / len(sender) - place), i))

        heads = range(wanted.start, wanted.start + wanted.num)
        for giving_rank, group in groupby(heads, giver):
            given = list(group)
            parts.append(KVPart(giving_rank, rank, given[0], len(given)))
    return tuple(parts)


class HandoffState(Enum):
    EXPECTED = "expected"
    STREAMING = "streaming"
    COMMITTED = "committed"
    DROPPED = "dropped"


@dataclass(slots=True)
class Handoff:
    """One attempt at receiving one prompt's KV. All times are seconds of one monotonic clock."""

    request_id: str
    epoch: int
    sender: str
    sender_incarnation: int
    num_tokens: int
    num_layers: int
    deadline: float
    """When the receiver stops waiting: moved on by every sign of progress."""
    state: HandoffState = HandoffState.EXPECTED
    reason: str = ""
    parts: tuple[KVPart, ...] = ()
    """Heads and the links they come over; set with the reservation."""
    announced: int = 0
    received: int = 0
    num_bytes: int = 0
    commit: Commit | None = None
    num_skipped: int = 0
    """Leading tokens that are not sent: the receiver has their KV."""
    _next_start: list[int] = field(default_factory=list)
    """The token that each layer of each part goes on with, part after part."""

    @property
    def is_open(self) -> bool:
        return self.state in (HandoffState.EXPECTED, HandoffState.STREAMING)

    def refuses(self, epoch: int, incarnation: int | None = None) -> str:
        """Why a message of this epoch and incarnation has no business here; empty if it does."""
        if epoch != self.epoch:
            return "stale_epoch"
        if incarnation is not None and incarnation != self.sender_incarnation:
            return "wrong_incarnation"
        if not self.is_open:
            return "closed"
        return ""

    def refuses_reserve(self, message: Reserve) -> str:
        """Why `reserve` would refuse this message; empty if it would not."""
        refusal = self.refuses(message.epoch, message.sender_incarnation)
        if not refusal and self.state is not HandoffState.EXPECTED:
            refusal = "reserved_twice"
        if not refusal and message.num_tokens != self.num_tokens:
            refusal = "wrong_length"
        return refusal

    def reserve(
        self, message: Reserve, parts: tuple[KVPart, ...], deadline: float, *, num_skipped: int = 0
    ) -> str:
        """EXPECTED -> STREAMING: tokens from `num_skipped` on are awaited. Returns why not, or an empty string."""
        refusal = self.refuses_reserve(message)
        if not refusal:
            self.state = HandoffState.STREAMING
            self.parts = parts
            self.num_skipped = num_skipped
            self._next_start = [num_skipped] * (self.num_layers * len(parts))
            self.deadline = deadline
        return refusal

    def uses(self, link_key: str) -> bool:
        """Some of its heads come over this link."""
        return any(part.link_key == link_key for part in self.parts)

    def announce(self, message: KVReady, deadline: float) -> str:
        """A message can be received. Each layer of each part must arrive in order, without gap or overlap."""
        refusal = self.refuses(message.epoch)
        if refusal:
            return refusal
        if self.state is not HandoffState.STREAMING or not self.uses(message.link_key):
            return "not_reserved"
        heads = (message.link_key, message.head_start, message.num_heads)
        index = next(
            (i for i, p in enumerate(self.parts) if (p.link_key, p.head_start, p.num_heads) == heads), None
        )
        if index is None or message.num_tokens < 1 or message.num_layers < 1:
            return "bad_range"
        if message.layer < 0 or message.layer + message.num_layers > self.num_layers:
            return "bad_range"
        first = index * self.num_layers + message.layer
        layers = slice(first, first + message.num_layers)
        stop = message.start + message.num_tokens
        if stop > self.num_tokens or any(start != message.start for start in self._next_start[layers]):
            return "bad_range"
        self._next_start[layers] = [stop] * message.num_layers
        self.announced += 1
        self.deadline = deadline
        return ""

    def arrived(self, num_bytes: int, deadline: float) -> None:
        """One announced message is in the pool and its digest held."""
        self.received += 1
        self.num_bytes += num_bytes
        self.deadline = deadline

    def note_commit(self, message: Commit) -> str:
        """The sender says that was all. Returns why this cannot be, or an empty string."""
        refusal = self.refuses(message.epoch, message.sender_incarnation)
        if refusal:
            return refusal
        if self.state is not HandoffState.STREAMING:
            return "not_reserved"
        if message.num_messages != self.announced or message.num_tokens != self.num_tokens:
            return "incomplete"
        if any(covered != self.num_tokens for covered in self._next_start):
            return "incomplete"
        self.commit = message
        return ""

    def try_complete(self) -> bool:
        """STREAMING -> COMMITTED once the commit is here and every announced message arrived intact."""
        if (
            self.state is HandoffState.STREAMING
            and self.commit is not None
            and self.received == self.announced
        ):
            self.state = HandoffState.COMMITTED
        return self.state is HandoffState.COMMITTED

    def drop(self, reason: str) -> bool:
        """Any open state -> DROPPED; False if it was not open. The caller frees the blocks."""
        if not self.is_open:
            return False
        self.state = HandoffState.DROPPED
        self.reason = reason
        return True
