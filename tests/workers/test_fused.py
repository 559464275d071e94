"""Several drafters, with and without a controller: the same text, fewer steps, whoever is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from paceline.cluster.controller import Controller, StepCost
from paceline.cluster.metrics import Metrics
from paceline.cluster.referee import Asked, Referee
from paceline.cluster.scheduler import Stream
from paceline.cluster.speculation import Tree
from paceline.cluster.types import Request, Sampling
from paceline.workers.draft import DraftEngine
from paceline.workers.drafters.base import Drafter
from paceline.workers.drafters.colocated import ColocatedDrafter
from paceline.workers.drafters.fused import FusedDrafter
from paceline.workers.drafters.suffix import SuffixDrafter
from paceline.workers.engine import Engine
from paceline.workers.model_batch import PackedBatch
from paceline.workers.model_runner import load_runner
from paceline.workers.profile import measure_step_cost

REQUESTS = [
    Request(
        f"r{i}", tuple(range(3 + i, 40 + 2 * i)) * 2, Sampling(seed=i, temperature=[0.0, 0.8, 1.0][i % 3]), 60
    )
    for i in range(6)
]


class Nonsense(Drafter):
    """Proposes a token that is always wrong, and takes its time."""

    name = "nonsense"
    num_asked = 0

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        self.num_asked += 1
        return [
            Tree.build(int(s.token_ids[-1]), [1] * 8, list(range(-1, 7)), scores=[0.9] * 8) for s in streams
        ]


@pytest.mark.parametrize("controlled", [False, True])
def test_fused_drafters_give_the_plain_text_in_fewer_steps(
    model_folder: Callable[[str], Path], controlled: bool
) -> None:
    """A draft equal to the target, copies and nonsense together."""
    folder = model_folder("llama")
    runner, _ = load_runner(folder, kv_memory_mb=8, block_size=8)
    plain = Engine(runner, token_budget=256, max_streams=8)
    expected = plain.run(REQUESTS)

    draft, _ = load_runner(folder, kv_memory_mb=8, block_size=8)
    colocated = ColocatedDrafter(
        DraftEngine(draft, token_budget=256), vocab_size=runner.vocab_size, depth=4, width=2
    )
    cost = StepCost([1, 64], [1.0, 1.5])
    cost.observe = lambda rows, seconds: None  # type: ignore[method-assign]
    controller = Controller(cost) if controlled else None
    ticks = iter(range(10**9))
    # Under a controller nonsense would spoil the calibration of the source it passes itself off as.
    drafters = [SuffixDrafter(), colocated] if controlled else [SuffixDrafter(), Nonsense(), colocated]
    fused = FusedDrafter(drafters, controller, clock=lambda: next(ticks) * 1e-3)
    engine = Engine(runner, token_budget=256, max_streams=8, drafter=fused)
    texts = engine.run(REQUESTS)

    assert texts == expected
    assert engine._metrics.steps._value.get() < 0.6 * plain._metrics.steps._value.get()
    engine.scheduler.check_integrity()
    assert engine.pool.num_used == 0


def test_a_drafter_that_only_costs_is_asked_ever_less(model_folder: Callable[[str], Path]) -> None:
    """The controller stops asking it, the text is the plain one."""
    runner, _ = load_runner(model_folder("llama"), kv_memory_mb=8, block_size=8)
    request = Request("long", tuple(range(3, 20)), Sampling(seed=1, temperature=1.0), 200)
    expected = Engine(runner, token_budget=256, max_streams=8).run([request])
    nonsense = Nonsense()
    ticks = iter(range(10**9))
    controller = Controller(StepCost([1, 64], [1.0, 2.0]))
    engine = Engine(
        runner,
        token_budget=256,
        max_streams=8,
        drafter=FusedDrafter([nonsense], controller, clock=lambda: float(next(ticks))),
    )

    assert engine.run([request]) == expected
    assert 1 <= nonsense.num_asked < 60


def test_step_costs_are_measured(model_folder: Callable[[str], Path]) -> None:
    """Seconds per number of rows, never falling."""
    runner, _ = load_runner(model_folder("llama"), kv_memory_mb=8, block_size=8)
    cost = measure_step_cost(runner)

    assert cost.rows.tolist() == [1, 2, 4, 8, 16, 17, 32, 33, 64]
    assert (cost.seconds[1:] >= cost.seconds[:-1]).all() and cost.seconds[0] > 0


# --- under a controller ---------------------------------------------------------------------------------


class Chain(Drafter):
    """Knows the text, and is right about it or not; counts what is asked of it."""

    name = "draft"

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self._texts = texts
        self.is_right = True
        self.num_asked = 0
        self.asked_for: set[str] = set()
        self.named, self.named_beside = "v1", ""

    @property
    def weights(self) -> str:
        return self.named

    @property
    def beside(self) -> str:
        return self.named_beside

    def open(self, stream: Stream) -> None:
        self.asked_for.add(stream.request.id)

    def observe(self, streams: Sequence[Stream]) -> None:
        self.asked_for.update(stream.request.id for stream in streams)

    def propose(self, streams: Sequence[Stream]) -> list[Tree | None]:
        self.num_asked += 1
        self.asked_for.update(stream.request.id for stream in streams)
        return [self._tree(stream) for stream in streams]

    def _tree(self, stream: Stream) -> Tree | None:
        future = self._texts[stream.request.id][stream.num_output : stream.num_output + 4]
        tokens = future if self.is_right else [(token + 1) % 200 for token in future]
        return Tree.build(
            int(stream.token_ids[-1]), tokens, list(range(-1, len(tokens) - 1)), scores=[0.9] * len(tokens)
        )


class Watched(Controller):
    """Counts how often it is asked to choose."""

    num_choices = 0

    def choose(
        self, trees: Sequence[Tree | None], num_others: int = 0, believed: Sequence[bool] = ()
    ) -> list[Tree | None]:
        self.num_choices += 1
        return super().choose(trees, num_others, believed)


@pytest.fixture
def long_run(model_folder: Callable[[str], Path]) -> Callable[..., tuple[Engine, Chain, Watched, Request]]:
    """Step cost -> an engine with one stream of 220 tokens, its chain and its controller; no clock runs."""

    def build(cost: StepCost) -> tuple[Engine, Chain, Watched, Request]:
        runner, _ = load_runner(model_folder("llama"), kv_memory_mb=8, block_size=8)
        request = Request("long", tuple(range(3, 20)), Sampling(seed=1, temperature=1.0), 220)
        chain = Chain(Engine(runner, token_budget=256, max_streams=8).run([request]))
        cost.observe = lambda rows, seconds: None  # type: ignore[method-assign]
        controller = Watched(cost)
        ticks = iter(range(10**9))
        drafter = FusedDrafter([chain], controller, clock=lambda: next(ticks) * 0.05)
        return Engine(runner, token_budget=256, max_streams=8, drafter=drafter), chain, controller, request

    return build


def figure(engine: Engine, name: str, source: str = "draft") -> float:
    return float(getattr(engine._metrics, name).labels(source)._value.get())


def test_a_step_whose_sources_are_all_paused_proposes_nothing(
    long_run: Callable[..., tuple[Engine, Chain, Watched, Request]],
) -> None:
    """Nobody is asked or told anything, no tree is built, and nothing is there to choose from."""
    engine, chain, controller, request = long_run(StepCost([1, 64], [1.0, 1.5]))
    chain.is_right = False
    engine.add(request)
    paused = 0
    for _ in range(150):
        asked, choices = chain.num_asked, controller.num_choices
        chain.asked_for.clear()
        (emission,) = engine.step().emissions
        if chain.num_asked == asked:
            paused += 1
            assert controller.num_choices == choices and emission.num_drafted == 0
            assert len(emission.tokens) == 1
    assert paused > 100


def test_a_request_without_speculation_never_reaches_a_drafter(
    long_run: Callable[..., tuple[Engine, Chain, Watched, Request]],
) -> None:
    """Not opened, not told, not asked; its neighbour is, and alone it leaves the drafter in peace."""
    engine, chain, _, request = long_run(StepCost([1, 64], [1.0, 1.5]))
    plain = Request("plain", request.prompt_ids, request.sampling, 30, speculate=False)
    expected = chain._texts["long"]

    assert engine.run([plain]) == {"plain": expected[:30]}
    assert (chain.num_asked, chain.asked_for) == (0, set())
    assert engine.run([request, plain]) == {"long": expected, "plain": expected[:30]}
    assert chain.num_asked > 0 and chain.asked_for == {"long"}


def test_no_node_is_verified_where_every_row_costs_a_step(
    long_run: Callable[..., tuple[Engine, Chain, Watched, Request]],
) -> None:
    """T(n) = n: even right proposals do not pay, and the drafter is asked ever less."""
    engine, chain, _, request = long_run(StepCost([1, 64], [1.0, 64.0]))

    assert engine.run([request]) == chain._texts
    assert figure(engine, "verified") == 0
    assert 1 <= chain.num_asked < 40


def test_new_weights_are_tried_at_once(
    long_run: Callable[..., tuple[Engine, Chain, Watched, Request]],
) -> None:
    """A draft that was paused for being wrong is asked in the step after its weights changed."""
    engine, chain, _, request = long_run(StepCost([1, 64], [1.0, 1.5]))
    chain.is_right = False
    engine.add(request)
    for _ in range(120):
        engine.step()
    chain.is_right, chain.named, asked = True, "v2", chain.num_asked
    accepted = [len(engine.step().emissions[0].tokens) - 1 for _ in range(10)]

    assert chain.num_asked >= asked + 9
    assert sum(accepted) >= 25


def test_a_canary_has_the_clock_look_again(
    long_run: Callable[..., tuple[Engine, Chain, Watched, Request]],
) -> None:
    """What was learnt of the live draft stays; only what lost by the clock is tried again, once for each change."""
    looks: list[str] = []

    class Looking(Referee):
        def retry(self) -> None:
            looks.append("again")

        def reset(self) -> None:
            looks.append("anew")

    engine, chain, controller, request = long_run(StepCost([1, 64], [1.0, 1.5]))
    controller.referee = Looking()
    engine.add(request)
    for named, beside in (("v1", ""), ("v1", "v2"), ("v1", "v2"), ("v2", "v1"), ("v2", "")):
        chain.named, chain.named_beside = named, beside
        engine.step()
        engine.step()

    assert looks == ["again", "anew", "again"]


class Never(Referee):
    """Says no to everything, and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []

    def may_ask(self, num_streams: int) -> Asked:
        return Asked.NOBODY

    def stepped(self, num_streams: int, num_tokens: int, seconds: float, asked: Asked) -> None:
        self.tokens.append(num_tokens)


