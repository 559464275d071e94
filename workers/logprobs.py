"""Raw logits and the tokens that were chosen behind them -> log-probabilities of streams that asked for them.

The logits are the model's own: before bias, penalties, temperature and filters (vLLM's "raw_logprobs"). A row's values
depend on nothing but the row, so speculation leaves them alone. Nothing is computed before the verdict is known, and
then for the rows of the accepted path only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from paceline.cluster.scheduler import Segment, Stream
from paceline.cluster.types import Logprobs
from paceline.workers.raw_logits import RawLogits, whole


def measure(logits: RawLogits, token_ids: Sequence[int], num_top: int) -> Logprobs:
    """Log-probability and rank of one token in each row, and the row's most probable tokens.

    Args:
        logits: float32 [N, V], raw.
        token_ids: N of them.
        num_top: alternatives wanted; fewer if the vocabulary is smaller.

    >>> found = measure(torch.tensor([[0.0, 0.0, 1.0]]), [1], 1)
    >>> np.frombuffer(found.own, "<f4").round(3), np.frombuffer(found.ranks, "<i4")
    (array([-1.551], dtype=float32), array([3], dtype=int32))
    """
    logits_NV = whole(logits)
    log_sums_N = logits_NV.logsumexp(-1)
    own_N = logits_NV.gather(-1, torch.as_tensor(list(token_ids), dtype=torch.int64)[:, None])[:, 0]
    ranks_N = (logits_NV >= own_N[:, None]).sum(-1)
    top = logits_NV.topk(min(num_top, logits_NV.shape[-1]), dim=-1)
    return Logprobs(
        top.indices.shape[-1],
        (own_N - log_sums_N).numpy().astype("<f4").tobytes(),
        ranks_N.numpy().astype("<i4").tobytes(),
        top.indices.numpy().astype("<i4").tobytes(),
        (top.values - log_sums_N[:, None]).numpy().astype("<f4").tobytes(),
    )


@dataclass(slots=True)
class _Prompt:
    """What is known of one prompt: row p gives token p + 1. Rows computed again after a preemption are passed over."""

    token_ids: tuple[int, ...]
    num_top: int
    num_done: int = 0
    pieces: list[Logprobs] = field(default_factory=list)

    def rows(self, start: int, stop: int) -> range:
        """Positions in [start, stop) whose logits are still wanted."""
        return range(max(start, self.num_done), min(stop, len(self.token_ids) - 1))

    def add(self, logits: RawLogits) -> None:
        """Rows from position `num_done` on, [N, V]."""
        wanted = self.token_ids[self.num_done + 1 : self.num_done + 1 + len(logits)]
        self.pieces.append(measure(logits, wanted, self.num_top))
        self.num_done += len(logits)

    def joined(self) -> Logprobs:
        return Logprobs(
            self.pieces[0].num_top if self.pieces else self.num_top,
            *(b"".join(getattr(p, name) for p in self.pieces) for name in ("own", "ranks", "top_ids", "top")),
        )


class LogprobBook:
    """Streams of an engine that asked for log-probabilities; false if none did."""

    def __init__(self) -> None:
        self._num_top: dict[str, int] = {}
        self._prompts: dict[str, _Prompt] = {}
        self._held: dict[str, RawLogits] = {}
        """Raw logits of this step's nodes, until the verdict."""

    def __bool__(self) -> bool:
        return bool(self._num_top or self._prompts)

    def open(self, stream: Stream) -> None:
        """A stream was admitted."""
        request = stream.request
        if request.logprobs is not None:
            self._num_top[stream.key] = request.logprobs
        if request.prompt_logprobs is not None:
            self._prompts[stream.key] = _Prompt(request.prompt_ids, request.prompt_logprobs)

    def close(self, stream: Stream) -> None:
        """Forget a stream."""
        self._num_top.pop(stream.key, None)
        self._prompts.pop(stream.key, None)
        self._held.pop(stream.key, None)

    # -- prompts -----------------------------------------------------------------------------------------

    def prompt_rows(self, segment: Segment) -> range:
        """Rows of a chunk, counted in the chunk, whose logits are wanted for the prompt's own log-probabilities."""
        prompt = self._prompts.get(segment.stream.key)
        if prompt is None or segment.tree is not None:
            return range(0)
        rows = prompt.rows(segment.start, segment.start + segment.num_rows)
        return range(rows.start - segment.start, rows.stop - segment.start)

    def sampled_rows(self, segments: Sequence[Segment], num_rows: int) -> npt.NDArray[np.int64] | None:
        """Of the step's rows those that `prompt_rows` did not ask for; None if it asked for none."""
        others = np.ones(num_rows, np.bool_)
        for start, stop, _ in self._prompts_in(segments):
            others[start:stop] = False
        return None if others.all() else np.flatnonzero(others)

    def take_prompts(self, segments: Sequence[Segment], logits: RawLogits) -> None:
        """Read what `prompt_rows` asked for out of the step's rows, [K, V]."""
        for start, stop, prompt in list(self._prompts_in(segments)):
            prompt.add(logits[start:stop])

    def _prompts_in(self, segments: Sequence[Segment]) -> Iterator[tuple[int, int, _Prompt]]:
        """Rows from, rows to, and whose they are."""
        at = 0
        for segment in segments:
            num = len(self.prompt_rows(segment))
            if num:
                yield at, at + num, self._prompts[segment.stream.key]
            at += num + (len(segment.tree) if segment.tree is not None else segment.samples)

    def prompt(self, stream: Stream) -> Logprobs | None:
        """All of a stream's prompt but its first token, once; None if it was not asked for."""
        prompt = self._prompts.pop(stream.key, None)
        return None if prompt is None else prompt.joined()

    # -- output ------------------------------------------------------------------------------------------

    def hold(self, segments: Sequence[Segment], logits: RawLogits) -> None:
        """Raw rows of all sampled segments in order: a tree's nodes, or one."""
        self._held.clear()
        at = 0
        for segment in segments:
            num = len(segment.tree) if segment.tree is not None else 1
            if segment.stream.key in self._num_top:
                self._held[segment.stream.key] = logits[at : at + num]
            at += num

    def output(self, stream: Stream, path: Sequence[int], tokens: Sequence[int]) -> Logprobs | None:
        """Of the tokens one step emitted: node 0 decided the first, each node of `path` the next."""
        logits = self._held.pop(stream.key, None)
        if logits is None:
            return None
        return measure(logits[[0, *path][: len(tokens)]], tokens, self._num_top[stream.key])
