"""Requests that may be kept -> Parquet shards -> the same requests again, without those that were deleted or expired.

    capture/<YYYYMMDDTHH>/<worker>-<Unix ms>.parquet    one row for each request; hour and time of writing
    deleted/<Unix ms>-<random>.json                     tombstones: `paceline.cluster.learning.tombstones`

The index rule. A request of L tokens has a row of logits for each of its last N; row i is the target's distribution of
token `num_prompt + i` behind the tokens before it, which is the one that decided that token:

    token_ids     | 0 ........ num_prompt - 1 | num_prompt | num_prompt + 1 | ...  L - 1 |
    row                                         0            1                     N - 1     num_prompt + N = L

What is kept of a row are its largest logits, as `paceline.cluster.learning.captured_rows` has them.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog

from paceline.cluster.errors import ConfigError
from paceline.cluster.learning.captured_rows import Rows, ids_of, unpack
from paceline.cluster.learning.config import CaptureConfig, LearningConfig
from paceline.cluster.learning.storage import (
    FileSystem,
    files,
    folders,
    learning_folder,
    read_whole,
    remove,
    remove_folder,
    unfinished,
    write_whole,
)
from paceline.cluster.learning.tombstones import Tombstones, bury, request_of
from paceline.cluster.types import Sampling

log = structlog.get_logger(__name__)

_DEFAULT_TTL_H = CaptureConfig().ttl_h
_ABANDONED_S = 3600.0
"""No writer is at one file for so long."""


@dataclass(frozen=True, slots=True)
class CapturedRequest:
    """One stream as the target generated it. Arrays are not to be written to."""

    request_id: str
    """The request's with the indices of prompt and choice behind it; `request_of` gives the request's."""
    tenant: str
    domain: str
    created: float
    """Unix seconds, when its first token was captured."""
    target_version: str
    draft_version: str
    """The latest that drafted for it; "" if none did."""
    sampling: Sampling
    num_prompt: int
    """Tokens before the first row: the prompt, and `num_resumed` tokens that another worker had generated before."""
    token_ids: npt.NDArray[np.int32]
    """[L], prompt and output."""
    rows: Rows
    """[N]: the target's logits, before bias, penalties, temperature and filters."""
    is_heldout: bool
    """For the gate: never trained on."""
    num_steps: int
    """In which its tokens were emitted."""
    num_resumed: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def top_ids(self) -> npt.NDArray[np.int32]:
        """[N, m]: the most probable tokens of each row, best first. A new array."""
        return ids_of(self.rows)

    @property
    def top_log_probs(self) -> npt.NDArray[np.float16]:
        """[N, m]: the logarithms of their probabilities."""
        found: npt.NDArray[np.float16] = self.rows["log_probs"]
        return found

    @property
    def log_sums(self) -> npt.NDArray[np.float32]:
        """[N]: log of the sum of the exponentials of all logits of the row; with it a log-probability is a logit."""
        found: npt.NDArray[np.float32] = self.rows["log_sum"]
        return found

    @property
    def num_bytes(self) -> int:
        """Of its arrays in memory."""
        return self.token_ids.nbytes + self.rows.nbytes

    def check(self) -> None:
        """Raise ValueError unless the arrays fit each other."""
        if self.num_prompt < 1 or self.num_prompt + self.num_rows != len(self.token_ids):
            raise ValueError(
                f"{len(self.token_ids)} tokens, {self.num_prompt} of them before {self.num_rows} rows"
            )


def is_heldout(request_id: str, share: float) -> bool:
    """Whether a request is kept for the gate: by the hash of its id, so all its choices go one way, on every worker."""
    digest = hashlib.blake2b(request_of(request_id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


# --- redaction ------------------------------------------------------------------------------------------

Redactor = Callable[[CapturedRequest], CapturedRequest | None]
"""A record as it was captured -> the record to keep, or None to keep nothing."""


def load_redactor(spec: str) -> Redactor | None:
    """The function that `learning.capture.redact` names; None for "none".

    Raises:
        ConfigError: there is no such function.
    """
    if spec == "none":
        return None
    module, _, name = spec.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises while it is imported
        raise ConfigError(
            f"learning.capture.redact={spec!r}: expected none or package.module:function: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(
            f"learning.capture.redact={spec!r}: expected a function, got {type(found).__name__}"
        )
    redactor: Redactor = found
    return redactor


# --- one shard ------------------------------------------------------------------------------------------

_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("tenant", pa.string()),
        ("domain", pa.string()),
        ("created", pa.float64()),
        ("target_version", pa.string()),
        ("draft_version", pa.string()),
        ("sampling", pa.string()),
        ("num_prompt", pa.int32()),
        ("num_resumed", pa.int32()),
        ("num_steps", pa.int32()),
        ("num_top", pa.int32()),
        ("is_heldout", pa.bool_()),
        ("token_ids", pa.list_(pa.int32())),
        ("rows", pa.binary()),
    ]
)
_KEYS = ["request_id", "tenant", "domain", "created", "is_heldout"]
"""Columns that tell whether a row is wanted."""