@pytest.mark.parametrize(("drafts_with", "is_asked"), [("v2", True), ("v1", False)])
def test_a_canary_is_heard_where_the_live_draft_is_not(
    long_run: Callable[..., tuple[Engine, Chain, Watched, Request]], drafts_with: str, is_asked: bool
) -> None:
    """What the clock said of one version holds for its streams; whose a stream is, is found out by asking once."""
    engine, chain, controller, request = long_run(StepCost([1, 64], [1.0, 1.5]))
    controller.referee = never = Never()
    chain.version = lambda stream: drafts_with if chain.num_asked else ""  # type: ignore[method-assign]
    engine.add(request)
    for _ in range(10):
        engine.step()
    assert chain.num_asked == 0
    chain.named_beside = "v2"
    accepted = [len(engine.step().emissions[0].tokens) - 1 for _ in range(20)]

    assert (chain.num_asked >= 15) if is_asked else (chain.num_asked == 1)
    assert sum(accepted) >= 40 if is_asked else sum(accepted) <= 4
    assert set(never.tokens) <= {1}  # its plain times are those of plain steps


class Models(Never):
    """Wants models only."""

    def may_ask(self, num_streams: int) -> Asked:
        return Asked.MODELS


def test_models_alone_are_asked_in_every_step_whatever_is_thought_of_them(
    model_folder: Callable[[str], Path],
) -> None:
    """The twin that asks no estimate: a source that proposes nothing right is asked as often as steps are made."""
    runner, _ = load_runner(model_folder("llama"), kv_memory_mb=8, block_size=8)
    requests = [Request(name, tuple(range(3, 20)), Sampling(seed=1, temperature=1.0), 30) for name in "ab"]
    texts = Engine(runner, token_budget=256, max_streams=8).run(requests)
    chain, free = Chain(texts), Chain(texts)
    chain.is_right, free.name, free.is_free = False, "suffix", True
    controller = Bill(StepCost([1, 64], [100.0, 150.0]))
    controller.referee = Models()
    fused = FusedDrafter([free, chain], controller)
    found = Engine(runner, token_budget=256, max_streams=8, drafter=fused).run(requests)

    assert found == texts
    assert chain.num_asked >= 28 and free.num_asked == 0
    assert controller.charged == []  # nobody chose to ask, so nobody's budget pays


