"""Writes for the registry -> done one after the other in a thread, again and again while it does not answer.

Who asks for a write goes on at once. What is decided is decided in memory; the registry follows, and what it has not
got when this process dies is what a restart does not know: the last few changes, never half of one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from paceline.cluster.errors import PacelineError, Unavailable
from paceline.cluster.registry.registry import Registry

log = structlog.get_logger(__name__)
T = TypeVar("T")

_MAX_WAITING = 2000
_RETRY_S = (0.2, 5.0)
"""First pause, and the longest."""


@dataclass(slots=True)
class _Write:
    name: str
    job: Callable[[Registry], Any]
    is_figure: bool
    """May be left out while the registry is away: charts have a gap then, and nothing else."""
    number: int


class Keeper:
    """The registry's only writer. All methods on the event loop's thread."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.trouble = ""
        """Why the registry cannot be used now; "" if it can."""
        self.num_lost = 0
        """Writes that it refused, or that there was no room to keep."""
        self.num_put = 0
        """Writes that were asked for, ever ..."""
        self._waiting: deque[_Write] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_written(self) -> int:
        """... and how many of the first of them are done, or given up."""
        return self._waiting[0].number - 1 if self._waiting else self.num_put

    def start(self) -> None:
        self._task = asyncio.create_task(self._work())

    async def close(self, limit_s: float = 3.0) -> None:
        """Write what waits, but not for longer than this."""
        if self._task is None:
            return
        await asyncio.wait([asyncio.ensure_future(self._idle.wait())], timeout=limit_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def put(self, name: str, job: Callable[[Registry], Any], *, is_figure: bool = False) -> None:
        """Do this with the registry, after all that was put before."""
        self.num_put += 1
        if len(self._waiting) >= _MAX_WAITING:
            self.num_lost += 1
            if is_figure:
                return
            kept = next((i for i, write in enumerate(self._waiting) if write.is_figure), 0)
            del self._waiting[kept]
        self._waiting.append(_Write(name, job, is_figure, self.num_put))
        self._idle.clear()
        self._wake.set()

    async def settled(self) -> None:
        """All that was put has been written."""
        await self._idle.wait()

    async def ask(self, job: Callable[[Registry], T]) -> T:
        """Read something now. Raises what the registry raises."""
        try:
            found = await asyncio.to_thread(job, self.registry)
        except Unavailable as error:
            self.trouble = str(error)
            raise
        self.trouble = ""
        return found

    async def _work(self) -> None:
        pause = _RETRY_S[0]
        while True:
            if not self._waiting:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            write = self._waiting[0]
            try:
                await asyncio.to_thread(write.job, self.registry)
            except Unavailable as error:
                if not self.trouble:
                    log.warning("registry_unavailable", write=write.name, error=str(error)[:200])
                self.trouble = str(error)
                await asyncio.sleep(pause)
                pause = min(_RETRY_S[1], pause * 2)
                continue
            except PacelineError as error:  # it says no: asking again would change nothing
                log.warning("registry_refused", write=write.name, error=str(error)[:300])
                self.num_lost += 1
            except Exception:  # a defect of ours must not stop all other writes
                log.exception("registry_write_failed", write=write.name)
                self.num_lost += 1
            if self.trouble:
                log.info("registry_back", waiting=len(self._waiting))
            self.trouble, pause = "", _RETRY_S[0]
            if self._waiting and self._waiting[0] is write:
                self._waiting.popleft()
