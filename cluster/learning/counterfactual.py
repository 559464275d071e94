"""What a draft would have proposed along a stored text -> the steps and seconds the text would have taken with it.

Under Match a text is fixed by seed and target, whoever drafts. So where a step begins, the draft's coupled children at
the positions that follow, which one forward over the whole text gives, say exactly how far that step would have come:
as far as each next token is among the children, along the draft's first ones. From where it ends the next step
begins, so steps and seconds from a position are those of one step and those from where it ends (`f(t) = c(t) + f(next(t))`).

What is not in the stored text is what a draft goes on to say behind its first mistake. That changes no step; it costs
rows and drafting. There the scores of the same positions along the text stand in for it.

Legend: N output tokens, W children of a position, D depth of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.cluster.config import SpeculationConfig
from paceline.cluster.controller import StepCost

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MARGIN = 1.02
"""What a drafter must promise to be asked: that of `paceline.cluster.asking`."""
_MAX_NODES = 64
"""Of all streams in a step: the controller's limit."""


class Policy(msgspec.Struct, frozen=True):
    """How drafts are asked for and verified: the figures of `speculation` in the configuration, and the load."""

    depth: int = 8
    width: int = 2
    floor: float = 0.3
    control: Literal["fixed", "measured"] = "measured"
    sources: tuple[str, ...] = ("suffix", "draft")
    streams: int = 1
    """That share each step: what drafts cost and are worth depends on it."""
    first_is_plain: bool = False
    """The first token comes with the prompt, as where no prefill worker computed it."""

    @classmethod
    def of(cls, speculation: SpeculationConfig, streams: int, *, first_is_plain: bool = False) -> Policy:
        """That of a configuration."""
        return cls(
            speculation.depth,
            speculation.width,
            speculation.floor,
            speculation.control,
            tuple(speculation.sources),
            streams,
            first_is_plain,
        )


class Costs(msgspec.Struct, frozen=True):
    """Step times, frozen: both sides of a comparison are timed by the same tables, whatever the machine does meanwhile."""

    rows: tuple[float, ...]
    seconds: tuple[float, ...]
    """Of a target's step, by its number of rows."""
    draft_rows: tuple[float, ...]
    draft_seconds: tuple[float, ...]
    """Of one level of drafts, by the number of rows in its forward."""
    suffix_s: float = 0.0
    """Of looking for copies, for each stream."""
    step_s: float = 0.0
    """Of a step, besides its forward."""
    stream_s: float = 0.0
    """Of a step, besides its forward, for each stream."""

    @property
    def target(self) -> StepCost:
        return FrozenCost([int(num) for num in self.rows], self.seconds)

    @property
    def draft(self) -> StepCost:
        return FrozenCost([int(num) for num in self.draft_rows], self.draft_seconds)

    def slower_draft(self, factor: float) -> Costs:
        """The same with another draft, whose forward takes `factor` times as long."""
        return msgspec.structs.replace(
            self, draft_seconds=tuple(seconds * factor for seconds in self.draft_seconds)
        )


class FrozenCost(StepCost):
    """Step times that no step corrects."""

    def observe(self, rows: int, seconds: float) -> None:
        """Stays as it is."""


@dataclass(frozen=True, slots=True)
class Children:
    """One text and what a draft proposes behind each of its prefixes.

    tokens: int64 [N], the output. ids: int64 [N, W], best first, coupled by the request's own noise to tokens[i].
    chances: float32 [N, W], the scores that drafts travel with; 0 is a token that filters leave out.
    """

    request_id: str
    domain: str
    tokens: IntArray
    ids: IntArray
    chances: npt.NDArray[np.float32]
    num_prompt: int = 1
    """Tokens before the output: the draft has to compute them first."""
    max_tokens: int | None = None
    """What the request allowed; None: it ended where the text does."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What one text would have taken with one draft."""

    num_steps: int
    seconds: float
    tested: IntArray
    """int64 [D]: steps in which a node of the draft stood at that depth, from 1, and its parent was accepted."""
    accepted: IntArray
    """int64 [D]: how many of them a proposed token filled."""


