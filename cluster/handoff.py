"""Reserve, KVReady, Commit -> a prompt's KV that is whole and from the right sender, or nothing.

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

from dataclasses import dataclass, field
from enum import Enum

from paceline.cluster.types import Commit, KVReady, Reserve


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
    link_key: str = ""
    announced: int = 0
    received: int = 0
    num_bytes: int = 0
    commit: Commit | None = None
    _next_start: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next_start = [0] * self.num_layers

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

    def reserve(self, message: Reserve, link_key: str, deadline: float) -> str:
        """EXPECTED -> STREAMING. Returns why not, or an empty string."""
        refusal = self.refuses(message.epoch, message.sender_incarnation)
        if not refusal and self.state is not HandoffState.EXPECTED:
            refusal = "reserved_twice"
        if not refusal and message.num_tokens != self.num_tokens:
            refusal = "wrong_length"
        if not refusal:
            self.state = HandoffState.STREAMING
            self.link_key = link_key
            self.deadline = deadline
        return refusal

    def announce(self, message: KVReady, deadline: float) -> str:
        """A message can be received. Each layer must arrive in order, without gap or overlap."""
        refusal = self.refuses(message.epoch)
        if refusal:
            return refusal
        if self.state is not HandoffState.STREAMING or message.link_key != self.link_key:
            return "not_reserved"
        if not 0 <= message.layer < self.num_layers or message.num_tokens < 1:
            return "bad_range"
        if (
            message.start != self._next_start[message.layer]
            or message.start + message.num_tokens > self.num_tokens
        ):
            return "bad_range"
        self._next_start[message.layer] += message.num_tokens
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
