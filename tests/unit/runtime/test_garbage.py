"""Garbage is collected at the chosen steps only."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from titanlite.runtime.process_state import PacedGarbageCollection


class Node:
    """A reference cycle, freed only by garbage collection."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def _own_gc() -> Iterator[None]:
    """Re-enable automatic collection after each test."""
    yield
    gc.unfreeze()
    gc.enable()


def test_cycles_live_until_the_chosen_step() -> None:
    with PacedGarbageCollection(3) as collection:
        alive = []
        for step in range(1, 7):
            cycle = weakref.ref(Node())
            collection.after_step(step)
            alive.append(cycle() is not None)
        assert not gc.isenabled()
    assert alive == [True, True, False, True, True, False]


def test_many_objects_do_not_trigger_a_collection() -> None:
    with PacedGarbageCollection(1000):
        cycle = weakref.ref(Node())
        _ = [[] for _ in range(200_000)]
        assert cycle() is not None


@pytest.mark.parametrize("enabled", [True, False])
def test_leaving_restores_the_previous_state(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    frozen = 0
    try:
        with PacedGarbageCollection(1):
            frozen = gc.get_freeze_count()
            raise ValueError
    except ValueError:
        pass
    assert frozen > 0
    assert gc.isenabled() is enabled
    assert gc.get_freeze_count() == 0