class Bill(Controller):
    """Remembers what asking is said to have cost."""

    def __init__(self, cost: StepCost) -> None:
        super().__init__(cost)
        self.charged: list[tuple[str, float]] = []

    def asked(self, name: str, wait_s: float, gained: Mapping[str, float], *, is_free: bool = False) -> None:
        self.charged.append((name, wait_s))
        super().asked(name, wait_s, gained, is_free=is_free)


@pytest.mark.parametrize("is_free", [True, False])
def test_a_source_that_is_asked_alone_pays_for_all_that_its_drafts_cause(
    model_folder: Callable[[str], Path], is_free: bool
) -> None:
    """Asking it, choosing from what it found and learning from the outcome: one tick of the clock each."""
    runner, _ = load_runner(model_folder("llama"), kv_memory_mb=8, block_size=8)
    request = Request("long", tuple(range(3, 20)), Sampling(seed=1, temperature=1.0), 30)
    chain = Chain(Engine(runner, token_budget=256, max_streams=8).run([request]))
    chain.is_free = is_free
    ticks = iter(range(10**9))
    bill = Bill(StepCost([1, 64], [100.0, 150.0]))
    fused = FusedDrafter([chain], bill, clock=lambda: float(next(ticks)))
    Engine(runner, token_budget=256, max_streams=8, drafter=fused).run([request])

    assert bill.charged and set(bill.charged[:-1]) == {("draft", 3.0)}
    # Also where it was asked in a step before anybody decided to: a new engine asks everybody once.
    assert bill._worths["draft"]._is_free == is_free


