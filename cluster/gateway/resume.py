"""the id of the last event a client saw -> what of a stream's pieces it still needs; the ids of the events with it.

A client whose connection broke sends its request again, with the seed of the first answer and the header
Last-Event-ID, to any gateway. The stream is generated again, which gives the same text, and what the client has is left
out. An id holds a fingerprint of what fixes the text, and for each choice the tokens and characters sent so far with a
checksum of the latter: a request that is not the same, or a text that is not, is refused and never spliced.

    9f2ac01b44d0e7aa:12.57.9ae0daaf,20.80.1b2c3d4e!,        choice 0 is open, 1 is finished, of 2 nothing was sent
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from paceline.cluster.errors import RequestError
from paceline.cluster.gateway.choices import Piece
from paceline.cluster.types import Request

_MAX_ID_LEN = 4096
_ID = re.compile(r"([0-9a-f]{16}):([0-9a-f.,!]*)(;end)?")
_PLACE = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9a-f]{8})(!?)")


@dataclass(frozen=True, slots=True)
class Place:
    """How much of one choice a client has."""

    num_tokens: int = 0
    num_chars: int = 0
    checksum: int = 0
    """CRC-32 of those characters."""
    is_open: bool = False
    """It has the chunk before the first text."""
    is_finished: bool = False

    def __str__(self) -> str:
        if not self.is_open:
            return ""
        return f"{self.num_tokens}.{self.num_chars}.{self.checksum:08x}{'!' * self.is_finished}"


@dataclass(frozen=True, slots=True)
class LastEvent:
    """A parsed Last-Event-ID."""

    fingerprint: str
    places: tuple[Place, ...]
    is_end: bool
    """It has the usage chunk behind all choices."""


def fingerprint(requests: Sequence[Request], *form: object) -> str:
    """Hash of what fixes the bytes of an answer: the streams, and how they are told. Not how they are computed."""
    what = [(r.prompt_ids, r.sampling, r.max_tokens, r.stop_ids, r.logprobs) for r in requests]
    return hashlib.blake2b(msgspec.msgpack.encode((what, form)), digest_size=8).hexdigest()


def parse_last_event(text: str) -> LastEvent:
    """
    Raises:
        RequestError: no id of ours.
    """
    found = _ID.fullmatch(text) if len(text) <= _MAX_ID_LEN else None
    places = [_parse_place(part) for part in found[2].split(",")] if found else [None]
    if found is None or None in places:
        message = f"Last-Event-ID={text[:80]!r}: expected the id of an event of this API"
        raise RequestError(message, param="last-event-id", code="invalid_value")
    return LastEvent(found[1], tuple(place for place in places if place is not None), found[3] is not None)


def _parse_place(text: str) -> Place | None:
    if not text:
        return Place()
    found = _PLACE.fullmatch(text)
    if found is None:
        return None
    return Place(int(found[1]), int(found[2]), int(found[3], 16), True, bool(found[4]))


class Cursor:
    """Follows the pieces of a stream: what the client still needs of each, and where it is then."""

    def __init__(self, num_choices: int, fingerprint: str, last: LastEvent | None = None) -> None:
        """
        Raises:
            RequestError: the last event is one of another request.
        """
        if last is not None and (last.fingerprint != fingerprint or len(last.places) != num_choices):
            message = (
                "Last-Event-ID: belongs to another request; send the same body again, with the seed of the "
                "x-paceline-seed header of the first answer"
            )
            raise RequestError(message, param="last-event-id", code="last_event_id_mismatch")
        self._fingerprint = fingerprint
        self._had = last.places if last else (Place(),) * num_choices
        self._places = list(self._had)
        self._num_chars = [0] * num_choices
        self._num_scored = [0] * num_choices
        self._num_ids = [0] * num_choices
        self._checksums = [0] * num_choices
        self._is_end = last is not None and last.is_end

    def has_all(self, *, with_usage: bool) -> bool:
        """The client saw everything there is."""
        return self._is_end or (not with_usage and all(place.is_finished for place in self._had))

    def is_open(self, index: int) -> bool:
        """The choice's opening was sent."""
        return self._places[index].is_open

    def rest(self, piece: Piece) -> Piece | None:
        """What the client does not have of the next piece of a choice; None if it has the choice's end.

        Raises:
            RequestError: 409; this is not the text that the client has.
        """
        index = piece.choice.index
        had = self._had[index]
        cut = self._read_text(index, piece.text, had)
        if piece.finish is not None and self._num_chars[index] < had.num_chars:
            raise _not_the_same()
        num_known = had.num_tokens + piece.choice.num_scored_prompt if had.num_tokens else 0
        scored = piece.scored[max(0, num_known - self._num_scored[index]) :]
        ids = piece.token_ids[max(0, had.num_tokens - self._num_ids[index]) :]
        self._num_scored[index] += len(piece.scored)
        self._num_ids[index] += len(piece.token_ids)
        if had.is_finished:
            return None
        return dataclasses.replace(piece, text=piece.text[cut:], scored=scored, token_ids=ids)

    def _read_text(self, index: int, text: str, had: Place) -> int:
        """Take a choice's next text; how many of its characters the client has."""
        start = self._num_chars[index]
        cut = min(max(0, had.num_chars - start), len(text))
        checksum = zlib.crc32(text[:cut].encode(), self._checksums[index])
        if cut and start + cut == had.num_chars and checksum != had.checksum:
            raise _not_the_same()
        self._num_chars[index] = start + len(text)
        self._checksums[index] = zlib.crc32(text[cut:].encode(), checksum)
        return cut

    def opened(self, index: int) -> str:
        """The id of the event with a choice's opening."""
        self._places[index] = Place(is_open=True)
        return self.event_id()

    def told(self, piece: Piece, *, is_finished: bool) -> str:
        """The id of an event with a piece's text, or with the end of its choice."""
        index = piece.choice.index
        num_tokens = max(piece.num_tokens, self._had[index].num_tokens)
        self._places[index] = Place(
            num_tokens, self._num_chars[index], self._checksums[index], True, is_finished
        )
        return self.event_id()

    def event_id(self, *, is_end: bool = False) -> str:
        """Where the client is after the next event."""
        return f"{self._fingerprint}:{','.join(map(str, self._places))}{';end' * is_end}"


def _not_the_same() -> RequestError:
    message = "Last-Event-ID: the answer is not the one that was begun, so it cannot be continued; send the request anew"
    return RequestError(message, param="last-event-id", code="cannot_continue", status=409)
