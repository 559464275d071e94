"""Messages, metrics and operators -> plans, with a real registry in a file; control may begin anew at any moment."""

import json
from pathlib import Path
from typing import Any

import pytest

from learning_world import NEW, Begin, Clock, World, info, trained
from paceline.cluster.errors import Unavailable
from paceline.cluster.learning import overrides
from paceline.cluster.learning.orders import OrderSettings
from paceline.cluster.registry.records import LedgerEntry
from paceline.cluster.registry.registry import Registry
from paceline.cluster.types import (
    Directory,
    DraftStatus,
    Snapshot,
    WorkerInfo,
)


async def test_traffic_becomes_a_live_version(begin: Begin) -> None:
    """Enough new requests -> train -> score -> canary -> live -> kept, each step in the registry."""
    world = await begin()
    assert world.plan.live == world.loop.base and world.plan.target == world.loop.target

    base = await trained(world)
    order = world.order
    assert (order.kind, order.base.version, order.candidate) == ("score", base, NEW)
    given = OrderSettings.decode(order.settings)
    assert given.step_rows == (1,) and given.target == world.loop.target and given.look == 1
    world.gate(passed=True)
    assert NEW in world.plan.resident and not world.plan.canary  # nobody holds it yet
    world.turn()
    assert world.plan.canary == NEW.version and world.plan.canary_share == 0.3
    world.serve(500, {base: 2.0, NEW.version: 3.0})
    assert world.plan.live == NEW.version
    world.serve(700, {base: 2.0, NEW.version: 3.0})

    assert not world.plan.canary and world.loop.view().status.live == NEW.version
    await world.loop.keeper.settled()
    registry = world.loop.registry
    live = registry.live()
    assert live is not None and (live.version, live.base) == (NEW.version, base)
    assert registry.trained_on(tenant="t") == (NEW.version,)
    assert {run.state for run in registry.runs().items} == {"done"}
    (row,) = registry.ledger(decisions=("train",)).items
    assert row.version == NEW.version and row.spent_s == 10.0
    kinds = [mark["kind"] for mark in world.loop.view().marks]
    assert kinds[:5] == ["train", "gate", "canary", "promote", "swap"]


async def test_a_candidate_that_fails_the_gate_goes_nowhere(begin: Begin) -> None:
    """It is rejected with the gate's reason, and no draft worker ever hears of it."""
    world = await begin()
    base = await trained(world)
    world.gate(passed=False, saving=-0.01)

    assert [ref.version for ref in world.plan.resident] == [base]
    await world.loop.keeper.settled()
    found = world.loop.registry.version(NEW.version)
    assert found is not None and (found.state, found.reason) == ("rejected", "as the test says")


async def test_with_too_few_held_out_requests_it_waits_for_more(begin: Begin) -> None:
    """Nothing is decided: the same candidate is scored again when there should be enough."""
    world = await begin("learning.capture.holdout=0.5")
    await trained(world)
    world.gate(passed=False, num=10)
    world.turn()
    assert world.loop.runs.order is None and "waits for more" in world.loop.view().status.reason

    world.turn(captured=25)
    world.turn()

    assert world.order.kind == "score" and world.order.candidate == NEW


async def test_a_draft_worker_that_refuses_ends_the_rollout(begin: Begin) -> None:
    """With its reason, in the version's state and in an alarm."""
    world = await begin()
    await trained(world)
    world.refused = ((NEW.version, "NaN in lm_head.weight"),)
    world.gate(passed=True)
    world.turn()
    world.turn()

    assert NEW not in world.plan.resident
    view = world.loop.view()
    assert any("NaN in lm_head.weight" in alarm.message for alarm in view.alarms)
    await world.loop.keeper.settled()
    found = world.loop.registry.version(NEW.version)
    assert found is not None and found.state == "rejected" and "NaN" in found.reason


async def test_a_second_draft_worker_holds_the_canary_back(begin: Begin) -> None:
    """Until it has loaded the version too; one that comes later is told the plan in force."""
    world = await begin()
    await trained(world)
    other = WorkerInfo("draft-b", "draft", 2, "h", 1, 1, "n", "ready")
    world.loop.on_directory(Directory(2, (info("decode", world.loop.target), info("draft"), other)))
    world.gate(passed=True)
    world.turn()
    assert not world.plan.canary
    plan = world.plan
    world.loop.on_draft_status(DraftStatus("draft-b", 0, plan.target, (world.loop.base,), world.loop.base))
    assert not world.plan.canary

    both = (world.loop.base, NEW.version)
    world.loop.on_draft_status(DraftStatus("draft-b", plan.revision, plan.target, both, world.loop.base))

    assert world.plan.canary == NEW.version and world.plan.revision > plan.revision


