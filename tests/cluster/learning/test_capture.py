"""Shards: what is written is read again, never torn, expired or deleted records are never seen, damage is reported and skipped."""

from __future__ import annotations

import dataclasses
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from structlog.testing import capture_logs

from paceline.cluster.errors import ConfigError, StorageError
from paceline.cluster.learning.capture import (
    CapturedRequest,
    ShardReader,
    ShardWriter,
    Sweeper,
    delete,
    encode,
    is_heldout,
    shards,
    written_at,
)
from paceline.cluster.learning.captured_rows import pack
from paceline.cluster.learning.config import CaptureConfig, LearningConfig
from paceline.cluster.learning.storage import files, learning_folder, write_whole
from paceline.cluster.learning.tombstones import Tombstones, bury, request_of
from paceline.cluster.types import Sampling

FS = LocalFileSystem()


class Clock:
    """Unix seconds that a test moves."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "learning")


def record(
    name: str,
    *,
    tenant: str = "acme",
    domain: str = "",
    created: float | None = None,
    num_rows: int = 7,
    top: int = 16,
    num_prompt: int = 5,
) -> CapturedRequest:
    random = np.random.default_rng(abs(hash(name)) % 1000)
    logits = -np.sort(-random.normal(0, 3, (num_rows, top)).astype(np.float32), axis=1)
    return CapturedRequest(
        request_id=name,
        tenant=tenant,
        domain=domain,
        created=time.time() if created is None else created,
        target_version="target-1",
        draft_version="draft-1",
        sampling=Sampling(2**64 - 1, 0.7, logit_bias=((3, -1.5),)),
        num_prompt=num_prompt,
        token_ids=random.integers(0, 4096, num_prompt + num_rows).astype(np.int32),
        rows=pack(
            random.integers(0, 1 << 24, (num_rows, top)).astype(np.int32),
            logits - logits.max(1)[:, None] - 1,
            logits.max(1) + 1,
        ),
        is_heldout=is_heldout(name, 0.5),
        num_steps=3,
    )


def names(reader: ShardReader, **how: object) -> list[str]:
    return [found.request_id for found in reader.requests(**how)]  # type: ignore[arg-type]


def holds(root: str, text: str) -> bool:
    """Whether any finished or unfinished file below a folder has a request's name in it."""
    found = False
    for path in Path(root).rglob("*"):
        if path.is_file() and "deleted" not in path.parts:
            found = found or text.encode() in path.read_bytes()
    return found


def test_what_is_written_is_read_again(root: str) -> None:
    """Everything, bit for bit."""
    written = [record("a-0-0", domain="notes"), record("b-0-0", num_rows=1, top=128)]
    done = ShardWriter(FS, root, "decode-7").write(written)
    found = {one.request_id: one for one in ShardReader(FS, root).requests()}

    assert (done.num_requests, done.num_tokens, done.num_bytes) == (2, 8, Path(done.path).stat().st_size)
    for one in written:
        again = found[one.request_id]
        for field in dataclasses.fields(CapturedRequest):
            before, after = getattr(one, field.name), getattr(again, field.name)
            if isinstance(before, np.ndarray):
                assert before.dtype == after.dtype and np.array_equal(before, after)
            else:
                assert before == after, field.name


def test_a_shard_is_where_the_layout_says_and_private(root: str) -> None:
    """capture/<hour>/<worker>-<Unix ms>.parquet, which any Parquet reader reads; nobody but its owner may."""
    done = ShardWriter(FS, root, "decode-7").write([record("a-0-0")])
    path = Path(done.path)

    assert path.parent.parent == Path(root, "capture")
    assert path.parent.name == time.strftime("%Y%m%dT%H", time.gmtime(written_at(done.path)))
    assert path.name.startswith("decode-7-") and abs(written_at(done.path) - time.time()) < 60
    assert pq.read_table(path).num_rows == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_shards_are_small(root: str) -> None:
    """A token with 128 logits takes less than 1 KB, before and after compression."""
    one = record("a-0-0", num_rows=512, top=128)

    assert 128 * (4 + 2) + 4 + 4 < 1024
    assert len(encode([one])) / one.num_rows < 1024


