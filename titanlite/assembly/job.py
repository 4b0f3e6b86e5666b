"""The job of a run: its configuration after everything that a start decides, the same on all ranks."""

from dataclasses import dataclass
from typing import Any

from titanlite.config.schema import JobConfig
from titanlite.models.family import Family
from titanlite.parallel.mesh import data_degree
from titanlite.parallel.microbatches import Microbatches, divide_step


@dataclass(frozen=True)
class Job:
    """What a run is built from. config: nothing rewrites it any more. step: how an optimizer step is divided."""

    config: JobConfig
    step: Microbatches

    @property
    def family(self) -> Family:
        return self.config.family

    @property
    def hyper_parameters(self) -> Any:
        return self.config.hyper_parameters


def job_of(config: JobConfig, world_size: int) -> Job:
    """The job of a configuration in which nothing is left to decide."""
    section, training = config.parallelism, config.training
    step = divide_step(
        section,
        data_degree(section, world_size),
        global_batch_size=training.global_batch_size,
        local_batch_size=training.local_batch_size,
        num_streams=config.data.num_streams,
        bit_equal=training.bit_equal,
    )
    return Job(config, step)
