"""Proposed trees and what was accepted of them -> how often nodes like these are right.

Counted twice: node by node in plain Python for the few nodes that most steps have, where an operation of numpy costs
more than its content, and in passes of numpy over all nodes of a large batch. Both give the same numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_NAMES

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_EDGES = np.asarray([0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95])
"""Between the buckets of scores."""
_EDGE_LIST: list[float] = _EDGES.tolist()
_RANKS, _DEPTHS = 3, 3
"""Nodes are told apart by rank among their siblings and by depth, so far."""
_CELLS = _RANKS * _DEPTHS * (len(_EDGES) + 1)
"""Of one source."""


class Forest:
    """The trees of one step, their nodes one after the other: M nodes, B trees. All streams in one pass of numpy.

    first: the root of each tree. parents: int64 [M], absolute, a root's is itself. is_root: bool [M].
    cells: int64 [M], (source, rank, depth, bucket of the score) as one number.
    """

    def __init__(self, trees: Sequence[Tree]) -> None:
        sizes = [len(tree) for tree in trees]
        ends = np.cumsum(sizes)
        self.first: list[int] = [0, *ends[:-1].tolist()]
        first = np.repeat(self.first, sizes)
        local = np.concatenate([tree.parents for tree in trees]).astype(np.int64)
        self.is_root = local < 0
        self.parents = np.maximum(local, 0) + first
        self.depths = np.concatenate([tree.depths for tree in trees]).astype(np.int64)
        self.scores = np.concatenate([tree.scores for tree in trees])
        sources = np.concatenate([tree.sources for tree in trees]).astype(np.int64)
        buckets = np.searchsorted(_EDGES, self.scores)
        places = np.minimum(self._ranks(), _RANKS - 1) * _DEPTHS + np.clip(self.depths - 1, 0, _DEPTHS - 1)
        self.cells: IntArray = sources * _CELLS + places * (len(_EDGES) + 1) + buckets

    def __len__(self) -> int:
        return len(self.parents)

    def _ranks(self) -> IntArray:
        """How many siblings stand before each node."""
        keys = np.where(self.is_root, -1, self.parents)
        order = np.argsort(keys, kind="stable")
        grouped = keys[order]
        starts = np.flatnonzero(np.concatenate([[True], grouped[1:] != grouped[:-1]]))
        ranks = np.empty(len(keys), np.int64)
        ranks[order] = np.arange(len(keys)) - np.repeat(starts, np.diff([*starts, len(keys)]))
        return ranks

    def products(self, scores: FloatArray) -> FloatArray:
        """float64 [M]: product of the scores from each tree's root down to the node; 0 at roots, which are certain."""
        products = np.where(self.is_root, 1.0, scores)
        for depth in range(2, int(self.depths.max()) + 1):
            nodes = np.flatnonzero(self.depths == depth)
            products[nodes] *= products[self.parents[nodes]]
        return np.where(self.is_root, 0.0, products)


def cells_of(tree: Tree) -> list[int]:
    """The cell of each node, as in `Forest`; the root's means nothing."""
    found: list[int] = []
    siblings: dict[int, int] = {}
    columns = (tree.parents.tolist(), tree.depths.tolist(), tree.scores.tolist(), tree.sources.tolist())
    for parent, depth, score, source in zip(*columns, strict=True):
        rank = siblings.get(parent, 0)
        siblings[parent] = rank + 1
        place = min(rank, _RANKS - 1) * _DEPTHS + min(max(0, depth - 1), _DEPTHS - 1)
        found.append(source * _CELLS + place * (len(_EDGES) + 1) + bisect_left(_EDGE_LIST, score))
    return found


