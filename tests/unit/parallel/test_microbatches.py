from typing import get_args

import pytest

from tests.configuration import EACH_SCHEDULE
from tests.distributed.reference import small_config
from titanlite.assembly.job import job_of
from titanlite.parallel.mesh import PipelineSchedule
from titanlite.parallel.microbatches import Microbatches
from titanlite.parallel.pipeline import fits_schedule

SIXTEEN = "training.global_batch_size=16"


def divided(degree: int, *settings: str, pp: int = 1) -> Microbatches:
    layout = f"parallelism.dp_shard={degree}", f"parallelism.pp={pp}"
    return job_of(small_config(degree * pp, SIXTEEN, *layout, *settings), degree * pp).step


@pytest.mark.parametrize(
    ("degree", "local_batch_size", "size", "batches", "filler_rows"),
    [
        (1, 16, 16, 1, 0),
        (2, 4, 4, 2, 0),
        (3, 4, 3, 2, 2),  # 6, 5 and 5 sequences: two microbatches of 3, not of 4
        (5, 8, 4, 1, 4),
        (7, 1, 1, 3, 5),
        (1, 7, 6, 3, 2),
    ],
)
def test_equal_microbatches(degree: int, local_batch_size: int, size: int, batches: int, filler_rows: int) -> None:
    step = divided(degree, f"training.local_batch_size={local_batch_size}")
    assert (step.size, step.per_batch, step.batches) == (size, 1, batches)
    assert step.filler_share == pytest.approx(filler_rows / (16 + filler_rows))


@EACH_SCHEDULE
@pytest.mark.parametrize("schedule", get_args(PipelineSchedule))
@pytest.mark.parametrize("sync", ["every", "hybrid"])
def test_a_pipeline_gets_as_many_microbatches_as_its_schedule_needs(schedule: str, sync: str) -> None:
    chosen = f"parallelism.pp_schedule={schedule}", f"parallelism.gradient_sync={sync}", "model.n_layers=6"
    for degree in (1, 2, 3):
        for size in (1, 2, 3):
            config = small_config(
                degree * 2,
                *(SIXTEEN, *chosen, "training.local_batch_size=5", f"parallelism.pp_microbatch_size={size}"),
                *("parallelism.pp=2", f"parallelism.dp_shard={degree}"),
            )
            step = job_of(config, 2 * degree).step
            assert fits_schedule(config.parallelism, step.per_batch)
            assert step.size <= size
            assert step.rows_per_batch * step.batches >= step.sequences
            assert step.rows_per_batch * (step.batches - 1) < step.sequences, "a batch of filler alone"
    even = divided(2, *chosen, "training.local_batch_size=4", pp=2)
    assert (even.size, even.microbatches, even.filler_share) == (1, 8, 0)
