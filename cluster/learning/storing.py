"""Captured data and operators' deletions -> kept to its TTL and size, deleted everywhere, versions that saw it revoked."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from paceline.cluster.errors import PacelineError
from paceline.cluster.learning import capture, publish
from paceline.cluster.learning.storage import learning_folder
from paceline.cluster.registry.records import Deletion
from paceline.cluster.registry.registry import Registry

if TYPE_CHECKING:
    from paceline.cluster.learning.loop import LearningLoop

log = structlog.get_logger(__name__)

_SWEEP_S = 60.0
_COMPACT_EVERY = 60
"""Sweeps: figures of the past are merged once an hour."""
_UNFINISHED_S = 3600.0
"""After so long a version that is half published belongs to a publisher that was killed."""


class Storing:
    """The only one who removes shards."""

    def __init__(self, loop: LearningLoop) -> None:
        self._loop = loop
        self.trouble = ""
        """Why storage cannot be used; "" if it can."""
        self._sweeper: capture.Sweeper | None = None
        self._sweeping = asyncio.Lock()

    async def sweep_for_ever(self) -> None:
        """Once a minute."""
        for round in itertools.count():
            await self.sweep()
            if round % _COMPACT_EVERY == 0:
                self._loop.keeper.put("figures", lambda registry: registry.compact_figures(), is_figure=True)
            await asyncio.sleep(_SWEEP_S)

    async def sweep(self) -> None:
        """What is too old or too much goes, and what a deletion was late for."""
        try:
            async with self._sweeping:
                swept = await asyncio.to_thread(self._sweep)
            self.trouble = ""
            if swept.expired or swept.pushed_out or swept.deletion.shards:
                log.info(
                    "captured_data_swept",
                    expired=len(swept.expired),
                    pushed_out=len(swept.pushed_out),
                    rewritten=len(swept.deletion.shards),
                )
        except PacelineError as error:
            self.trouble = str(error)
            log.warning("sweep_failed", error=str(error)[:300])

    def _sweep(self) -> capture.Swept:
        learning = self._loop.learning
        fs, root = learning_folder(learning)
        if self._sweeper is None:
            self._sweeper = capture.Sweeper(fs, root, learning.capture)
        publish.sweep(fs, root, older_than=time.time() - _UNFINISHED_S)
        return self._sweeper.sweep()

    async def delete(self, what: str, actor: str) -> tuple[Deletion, tuple[str, ...]]:
        """Captured data of tenant:NAME or request:ID -> (what was deleted, versions that had learned from it).

        Raises:
            PacelineError: storage or registry does not answer; what is not done yet is pending, and goes on with the next sweep.
        """
        loop = self._loop
        kind, _, name = what.partition(":")
        deletion = Deletion(f"del-{secrets.token_hex(4)}", loop.clock(), actor, what)
        loop.keeper.put("deletion", lambda registry: registry.put_deletion(deletion))
        try:
            fs, root = learning_folder(loop.learning)
            named = {"tenant": name} if kind == "tenant" else {"request_id": name}
            async with self._sweeping:
                found = await asyncio.to_thread(lambda: capture.delete(fs, root, **named))
            versions = await loop.keeper.ask(lambda registry: _learned(registry, kind, name, found))
        except PacelineError as error:
            failed = replace(deletion, state="failed", error=str(error)[:500])
            loop.keeper.put("deletion", lambda registry: registry.put_deletion(failed))
            raise
        done = replace(deletion, state="done", num_requests=len(found.request_ids), versions=versions)
        loop.keeper.put("deletion", lambda registry: registry.put_deletion(done))
        log.info(
            "captured_data_deleted",
            what=what,
            actor=actor,
            requests=len(found.request_ids),
            versions=versions,
        )
        return done, versions


def _learned(registry: Registry, kind: str, name: str, found: capture.Deletion) -> tuple[str, ...]:
    """Versions that were trained on it, or on such a version."""
    if kind == "tenant":
        return registry.trained_on(tenant=name)
    return registry.trained_on(request_ids=[name, *found.request_ids])
