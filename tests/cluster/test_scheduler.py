"""Random streams, budgets and tiny pools -> plans that keep every promise, until every stream has finished."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.blocks import BlockPool
from paceline.cluster.errors import IntegrityError
from paceline.cluster.scheduler import Plan, Scheduler, Segment, Stream
from paceline.cluster.speculation import Tree
from scheduling import admit, make, new_stream


class WatchedPool(BlockPool):
    """Tells who gives up blocks, at the moment it happens."""

    on_free: Callable[[str], None] = staticmethod(lambda owner: None)

    def free(self, owner: str) -> int:
        self.on_free(owner)
        return super().free(owner)


@dataclass
class Spec:
    """One stream to come: when, how long, and for a blocked one how its KV fares."""

    at: int
    num_prompt: int
    max_tokens: int
    kind: str
    blocked_for: int = 0
    kv_arrives: bool = True
    priority: int = 0


@dataclass
class Scenario:
    """One run: the pool, the limits and the streams. With a prefix cache: they all begin with the same tokens."""

    num_blocks: int
    block_size: int
    token_budget: int
    max_streams: int
    seed: int
    prefix_cache: bool = False
    specs: list[Spec] = field(default_factory=list)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small pools under pressure: what all streams want is usually more than there is."""
    num_blocks, block_size = draw(st.integers(2, 8)), draw(st.integers(1, 4))
    room = num_blocks * block_size
    scenario = Scenario(
        num_blocks,
        block_size,
        draw(st.integers(1, 12)),
        draw(st.integers(1, 5)),
        draw(st.integers(0, 999)),
        draw(st.booleans()),
    )
    for _ in range(draw(st.integers(1, 7))):
        num_prompt = draw(st.integers(1, room - 1))
        kind = draw(st.sampled_from(["plain", "plain", "prefill_only", "blocked"]))
        max_tokens = 0 if kind == "prefill_only" else draw(st.integers(1, room - num_prompt))
        waits, priority = draw(st.integers(0, 6)), draw(st.sampled_from([0, 0, -1, 1]))
        scenario.specs.append(
            Spec(draw(st.integers(0, 12)), num_prompt, max_tokens, kind, waits, draw(st.booleans()), priority)
        )
    return scenario


def some_tree(dice: random.Random, max_nodes: int = 10) -> Tree:
    """A root and up to nine nodes anywhere below it."""
    num = dice.randrange(max_nodes)
    return Tree.build(0, range(num), [dice.randrange(-1, node) for node in range(num)])


