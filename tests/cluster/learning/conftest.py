"""A folder -> a learning loop that has begun there, and ends with the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from learning_world import Begin, Clock, World


@pytest.fixture
async def begin(tmp_path: Path) -> AsyncIterator[Begin]:
    """Begins a world; ends it after the test."""
    worlds: list[World] = []

    async def make(*settings: str) -> World:
        world = World(tmp_path, Clock(), *settings)
        worlds.append(world)
        await world.begin()
        return world

    yield make
    for world in worlds:
        await world.end()
