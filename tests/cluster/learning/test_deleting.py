"""Deletions -> nothing of it is learned from, and what had learned from it serves no longer; also when things are late or away."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from learning_world import NEW, Begin, World, trained
from paceline.cluster.errors import Unavailable
from paceline.cluster.learning.publish import publish, published
from paceline.cluster.learning.storage import learning_folder
from paceline.cluster.model_files import WEIGHTS
from paceline.cluster.registry.records import Version, VersionState
from paceline.cluster.registry.registry import Registry
from paceline.cluster.types import DraftRef

Rows = Sequence[tuple[str, str, str, int, float]]


def report(*rows: tuple[str, str, float]) -> bytes:
    """What the trainer says that it learned from: (tenant, stream, when it was captured)."""
    return json.dumps({"requests": [[t, stream, "shard-1", 50, at] for t, stream, at in rows]}).encode()


def is_revoked(world: World, version: str = NEW.version) -> bool:
    return world.loop.versions[version].state == "revoked"


# --- lineage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("request:order-7", True),
        ("request:order-7-0-1", True),
        ("tenant:acme", True),
        ("request:order", False),
        ("request:order-70", False),
        ("request:order_7", False),
        ("tenant:acm", False),
    ],
)
async def test_lineage_outlives_shards(what: str, expected: bool, begin: Begin) -> None:
    """No shard is there any more, they expired: who had learned from it is found all the same, and nobody else."""
    world = await begin()
    base = await trained(world, report(("acme", "order-7-0-1", 5.0)))
    await world.loop.act("promote", NEW.version, "ops")
    world.turn()
    world.turn()
    assert world.plan.live == NEW.version

    result = await world.loop.act("delete", what, "ops")

    assert result.is_done and (NEW.version in result.message) == expected
    assert (world.plan.live == base) == is_revoked(world) == expected


async def test_the_window_of_a_versions_data_is_that_of_its_requests(begin: Begin) -> None:
    """Not the time at which the run ended."""
    world = await begin()
    await trained(world, report(("acme", "a-0-0", 100.0), ("acme", "b-0-0", 170.0)))
    await world.loop.keeper.settled()

    found = world.loop.registry.lineage(NEW.version)
    assert (found.data_from, found.data_to) == (100.0, 170.0)


# --- a version that was being made -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "sent_s", "expected"),
    [
        ("tenant:acme", -10.0, True),
        ("request:order-7", -10.0, True),
        ("tenant:acme", 10.0, False),
        ("tenant:umbrella", -10.0, False),
        ("request:order-8", -10.0, False),
    ],
)
async def test_a_version_that_was_being_written_is_revoked(
    what: str, sent_s: float, expected: bool, begin: Begin
) -> None:
    """The trainer looked for deletions just before this one. What was sent later, with consent again, may stay."""
    world = await begin()
    world.serve(40, {world.loop.base: 2.0})
    world.turn(captured=40)
    world.turn()
    assert world.order.kind == "train"
    assert (await world.loop.act("delete", what, "ops")).is_done
    sent = world.clock.now + sent_s
    world.turn(20.0)

    world.trainer("done", step=20, result=NEW, report=report(("acme", "order-7-0-0", sent)))

    assert is_revoked(world) == expected
    assert (world.loop.runs.order is None) == expected  # what is revoked is not scored
    await world.loop.keeper.settled()
    found = world.loop.registry.version(NEW.version)
    assert found is not None and (found.state == "revoked") == expected


async def test_a_deletion_is_known_after_a_restart(begin: Begin) -> None:
    """Control dies between the two, and the run is taken up again."""
    world = await begin()
    world.serve(40, {world.loop.base: 2.0})
    world.turn(captured=40)
    world.turn()
    sent = world.clock.now
    assert (await world.loop.act("delete", "tenant:acme", "ops")).is_done
    await world.restart()

    world.trainer("done", step=20, result=NEW, report=report(("acme", "order-7-0-0", sent)))

    assert is_revoked(world)


@pytest.mark.parametrize(("level", "is_stopped"), [("pause", True), ("evict", True), ("normal", False)])
async def test_a_run_that_is_held_up_is_stopped(level: Any, is_stopped: bool, begin: Begin) -> None:
    """Its state on disk may have learned from what was deleted, for as long as it stands still."""
    world = await begin()
    world.serve(40, {world.loop.base: 2.0})
    world.turn(captured=40)
    world.turn()
    run_id = world.order.run_id
    world.loop.guard.level = level

    await world.loop.act("delete", "tenant:acme", "ops")

    order = world.loop.runs.order
    assert (order is None) == is_stopped
    await world.loop.keeper.settled()
    run = world.loop.registry.run(run_id)
    assert run is not None and (run.state == "stopped") == is_stopped
    assert ("tenant:acme was deleted" in run.error) == is_stopped


# --- what is revoked -------------------------------------------------------------------------------------


async def test_nothing_is_made_of_a_revoked_version(begin: Begin) -> None:
    """A run that begins from it ends; a candidate that waited for held-out requests is not scored again."""
    world = await begin()
    await trained(world)
    world.gate(passed=False, num=3)  # too few: it waits
    assert world.loop.cycle.waiting() == [NEW.version]
    await world.loop.act("train", "", "ops")
    await world.loop.act("revoke", NEW.version, "ops")
    assert world.loop.runs.order is not None, "a run from another base goes on"
    world.loop.runs.stop(world.order.run_id, world.clock.now, "")

    world.turn(captured=100_000)
    world.turn(10.0)
    scored = [run for run in world.loop.runs.views() if run.kind == "score"]
    assert len(scored) == 1 and world.loop.cycle.waiting() == []

    other = DraftRef("bbbbbbbbbbbb", "/drafts/bbbbbbbbbbbb", "cd" * 32)
    world.loop.versions[other.version] = Version(other.version, other.url, target=world.loop.target)
    for run in world.loop.runs.open():
        world.loop.runs.stop(run.run_id, world.clock.now, "")
    world.loop.cycle.score("", other.version, "asked", "ops")
    await world.loop.act("revoke", other.version, "ops")
    assert world.loop.runs.order is None


# --- storage or registry away ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_what_could_not_be_done_is_tried_again(
    is_restarted: bool, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry is away: the operator is told, shards are clean at once, versions are revoked as soon as it is back."""
    world = await begin()
    base = await trained(world, report(("acme", "order-7-0-0", 5.0)))
    await world.loop.act("promote", NEW.version, "ops")
    world.turn()
    world.turn()
    await world.loop.keeper.settled()

    def away(*_: object) -> Any:
        raise Unavailable("the database is away")

    monkeypatch.setattr(Registry, "_reading", away)
    result = await world.loop.act("delete", "tenant:acme", "ops")
    assert not result.is_done and "away" in result.message and "tried again" in result.message
    await world.loop.storing.sweep()
    assert world.plan.live == NEW.version

    monkeypatch.undo()
    await world.loop.keeper.settled()
    if is_restarted:
        await world.restart()
    await world.loop.storing.sweep()

    assert world.plan.live == base and is_revoked(world)
    await world.loop.keeper.settled()
    (deletion,) = world.loop.registry.deletions().items
    assert (deletion.state, deletion.versions, deletion.error) == ("done", (NEW.version,), "")
    fs, root = learning_folder(world.loop.learning)
    orders = len(fs.ls(f"{root}/deleted"))
    await world.loop.storing.sweep()
    assert len(fs.ls(f"{root}/deleted")) == orders, "what is done is not done again"


