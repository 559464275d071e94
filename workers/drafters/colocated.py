"""Streams that are caught up -> draft trees from a draft model in the same process: no socket, no thread, no wait.

The trees are those a draft worker would send, coupled to the target by the same noise. Every proposal arrives in
time, so what this drafter reaches is the bound for the remote one, less what overlapping the two would win.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree, is_tree, prefix_hash
from paceline.cluster.types import DraftTree
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.drafters.base import Drafter, draft_open

_MAX_DROPS = 3
"""A stream that the draft engine could not hold so often (too long for it, a token it lacks) is left alone."""


class ColocatedDrafter(Drafter):
    """Drafts on the engine's own thread."""

    name = "draft"

    def __init__(
        self, engine: DraftEngine, *, vocab_size: int, depth: int, width: int, floor: float = 0.0
    ) -> None:
        """`vocab_size` is the target's; a draft model may know more tokens than it."""
        self._engine = engine
        self._vocab_size = vocab_size
        self._depth = depth
        self._width = width
        self._floor = floor
        self._known: dict[str, int] = {}
        """Tokens of each stream that the draft engine holds; 0 means it must be told all of them."""
        self._drops: dict[str, int] = {}
        self._versions: dict[str, str] = {}

    def open(self, stream: Stream) -> None:
        self._known[stream.key] = 0

    def observe(self, streams: Sequence[Stream]) -> None:
        """Nothing to do early: `propose` sees the streams' new tokens itself."""

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        asked = [stream for stream in streams if stream.key in self._known]
        for stream in asked:
            self._catch_up(stream)
        trees, dropped = self._engine.propose([s.key for s in asked], self._depth, self._width, self._floor)
        for key in dropped:
            self._known[key] = 0
            self._drops[key] = self._drops.get(key, 0) + 1
            if self._drops[key] == _MAX_DROPS:
                self._known.pop(key)
                self._engine.close(key)
        found = {tree.request_id: tree for tree in trees}
        return [self._tree(stream, found.get(stream.key)) for stream in streams]

    def close(self, stream: Stream) -> None:
        if self._known.pop(stream.key, None) is not None:
            self._engine.close(stream.key)
        self._drops.pop(stream.key, None)
        self._versions.pop(stream.key, None)

    @property
    def weights(self) -> str:
        return self._engine.runner.version

    def version(self, stream: Stream) -> str:
        return self._versions.get(stream.key, "")

    def _catch_up(self, stream: Stream) -> None:
        """Tell the draft engine the stream's new tokens, or all of them if it does not hold the rest."""
        known, tokens = self._known[stream.key], stream.token_ids
        self._known[stream.key] = stream.num_tokens
        if known == stream.num_tokens:
            return
        new = tuple(tokens[known:].tolist())
        if known and self._engine.advance(stream.key, known, prefix_hash(tokens[:known]), new):
            return
        self._engine.open(stream.key, draft_open(stream))

    def _tree(self, stream: Stream, reply: DraftTree | None) -> Tree | None:
        if reply is None or not is_tree(reply.tokens, reply.parents, reply.scores, self._vocab_size):
            return None
        self._versions[stream.key] = reply.version
        root = int(stream.buffer[stream.num_tokens - 1])
        return Tree.build(root, reply.tokens, reply.parents, scores=reply.scores)
