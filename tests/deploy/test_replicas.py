"""A worker's process that is ready -> nothing that it loaded is looked at again by Python's collector."""

from __future__ import annotations

import gc
import weakref

from paceline.deploy import replicas


class Node:
    """May be part of a circle."""

    other: Node


def test_what_is_loaded_is_passed_over_and_later_garbage_is_not() -> None:
    """Freed are circles made afterwards; what was there before costs no pause any more."""
    try:
        replicas._freeze()
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < 1_000

        one, two = Node(), Node()
        one.other, two.other = two, one
        gone = weakref.ref(one)
        del one, two
        gc.collect()

        assert gone() is None
    finally:
        gc.unfreeze()
