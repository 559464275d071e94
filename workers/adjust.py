"""Logits, streams and their trees -> logits after bias, penalties and minimum length, counted along each node's path.

A node's row is adjusted by the tokens the stream would have if the node were accepted: committed tokens, the node's
ancestors and the node. So a row is the same whether its token was drafted or committed, and speculation stays exact.
The counts are a function of the token ids alone: nothing here has to survive preemption or a move to another worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.cluster.errors import RequestError
from paceline.cluster.scheduler import Segment, Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import Sampling
from paceline.kernels.penalties import penalise

IntArray = npt.NDArray[np.int64]


class Changes(NamedTuple):
    """Entries of some rows: row and token id (int64 [P]), and what `penalise` does there (float64 [P])."""

    rows: IntArray
    ids: IntArray
    bias: npt.NDArray[np.float64]
    repetition: npt.NDArray[np.float64]
    minus: npt.NDArray[np.float64]


class TokenCounts:
    """What one stream's processors know: the ids they can touch, with bias, prompt flag, output count and block flag.

    A column for each such id, added when the id is first met; a vocabulary's worth is never allocated.
    """

    def __init__(
        self, sampling: Sampling, prompt_ids: Sequence[int], stop_ids: Sequence[int], vocab_size: int
    ) -> None:
        """Ids outside the vocabulary are passed over: a draft model may have fewer than its target."""
        self._vocab_size = vocab_size
        self._repetition = sampling.repetition_penalty
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        self._min_tokens = sampling.min_tokens
        self._counts_output = (self._repetition, self._frequency, self._presence) != (1, 0, 0)
        self._column: dict[int, int] = {}
        self._ids = np.zeros(16, np.int64)
        self._bias = np.zeros(16, np.float64)
        self._counts = np.zeros(16, np.int32)
        self._in_prompt = np.zeros(16, np.bool_)
        self._is_stop = np.zeros(16, np.bool_)
        self.num_output = 0
        """Output tokens counted so far."""
        for token, bias in sampling.logit_bias:
            at = self._columns([token])
            self._bias[at] = bias
        if self._min_tokens:
            at = self._columns(stop_ids)
            self._is_stop[at] = True
        if self._repetition != 1:
            at = self._columns(prompt_ids)
            self._in_prompt[at] = True

    def extend(self, output_ids: Sequence[int]) -> None:
        """Count further output tokens."""
        self.num_output += len(output_ids)
        if self._counts_output:
            at = self._columns(output_ids)
            np.add.at(self._counts, at, 1)

    @property
    def is_over(self) -> bool:
        """Nothing will be adjusted any more: there was only a minimum length, and it is reached."""
        return not self._counts_output and not self._bias.any() and self.num_output >= self._min_tokens

    def changes(self, rows: IntArray, tokens: IntArray, depths: IntArray) -> Changes:
        """What to change in rows that stand behind the counted tokens, each behind a path of its own.

        Args:
            rows, tokens: int64 [P], pairs: `tokens[i]` stands on the path of row `rows[i]`.
            depths: int64 [R], tokens on each row's path.
        """
        num_known = len(self._column)
        at = self._columns(tokens.tolist()) if self._counts_output else np.empty(0, np.int64)
        num = len(self._column)
        counts = np.repeat(self._counts[None, :num], len(depths), axis=0)
        if self._counts_output:
            np.add.at(counts, (rows[tokens < self._vocab_size], at), 1)
        while len(self._column) > num_known:  # most paths are not taken: their columns would pile up
            self._column.popitem()
        said = counts > 0
        repetition = np.where(self._in_prompt[:num] | said, self._repetition, 1.0)
        minus = self._frequency * counts + self._presence * said
        if self._min_tokens:
            is_short = self.num_output + depths < self._min_tokens
            minus[is_short[:, None] & self._is_stop[:num]] = np.inf
        return Changes(
            np.repeat(np.arange(len(depths)), num),
            np.tile(self._ids[:num], len(depths)),
            np.tile(self._bias[:num], len(depths)),
            repetition.ravel(),
            minus.ravel(),
        )

    def _columns(self, tokens: Sequence[int]) -> IntArray:
        """Columns of these tokens; unknown ones get a new column, for which the arrays may be replaced."""
        known = [token for token in tokens if token < self._vocab_size]
        at = np.asarray([self._column.setdefault(token, len(self._column)) for token in known], np.int64)
        while len(self._column) > len(self._ids):
            for name in ("_ids", "_bias", "_counts", "_in_prompt", "_is_stop"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self._ids[at] = known
        return at


class Adjuster:
    """The counts of all streams of an engine that have something to adjust; false if none has."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._streams: dict[str, TokenCounts] = {}

    def __bool__(self) -> bool:
        return bool(self._streams)

    def check(self, sampling: Sampling) -> None:
        """
        Raises:
            RequestError: a bias for a token that does not exist.
        """
        for token, _ in sampling.logit_bias:
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"logit_bias: token id {token}: expected 0..{self._vocab_size - 1}", param="logit_bias"
                )

    def close(self, stream: Stream) -> None:
        """Forget a stream."""
        self._streams.pop(stream.key, None)

    def open(self, stream: Stream) -> None:
        """A stream was admitted. One with nothing to adjust leaves no trace here."""
        sampling = stream.request.sampling
        if sampling.is_adjusted:
            prompt, stops = stream.request.prompt_ids, stream.request.stop_ids
            self._streams[stream.key] = TokenCounts(sampling, prompt, stops, self._vocab_size)

    def changes(self, segments: Sequence[Segment]) -> tuple[list[Changes], list[int]]:
        """For the rows of these sampled segments in order, a tree's nodes or one each: what `apply_changes` takes."""
        found: list[Changes] = []
        starts: list[int] = []
        start = 0
        for segment in segments:
            stream = segment.stream
            counts = self._streams.get(stream.key)
            if counts is not None:
                counts.extend(stream.token_ids[stream.num_prompt + counts.num_output :].tolist())
                if counts.is_over:
                    self.close(stream)
                else:
                    found.append(counts.changes(*paths_of(segment.tree)))
                    starts.append(start)
            start += len(segment.tree) if segment.tree is not None else 1
        return found, starts


