"""Training: `python -m titanlite.train --job.config_file X.toml [--section.key value ...]`, or the same by torchrun."""

from titanlite.runtime.failure import FailureReport, end_on_interrupt, end_process
from titanlite.runtime.orphans import end_with_launcher

if __name__ == "__main__":  # before the imports that take seconds
    end_with_launcher()
    end_on_interrupt()

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from time import perf_counter

import torch
import torch.distributed as dist

from titanlite.assembly.run import Run, build_run
from titanlite.batch import Batch
from titanlite.config.describe import show_help
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.forward import on_device
from titanlite.metrics.meter import Record, is_log_step
from titanlite.runtime.distributed import World, connect, world_from_environment
from titanlite.runtime.errors import DataError, UserError
from titanlite.runtime.garbage import PacedGarbageCollection
from titanlite.runtime.job_lock import job_lock
from titanlite.runtime.logging import log, setup_logging
from titanlite.summary import summarize
from titanlite.trainer import Trainer


def main() -> None:
    """Config, build, train; the same program on every rank."""
    end_with_launcher()
    with FailureReport() as failure:
        environment = dict(os.environ)
        world = world_from_environment()
        setup_logging(world.rank)
        show_help(sys.argv[1:])
        config = load_config(sys.argv[1:], world_size=world.size, device_type=world.device_type)
        failure.store = connect(world, config.comm)
        with job_lock(config.job.dump_folder, world.rank, take_over=config.job.take_over, environment=environment):
            run_job(config, world, failure, environment)


def run_job(config: JobConfig, world: World, failure: FailureReport, environment: Mapping[str, str]) -> None:
    """Builds, trains, and logs how the run ended. The dump folder is locked for this job."""
    assert failure.store is not None
    run = build_run(config, world, failure.store, environment)
    first_step = run.trainer.step + 1
    ended = run.data_end.before_training()
    if run.validation is not None and run.validation.missing:  # a kill or a signal has prevented it
        last = any(ended) or first_step > config.training.steps
        run.validation.after_step(run.start.step, last, failure)
    if any(ended):
        log.info(
            "Nothing to do: the data has ended after step %d: %s", run.trainer.step, describe_end(config, run, ended)
        )
    elif first_step > config.training.steps:
        log.info(
            "Nothing to do: the run is finished, step %d of training.steps = %d. To go on: %s",
            *(run.start.step, config.training.steps),
            "a new run from these weights, by --checkpoint.initial_load_path; there is no optimizer state to go on with"
            if run.start.model_only
            else f"--training.steps {2 * run.start.step}",
        )
    else:
        start = perf_counter()
        record = train(config, run, failure)
        if record is None:
            assert run.checkpoints is not None
            log.info(
                "Stopped by %s after step %d, which is saved: the same command%s goes on from there",
                *(run.checkpoints.stopped_by, run.trainer.step),
                " without --checkpoint.load_step" if config.checkpoint.load_step >= 0 else "",
            )
        else:
            if record.step < config.training.steps:
                ended = run.loader.ended
                log.info("The data has ended after step %d: %s", record.step, describe_end(config, run, ended))
            summarize(config, record, record.step - first_step + 1, perf_counter() - start)
    run.loader.close()
    if run.validation is not None:
        run.validation.close()
    run.sinks.close()
    if run.ledger is not None:
        run.ledger.close()
    dist.destroy_process_group()


def describe_end(config: JobConfig, run: Run, ended: Sequence[bool]) -> str:
    """Which sources have ended, and what to do to train on."""
    keys = [
        f"{name}, which data.sources.{n}.epochs = {source.epochs} lets be read no more"
        for n, (name, source) in enumerate(zip(run.loader.source_names, config.data.sources, strict=True))
        if ended[n]
    ]
    accept = """--checkpoint.accept_changes '["data"]'"""
    return f"{', '.join(keys)}; to read more of it, raise epochs (-1: for ever), with {accept}"


def train(config: JobConfig, run: Run, failure: FailureReport) -> Record | None:
    """All steps from where the run stands; returns the last one's record, None where a signal has ended training.

    What happens in a step stands here, in order. Saving comes before validation, so that no fault of its data costs a
    checkpoint. Between two log steps the host only launches work: the device is asked nothing.
    """
    trainer, loader, checkpoints = run.trainer, run.loader, run.checkpoints
    assert trainer.step < config.training.steps, "nothing is left to train"
    first_step = trainer.step + 1
    with stoppable(run), PacedGarbageCollection(config.training.gc_freq) as garbage:
        run.meter.start()
        while True:
            batches = next_batches(run, failure)
            stats = trainer.train_step(batches)
            step = trainer.step
            bad_rows = loader.bad_rows if trainer.counts_rows else 0
            run.meter.update(step, stats, lr=trainer.schedule(step), data_wait_s=loader.wait_s, bad_rows=bad_rows)
            last = any(run.data_end.after_step()) or step == config.training.steps
            if last or is_log_step(step, log_freq=config.metrics.log_freq, total_steps=config.training.steps):
                record = run.meter.flush()
                run.sinks.write(record)
                require_few_bad_rows(record, config.data.max_bad_rows)
            if step == first_step:
                run.mesh.set_timeout(config.comm.train_timeout_s)
            if run.ledger is not None:
                run.ledger.write(step, loader.sequences, loader.origins)
            stops = checkpoints is not None and checkpoints.after_step(step, last)
            if run.validation is not None and (last or not stops):
                requested = run.validation.after_step(step, last, failure)
                if requested and not stops:
                    assert checkpoints is not None, "signals end a run without checkpoints at once"
                    checkpoints.stop_after(step, requested)
                    stops = True
            if last:
                return record
            if stops:
                return None
            garbage.after_step(step)


@contextmanager
def stoppable(run: Run) -> Iterator[None]:
    """Inside, signals ask training to stop; on every way out a save under way is finished. Only with checkpoints."""
    if run.checkpoints is None:
        yield
        return
    run.stop.activate()
    with closing(run.checkpoints):
        yield


def next_batches(run: Run, failure: FailureReport) -> list[Batch]:
    """This rank's microbatches of the next step, on the device.

    Raises DataError where its data cannot be used, after all ranks have noted theirs of this step in `failure`.
    """
    try:
        return [on_device(batch, run.trainer.device) for batch in run.loader.next_step()]
    except DataError as error:
        failure.note_data_error(error)
        wait_for_ranks(run.trainer)
        raise


def wait_for_ranks(trainer: Trainer) -> None:
    """Until all data ranks have come to this step: takes part in its first collective, in place of the step."""
    with suppress(RuntimeError):  # a rank that is gone will not come
        nothing = torch.zeros((), dtype=torch.int64, device=trainer.device)
        dist.all_reduce(nothing, group=trainer.data_group)
        nothing.tolist()


def require_few_bad_rows(record: Record, max_bad_rows: int) -> None:
    """Raises UserError, on all ranks alike."""
    if record.bad_rows > max_bad_rows:
        raise UserError(
            f"data.max_bad_rows = {max_bad_rows}: {record.bad_rows} rows were skipped as bad by step {record.step}; "
            "mend the data, or raise data.max_bad_rows"
        )


if __name__ == "__main__":
    main()
    end_process(0)