# --- weights on storage ----------------------------------------------------------------------------------


def safetensors(number: float) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + struct.pack("<f", number)


@pytest.fixture
def publish_one(tmp_path: Path) -> Callable[[World, VersionState, float], str]:
    """Publishes a version and tells the registry of it, in this state since then."""

    def make(world: World, state: VersionState, changed: float) -> str:
        folder = tmp_path / f"made-{changed:g}"
        folder.mkdir()
        (folder / "config.json").write_text('{"hidden_size": 4}')
        (folder / WEIGHTS).write_bytes(safetensors(changed))
        (folder / "card.json").write_text("{}")
        ref = publish(*learning_folder(world.loop.learning), folder)
        known = Version(
            ref.version, ref.url, ref.sha256, target=world.loop.target, state=state, created=changed, changed=changed
        )  # fmt: skip
        world.loop.registry.add_version(known)
        if state != "revoked":
            world.loop.versions[ref.version] = known
        return ref.version

    return make


async def test_weights_that_nobody_needs_leave_the_storage(
    begin: Begin, publish_one: Callable[[World, VersionState, float], str]
) -> None:
    """Revoked ones at once, of the others the oldest; never those that serve, may serve next, or that nobody knows."""
    world = await begin("learning.rollout.kept=2")
    idle = [publish_one(world, "rejected", float(at)) for at in range(1, 5)]
    pool = [publish_one(world, "retired", 10.0), publish_one(world, "retired", 11.0)]
    revoked = publish_one(world, "revoked", 20.0)
    fs, root = learning_folder(world.loop.learning)
    folder = Path(root) / "drafts" / ("f" * 12)  # of a run that ends just now
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")

    await world.loop.storing.sweep()

    assert world.loop.storing.trouble == ""
    assert set(published(fs, root)) == {*idle[2:], *pool, folder.name}
    await world.loop.keeper.settled()
    gone, kept = world.loop.registry.version(idle[0]), world.loop.registry.version(idle[3])
    assert gone is not None and kept is not None and (gone.url, gone.state) == ("", "rejected") and kept.url
    found = world.loop.registry.version(revoked)
    assert found is not None and found.url == ""
    result = await world.loop.act("promote", idle[0], "ops", {"force": True})
    assert not result.is_done and "removed from storage" in result.message
    assert idle[0] not in {ref.version for ref in world.plan.resident}


async def test_the_version_that_serves_keeps_its_weights(
    begin: Begin, publish_one: Callable[[World, VersionState, float], str]
) -> None:
    """And the one before it, which a roll-back goes to."""
    world = await begin("learning.rollout.kept=0")
    names = [publish_one(world, "candidate", float(at)) for at in (1, 2, 3)]
    for name in names[:2]:
        world.loop.apply(world.loop.rollout.offer(name, "", world.clock.now, actor="ops", goal="live"))  # type: ignore[union-attr]
        world.turn()
        world.turn()
    assert world.plan.live == names[1]

    await world.loop.storing.sweep()

    fs, root = learning_folder(world.loop.learning)
    assert set(published(fs, root)) == set(names[:2])