@pytest.mark.parametrize("moment", ["training", "scoring", "canary", "watch", "kept"])
async def test_control_may_begin_anew_at_any_moment(begin: Begin, moment: str) -> None:
    """The run goes on under its id, the canary is prepared again, what is live stays; revisions keep growing."""
    world = await begin()
    base = world.loop.base
    world.serve(40, {base: 2.0})
    world.turn(captured=40)
    world.turn()
    levels = {base: 2.0, NEW.version: 3.0}
    if moment != "training":
        world.trainer("done", step=20, result=NEW)
    if moment in ("canary", "watch", "kept"):
        world.gate(passed=True)
        world.turn()
    if moment in ("watch", "kept"):
        world.serve(500, levels)
    if moment == "kept":
        world.serve(700, levels)
    before, order = world.plan, world.loop.runs.order

    await world.restart(cleanly=moment != "canary")

    assert world.plan.live == before.live and world.plan.revision > before.revision
    assert world.loop.runs.order == order
    view = world.loop.view()
    if moment in ("training", "scoring"):
        assert view.status.state == moment
        world.trainer("done", step=20, result=NEW) if moment == "training" else world.gate(passed=True)
        assert world.loop.rollout is not None
    if moment == "canary":
        world.turn()
        assert world.plan.canary == NEW.version
    if moment == "watch":
        assert world.plan.canary == base and view.lanes[0].stage == "watch"
    if moment == "kept":
        assert not world.plan.canary and view.ledger["runs"][0]["version"] == NEW.version