class _Damaged(Exception):
    """A shard that is not what a writer wrote."""


def encode(records: Sequence[CapturedRequest]) -> bytes:
    """A shard's bytes."""
    columns: dict[str, pa.Array] = {
        name: pa.array([getattr(r, name) for r in records], _SCHEMA.field(name).type)
        for name in ("request_id", "tenant", "domain", "created", "target_version", "draft_version",
                     "num_prompt", "num_resumed", "num_steps", "is_heldout")
    }  # fmt: skip
    columns["sampling"] = pa.array(
        [msgspec.json.encode(msgspec.to_builtins(r.sampling)).decode() for r in records]
    )
    columns["num_top"] = pa.array([r.rows["ids_low"].shape[1] for r in records], pa.int32())
    columns["token_ids"] = _lists([r.token_ids for r in records])
    columns["rows"] = pa.array([r.rows.view(np.uint8).data for r in records], pa.binary())
    return _to_parquet(pa.table([columns[name] for name in _SCHEMA.names], schema=_SCHEMA))


def _lists(arrays: Sequence[npt.NDArray[np.int32]]) -> pa.Array:
    offsets = np.cumsum([0, *(array.size for array in arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)))


def _to_parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    # No dictionary would find an order. Rows as lists of numbers, three columns of them, take three times as long.
    # Checksums tell a flipped bit from a true value.
    pq.write_table(
        table,
        buffer,
        compression="lz4",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    return buffer.getvalue()


def _open(data: bytes) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True)
    except Exception as error:  # pyarrow raises several kinds for what is not Parquet
        raise _Damaged(str(error)[:200]) from error
    if not file.schema_arrow.equals(_SCHEMA):
        raise _Damaged("its columns are not those of a shard")
    return file


def _read(file: pq.ParquetFile, columns: list[str] | None = None) -> pa.Table:
    try:
        table: pa.Table = file.read(columns=columns)
    except Exception as error:
        raise _Damaged(str(error)[:200]) from error
    return table


def _decode(table: pa.Table, row: int) -> CapturedRequest:
    """One row of a whole table."""

    def scalar(name: str) -> object:
        return table.column(name)[row].as_py()

    try:
        record = CapturedRequest(
            **{
                name: scalar(name)
                for name in (
                    *_KEYS,
                    "target_version",
                    "draft_version",
                    "num_prompt",
                    "num_resumed",
                    "num_steps",
                )
            },  # type: ignore[arg-type]
            sampling=msgspec.convert(msgspec.json.decode(str(scalar("sampling"))), Sampling),
            token_ids=table.column("token_ids")[row].values.to_numpy(zero_copy_only=False),
            rows=unpack(scalar("rows"), int(scalar("num_top"))),  # type: ignore[call-overload, arg-type]
        )
        record.check()
    except (ValueError, TypeError, AttributeError, msgspec.MsgspecError) as error:
        raise _Damaged(f"row {row}: {error}") from error
    return record


# --- writing --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """A new shard."""

    path: str = ""
    num_bytes: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    """Rows of logits in it."""


