"""Measured step times, calibrated scores, draft waits -> how much to draft, and from whom, zero included.

The rate of a step with n draft nodes is (B + sum of their chances) / T(B + n). Chances are path products of
calibrated scores, so taking nodes in descending order always takes a parent before its child, and the best n is found
by one scan (T has steps, so no early stop). What a draft costs in waiting is spent before its nodes are seen; whether
to ask for one at all is therefore a second decision, made from what asking brought lately. Together they bound the
loss on text nobody can draft: a source that does not pay is asked again only in the 8th, 16th ... 512th step.

Source of the tree rule: Sequoia (Chen et al. 2402.12374) for path products; SmartSpec (Liu et al. 2406.14066) for
goodput; here the tree is cut over all streams of the batch at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_NAMES

FloatArray = npt.NDArray[np.float64]


class StepCost:
    """Rows of a step -> seconds: measured at start, scaled by what steps take now (context, neighbours)."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        order = np.argsort(rows)
        self.rows = np.asarray(rows, np.float64)[order]
        # More rows never cost less; a dip is noise of the measurement.
        self.seconds = np.maximum.accumulate(np.asarray(seconds, np.float64)[order])
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
        """A step took this long."""
        ratio = seconds / float(self(rows)) * self._scale
        self._scale += 0.05 * (min(max(ratio, 0.2), 5.0) - self._scale)


class Calibration:
    """A source's scores -> how often nodes with such a score were accepted, given that their parent was.

    Counters by (source, rank, depth, score bucket), decayed, with the score itself as a prior worth 8 trials.
    """

    _EDGES = np.asarray([0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95])
    _PRIOR = 8.0
    _DECAY = 0.995

    def __init__(self) -> None:
        shape = (len(SOURCE_NAMES), 3, 3, len(self._EDGES) + 1)
        self._tries = np.zeros(shape)
        self._hits = np.zeros(shape)

    def _keys(self, tree: Tree) -> tuple[npt.NDArray[np.int64], ...]:
        return (
            tree.sources[1:].astype(np.int64),
            np.minimum(tree.sibling_ranks()[1:], 2).astype(np.int64),
            np.minimum(tree.depths[1:] - 1, 2).astype(np.int64),
            np.searchsorted(self._EDGES, tree.scores[1:]).astype(np.int64),
        )

    def calibrated(self, tree: Tree) -> Tree:
        """The same tree with calibrated scores."""
        keys = self._keys(tree)
        scores = tree.scores.copy()
        prior = self._PRIOR * scores[1:]
        scores[1:] = (self._hits[keys] + prior) / (self._tries[keys] + self._PRIOR)
        return Tree(tree.tokens, tree.parents, tree.depths, tree.sources, scores)

    def observe(self, raw: Tree, path: Sequence[int]) -> None:
        """What was verified. Only nodes whose parent was accepted are trials; counting others would bias."""
        accepted = np.zeros(len(raw), np.bool_)
        accepted[[0, *path]] = True
        trial = accepted[raw.parents[1:]]
        if not trial.any():
            return
        keys = tuple(key[trial] for key in self._keys(raw))
        self._tries[keys] *= self._DECAY
        self._hits[keys] *= self._DECAY
        np.add.at(self._tries, keys, 1.0)
        np.add.at(self._hits, keys, accepted[1:][trial].astype(np.float64))


@dataclass(slots=True)
class _Gate:
    """One drafter's balance: tokens it brought a step against seconds it cost."""

    gain: float = 1.0
    """Accepted tokens a step and stream, smoothed; optimistic at first, so that it is tried."""
    wait_s: float = 0.0
    pause: int = 0
    next_pause: int = 8
    is_trial: bool = False
    """The coming step asks although it does not seem to pay."""


class Controller:
    """One engine's decisions. Plain data in and out; the clock is the caller's."""

    def __init__(self, cost: StepCost, *, max_nodes: int = 64) -> None:
        self.cost = cost
        self._max_nodes = max_nodes
        self._calibration = Calibration()
        self._gates: dict[str, _Gate] = {}

    # -- whether to ask ----------------------------------------------------------------------------------

    def should_ask(self, name: str, num_streams: int) -> bool:
        """Whether drafter `name` is worth asking for the next step of this many streams."""
        gate = self._gates.setdefault(name, _Gate())
        if gate.pause > 0:
            gate.pause -= 1
            return False
        gate.is_trial = not self._pays(gate, num_streams)
        if not gate.is_trial:
            return True
        # One trial step, then a longer pause: a source that begins to pay is found again.
        gate.pause = gate.next_pause
        gate.next_pause = min(512, gate.next_pause * 2)
        return True

    def _pays(self, gate: _Gate, num_streams: int) -> bool:
        streams = max(1, num_streams)
        plain_s = float(self.cost(streams))
        nodes = streams * max(1.0, gate.gain)
        return (streams * (1.0 + gate.gain)) / (
            float(self.cost(streams + nodes)) + gate.wait_s
        ) > streams / plain_s

    def asked(self, name: str, wait_s: float, gained: float, num_streams: int) -> None:
        """What asking `name` in a step cost, and the tokens of its that were accepted in it."""
        gate = self._gates.setdefault(name, _Gate())
        now = _Gate(gained / max(1, num_streams), wait_s)
        weight = 0.5 if gate.is_trial else 0.1  # trials are rare: each must count
        gate.wait_s += weight * (now.wait_s - gate.wait_s)
        gate.gain += weight * (now.gain - gate.gain)
        if self._pays(gate, num_streams) or (gate.is_trial and self._pays(now, num_streams)):
            gate.next_pause = 8
            gate.pause = 0

    # -- how much to verify ------------------------------------------------------------------------------

    def choose(self, trees: Sequence[Tree | None]) -> list[Tree | None]:
        """Cut all streams' trees to the nodes that maximise expected tokens per second; None where nothing is left.

        `trees` has one entry for each stream that is caught up.
        """
        calibrated = [None if tree is None else self._calibration.calibrated(tree) for tree in trees]
        products = [np.empty(0, np.float32) if t is None else t.path_products()[1:] for t in calibrated]
        owner = np.repeat(np.arange(len(trees)), [len(p) for p in products])
        flat = np.concatenate(products) if products else np.empty(0, np.float32)
        if len(flat) == 0:
            return [None] * len(trees)
        order = np.argsort(-flat, kind="stable")[: self._max_nodes]
        gains = np.concatenate([[0.0], np.cumsum(flat[order], dtype=np.float64)])
        rows = len(trees) + np.arange(len(gains))
        best = int(np.argmax((len(trees) + gains) / self.cost(rows)))
        taken = order[:best]
        offsets = np.concatenate([[0], np.cumsum([len(p) for p in products])])
        chosen: list[Tree | None] = []
        for stream, tree in enumerate(trees):  # with the source's own scores: they are what is calibrated
            nodes = np.sort(taken[owner[taken] == stream] - offsets[stream]) + 1
            keep = np.concatenate([[0], nodes]).astype(np.intp)
            chosen.append(tree.select(keep) if tree is not None and len(nodes) else None)
        return chosen

    def verified(self, tree: Tree, path: Sequence[int]) -> None:
        """A chosen tree's accepted nodes."""
        self._calibration.observe(tree, path)
