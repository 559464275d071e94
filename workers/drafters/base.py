"""Streams that are caught up -> draft trees: what the engine asks of every source of proposals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_DRAFT


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step made of one stream's tree: `path` are its accepted nodes; tree None means a plain step."""

    stream: Stream
    tree: Tree | None
    path: tuple[int, ...]


class Drafter:
    """A source of proposals. It may be wrong, late or silent; the text never depends on it.

    A new drafter is one file: `propose` and whatever of the rest it needs.
    """

    name: str
    source: int = SOURCE_DRAFT
    """SOURCE_* of its nodes."""

    def open(self, stream: Stream) -> None:
        """A stream that wants drafts was admitted. Its tokens are known, its KV may not be there yet."""

    def observe(self, streams: Sequence[Stream]) -> None:
        """These streams have new committed tokens. Called after commit, once a step, if it will be asked next."""

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        """A tree behind each stream's last token, or None."""
        return [None] * len(streams)

    def learn(self, outcomes: Sequence[Outcome], num_rows: int, seconds: float) -> None:
        """What the step accepted of each caught-up stream, and what it cost."""

    def close(self, stream: Stream) -> None:
        """The stream ended or was cancelled."""

    def version(self, stream: Stream) -> str:
        """Version of the weights that last drafted for the stream; empty if none did."""
        return ""
