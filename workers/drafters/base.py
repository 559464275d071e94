"""Streams that are caught up -> draft trees: what the engine asks of every source of proposals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree


class Drafter(Protocol):
    """A source of proposals. It may be wrong, late or silent; the text never depends on it."""

    name: str

    def open(self, stream: Stream) -> None:
        """A stream that wants drafts was admitted. Its tokens are known, its KV may not be there yet."""
        ...

    def observe(self, streams: Sequence[Stream]) -> None:
        """These streams have new committed tokens (one call a step, after commit)."""
        ...

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        """A tree behind each stream's last token, or None."""
        ...

    def close(self, stream: Stream) -> None:
        """The stream ended or was cancelled."""
        ...

    def version(self, stream: Stream) -> str:
        """Version of the weights that last drafted for the stream; empty if none did."""
        ...