class ShardWriter:
    """Writes one worker's shards. What was deleted while it was in memory is left out."""

    def __init__(
        self, fs: FileSystem, root: str, worker_id: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._fs = fs
        self._root = root
        self._worker_id = worker_id
        self._clock = clock
        self._tombstones = Tombstones(fs, root)
        self._last_ms = 0

    def write(self, records: Sequence[CapturedRequest]) -> Written:
        """One shard of these records, or none if none of them may be kept any more.

        Raises:
            StorageError: the storage cannot be used; there is no shard then, and the same may be tried again.
        """
        self._tombstones.refresh()
        kept = [r for r in records if not self._tombstones.covers(r.request_id, r.tenant, r.created)]
        if not kept:
            return Written()
        now = self._clock()
        self._last_ms = max(self._last_ms + 1, int(now * 1000))
        hour = _hour(self._last_ms / 1000)
        path = f"{self._root}/capture/{hour}/{self._worker_id}-{self._last_ms:013d}.parquet"
        data = encode(kept)
        write_whole(self._fs, path, data)
        return Written(path, len(data), len(kept), sum(record.num_rows for record in kept))


def written_at(path: str) -> float:
    """Unix seconds when a shard was written first, by its name; 0 if that is no shard's."""
    stem = path.rpartition("/")[2].removesuffix(".parquet").rpartition("-")[2]
    return int(stem) / 1000 if stem.isdecimal() else 0.0


def shards(fs: FileSystem, root: str) -> dict[str, int]:
    """All shards, path -> bytes, oldest first.

    Raises:
        StorageError: the storage cannot be used.
    """
    found = files(fs, f"{root}/capture", deep=True)
    names = sorted((p for p in found if p.endswith(".parquet")), key=lambda path: (written_at(path), path))
    return {path: found[path] for path in names}


# --- reading --------------------------------------------------------------------------------------------


class ShardReader:
    """What was captured and may be seen. A damaged shard is reported once, by name, and passed over."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        *,
        ttl_h: float = _DEFAULT_TTL_H,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ttl_h`: `learning.capture.ttl_h`; what is older is not seen, whether or not it was deleted yet."""
        self.tombstones = Tombstones(fs, root)
        """For whoever keeps records in memory: what they cover must go from there too."""
        self.damaged: dict[str, str] = {}
        """Shards that could not be read, and why."""
        self._fs = fs
        self._root = root
        self._ttl_s = ttl_h * 3600
        self._clock = clock

    @classmethod
    def of(cls, config: LearningConfig) -> ShardReader:
        """For the storage and the TTL of a configuration."""
        return cls(*learning_folder(config), ttl_h=config.capture.ttl_h)

    def requests(
        self, *, heldout: bool | None = None, since: float = 0.0, tag: str = "", limit: int | None = None
    ) -> Iterator[CapturedRequest]:
        """Records, those of the newest shards first.

        Args:
            heldout: only those held out, or only the others; None is all.
            since: Unix seconds; what was captured later.
            tag: `tenant:NAME` or `domain:NAME`; "" is all.
            limit: so many at most.

        Raises:
            StorageError: the storage cannot be used.
        """
        num_left = float("inf") if limit is None else limit
        for path in reversed(shards(self._fs, self._root)):
            if num_left <= 0 or written_at(path) < max(since, self._clock() - self._ttl_s):
                return  # a record is captured before its shard is written
            for record in self.shard(path, heldout=heldout, since=since, tag=tag):
                if num_left <= 0:
                    return
                num_left -= 1
                yield record

    def shard(
        self, path: str, *, heldout: bool | None = None, since: float = 0.0, tag: str = ""
    ) -> list[CapturedRequest]:
        """The records of one shard that may be seen, newest first; none if it is gone or damaged.

        Raises:
            StorageError: the storage cannot be used.
        """
        data = read_whole(self._fs, path)
        if data is None:
            return []
        self.tombstones.refresh()  # after the reading: whatever came before it is honoured
        oldest = max(since, self._clock() - self._ttl_s)
        try:
            file = _open(data)
            keys = _read(file, _KEYS).to_pylist()
            wanted = [
                row
                for row, key in enumerate(keys)
                if key["created"] >= oldest
                and (heldout is None or key["is_heldout"] == heldout)
                and _has_tag(key, tag)
                and not self.tombstones.covers(key["request_id"], key["tenant"], key["created"])
            ]
            wanted.sort(key=lambda row: -keys[row]["created"])
            table = _read(file) if wanted else None
            return [_decode(table, row) for row in wanted]
        except _Damaged as damage:
            if path not in self.damaged:
                log.error("shard_damaged", shard=path, reason=str(damage))
                self.damaged[path] = str(damage)
            return []


def _has_tag(key: dict[str, object], tag: str) -> bool:
    kind, _, name = tag.partition(":")
    assert kind in ("", "tenant", "domain"), f"tag {tag!r} is neither a tenant's nor a domain's"
    return not tag or key[kind] == name


# --- deleting -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deletion:
    """What was deleted. Drafts trained on these shards and requests saw it: their lineage names them."""

    tombstone: str
    """Path of the order, which stays; "" if there was no new one."""
    request_ids: tuple[str, ...] = ()
    """Of the streams whose records were there."""
    shards: tuple[str, ...] = ()
    """Paths of what was rewritten or removed."""
    damaged: tuple[str, ...] = ()
    """Shards removed whole, since nobody could tell what was in them."""


def delete(
    fs: FileSystem,
    root: str,
    *,
    tenant: str | None = None,
    request_id: str | None = None,
    at: float | None = None,
) -> Deletion:
    """Delete what was captured of a tenant until `at` (Unix seconds; None is now), of a request, or of one tenant's request.

    From the moment the tombstone is written no reader sees it. Then the shards that hold it are rewritten without it.

    Args:
        request_id: as the client knows it (then all its choices go), or of one stream.

    Raises:
        StorageError: the storage cannot be used. If the tombstone was written, the next sweep goes on.
    """
    path, _ = bury(fs, root, tenant=tenant, request_id=request_id, at=at)
    tombstones = Tombstones(fs, root)
    tombstones.refresh()
    cleaned = [_clean(fs, shard, tombstones) for shard in shards(fs, root)]
    return _summary(path, cleaned)


@dataclass(frozen=True, slots=True)
class _Cleaned:
    """What became of one shard."""

    shard: str
    request_ids: tuple[str, ...] = ()
    is_damaged: bool = False


def _summary(tombstone: str, cleaned: Sequence[_Cleaned]) -> Deletion:
    touched = [c for c in cleaned if c.request_ids or c.is_damaged]
    return Deletion(
        tombstone,
        tuple(dict.fromkeys(name for c in touched for name in c.request_ids)),
        tuple(c.shard for c in touched),
        tuple(c.shard for c in touched if c.is_damaged),
    )


def _clean(fs: FileSystem, path: str, tombstones: Tombstones) -> _Cleaned:
    """Rewrite a shard without what is covered; remove it if nothing is left, or if nobody can read it."""
    data = read_whole(fs, path)
    if data is None:
        return _Cleaned(path)
    try:
        file = _open(data)
        keys = _read(file, _KEYS).to_pylist()
        gone = [tombstones.covers(key["request_id"], key["tenant"], key["created"]) for key in keys]
        if not any(gone):
            return _Cleaned(path)
        if not all(gone):
            left = _read(file).filter(pc.invert(pa.array(gone)))
            write_whole(fs, path, _to_parquet(left))
    except _Damaged as damage:
        if not len(tombstones):
            return _Cleaned(path)
        log.error("shard_damaged", shard=path, reason=str(damage), action="removed: it may hold what must go")
        remove(fs, path)
        return _Cleaned(path, is_damaged=True)
    if all(gone):
        remove(fs, path)
    return _Cleaned(
        path, tuple(key["request_id"] for key, is_gone in zip(keys, gone, strict=True) if is_gone)
    )


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found and did."""

    num_shards: int
    """That are left, with these bytes."""
    num_bytes: int
    oldest: float
    """Unix seconds of the oldest of them; 0 if there is none."""
    expired: tuple[str, ...]
    """Shards removed for their age."""
    pushed_out: tuple[str, ...]
    """Shards removed for their room."""
    deletion: Deletion
    """What still had to be deleted, because it reached storage after its tombstone."""


class Sweeper:
    """Keeps storage to its TTL and its size, and carries out deletions that something was late for. One per cluster."""

    def __init__(
        self, fs: FileSystem, root: str, config: CaptureConfig, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._fs = fs
        self._root = root
        self._config = config
        self._clock = clock
        self._tombstones = Tombstones(fs, root)
        self._checked: dict[str, int] = {}
        """By shard: how many tombstones it was compared with."""

    def sweep(self) -> Swept:
        """Once through all shards; cheap where nothing is new.

        Raises:
            StorageError: the storage cannot be used; the next sweep goes on.
        """
        found = shards(self._fs, self._root)
        now = self._clock()
        expired = [path for path in found if written_at(path) < now - self._config.ttl_h * 3600]
        pushed_out, room = [], self._config.max_mb << 20
        for path in reversed(found):
            if path not in expired:
                room -= found[path]
                if room < 0:
                    pushed_out.append(path)
        for path in (*expired, *pushed_out):
            remove(self._fs, path)
        gone = {*expired, *pushed_out}
        left = {path: size for path, size in found.items() if path not in gone}
        deletion = self._delete(left)
        left = shards(self._fs, self._root) if deletion.shards else left
        self._tidy(now, left)
        return Swept(
            len(left),
            sum(left.values()),
            min(map(written_at, left), default=0.0),
            tuple(expired),
            tuple(pushed_out),
            deletion,
        )

    def _delete(self, left: dict[str, int]) -> Deletion:
        self._tombstones.refresh()
        num = len(self._tombstones)
        self._checked = {path: self._checked.get(path, 0) for path in left}
        cleaned = []
        for path, num_checked in self._checked.items():
            if num_checked < num:
                cleaned.append(_clean(self._fs, path, self._tombstones))
                self._checked[path] = num
        return _summary("", cleaned)

    def _tidy(self, now: float, left: dict[str, int]) -> None:
        """What killed writers left, and folders of hours of which nothing is left."""
        for path, changed in unfinished(self._fs, f"{self._root}/capture").items():
            if changed < now - _ABANDONED_S:
                remove(self._fs, path)
        used = {path.rpartition("/")[0] for path in left}
        for folder in folders(self._fs, f"{self._root}/capture"):
            hour = folder.rpartition("/")[2]
            if folder not in used and hour < _hour(now - _ABANDONED_S):
                remove_folder(self._fs, folder)


def sweep(fs: FileSystem, root: str, config: CaptureConfig) -> Swept:
    """One sweep without memory of earlier ones."""
    return Sweeper(fs, root, config).sweep()


def _hour(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y%m%dT%H")
