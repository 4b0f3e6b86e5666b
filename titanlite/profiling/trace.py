"""Traces and memory snapshots of the steps that [profiling] selects."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from titanlite.profiling.config import SNAPSHOTS_FOLDER, TRACES_FOLDER, ProfilingConfig
from titanlite.ranks.failure import FailureReport
from titanlite.runtime.logging import log
from titanlite.runtime.torch_internals import record_allocations, write_allocations

MAX_ALLOCATIONS = 100_000
"""Latest allocations and frees in a memory snapshot."""


class Profiling:
    """Records and writes what is due on this rank; does nothing on ranks that are not selected.

    Not a collective: the other ranks wait in their next collective until a file is written.
    """

    def __init__(self, section: ProfilingConfig, dump_folder: str, rank: int, device: torch.device) -> None:
        """Begins to record allocations if memory snapshots are enabled: create it before the model."""
        self._section = section
        self._folder = Path(dump_folder)
        self._rank = rank
        self._device = device
        self._traces = section.enable_trace and rank in section.ranks
        self._snapshots = section.enable_memory_snapshot and rank in section.ranks
        self._trace: Trace | None = None
        if self._snapshots:
            record_allocations(MAX_ALLOCATIONS)

    def start(self, step: int) -> None:
        """Begin what is due at the start of this step. A trace whose warm-up has begun earlier is left out."""
        if not self._traces:
            return
        place = self._section.place(step)
        if place == self._section.wait + 1:
            self._trace = Trace(self._device)
        if self._trace is not None and place > self._section.wait + self._section.warmup:
            self._trace.start_step(step)

    def after_step(self, step: int, failure: FailureReport) -> None:
        """Write what is due after this step, and begin what is due at the next one."""
        if self._trace is not None:
            self._trace.end_step()
        if (self._trace is not None or self._snapshots) and self._section.place(step) == self._section.last:
            failure.enter(step, "profiling")
            if self._trace is not None:
                self._trace.stop()
                self._write(TRACES_FOLDER, step, "json.gz", self._trace.profiler.export_chrome_trace)
                self._trace = None
            if self._snapshots:
                self._write(SNAPSHOTS_FOLDER, step, "pickle", write_allocations)
        self.start(step + 1)

    def close(self) -> None:
        """Stop tracing; a trace that is not complete is dropped. Recorded allocations stay, for the snapshot that is
        written if the memory has run out."""
        if self._trace is not None:
            self._trace.stop()
            self._trace = None

    def _write(self, folder: str, step: int, suffix: str, write: Callable[[str], object]) -> None:
        """Write a file of this rank. A full disk costs the file, not the run."""
        path = output_file(self._folder, folder, step, self._rank, suffix)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(path))
            log.info("Wrote %s", path)
        except OSError as error:
            log.warning("cannot write %s: %s; training continues", path, error.strerror or error)


def output_file(dump_folder: Path, folder: str, step: int, rank: int, suffix: str) -> Path:
    """The file of a rank, by the last step in it."""
    return dump_folder / folder / f"step-{step}" / f"rank-{rank}.{suffix}"


class Trace:
    """torch's profiler over some steps, warming up from now on."""

    def __init__(self, device: torch.device) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints its start and its end
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self.profiler = profile(activities=activities, record_shapes=True, acc_events=True)  # else torch 2.11 warns
        self.profiler.prepare_trace()
        self._is_recording = False
        self._mark: record_function | None = None

    def start_step(self, step: int) -> None:
        """Begin a step in the trace, which TensorBoard and HTA find by its name; the warm-up ends with the first."""
        if not self._is_recording:
            self.profiler.start_trace()
            self._is_recording = True
        self._mark = record_function(f"ProfilerStep#{step}")
        self._mark.__enter__()

    def end_step(self) -> None:
        """End a step. No effect in the warm-up."""
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def stop(self) -> None:
        """End the recording; waits for the device."""
        self.end_step()
        if not self._is_recording:
            self.profiler.start_trace()  # the profiler cannot stop in its warm-up
        self.profiler.stop_trace()
