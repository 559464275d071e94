"""Proposed tokens -> draft trees as flat numpy arrays, and how long to wait for them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.cluster.types import SOURCE_DRAFT, SOURCE_TARGET

IntArray = npt.NDArray[np.int32]

_TRIAL_S = 0.02
"""Spare work that is looked at together: long enough for a scheduler's time slices to even out."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 64.0

_ROOT = (
    np.asarray([-1], np.int32),
    np.zeros(1, np.int32),
    np.asarray([SOURCE_TARGET], np.uint8),
    np.ones(1, np.float32),
)
"""Parents, depths, sources and scores of every plain step: shared, never written."""
for _array in _ROOT:
    _array.setflags(write=False)


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes of one stream's step. Node 0 is the root: the pending token, decided but not yet in the KV pool.

    tokens, parents, depths: int32 [N]; parents[0] = -1 and parents[i] < i. sources: uint8 [N].
    scores: float32 [N], the source's estimate of P(accepted | parent accepted), 1 at the root.
    A plain decode step is the tree with a root and nothing else.
    """

    tokens: IntArray
    parents: IntArray
    depths: IntArray
    sources: npt.NDArray[np.uint8]
    scores: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_drafted(self) -> int:
        return len(self.tokens) - 1

    @classmethod
    def root_only(cls, token: int) -> Tree:
        """The tree of a plain decode step."""
        return cls(np.asarray([token], np.int32), *_ROOT)

    @classmethod
    def build(
        cls,
        root: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        source: int = SOURCE_DRAFT,
        scores: Sequence[float] | None = None,
    ) -> Tree:
        """A root and proposals whose `parents` count from -1 (the root), as drafts travel. Scores default to 1."""
        num = len(tokens)
        all_parents = np.empty(num + 1, np.int32)
        all_parents[0] = -1
        all_parents[1:] = np.asarray(parents, np.int32) + 1
        depths = np.zeros(num + 1, np.int32)
        for node in range(1, num + 1):
            depths[node] = depths[all_parents[node]] + 1
        sources = np.full(num + 1, source, np.uint8)
        sources[0] = SOURCE_TARGET
        all_scores = np.ones(num + 1, np.float32)
        if scores is not None:
            all_scores[1:] = scores
        return cls(np.asarray([root, *tokens], np.int32), all_parents, depths, sources, all_scores)

    def trimmed(self, max_nodes: int, max_depth: int) -> Tree:
        """Without nodes past a depth or a count. Parents precede children, so a prefix is always a tree."""
        return self.select(np.flatnonzero(self.depths <= max(0, max_depth))[: max(1, max_nodes)])

    def select(self, nodes: npt.NDArray[np.intp]) -> Tree:
        """These nodes in this order: the root first, each parent kept and before its children."""
        if len(nodes) == len(self.tokens) and bool((nodes[1:] > nodes[:-1]).all()):
            return self
        where = np.full(len(self.tokens) + 1, -1, np.int32)  # the last entry answers the root's parent, -1
        where[nodes] = np.arange(len(nodes), dtype=np.int32)
        parents = where[self.parents[nodes]]
        return Tree(self.tokens[nodes], parents, self.depths[nodes], self.sources[nodes], self.scores[nodes])

    def common(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the tree has, one behind the other from its root."""
        at = 0
        for num, token in enumerate(tokens):
            children = np.flatnonzero((self.parents == at) & (self.tokens == token))
            if len(children) == 0:
                return num
            at = int(children[0])
        return len(tokens)

    def path_products(self) -> npt.NDArray[np.float32]:
        """float32 [N]: product of the scores from the root to each node, the chance that it ends up accepted."""
        products = self.scores.copy()
        for node in range(1, len(self.tokens)):
            products[node] *= products[self.parents[node]]
        return products

    def ancestor_mask(self) -> npt.NDArray[np.bool_]:
        """bool [N, N]: row i may attend to column j (j is i or an ancestor of i)."""
        num = len(self.tokens)
        mask = np.zeros((num, num), np.bool_)
        for node in range(num):
            if self.parents[node] >= 0:
                mask[node] = mask[self.parents[node]]
            mask[node, node] = True
        return mask


def fuse(trees: Sequence[Tree]) -> Tree:
    """Several sources' trees behind one root -> one: equal paths merge, a node keeps its best score and its source.

    The most likely path comes first (then accepting it moves no KV), the rest by path product.
    """
    if len(trees) == 1:
        return trees[0]
    tokens, parents = [int(trees[0].tokens[0])], [-1]
    sources, scores = [SOURCE_TARGET], [1.0]
    index: dict[tuple[int, int], int] = {}
    for tree in trees:
        where = [0] * len(tree)
        for node in range(1, len(tree)):
            key = (where[tree.parents[node]], int(tree.tokens[node]))
            at = index.get(key)
            if at is None:
                at = index[key] = len(tokens)
                tokens.append(key[1])
                parents.append(key[0])
                sources.append(int(tree.sources[node]))
                scores.append(float(tree.scores[node]))
            elif tree.scores[node] > scores[at]:
                scores[at], sources[at] = float(tree.scores[node]), int(tree.sources[node])
            where[node] = at
    merged = Tree.build(tokens[0], tokens[1:], [parent - 1 for parent in parents[1:]], scores=scores[1:])
    merged.sources[:] = sources
    return merged.select(spine_first(merged))


