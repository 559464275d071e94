"""Requests -> committed tokens, step by step: plan, propose, forward, verify, commit, observe.

Knows nothing of processes, sockets or HTTP: the same engine runs in prefill and decode workers, in tests and in a
plain script. Speculation off is the case of trees that are only a root, through the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.cluster import failpoints
from paceline.cluster.blocks import BlockPool
from paceline.cluster.errors import RequestError
from paceline.cluster.metrics import Metrics
from paceline.cluster.scheduler import Plan, Scheduler, Segment, Stream
from paceline.cluster.speculation import Tree, depths_met
from paceline.cluster.types import SOURCE_DRAFT, SOURCE_NAMES, SOURCE_TARGET, FinishReason, Logprobs, Request
from paceline.workers.adjust import Adjuster
from paceline.workers.capture import Recorder
from paceline.workers.drafters.base import Drafter, Outcome
from paceline.workers.fused_sampling import Walk
from paceline.workers.logprobs import LogprobBook
from paceline.workers.model_batch import BatchBuilder, KVSend
from paceline.workers.model_runner import ModelRunner
from paceline.workers.raw_logits import RawLogits
from paceline.workers.sampling import CachedNoise, Sample, SamplingRows
from paceline.workers.token_counts import TokenCounts
from paceline.workers.verifiers.base import Verdict, Verifier
from paceline.workers.verifiers.match import Match

SegmentLayerHook = Callable[[Plan, int], None]
SendHook = Callable[[Plan], Sequence[KVSend]]


@dataclass(frozen=True, slots=True)
class Emission:
    """What one step did for one stream. `start` is the output position of the first token."""

    stream: Stream
    start: int
    tokens: tuple[int, ...]
    sources: bytes
    num_drafted: int
    finish: FinishReason | None = None
    error: str = ""
    draft_version: str = ""
    """Version of the weights behind this stream's latest draft."""
    logprobs: Logprobs | None = None
    """Of the tokens, if the request asked."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt, in the stream's first emission, if the request asked."""
    num_tested: int = 0
    """Depths at which a draft model's proposal met the text: all that were right, and the first that was not."""
    num_right: int = 0
    """How many of them were right."""


@dataclass(slots=True)
class StepResult:
    """emissions: streams with new tokens or an end. computed: prefill-only streams whose KV is now complete.

    num_rows is 0 when nothing could be planned: there is no work, or no block for it.
    """

    emissions: list[Emission] = field(default_factory=list)
    computed: list[Stream] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    num_rows: int = 0


