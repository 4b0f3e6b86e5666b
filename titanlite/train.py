"""Training: `python -m titanlite.train --job.config_file X.toml [--section.key value ...]`, or the same by torchrun."""

from titanlite.runtime.failure import FailureReport, end_on_interrupt, end_process
from titanlite.runtime.orphans import end_with_launcher

if __name__ == "__main__":  # before the imports that take seconds
    end_with_launcher()
    end_on_interrupt()

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter

import torch.distributed as dist

from titanlite.build.run import Run, build_run
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.metrics.meter import Record
from titanlite.runtime.distributed import World, connect, set_timeout, world_from_environment
from titanlite.runtime.job_lock import job_lock
from titanlite.runtime.logging import log, setup_logging
from titanlite.summary import summarize


def main() -> None:
    """Config, build, fit; the same program on every rank."""
    end_with_launcher()
    with FailureReport() as failure:
        environment = dict(os.environ)
        world = world_from_environment()
        setup_logging(world.rank)
        config = load_config(sys.argv[1:], world_size=world.size, device_type=world.device_type)
        failure.store = connect(world, config.comm)
        with job_lock(config.job.dump_folder, world.rank, take_over=config.job.take_over, environment=environment):
            run_job(config, world, failure, environment)


def run_job(config: JobConfig, world: World, failure: FailureReport, environment: Mapping[str, str]) -> None:
    """Build, fit and what is to be said about it. The dump folder is this job's own."""
    assert failure.store is not None
    run = build_run(config, world, failure.store, environment)
    first_step = run.trainer.step + 1
    ended = run.data_end.before_training()
    if run.validation is not None and run.validation.missing:
        last = any(ended) or first_step > config.training.steps
        run.validation.after_step(run.start.step, last=last, on_data_error=failure.note_data_error)
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
        record = fit(config, run, failure)
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


def fit(config: JobConfig, run: Run, failure: FailureReport) -> Record | None:
    """Trains to the end; returns the last step's record, None where a signal has ended training before."""
    checkpoints = run.checkpoints
    if checkpoints is not None:
        run.stop.activate()
    try:
        return run.trainer.fit(
            run.loader,
            run.meter,
            run.sinks,
            steps=config.training.steps,
            log_freq=config.metrics.log_freq,
            gc_freq=config.training.gc_freq,
            max_bad_rows=config.data.max_bad_rows,
            after_first_step=lambda: set_timeout(run.groups, config.comm.train_timeout_s),
            data_ended=lambda: any(run.data_end.after_step()),
            after_step=partial(after_step, run, failure),
            on_data_error=failure.note_data_error,
        )
    finally:
        if checkpoints is not None:
            checkpoints.close()


def after_step(run: Run, failure: FailureReport, step: int, last: bool) -> bool:
    """Notes what was trained on, saves and validates, where that is due; whether training stops here.

    In this order, so that no fault of the validation data costs a checkpoint. A start from a step whose validation a
    kill or a signal has prevented does it first.
    """
    if run.ledger is not None:
        run.ledger.write(step, run.loader.sequences, run.loader.origins)
    stops = run.checkpoints is not None and run.checkpoints.after_step(step, last)
    if run.validation is None or (stops and not last):
        return stops
    signal_number = run.validation.after_step(step, last=last, on_data_error=failure.note_data_error)
    if signal_number and not stops:
        assert run.checkpoints is not None, "signals end a run without checkpoints at once"
        run.checkpoints.stop_after(step, signal_number)
        return True
    return stops


if __name__ == "__main__":
    main()
    end_process(0)
