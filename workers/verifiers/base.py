"""A draft tree and the token each node decided -> what is accepted of it: what the engine asks of every rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.cluster.speculation import Tree


@dataclass(frozen=True, slots=True)
class Verdict:
    """path: accepted local nodes, root left out. emitted: the token decided at the path's end."""

    path: tuple[int, ...]
    emitted: int


class Verifier(Protocol):
    """A rule of acceptance. It alone decides whether the text is exact."""

    name: str

    def verify(self, tree: Tree, decided: npt.NDArray[np.int64]) -> Verdict:
        """`decided` is int64 [N], the target's token behind each of the tree's N nodes."""
        ...
