"""What is put into the registry comes out of it again, on both databases; what breaks its rules is refused in words."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from paceline.cluster.errors import ConfigError, RegistryError
from paceline.cluster.registry import tables
from paceline.cluster.registry.database import resolve_url
from paceline.cluster.registry.records import (
    AuditRow,
    Deletion,
    FigurePoint,
    GateRecord,
    LedgerEntry,
    RolloutEvent,
    Run,
    Source,
    TenantShare,
    Version,
)
from paceline.cluster.registry.registry import Registry

SHIPPED = Version("aaaa", url="", target="t1", state="live", reason="shipped", created=10.0, changed=10.0)


def version(name: str, **more: object) -> Version:
    return Version(name, url=f"file:///drafts/{name}", sha256="ab" * 32, base="aaaa", target="t1", **more)  # type: ignore[arg-type]


def refused(code: str) -> pytest.RaisesExc[RegistryError]:
    return pytest.RaisesExc(RegistryError, check=lambda error: error.code == code)


def test_records_come_back_as_they_were(registry: Registry, open_registry: Callable[[], Registry]) -> None:
    """Every field of every record, also by another process that opens the same database."""
    one = version(
        "bbbb",
        run_id="r1",
        tag="domain:code",
        created=5.5,
        changed=6.25,
        reason='sa"y',
        card={"parameters": 3},
    )
    run = Run("r1", "train", "drift in code", "aaaa", "domain:code", {"max_steps": 5}, "done", 1.0, 2.0, 3.5, 7, 9,
              4096, 1.5, 2.5, ((1, 0.5), (2, None)), {"acceptance": 0.6}, "", "bbbb")  # fmt: skip
    gate = GateRecord(
        "r2", "aaaa", "bbbb", True, "saves", 4.0, {"saving": {"mean": 0.1, "lo": 0.02, "hi": 0.2}}
    )
    deletion = Deletion("d1", 3.0, "ops", "tenant:acme", "done", 4, ("bbbb",), "")
    registry.add_version(SHIPPED)
    registry.add_version(one)
    registry.put_run(run)
    registry.put_gate(gate)
    registry.put_deletion(deletion)
    entry = registry.add_ledger(
        LedgerEntry("train", "pays", 8.0, "r1", "", "domain:code", 9.5, 2.0, None, 0.5)
    )
    event = registry.add_event(RolloutEvent(1.5, "bbbb", "swapped", "because", "loop", "domain:code"))
    row = registry.add_audit(AuditRow(2.5, "ops", "promote", "bbbb", {"force": True}, "done", "127.0.0.1"))
    point = FigurePoint(10.0, 10.0, "bbbb", "code", 2, 30, 11, 0.5, (11, 7), (7, 2))
    registry.add_figures([point])
    registry.put_settings({"paused": True, "learning.gate.min_saving": 0.02})

    other = open_registry()
    assert other.version("aaaa") == SHIPPED
    assert other.version("bbbb") == one
    assert other.run("r1") == run
    assert other.gate(run_id="r2") == other.gate(candidate="bbbb") == gate
    assert other.deletions().items == (deletion,)
    assert other.ledger().items == (entry,)
    assert event in other.events().items
    assert other.audit().items == (row,)
    assert other.figures(since=0.0, until=99.0) == (point,)
    assert {key: setting.value for key, setting in other.settings().items()} == {
        "paused": True,
        "learning.gate.min_saving": 0.02,
    }
    assert other.version("zzzz") is other.run("zzzz") is other.gate(run_id="zzzz") is None


@pytest.mark.parametrize(
    ("record", "table"),
    [
        (Version, tables.versions), (Run, tables.runs), (GateRecord, tables.gates), (LedgerEntry, tables.ledger),
        (RolloutEvent, tables.events), (AuditRow, tables.audit), (FigurePoint, tables.figures),
        (Deletion, tables.deletions),
    ],
)  # fmt: skip
def test_a_table_has_a_column_for_each_field(record: type, table: sa.Table) -> None:
    """And no other."""
    assert {field.name for field in fields(record)} == set(table.c.keys())


def test_the_first_version_may_be_live_and_the_next_one_replaces_it(registry: Registry) -> None:
    """Candidate, canary, live; then back to the one before; each step leaves a mark."""
    registry.add_version(SHIPPED)
    registry.add_version(version("bbbb"))
    registry.move("bbbb", "canary", reason="5 %")
    registry.promote("bbbb", reason="better", actor="loop")
    assert (registry.live(), registry.canary()) == (registry.version("bbbb"), None)
    assert registry.version("aaaa").state == "retired"  # type: ignore[union-attr]

    bad, good = registry.roll_back(reason="worse", actor="ops")

    assert (bad.version, bad.state, good.version, good.state) == ("bbbb", "rolled_back", "aaaa", "live")
    marks = [(event.event, event.version, event.actor) for event in registry.events().items]
    assert marks == [
        ("promoted", "aaaa", "ops"),
        ("rolled_back", "bbbb", "ops"),
        ("promoted", "bbbb", "loop"),
        ("retired", "aaaa", "loop"),
        ("canary", "bbbb", "loop"),
    ]
    with refused("unknown_version"):
        registry.roll_back(reason="again", actor="ops")


def test_illegal_moves_change_nothing(registry: Registry) -> None:
    """Two live versions of a tag, a way back from revoked, unknown names: all refused, in one piece."""
    registry.add_version(SHIPPED)
    registry.add_version(version("bbbb"))
    registry.add_version(version("cccc", tag="domain:code"))
    registry.promote("cccc", reason="another tag")
    before = registry.versions(), registry.events()
    with refused("illegal_move"):
        registry.move("bbbb", "live", reason="")
    with refused("illegal_move"):
        registry.add_version(version("dddd", state="live"))
    with refused("illegal_move"):
        registry.move("bbbb", "retired", reason="")
    with refused("unknown_version"):
        registry.promote("zzzz", reason="")
    with refused("illegal_move"):
        registry.roll_back(to="cccc", reason="of another tag")
    with refused("illegal_move"):
        registry.pin("bbbb", reason="", actor="ops")

    assert (registry.versions(), registry.events()) == before
    registry.move("bbbb", "revoked", reason="data deleted")
    with refused("illegal_move"):
        registry.promote("bbbb", reason="")
    assert registry.live() == SHIPPED


def test_the_tables_themselves_hold_one_live_version(registry: Registry, url: str) -> None:
    """Negative control of our own checks: a hand that goes around them is stopped by the database."""
    registry.add_version(SHIPPED)
    registry.add_version(version("bbbb"))
    engine = sa.create_engine(resolve_url(url, Path("/")))
    with pytest.raises(sa.exc.IntegrityError), engine.begin() as connection:
        connection.execute(sa.update(tables.versions).values(state="live"))
    engine.dispose()


def test_a_rollback_goes_to_the_latest_predecessor(registry: Registry) -> None:
    """Of several, of the same target; or to the one that is named."""
    registry.add_version(SHIPPED)
    for name in ("bbbb", "cccc", "dddd"):
        registry.add_version(version(name, created=5.0))
        registry.promote(name, reason="better")

    assert [found.version for found in registry.roll_back(reason="worse")] == ["dddd", "cccc"]
    assert [found.version for found in registry.roll_back(reason="worse", to="aaaa")] == ["cccc", "aaaa"]
    assert [found.version for found in registry.roll_back(reason="worse")] == ["aaaa", "bbbb"]


def test_a_pinned_version_stays(registry: Registry) -> None:
    """Until it is unpinned or somebody insists; whoever replaces it is not pinned by that."""
    registry.add_version(SHIPPED)
    registry.add_version(version("bbbb"))
    registry.pin("aaaa", reason="release", actor="ops")
    with refused("pinned"):
        registry.promote("bbbb", reason="better")

    new = registry.promote("bbbb", reason="sure", actor="ops", force=True)
    assert not new.pinned and not registry.version("aaaa").pinned  # type: ignore[union-attr]
    assert registry.pin("bbbb", reason="", actor="ops").pinned
    assert not registry.unpin("bbbb", reason="", actor="ops").pinned


def test_adding_a_version_again_changes_nothing(registry: Registry) -> None:
    """The name is a hash of the weights: training that changed nothing, or a repeated call, makes no second one."""
    registry.add_version(SHIPPED)
    registry.add_version(version("bbbb"))
    registry.promote("bbbb", reason="better")

    again = registry.add_version(version("bbbb", run_id="r9"))

    assert again == registry.version("bbbb")
    assert (again.state, again.run_id) == ("live", "")


def test_another_target_makes_versions_stale(registry: Registry) -> None:
    """Also the live one; the same again changes nothing; when the old target is back they are candidates."""
    registry.add_version(SHIPPED)
    registry.add_version(version("bbbb"))
    registry.add_version(replace(version("cccc"), target="t2"))

    assert {old.version for old in registry.retarget("t2")} == {"aaaa", "bbbb"}
    assert registry.retarget("t2") == ()
    assert registry.live() is None
    registry.move("aaaa", "candidate", reason="the old target is back")


def test_a_deletion_finds_the_versions_it_concerns(registry: Registry) -> None:
    """By tenant, request and shard, and all that were trained from such a version; others not."""
    registry.add_version(SHIPPED)
    registry.add_version(
        version("bbbb"), sources=[Source("acme", "q1", "s1", 10, 5.0), Source("acme", "q2", "s1", 7, 6.0)]
    )
    registry.add_version(
        replace(version("cccc"), base="bbbb"), sources=[Source("umbrella", "q3", "s2", 1, 7.0)]
    )
    registry.add_version(replace(version("dddd"), base="cccc"), parents=("cccc", "aaaa", "unknown"))
    registry.add_version(version("eeee"), sources=[Source("umbrella", "q4", "s3", 2, 8.0)])

    assert registry.trained_on(tenant="acme") == ("bbbb", "cccc", "dddd")
    assert registry.trained_on(request_id="q3") == ("cccc", "dddd")
    assert registry.trained_on(request_id="q4") == registry.trained_on(shards=["s3", "s9"]) == ("eeee",)
    assert registry.trained_on(tenant="umbrella") == ("cccc", "dddd", "eeee")
    assert registry.trained_on(request_ids=[f"x{i}" for i in range(1200)] + ["q4"]) == ("eeee",)
    assert registry.trained_on() == registry.trained_on(tenant="nobody") == ()
    assert registry.lineage("dddd").parents == ("cccc", "aaaa")
    found = registry.lineage("bbbb")
    assert (found.parents, found.children) == (("aaaa",), ("cccc",))
    assert found.tenants == (TenantShare("acme", 2, 17),)
    assert (found.num_shards, found.data_from, found.data_to) == (1, 5.0, 6.0)
    assert ("dddd", "cccc") in registry.edges()
    registry.add_sources(
        "eeee", [Source("acme", f"x{i}") for i in range(1200)] + [Source("umbrella", "q4", "s3", 2)]
    )
    assert len(registry.sources("eeee")) == 1201
    with refused("unknown_version"):
        registry.add_sources("zzzz", [])


def test_a_run_and_a_ledger_entry_are_replaced_as_they_go_on(registry: Registry) -> None:
    """A run keeps the time of its first mention; totals count entries of runs."""
    registry.put_run(Run("r1", state="pending", created=5.0))
    registry.put_run(Run("r1", state="done", created=77.0, steps=9))
    entry = registry.add_ledger(LedgerEntry("train", "pays", 8.0, "r1", predicted_s=100.0, spent_s=20.0))
    registry.add_ledger(LedgerEntry("skip", "would not pay", 9.0, predicted_s=1.0, predicted_cost_s=50.0))
    registry.put_ledger(replace(entry, realised_s=-3.0))

    found = registry.run("r1")
    assert found is not None and (found.state, found.created, found.steps) == ("done", 5.0, 9)
    assert registry.ledger_totals() == (100.0, -3.0, 20.0, 1)
    assert [item.decision for item in registry.ledger(decisions=["skip"]).items] == ["skip"]
    with refused("bad_value"):
        registry.put_ledger(replace(entry, id=99))


def test_long_lists_come_in_pages(registry: Registry) -> None:
    """Newest first, each row once, though new ones come in front meanwhile; filters count in the total."""
    for number in range(7):
        registry.add_audit(AuditRow(float(number), "ops" if number % 2 else "eve", "pin", f"v{number} 100%"))
    first = registry.audit(limit=3)
    registry.add_audit(AuditRow(99.0, "ops", "train"))
    second = registry.audit(limit=3, cursor=first.next or 0)
    third = registry.audit(limit=3, cursor=second.next or 0)

    subjects = [row.subject for page in (first, second, third) for row in page.items]
    assert subjects == [f"v{number} 100%" for number in (6, 5, 4, 3, 2, 1, 0)]
    assert (first.total, third.next) == (7, None)
    assert registry.audit(actor="eve", limit=1).total == 4
    assert [row.time for row in registry.audit(since=2.0, until=4.0).items] == [3.0, 2.0]
    assert registry.audit(query="V3 100%").total == 1
    assert registry.audit(query="1__%").total == 0  # signs of patterns are only signs
    for number in range(5):
        registry.add_version(version(f"v{number}", created=float(number + 1)))
    page = registry.versions(limit=2)
    rest = registry.versions(limit=4, cursor=page.next or 0)
    assert [item.version for item in page.items + rest.items] == ["v4", "v3", "v2", "v1", "v0"]
    assert rest.next is None
    assert registry.versions(states=["live"]).total == 0
    assert registry.versions(query="v3").total == 1


def test_audit_rows_cannot_be_changed_or_deleted(registry: Registry, url: str) -> None:
    """Not even by hand."""
    registry.add_audit(AuditRow(1.0, "ops", "promote"))
    engine = sa.create_engine(resolve_url(url, Path("/")))
    for statement in (sa.delete(tables.audit), sa.update(tables.audit).values(actor="nobody")):
        with pytest.raises(sa.exc.DBAPIError, match="audit rows are kept"), engine.begin() as connection:
            connection.execute(statement)
    engine.dispose()

    assert registry.audit().items[0].actor == "ops"


def test_revisions_grow_over_restarts(registry: Registry, open_registry: Callable[[], Registry]) -> None:
    """And past what workers say that they have seen, should the database be an older copy."""
    assert [registry.next_revision() for _ in range(3)] == [1, 2, 3]
    assert open_registry().next_revision() == 4
    assert registry.next_revision(at_least=1000) == 1001
    assert registry.next_revision("trainer_plan") == 1


def test_revisions_of_many_threads_are_all_different(registry: Registry) -> None:
    """One registry serves the thread pool of control."""
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.extend(registry.next_revision() for _ in range(20)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(found) == list(range(1, 121))


def test_figures_add_up_and_grow_coarser(registry: Registry) -> None:
    """Sums are never lost by merging, until they are too old."""
    now = registry._clock()  # type: ignore[attr-defined]
    start = math.floor((now - 90_000) / 300) * 300.0
    old = [FigurePoint(start + 10.0 * i, 10.0, "v", "code", 1, 10, 4, 0.5, (4, 2), (2, 1)) for i in range(30)]
    registry.add_figures(old)
    registry.add_figures([replace(old[0], tested=(1, 1, 1), accepted=(0, 0, 1))])
    fresh = FigurePoint(math.floor(now / 10) * 10.0, 10.0, "v", "code", 1, 3, 1)
    registry.add_figures([fresh, fresh, replace(fresh, domain="prose")])
    registry.add_figures([replace(fresh, time=now - 31 * 86400)])

    registry.compact_figures()
    registry.compact_figures()  # nothing is merged twice

    points = registry.figures(since=0.0, until=now + 99, version="v", domain="code")
    assert [(point.time, point.width_s, point.num_streams) for point in points] == [
        (start, 300.0, 31),
        (fresh.time, 10.0, 2),
    ]
    assert (points[0].num_tokens, points[0].tested, points[0].accepted) == (310, (121, 61, 1), (60, 30, 1))
    assert len(registry.figures(since=fresh.time, until=fresh.time + 1)) == 2


def test_routes_are_kept_in_order(registry: Registry) -> None:
    """A tag may get a version that was trained for another; a revoked one serves nobody."""
    registry.add_version(SHIPPED)
    registry.add_version(version("bbbb"))
    registry.put_route("domain:code", "aaaa", reason="fits")
    registry.put_route("tenant:acme", "bbbb", reason="own")
    registry.put_route("domain:code", "bbbb", reason="fits better")

    assert [(route.tag, route.version) for route in registry.routes()] == [
        ("domain:code", "bbbb"),
        ("tenant:acme", "bbbb"),
    ]
    registry.drop_route("domain:code", reason="over")
    registry.drop_route("domain:code", reason="over")
    assert [route.tag for route in registry.routes()] == ["tenant:acme"]
    registry.move("bbbb", "revoked", reason="deleted")
    with refused("illegal_move"):
        registry.put_route("domain:code", "bbbb", reason="")


def test_settings_change_all_or_none(registry: Registry) -> None:
    """One that cannot be kept keeps the others back too."""
    registry.put_settings({"a": 1, "b": "two"})
    with refused("bad_value"):
        registry.put_settings({"a": 2, "c": object()})
    registry.put_settings({"b": None})

    assert {key: setting.value for key, setting in registry.settings().items()} == {"a": 1}


def test_odd_values_are_kept_or_refused_alike(registry: Registry) -> None:
    """Null bytes, half characters and numbers that are none, on either database the same."""
    registry.put_run(
        Run("r1", error="a\0b\ud800c", report={"loss": math.nan, "x\0": math.inf}, loss=((1, math.nan),))
    )
    found = registry.run("r1")
    assert found is not None
    assert (found.error, found.report, found.loss) == (
        "a\ufffdb?c",
        {"loss": None, "x\0": None},
        ((1, None),),
    )
    with refused("bad_value"):
        registry.put_run(Run("r2", seconds=math.nan))
    with refused("bad_value"):
        registry.put_run(Run("r" * 257))
    assert registry.version("'; DROP TABLE versions; --\0") is None
    assert registry.runs().total == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("registry.db", "expected auto"),
        ("sqlite:///registry.db", "absolute path"),
        ("sqlite://", "absolute path"),
        ("mysql://root@localhost/x", "SQLite or PostgreSQL"),
        ("postgresql//me:secret@host/x", "expected auto"),
    ],
)
def test_a_bad_url_is_refused_without_its_password(text: str, words: str, tmp_path: Path) -> None:
    """One error, with what is expected."""
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_url(text, tmp_path)

    assert "learning.registry" in str(caught.value) and "secret" not in str(caught.value)


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    """Also what SQLite puts beside it, and one that was open to others before."""
    path = tmp_path / "new" / "registry.db"
    path.parent.mkdir()
    path.touch(mode=0o644)
    registry = Registry.open("auto", path.parent)
    registry.next_revision()

    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    registry.close()
    assert {"registry.db", "registry.db-wal"} <= set(modes)
    assert set(modes.values()) == {0o600}
