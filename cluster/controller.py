"""Measured step times, calibrated scores, draft waits -> how much to draft, and from whom, zero included.

The rate of a step with n draft nodes is (B + sum of their chances) / T(B + n). Chances are path products of
calibrated scores, so taking nodes in descending order always takes a parent before its child, and the best n is found
by one scan (T has steps, so no early stop). Whether to ask for drafts at all is decided before, in
`paceline.cluster.asking`. In its trials a source's own scores are believed: calibrated ones are low because it was
bad, nodes with low scores are not verified, and what is not verified would never be found to have become good.

Source of the tree rule: Sequoia (Chen et al. 2402.12374) for path products; SmartSpec (Liu et al. 2406.14066) for
goodput; here the tree is cut over all streams of the batch at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paceline.cluster.asking import Worth
from paceline.cluster.referee import Referee
from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_NAMES

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MOST = 0.2
"""What one step may be off, as it counts."""


class StepCost:
    """Rows of a step -> seconds: measured at start, corrected by what steps take (context, neighbours)."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        order = np.argsort(rows)
        self.rows = np.asarray(rows, np.float64)[order]
        # More rows never cost less. Where the table says so the smaller number was measured too slow: whoever has
        # the core meanwhile only ever adds.
        self.seconds = np.minimum.accumulate(np.asarray(seconds, np.float64)[order][::-1])[::-1].copy()
        self._rows: list[float] = self.rows.tolist()
        self._measured: list[float] = self.seconds.tolist()
        self._scale = 1.0

    def __call__(self, rows: npt.ArrayLike) -> FloatArray:
        """Seconds of steps with these numbers of rows; beyond the table, on along its last piece."""
        wanted = np.asarray(rows, np.float64)
        inside = np.interp(wanted, self.rows, self.seconds)
        if len(self.rows) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            inside = inside + np.maximum(0.0, wanted - self.rows[-1]) * slope
        return np.asarray(inside * self._scale)

    def observe(self, rows: int, seconds: float) -> None:
        """A step took this long: the scale follows, and the table where it was wrong about so many rows.

        A table measured beside a busy neighbour may be flat where steps are not, and would be believed for ever. Single
        steps count for little, however long they took: else those that are interrupted, which are always the same
        kind, would push the scale up and with it every number of rows that is not seen.
        """
        table: list[float] = self.seconds.tolist()  # plain floats: this runs between steps
        right = bisect_left(self._rows, rows)
        near = sorted({max(0, right - 1), min(right, len(table) - 1)})
        gaps = [abs(self._rows[index] - rows) for index in near]
        weights = [1.0 - gap / sum(gaps) if sum(gaps) > 0 else 1.0 for gap in gaps]
        expected = self._scale * self._between(table, near, rows)
        error = min(max(seconds / expected - 1.0, -_MOST), _MOST)
        self._scale *= 1.0 + 0.1 * error
        for index, weight in zip(near, weights, strict=True):
            table[index] *= 1.0 + 0.04 * weight * error  # slower: the scale comes first
            # A scale too large by what some rows are too small is no error of either: without a pull to what was
            # measured they part for ever, and rows that are not seen grow with the scale.
            table[index] *= (self._measured[index] / table[index]) ** (0.005 * weight)
        # Others give way: more rows never cost less.
        last = near[-1]
        self.seconds[:] = [
            min(value, table[last]) if index < last else max(value, table[last])
            for index, value in enumerate(table)
        ]

    def _between(self, table: list[float], near: list[int], rows: float) -> float:
        """`table` at a number of rows whose neighbours are `near`; as `__call__`, for one number."""
        if rows > self._rows[-1]:
            near = [max(0, len(table) - 2), len(table) - 1]
        low, high = near[0], near[-1]
        if low == high or rows <= self._rows[low]:
            return table[low]
        slope = (table[high] - table[low]) / (self._rows[high] - self._rows[low])
        return table[low] + (rows - self._rows[low]) * slope


_EDGES = np.asarray([0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95])
"""Between the buckets of scores."""
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
        cells, hits = forest.cells[trial], accepted[trial].astype(np.float64)
        predicted = self._estimate(cells, forest.scores[trial])
        buckets = cells // _CELLS * (len(_EDGES) + 1) + np.searchsorted(_EDGES, predicted)
        for counters, values in zip(self._reliability, (1.0, predicted, hits), strict=True):
            _add(counters.reshape(-1), buckets, values, self._DECAY)
        _add(self._tries.reshape(-1), cells, 1.0, self._DECAY)
        _add(self._hits.reshape(-1), cells, hits, self._DECAY)


