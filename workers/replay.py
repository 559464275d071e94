"""Stored texts and a draft -> the steps and seconds they would have taken, by the deployed code without the target.

Under Match a text is fixed by seed and target, whoever drafts, so the text itself answers what the target would have
said. Here engine, drafters and controller run as they are, with the text in the target's place and step times from
a table. `paceline.workers.scoring` gets the same steps from one forward over each text, for a policy whose only source is
a draft model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from paceline.cluster.config import SpeculationConfig
from paceline.cluster.controller import Controller, StepCost
from paceline.cluster.learning.counterfactual import Costs, Policy, Scores
from paceline.cluster.metrics import Metrics
from paceline.cluster.referee import Referee
from paceline.cluster.scheduler import Plan, Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import SOURCE_DRAFT, Request, Sampling
from paceline.workers.draft_engine import DraftEngine
from paceline.workers.drafters.base import Context, Drafter, Outcome, make
from paceline.workers.drafters.fused import FusedDrafter, choices
from paceline.workers.engine import Engine, StepResult
from paceline.workers.kv_cache import KVCache
from paceline.workers.model_batch import KVSend, PackedBatch, Spine
from paceline.workers.model_runner import ModelRunner

_BLOCK_SIZE = 16
_PIECE_TOKENS = 128
"""Of one forward while scoring: 2 MB of logits of a small vocabulary, which the next operations find in the cache."""
_PIECE_S = 0.03
"""A forward of so many tokens of a larger model takes longer: then pieces are made smaller."""
_NEVER = -1
"""A token that nobody proposes: what would follow behind the end of a text."""
_POOL_TEXTS = 100
"""The latest ones that versions of the pool are compared on."""


class HeldOut(Protocol):
    """What is needed of a captured request: `paceline.cluster.learning.capture.CapturedRequest` has it."""

    @property
    def request_id(self) -> str: ...
    @property
    def domain(self) -> str: ...
    @property
    def created(self) -> float: ...
    @property
    def target_version(self) -> str: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def token_ids(self) -> npt.NDArray[np.int32]: ...


@dataclass(frozen=True, slots=True)
class Text:
    """A request and what it was answered. The output ends at a stop token, at the request's limit, or was cut off."""

    request: Request
    output: tuple[int, ...]

    @classmethod
    def of(cls, captured: HeldOut) -> Text:
        """A captured request: how it would have gone on is not known, so it ends where it ends."""
        ids = captured.token_ids.tolist()
        prompt, output = tuple(ids[: captured.num_prompt]), tuple(ids[captured.num_prompt :])
        request = Request(captured.request_id, prompt, captured.sampling, len(output), domain=captured.domain)
        return cls(request, output)

    @property
    def limit(self) -> int:
        """Output tokens the engine may believe to be allowed: the request's, unless the text was cut off."""
        ends = self.output[-1:] and self.output[-1] in self.request.stop_ids
        return self.request.max_tokens if ends else len(self.output)


# --- the deployed code, with the text in the target's place ----------------------------------------------


