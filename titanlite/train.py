"""Training: `python -m titanlite.train --job.config_file X.toml [--section.key value ...]`, or the same by torchrun."""

import os
import sys

import torch.distributed as dist

from titanlite.build import Run, build_run
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.metrics.meter import Record
from titanlite.metrics.sinks import METRICS_FILE
from titanlite.runtime.distributed import connect, set_timeout, world_from_environment
from titanlite.runtime.failure import FailureReport
from titanlite.runtime.logging import log


def main() -> None:
    """Config, build, fit; the same program on every rank."""
    with FailureReport() as failure:
        environment = dict(os.environ)
        world = world_from_environment()
        config = load_config(sys.argv[1:], world_size=world.size, device_type=world.device_type)
        failure.store = connect(world, config.comm)
        run = build_run(config, world, failure.store, environment)
        record = fit(config, run)
        run.loader.close()
        run.sinks.close()
        summarize(config, record)
        dist.destroy_process_group()


def fit(config: JobConfig, run: Run) -> Record:
    """Trains to the end; returns the last step's record."""
    groups = [run.mesh.get_group(axis) for axis in run.mesh.mesh_dim_names or ()]
    return run.trainer.fit(
        run.loader,
        run.meter,
        run.sinks,
        steps=config.training.steps,
        log_freq=config.metrics.log_freq,
        gc_freq=config.training.gc_freq,
        max_bad_rows=config.data.max_bad_rows,
        after_first_step=lambda: set_timeout([dist.group.WORLD, *groups], config.comm.train_timeout_s),
    )