def _add(counters: FloatArray, cells: IntArray, values: FloatArray | float, decay: float) -> None:
    """Decay the cells that are counted, each once, then count."""
    counters[cells] *= decay
    np.add.at(counters, cells, values)


class Controller:
    """One engine's decisions. Plain data in and out; the clock is the caller's."""

    def __init__(self, cost: StepCost, *, max_nodes: int = 64, referee: Referee | None = None) -> None:
        """`referee`: switches drafting off where it loses by the clock; without one the figures are believed."""
        self.cost = cost
        self.referee = referee
        self._max_nodes = max_nodes
        self._calibration = Calibration()
        self._worths: dict[str, Worth] = {}

    # -- whether to ask ----------------------------------------------------------------------------------

    def ask_for(
        self,
        name: str,
        streams: Sequence[str],
        found: Sequence[float] = (),
        num_others: int = 0,
        *,
        is_free: bool = False,
    ) -> list[int]:
        """Indices of the streams for which drafter `name` is worth asking next; see `Worth`."""
        worth = self._worth(name, is_free)
        return worth.ask_for(streams, found or [0.0] * len(streams), num_others)

    def asked(self, name: str, wait_s: float, gained: Mapping[str, float]) -> None:
        """What asking `name` in a step cost, and what each stream had of it; see `Worth.asked`."""
        self._worth(name).asked(wait_s, gained)

    def _worth(self, name: str, is_free: bool = False) -> Worth:
        if name not in self._worths:
            self._worths[name] = Worth(self.cost, is_free=is_free)
        return self._worths[name]

    def is_trial(self, stream: str) -> bool:
        """Whether somebody is tried for the stream's next step."""
        return any(worth.is_trial(stream) for worth in self._worths.values())

    def close(self, stream: str) -> None:
        """The stream ended: what it was like is forgotten."""
        for worth in self._worths.values():
            worth.close(stream)

    def reset(self, name: str, source: int) -> None:
        """`name` drafts with other weights now: what was learnt of it and of its nodes no longer counts."""
        self._worths.pop(name, None)
        self._calibration.forget(source)
        if self.referee is not None:
            self.referee.reset()

    # -- how much to verify ------------------------------------------------------------------------------

    def choose(
        self, trees: Sequence[Tree | None], num_others: int = 0, believed: Sequence[bool] = ()
    ) -> list[Tree | None]:
        """Cut all streams' trees to the nodes that maximise expected tokens per second; None where nothing is left.

        `trees` has one entry for each stream that is caught up and wants drafts, `num_others` are those that do not.
        `believed`: whose trees' own scores count, not what became of such scores before; none if not given.
        """
        present = [tree for tree in trees if tree is not None]
        if not present:
            return [None] * len(trees)
        forest = Forest(present)
        scores = self._calibration.estimate(forest)
        if any(believed):
            is_believed = [is_so for is_so, tree in zip(believed, trees, strict=True) if tree is not None]
            scores = np.where(np.repeat(is_believed, [len(tree) for tree in present]), forest.scores, scores)
        products = forest.products(scores)
        self._calibration.fade()
        order = np.argsort(-products, kind="stable")[: min(self._max_nodes, len(forest) - len(present))]
        gains = np.concatenate([[0.0], np.cumsum(products[order])])
        plain = len(trees) + num_others
        best = int(np.argmax((plain + gains) / self.cost(plain + np.arange(len(gains)))))
        keep = forest.is_root.copy()
        keep[order[:best]] = True
        chosen: list[Tree | None] = []
        firsts = iter(forest.first)
        for tree in trees:  # with the source's own scores: they are what is calibrated
            if tree is None:
                chosen.append(None)
                continue
            first = next(firsts)
            nodes = np.flatnonzero(keep[first : first + len(tree)])
            chosen.append(tree.select(nodes) if len(nodes) > 1 else None)
        return chosen

    def verified(self, trees: Sequence[Tree], paths: Sequence[Sequence[int]]) -> None:
        """Chosen trees and the accepted nodes of each."""
        if trees:
            self._calibration.observe(Forest(trees), paths)

    def calibration_errors(self) -> dict[str, float]:
        """Source -> how far its calibrated scores were from the truth lately, 0 to 1."""
        return self._calibration.errors()
