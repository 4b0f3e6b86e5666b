"""Garbage collection at fixed steps, so that no rank pauses while the others wait for it in a collective."""

import gc
from typing import Self

INTERVAL = 50
"""Steps between collections."""


class PacedGarbageCollection:
    """Context manager in which garbage is collected at every `interval`-th step only.

    Automatic collection pauses ranks at different times, and every rank waits for the slowest. Objects that exist on
    entering (modules, model, optimizer) are frozen, so that collections only visit objects created later. Leaving
    restores the previous state, also after an exception. Not reentrant.
    """

    def __init__(self, interval: int = INTERVAL) -> None:
        self._interval = interval
        self._was_enabled = False

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int) -> None:
        """Run the garbage collector if `step` (from 1) is a multiple of `interval`, the same on all ranks."""
        if step % self._interval == 0:
            gc.collect()