class ModelClock:
    """Seconds that only pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """So much later."""
        self.now += seconds


class TimedRunner:
    """A model runner whose forwards take what a table says, on a clock."""

    def __init__(self, runner: ModelRunner, cost: StepCost, clock: ModelClock) -> None:
        self._runner = runner
        self._cost = cost
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: PackedBatch) -> Tensor:
        """That of the runner."""
        self._clock.advance(float(self._cost(len(batch.slots))))
        return self._runner.forward(batch)

    def levels(
        self, batch: PackedBatch, spine: Spine
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        """That of the runner; each level takes what a forward does."""
        found = self._runner.levels(batch, spine)
        if found is not None:
            self._clock.advance(len(found[0]) * float(self._cost(len(batch.slots))))
        return found


class TimedDrafter(Drafter):
    """A drafter that takes so long for each stream it is asked for, on a clock."""

    def __init__(self, drafter: Drafter, stream_s: float, clock: ModelClock) -> None:
        self._drafter = drafter
        self._stream_s = stream_s
        self._clock = clock
        self.name, self.source, self.is_free = drafter.name, drafter.source, drafter.is_free

    @property
    def weights(self) -> str:
        return self._drafter.weights

    def open(self, stream: Stream) -> None:
        self._drafter.open(stream)

    def observe(self, streams: Sequence[Stream]) -> None:
        self._drafter.observe(streams)

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        self._clock.advance(self._stream_s * len(streams))
        return self._drafter.propose(streams)

    def learn(self, outcomes: Sequence[Outcome], num_rows: int, seconds: float) -> None:
        self._drafter.learn(outcomes, num_rows, seconds)

    def close(self, stream: Stream) -> None:
        self._drafter.close(stream)

    def version(self, stream: Stream) -> str:
        return self._drafter.version(stream)


class _NoTarget:
    """What an engine asks of its model besides logits."""

    version = "text"
    decides = False

    def __init__(self, num_blocks: int, vocab_size: int, max_context: int) -> None:
        self.vocab_size, self.max_context = vocab_size, max_context
        self.cache = KVCache(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            model_version=self.version,
        )


class TextEngine(Engine):
    """An engine whose target says what stands in the texts, at the time its table gives."""

    def __init__(
        self,
        texts: Sequence[Text],
        *,
        costs: Costs,
        clock: ModelClock,
        drafter: Drafter | None,
        streams: int,
        token_budget: int,
        vocab_size: int,
    ) -> None:
        longest = max(len(text.request.prompt_ids) + text.request.max_tokens for text in texts) + 1
        num_blocks = streams * (longest // _BLOCK_SIZE + 2 + token_budget // _BLOCK_SIZE)
        super().__init__(
            cast(ModelRunner, _NoTarget(num_blocks, vocab_size, longest)),
            token_budget=token_budget,
            max_streams=streams,
            drafter=drafter,
            prefix_cache=False,
            clock=clock,
        )
        self._costs, self._cost, self._text_clock = costs, costs.target, clock
        self._known = {
            text.request.id: np.asarray([*text.request.prompt_ids, *text.output], np.int64) for text in texts
        }

    def add_text(self, text: Text, *, first_is_plain: bool) -> Stream:
        """Admit a text's request; its prompt is computed here, or comes from elsewhere at once."""
        request = msgspec.structs.replace(
            text.request, max_tokens=text.limit, logprobs=None, prompt_logprobs=None
        )
        stream = self.add(request, blocked=not first_is_plain)
        if not first_is_plain:
            self.scheduler.reserve(stream, stream.num_tokens)
            stream.num_computed = stream.num_tokens - 1
            stream.is_blocked = False
        return stream

    def _forward(
        self, plan: Plan, hook: Callable[[int], None] | None, sends: Sequence[KVSend] = ()
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        costs, num_streams = self._costs, len(plan.segments)
        self._text_clock.advance(float(self._cost(plan.num_rows)))
        self._text_clock.advance(costs.step_s + costs.stream_s * num_streams)
        decided: list[npt.NDArray[np.int64]] = []
        for segment in plan.segments:
            if segment.samples:
                known = self._known[segment.stream.request.id]
                end = segment.start + segment.num_rows
                depths = (
                    np.asarray([end - segment.start - 1]) if segment.tree is None else segment.tree.depths
                )
                at = segment.start + 1 + depths
                decided.append(np.where(at < len(known), known[np.minimum(at, len(known) - 1)], _NEVER))
        answers = np.concatenate(decided) if decided else np.empty(0, np.int64)
        return answers, np.ones(len(answers), np.bool_)


@dataclass(slots=True)
class Taken:
    """What one text took."""

    request_id: str
    domain: str
    num_tokens: int
    num_steps: int = 0
    """Steps that emitted tokens of it."""
    seconds: float = 0.0
    """Its share of the steps that decoded it: those of its prompt are left out."""
    num_drafted: int = 0
    tested: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(16, np.int64))
    """By depth, as in `ServedStream`."""
    accepted: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(16, np.int64))


@dataclass(frozen=True, slots=True)
class Replay:
    """What all texts took, in the order they were given."""

    texts: tuple[Taken, ...]
    num_steps: int
    """Of the engine: one step serves several texts."""
    seconds: float
    """From the first step to the last, on the model's clock; prompts included."""

    def scores(self, version: str, depth: int = 16) -> Scores:
        """As the gate compares them."""
        return Scores(
            version,
            tuple(taken.request_id for taken in self.texts),
            tuple(taken.domain for taken in self.texts),
            np.asarray([taken.num_tokens for taken in self.texts], np.int64),
            np.asarray([taken.num_steps for taken in self.texts], np.int64),
            np.asarray([taken.seconds for taken in self.texts], np.float64),
            np.stack([taken.tested[:depth] for taken in self.texts]),
            np.stack([taken.accepted[:depth] for taken in self.texts]),
        )