def test_readers_filter_and_read_newest_first(root: str, clock: Clock) -> None:
    """By held-out flag, time and tag; a limit counts what is given."""
    writer = ShardWriter(FS, root, "decode-7", clock=clock)
    start = clock.now
    for number in range(6):
        clock.now = start + number * 1800
        tenant, domain = ("acme", "notes") if number % 2 else ("beta", "")
        writer.write([record(f"r{number}-0-0", tenant=tenant, domain=domain, created=clock.now - 1)])
    reader = ShardReader(FS, root, clock=clock)

    assert names(reader) == [f"r{number}-0-0" for number in (5, 4, 3, 2, 1, 0)]
    assert names(reader, limit=2) == ["r5-0-0", "r4-0-0"]
    assert names(reader, since=start + 2.5 * 1800) == ["r5-0-0", "r4-0-0", "r3-0-0"]
    assert (
        names(reader, tag="tenant:acme")
        == names(reader, tag="domain:notes")
        == ["r5-0-0", "r3-0-0", "r1-0-0"]
    )
    kept, held = set(names(reader, heldout=False)), set(names(reader, heldout=True))
    assert kept | held == set(names(reader)) and not kept & held and kept and held


def test_choices_of_one_request_are_held_out_together() -> None:
    """They share their prompt: one of them in training would tell of the others. The share is what was asked for."""
    assert request_of("order-7-0-1") == request_of("order-7-3-0") == request_of("order-7") == "order-7"
    assert request_of("order-7.0123abcd-0-0") == "order-7"
    assert len({is_heldout(f"order-{i}-{p}-{c}", 0.3) for p in range(3) for c in range(3) for i in [7]}) == 1
    share = np.mean([is_heldout(f"{i}-0-0", 0.05) for i in range(20_000)])
    assert abs(share - 0.05) < 0.01
    assert not is_heldout("x", 0.0) and is_heldout("x", 1.0)


# --- damage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"PAR1" + bytes(200) + b"PAR1",
        lambda data: data[:300] + bytes([data[300] ^ 8]) + data[301:],
        lambda data: data[: len(data) // 3] + bytes([data[len(data) // 3] ^ 1]) + data[len(data) // 3 + 1 :],
    ],
    ids=["half", "empty", "zeros", "a flipped bit", "another bit"],
)
def test_a_damaged_shard_is_named_and_skipped(root: str, damage: Callable[[bytes], bytes]) -> None:
    """Once; what else there is is read."""
    writer = ShardWriter(FS, root, "decode-7")
    writer.write([record("before-0-0")])
    bad = writer.write([record("bad-0-0", num_rows=60)]).path
    writer.write([record("after-0-0")])
    Path(bad).write_bytes(damage(Path(bad).read_bytes()))
    reader = ShardReader(FS, root)
    with capture_logs() as events:
        assert names(reader) == names(reader) == ["after-0-0", "before-0-0"]

    assert list(reader.damaged) == [bad]
    assert [(event["event"], event["shard"]) for event in events] == [("shard_damaged", bad)]


def test_a_parquet_file_of_somebody_else_is_no_shard(root: str, tmp_path: Path) -> None:
    """Nor one whose rows do not fit each other."""
    good = record("good-0-0")
    path = f"{root}/capture/20260101T00/decode-1-{int(time.time() * 1000):013d}.parquet"
    write_whole(FS, path, encode([dataclasses.replace(good, num_prompt=4)]))
    pq.write_table(pq.read_table(path).select(["tenant"]), path.replace("decode-1", "decode-2"))
    reader = ShardReader(FS, root)

    assert names(reader) == []
    assert len(reader.damaged) == 2


def test_a_writer_killed_at_any_moment_tears_no_file(root: str) -> None:
    """Whatever has the name of a shard is whole; what is not is passed over, and swept away later."""
    script = (
        "import sys; sys.path.insert(0, 'tests/cluster/learning')\n"
        "from test_capture import *\n"
        "writer = ShardWriter(FS, sys.argv[1], 'decode-7'); number = 0\n"
        "print('ready', flush=True)\n"
        "while True: writer.write([record(f'r{number}-0-0', num_rows=300, top=128)]); number += 1\n"
    )
    for pause in (0.05, 0.11, 0.2):
        process = subprocess.Popen([sys.executable, "-c", script, root], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(pause)
        process.kill()
        process.wait()
        process.stdout.close()
    reader = ShardReader(FS, root)

    assert len(names(reader)) == len(shards(FS, root)) > 0
    assert not reader.damaged
    write_whole(FS, f"{root}/capture/20260101T00/decode-7-1.parquet.x.partial", b"torn")
    assert len(shards(FS, root)) == len(names(reader))
    late = Clock()
    late.now += 7200
    Sweeper(FS, root, CaptureConfig(), clock=late).sweep()
    assert not [path for path in Path(root).rglob("*.partial")]


def test_unusable_storage_is_an_error_of_ours(root: str, tmp_path: Path) -> None:
    """Named, for writers and readers alike; a folder that does not exist yet is empty."""
    assert names(ShardReader(FS, root)) == []
    Path(root).write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="learning"):
        ShardWriter(FS, root, "decode-7").write([record("a-0-0")])
    with pytest.raises(StorageError, match="learning"):
        delete(FS, root, tenant="acme")


