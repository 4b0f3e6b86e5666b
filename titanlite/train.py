"""Command: train. On one process `titanlite train CONFIG`, on several by `titanlite.torchrun`.

The training loop: start, data, logs, checkpoints, validation, end. The step itself is Trainer.train_step (trainer.py).
"""

from titanlite.ranks.failure import FailureReport, end_process, prepare_process

if __name__ == "__main__":  # before the imports that take seconds
    prepare_process()

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
import torch.distributed as dist

from titanlite.assembly.data_files import resolve_with_data, resolve_without_data
from titanlite.assembly.job import Job
from titanlite.assembly.resolve import resolve_job
from titanlite.assembly.run import Run, build_run, job_locks
from titanlite.assembly.summary import summarize
from titanlite.batch import Batch
from titanlite.checkpoint.manager import STOP_AFTER
from titanlite.config.ineffective import describe
from titanlite.config.load import most_ranks, read_command_line, resolve, without_effect
from titanlite.config.schema import JobConfig
from titanlite.forward import on_device
from titanlite.metrics.meter import is_log_step
from titanlite.metrics.records import Record
from titanlite.parallel.digest import weights_digest
from titanlite.planning.memory_check import explained_out_of_memory
from titanlite.profiling.regions import region
from titanlite.ranks.agreement import RanksError, require_equal, start_rank, watch_ranks
from titanlite.ranks.distributed import ELASTIC, World, note_finished, wait_until_finished
from titanlite.ranks.network import connect
from titanlite.ranks.signals import StopRequest
from titanlite.runtime.errors import DataError, UserError
from titanlite.runtime.logging import keep_for_log_file, log
from titanlite.runtime.process_state import PacedGarbageCollection, keep_freed_memory, return_freed_memory
from titanlite.tools.plan.preview import preview
from titanlite.trainer import Trainer

OWN_SIGNAL_S = 10.0
"""Elastic launchers that see a node join stop their ranks one after another, each within --monitor-interval (0.1 s)."""


@dataclass(frozen=True)
class End:
    """How a training has ended.

    config: as trained. step: the last one. record: of that step, if this start has trained to the end. stop: the stop
    request of this rank if a signal on any rank has stopped the run before its end, or before checkpoint.stop_after.
    """

    config: JobConfig
    how: Literal["finished", "data exhausted", "stopped"]
    step: int
    record: Record | None = None
    stop: StopRequest | None = None


def main() -> None:
    """Read the configuration, build the run, train; the same program on every rank."""
    with FailureReport() as failure:
        launched, environment = start_rank()
        if launched.rank == 0:
            keep_for_log_file()
        parsed = read_command_line(sys.argv[1:])
        preview(parsed, [launched.size], launched.local_size)
        is_elastic, device_type = ELASTIC in environment, launched.device_type
        if device_type == "cpu":
            keep_freed_memory()
        used = most_ranks(parsed, launched.size, device_type=device_type) if is_elastic else launched.size
        resolved = partial(resolve, parsed, world_size=used, device_type=device_type)
        config = resolve_without_data(resolved, launched)
        store = connect(launched, config.comm)
        if is_elastic:
            facts = {"ranks that the configuration uses": str(used)}
            require_equal("used ranks", facts, launched, store, config.comm.init_timeout_s)
            Path(environment[ELASTIC]).touch()
        if launched.rank >= used:
            log.warning("waits idle until the run or a restart: the layout fits %d of %d ranks", used, launched.size)
            wait_until_finished(store)
            return
        world = launched.first(used)
        if used < launched.size:
            log.info("Ranks: %d of %d, the most that the layout fits; the others wait idle", used, launched.size)
        watch_ranks(failure, world, store, config.job.dump_folder, config.comm.train_timeout_s)
        checked = config if launched.size == 1 else None
        config = resolve_with_data(lambda: checked or resolved(), world, store, config.comm.save_timeout_s)
        job = resolve_job(config, parsed.origins.keys(), world, store, environment)
        if world.rank == 0:
            for problem in without_effect(parsed, job.config, world.size):
                log.warning("Without effect: %s", describe(problem))
        cleanup = ExitStack()  # not entered: an error ends the process, which must not wait for other ranks before
        with job_locks(job.config, world, environment, failure.end_by_error):
            end = run_job(job, world, store, failure, environment, cleanup)
        if end.stop is None and world.rank == 0:
            note_finished(store)
        if end.stop is not None and is_elastic:
            wait_for_launcher(end.stop, OWN_SIGNAL_S)


def wait_for_launcher(stopped: StopRequest, seconds: float) -> None:
    """Wait until the launcher of this rank, which was stopped by agreement, stops it as well.

    If this rank ended before, its launcher would take the run as finished and leave it. Raises UserError, so that it
    restarts, if no signal comes: only other nodes were stopped.
    """
    if not stopped.received_within(seconds):
        raise UserError("ranks of another node were stopped: this one needs a restart, to continue without them")


