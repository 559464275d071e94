"""Held-out texts and versions of a draft -> steps and seconds of each text with each version -> the gate's report.

One forward of a draft over a whole text, with the request's own noise, gives its children at every position; from them
`paceline.cluster.learning.counterfactual` counts the steps. That is a small part of what `paceline.workers.replay` costs, which runs
the deployed code itself, and gives the same steps for a policy that always asks a draft model and nobody else.

Measured for the bundled draft (1.4 M weights, vocabulary 4,096) on one core of a shared Intel Xeon with AVX-512, texts of
80 + 100 tokens, half of them greedy: 17,000 to 19,000 tokens a second, 9,600 to 10,600 of them output. A row of
output takes some 36 us of forward (22 us of that are products at 130 GFLOP/s, the floor of float32 on such a core), 20 to 40 us
of noise if it is sampled, drawn once for all versions, 14 us to choose children, 5 us to count steps; a row of a
prompt 24 us.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.cluster.learning.config import GateConfig
from paceline.cluster.learning.counterfactual import (
    Children,
    Costs,
    Policy,
    Scores,
    Steps,
    Times,
    count_steps,
)
from paceline.cluster.learning.gate import (
    GateReport,
    Interval,
    Ranked,
    charged,
    confirmed,
    decide,
    median_of,
    order,
)
from paceline.cluster.speculation import prefix_hash
from paceline.cluster.types import DraftOpen, Sampling
from paceline.kernels.decide import best
from paceline.kernels.keyed_noise import gumbel_vocabulary
from paceline.workers.adjust import TokenCounts, apply_changes
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.model_batch import BatchBuilder
from paceline.workers.model_runner import ModelRunner, load_runner
from paceline.workers.replay import HeldOut, Text, replay_policy
from paceline.workers.sampling import SamplingRows, perturb

_BLOCK_SIZE = 16
_PIECE_TOKENS = 128
"""Of one forward while scoring: 2 MB of logits of a small vocabulary, which the next operations find in the cache."""
_PIECE_S = 0.03
"""A forward of so many tokens of a larger model takes longer: then pieces are made smaller."""
_POOL_TEXTS = 100
"""The latest ones that versions of the pool are compared on."""
_PAIRS = 40
"""Of blocks in which two versions' times are compared."""
_CONFIRM = 100
_STREAMS = (1, 2, 4, 8, 16)
_REPEATS = 7


class _HeldNoise:
    """Noise of the rows at hand, drawn once for all drafts."""

    def __init__(self) -> None:
        self._noise: Tensor | None = None

    def forget(self) -> None:
        self._noise = None

    def rows(self, rows: SamplingRows, num_ids: int) -> Tensor:
        """float32 [R, num_ids]; all rows are one request's."""
        if self._noise is None or self._noise.shape[1] < num_ids:
            sampling = rows.samplings[0]
            seed = sampling.seed - (1 << 64) if sampling.seed >= 1 << 63 else sampling.seed
            positions = torch.tensor(rows.positions)
            keys = [torch.full_like(positions, key) for key in (seed, sampling.choice, sampling.prompt_index)]
            self._noise = gumbel_vocabulary(keys[0], positions, keys[1], keys[2], num_ids)
        return self._noise[:, :num_ids]


