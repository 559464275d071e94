"""Captured data and weights on storage -> kept to their age, size and number, once a minute; what was deleted goes."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from paceline.cluster.errors import PacelineError, Unavailable
from paceline.cluster.learning import capture, publish, writes
from paceline.cluster.learning.deleting import Deleting
from paceline.cluster.learning.storage import learning_folder
from paceline.cluster.registry.records import Version
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
    """The only one who removes shards and weights."""

    def __init__(self, loop: LearningLoop) -> None:
        self._loop = loop
        self.trouble = ""
        """Why storage cannot be used; "" if it can."""
        self._sweeper: capture.Sweeper | None = None
        self._sweeping = asyncio.Lock()
        self.deleting = Deleting(loop, self._sweeping)

    async def sweep_for_ever(self) -> None:
        """Once a minute."""
        for round in itertools.count():
            await self.sweep()
            if round % _COMPACT_EVERY == 0:
                self._loop.keeper.put("figures", lambda registry: registry.compact_figures(), is_figure=True)
            await asyncio.sleep(_SWEEP_S)

    async def sweep(self) -> None:
        """What is too old or too much goes, and what a deletion was late for or could not reach."""
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
            await self._drop_weights()
        except PacelineError as error:
            self.trouble = str(error)
            log.warning("sweep_failed", error=str(error)[:300])
        await self.deleting.retry()

    def _sweep(self) -> capture.Swept:
        learning = self._loop.learning
        fs, root = learning_folder(learning)
        if self._sweeper is None:
            self._sweeper = capture.Sweeper(fs, root, learning.capture)
        publish.sweep(fs, root, older_than=time.time() - _UNFINISHED_S)
        return self._sweeper.sweep()

    # -- weights -----------------------------------------------------------------------------------------

    async def _drop_weights(self) -> None:
        """Weights of revoked versions go at once, of others that serve nobody the oldest, beyond as many as are kept.

        What the registry does not know stays: it was published a moment ago, or by somebody else.
        """
        loop = self._loop
        if loop.rollout is None:
            return
        fs, root = learning_folder(loop.learning)
        names = await asyncio.to_thread(publish.published, fs, root)
        try:
            known = await loop.keeper.ask(lambda registry: _known(registry, names)) if names else []
        except Unavailable:
            return  # its own alarm says so
        used = self._used()
        idle = sorted((v for v in known if v.version not in used), key=lambda v: -v.changed)
        revoked = [v for v in idle if v.state == "revoked"]
        others = [v for v in idle if v.state != "revoked"]
        for version in (*revoked, *others[loop.learning.rollout.kept :]):
            name = version.version
            if name in loop.versions:  # first of all: from here on nobody can ask for it
                loop.versions[name] = replace(loop.versions[name], url="")
            await asyncio.to_thread(publish.remove, fs, root, name)
            writes.drop_weights(loop.keeper, name)
            log.info("weights_removed", version=name, state=version.state)

    def _used(self) -> set[str]:
        """Versions that somebody has, gets or may go back to."""
        loop = self._loop
        assert loop.rollout is not None
        used = {v for lane in loop.rollout.lanes.values() for v in (lane.live, lane.previous, lane.candidate)}
        used |= {*loop.pool(), *loop.cycle.waiting()}
        for run in loop.runs.open():
            used |= {ref.version for ref in run.refs}
        return used


def _known(registry: Registry, names: list[str]) -> list[Version]:
    return [version for name in names if (version := registry.version(name)) is not None]