@dataclass(frozen=True, slots=True)
class Scores:
    """One version's steps on many texts, R of them, in the order of `request_ids`."""

    version: str
    request_ids: tuple[str, ...]
    domains: tuple[str, ...]
    tokens: IntArray
    steps: IntArray
    seconds: FloatArray
    tested: IntArray
    """int64 [R, D], as are those accepted."""
    accepted: IntArray

    @classmethod
    def build(cls, version: str, texts: Sequence[Children], policy: Policy, costs: Costs) -> Scores:
        """Count the steps of all texts."""
        timed = Times(policy, costs)
        return cls.collect(version, texts, [count_steps(text, timed) for text in texts])

    @classmethod
    def collect(cls, version: str, texts: Sequence[Children], counted: Sequence[Steps]) -> Scores:
        """One line for each text."""
        depth = len(counted[0].tested) if counted else 0
        return cls(
            version,
            tuple(text.request_id for text in texts),
            tuple(text.domain for text in texts),
            np.asarray([len(text.tokens) for text in texts], np.int64),
            np.asarray([steps.num_steps for steps in counted], np.int64),
            np.asarray([steps.seconds for steps in counted], np.float64),
            np.asarray([steps.tested for steps in counted], np.int64).reshape(len(counted), depth),
            np.asarray([steps.accepted for steps in counted], np.int64).reshape(len(counted), depth),
        )

    @property
    def tokens_per_step(self) -> float:
        return float(self.tokens.sum() / max(1, self.steps.sum()))

    @property
    def acceptance(self) -> float:
        """A / (A + R): accepted tokens, and steps that a refusal ended. Steps without one say nothing of the next token."""
        accepted = int(self.accepted.sum())
        refused = int(self.tested.sum()) - accepted
        return accepted / (accepted + refused) if accepted + refused else 0.0