class Calibration:
    """A source's scores -> how often nodes with such a score were accepted, given that their parent was.

    Counters by (source, rank, depth, score bucket), decayed, with the score itself as a prior worth 8 trials.
    """

    _PRIOR = 8.0
    _DECAY = 0.995
    _FADE = 0.999
    """Of all cells in a step that drafts: one that looks too bad to be tried is tried again some thousand steps on."""

    def __init__(self) -> None:
        shape = (len(SOURCE_NAMES), _RANKS, _DEPTHS, len(_EDGES) + 1)
        self._tries = np.zeros(shape)
        self._hits = np.zeros(shape)
        self._reliability = np.zeros((3, len(SOURCE_NAMES), len(_EDGES) + 1))
        """By (source, bucket of the calibrated score): trials, sum of the scores, hits; decayed."""

    def errors(self) -> dict[str, float]:
        """Source -> mean distance of calibrated scores from how often they held, over its buckets by their trials."""
        trials, predicted, hits = self._reliability
        totals, misses = trials.sum(axis=1), np.abs(predicted - hits).sum(axis=1)
        return {name: float(m / n) for name, n, m in zip(SOURCE_NAMES, totals, misses, strict=True) if n > 0}

    def forget(self, source: int) -> None:
        """A source begins anew."""
        for counters in (self._tries, self._hits, *self._reliability):
            counters[source] = 0.0

    def estimate(self, forest: Forest) -> FloatArray:
        """float64 [M]: calibrated scores of all nodes."""
        return self._estimate(forest.cells, forest.scores)

    def _estimate(self, cells: IntArray, raw: npt.NDArray[np.float32]) -> FloatArray:
        hits, tries = self._hits.reshape(-1)[cells], self._tries.reshape(-1)[cells]
        return np.asarray((hits + self._PRIOR * raw) / (tries + self._PRIOR))

    def estimate_few(self, cells: Sequence[int], raw: Sequence[float]) -> list[float]:
        """`estimate` of a few nodes that are not roots, by their cells and scores."""
        hits, tries = self._hits.reshape(-1), self._tries.reshape(-1)
        return [
            (hits.item(cell) + self._PRIOR * score) / (tries.item(cell) + self._PRIOR)
            for cell, score in zip(cells, raw, strict=True)
        ]

    def fade(self) -> None:
        """A step went by in which something was proposed."""
        self._tries *= self._FADE
        self._hits *= self._FADE

    def observe(self, forest: Forest, paths: Sequence[Sequence[int]]) -> None:
        """What was verified of each tree. Only nodes whose parent was accepted are trials; counting others would bias."""
        accepted = np.zeros(len(forest), np.bool_)
        for first, path in zip(forest.first, paths, strict=True):
            accepted[first] = True
            for node in path:
                accepted[first + node] = True
        trial = accepted[forest.parents] & ~forest.is_root
        if not trial.any():
            return
        self._count(forest.cells[trial], accepted[trial].astype(np.float64), forest.scores[trial])

    def observe_few(self, trees: Sequence[Tree], paths: Sequence[Sequence[int]]) -> None:
        """`observe` of trees with few nodes."""
        cells: list[int] = []
        hits: list[float] = []
        raw: list[float] = []
        for tree, path in zip(trees, paths, strict=True):
            accepted = {0, *path}
            scores = tree.scores.tolist()
            for node, (cell, parent) in enumerate(zip(cells_of(tree), tree.parents.tolist(), strict=True)):
                if parent in accepted:
                    cells.append(cell)
                    hits.append(float(node in accepted))
                    raw.append(scores[node])
        if cells:
            self._count(np.asarray(cells), np.asarray(hits), np.asarray(raw, np.float32))

    def _count(self, cells: IntArray, hits: FloatArray, raw: npt.NDArray[np.float32]) -> None:
        """Trials: their cells, whether they were right, and what their sources said."""
        predicted = self._estimate(cells, raw)
        buckets = cells // _CELLS * (len(_EDGES) + 1) + np.searchsorted(_EDGES, predicted)
        said: tuple[FloatArray | float, ...] = (1.0, predicted, hits)
        for counters, values in zip(self._reliability, said, strict=True):
            _add(counters.reshape(-1), buckets, values, self._DECAY)
        _add(self._tries.reshape(-1), cells, 1.0, self._DECAY)
        _add(self._hits.reshape(-1), cells, hits, self._DECAY)


def _add(counters: FloatArray, cells: IntArray, values: FloatArray | float, decay: float) -> None:
    """Decay the cells that are counted, each once, then count."""
    counters[cells] *= decay
    np.add.at(counters, cells, values)
