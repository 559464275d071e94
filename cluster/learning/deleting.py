"""Operators' deletions -> shards and runs without it, versions that had learned from it revoked; tried until it is done.

    asked -> tombstone, shards -> versions by their lineage -> done
               | storage or registry does not answer
               `-> failed: said, and tried again each minute, by a control that began anew too

A run that is on honours a tombstone by itself before its next step. What may slip through is a version that was being
written in that moment: so what a new version learned from is held against the deletions of its run's time.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from paceline.cluster.errors import PacelineError, Unavailable
from paceline.cluster.learning import capture, writes
from paceline.cluster.learning.storage import learning_folder
from paceline.cluster.learning.tombstones import Tombstone, choice_of, is_of, request_of
from paceline.cluster.registry.records import Deletion, Source
from paceline.cluster.registry.registry import Registry

if TYPE_CHECKING:
    from paceline.cluster.learning.loop import LearningLoop

log = structlog.get_logger(__name__)

KEPT = 200
"""Deletions that new versions are held against; more are not asked for while one run is on."""
_SETTLE_S, _LOOK_S = 10.0, 0.02
"""For the registry to know of the versions that came up before, and between two looks at it."""


class Deleting:
    """All deletions of a cluster. `storing`: held by whoever changes shards."""

    def __init__(self, loop: LearningLoop, storing: asyncio.Lock) -> None:
        self._loop = loop
        self._storing = storing
        self._recent: deque[Deletion] = deque(maxlen=KEPT)
        """Oldest first, whatever came of them."""
        self._owed: dict[str, Deletion] = {}
        """By id: begun, and not done."""
        self._cleaned: dict[str, int] = {}
        """By id: streams that went, of those of which nothing is left in shards."""

    def know(self, before: Iterable[Deletion]) -> None:
        """Deletions from before a restart, newest first."""
        for deletion in reversed(list(before)):
            self._recent.append(deletion)
            if deletion.state != "done":
                self._owed[deletion.id] = deletion

    async def delete(self, what: str, actor: str) -> Deletion:
        """Captured data of tenant:NAME or request:ID -> what was deleted, and which versions had learned from it.

        Raises:
            PacelineError: storage or registry does not answer. What is not done yet is tried again each minute.
        """
        deletion = Deletion(f"del-{secrets.token_hex(4)}", self._loop.clock(), actor, what)
        self._put(deletion)
        self._recent.append(deletion)
        self._owed[deletion.id] = deletion
        return await self._carry_out(deletion)

    async def retry(self) -> None:
        """Once more what could not be done."""
        for deletion in list(self._owed.values()):
            try:
                await self._carry_out(deletion)
            except PacelineError as error:
                log.warning("deletion_failed", what=deletion.what, error=str(error)[:300])

    async def _carry_out(self, deletion: Deletion) -> Deletion:
        try:
            if deletion.id not in self._cleaned:
                self._cleaned[deletion.id] = await self._clean(deletion)
            self._stop_paused_run(deletion)
            await self._registered()
            kind, _, name = deletion.what.partition(":")
            versions = await self._loop.keeper.ask(lambda registry: learned(registry, kind, name))
        except PacelineError as error:
            self._put(replace(deletion, state="failed", error=str(error)[:500]))
            raise
        num = self._cleaned.pop(deletion.id)
        done = replace(deletion, state="done", error="", num_requests=num, versions=versions)
        self._owed.pop(deletion.id, None)
        self._put(done)
        self._revoke(done)
        log.info("captured_data_deleted", what=done.what, actor=done.actor, requests=num, versions=versions)
        return done

    async def _clean(self, deletion: Deletion) -> int:
        """From here on no reader sees it; -> streams that were in shards.

        Raises:
            StorageError: the storage cannot be used.
        """
        kind, _, name = deletion.what.partition(":")
        fs, root = learning_folder(self._loop.learning)
        named = {"tenant": name} if kind == "tenant" else {"request_id": name}
        async with self._storing:
            found = await asyncio.to_thread(lambda: capture.delete(fs, root, at=deletion.created, **named))
        return len(found.request_ids)

    def _put(self, deletion: Deletion) -> None:
        self._loop.keeper.put("deletion", lambda registry: registry.put_deletion(deletion))

    async def _registered(self) -> None:
        """The registry knows all versions that there are.

        Raises:
            Unavailable: it does not answer.
        """
        keeper = self._loop.keeper
        asked, end = keeper.num_put, time.monotonic() + _SETTLE_S
        while keeper.num_written < asked:
            if keeper.trouble or time.monotonic() > end:
                why = keeper.trouble or "it is busy"
                raise Unavailable(f"the registry has not written what came before: {why}")
            await asyncio.sleep(_LOOK_S)

    def _stop_paused_run(self, deletion: Deletion) -> None:
        """A run that goes on forgets by itself what was deleted; one that is held up has it on disk for as long."""
        loop, run = self._loop, self._loop.runs.current
        kind, _, name = deletion.what.partition(":")
        if run is None or run.kind != "train" or loop.guard.level not in ("pause", "evict"):
            return
        if kind == "tenant" and run.tag.startswith("tenant:") and run.tag != f"tenant:{name}":
            return
        reason = f"{deletion.what} was deleted while the run was paused: it may have learned from that"
        stopped = loop.runs.stop(run.run_id, loop.clock(), reason)
        if stopped is not None:
            writes.run(loop.keeper, stopped)
            loop.plan_changed()

    def _revoke(self, deletion: Deletion) -> None:
        loop = self._loop
        if not loop.learning.revoke_deleted or loop.rollout is None:
            return
        reason = f"{deletion.what} was deleted, and it had learned from that"
        for version in deletion.versions:
            if version not in loop.versions:  # of another target, or revoked already
                writes.move(loop.keeper, version, "revoked", reason, deletion.actor)
            elif version != loop.base:
                loop.revoke(version, reason, deletion.actor)

    def covering(self, sources: Iterable[Source], since: float) -> Deletion | None:
        """The deletion that a version's sources fall under, of those made since a time: when its run began."""
        recent = [(d, _stone(d)) for d in self._recent if d.created >= since]
        for source in sources if recent else ():
            for deletion, stone in recent:
                if is_of(stone, source.request_id, source.tenant, source.created):
                    return deletion
        return None


def _stone(deletion: Deletion) -> Tombstone:
    kind, _, name = deletion.what.partition(":")
    if kind == "tenant":
        return Tombstone(deletion.created, tenant=name)
    return Tombstone(deletion.created, request_id=name)


def learned(registry: Registry, kind: str, name: str) -> tuple[str, ...]:
    """Versions that were trained on a tenant's requests or on one request, or on such a version.

    Whether or not its record is still there: lineage outlives shards.
    """
    if kind == "tenant":
        return registry.trained_on(tenant=name)
    streams = [s for s in registry.requests_like(name) if name in (choice_of(s), request_of(s))]
    return registry.trained_on(request_ids=streams)
