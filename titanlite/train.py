"""Training: `python -m titanlite.train --job.config_file X.toml [--section.key value ...]`, or the same by torchrun."""

from titanlite.runtime.failure import FailureReport, end_on_interrupt, end_process

if __name__ == "__main__":
    end_on_interrupt()  # before the imports that take seconds

import os
import shlex
import sys
from pathlib import Path
from time import perf_counter

import torch.distributed as dist

from titanlite.build import CONFIG_COPY, Run, build_run
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.metrics.meter import Record
from titanlite.metrics.sinks import METRICS_FILE
from titanlite.runtime.distributed import connect, set_timeout, world_from_environment
from titanlite.runtime.logging import log


def main() -> None:
    """Config, build, fit; the same program on every rank."""
    with FailureReport() as failure:
        environment = dict(os.environ)
        world = world_from_environment()
        config = load_config(sys.argv[1:], world_size=world.size, device_type=world.device_type)
        failure.store = connect(world, config.comm)
        run = build_run(config, world, failure.store, environment)
        start = perf_counter()
        record = fit(config, run, failure)
        summarize(config, record, perf_counter() - start)
        run.loader.close()
        run.sinks.close()
        dist.destroy_process_group()


def fit(config: JobConfig, run: Run, failure: FailureReport) -> Record:
    """Trains to the end; returns the last step's record."""
    return run.trainer.fit(
        run.loader,
        run.meter,
        run.sinks,
        steps=config.training.steps,
        log_freq=config.metrics.log_freq,
        gc_freq=config.training.gc_freq,
        max_bad_rows=config.data.max_bad_rows,
        after_first_step=lambda: set_timeout(run.groups, config.comm.train_timeout_s),
        on_data_error=failure.note_data_error,
    )


def summarize(config: JobConfig, record: Record, train_s: float) -> None:
    """What was done, where it is, and what one would do next."""
    folder = Path(config.job.dump_folder)
    again = f"CONFIG_FILE={shlex.quote(str(folder / CONFIG_COPY))}"  # all that was given, also on the command line
    log.info(
        "Done: %d steps, %s tokens, final loss %.4f, %s tokens/s",
        record.step,
        f"{record.tokens_seen:,}",
        record.loss,
        f"{record.tokens_seen / train_s:,.0f}",
    )
    log.info("Outputs: %s (a row per logged step), %s (the configuration)", folder / METRICS_FILE, folder / CONFIG_COPY)
    log.info("Next: train longer      %s ./run_train.sh --training.steps %d", again, 4 * record.step)
    log.info("      on two processes  NGPU=2 %s ./run_train.sh", again)
    log.info("      on your own text  see docs/data.md")


if __name__ == "__main__":
    main()
    end_process(0)