def replay_policy(
    texts: Sequence[Text],
    draft: ModelRunner | None,
    *,
    policy: Policy,
    costs: Costs,
    vocab_size: int,
    token_budget: int = 256,
    draft_token_budget: int = 256,
    between: Callable[[], None] = lambda: None,
) -> Replay:
    """Run texts through engine, drafters and controller as they are deployed, `policy.streams` at a time.

    Args:
        texts: in the order in which they come; when one ends, the next begins.
        draft: None where nothing is drafted by a model.
        vocab_size: the target's.
        token_budget, draft_token_budget: rows of a step of the target, and of the draft.
        between: called after each step.
    """
    clock = ModelClock()
    drafter = drafters_of(draft, policy, costs, clock, vocab_size, draft_token_budget)
    engine = TextEngine(
        texts,
        costs=costs,
        clock=clock,
        drafter=drafter,
        streams=policy.streams,
        token_budget=token_budget,
        vocab_size=vocab_size,
    )
    taken = {text.request.id: Taken(text.request.id, text.request.domain, len(text.output)) for text in texts}
    waiting = deque(text for text in texts if text.output)
    num_steps = 0
    while waiting or len(engine.scheduler):
        while waiting and len(engine.scheduler) < policy.streams:
            engine.add_text(waiting.popleft(), first_is_plain=policy.first_is_plain)
        began = clock()
        _count(engine.step(), clock() - began, taken)
        num_steps += 1
        between()
    return Replay(tuple(taken.values()), num_steps, clock())


def drafters_of(
    draft: ModelRunner | None,
    policy: Policy,
    costs: Costs,
    clock: ModelClock,
    vocab_size: int,
    token_budget: int = 256,
) -> Drafter | None:
    """The policy's drafters under its controller, on a model's clock; None if it has none."""
    if not policy.sources:
        return None
    speculation = SpeculationConfig(
        depth=policy.depth,
        width=policy.width,
        floor=policy.floor,
        control=policy.control,
        sources=list(policy.sources),
    )
    engine: DraftEngine | None = None
    if draft is not None:
        timed = cast(ModelRunner, TimedRunner(draft, costs.draft, clock))
        engine = DraftEngine(timed, token_budget=token_budget, prefix_cache=False)
    target = cast(ModelRunner, _NoTarget(1, vocab_size, 1))
    context = Context(target, speculation, Metrics(), draft=engine)
    drafters = [make(name, context) for name in policy.sources if name != "draft" or engine is not None]
    if not drafters:
        return None
    timed_ones = [
        TimedDrafter(one, costs.suffix_s, clock) if one.name == "suffix" else one for one in drafters
    ]
    if policy.control != "measured":
        return FusedDrafter(timed_ones, clock=clock)
    controller = Controller(costs.target, referee=Referee(choices(timed_ones)))
    return FusedDrafter(timed_ones, controller, clock=clock)


def _count(result: StepResult, seconds: float, taken: dict[str, Taken]) -> None:
    """A step's figures to the texts it served; its time in equal parts to those whose output it went on with."""
    outcomes = {outcome.stream.key: outcome for outcome in result.outcomes}
    for emission in result.emissions:
        text = taken[emission.stream.request.id]
        text.num_steps += bool(emission.tokens)
        text.num_drafted += emission.num_drafted
        outcome = outcomes.get(emission.stream.key)
        if outcome is None:
            continue
        text.seconds += seconds / len(outcomes)
        if outcome.tree is not None:
            tested, accepted = by_depth(outcome.tree, outcome.path)
            text.tested[: len(tested)] += tested
            text.accepted[: len(accepted)] += accepted


def by_depth(tree: Tree, path: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """bool as int64 [depths] each: whether a draft model's node was tested there, and whether one was accepted."""
    on_path = np.zeros(len(tree), np.bool_)
    on_path[[0, *path]] = True
    is_draft = tree.sources == SOURCE_DRAFT
    is_tested = is_draft & on_path[np.maximum(tree.parents, 0)]
    depths = np.arange(1, int(tree.depths.max()) + 1)
    tested = np.isin(depths, tree.depths[is_tested]).astype(np.int64)
    accepted = np.isin(depths, tree.depths[is_draft & on_path]).astype(np.int64)
    return tested, accepted
