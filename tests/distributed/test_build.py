"""What building a run leaves behind: its process groups and how long they wait."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.reference import small_config
from titanlite.build import build_run
from titanlite.runtime.distributed import World, set_timeout
from titanlite.runtime.launch import run_ranks


def timeouts_of_a_run(folder: str) -> tuple[list[float], list[float], bool]:
    """Seconds that the groups of a run wait: as built, and once training goes on; whether the model uses no others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = small_config(size, "parallelism.dp_replicate=2", f"job.dump_folder={folder}/run", "comm.init_timeout_s=77")
    dist.barrier()  # all are connected
    dist.destroy_process_group()  # a run makes its own
    run = build_run(config, World(rank, rank, size, "cpu"), dist.FileStore(f"{folder}/store", size), {})

    def waits() -> list[float]:
        backends = [group._get_backend(torch.device("cpu")) for group in run.groups]
        return [backend.options._timeout / timedelta(seconds=1) for backend in backends]

    at_start = waits()
    set_timeout(run.groups, 55)
    used = {
        group.group_name
        for parameter in run.trainer.model_parts[0].parameters()
        for group in parameter.device_mesh.get_all_groups()
    }
    run.loader.close()
    run.sinks.close()
    return at_start, waits(), used <= {group.group_name for group in run.groups}


def test_all_groups_wait_as_long_as_the_configuration_says(tmp_path: Path) -> None:
    for at_start, later, complete in run_ranks(timeouts_of_a_run, 4, str(tmp_path)):
        assert set(at_start) == {77.0}
        assert set(later) == {55.0}
        assert complete