def test_figures_of_a_run_add_up_by_source(model_folder: Callable[[str], Path]) -> None:
    """Drafted >= verified = accepted + wasted, for each source; every step's nodes are in the histogram."""
    runner, _ = load_runner(model_folder("llama"), kv_memory_mb=8, block_size=8)
    chain = Chain(Engine(runner, token_budget=256, max_streams=8).run(REQUESTS))
    metrics = Metrics()
    controller = Controller(StepCost([1, 64], [1.0, 1.5]))
    fused = FusedDrafter([SuffixDrafter(), chain], controller, metrics=metrics)
    engine = Engine(runner, token_budget=256, max_streams=8, drafter=fused, metrics=metrics)
    num_nodes, steps = 0, 0
    for request in REQUESTS:
        engine.add(request)
    while len(engine.scheduler):
        result = engine.step()
        num_nodes += sum(emission.num_drafted for emission in result.emissions)
        steps += bool(result.outcomes)

    verified = {source: figure(engine, "verified", source) for source in ("draft", "suffix")}
    assert sum(verified.values()) == num_nodes > 0
    for source, num in verified.items():
        assert figure(engine, "drafted", source) >= num
        assert figure(engine, "accepted", source) + figure(engine, "wasted", source) == num
        assert figure(engine, "draft_seconds", source) > 0
    assert figure(engine, "accepted") > 0 and figure(engine, "accepted", "target") == 0
    assert metrics.step_nodes._sum.get() == num_nodes
    assert f"paceline_step_draft_nodes_count {float(steps)}" in metrics.text().decode()
    assert controller.calibration_errors().keys() >= {"draft"}


@pytest.mark.parametrize("compared", [False, True])
def test_the_clock_overrules_a_wrong_table(model_folder: Callable[[str], Path], compared: bool) -> None:
    """Nodes cost four times what they bring and the table says nothing: only a comparison with plain steps finds out."""
    runner, _ = load_runner(model_folder("llama"), kv_memory_mb=8, block_size=8)
    request = Request("long", tuple(range(3, 20)), Sampling(seed=1, temperature=1.0), 220)
    expected = Engine(runner, token_budget=256, max_streams=8).run([request])
    now = 0.0
    forward = runner.forward

    def timed_forward(batch: PackedBatch) -> Tensor:
        nonlocal now
        now += 4 * len(batch.input_ids) - 3 if len(batch.input_ids) < 9 else 1
        return forward(batch)

    cost = StepCost([1, 64], [1.0, 1.0001])
    cost.observe = lambda rows, seconds: None  # type: ignore[method-assign]
    chain = Chain(expected)
    controller = Controller(cost, referee=Referee() if compared else None)
    fused = FusedDrafter([chain], controller, clock=lambda: now)
    engine = Engine(runner, token_budget=256, max_streams=8, drafter=fused)
    runner.forward = timed_forward  # type: ignore[method-assign]

    assert engine.run([request]) == expected
    assert (now < 1.8 * 220) if compared else (now > 2.5 * 220)
