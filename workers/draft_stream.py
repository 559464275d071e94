"""One stream's committed tokens -> what a draft model holds of it: levels drafted behind them, KV, hashes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.cluster.types import Sampling
from paceline.workers.adjust import TokenCounts
from paceline.workers.model_runner import ModelRunner

Level = tuple[list[int], list[float]]
"""Tokens of one depth, best first, and their chances."""


@dataclass(slots=True, eq=False)
class DraftStream:
    """One stream as the draft worker knows it."""

    key: str
    request_id: str
    sampling: Sampling
    tokens: npt.NDArray[np.int32]
    weights: ModelRunner
    cache_salt: str = ""
    tenant: str = ""
    domain: str = ""
    is_mixed: bool = False
    """Some of its KV was computed with other weights: good enough to draft with, nothing for others to find."""
    num_computed: int = 0
    """Leading positions whose KV is in the pool, those of the spine included."""
    levels: list[Level] = field(default_factory=list)
    """What is drafted behind `tokens`; the first token of each level is the spine, all but its last have KV."""
    num_ahead: int = 0
    """How many of the last levels nobody has asked for yet."""
    asked: tuple[int, int, float] = (0, 0, 0.0)
    """Depth, width and floor of the last proposal."""
    last_used: int = 0
    hashes: list[bytes] = field(default_factory=list)
    """Of its leading full blocks, as far as they were needed."""
    num_shared: int = 0
    """Leading blocks that were adopted or offered to the prefix cache."""
    counts: TokenCounts | None = None
    """For bias, penalties and minimum length, if the stream has any."""

    @property
    def origin(self) -> tuple[str, str, str]:
        """What its draft is chosen by: request, tenant, domain."""
        return self.request_id, self.tenant, self.domain

    @property
    def spine(self) -> list[int]:
        return [ids[0] for ids, _ in self.levels]

    def advance(self, new: tuple[int, ...]) -> bool:
        """Take over committed tokens; KV, and levels behind them, that turned out right stay valid.

        Returns whether the spine foretold all of them.
        """
        agree = 0
        while agree < min(len(self.levels), len(new)) and self.levels[agree][0][0] == new[agree]:
            agree += 1
        foretold = agree == len(new)
        if not foretold:
            self.num_computed = min(self.num_computed, len(self.tokens) + agree)
        self.levels = self.levels[agree:] if foretold else []
        self.num_ahead = min(self.num_ahead, len(self.levels))
        self.tokens = np.concatenate([self.tokens, np.asarray(new, np.int32)])
        if self.counts is not None:
            self.counts.extend(new)
        return foretold

    def forget_levels(self, keep: int = 0) -> None:
        """Drop the levels behind the first `keep`."""
        self.num_ahead = max(0, self.num_ahead - max(0, len(self.levels) - keep))
        self.levels = self.levels[:keep]
        self.num_computed = min(self.num_computed, len(self.tokens) + max(0, keep - 1))

    def num_levels(self, depth: int, floor: float) -> int | None:
        """How many levels a proposal has: up to `depth`, or to where the spine's chance falls below `floor`.

        None if they are not all there yet.
        """
        chance = 1.0
        for level, (_, scores) in enumerate(self.levels[:depth], 1):
            chance *= scores[0]
            if not chance >= floor or level == depth:  # a NaN ends it as well
                return level
        return None
