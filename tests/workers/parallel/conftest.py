"""Spawned ranks that are used again: a process that was rank 1 of one gang is rank 1 or 2 of the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.workers.parallel.gang import SpawnedRank, load_parallel_runner
from paceline.workers.parallel.rank import RankSetup
from paceline.workers.parallel.runner import ParallelRunner


class Kept:
    """A rank whose process outlives its gang, if the gang ended as it should."""

    def __init__(self, pool: RankPool, process: SpawnedRank) -> None:
        self._pool, self.process = pool, process

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def end(self, limit_s: float) -> None:
        if limit_s > 0 and self.process.is_alive():
            self._pool.idle.append(self.process)
        else:
            self.process.end(limit_s)


class RankPool:
    """`launch` of gangs."""

    def __init__(self) -> None:
        self.idle: list[SpawnedRank] = []

    def __call__(self, setup: RankSetup) -> Kept:
        process = self.idle.pop() if self.idle else SpawnedRank()
        process.begin(setup)
        return Kept(self, process)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Spawned processes, shared by all tests of the session."""
    pool = RankPool()
    yield pool
    for process in pool.idle:
        process.end(5.0)


@pytest.fixture
def make_parallel(
    model_folder: Callable[[str], Path], rank_pool: RankPool
) -> Iterator[Callable[..., ParallelRunner]]:
    """(family, tp) -> the leader's runner of a gang, dissolved at the end of the test."""
    made: list[ParallelRunner] = []

    def make(family: str, tp: int = 2, *, launch: object = rank_pool) -> ParallelRunner:
        runner, _ = load_parallel_runner(
            model_folder(family),
            tp=tp,
            kv_memory_mb=1,
            block_size=4,
            launch=launch,  # type: ignore[arg-type]
            timeout_s=20.0,
            start_s=60.0,
        )
        made.append(runner)
        return runner

    yield make
    for runner in made:
        runner.close()