class TextScorer:
    """Drafts of one target, and texts -> each draft's children at every position of each text.

    A forward over the whole text, in pieces, with the text's own tokens before each position: a draft's chain agrees
    with them for as long as it matters.
    """

    def __init__(self, runners: Sequence[ModelRunner], width: int) -> None:
        self._runners = list(runners)
        self._width = width
        self._noise = _HeldNoise()
        self._piece = _PIECE_TOKENS

    def takes(self, text: Text) -> bool:
        """Whether all drafts could have drafted for it to its end."""
        num = len(text.request.prompt_ids) + len(text.output)
        most = max((*text.request.prompt_ids, *text.output), default=0)
        fits = all(num <= r.max_context and most < r.vocab_size for r in self._runners)
        room = min(r.cache.num_blocks * r.cache.block_size for r in self._runners)
        return fits and len(text.output) > 0 and len(text.request.prompt_ids) > 0 and num <= room

    def children(self, text: Text, between: Callable[[], None] = lambda: None) -> list[Children]:
        """Of each draft. `between` is called after each piece of work."""
        request, num_prompt = text.request, len(text.request.prompt_ids)
        ids = np.asarray([*request.prompt_ids, *text.output], np.int32)
        found: list[list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]] = [[] for _ in self._runners]
        for start, stop in self._pieces(len(ids) - 1):
            first = max(
                start, num_prompt - 1
            )  # the row of the last prompt token decides the first output token
            self._noise.forget()
            for runner, parts in zip(self._runners, found, strict=True):
                began = time.perf_counter()
                logits = self._logits(runner, ids, start, stop, first)
                if len(logits):
                    parts.append(self._best(logits, text, first, stop))
                self._adapt(time.perf_counter() - began, stop - start)
                between()
        tokens = ids[num_prompt:].astype(np.int64)
        return [
            Children(
                request.id,
                request.domain,
                tokens,
                np.concatenate([part_ids for part_ids, _ in parts]),
                np.concatenate([chances for _, chances in parts]),
                num_prompt,
                text.limit,
            )
            for parts in found
        ]

    def _pieces(self, num: int) -> Iterator[tuple[int, int]]:
        start = 0
        while start < num:
            stop = min(num, start + self._piece)
            yield start, stop
            start = stop

    def _adapt(self, seconds: float, num: int) -> None:
        """Smaller pieces where they take too long."""
        if seconds > _PIECE_S and num >= self._piece:
            self._piece = max(1, self._piece // 2)

    @staticmethod
    def _logits(runner: ModelRunner, ids: npt.NDArray[np.int32], start: int, stop: int, first: int) -> Tensor:
        """float32 [max(0, stop - first), V] of rows first..stop - 1; earlier tokens are in the pool already."""
        runner.cache.books = None  # nobody else's KV is where it was
        size = runner.cache.block_size
        builder = BatchBuilder(runner.cache)
        table = list(range(-(-stop // size)))
        is_kept = first < stop
        also = range(first - start, stop - start - 1) if is_kept else range(0)
        builder.add_chunk(table, ids[start:stop], start, keep_last=is_kept, also=also)
        return runner.forward(builder.build()[0])

    def _best(
        self, logits: Tensor, text: Text, first: int, stop: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Children of rows first..stop - 1, as `DraftEngine` chooses them."""
        request = text.request
        rows = SamplingRows([request.sampling] * (stop - first), list(range(first + 1, stop + 1)))
        if request.sampling.is_adjusted:
            logits = _adjusted(logits, text, first + 1 - len(request.prompt_ids))
        return best(perturb(logits, rows, self._noise), self._width)


def _adjusted(logits: Tensor, text: Text, start: int) -> Tensor:
    """Bias and penalties of each row by what stands before it; `start` output tokens do before the first one."""
    request, num = text.request, logits.shape[0]
    counts = TokenCounts(request.sampling, request.prompt_ids, request.stop_ids, logits.shape[1])
    counts.extend(text.output[:start])
    rows, columns = np.tril_indices(num, -1)
    tokens = np.asarray(text.output[start : start + num], np.int64)[columns]
    return apply_changes(logits, [counts.changes(rows, tokens, np.arange(num))], [0])


def score_requests(
    texts: Iterable[Text],
    runners: Sequence[ModelRunner],
    *,
    policy: Policy,
    costs: Sequence[Costs],
    between: Callable[[], None] = lambda: None,
) -> list[Scores]:
    """Steps and seconds of each text with each draft, under a policy whose only source is the draft.

    Texts that one of the drafts could not have drafted for are left out, for all of them.

    Args:
        costs: one for each draft: with its own forward's time.
        between: called after each piece of work, tens of milliseconds at most.
    """
    scorer = TextScorer(runners, policy.width)
    times = [Times(policy, one) for one in costs]
    scored: list[list[Children]] = [[] for _ in runners]
    counted: list[list[Steps]] = [[] for _ in runners]
    for text in texts:
        if not scorer.takes(text):
            continue
        for at, children in enumerate(scorer.children(text, between)):
            counted[at].append(count_steps(children, times[at]))
            scored[at].append(children)
    return [
        Scores.collect(runner.version, children, steps)
        for runner, children, steps in zip(runners, scored, counted, strict=True)
    ]


# --- the gate -------------------------------------------------------------------------------------------


def score(
    requests: Iterable[HeldOut],
    champion: Path,
    candidate: Path,
    *,
    target_version: str,
    policy: Policy,
    costs: Costs,
    config: GateConfig,
    at: float,
    between: Callable[[], None] = lambda: None,
    kv_memory_mb: int = 64,
    look: int = 1,
    seed: int = 0,
    confirm: int = _CONFIRM,
) -> GateReport:
    """Both versions on held-out requests -> the gate's report.

    Args:
        requests: held out, of any order and target; the newest ones of each domain count.
        champion, candidate: their folders.
        target_version: of the target whose texts count.
        policy, costs: as deployed; `costs.draft_seconds` are the champion's.
        at: unix seconds, for the report.
        between: called after each piece of work, tens of milliseconds at most; loading a model is one piece.
        look: how many candidates were scored on this held-out set, this one included.
        seed: of the bootstrap.
        confirm: texts on which a candidate that passed is replayed through the deployed code; 0 leaves that out.
    Raises:
        ModelError: one of the folders cannot be used.
    """
    texts = newest(requests, target_version, config.max_requests)
    runners = []
    for folder in (champion, candidate):
        runners.append(load_draft(folder, kv_memory_mb))
        between()
    slowdown = measure_slowdown(runners[0], runners[1], between=between)
    by_version = [costs, costs.slower_draft(charged(slowdown))]
    scorers = []
    for folder, runner in zip((champion, candidate), runners, strict=True):
        is_other = runner.gains_from_many_rows  # else the same weights would be there twice for nothing
        scorers.append(load_draft(folder, kv_memory_mb, many_rows=True) if is_other else runner)
        between()
    one, other = score_requests(texts, scorers, policy=policy, costs=by_version, between=between)
    report = decide(
        one,
        other,
        config,
        at=at,
        policy=policy,
        costs=costs,
        slowdown=slowdown,
        look=look,
        seed=seed,
        between=between,
    )
    if not report.passed or not confirm:
        return report
    taken = set(one.request_ids)
    latest = [text for text in texts if text.request.id in taken][-confirm:]
    return confirm_on(latest, report, runners, policy=policy, costs=by_version, seed=seed, between=between)


def confirm_on(
    texts: Sequence[Text],
    report: GateReport,
    runners: Sequence[ModelRunner],
    *,
    policy: Policy,
    costs: Sequence[Costs],
    seed: int = 0,
    between: Callable[[], None] = lambda: None,
) -> GateReport:
    """A report that passed, held against replay of the deployed code with both versions on some of its texts."""
    replayed = [
        replay_policy(
            texts,
            runner,
            policy=policy,
            costs=each,
            vocab_size=max(runner.vocab_size for runner in runners),
            between=between,
        ).scores(runner.version)
        for runner, each in zip(runners, costs, strict=True)
    ]
    return confirmed(report, *replayed, seed=seed)


def rank(
    folders: Sequence[Path],
    requests: Iterable[HeldOut],
    *,
    target_version: str,
    policy: Policy,
    costs: Costs,
    between: Callable[[], None] = lambda: None,
    kv_memory_mb: int = 64,
    num: int = _POOL_TEXTS,
) -> list[Ranked]:
    """Versions of the pool on the latest texts, of whatever domain, the fastest first; the first folder is the live one.

    Texts need not be held out: pooled versions were trained before them.
    """
    texts = newest(requests, target_version, None, num)
    runners = []
    for folder in folders:
        runners.append(load_draft(folder, kv_memory_mb, many_rows=True))
        between()
    scores = score_requests(
        texts,
        runners,
        policy=policy,
        costs=[costs] * len(runners),
        between=between,
    )
    return order(runners[0].version, scores)


def load_draft(folder: Path, kv_memory_mb: int = 64, *, many_rows: bool = False) -> ModelRunner:
    """A version as a draft worker loads it, or for `many_rows`, those of whole texts.

    A small draft takes other arithmetic for many rows: logits differ in their last bits, as between machines.
    """
    return load_runner(folder, kv_memory_mb=kv_memory_mb, block_size=_BLOCK_SIZE, many_rows=many_rows)[0]


def newest(
    requests: Iterable[HeldOut], target_version: str, num_each: int | None, num: int | None = None
) -> list[Text]:
    """The newest texts that this target wrote, `num_each` of each domain and `num` in all, the oldest first."""
    by_domain: dict[str, list[tuple[float, str, Text]]] = {}
    for request in requests:
        if request.target_version == target_version and len(request.token_ids) > request.num_prompt > 0:
            # What was captured of its logits is large and of no use here.
            line = (-request.created, request.request_id, Text.of(request))
            by_domain.setdefault(request.domain, []).append(line)
    chosen = [line for found in by_domain.values() for line in sorted(found, key=_age)[:num_each]]
    return [text for _, _, text in reversed(sorted(chosen, key=_age)[:num])]


def _age(line: tuple[float, str, Text]) -> tuple[float, str]:
    return line[:2]


# --- times ----------------------------------------------------------------------------------------------


def measure_slowdown(
    champion: ModelRunner,
    candidate: ModelRunner,
    *,
    between: Callable[[], None] = lambda: None,
    pairs: int = _PAIRS,
    seed: int = 0,
) -> Interval:
    """The candidate's time to draft against the champion's: median over pairs of short blocks, in turn.

    Each block is the better of two proposals, so that what interrupts one does not count; either version comes first
    in every other pair.
    """
    blocks = (_DraftBlock(champion), _DraftBlock(candidate))
    for block in blocks:
        block.seconds()  # warms up
    ratios: list[float] = []
    for index in range(pairs):
        first = index % 2
        taken = {at: min(blocks[at].seconds(), blocks[at].seconds()) for at in (first, 1 - first)}
        ratios.append(taken[1] / taken[0])
        between()
    return median_of(ratios, seed=seed)


def measure_draft_cost(
    runner: ModelRunner, streams: Sequence[int] = _STREAMS, *, between: Callable[[], None] = lambda: None
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Rows of a level's forward -> its seconds, choice of children included: `Costs.draft_rows` and `.draft_seconds`."""
    seconds: list[float] = []
    for num in streams:
        block = _DraftBlock(runner, num)
        block.seconds()
        taken: list[float] = []
        for _ in range(_REPEATS):
            taken.append(block.seconds() / block.num_levels)
            between()
        seconds.append(float(np.median(taken)))
    return tuple(streams), tuple(seconds)


class _DraftBlock:
    """Some streams that a draft drafts for, one proposal after the other, each behind another token.

    Scoring runs at idle priority: by the wall clock a draft would look as slow as its neighbours are busy. With one
    thread the time it computes is what a draft worker would take.
    """

    num_levels = 8

    def __init__(self, runner: ModelRunner, num_streams: int = 1) -> None:
        self._engine = DraftEngine(runner, token_budget=256, prefix_cache=False, keep_levels=False)
        room = min(runner.max_context - 1, runner.cache.num_blocks * runner.cache.block_size // num_streams)
        context = max(1, min(64, room - 2 * self.num_levels))
        self._depth = min(self.num_levels, room - context)
        self._tokens = [
            [(7919 * at + 13 * stream) % runner.vocab_size for at in range(context)]
            for stream in range(num_streams)
        ]
        self._temperatures = [float(stream % 2 == 0) for stream in range(num_streams)]
        self._clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def seconds(self) -> float:
        """Of one proposal of `num_levels` levels for each stream, its context in the pool."""
        keys = [str(stream) for stream in range(len(self._tokens))]
        for key, tokens, temperature in zip(keys, self._tokens, self._temperatures, strict=True):
            sampling = Sampling(int(key), temperature=temperature)
            self._engine.open(key, DraftOpen(key, tuple(tokens), sampling, len(tokens)))
        self._engine.propose(keys, 1, 1)
        for key, tokens in zip(keys, self._tokens, strict=True):
            known = prefix_hash(tokens)
            self._engine.advance(key, len(tokens), known, (tokens[0],))
        began = self._clock()
        self._engine.propose(keys, self._depth, 2)
        seconds = self._clock() - began
        for key in keys:
            self._engine.close(key)
        return seconds * self.num_levels / self._depth