class Times:
    """A policy's seconds, from tables: worked out once for all texts."""

    def __init__(self, policy: Policy, costs: Costs) -> None:
        self.policy = policy
        most = policy.depth * policy.width
        self.max_nodes = min(most, max(1, _MAX_NODES // policy.streams)) if self.is_measured else most
        streams, nodes = policy.streams, np.arange(most + 1)
        self.forward_s = costs.target(streams * (1 + nodes)) / streams
        """float64 [1 + W * D]: a stream's share of a step in which each has so many nodes."""
        self.other_s = costs.step_s / streams + costs.stream_s
        self._draft = costs.draft
        levels = costs.draft(streams) / streams * np.arange(policy.depth + 1)
        self.draft_s: FloatArray = np.asarray(levels, np.float64)
        """float64 [D + 1]: a stream's share of drafting so many levels."""
        self.caught_up_s = float((costs.draft(2 * streams) - costs.draft(streams)) / streams)
        """What the first level takes longer with one token more behind what has KV."""
        self.plain_s = float(self.forward_s[0]) + self.other_s

    def prompt_s(self, num_prompt: int) -> float:
        """What the draft takes to compute a prompt; nobody else has anything of it."""
        return float(self._draft(num_prompt) - self._draft(1)) if num_prompt > 1 else 0.0

    @property
    def is_measured(self) -> bool:
        return self.policy.control == "measured"


def count_steps(text: Children, times: Times) -> Steps:
    """Steps and seconds of one text from its first output token to its last."""
    policy, num = times.policy, len(text.tokens)
    starts = _Starts.of(text, times)
    at = 1 if policy.first_is_plain else 0
    visited: list[int] = []
    has_two = np.zeros(num + 1, np.bool_)
    next_at, behind = starts.next_at.tolist(), starts.is_one_behind.tolist()
    while at < num:
        visited.append(at)
        after = next_at[at]
        has_two[min(after, num)] = behind[at]
        at = after
    num_first = min(num, int(policy.first_is_plain))
    late_s = times.caught_up_s * (has_two[visited] & starts.drafts[visited])
    seconds = float((starts.seconds[visited] + late_s).sum()) + times.prompt_s(text.num_prompt)
    depths = np.arange(1, policy.depth + 1)
    tested = (
        depths[None] <= np.minimum(starts.num_agreed[visited] + 1, starts.num_kept[visited])[:, None]
    ).sum(axis=0)
    accepted = (depths[None] <= starts.num_accepted[visited][:, None]).sum(axis=0)
    plain_s = (num - num_first) * times.plain_s
    if (
        times.is_measured and seconds * _MARGIN > plain_s
    ):  # it does not pay here, and the controller finds out
        nothing = np.zeros(policy.depth, np.int64)
        return Steps(num, plain_s, nothing, nothing)
    return Steps(len(visited) + num_first, seconds, tested, accepted)


@dataclass(frozen=True, slots=True)
class _Starts:
    """A step from each position of a text, all positions at once: arrays [N]."""

    next_at: IntArray
    """Where the step after it begins."""
    num_accepted: IntArray
    num_agreed: IntArray
    """Levels whose first child was right: behind one where another child was, nothing is tested."""
    num_kept: IntArray
    """Levels that are verified."""
    seconds: FloatArray
    drafts: npt.NDArray[np.bool_]
    """Something is drafted at all."""
    is_one_behind: npt.NDArray[np.bool_]
    """Two tokens of the next step's context have no KV with the draft yet, else one."""

    @classmethod
    def of(cls, text: Children, times: Times) -> _Starts:
        """See `count_steps`."""
        depth, num = times.policy.depth, len(text.tokens)
        at = np.arange(num)
        allowed = (num if text.max_tokens is None else text.max_tokens) - at
        chances = text.chances.astype(np.float64)
        is_child = (text.ids == text.tokens[:, None]) & (chances > 0)
        is_first = text.ids[:, 0] == text.tokens
        spine = _windows(chances[:, 0], depth)
        products = np.cumprod(spine, axis=1)  # [N, D]: that all of the chain down to a level is accepted
        above = np.concatenate([np.ones((num, 1)), products[:, :-1]], axis=1)
        # A chain ends with the level at which its chance falls below the floor (or is NaN), or at the depth.
        is_last = ~(products >= times.policy.floor)
        is_last[:, -1] = True
        num_levels = np.where(allowed > 1, is_last.argmax(axis=1) + 1, 0)
        num_kept = np.minimum(num_levels, np.maximum(allowed - 1, 0))
        in_tree = np.arange(depth)[None] < num_kept[:, None]
        nodes = above[:, :, None] * _windows(chances, depth)  # [N, D, W]
        is_node = in_tree[:, :, None] & (nodes > 0)
        is_node[:, :, 0] = in_tree
        least, num_nodes = _cut(np.where(is_node, nodes, -1.0).reshape(num, -1), times)
        own = above * _windows(np.where(is_child, chances, 0.0).sum(axis=1), depth)
        agrees = _windows(is_first, depth, at_end=0.0) > 0
        fits = in_tree & (agrees | (_windows(is_child.any(axis=1), depth, at_end=0.0) > 0))
        fits &= own >= least[:, None]
        # The spine as far as it is right, and one alternative behind it.
        run = np.where((fits & agrees).all(axis=1), depth, (~(fits & agrees)).argmax(axis=1))
        ends = np.minimum(run, depth - 1)
        one_more = (run < depth) & fits[at, ends]
        num_accepted = run + one_more
        seconds = times.forward_s[num_nodes] + times.other_s + times.draft_s[num_levels]
        return cls(
            at + num_accepted + 1,
            num_accepted,
            run,
            ((products >= least[:, None]) & in_tree).sum(axis=1),
            seconds,
            num_levels > 0,
            one_more | (num_accepted == num_levels),
        )


def _cut(products: FloatArray, times: Times) -> tuple[FloatArray, IntArray]:
    """Which nodes of each start are verified: [N] the least product, [N] how many. Nodes that are none are negative."""
    num_nodes = (products >= 0).sum(axis=1)
    if not times.is_measured:
        return np.full(len(products), -np.inf), num_nodes
    order = -np.sort(-products, axis=1)[:, : times.max_nodes]
    gains = np.concatenate([np.zeros((len(order), 1)), np.cumsum(np.maximum(order, 0), axis=1)], axis=1)
    best = np.argmax((1 + gains) / times.forward_s[: gains.shape[1]], axis=1)
    best = np.minimum(best, num_nodes)
    least = np.where(best > 0, order[np.arange(len(order)), np.maximum(best - 1, 0)], np.inf)
    return least, best


def _windows(values: npt.NDArray[Any], depth: int, at_end: float | None = None) -> FloatArray:
    """[N, ...] -> [N, D, ...]: at (t, j) the value of t + j; behind the end the last one goes on, or `at_end`."""
    index = np.arange(len(values))[:, None] + np.arange(depth)[None]
    wanted: FloatArray = np.asarray(values, np.float64)
    if at_end is None:
        index = np.minimum(index, len(values) - 1)
    else:
        wanted = np.concatenate([wanted, np.full(depth, at_end)])
    found: FloatArray = wanted[index]
    return found