class Run:
    """Drives one scheduler as an engine does and checks each plan."""

    def __init__(self, scenario: Scenario) -> None:
        self.pool = WatchedPool(scenario.num_blocks, scenario.block_size)
        self.pool.on_free = self.check_victim  # type: ignore[method-assign]
        self.limits = scenario
        self.scheduler = Scheduler(
            self.pool,
            token_budget=scenario.token_budget,
            max_streams=scenario.max_streams,
            cache_version="v" if scenario.prefix_cache else None,
        )
        self.num_adopted = 0
        self.preemptions: dict[str, int] = {}
        self.dice = random.Random(scenario.seed)
        self.is_planning = False
        self.to_come = [(spec.at, index, spec) for index, spec in enumerate(scenario.specs)]
        self.unblock_at: dict[str, tuple[int, bool]] = {}
        self.release_at: dict[str, int] = {}
        self.finished: set[str] = set()

    def check_victim(self, owner: str) -> None:
        """Only the last by rank that holds blocks gives them up, and never a blocked one."""
        if self.is_planning:
            holders = [s for s in self.scheduler if not s.is_blocked and self.pool.table(s.key)]
            assert owner == max(holders, key=lambda s: s.rank).key, "not the last by rank was preempted"

    def arrive(self, now: int) -> None:
        for item in [item for item in self.to_come if item[0] <= now]:
            self.to_come.remove(item)
            _, index, spec = item
            stream = new_stream(f"s{index}", spec.num_prompt, spec.max_tokens, index, spec.priority)
            stream.prefill_only = spec.kind == "prefill_only"
            self.scheduler.add(stream)
            if spec.kind == "blocked":
                stream.is_blocked = True
                self.unblock_at[stream.key] = (now + spec.blocked_for, spec.kv_arrives)

    def hand_off(self, now: int) -> None:
        """Reserve blocks of blocked streams when they fit; later the KV is there, or was given up."""
        for stream in self.scheduler:
            if not stream.is_blocked:
                continue
            has_room = self.pool.try_extend(stream.key, stream.num_tokens - 1)
            due, arrives = self.unblock_at[stream.key]
            if now >= due:
                stream.is_blocked = False
                if arrives and has_room:
                    stream.num_computed = stream.num_tokens - 1
                else:
                    self.pool.free(stream.key)
                    stream.restart()

    def plan(self) -> Plan:
        before = {s.key: list(self.pool.table(s.key)) for s in self.scheduler}
        caught_up = [s for s in self.scheduler if s.is_caught_up and not s.is_blocked]
        self.is_planning = True
        plan = self.scheduler.plan()
        self.is_planning = False

        planned = [segment.stream for segment in plan.segments]
        assert plan.num_rows <= self.limits.token_budget
        assert len(planned) <= self.limits.max_streams
        assert len(set(map(id, planned))) == len(planned)
        assert not {id(s) for s in planned} & {id(s) for s in plan.preempted}
        for stream in self.scheduler:
            if stream.is_blocked:
                assert stream not in planned and stream not in plan.preempted
                assert self.pool.table(stream.key) == before[stream.key]
        for segment in plan.segments:
            stream, end = segment.stream, segment.start + segment.num_rows
            assert segment.start == stream.num_computed and segment.num_rows >= 1
            assert len(self.pool.table(stream.key)) * self.pool.block_size >= end
            assert (segment.tree is not None) == (stream in caught_up)
            assert segment.samples == (end == stream.num_tokens and not stream.prefill_only)
            self.check_writes(stream, segment.start, end)
        assert planned or not plan.preempted, "preempted in vain"
        for stream in plan.preempted:
            assert stream.num_computed == 0 and not self.pool.table(stream.key)
        self.check_nobody_is_left_out(plan, caught_up)
        self.num_adopted += plan.num_adopted
        assert plan.num_adopted <= plan.num_queried
        return plan

    def check_writes(self, stream: Stream, start: int, end: int) -> None:
        """What is computed goes to blocks of this stream alone, which nobody can find."""
        for index in range(start // self.pool.block_size, self.pool.blocks_for(end)):
            block = self.pool.table(stream.key)[index]
            assert block not in self.pool._hash_of, "a shared block is written"
            assert self.pool._num_owners[block] == 1

    def check_nobody_is_left_out(self, plan: Plan, caught_up: list[Stream]) -> None:
        """A caught-up stream runs unless it was preempted, the limits were reached or those before it hold the pool.

        Those that count towards the limits are caught up, or come before it by rank.
        """
        planned = [segment.stream for segment in plan.segments]
        served = [stream for stream in caught_up if stream in planned or stream in plan.preempted]
        for stream in caught_up:
            if stream in served:
                continue
            before = [s for s in planned if s not in served and s.rank < stream.rank]
            if len(served) + len(before) >= min(self.limits.token_budget, self.limits.max_streams):
                continue
            if len(before) and plan.num_rows == self.limits.token_budget:
                continue
            if plan.preempted:  # what they gave up came too late for this one
                continue
            behind = [s for s in self.scheduler if s.rank > stream.rank and not s.is_blocked]
            assert self.pool.num_free == 0, f"{stream.key} was left out with room to spare"
            assert not self.pool.num_reclaimable(s.key for s in behind), (
                f"{stream.key} yields to one behind it"
            )

    def attach(self, plan: Plan, segment: Segment, tree: Tree) -> None:
        num_free = self.pool.num_free
        num_held = len(self.pool.table(segment.stream.key))
        others = {s.key: list(self.pool.table(s.key)) for s in self.scheduler if s is not segment.stream}
        room = self.limits.token_budget - plan.num_rows + 1
        stream = segment.stream
        self.is_planning = True
        self.scheduler.attach(plan, segment, tree)
        self.is_planning = False

        got = segment.tree
        assert got is not None and segment.num_rows == len(got) >= 1
        self.check_writes(stream, segment.start, segment.start + len(got))
        assert plan.num_rows <= self.limits.token_budget
        assert got.depths.max() < stream.num_allowed
        num_taken = len(self.pool.table(stream.key)) - num_held
        assert 0 <= num_taken <= num_free
        assert len(self.pool.table(stream.key)) * self.pool.block_size >= segment.start + len(got)
        assert others == {key: self.pool.table(key) for key in others}, "drafts took from others"
        fits = self.pool.blocks_for(segment.start + len(tree)) - num_held <= num_free
        if fits and len(tree) <= room and tree.depths.max() < stream.num_allowed:
            assert got is tree, "cut without need"

    def commit(self, plan: Plan, now: int) -> None:
        for segment in plan.segments:
            stream = segment.stream
            if not segment.samples:
                stream.num_computed += segment.num_rows
                self.scheduler.share(stream)
                if stream.prefill_only and stream.num_missing == 0:
                    self.release_at[stream.key] = now + self.dice.randrange(3)
                continue
            num_accepted = 0
            if segment.tree is not None:
                node = self.dice.randrange(len(segment.tree))
                num_accepted = int(segment.tree.depths[node])
            stream.num_computed = stream.num_tokens + num_accepted
            stream.append([7] * (num_accepted + 1))
            assert stream.num_output <= stream.request.max_tokens
            self.scheduler.share(stream)
            self.pool.shrink(stream.key, stream.num_tokens)
            if stream.num_allowed == 0:
                self.finish(stream)
        for stream in self.scheduler:
            if stream.prefill_only and stream.num_missing == 0 and now >= self.release_at[stream.key]:
                self.finish(stream)

    def finish(self, stream: Stream) -> None:
        self.preemptions[stream.request.id] = stream.num_preempted
        self.scheduler.remove(stream)
        self.finished.add(stream.request.id)

    def step(self, now: int) -> None:
        self.arrive(now)
        self.hand_off(now)
        plan = self.plan()
        for segment in plan.caught_up:
            if self.dice.random() < 0.7:
                self.attach(plan, segment, some_tree(self.dice))
        self.scheduler.check_integrity()
        self.commit(plan, now)
        self.scheduler.check_integrity()


@settings(max_examples=500, deadline=None)
@given(scenarios())
def test_every_stream_finishes_and_every_plan_keeps_its_promises(scenario: Scenario) -> None:
    """Limits, block books, order of preemption, shared blocks and progress hold in every step of random runs."""
    run = Run(scenario)
    for now in range(3000):
        run.step(now)
        if len(run.finished) == len(scenario.specs):
            break

    assert run.finished == {f"s{index}" for index in range(len(scenario.specs))}
    assert run.pool.num_free == scenario.num_blocks and not run.scheduler.has_work
    assert scenario.prefix_cache or not run.num_adopted


def test_random_runs_do_share() -> None:
    """The runs above are about nothing if no stream ever adopts: here one after the other does, preempted or not."""
    specs = [Spec(2 * i, 9, 6, "plain", priority=-i % 3) for i in range(6)]
    run = Run(Scenario(7, 2, 12, 5, 1, True, specs))
    for now in range(300):
        run.step(now)
    num_preempted = sum(count > 0 for count in run.preemptions.values())

    assert len(run.finished) == 6
    assert run.num_adopted > 20 and num_preempted > 0


def test_a_long_prompt_never_stalls_a_running_stream() -> None:
    """Roots come first; the chunk of an older prompt fills what is left of the budget."""
    scheduler, pool = make(64, token_budget=10)
    prompt = admit(scheduler, "prompt", 100, 0)
    running = admit(scheduler, "running", 5, 1, num_computed=4)
    pool.try_extend(running.key, 4)

    plan = scheduler.plan()

    assert [(s.stream, s.start, s.num_rows, s.samples) for s in plan.segments] == [
        (running, 4, 1, True),
        (prompt, 0, 9, False),
    ]


def test_the_last_chunk_of_a_prompt_samples() -> None:
    """A chunk that reaches the end of the tokens decides the first output token in the same step."""
    scheduler, _ = make(8)
    admit(scheduler, "whole", 6, 0)

    (segment,) = scheduler.plan().segments

    assert segment.samples and segment.num_rows == 6 and segment.tree is None


def test_the_youngest_stream_gives_up_its_blocks() -> None:
    """When the oldest needs a block and none is free, the newest arrival starts over and says so."""
    scheduler, pool = make(3)
    streams = [
        admit(scheduler, f"s{i}", 5 if i == 0 else 4, i, num_computed=4 if i == 0 else 3) for i in range(3)
    ]
    for stream in streams:
        pool.try_extend(stream.key, 4)

    plan = scheduler.plan()

    assert plan.preempted == [streams[2]]
    assert (streams[2].num_computed, streams[2].num_preempted) == (0, 1)
    assert [s.stream for s in plan.segments] == streams[:2]


def test_nobody_is_preempted_in_vain() -> None:
    """A stream that would not fit even then leaves the younger ones alone: they run while it waits."""
    scheduler, pool = make(3)
    holder = admit(scheduler, "holder", 8, 0)
    holder.is_blocked = True
    pool.try_extend(holder.key, 8)
    admit(scheduler, "large", 8, 1)
    young = admit(scheduler, "young", 3, 2, num_computed=2)
    pool.try_extend(young.key, 2)

    plan = scheduler.plan()

    assert [s.stream for s in plan.segments] == [young] and not plan.preempted


def test_a_blocked_stream_keeps_its_blocks_whatever_others_need() -> None:
    """Blocks under a running transfer are never taken, even if the oldest stream has to wait for them."""
    scheduler, pool = make(2)
    oldest = admit(scheduler, "oldest", 5, 0)
    blocked = admit(scheduler, "blocked", 5, 1)
    blocked.is_blocked = True
    pool.try_extend(blocked.key, 4)

    plan = scheduler.plan()

    assert not plan.segments and not plan.preempted
    assert len(pool.table(blocked.key)) == 1 and not pool.table(oldest.key)


def test_drafts_are_cut_to_the_free_blocks_and_preempt_nobody() -> None:
    """A tree that does not fit shrinks until it does; the neighbour's block stays where it is."""
    scheduler, pool = make(2)
    old = admit(scheduler, "old", 3, 0, num_computed=2)
    young = admit(scheduler, "young", 3, 1, num_computed=2)
    plan = scheduler.plan()
    chain = Tree.build(9, range(6), range(-1, 5))

    scheduler.attach(plan, plan.segments[0], chain)

    assert len(pool.table(old.key)) == len(pool.table(young.key)) == 1
    assert plan.segments[0].num_rows <= 2


def test_a_stream_with_one_token_to_come_gets_no_drafts() -> None:
    """Nodes deeper than what may still be emitted are not verified."""
    scheduler, _ = make(8)
    stream = new_stream("last", 3, 1, 0)
    scheduler.add(stream)
    stream.num_computed = 2
    plan = scheduler.plan()

    scheduler.attach(plan, plan.segments[0], Tree.build(9, [1, 2], [-1, 0]))

    assert plan.num_rows == 1


def test_a_removed_stream_returns_its_blocks_and_may_come_again() -> None:
    """Removing forgets the key; only a key that still runs is refused."""
    scheduler, pool = make(4)
    stream = admit(scheduler, "s", 5, 0)
    scheduler.plan()
    with pytest.raises(AssertionError, match="running already"):
        scheduler.add(stream)
    scheduler.remove(stream)

    assert pool.num_free == 4 and len(scheduler) == 0
    scheduler.add(stream)
    assert list(scheduler) == [stream]


def test_blocks_of_a_stream_that_is_gone_are_found() -> None:
    """The integrity check knows owners without a stream and streams without enough blocks."""
    scheduler, pool = make(4)
    pool.try_extend("ghost/0", 4)
    with pytest.raises(IntegrityError, match="ghost"):
        scheduler.check_integrity()
    pool.free("ghost/0")
    admit(scheduler, "claims", 5, 0, num_computed=4)

    with pytest.raises(IntegrityError, match="4 computed"):
        scheduler.check_integrity()
    stream = next(iter(scheduler))
    stream.num_computed, stream.num_shared = 0, 1
    with pytest.raises(IntegrityError, match="1 blocks shared, 0 tokens computed"):
        scheduler.check_integrity()


# --- priorities -----------------------------------------------------------------------------------------


def test_a_lower_priority_value_runs_earlier() -> None:
    """Among prompts and among running streams; equal ones go by arrival."""
    scheduler, pool = make(64, token_budget=5, max_streams=3)
    for arrival, priority in enumerate([0, 1, -1, 0, -1]):
        running = admit(scheduler, f"run{arrival}", 5, arrival, 4, priority)
        pool.try_extend(running.key, 4)
    order = [segment.stream.request.id for segment in scheduler.plan().segments]
    scheduler, _ = make(64, token_budget=12, max_streams=3)
    for arrival, priority in enumerate([0, 1, -1, 0, -1]):
        admit(scheduler, f"new{arrival}", 4, arrival, 0, priority)

    assert order == ["run2", "run4", "run0"]
    assert [s.stream.request.id for s in scheduler.plan().segments] == ["new2", "new4", "new0"]


def test_an_urgent_prompt_takes_the_blocks_of_the_least_urgent_youngest() -> None:
    """Priority goes before age, both when taking and when giving up; a running urgent stream is left alone."""
    scheduler, pool = make(3)
    for arrival, priority in enumerate([5, 0, 5]):
        pool.try_extend(admit(scheduler, f"run{arrival}", 4, arrival, 3, priority).key, 4)
    admit(scheduler, "urgent", 8, 3, 0, -1)
    plan = scheduler.plan()

    assert [stream.request.id for stream in plan.preempted] == ["run2", "run0"]
    assert [segment.stream.request.id for segment in plan.segments] == ["run1", "urgent"]


@pytest.mark.parametrize("limits", [{"max_streams": 2}, {"token_budget": 2}, {"max_streams": 1}])
def test_a_flow_of_younger_streams_cannot_starve_a_prompt(limits: dict[str, int]) -> None:
    """Their prompts are computed elsewhere and they arrive caught up; an older prompt still gets its turn."""
    scheduler, pool = make(64, **limits)  # type: ignore[arg-type]
    prompt = admit(scheduler, "prompt", 9, 0)
    planned = []
    for arrival in range(1, 40):
        for name in ("a", "b", "c"):
            pool.try_extend(admit(scheduler, f"{name}{arrival}", 5, arrival, 4).key, 4)
        plan = scheduler.plan()
        planned.append(len(plan.segments))
        for segment in plan.segments:
            segment.stream.num_computed += segment.num_rows
            if segment.stream is not prompt:
                scheduler.remove(segment.stream)
        if prompt.num_missing == 0:
            break

    assert prompt.num_missing == 0
    assert set(planned) == {min(limits.values())}, "a segment was kept free for nothing"


def test_a_prompt_waits_for_streams_that_run_longer() -> None:
    """Running streams before it are not disturbed: it waits for one of their places."""
    scheduler, pool = make(64, max_streams=2)
    for arrival in range(2):
        pool.try_extend(admit(scheduler, f"run{arrival}", 5, arrival, 4).key, 4)
    admit(scheduler, "prompt", 9, 2)

    assert [s.stream.request.id for s in scheduler.plan().segments] == ["run0", "run1"]


def test_a_place_kept_for_a_prompt_that_finds_no_blocks_is_used() -> None:
    """What the older prompt cannot use goes to the stream that made way for it."""
    scheduler, pool = make(3, max_streams=1)
    holder = admit(scheduler, "holder", 8, 0)
    holder.is_blocked = True
    pool.try_extend(holder.key, 8)
    admit(scheduler, "large", 8, 1)
    young = admit(scheduler, "young", 3, 2, num_computed=2)
    pool.try_extend(young.key, 2)

    assert [s.stream for s in scheduler.plan().segments] == [young]
