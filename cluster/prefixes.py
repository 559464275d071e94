"""Prompt tokens -> marks of their leading blocks; where prompts were sent -> how much of a new one a worker may hold.

The router remembers what it sent where instead of being told what workers cache: no message, no state to keep equal,
and right at once, before the first heartbeat after a burst. It is a guess, and a wrong one costs time only. What it
misses: blocks of generated text (the next turn of a chat still finds its prompt's), and evictions by other means than
age; each worker's memory is bounded by the number of its blocks and forgets in the order the worker does.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from paceline.cluster.blocks import chain_hash

MARK_BYTES = 8
MAX_MARKS = 512
"""Of one prompt: what is behind that many blocks counts as not cached."""
MAX_REMEMBERED = 1 << 16
"""Of one worker, however many blocks it has."""


def prefix_marks(token_ids: Sequence[int], block_size: int, salt: str) -> bytes:
    """8 bytes for each full block that can be shared; each covers the tokens before it and the salt as well.

    The last token's block is left out: its logits have to be computed.
    """
    num_blocks = min(MAX_MARKS, (len(token_ids) - 1) // block_size)
    ids = np.asarray(token_ids[: num_blocks * block_size], np.int32)
    parent = hashlib.blake2b(salt.encode(), digest_size=MARK_BYTES).digest()
    marks = []
    for start in range(0, len(ids), block_size):
        parent = chain_hash(parent, ids[start : start + block_size])
        marks.append(parent[:MARK_BYTES])
    return b"".join(marks)


class PrefixIndex:
    """Marks sent to each worker, by incarnation, least recently sent forgotten first."""

    def __init__(self) -> None:
        self._sent: dict[int, OrderedDict[bytes, None]] = {}

    def note(self, incarnation: int, marks: bytes, num_blocks: int) -> None:
        """A prompt with these marks goes to this worker, which has `num_blocks` blocks."""
        sent = self._sent.setdefault(incarnation, OrderedDict())
        for mark in reversed(_split(marks)):  # a block is forgotten before the ones it stands on
            sent[mark] = None
            sent.move_to_end(mark)
        while len(sent) > min(num_blocks, MAX_REMEMBERED):
            sent.popitem(last=False)

    def num_hit(self, incarnation: int, marks: bytes) -> int:
        """How many leading blocks of a prompt the worker may hold."""
        sent = self._sent.get(incarnation)
        if not sent:
            return 0
        # Whatever is remembered is remembered with all before it: bisect.
        low, high = 0, len(marks) // MARK_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            if marks[(middle - 1) * MARK_BYTES : middle * MARK_BYTES] in sent:
                low = middle
            else:
                high = middle - 1
        return low

    def drop(self, incarnation: int) -> None:
        """The worker is gone, and its cache with it."""
        self._sent.pop(incarnation, None)


def _split(marks: bytes) -> list[bytes]:
    return [marks[at : at + MARK_BYTES] for at in range(0, len(marks), MARK_BYTES)]
