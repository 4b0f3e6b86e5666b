"""The job of a run: its configuration after everything that a start decides, the same on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from titanlite.config.schema import JobConfig
from titanlite.config.stages import batch_stages, stage_configs
from titanlite.data.steps import BatchStage
from titanlite.models.family import Family
from titanlite.parallel.mesh import data_degree
from titanlite.parallel.microbatches import Microbatches, divide_step


@dataclass(frozen=True)
class Job:
    """What a run is built from. config: nothing rewrites it any more. step: how an optimizer step is divided. later:
    those of the training stages after the first one, each as of a run without other stages."""

    config: JobConfig
    step: Microbatches
    later: Sequence["Job"] = ()

    @property
    def family(self) -> Family:
        return self.config.family

    @property
    def hyper_parameters(self) -> Any:
        return self.config.hyper_parameters

    @property
    def batch_stages(self) -> tuple[BatchStage, ...]:
        """The steps of each stage, with the rows of a batch of a data rank."""
        jobs, stages = (self, *self.later), batch_stages(self.config)
        return tuple(
            replace(stage, local_batch_size=job.step.rows_per_batch) for job, stage in zip(jobs, stages, strict=True)
        )


def job_of(config: JobConfig, world_size: int) -> Job:
    """The job of a configuration in which nothing is left to decide."""
    section, degree = config.parallelism, data_degree(config.parallelism, world_size)
    steps = [
        divide_step(
            section,
            degree,
            global_batch_size=training.global_batch_size,
            local_batch_size=training.local_batch_size,
            num_streams=config.data.num_streams,
            bit_equal=training.bit_equal,
        )
        for training in (each.training for each in stage_configs(config))
    ]
    later = [Job(each, step) for each, step in zip(stage_configs(config)[1:], steps[1:], strict=True)]
    return Job(config, steps[0], later)