class Engine:
    """One model, one pool, many streams. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        token_budget: int,
        max_streams: int,
        max_context: int | None = None,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        metrics: Metrics | None = None,
        prefix_cache: bool = True,
        capture: Recorder | None = None,
        compares_drafts: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`verifier` is Match if not given. `capture` keeps what decided the tokens of streams that may be kept.

        `compares_drafts`: emissions tell how deep the draft models' proposals met the text, used or not.
        `prefix_cache`: KV of equal prefixes is computed once. It changes what a prompt costs, never a text.
        """
        self.runner = runner
        self.pool = BlockPool(runner.cache.num_blocks, runner.cache.block_size)
        self.scheduler = Scheduler(
            self.pool,
            token_budget=token_budget,
            max_streams=max_streams,
            cache_version=runner.version if prefix_cache else None,
        )
        self.max_context = min(max_context or runner.max_context, runner.max_context)
        self._drafter = drafter
        self._verifier = verifier or Match()
        self._walks_there = runner.decides and self._verifier.name == Match.name
        self._verdicts: Sequence[Verdict] | None = None
        """This step's, if the runner's device made them."""
        self.meanwhile: Callable[[], None] | None = None
        """Called in each step when all of it is launched and before anything is waited for: where the forward runs on a
        device, what is done here costs nothing."""
        self._metrics = metrics or Metrics()
        self._clock = clock
        self._tokens = TokenCounts(self._metrics)
        self._draft_counters = [
            (
                self._metrics.verified.labels(n),
                self._metrics.accepted.labels(n),
                self._metrics.wasted.labels(n),
            )
            for n in SOURCE_NAMES
        ]
        self._arrivals = 0
        self._noise = CachedNoise()
        self._adjuster = Adjuster(runner.vocab_size)
        self._logprobs = LogprobBook()
        self._capture = capture
        self._compares_drafts = compares_drafts
        self._raw: RawLogits | None = None
        """This step's logits as the model gave them, while somebody may want rows of them."""

    # -- streams -----------------------------------------------------------------------------------------

    def add(
        self, request: Request, *, epoch: int = 0, resumed: Sequence[int] = (), blocked: bool = False
    ) -> Stream:
        """Admit a stream that generates. `resumed` output tokens exist already; `blocked` waits for its KV.

        Raises:
            RequestError: the stream could never fit, or names a token that does not exist.
        """
        self._adjuster.check(request.sampling)
        tokens = [*request.prompt_ids, *resumed]
        stream = self._admit(
            request, epoch, tokens, len(request.prompt_ids), request.max_tokens - len(resumed)
        )
        stream.is_blocked = blocked
        self._adjuster.open(stream)
        self._logprobs.open(stream)
        if self._drafter is not None and request.speculate:
            self._drafter.open(stream)
        return stream

    def add_prefill(self, request: Request, *, epoch: int, token_ids: Sequence[int]) -> Stream:
        """Admit a stream that only computes the KV of these tokens."""
        stream = self._admit(request, epoch, token_ids, len(token_ids), 0)
        stream.prefill_only = True
        return stream

    def _admit(
        self, request: Request, epoch: int, tokens: Sequence[int], num_prompt: int, num_new: int
    ) -> Stream:
        limit = min(self.max_context, self.pool.num_blocks * self.pool.block_size)
        if len(tokens) < 1 or len(tokens) + num_new > limit:
            raise RequestError(
                f"{len(tokens)} prompt + {num_new} new tokens: expected 1..{limit} together",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if min(tokens) < 0 or max(tokens) >= self.runner.vocab_size:
            raise RequestError(
                f"prompt: token ids must be in 0..{self.runner.vocab_size - 1}", param="prompt"
            )
        buffer = np.zeros(len(tokens) + max(0, num_new), np.int32)
        buffer[: len(tokens)] = tokens
        stream = Stream(request, epoch, buffer, len(tokens), num_prompt, self._arrivals)
        stream.waits_since = self._clock()
        self._arrivals += 1
        self.scheduler.add(stream)
        return stream

    def remove(self, stream: Stream) -> None:
        """Forget a stream (ended or cancelled) and free its blocks."""
        if self._drafter is not None and stream.request.speculate and not stream.prefill_only:
            self._drafter.close(stream)
        self._adjuster.close(stream)
        self._logprobs.close(stream)
        if self._capture is not None:
            self._capture.close(stream)
        self.scheduler.remove(stream)

    def unblock(self, stream: Stream) -> None:
        """Its KV is here, or will not come: from now on it can run."""
        stream.is_blocked = False
        stream.waits_since = self._clock()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_waiting(self) -> int:
        """Streams that could run and that no step has computed for yet. From any thread."""
        return sum(stream.waits_since is not None and not stream.is_blocked for stream in self.scheduler)

    # -- one step ----------------------------------------------------------------------------------------

    def step(self, on_layer: SegmentLayerHook | None = None, sends: SendHook | None = None) -> StepResult:
        """Run one step. `on_layer(plan, layer)` is called when a layer's K and V of all segments are in the pool.

        `sends(plan)`, called before anything is computed, says what of the pool leaves by other ranks' links meanwhile.
        """
        if self.runner.cache.books is not self.pool:  # another engine wrote here: nothing is where it was
            assert self.runner.cache.books is None or self.pool.num_used == 0, (
                "another engine wrote into our blocks"
            )
            self.pool.forget_all()
            self.runner.cache.books = self.pool
        plan = self.scheduler.plan()
        if plan.preempted:
            self._metrics.preemptions.inc(len(plan.preempted))
        if plan.num_queried:
            self._metrics.prefix_query_tokens.inc(plan.num_queried)
            self._metrics.prefix_hit_tokens.inc(plan.num_adopted)
        if not plan.segments:
            return StepResult()
        self._propose(plan)
        began = self._clock()
        self._note_starts(plan, began)
        hook = None if on_layer is None else (lambda layer: on_layer(plan, layer))
        decided, usable = self._forward(plan, hook, () if sends is None else sends(plan))
        if failpoints.enabled:
            failpoints.hit("mid_step", *(s.stream.request.id for s in plan.segments))
        result = self._commit(plan, decided, usable)
        seconds = self._clock() - began
        if self._drafter is not None:
            self._drafter.learn(result.outcomes, plan.num_rows, seconds)
            running = [
                e.stream for e in result.emissions if e.tokens and e.finish is None and e.stream.can_draft
            ]
            if running:
                self._drafter.observe(running)
        self._count(result)
        self._metrics.step_seconds.observe(seconds)
        return result

    def _note_starts(self, plan: Plan, now: float) -> None:
        for segment in plan.segments:
            stream = segment.stream
            if stream.waits_since is not None:
                stream.queued_s = max(0.0, now - stream.waits_since)
                stream.waits_since = None
                self._metrics.queue_seconds.observe(stream.queued_s)

    def _count(self, result: StepResult) -> None:
        """A step's figures, each counter once: its lock costs as much as a row's bookkeeping."""
        self._metrics.steps.inc()
        self._tokens.add((e.draft_version, e.sources) for e in result.emissions if e.tokens)
        if self._drafter is not None and result.outcomes:
            self._count_drafts(result.outcomes)

    def _count_drafts(self, outcomes: list[Outcome]) -> None:
        trees = [(outcome.tree.sources, outcome.path) for outcome in outcomes if outcome.tree is not None]
        verified = b"".join(sources[1:].tobytes() for sources, _ in trees)
        accepted = bytes(int(sources[node]) for sources, path in trees for node in path)
        self._metrics.step_nodes.observe(len(verified))
        if not verified:
            return
        for source, (is_verified, is_accepted, is_wasted) in enumerate(self._draft_counters):
            if num := verified.count(source):
                num_right = accepted.count(source)
                is_verified.inc(num)
                is_accepted.inc(num_right)
                is_wasted.inc(num - num_right)

    def _propose(self, plan: Plan) -> None:
        if self._drafter is None:
            return
        segments = [s for s in plan.caught_up if s.stream.can_draft]
        if not segments:
            return
        trees = self._drafter.propose([segment.stream for segment in segments])
        for segment, tree in zip(segments, trees, strict=True):
            if tree is not None and len(tree) > 1:
                self.scheduler.attach(plan, segment, tree)

    def _forward(
        self, plan: Plan, hook: Callable[[int], None] | None, sends: Sequence[KVSend] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the batch; the decided token and its usability for every sampled row, in segment order."""
        builder = BatchBuilder(self.runner.cache)
        for segment in plan.segments:
            stream, start = segment.stream, segment.start
            table = self.pool.table(stream.key)
            if segment.tree is not None:
                builder.add_tree(table, segment.tree, start)
            else:
                ids = stream.buffer[start : start + segment.num_rows]
                also = self._logprobs.prompt_rows(segment) if self._logprobs else range(0)
                builder.add_chunk(table, ids, start, keep_last=segment.samples, also=also)
        batch, positions = builder.build(hook)
        batch.sends = sends
        sampled = [s for s in plan.segments if s.samples]
        rows = self._logprobs.sampled_rows(plan.segments, len(positions)) if self._logprobs else None
        batch.sample = sample = self._sample(sampled, rows, positions if rows is None else positions[rows])
        logits = self.runner.forward(batch)
        if self.meanwhile is not None:
            self.meanwhile()
        if self._logprobs:
            self._logprobs.take_prompts(plan.segments, logits)
        if not sampled:
            return np.empty(0, np.int64), np.empty(0, np.bool_)
        raw = logits if rows is None else logits[torch.from_numpy(rows)]
        if self._capture is not None:
            self._raw = raw
        if self._logprobs:
            self._logprobs.hold(sampled, raw)
        decided = sample.decide(logits, self._noise)
        self._verdicts = None if isinstance(logits, torch.Tensor) else logits.verdicts
        return decided

    def _sample(self, sampled: Sequence[Segment], rows: np.ndarray | None, positions: np.ndarray) -> Sample:
        """How the rows of these segments are drawn; `positions` are the rows' own."""
        counts = [len(s.tree) if s.tree is not None else 1 for s in sampled]
        # The token a node decides stands one position behind the node.
        params = SamplingRows.build([s.stream.request.sampling for s in sampled], counts, positions + 1)
        walk = self._walk(sampled) if self._walks_there else None
        return Sample(rows, params, *(self._adjuster.changes(sampled) if self._adjuster else ([], [])), walk)

    def _walk(self, sampled: Sequence[Segment]) -> Walk:
        """What a device has to know to accept and commit; a chunk's last row is a tree of its own."""
        trees, tables, starts = [], [], []
        for segment in sampled:
            stream, start = segment.stream, segment.start
            if segment.tree is None:
                start += segment.num_rows - 1
            trees.append(segment.tree or Tree.root_only(int(stream.buffer[start])))
            tables.append(self.pool.table(stream.key))
            starts.append(start)
        return Walk(trees, tables, starts)

    def _commit(self, plan: Plan, decided: np.ndarray, usable: np.ndarray) -> StepResult:
        result = StepResult(num_rows=plan.num_rows)
        at = 0
        verdicts = iter(self._verdicts or ())
        for segment in plan.segments:
            stream = segment.stream
            if not segment.samples:
                stream.num_computed += segment.num_rows
                self.scheduler.share(stream)
                if stream.prefill_only and stream.num_missing == 0:
                    result.computed.append(stream)
                continue
            num = segment.num_rows if segment.tree is not None else 1
            emission, path = self._commit_segment(
                segment, decided[at : at + num], usable[at : at + num], next(verdicts, None)
            )
            result.emissions.append(emission)
            if self._capture is not None and stream.request.capture:
                self._keep(emission, at, path)
            if segment.tree is not None:
                tree = segment.tree if segment.tree.num_drafted else None
                result.outcomes.append(Outcome(stream, tree, path))
            at += num
            if emission.finish == "error":
                self.pool.forget(stream.key)  # whatever broke it may be in its KV
            else:
                self.scheduler.share(stream)
            if emission.finish is not None:
                self.remove(stream)
        if self._capture is not None and self._raw is not None:
            self._capture.take(self._raw)
            self._raw = None
        return result

    def _keep(self, emission: Emission, at: int, path: tuple[int, ...]) -> None:
        """Note for capture which rows of the step decided what was emitted; `at` is the row of the tree's node 0."""
        assert self._capture is not None
        if emission.tokens:
            self._capture.note(emission.stream, at, path, len(emission.tokens), emission.draft_version)
        if emission.finish == "error":
            self._capture.spoil(emission.stream)

    def _commit_segment(
        self, segment: Segment, decided: np.ndarray, usable: np.ndarray, verdict: Verdict | None
    ) -> tuple[Emission, tuple[int, ...]]:
        """Accept a path, move its KV into place, append and cut the tokens; also the path.

        A `verdict` was made where the logits are, and the KV of its path is in place.
        """
        stream = segment.stream
        tree = segment.tree
        start = stream.num_output
        if tree is None:  # the last chunk of a prompt that sampled at once
            path: tuple[int, ...] = ()
            emitted, is_usable, num_drafted = int(decided[0]), bool(usable[0]), 0
            stream.num_computed = stream.num_tokens
        else:
            is_placed = verdict is not None
            verdict = verdict or self._verifier.verify(tree, decided)
            path, emitted, num_drafted = verdict.path, verdict.emitted, tree.num_drafted
            is_usable = bool(usable[[0, *path]].all())
            if is_usable and not is_placed:
                self._compact(stream, segment.start, path)
            stream.num_computed = segment.start + 1 + len(path)
        if not is_usable and num_drafted:
            # Where rows are computed together, one draft node with NaN may spoil others. Nothing is committed; the
            # next step has no draft, and only if that is unusable as well is it the model's own fault.
            stream.num_computed = segment.start
            stream.is_draft_banned = True
            return Emission(stream, start, (), b"", num_drafted), ()
        stream.is_draft_banned = False
        if not is_usable:
            message = f"the model gave no usable logits at position {stream.num_tokens}"
            return Emission(stream, start, (), b"", num_drafted, "error", message), ()
        tokens = [*(int(tree.tokens[node]) for node in path), emitted] if tree is not None else [emitted]
        sources = (
            [*(int(tree.sources[node]) for node in path), SOURCE_TARGET]
            if tree is not None
            else [SOURCE_TARGET]
        )
        tokens, finish = self._cut(stream, tokens)
        sources = sources[: len(tokens)]
        tested, right = self._compare(stream, tree, tokens)
        stream.append(tokens)
        stream.num_computed = min(stream.num_computed, stream.num_tokens)
        self.pool.shrink(stream.key, stream.num_tokens)
        version = self._drafter.version(stream) if self._drafter is not None else ""
        logprobs = self._logprobs.output(stream, path, tokens) if self._logprobs else None
        prompt = self._logprobs.prompt(stream) if self._logprobs else None
        emission = Emission(
            stream,
            start,
            tuple(tokens),
            bytes(sources),
            num_drafted,
            finish,
            "",
            version,
            logprobs,
            prompt,
            tested,
            right,
        )
        return emission, path

    def _compare(self, stream: Stream, tree: Tree | None, tokens: list[int]) -> tuple[int, int]:
        """How deep the draft models' own proposal for this step met the text, and how deep it was right."""
        if self._drafter is None or not self._compares_drafts:
            return 0, 0
        proposed = self._drafter.proposed(stream) or tree
        return (0, 0) if proposed is None else depths_met(proposed, tokens, SOURCE_DRAFT)

    def _compact(self, stream: Stream, start: int, path: tuple[int, ...]) -> None:
        """Scratch KV of the accepted nodes -> the slots of their positions. A path along the spine has nothing to move."""
        moved = [(node, depth) for depth, node in enumerate(path, start=1) if node != depth]
        if not moved:
            return
        slots = self.runner.cache.slots(self.pool.table(stream.key), start, start + max(path) + 1)
        self.runner.cache.move(slots[[node for node, _ in moved]], slots[[depth for _, depth in moved]])

    def _cut(self, stream: Stream, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
        """Tokens up to the first stop token or the length limit, and why the stream ends there."""
        for index, token in enumerate(tokens[: stream.num_allowed]):
            if token in stream.request.stop_ids:
                return tokens[: index + 1], "stop"
        if len(tokens) >= stream.num_allowed:
            return tokens[: stream.num_allowed], "length"
        return tokens, None

    def run(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """Generate all requests to their end; output token ids by request id. For tests and scripts."""
        outputs: dict[str, list[int]] = {request.id: [] for request in requests}
        for request in requests:
            self.add(request)
        while len(self.scheduler):
            for emission in self.step().emissions:
                outputs[emission.stream.request.id].extend(emission.tokens)
                if emission.finish == "error":
                    raise RequestError(emission.error, status=500)
        return outputs