# --- TTL and size ---------------------------------------------------------------------------------------


def test_what_is_too_old_is_not_seen_and_goes(root: str, clock: Clock) -> None:
    """Readers stop to see it on the second, wherever its shard is; a sweep removes the shard and its folder."""
    ShardWriter(FS, root, "decode-7", clock=clock).write(
        [record("old-0-0", created=clock.now - 7000), record("new-0-0", created=clock.now - 10)]
    )
    reader = ShardReader(FS, root, ttl_h=2, clock=clock)
    sweeper = Sweeper(FS, root, CaptureConfig(ttl_h=2), clock=clock)
    assert set(names(reader)) == {"old-0-0", "new-0-0"}
    clock.now += 300
    assert names(reader) == ["new-0-0"]
    assert not sweeper.sweep().expired
    clock.now += 7200
    assert names(reader) == []

    assert len(sweeper.sweep().expired) == 1
    assert not files(FS, f"{root}/capture", deep=True)
    clock.now += 7200
    sweeper.sweep()
    assert not list(Path(root, "capture").iterdir())


def test_the_oldest_shards_make_room(root: str, clock: Clock) -> None:
    """max_mb is kept to."""
    writer = ShardWriter(FS, root, "decode-7", clock=clock)
    written = []
    for number in range(6):
        clock.now += 1
        written.append(writer.write([record(f"r{number}-0-0", num_rows=600, top=128)]))
    assert sum(one.num_bytes for one in written) > 1 << 20
    swept = Sweeper(FS, root, CaptureConfig(max_mb=1), clock=clock).sweep()

    left = list(shards(FS, root))
    assert swept.num_bytes <= 1 << 20 and swept.num_shards == len(left) > 0
    assert left == [one.path for one in written[-len(left) :]]
    assert set(swept.pushed_out) == {one.path for one in written[: -len(left)]}
    assert swept.oldest == written_at(left[0])


# --- deletion -------------------------------------------------------------------------------------------


def test_a_deleted_tenant_is_gone_from_every_byte(root: str) -> None:
    """And others stay, bit for bit; what came of it is told, so that versions trained on it can be found."""
    writer = ShardWriter(FS, root, "decode-7")
    mixed = writer.write([record("a1-0-0"), record("b1-0-0", tenant="beta")]).path
    only = writer.write([record("a2-0-0"), record("a2-0-1")]).path
    other = writer.write([record("b2-0-0", tenant="beta")]).path
    reader = ShardReader(FS, root)
    before = {one.request_id: one for one in reader.requests()}
    unchanged = Path(other).read_bytes()
    assert holds(root, "acme") and holds(root, "a1-0-0")
    done = delete(FS, root, tenant="acme")

    assert set(done.request_ids) == {"a1-0-0", "a2-0-0", "a2-0-1"}
    assert set(done.shards) == {mixed, only} and not done.damaged
    assert not holds(root, "acme") and not holds(root, "a1-0-0")
    assert list(shards(FS, root)) == [mixed, other] and Path(other).read_bytes() == unchanged
    after = {one.request_id: one for one in reader.requests()}
    assert set(after) == {"b1-0-0", "b2-0-0"}
    assert all(np.array_equal(after[name].rows, before[name].rows) for name in after)
    again = delete(FS, root, tenant="acme")
    assert (again.request_ids, again.shards) == ((), ())


def test_readers_honour_a_tombstone_before_anything_is_rewritten(root: str) -> None:
    """Also one that was reading already."""
    writer = ShardWriter(FS, root, "decode-7")
    writer.write([record("a-0-0")])
    writer.write([record("b-0-0")])
    reader = ShardReader(FS, root)
    reading = reader.requests()
    assert next(reading).request_id == "b-0-0"
    bury(FS, root, tenant="acme")

    assert holds(root, "acme")
    assert list(reading) == [] == names(reader)


def test_a_tenant_may_come_back_and_a_request_may_not(root: str) -> None:
    """What a tenant sends after its deletion is captured again; a deleted request's id is refused for ever."""
    delete(FS, root, tenant="acme")
    delete(FS, root, request_id="mine")
    writer = ShardWriter(FS, root, "decode-7")
    later = time.time() + 5
    kept = [
        record("started before-0-0", created=time.time() - 1),
        record("started after-0-0", created=later),
        record("mine-0-0", tenant="beta", created=later),
        record("mine.0a1b2c3d-0-2", tenant="beta", created=later),
        record("mine-0-1@18ea3472.7", tenant="beta", created=later),
        record("mine2-0-0", tenant="beta", created=later),
    ]

    assert writer.write(kept).num_requests == 2
    assert set(names(ShardReader(FS, root, clock=lambda: later))) == {"started after-0-0", "mine2-0-0"}
    assert writer.write(kept[:1]) == type(writer.write(kept[:1]))()


