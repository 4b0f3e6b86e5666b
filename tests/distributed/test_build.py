"""What building a run leaves behind: process groups and how long they wait, deterministic algorithms, its counts."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.gradients import replaced
from tests.distributed.reference import GLOBAL_BATCH, SEQ_LEN, TOKENS, VOCAB_SIZE, small_config
from tests.pool import run_ranks
from titanlite.assembly import run as build_module
from titanlite.assembly.run import Run, build_run
from titanlite.batch import StepStats
from titanlite.runtime.distributed import World


def build(folder: str, *settings: str) -> Run:
    """The run that training itself would build, in the place of the tests' process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = small_config(size, f"job.dump_folder={folder}/run", *settings)
    dist.barrier()  # all are connected
    dist.destroy_process_group()
    return build_run(config, World(rank, rank, size, "cpu"), dist.FileStore(f"{folder}/store", size), {})


def timeouts_of_a_run(folder: str) -> tuple[list[float], list[float], bool]:
    """Seconds that the groups of a run wait: as built, and once training goes on; whether the model uses no others."""
    validation = ("enable=true", "sources.0.kind=tokens", f"sources.0.path={TOKENS}")
    settings = (*(f"validation.{setting}" for setting in validation), "checkpoint.enable=true")
    run = build(folder, "parallelism.dp_replicate=2", "comm.init_timeout_s=77", *settings)

    def waits() -> list[float]:
        backends = [group._get_backend(torch.device("cpu")) for group in run.mesh.groups]
        return [backend.options._timeout / timedelta(seconds=1) for backend in backends]

    at_start = waits()
    run.mesh.set_timeout(55)
    used = {
        group.group_name
        for parameter in run.trainer.model_parts[0].parameters()
        for group in parameter.device_mesh.get_all_groups()
    }
    run.loader.close()
    run.sinks.close()
    return at_start, waits(), used <= {group.group_name for group in run.mesh.groups}


@pytest.mark.slow
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


@pytest.mark.slow
def test_deterministic_algorithms_are_in_force_where_they_are_asked_for(tmp_path: Path) -> None:
    def found(name: str, *flags: str) -> list[object]:
        (tmp_path / name).mkdir()
        return run_ranks(determinism_of_a_run, 1, str(tmp_path / name), *flags)[0]

    assert found("on", "true", "false") == [True, False, False, True, ":4096:8"]
    assert found("warn", "true", "true")[:2] == [True, True]
    assert found("off", "false", "false")[:3] == [False, False, True]


def data_rank_and_streams(folder: str) -> tuple[int, list[int]]:
    run = build(folder, "parallelism.dp_replicate=2", "training.local_batch_size=4", "data.num_streams=8")
    run.loader.close()
    run.sinks.close()
    return dist.get_rank(run.trainer.data_group), list(run.loader.stream_ids)


def test_each_rank_reads_the_streams_of_its_place_on_the_data_axis(tmp_path: Path) -> None:
    """Ranks that read one another's would go unseen in all sums, and so in all numbers."""
    assert run_ranks(data_rank_and_streams, 4, str(tmp_path)) == [[rank, [rank, rank + 4]] for rank in range(4)]


PEAK = 1e15


def counts_of_a_run(folder: str) -> tuple[list[float], list[str]]:
    """Tokens and operations that a run counts, read off a record; what the peak of the device was asked for."""
    asked = []

    def peak(device: torch.device, dtype: torch.dtype) -> float:
        asked.append(f"{device} {dtype}")
        return PEAK

    settings = ("training.dtype=float32", "training.mixed_precision_param=bfloat16", "training.local_batch_size=2")
    with replaced(build_module, "device_peak_flops", peak):
        run = build(folder, *settings)
    zero = torch.zeros(())
    stats = StepStats(zero, zero, torch.tensor(5), torch.tensor(False), torch.zeros(3, 1))
    run.meter.update(1, stats, lr=0.1, data_wait_s=0, bad_rows=0)
    record = run.meter.flush()
    run.loader.close()
    run.sinks.close()
    assert record.mfu is not None
    flops_per_token = record.mfu * 2 * PEAK / record.tokens_per_second
    return [record.tokens_seen, record.tokens_per_second * record.step_time_s, flops_per_token], asked


def test_a_run_counts_the_tokens_of_all_ranks_and_the_operations_of_its_own_sequence_length(tmp_path: Path) -> None:
    tokens = GLOBAL_BATCH * SEQ_LEN
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48  # queries and output, keys and values, feed-forward
    flops_per_token = 6 * (2 * layer + VOCAB_SIZE * 32) + 12 * 2 * SEQ_LEN * 32
    for counts, asked in run_ranks(counts_of_a_run, 2, str(tmp_path)):
        assert counts == pytest.approx([tokens, tokens, flops_per_token])
        assert asked == ["cpu torch.bfloat16"]
