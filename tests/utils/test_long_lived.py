"""Libraries stay: no collection while they are imported, and later ones pass them over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from verl.utils.long_lived import made_to_stay


class Node:
    """Something that can be part of a circle."""

    other: Node


def circle() -> weakref.ref[Node]:
    """Two nodes that only refer to each other."""
    one, two = Node(), Node()
    one.other, two.other = two, one
    return weakref.ref(one)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    gc.enable()
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()


def test_nothing_is_collected_inside_and_what_is_there_at_the_end_is_passed_over() -> None:
    with made_to_stay():
        assert not gc.isenabled()
        inside = circle()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    gc.collect()
    assert inside() is not None


def test_what_is_made_afterwards_is_collected_and_what_nobody_holds_is_freed() -> None:
    with made_to_stay():
        held = Node()
    seen = weakref.ref(held)
    del held
    assert seen() is None
    after = circle()
    gc.collect()
    assert after() is None


def test_a_failed_import_and_blocks_in_blocks_leave_the_collector_as_it_was() -> None:
    with pytest.raises(ImportError), made_to_stay():
        with made_to_stay():
            pass
        assert not gc.isenabled()
        raise ImportError("no such library")
    assert gc.isenabled()
    gc.disable()
    with made_to_stay():
        pass
    assert not gc.isenabled()