def test_one_tenants_request_can_be_deleted(root: str) -> None:
    """Clients choose their ids: two may choose the same one. A stream's own name works too."""
    ShardWriter(FS, root, "decode-7").write(
        [record("1-0-0"), record("1-0-1"), record("1-0-0", tenant="beta"), record("2-0-0"), record("2-0-1")]
    )
    assert set(delete(FS, root, tenant="acme", request_id="1").request_ids) == {"1-0-0", "1-0-1"}
    assert delete(FS, root, request_id="2-0-1").request_ids == ("2-0-1",)

    left = [(one.tenant, one.request_id) for one in ShardReader(FS, root).requests()]
    assert sorted(left) == [("acme", "2-0-0"), ("beta", "1-0-0")]


def test_what_reaches_storage_after_its_deletion_is_swept_away(root: str) -> None:
    """A worker that had looked for tombstones just before: no reader sees it, and the next sweep deletes it."""
    path = ShardWriter(FS, root, "decode-7").write([record("a-0-0"), record("b-0-0", tenant="beta")]).path
    late = Path(path).read_bytes()
    sweeper = Sweeper(FS, root, CaptureConfig())
    assert sweeper.sweep().deletion.shards == ()
    delete(FS, root, tenant="acme")
    Path(path.replace("decode-7", "decode-8")).write_bytes(late)
    assert names(ShardReader(FS, root)) == ["b-0-0", "b-0-0"] and holds(root, "acme")
    swept = sweeper.sweep()

    assert swept.deletion.request_ids == ("a-0-0",)
    assert not holds(root, "acme")
    assert sweeper.sweep().deletion.shards == ()


def test_a_damaged_shard_does_not_survive_a_deletion(root: str) -> None:
    """Nobody can tell whose text is in it."""
    writer = ShardWriter(FS, root, "decode-7")
    bad = writer.write([record("a-0-0", num_rows=60)]).path
    writer.write([record("b-0-0", tenant="beta")])
    Path(bad).write_bytes(Path(bad).read_bytes()[:500])
    done = delete(FS, root, tenant="acme")

    assert done.damaged == done.shards == (bad,)
    assert names(ShardReader(FS, root)) == ["b-0-0"]
    assert not Path(bad).exists()


def test_without_its_tombstones_nothing_is_read(root: str) -> None:
    """One that cannot be read might be anybody's."""
    ShardWriter(FS, root, "decode-7").write([record("a-0-0")])
    write_whole(FS, f"{root}/deleted/1.json", b"{")

    with pytest.raises(StorageError, match="not a tombstone"):
        names(ShardReader(FS, root))
    with pytest.raises(StorageError, match="not a tombstone"):
        ShardWriter(FS, root, "decode-7").write([record("b-0-0")])


def test_tombstones_are_read_once(root: str) -> None:
    """Whatever holds records in memory asks the same book."""
    book = Tombstones(FS, root)
    book.refresh()
    bury(FS, root, request_id="x")
    assert not book.covers("x-0-0", "acme", time.time())
    book.refresh()

    assert book.covers("x-0-0", "acme", time.time() + 1e6) and book.covers("x", "beta", 0)
    assert not book.covers("xx-0-0", "acme", time.time())


# --- where ----------------------------------------------------------------------------------------------


def test_storage_is_a_path_or_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto is in PACELINE_HOME; mistakes name the field."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert learning_folder(LearningConfig())[1] == str(tmp_path / "learning")
    assert learning_folder(LearningConfig(storage=f"file://{tmp_path}/x"))[1] == f"{tmp_path}/x"
    fs, root = learning_folder(LearningConfig(storage="memory://some/where"))
    assert (type(fs).__name__, root) == ("MemoryFileSystem", "/some/where")
    ShardWriter(fs, root, "decode-7").write([record("a-0-0")])
    assert names(ShardReader(fs, root)) == ["a-0-0"]
    assert delete(fs, root, tenant="acme").request_ids == ("a-0-0",)
    assert Sweeper(fs, root, CaptureConfig()).sweep().num_shards == 0

    for wrong in ("relative/path", "nothing-like-it://x"):
        with pytest.raises(ConfigError, match="learning.storage="):
            learning_folder(LearningConfig(storage=wrong))
