"""What building a run leaves behind: process groups and how long they wait, deterministic algorithms."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.reference import small_config
from titanlite.build import Run, build_run
from titanlite.runtime.distributed import World, set_timeout
from titanlite.runtime.launch import run_ranks


def build(folder: str, *settings: str) -> Run:
    """The run that training itself would build, in the place of the tests' process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = small_config(size, f"job.dump_folder={folder}/run", *settings)
    dist.barrier()  # all are connected
    dist.destroy_process_group()
    return build_run(config, World(rank, rank, size, "cpu"), dist.FileStore(f"{folder}/store", size), {})


def timeouts_of_a_run(folder: str) -> tuple[list[float], list[float], bool]:
    """Seconds that the groups of a run wait: as built, and once training goes on; whether the model uses no others."""
    run = build(folder, "parallelism.dp_replicate=2", "comm.init_timeout_s=77")

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


def determinism_of_a_run(folder: str, deterministic: str, warn_only: str) -> list[object]:
    torch.backends.cudnn.benchmark = True
    settings = (f"debug.deterministic={deterministic}", f"debug.deterministic_warn_only={warn_only}")
    run = build(folder, *settings)
    run.loader.close()
    run.sinks.close()
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    ]


def test_deterministic_algorithms_are_in_force_where_they_are_asked_for(tmp_path: Path) -> None:
    def found(name: str, *flags: str) -> list[object]:
        (tmp_path / name).mkdir()
        return run_ranks(determinism_of_a_run, 1, str(tmp_path / name), *flags)[0]

    assert found("on", "true", "false") == [True, False, False, True, ":4096:8"]
    assert found("warn", "true", "true")[:2] == [True, True]
    assert found("off", "false", "false")[:3] == [False, False, True]
