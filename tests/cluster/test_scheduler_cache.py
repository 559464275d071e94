"""Streams that begin alike -> plans in which a prefix is computed once and nobody loses or waits by it."""

import msgspec

from paceline.cluster.scheduler import Plan, Scheduler
from scheduling import admit, make, new_stream


def finish_prompt(scheduler: Scheduler) -> Plan:
    """One step of prompts, computed and shared."""
    plan = scheduler.plan()
    for segment in plan.segments:
        segment.stream.num_computed += segment.num_rows
        scheduler.share(segment.stream)
    return plan


def test_a_stream_begins_with_what_others_computed() -> None:
    """All full blocks but the one of the last token, from running and from finished streams alike."""
    scheduler, pool = make(16, cache="v")
    first = admit(scheduler, "first", 16, 0)
    finish_prompt(scheduler)
    second = admit(scheduler, "second", 16, 1)
    plan = finish_prompt(scheduler)

    assert [(s.stream, s.start, s.num_rows) for s in plan.segments] == [(second, 12, 4)]
    assert (plan.num_queried, plan.num_adopted) == (16, 12)
    assert pool.table(second.key)[:3] == pool.table(first.key)[:3] and pool.num_used == 5
    scheduler.remove(first)
    scheduler.remove(second)
    assert pool.num_free == 16
    third = admit(scheduler, "third", 9, 2)
    (segment,) = scheduler.plan().segments
    assert (segment.stream, segment.start, segment.samples) == (third, 8, True)


def test_a_preempted_stream_finds_its_own_blocks_again() -> None:
    """What was not evicted meanwhile need not be computed again."""
    scheduler, pool = make(4, cache="v")
    stream = admit(scheduler, "s", 13, 1)
    finish_prompt(scheduler)
    old = new_stream("old", 4, 16, 0)
    old.buffer[:] = 99
    scheduler.add(old)
    plan = scheduler.plan()

    assert plan.preempted == [stream] and not pool.table(stream.key)
    scheduler.remove(old)
    (segment,) = scheduler.plan().segments
    assert (segment.stream, segment.start) == (stream, 12)


def test_streams_that_share_nothing_by_wish_or_by_salt_compute_alone() -> None:
    """Another salt, and log-probabilities of the prompt itself, which have to be computed."""
    scheduler, _ = make(32, cache="v")
    admit(scheduler, "first", 16, 0)
    finish_prompt(scheduler)
    for arrival, changes in enumerate([{"cache_salt": "theirs"}, {"prompt_logprobs": 0}, {}], start=1):
        stream = new_stream(f"s{arrival}", 16, 16, arrival)
        stream.request = msgspec.structs.replace(stream.request, **changes)
        scheduler.add(stream)

    assert [segment.start for segment in finish_prompt(scheduler).segments] == [0, 0, 12]


def test_nobody_is_preempted_for_blocks_that_others_share() -> None:
    """Freeing a stream frees what it does not share: a prompt that this would not help preempts nobody."""
    scheduler, pool = make(5, cache="v")
    admit(scheduler, "first", 13, 0)
    finish_prompt(scheduler)
    third = admit(scheduler, "third", 13, 2)
    finish_prompt(scheduler)
    assert pool.num_free == 0
    second = new_stream("second", 8, 8, 1)
    second.buffer[:] = 99
    scheduler.add(second)
    plan = scheduler.plan()

    assert not plan.preempted and not plan.segments and pool.table(third.key)


def test_an_adoption_that_leads_to_nothing_is_given_back() -> None:
    """A stream that finds its prefix and no room for the rest holds nothing while it waits."""
    scheduler, pool = make(6, cache="v")
    first = admit(scheduler, "first", 12, 0)
    finish_prompt(scheduler)
    scheduler.remove(first)
    holder = admit(scheduler, "holder", 12, 1)
    holder.is_blocked = True
    pool.try_extend(holder.key, 12)
    late = admit(scheduler, "late", 16, 2)
    late.buffer[12:] = 99
    plan = scheduler.plan()

    assert not plan.segments and not pool.table(late.key) and late.num_computed == late.num_shared == 0
    assert plan.num_queried == 0 and pool.num_free == 3
    scheduler.check_integrity()