def spine_first(tree: Tree) -> npt.NDArray[np.intp]:
    """An order of the nodes: the most likely path, then the others by path product."""
    products = tree.path_products()
    spine, at = [0], 0
    while True:
        children = np.flatnonzero(tree.parents == at)
        if len(children) == 0:
            break
        at = int(children[np.argmax(products[children])])
        spine.append(at)
    order = np.argsort(
        -products, kind="stable"
    )  # a child's product is at most its parent's: parents come first
    rest = order[~np.isin(order, spine)]
    return np.concatenate([np.asarray(spine, np.intp), rest.astype(np.intp)])


def depths_met(tree: Tree, tokens: Sequence[int], source: int) -> tuple[int, int]:
    """Of what one source proposed: the depths at which it met the text, and how many of these were right.

    Nodes at a depth were put to the test if all before them were right. So the first number is the second one, or one
    more: A and A + R of the estimator A / (A + R), in which proposals behind a wrong one do not count.

    >>> tree = Tree.build(5, [7, 8, 9], [-1, 0, 0])
    >>> depths_met(tree, [7, 9, 4], SOURCE_DRAFT), depths_met(tree, [7, 1], SOURCE_DRAFT), depths_met(tree, [3], SOURCE_DRAFT)
    ((2, 2), (2, 1), (1, 0))
    """
    if tree.num_drafted == 0:
        return 0, 0
    ids, parents, sources = tree.tokens.tolist(), tree.parents.tolist(), tree.sources.tolist()
    at, num_right = 0, 0
    for token in tokens:
        is_met, right = False, 0
        for node in range(at + 1, len(ids)):
            if parents[node] == at and sources[node] == source:
                is_met = True
                if ids[node] == token:
                    right = node
                    break
        if not right:
            return num_right + is_met, num_right
        at, num_right = right, num_right + 1
    return num_right, num_right


def is_tree(tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float], vocab_size: int) -> bool:
    """Whether what came over a connection is a topological tree of known tokens (a draft worker may be wrong)."""
    if not len(tokens) == len(parents) == len(scores):
        return False
    return all(
        -1 <= parent < node and 0 <= token < vocab_size and 0.0 <= score <= 1.0
        for node, (token, parent, score) in enumerate(zip(tokens, parents, scores, strict=True))
    )


def reroot(tokens: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> list[tuple[int, int]]:
    """The subtree behind `path`, of a tree as drafts travel: (old index, new parent) of its nodes, in order.

    Empty if the tree does not hold the path, or nothing behind it.

    >>> reroot((7, 8, 9, 5), (-1, 0, 1, 0), [7])            # 7 -> 8 -> 9, 7 -> 5
    [(1, -1), (2, 0), (3, -1)]
    """
    at = -1
    for token in path:
        steps = (i for i in range(at + 1, len(tokens)) if parents[i] == at and tokens[i] == token)
        at = next(steps, len(tokens))
    where = {at: -1}
    nodes: list[tuple[int, int]] = []
    for node in range(at + 1, len(tokens)):
        if parents[node] in where:
            where[node] = len(nodes)
            nodes.append((node, where[parents[node]]))
    return nodes


def prefix_hash(token_ids: Sequence[int] | IntArray) -> int:
    """64-bit hash of the last 64 tokens: enough to tell that two sides disagree about a stream, cheap per step."""
    tail = np.asarray(token_ids[-64:], np.int32)
    return int.from_bytes(hashlib.blake2b(tail.tobytes(), digest_size=8).digest(), "big") >> 1


class DraftPatience:
    """Round trips of a draft worker -> how long the next step may wait for it.

    A worker that answers is waited for up to twice its smoothed round trip. One that misses is not waited for again
    until it answers: a worker that hangs, however long, costs one wait. Its late answer tells how slow it is now, and
    the next step waits that long, unless that is past the limit.
    """

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._smoothed_s = max_wait_s / 2
        self._is_trusted = True

    def wait_s(self) -> float:
        """Seconds the coming step may wait; 0 while the worker is out of favour."""
        if not self._is_trusted:
            return 0.0
        return min(self._max_wait_s, 2.0 * self._smoothed_s + 1e-3)

    def answered(self, round_trip_s: float) -> None:
        """A reply arrived, in time or not."""
        if self._is_trusted:
            self._smoothed_s += 0.2 * (round_trip_s - self._smoothed_s)
        else:
            # It missed: it may have become slower for good, and no average of faster times would tell.
            self._smoothed_s = max(self._smoothed_s, round_trip_s)
            self._is_trusted = round_trip_s <= self._max_wait_s
            if not self._is_trusted:
                self._smoothed_s = self._max_wait_s / 2

    def missed(self) -> None:
        """The deadline passed without a reply."""
        self._is_trusted = False


class SpareCore:
    """Wall and CPU seconds of work that nobody asked for -> whether it may go on.

    Work that is kept waiting for its core takes longer than it computes: others want the core, and they are the ones
    who serve. Then it pauses for a second, twice as long each time it finds that again, a minute at most.
    """

    def __init__(self, least_share: float = 0.95) -> None:
        self._least_share = least_share
        self._wall_s = 0.0
        self._cpu_s = 0.0
        self._resume_at = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def may_work(self, now: float) -> bool:
        """Whether a core seems to be spare; `now` in seconds of a monotonic clock."""
        return now >= self._resume_at

    def worked(self, now: float, wall_s: float, cpu_s: float) -> None:
        """A piece of such work took so long, and computed so long."""
        self._wall_s += wall_s
        self._cpu_s += cpu_s
        if self._wall_s < _TRIAL_S:
            return
        if self._cpu_s < self._least_share * self._wall_s:
            self._resume_at = now + self._pause_s
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        else:
            self._pause_s = _FIRST_PAUSE_S
        self._wall_s = self._cpu_s = 0.0
