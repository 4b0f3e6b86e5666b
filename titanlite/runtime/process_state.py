"""The settings of a process that a run changes, and garbage collection at fixed steps."""

import ctypes
import gc
import os
import resource
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

import torch
import torch.nn.attention as torch_attention

from titanlite.runtime import torch_internals
from titanlite.runtime.logging import logging_restored


@contextmanager
def restored_process(device: torch.device) -> Iterator[None]:
    """Context of a run: inside, torch has the settings of a new process that the run relies on; after it, also after an
    error, the process has the settings from before.

    These are: environment variables, the limit of open files, torch's default dtype, gradient mode, deterministic
    algorithms and random state (of the CPU and of `device`), the current GPU, the order of attention kernels, frozen
    objects of the garbage collector, filters of warnings, sys.excepthook, and the logger "titanlite". The memory of the
    run is free.
    Functions of torch.compile are compiled again at their next call.
    """
    environment, limit = dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE)
    is_frozen = gc.get_freeze_count() > 0
    excepthook = sys.excepthook  # which torch's process groups replace, by one that writes the rank before each line
    with ExitStack() as stack:
        stack.enter_context(logging_restored())
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(_torch_restored(device))
        try:
            yield
        finally:
            gc.collect()  # parameters, buffers and process groups are in cycles
            if is_frozen:
                gc.freeze()
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            sys.excepthook = excepthook
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)


@contextmanager
def _torch_restored(device: torch.device) -> Iterator[None]:
    has_gpu = device.type == "cuda"
    settings = torch_internals.compiler_settings()
    dtype, cudnn = torch.get_default_dtype(), torch.backends.cudnn
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark, cudnn_deterministic = cudnn.benchmark, cudnn.deterministic
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if has_gpu else []))
        stack.enter_context(torch.inference_mode(False))  # turns gradients on, too
        if has_gpu:
            stack.enter_context(torch.cuda.device(device))
            kernels = torch_internals.attention_kernels()
            stack.enter_context(torch_attention.sdpa_kernel(kernels, set_priority=True))
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
            cudnn.benchmark, cudnn.deterministic = benchmark, cudnn_deterministic
            torch_internals.set_compiler(**settings)
            # They refer to process groups and modules of the run; a block is compiled for a limited number of models
            torch_internals.clear_sharding_cache()
            torch_internals.reset_compiler()
            if has_gpu:
                torch.cuda.empty_cache()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _MOST_BYTES = 2**31 - 1, 2**30


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, up to 2 GiB at its end, for tensors below 1 GiB of the next step: the system would
    have to clear each page again. Variables of the environment that say otherwise win; without glibc: no effect."""
    chosen = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not chosen and "threshold" not in os.environ.get("GLIBC_TUNABLES", ""):
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES)


def return_freed_memory() -> None:
    """Collect garbage, and let glibc return freed memory to the system, which `keep_freed_memory` does not: that of the
    compiler, which it leaves in small pieces between the tensors of its step."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
