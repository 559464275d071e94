"""Shards in storage and workers' counters -> how much is kept of whom, and how much was not, and why."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

import pyarrow.parquet as pq
import structlog
from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster.admin import answers
from paceline.cluster.admin.desk import Desk
from paceline.cluster.errors import PacelineError
from paceline.cluster.keys import KeyFile, key_file_path, needs_keys
from paceline.cluster.learning.capture import shards
from paceline.cluster.learning.consent import LOCAL_TENANT
from paceline.cluster.learning.storage import FileSystem, home, learning_folder
from paceline.cluster.types import Snapshot

log = structlog.get_logger(__name__)

_RECHECK_S = 5.0
_COUNT_S = 20.0
"""Shards that cannot be read in so long are counted by the next call."""
_COLUMNS = ["tenant", "created", "is_heldout", "token_ids"]
_PREFIX = "paceline_capture_"
_CONSENT = "paceline_capture_consent_total"
_WRITTEN = "paceline_capture_requests_total"
_DROPPED = "paceline_capture_dropped_requests_total"
_OUTCOMES = {"request": "num_opted_out", "tenant": "num_no_consent", "operator": "num_no_consent"}
"""Who said no first -> what it is here."""


@dataclass(frozen=True, slots=True)
class _Share:
    """Of one tenant in one shard."""

    num_requests: int
    num_heldout: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Shard:
    size: int
    by_tenant: dict[str, _Share]
    oldest: float | None
    newest: float | None


class Holdings:
    """What storage holds. A shard changes only when something in it is deleted, so each is read once."""

    def __init__(self, desk: Desk, snapshots: Callable[[], Sequence[Snapshot]]) -> None:
        """`snapshots`: what workers pushed lately, with their counters."""
        self._desk = desk
        self._snapshots = snapshots
        self._shards: dict[str, _Shard] = {}
        self._checked = float("-inf")
        self._trouble = ""
        self._rules: dict[str, str] = {}
        self._num_expired = 0
        self._lock = asyncio.Lock()

    async def capture(self, deletions: list[answers.Deletion]) -> answers.Capture:
        """Everything about captured data."""
        learning = self._desk.config.learning
        if learning.enabled:
            async with self._lock:
                if time.monotonic() - self._checked >= _RECHECK_S:
                    await asyncio.to_thread(self._recount)
                    self._checked = time.monotonic()
        known = list(self._shards.values())
        tenants = self._tenants(known)
        return answers.Capture(
            enabled=learning.enabled,
            reason=self._trouble if learning.enabled else "learning.enabled is false: nothing is kept",
            storage=_shown(learning.storage),
            num_requests=sum(tenant.num_requests for tenant in tenants),
            num_held_out=sum(share.num_heldout for shard in known for share in shard.by_tenant.values()),
            num_tokens=sum(tenant.num_tokens for tenant in tenants),
            num_bytes=sum(shard.size for shard in known),
            max_bytes=learning.capture.max_mb << 20,
            oldest=min((shard.oldest for shard in known if shard.oldest is not None), default=None),
            newest=max((shard.newest for shard in known if shard.newest is not None), default=None),
            ttl_s=learning.capture.ttl_h * 3600,
            redact=learning.capture.redact,
            counters=self._counters(deletions),
            tenants=tenants,
            deletions=deletions,
        )

    def _tenants(self, known: Iterable[_Shard]) -> list[answers.CaptureTenant]:
        """Most tokens first."""
        sums: dict[str, Counter[str]] = {}
        for shard in known:
            for tenant, share in shard.by_tenant.items():
                counts = sums.setdefault(tenant, Counter())
                counts.update(
                    num_requests=share.num_requests, num_tokens=share.num_tokens, num_bytes=share.num_bytes
                )
        total = sum(counts["num_tokens"] for counts in sums.values())
        names = sorted({*sums, *self._rules}, key=lambda n: (-sums.get(n, Counter())["num_tokens"], n))
        return [
            answers.CaptureTenant(
                tenant=name,
                default_consent=self._rules.get(name) == "default",
                num_requests=sums.get(name, Counter())["num_requests"],
                num_tokens=sums.get(name, Counter())["num_tokens"],
                num_bytes=sums.get(name, Counter())["num_bytes"],
                num_opted_out=None,
                share=sums[name]["num_tokens"] / total if total and name in sums else None,
            )
            for name in names
        ]

    # -- counters ----------------------------------------------------------------------------------------

    def _samples(self) -> Iterable[tuple[str, dict[str, str], int]]:
        """(metric, labels, value) of what gateways and decode workers count."""
        for snapshot in self._snapshots():
            lines = [line for line in snapshot.metrics.splitlines() if line.startswith(_PREFIX.encode())]
            for family in text_string_to_metric_families(b"\n".join(lines).decode() + "\n"):
                for sample in family.samples:
                    yield sample.name, sample.labels, int(sample.value)

    def _counters(self, deletions: list[answers.Deletion]) -> answers.CaptureCounters:
        found: Counter[str] = Counter(num_expired=self._num_expired)
        for name, labels, value in self._samples():
            if name == _CONSENT:
                found["num_seen"] += value
                found[_OUTCOMES.get(labels["outcome"], "")] += value
            elif name == _WRITTEN:
                found["num_kept"] += value
            elif name == _DROPPED and labels["reason"] != "deleted":
                found["num_redacted" if labels["reason"] == "redacted" else "num_dropped"] += value
        found["num_deleted"] = sum(deletion.num_requests for deletion in deletions)
        return answers.CaptureCounters(**{name: found[name] for name in answers.CaptureCounters.model_fields})

    # -- shards ------------------------------------------------------------------------------------------

    def _recount(self) -> None:
        """Read what is new; what cannot be read is said, and what was known stays."""
        end = time.monotonic() + _COUNT_S
        self._trouble = ""
        self._rules = self._read_rules()
        try:
            fs, root = learning_folder(self._desk.config.learning)
            found = shards(fs, root)
        except PacelineError as error:
            self._trouble = str(error)
            return
        known = {path: shard for path, shard in self._shards.items() if found.get(path) == shard.size}
        self._count_expired(found)
        for path in found.keys() - known.keys():
            if time.monotonic() > end:
                self._trouble = f"{len(found) - len(known)} shards are not counted yet"
                break
            known[path] = _read(fs, path, found[path])
        self._shards = known

    def _count_expired(self, found: Container[str]) -> None:
        """Shards that were here and have gone for their age; deletions are counted by themselves."""
        horizon = time.time() - self._desk.config.learning.capture.ttl_h * 3600
        for path, shard in self._shards.items():
            if path not in found and shard.newest is not None and shard.newest <= horizon + _RECHECK_S:
                self._num_expired += sum(share.num_requests for share in shard.by_tenant.values())

    def _read_rules(self) -> dict[str, str]:
        """By tenant: what it said to capture. Without the gateway's key file on this machine, only what is configured."""
        config = self._desk.config
        rules = {LOCAL_TENANT: config.learning.capture.local_consent}
        if not needs_keys(config.gateway.auth, config.gateway.host):
            return dict(rules)
        try:
            keys = KeyFile(key_file_path(config.gateway.keys_file, home())).read()
        except PacelineError:
            return {}
        return {key.owner: key.capture for key in keys if key.revoked is None}


