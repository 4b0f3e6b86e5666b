"""Command: profile some steps of a configuration; on several processes by `titanlite.torchrun`."""

from titanlite.ranks.failure import FailureReport, end_process, prepare_process

if __name__ == "__main__":  # before the imports that take seconds
    prepare_process()

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, thread_time
from typing import Annotated

import torch
import torch.distributed as dist
import tyro

from titanlite.assembly.description import device_name
from titanlite.assembly.resolve import resolve_job
from titanlite.assembly.run import Run, build_run
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.forward import on_device
from titanlite.generation.config import SamplesConfig
from titanlite.metrics.config import MetricsConfig
from titanlite.metrics.records import Record
from titanlite.planning.memory_check import explained_out_of_memory
from titanlite.profiling.breakdown import Operation, host_events, time_by_cause, time_by_region, top_operations
from titanlite.profiling.config import TRACES_FOLDER
from titanlite.profiling.regions import region
from titanlite.profiling.trace import Trace, output_file
from titanlite.ranks.agreement import run_on_all_ranks, share_from_rank_0, start_rank, watch_ranks
from titanlite.ranks.distributed import World
from titanlite.ranks.network import connect
from titanlite.runtime.errors import UserError, raise_problems
from titanlite.runtime.process_state import PacedGarbageCollection
from titanlite.runtime.settings import setting
from titanlite.runtime.text import aligned, counted
from titanlite.tools.command import ConfigFile, Count, print_lines, read_options_and_overrides
from titanlite.tools.outputs import cannot_write, require_new

WARMUP_STEPS = 3
"""Steps before those that are measured: they compile, allocate and fill caches."""