def run_job(
    job: Job,
    world: World,
    store: dist.Store,
    failure: FailureReport,
    environment: Mapping[str, str],
    cleanup: ExitStack,
) -> End:
    """Build the run, train, log how it ended. A collective.

    The dump folder is locked for this job. environment: the variables at program start. cleanup: empty, and again on
    return; after an error, closing it closes what was built.
    """
    config = job.config
    run = build_run(job, world, store, environment, cleanup)
    first_step, stop_after = run.trainer.step + 1, config.checkpoint.stop_after
    ended = run.data_end.before_training()
    if run.validation is not None and run.validation.missing:  # a kill or a signal prevented it
        last = any(ended) or first_step > config.training.steps
        if run.validation.is_due(run.trainer.step, last):
            run.validation.after_step(run.trainer.step, last)
    if any(ended):
        end = End(config, "data exhausted", run.trainer.step)
        log.info(
            "Nothing to do: the data is exhausted after step %d (%s)",
            run.trainer.step,
            describe_end(config, run, ended),
        )
    elif first_step > config.training.steps:
        end = End(config, "finished", run.trainer.step)
        log.info(
            "Nothing to do: the run is finished, step %d of training.steps = %d. To continue: "
            "add --training.steps %d to the command",
            *(run.trainer.step, config.training.steps, 2 * run.trainer.step),
        )
    elif config.checkpoint.enable and 0 < stop_after < first_step:
        end = End(config, "stopped", run.trainer.step)
        log.info(
            "Nothing to do: %s = %d, and step %d is saved. To continue: leave it out",
            *(STOP_AFTER, stop_after, run.trainer.step),
        )
    else:
        if not config.checkpoint.enable and world.rank == 0:
            log.warning("Checkpoints: none, since checkpoint.enable = false: the weights are lost when the run ends")
        start = perf_counter()
        with explained_out_of_memory(config, run.memory, world, lambda: f"in step {run.trainer.step + 1}"):
            record = train(config, run, failure)
        if record is None:
            assert run.checkpoints is not None
            stopped_by = run.checkpoints.stopped_by
            end = End(config, "stopped", run.trainer.step, stop=None if stopped_by == STOP_AFTER else run.stop)
            once = ["--checkpoint.load_step"] * (config.checkpoint.load_step >= 0)
            once += [f"--{STOP_AFTER}"] * (stopped_by == STOP_AFTER)
            log.info(
                "Stopped by %s after step %d, which is saved: run the same command%s to resume",
                *(stopped_by, run.trainer.step, f" without {' and '.join(once)}" if once else ""),
            )
        elif record.step < config.training.steps:
            end = End(config, "data exhausted", record.step, record)
            log.info("The data is exhausted after step %d (%s)", end.step, describe_end(config, run, run.loader.ended))
        else:
            end = End(config, "finished", record.step, record)
        log.info("Time: %s", run.goodput.describe())
        if record is not None and world.rank == 0:
            summarize(config, record, record.step - first_step + 1, perf_counter() - start)
    failure.enter(run.trainer.step, "ending")
    cleanup.close()
    failure.finish(run.trainer.step)
    return end


def describe_end(config: JobConfig, run: Run, ended: Sequence[bool]) -> str:
    """The exhausted sources, and how to continue."""
    keys = [
        f"data.sources.{n}, {name} (epochs = {source.epochs})"
        for n, (name, source) in enumerate(zip(run.loader.source_names, config.data.sources, strict=True))
        if ended[n]
    ]
    accept = """--checkpoint.accept_changes '["data"]'"""
    return f"{', '.join(keys)}; to continue, increase epochs (-1: no limit) and add {accept}"


