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
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from paceline.cluster.asking import Worth
from paceline.cluster.calibration import Calibration, Forest, cells_of
from paceline.cluster.referee import Referee
from paceline.cluster.speculation import Tree

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

    @overload
    def __call__(self, rows: float) -> float: ...
    @overload
    def __call__(self, rows: Sequence[int] | npt.NDArray[Any]) -> FloatArray: ...
    def __call__(self, rows: float | Sequence[int] | npt.NDArray[Any]) -> float | FloatArray:
        """Seconds of steps with these numbers of rows; beyond the table, on along its last piece."""
        if isinstance(rows, (int, float)):
            return self._one(rows)
        wanted = np.asarray(rows, np.float64)
        inside = np.interp(wanted, self.rows, self.seconds)
        if len(self.rows) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            inside = inside + np.maximum(0.0, wanted - self.rows[-1]) * slope
        return np.asarray(inside * self._scale)

    def _one(self, rows: float) -> float:
        right = bisect_left(self._rows, rows)
        near = sorted({max(0, right - 1), min(right, len(self._rows) - 1)})
        return self._scale * self._between(self.seconds.tolist(), near, rows)

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


_FEW = 64
"""Nodes of a step up to which they are taken one by one."""


class Controller:
    """One engine's decisions. Plain data in and out; the clock is the caller's."""

    def __init__(
        self, cost: StepCost, *, max_nodes: int = 64, referee: Referee | None = None, few: int = _FEW
    ) -> None:
        """`referee`: switches drafting off where it loses by the clock; without one the figures are believed.

        `few`: so many nodes of a step, or less, are taken one by one. 0 is the plain twin: always all in passes of numpy.
        """
        self.cost = cost
        self.referee = referee
        self._max_nodes = max_nodes
        self._few = few
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
        is_gift: bool = False,
    ) -> list[int]:
        """Indices of the streams for which drafter `name` is worth asking next; see `Worth`."""
        worth = self._worth(name, is_free)
        return worth.ask_for(streams, found or [0.0] * len(streams), num_others, is_gift=is_gift)

    def asked(self, name: str, wait_s: float, gained: Mapping[str, float], *, is_free: bool = False) -> None:
        """What asking `name` in a step cost, and what each stream had of it; see `Worth.asked`."""
        self._worth(name, is_free).asked(wait_s, gained)

    def _worth(self, name: str, is_free: bool) -> Worth:
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
        if sum(map(len, present)) <= self._few:
            return self._choose_few(trees, num_others, believed)
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

    def _choose_few(
        self, trees: Sequence[Tree | None], num_others: int, believed: Sequence[bool]
    ) -> list[Tree | None]:
        """The same, node by node."""
        nodes: list[tuple[float, int, int]] = []
        """Minus the chance of each that is not a root, its tree and its place in it."""
        for index, tree in enumerate(trees):
            if tree is None:
                continue
            scores, parents = tree.scores.tolist(), tree.parents.tolist()
            if not (believed and believed[index]):
                scores = self._calibration.estimate_few(cells_of(tree), scores)
            products = [1.0]
            for node in range(1, len(parents)):
                products.append(scores[node] * products[parents[node]])
                nodes.append((-products[node], index, node))
        self._calibration.fade()
        nodes.sort()
        plain = len(trees) + num_others
        tokens, best, best_rate = float(plain), 0, 0.0
        num_most = min(self._max_nodes, len(nodes))
        costs: list[float] = self.cost(plain + np.arange(num_most + 1)).tolist()
        for num in range(num_most + 1):
            tokens -= nodes[num - 1][0] if num else 0.0
            if tokens / costs[num] > best_rate:
                best, best_rate = num, tokens / costs[num]
        kept: dict[int, list[int]] = {}
        for _, index, node in nodes[:best]:
            kept.setdefault(index, [0]).append(node)
        return [
            tree.select(np.asarray(sorted(kept[index]))) if tree is not None and index in kept else None
            for index, tree in enumerate(trees)
        ]

    def verified(self, trees: Sequence[Tree], paths: Sequence[Sequence[int]]) -> None:
        """Chosen trees and the accepted nodes of each."""
        if trees and sum(map(len, trees)) <= self._few:
            self._calibration.observe_few(trees, paths)
        elif trees:
            self._calibration.observe(Forest(trees), paths)

    def calibration_errors(self) -> dict[str, float]:
        """Source -> how far its calibrated scores were from the truth lately, 0 to 1."""
        return self._calibration.errors()
