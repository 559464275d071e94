"""Writes that are put -> done in turn, and how many are done is known, also where some had to be given up."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from paceline.cluster.learning import keeper as keeper_module
from paceline.cluster.learning.keeper import Keeper
from paceline.cluster.registry.registry import Registry


def put(keeper: Keeper, done: list[int], gate: threading.Event, num: int, *, is_figure: bool = False) -> None:
    def job(registry: Registry) -> None:
        gate.wait(5)
        done.append(num)

    keeper.put(f"write {num}", job, is_figure=is_figure)


async def test_what_is_written_is_counted_in_the_order_in_which_it_was_put(tmp_path: Path) -> None:
    """`num_written` is behind `num_put` until the last write is done, whoever waits for one of them knows when it is."""
    keeper, done, gate = Keeper(Registry("auto", tmp_path)), [], threading.Event()  # type: ignore[var-annotated]
    for num in range(3):
        put(keeper, done, gate, num)
    assert (keeper.num_put, keeper.num_written) == (3, 0)

    keeper.start()
    await asyncio.sleep(0.05)
    assert (keeper.num_put, keeper.num_written) == (3, 0)
    gate.set()
    await keeper.settled()

    assert (keeper.num_put, keeper.num_written, done) == (3, 3, [0, 1, 2])
    await keeper.close()


async def test_what_there_was_no_room_for_does_not_hold_up_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures go first; nobody waits for ever for a write that will never be."""
    monkeypatch.setattr(keeper_module, "_MAX_WAITING", 4)
    keeper, done, gate = Keeper(Registry("auto", tmp_path)), [], threading.Event()  # type: ignore[var-annotated]
    for num in range(8):
        put(keeper, done, gate, num, is_figure=num % 2 == 0)

    keeper.start()
    gate.set()
    await keeper.settled()

    assert keeper.num_lost == 4 and (keeper.num_put, keeper.num_written) == (8, 8)
    assert [num for num in done if num % 2] == [1, 3, 5, 7]
    await keeper.close()
