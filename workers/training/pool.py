"""Captured shards -> the requests that one run may learn from: the newest, and a uniform sample of the older.

Nothing held out, deleted or expired gets in, nor what does not fit the model: a malformed record is counted, not raised,
since one tenant's nonsense must not end everybody's run.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.cluster.learning.capture import CapturedRequest, ShardReader
from paceline.cluster.learning.tombstones import Tombstones


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as it is trained on. Row i is the target's distribution of token num_prompt + i."""

    request_id: str
    tenant: str
    created: float
    shard: str
    temperature: float
    num_prompt: int
    token_ids: npt.NDArray[np.int32]
    """[num_prompt + N], cut to the draft's context."""
    top_ids: npt.NDArray[np.int32]
    """[N, M]"""
    top_log_probs: npt.NDArray[np.float16]
    """[N, M], at temperature 1."""

    @property
    def num_rows(self) -> int:
        return len(self.top_ids)

    @property
    def num_bytes(self) -> int:
        return self.token_ids.nbytes + self.top_ids.nbytes + self.top_log_probs.nbytes


def to_sample(record: CapturedRequest, shard: str, *, vocab: int, max_context: int) -> Sample | None:
    """A record as a sample; None if its numbers cannot be those of this target and draft."""
    num = min(record.num_rows, max_context - record.num_prompt)
    top_ids, log_probs = record.top_ids[:num], record.top_log_probs[:num]
    ids, temperature = record.token_ids[: record.num_prompt + num], record.sampling.temperature
    if num < 1 or top_ids.shape[1] < 1:
        return None
    for some in (ids, top_ids):
        if some.min() < 0 or some.max() >= vocab:
            return None
    ordered = np.sort(top_ids, axis=-1)
    # Above 0 by more than half precision's rounding no log-probability can be, nor a token twice in one row.
    if not np.isfinite(log_probs).all() or log_probs.max() > 0.1 or (ordered[:, 1:] == ordered[:, :-1]).any():
        return None
    if not np.isfinite(temperature) or temperature < 0:
        return None
    return Sample(
        record.request_id,
        record.tenant,
        record.created,
        shard,
        float(temperature),
        record.num_prompt,
        ids,
        top_ids,
        log_probs.copy(),
    )


@dataclass(slots=True)
class Pool:
    """The samples of a run by request id, and where they came from. Order means something: newest first."""

    fresh: dict[str, Sample] = field(default_factory=dict)
    old: dict[str, Sample] = field(default_factory=dict)
    num_malformed: int = 0
    num_other_target: int = 0
    """Captured from another target than this run's: a draft is trained for one."""
    num_left_out: int = 0
    """For which there was no memory."""

    def __len__(self) -> int:
        return len(self.fresh) + len(self.old)

    def get(self, request_id: str) -> Sample | None:
        return self.fresh.get(request_id) or self.old.get(request_id)

    def drop_deleted(self, tombstones: Tombstones) -> list[str]:
        """Forget what was deleted meanwhile; the ids that went. Looks at storage.

        Raises:
            StorageError: the storage cannot be used, so nobody knows what may still be used.
        """
        tombstones.refresh()
        gone = []
        for part in (self.fresh, self.old):
            deleted = [
                s.request_id for s in part.values() if tombstones.covers(s.request_id, s.tenant, s.created)
            ]
            for request_id in deleted:
                del part[request_id]
            gone += deleted
        return gone

    def lineage(self, used: Iterable[str]) -> dict[str, object]:
        """Shards and requests by tenant behind what was used."""
        samples = [s for s in (self.get(name) for name in used) if s is not None]
        return {
            "shards": sorted({s.shard for s in samples}),
            "requests_by_tenant": dict(sorted(Counter(s.tenant for s in samples).items())),
            "num_requests": len(samples),
        }


class Sieve:
    """Fills a pool within a budget of bytes: fresh ones by time, old ones by a hash, whatever order they come in.

    The order by hash makes the reservoir a uniform sample that is the same however often and from wherever it is
    drawn, and one that a deletion leaves no trace in.
    """

    def __init__(
        self,
        *,
        fresh_since: float,
        fresh_bytes: int,
        old_bytes: int,
        seed: int,
        only: frozenset[str] | None = None,
    ) -> None:
        """`only`: ids of an earlier drawing, to draw the same again."""
        self._since = fresh_since
        self._only = only
        self._seed = seed
        self._parts = (_Part(fresh_bytes), _Part(old_bytes))
        self._num_left_out = 0

    def add(self, sample: Sample) -> None:
        if self._only is not None and sample.request_id not in self._only:
            return
        if sample.created > self._since:
            self._num_left_out += self._parts[0].add(sample.created, sample)
        else:
            text = f"{self._seed}:{sample.request_id}".encode()
            key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2.0**64
            self._num_left_out += self._parts[1].add(key, sample)

    def pool(self) -> Pool:
        fresh, old = (part.samples() for part in self._parts)
        return Pool(fresh, old, num_left_out=self._num_left_out)


class _Part:
    """The samples with the largest keys that fit."""

    def __init__(self, num_bytes: int) -> None:
        self._room = num_bytes
        self._heap: list[tuple[float, str, Sample]] = []

    def add(self, key: float, sample: Sample) -> int:
        """How many had to go for it, itself included."""
        heapq.heappush(self._heap, (key, sample.request_id, sample))
        self._room -= sample.num_bytes
        num_gone = 0
        while self._room < 0 and len(self._heap) > 1:
            self._room += heapq.heappop(self._heap)[2].num_bytes
            num_gone += 1
        return num_gone

    def samples(self) -> dict[str, Sample]:
        return {
            name: sample for _, name, sample in sorted(self._heap, reverse=True, key=lambda item: item[:2])
        }


def load_pool(
    reader: ShardReader,
    paths: Iterable[str],
    sieve: Sieve,
    *,
    tag: str,
    target_version: str,
    vocab: int,
    max_context: int,
    between: Callable[[], None] = lambda: None,
) -> Pool:
    """Read shards into a pool; `between` is called behind each shard, for whoever has to yield.

    Raises:
        StorageError: the storage cannot be used.
    """
    num_malformed = num_other = 0
    for path in paths:
        for record in reader.shard(path, heldout=False, tag=tag):
            if target_version and record.target_version != target_version:
                num_other += 1
                continue
            sample = to_sample(record, path, vocab=vocab, max_context=max_context)
            if sample is None:
                num_malformed += 1
            else:
                sieve.add(sample)
        between()
    pool = sieve.pool()
    pool.num_malformed, pool.num_other_target = num_malformed, num_other
    pool.drop_deleted(reader.tombstones)
    return pool