async def test_without_the_registry_the_last_plans_stay_in_force(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alarm, nothing new, but what turns out worse is taken back all the same; then the registry is told."""
    world = await begin()
    base = await trained(world)
    world.gate(passed=True)
    world.turn()
    await world.loop.keeper.settled()
    registry, real = world.loop.registry, Registry._writing

    def broken(self: Registry) -> Any:
        raise Unavailable("the database is away")

    monkeypatch.setattr(type(registry), "_writing", broken)
    world.serve(400, {base: 3.0, NEW.version: 2.0})
    await World.until(lambda: world.loop.keeper.trouble)
    world.turn(captured=100)

    assert world.plan.live == base and not world.plan.canary
    assert [a.name for a in world.loop.view().alarms] == ["registry"]
    world.clock.now += 1000
    world.turn()
    assert world.loop.runs.order is None and "registry" in world.loop.view().status.reason
    monkeypatch.setattr(type(registry), "_writing", real)
    await world.loop.keeper.settled()
    world.turn()
    assert world.loop.view().alarms == []
    found = registry.version(NEW.version)
    assert found is not None and found.state == "rolled_back"


async def test_a_registry_that_is_away_at_the_start_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plan at all meanwhile: draft workers keep what they have."""
    monkeypatch.setattr(Registry, "prepare", lambda self: (_ for _ in ()).throw(Unavailable("away")))
    world = World(tmp_path, Clock())
    world.loop.start()
    try:
        await World.until(lambda: world.loop.alarms)
        assert world.loop.draft_plan is None and world.loop.trainer_plan is None
        world.turn()
        assert world.loop.view().status.state == "waiting"
        monkeypatch.undo()
        await World.until(lambda: world.loop.draft_plan is not None)
        assert world.loop.alarms == {}
    finally:
        await world.end()


async def test_stationary_traffic_of_a_good_draft_is_left_alone(begin: Begin) -> None:
    """The loop says "do not train", with the sum, once."""
    world = await begin("learning.min_return=1.5")
    world.serve(60, {world.loop.base: 3.0}, acceptance=0.9)
    for _ in range(10):
        world.turn(captured=40)

    status = world.loop.view().status
    assert world.loop.runs.order is None
    assert status.state == "blocked" and "do not train" in status.reason
    await world.loop.keeper.settled()
    assert len(world.loop.registry.ledger(decisions=("skip",)).items) == 1


async def test_a_failed_run_is_shown_and_not_repeated_at_once(begin: Begin) -> None:
    """Its reason is an alarm; the next one waits."""
    world = await begin()
    base = world.loop.base
    world.serve(40, {base: 2.0})
    world.turn(captured=40)
    world.turn()
    world.trainer("failed", error="loss is not a number at step 7")
    world.turn(captured=100)
    world.turn()

    assert world.loop.runs.order is None
    assert any("not a number" in alarm.message for alarm in world.loop.view().alarms)
    world.turn(200.0)
    world.turn()
    assert world.order.kind == "train"


async def test_the_guard_holds_runs_back_and_slows_the_one_that_is_on(begin: Begin) -> None:
    """Its level is in every plan of the trainer."""
    world = await begin()
    world.serve(40, {world.loop.base: 2.0})
    world.turn(captured=40)
    world.turn()
    first = world.loop.trainer_plan
    assert first is not None and first.level == "normal"
    busy = info("decode", world.loop.target)
    full = WorkerInfo(*(getattr(busy, f) for f in busy.__struct_fields__[:9]), 99, 1, 64)

    world.clock.now += 1
    world.loop.tick([Snapshot(info("gateway"), b""), Snapshot(full, b"")])

    second = world.loop.trainer_plan
    assert second is not None and second.level == "pause" and second.revision > first.revision
    assert second.order == first.order


async def test_drift_looks_into_the_pool_before_it_trains(begin: Begin) -> None:
    """A version that drafted before may be the best again: it is ranked, then scored like any candidate."""
    world = await begin("learning.train.min_requests=400")
    base = world.loop.base
    result = await world.loop.act("train", "", "ops")
    assert result.is_done
    world.trainer("done", step=20, result=NEW)
    world.gate(passed=True)
    world.turn()
    await world.loop.act("promote", NEW.version, "ops")
    world.turn()
    assert world.plan.live == NEW.version
    levels = {base: 2.0, NEW.version: 2.0}
    world.serve(700, levels, acceptance=0.8)
    world.turn(captured=200)
    assert world.loop.runs.order is None
    for _ in range(10):
        world.serve(50, levels, acceptance=0.4)
        if world.loop.runs.order is not None:
            break

    settings = OrderSettings.decode(world.order.settings)
    assert [ref.version for ref in settings.rank] == [base]
    rows = [{"version": base, "saving": {"mean": 0.2, "lo": 0.1, "hi": 0.3}}, {"version": NEW.version}]
    world.trainer("done", report=json.dumps({"ranked": rows}).encode())
    candidate = world.order.candidate
    assert candidate is not None and candidate.version == base and world.order.base == NEW


async def test_operators_do_what_the_loop_would_not(begin: Begin) -> None:
    """Each action, done or refused with a reason; nothing is ever raised."""
    world = await begin()
    loop = world.loop
    base = await trained(world)
    world.gate(passed=False)

    refused = await loop.act("promote", NEW.version, "ops")
    assert not refused.is_done and "rejected" in refused.message
    assert (await loop.act("promote", NEW.version, "ops", {"force": True})).is_done
    world.turn()
    world.turn()
    assert world.plan.live == NEW.version and loop.view().lanes[0].live_by == "ops"
    assert (await loop.act("pin", "", "ops")).is_done
    assert (await loop.act("roll_back", "", "ops")).is_done
    assert world.plan.live == base
    assert not (await loop.act("roll_back", "", "ops")).is_done
    assert (await loop.act("canary", NEW.version, "ops", {"force": True})).is_done
    world.turn()
    assert world.plan.canary == NEW.version
    assert (await loop.act("revoke", NEW.version, "ops")).is_done
    assert not world.plan.canary and NEW not in world.plan.resident
    assert not (await loop.act("promote", NEW.version, "ops", {"force": True})).is_done
    assert (await loop.act("pause", "", "ops")).is_done
    world.clock.now += 1e6
    world.serve(40, {base: 2.0})
    world.turn(captured=500)
    assert loop.runs.order is None and loop.view().status.state == "paused"
    run = await loop.act("train", "", "ops")
    assert run.is_done and world.order.kind == "train"
    assert not (await loop.act("train", "", "ops")).is_done
    assert (await loop.act("forget", world.order.run_id, "ops")).is_done and loop.runs.order is None
    assert not (await loop.act("forget", "nothing", "ops")).is_done
    assert not (await loop.act("delete", "everything", "ops")).is_done
    assert not (await loop.act("explode", "", "ops")).is_done  # type: ignore[arg-type]
    await loop.keeper.settled()
    found = loop.registry.version(NEW.version)
    assert found is not None and found.state == "revoked" and loop.keeper.num_lost == 0


async def test_a_tag_gets_its_own_draft(begin: Begin) -> None:
    """Trained on its requests alone, tried on its streams alone, routed to them alone."""
    world = await begin('learning.tags=["domain:law"]', "learning.train.min_requests=50")
    base = world.loop.base
    world.serve(60, {base: 2.0})
    assert world.order.tag == "domain:law" and world.order.kind == "train"
    world.trainer("done", step=20, result=NEW)
    world.gate(passed=True)
    world.turn()
    assert world.plan.canary_tag == "domain:law"
    world.serve(500, {base: 2.0, NEW.version: 3.0})

    assert world.plan.routes == (("domain:law", NEW.version),) and world.plan.live == base
    await world.loop.keeper.settled()
    assert [(r.tag, r.version) for r in world.loop.registry.routes()] == [("domain:law", NEW.version)]
    await world.restart()
    assert world.plan.routes == (("domain:law", NEW.version),)


async def test_another_target_makes_all_versions_stale(begin: Begin) -> None:
    """Seen while running; the configuration's draft serves."""
    world = await begin()
    await trained(world)
    await world.loop.act("promote", NEW.version, "ops")
    world.trainer("done", report=b"{}")
    world.turn()
    world.turn()
    assert world.plan.live == NEW.version

    world.loop.on_directory(Directory(9, (info("decode", "ffffffffffff"), info("draft"), info("trainer"))))

    assert world.plan.live == world.loop.base and world.plan.target == "ffffffffffff"
    assert [ref.version for ref in world.plan.resident] == [world.loop.base]
    await world.loop.keeper.settled()
    found = world.loop.registry.version(NEW.version)
    assert found is not None and found.state == "stale"


async def test_deleting_revokes_what_learned_from_it(begin: Begin) -> None:
    """Or, by setting, says only which versions had."""
    world = await begin()
    base = await trained(world)
    await world.loop.act("promote", NEW.version, "ops")
    world.turn()
    world.turn()
    await world.loop.keeper.settled()

    result = await world.loop.act("delete", "tenant:t", "ops")

    assert result.is_done and NEW.version in result.message
    assert world.plan.live == base
    await world.loop.keeper.settled()
    (deletion,) = world.loop.registry.deletions().items
    assert (deletion.state, deletion.versions, deletion.actor) == ("done", (NEW.version,), "ops")


async def test_workers_that_knew_a_later_plan_are_overtaken(begin: Begin) -> None:
    """Another control was here whose clock was ahead: plans with smaller revisions would be ignored for ever."""
    world = await begin()
    plan = world.plan
    ahead = plan.revision + 10**9

    world.loop.on_draft_status(DraftStatus("draft-a", ahead, plan.target, (plan.live,), plan.live))

    assert world.plan.revision > ahead


async def test_settings_that_operators_change_reach_the_trainer(begin: Begin) -> None:
    """What is as configured is left to it. Streams of a step are those that decode workers have."""
    world = await begin()
    changed = overrides.apply(
        world.loop.learning, {"learning.train.loss": "tv", "learning.gate.min_saving": 0.2}
    )
    world.loop.configure(changed)
    world.turn()
    world.metrics.steps.inc(10)
    world.metrics.stream_steps.labels("v").inc(30)
    await trained(world)

    (run,) = (run for run in world.loop.runs.past if run.kind == "train")
    for given in (run.settings, OrderSettings.decode(world.order.settings)):
        assert (given.train, given.gate, given.streams) == ({"loss": "tv"}, {"min_saving": 0.2}, 3)


async def test_do_not_speculate_stands_in_the_ledger(begin: Begin) -> None:
    """With what was measured, for as long as it holds; over a restart of control; not what lasts for seconds only."""
    world = await begin()

    def decided() -> list[LedgerEntry]:
        return list(world.loop.registry.ledger(decisions=("stop_speculating",)).items)

    async def drafting(is_on: bool, seconds: int) -> None:
        world.metrics.draft_gain.labels(4).set(1.2 if is_on else 0.8)
        world.metrics.draft_off.labels(4).set(not is_on)
        for _ in range(seconds):
            world.turn()
        await world.loop.keeper.settled()

    await drafting(False, 20)
    await drafting(True, 5)
    assert decided() == []
    await drafting(False, 70)
    (row,) = decided()
    assert "0.80 times as fast with 4 or more" in row.reason and row.until is None
    await world.restart()
    await drafting(False, 70)
    assert len(decided()) == 1
    await drafting(True, 70)
    (row,) = decided()
    assert row.until is not None
