"""Python's garbage collection at chosen steps, so that no rank pauses while the others wait for it in a collective."""

import gc
from typing import Self


class PacedGarbageCollection:
    """While entered, cycles are collected at every `freq`-th step and at no other time.

    Automatic collection strikes each rank at another moment, and every rank waits for the slowest. What exists on
    entering (modules, model, optimizer) is set aside first, so that a collection looks only at what the steps have left
    behind. Leaving restores what was found, also after an exception. Not reentrant.
    """

    def __init__(self, freq: int) -> None:
        self._freq = freq
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
        """Collect if `step` (from 1) is a multiple of the frequency; the same answer on all ranks."""
        if step % self._freq == 0:
            gc.collect()
