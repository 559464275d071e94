"""Lost attempts of one stream -> whether the next one runs alone, when it starts, or that there is none.

A request whose tokens crash a worker would, moved on, crash them all. So a stream that was in flight at two crashes runs
alone, and at a third it is ended and kept out. That a crash happened near a stream proves nothing: one that later gets
well past the place where it was then had no part in it, since the same tokens come again wherever it runs.
"""

from __future__ import annotations

import random

ALONE_AFTER = 2
POISON_AFTER = 3
FORGIVEN_TOKENS = 64
"""Past the place of a crash, more than any step emits: that crash was not this stream's doing."""
MAX_RETRIES = 10
"""Of one stream, whatever its part in the crashes."""
_FIRST_PAUSE_S = 0.025
_MAX_PAUSE_S = 1.0


class CrashRecord:
    """What happened to one stream so far."""

    def __init__(self) -> None:
        self.num_crashes = 0
        self.num_retries = 0
        self._at = 0

    def crashed(self, num_emitted: int) -> None:
        """An attempt ended in its decode worker's crash, with this many tokens of the stream out.

        A prefill worker that died with it is not counted: a node's death takes both, and is one crash.
        """
        if num_emitted - self._at >= FORGIVEN_TOKENS:
            self.num_crashes = 0
        self._at = num_emitted
        self.num_crashes += 1
        self.num_retries += 1

    @property
    def is_suspect(self) -> bool:
        return self.num_crashes >= ALONE_AFTER

    @property
    def is_poison(self) -> bool:
        return self.num_crashes >= POISON_AFTER

    @property
    def is_spent(self) -> bool:
        return self.num_retries > MAX_RETRIES

    def pause_s(self) -> float:
        """How long to wait before the next attempt: all streams of a worker are lost at once, and shall not move so."""
        longest = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** max(0, self.num_retries - 1))
        return random.uniform(0, longest)