def apply_changes(logits_RV: Tensor, found: Sequence[Changes], starts: Sequence[int]) -> Tensor:
    """All changes at once; `starts[i]` is the row of the logits at which the rows of `found[i]` begin.

    Returns:
        float32 [R, V]; a new tensor unless nothing had to be done.
    """
    if not found:
        return logits_RV
    return penalise(logits_RV, *(torch.from_numpy(column) for column in joined_changes(found, starts)))


def joined_changes(found: Sequence[Changes], starts: Sequence[int]) -> Changes:
    """All of them as one, rows counted from the first row of all."""
    rows = [changes.rows + start for changes, start in zip(found, starts, strict=True)]
    columns = [rows, *list(zip(*found, strict=True))[1:]] if found else [[np.empty(0, np.int64)]] * 2
    joined = [np.concatenate(column) for column in columns]
    return Changes(*joined) if found else Changes(*joined, *[np.empty(0, np.float64)] * 3)


_NO_PATH = (np.empty(0, np.int64), np.empty(0, np.int64), np.zeros(1, np.int64))


def paths_of(tree: Tree | None) -> tuple[IntArray, IntArray, IntArray]:
    """What `TokenCounts.changes` has to know of a tree; its root is committed already and on nobody's path.

    >>> paths_of(Tree.build(5, [7, 8, 7], [-1, 0, -1]))     # 5 -> 7 -> 8 and 5 -> 7
    (array([1, 2, 2, 3]), array([7, 7, 8, 7]), array([0, 1, 2, 1]))
    """
    if tree is None or len(tree) == 1:
        return _NO_PATH
    rows, above = np.nonzero(tree.ancestor_mask()[:, 1:])
    return rows, tree.tokens[above + 1].astype(np.int64), tree.depths.astype(np.int64)