def _read(fs: FileSystem, path: str, size: int) -> _Shard:
    """One shard's counts; of a damaged one, or one that just went, its size only."""
    try:
        with fs.open(path, "rb") as file:
            table = pq.ParquetFile(file).read(columns=_COLUMNS)
    except Exception as error:  # noqa: BLE001 - pyarrow and each file system have errors of their own
        log.warning("shard_not_counted", shard=path, error=f"{type(error).__name__}: {str(error)[:100]}")
        return _Shard(size, {}, None, None)
    chunks = table["token_ids"].chunks
    tokens = [num for chunk in chunks for num in chunk.value_lengths().to_pylist()]
    rows = list(zip(table["tenant"].to_pylist(), table["is_heldout"].to_pylist(), tokens, strict=True))
    total = max(1, sum(tokens))
    by_tenant = {}
    for tenant in {row[0] for row in rows}:
        mine = [row for row in rows if row[0] == tenant]
        num_tokens = sum(row[2] for row in mine)
        by_tenant[tenant] = _Share(
            len(mine), sum(row[1] for row in mine), num_tokens, round(size * num_tokens / total)
        )
    created = table["created"].to_pylist()
    return _Shard(size, by_tenant, min(created, default=None), max(created, default=None))


def _shown(storage: str) -> str:
    """A URL without what may be a password."""
    scheme, separator, rest = storage.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else storage
