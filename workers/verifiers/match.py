"""A draft tree and the token each node decided -> the accepted path and the token behind it.

Match is exact for every tree, drafter and pruning: the text is always what the target alone decides; the tree only
says how many of those tokens one forward yields. Source: Gumbel-coupled, drafter-invariant verification
(Daliri et al. 2408.07978 for chains); the tree walk is the same argument at each node.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.cluster.speculation import Tree
from paceline.workers.verifiers.base import Verdict


def match(tree: Tree, decided: npt.NDArray[np.int64]) -> Verdict:
    """Walk from the root: while some child carries the token its parent decided, go there.

    Args:
        tree: N nodes.
        decided: int64 [N], the target's token behind each node.

    >>> tree = Tree.build(5, [7, 8, 9], [-1, 0, 0])
    >>> match(tree, np.array([7, 9, 0, 4]))   # 7 is right, behind it 9 beats 8, behind 9 comes 4
    Verdict(path=(1, 3), emitted=4)
    """
    if tree.num_drafted == 0:
        return Verdict((), int(decided[0]))
    at = 0
    path: list[int] = []
    while True:
        children = np.flatnonzero((tree.parents == at) & (tree.tokens == decided[at]))
        if len(children) == 0:
            return Verdict(tuple(path), int(decided[at]))
        at = int(children[0])
        path.append(at)


class Match:
    """`match` as the engine asks for it."""

    name = "match"

    def verify(self, tree: Tree, decided: npt.NDArray[np.int64]) -> Verdict:
        return match(tree, decided)