def train(config: JobConfig, run: Run, failure: FailureReport) -> Record | None:
    """Train to the last step; return its record, or None if a signal stopped training.

    Every event of a step is here, in order. Saving comes before validation, and a validation that fails on all ranks
    saves its step if it is not saved yet: an error in validation data costs no step. A step without log line,
    checkpoint or validation never waits for the device.
    """
    trainer, loader, checkpoints = run.trainer, run.loader, run.checkpoints
    assert trainer.step < config.training.steps, "no step is left to train"
    first_step, has_validated = trainer.step + 1, False

    def enter(step: int, phase: str) -> None:
        failure.enter(step, phase)
        run.goodput.enter(phase)

    with stoppable(run, failure), closing(run.profiling), PacedGarbageCollection() as garbage:
        run.profiling.start(first_step)
        run.meter.start()
        while True:
            enter(trainer.step + 1, "waiting for data")
            trainer.compute_time.start()
            batches = next_batches(run, failure)
            enter(trainer.step + 1, "forward, backward and update")
            stats = trainer.train_step(batches)
            compute_s = trainer.compute_time.stop()
            step = trainer.step
            run.checks.skipped.note(step, stats)
            bad_rows, lr = loader.bad_rows if trainer.counts_rows else 0, trainer.schedule(step)
            run.meter.update(step, stats, lr=lr, data_wait_s=loader.wait_s, bad_rows=bad_rows, compute_s=compute_s)
            last = any(run.data_end.after_step()) or step == config.training.steps
            if last or is_log_step(step, log_freq=config.metrics.log_freq, total_steps=config.training.steps):
                enter(step, "logging")
                record = log_step(config, run, step)
            if step == first_step:
                trainer.mesh.set_timeout(config.comm.train_timeout_s)
                if config.compile.enable and trainer.mesh.device_mesh.device_type == "cpu":
                    return_freed_memory()
            if run.ledger is not None:
                run.ledger.write(step, loader.sequences, loader.origins)
            enter(step, "comparing replicas")
            run.checks.replicas.after_step(step, last)
            enter(step, "saving")
            stops = checkpoints is not None and checkpoints.after_step(step, last)
            is_urgent = checkpoints is not None and stops and checkpoints.stopped_by != STOP_AFTER
            if run.validation is not None and (last or not is_urgent) and run.validation.is_due(step, last):
                enter(step, "validating")
                # The first one compiles the forward pass without gradients.
                trainer.mesh.set_timeout(config.comm.train_timeout_s if has_validated else config.comm.init_timeout_s)
                try:
                    requested, has_validated = run.validation.after_step(step, last), True
                except Exception:
                    if checkpoints is not None and not stops and run.validation.fails_on_all_ranks():
                        checkpoints.save_unsaved(step)
                    raise
                trainer.mesh.set_timeout(config.comm.train_timeout_s)
                if requested and not stops:
                    assert checkpoints is not None, "signals stop a run without checkpoints at once"
                    checkpoints.stop_after(step, requested)
                    stops = is_urgent = True
            if run.samples is not None and (last or not is_urgent) and run.samples.is_due(step, last):
                enter(step, "sampling")
                run.samples.after_step(step)
            run.profiling.after_step(step, failure)
            if last:
                return record
            if stops:
                return None
            garbage.after_step(step)


def log_step(config: JobConfig, run: Run, step: int) -> Record:
    """Write the record of the steps since the last log line. A collective. Raises UserError if too many steps were
    skipped, or too many rows were bad."""
    loader, counts_rows = run.loader, run.trainer.counts_rows
    epochs = loader.epochs()
    own_epochs = epochs if counts_rows else [0.0] * len(epochs)
    of_experts, loads = run.expert_loads.flush(step)
    digest = None if run.trainer.exact is None else weights_digest(run.trainer.exact)
    too_long = loader.too_long_by_name(counts=counts_rows)
    bits = {"digest": digest, "computed_by": run.computed_by}
    record = run.meter.flush(own_epochs, too_long, of_experts, run.goodput.columns, bits)
    run.loggers.write(record)
    if loads is not None:
        run.loggers.write(loads)
    run.checks.skipped.check()
    require_few_bad_rows(record, config.data.max_bad_rows)
    return record


@contextmanager
def stoppable(run: Run, failure: FailureReport) -> Iterator[None]:
    """Inside, signals request a stop. On exit, wait for a pending save. Does nothing if checkpoints are disabled."""
    if run.checkpoints is None:
        yield
        return
    failure.record_stops(run.stop)
    with closing(run.checkpoints):
        yield


def next_batches(run: Run, failure: FailureReport) -> list[Batch]:
    """This rank's microbatches of the next step, on the device.

    Raises DataError if the data is invalid, after all ranks have recorded their data errors of this step in `failure`.
    """
    try:
        with region("data"):
            return [on_device(batch, run.trainer.device) for batch in run.loader.next_step()]
    except DataError as error:
        failure.note_data_error(error)
        wait_for_ranks(run.trainer)
        raise


def wait_for_ranks(trainer: Trainer) -> None:
    """Wait until all data ranks have reached this step, by a collective in place of the step's first one."""
    with suppress(RuntimeError):  # a rank has ended
        count = torch.zeros((), dtype=torch.int64, device=trainer.device)
        dist.all_reduce(count, group=trainer.data_group)
        count.tolist()


def require_few_bad_rows(record: Record, max_bad_rows: int) -> None:
    """Raise RanksError if more rows were skipped than allowed."""
    if record.bad_rows > max_bad_rows:
        raise RanksError(
            f"data.max_bad_rows = {max_bad_rows}: {record.bad_rows} rows were skipped as bad by step {record.step}; "
            "fix the data, or raise data.max_bad_rows"
        )


if __name__ == "__main__":
    main()
    end_process(0)