@dataclass(frozen=True)
class Options:
    """Where the time of a step goes: by region, by cause and by operation; tokens per second; waiting.

    Builds the run of CONFIG with new weights, on this process or on torchrun's. Takes a few steps to warm up, --steps
    steps that are timed, and profiling.active steps under torch's profiler, whose trace is kept. The run's own dump
    folder is neither read nor written. Override a key of CONFIG by --section.key VALUE, as for training.
    """

    config: ConfigFile
    """TOML file, or the name of a shipped configuration"""
    steps: Count = setting(10, "set a positive number", least=1)
    """number of timed steps"""
    operations: Count = setting(10, "0 shows none", least=0)
    """number of operations to show: those with the longest time by themselves"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """new folder for the trace; None: a new temporary folder"""


@dataclass(frozen=True)
class Profile:
    """What a rank measured. record: of the timed steps. steps: under the profiler; elapsed_s, of all, is split into
    regions, causes and operations. data_wait_s: of elapsed_s. trace: None if this rank wrote none."""

    record: Record
    steps: int
    elapsed_s: float
    data_wait_s: float
    regions: Mapping[str, float]
    causes: Mapping[str, float]
    operations: Sequence[Operation]
    trace: Path | None


def main(argv: Sequence[str]) -> None:
    """Profile, on every rank; rank 0 prints the report."""
    with FailureReport() as failure:
        options, overrides, problems = read_options_and_overrides(Options, argv, "profile")
        raise_problems(problems)
        world, environment = start_rank()
        arguments = ["--job.config_file", options.config, *overrides]
        config = load_config(arguments, world_size=world.size, device_type=world.device_type)
        store = connect(world, config.comm)
        watch_ranks(failure, world, store, None, config.comm.init_timeout_s)
        folder = output_folder(options.out, world, store, config.comm.init_timeout_s)
        job = resolve_job(profiled_config(config, options.steps, folder), (), world, store, environment)
        config = job.config
        cleanup = ExitStack()
        run = build_run(job, world, store, environment, cleanup)
        with explained_out_of_memory(config, run.memory, world, lambda: f"in step {run.trainer.step + 1}"):
            found = measure(config, run, options, failure)
        waits = waits_by_rank(found)
        run.profiling.close()
        if world.rank == 0:
            print_lines("", *report_lines(config, run, found, waits))
        cleanup.close()
        failure.finish(run.trainer.step)


def output_folder(out: Path | None, world: World, store: dist.Store, timeout_s: int) -> Path:
    """The folder to write to, the same path on all ranks: rank 0 makes it. Raises UserError."""

    def create() -> str:
        if out is None:
            return tempfile.mkdtemp(prefix="titanlite-profile-")
        require_new(out)
        try:
            out.mkdir(parents=True)
        except OSError as error:
            raise cannot_write(out, error) from error
        return str(out)

    return Path(share_from_rank_0("profile_folder", create, world, store, timeout_s))


def profiled_config(config: JobConfig, steps: int, folder: Path) -> JobConfig:
    """The configuration of a run of the same steps that only writes into `folder`."""
    return replace(
        config,
        job=replace(config.job, dump_folder=str(folder)),
        checkpoint=CheckpointConfig(),
        validation=replace(config.validation, enable=False),
        metrics=MetricsConfig(),
        samples=SamplesConfig(),
        data=replace(config.data, ledger=False),
        # This command traces by itself, on all ranks; a memory snapshot is written after the last step.
        profiling=replace(
            config.profiling, enable_trace=False, interval=sys.maxsize, wait=WARMUP_STEPS + steps + 1, warmup=0
        ),
    )


def measure(config: JobConfig, run: Run, options: Options, failure: FailureReport) -> Profile:
    """Take the steps, and write the trace of this rank if it is in profiling.ranks. A collective."""
    rank, device = run.trainer.mesh.world.rank, run.trainer.device
    if any(run.data_end.before_training()):
        raise UserError("the data is exhausted before the first step: increase data.sources.N.epochs")
    with PacedGarbageCollection():
        for _ in range(WARMUP_STEPS):
            take_step(run, failure)
        run.meter.flush()
        for _ in range(options.steps):
            take_step(run, failure)
        record = run.meter.flush()
        trace = Trace(device)  # on all ranks: the others would wait for those with a profiler
        take_step(run, failure)
        run.meter.flush()
        waited_s, worked_s, start = run.loader.wait_s, thread_time(), perf_counter()
        for _ in range(config.profiling.active):
            trace.start_step(run.trainer.step + 1)
            take_step(run, failure)
            trace.end_step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed_s, worked_s = perf_counter() - start, thread_time() - worked_s
        waited_s = run.loader.wait_s - waited_s
    failure.enter(run.trainer.step, "writing the trace")
    trace.stop()
    path = None
    if rank in config.profiling.ranks:
        path = output_file(Path(config.job.dump_folder), TRACES_FOLDER, run.trainer.step, rank, "json.gz")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.profiler.export_chrome_trace(str(path))
        except OSError as error:
            raise cannot_write(path, error) from error
    on_device = device.type == "cuda"
    events = host_events(trace.profiler.events() or ())
    # On a device, the kernels of a collective run until all ranks have reached it.
    for_ranks_s = elapsed_s - worked_s - waited_s if run.trainer.mesh.world.size > 1 and not on_device else 0.0
    causes = time_by_cause(events, elapsed_s - waited_s, for_ranks_s, on_device=on_device)
    return Profile(
        record,
        config.profiling.active,
        elapsed_s,
        waited_s,
        time_by_region(events, on_device=on_device),
        causes,
        top_operations(events, options.operations, on_device=on_device),
        path,
    )


def take_step(run: Run, failure: FailureReport) -> None:
    """Train a step, as titanlite.train does, without its log lines and files. Raises UserError."""
    trainer, loader = run.trainer, run.loader
    failure.enter(trainer.step + 1, "waiting for data")
    with region("data"):
        batches = [on_device(batch, trainer.device) for batch in loader.next_step()]
    failure.enter(trainer.step + 1, "forward, backward and update")
    stats = trainer.train_step(batches)
    run.meter.update(trainer.step, stats, lr=trainer.schedule(trainer.step), data_wait_s=loader.wait_s, bad_rows=0)
    run.profiling.after_step(trainer.step, failure)
    if any(run.data_end.after_step()):
        raise UserError(
            f"the data is exhausted after step {trainer.step} of the profile: give fewer --steps, or increase epochs"
        )


def waits_by_rank(found: Profile) -> list[float]:
    """The share of communication, and of waiting in it, of each rank. A collective."""
    assert dist.group.WORLD is not None
    return run_on_all_ranks(lambda: found.causes["communication"] / found.elapsed_s, dist.group.WORLD)


def report_lines(config: JobConfig, run: Run, found: Profile, waits: Sequence[float]) -> list[str]:
    """The report that `titanlite profile` prints. waits: see waits_by_rank."""
    record, training, device = found.record, config.training, run.trainer.device
    step_s = found.elapsed_s / found.steps
    axes = " x ".join(f"{axis} {size}" for axis, size in run.trainer.mesh.layout.items() if size > 1)
    numbers = [
        f"{record.step_time_s:.4g} s per step",
        f"{record.tokens_per_second:,.0f} tokens/s",
        *([f"MFU {record.mfu:.1%}"] if record.mfu is not None else []),
        f"{record.data_time_s / record.step_time_s:.1%} waiting for data",
        f"{record.memory_gib:.2f} GiB",
    ]
    timed = record.step - WARMUP_STEPS
    times = "time of kernels" if device.type == "cuda" else "time"
    causes = {"waiting for data": found.data_wait_s, **found.causes}
    if len(waits) > 1 and device.type == "cpu":
        causes = {cause.replace("communication", "communication, waiting for ranks"): s for cause, s in causes.items()}
    rest = max(0.0, found.elapsed_s - sum(found.regions.values()))
    lines = [
        f"{config.model.family} {config.model.flavor} on {counted(run.trainer.mesh.world.size, 'rank')}"
        f"{f' ({axes})' if axes else ''}, {device_name(device)}; {training.global_batch_size:,} sequences of "
        f"{training.seq_len:,} tokens per step",
        f"{counted(timed, 'step')}: {', '.join(numbers)}",
        f"{counted(found.steps, 'step')} under the profiler: {step_s:.4g} s per step "
        f"({step_s / record.step_time_s - 1:+.1%}); of rank 0, the {times} per step:",
        "",
        *table("region", {**found.regions, "between regions": rest}, found),
        "",
        *table("cause", {name: s for name, s in causes.items() if s}, found),
    ]
    if found.operations:
        calls = {name: f"{number / found.steps:,.0f}" for name, _, number in found.operations}
        lines += ["", *table("operation", {name: s for name, s, _ in found.operations}, found, calls)]
    if len(waits) > 1:
        order = sorted(range(len(waits)), key=lambda rank: waits[rank])
        first, last = order[0], order[-1]
        lines += [
            "",
            f"communication by rank: {waits[first]:.1%} (rank {first}) to {waits[last]:.1%} (rank {last}); the others "
            f"wait for the ranks that have least",
        ]
    if found.trace is not None:
        lines += ["", f"trace: {found.trace} (open it at https://ui.perfetto.dev)"]
    return lines


def table(head: str, seconds: Mapping[str, float], found: Profile, calls: Mapping[str, str] | None = None) -> list[str]:
    """Milliseconds per step and share of the time, the longest first for all but regions. calls: per step."""
    rows = [[head, "ms", "share", *(["calls"] if calls else [])]]
    order = list(seconds) if head == "region" else sorted(seconds, key=lambda name: -seconds[name])
    for name in order:
        share = f"{seconds[name] / found.elapsed_s:.1%}"
        rows.append([name, f"{1000 * seconds[name] / found.steps:,.1f}", share, *([calls[name]] if calls else [])])
    return aligned(rows, left=1)


if __name__ == "__main__":
    main(sys.argv[1:])
    end_process(0)
