"""Building a run: timeouts of process groups, deterministic algorithms, token and FLOP counts."""

import gc
import os
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed.reference import GLOBAL_BATCH, SEQ_LEN, TOKENS, VOCAB_SIZE, small_config
from tests.pool import run_ranks
from titanlite.assembly import run as build_module
from titanlite.assembly.job import job_of
from titanlite.assembly.run import Run, build_run
from titanlite.batch import StepStats
from titanlite.ranks.distributed import World

pytestmark = pytest.mark.slow


def build(folder: str, *settings: str) -> Run:
    """Build the run as training does, replacing the tests' process group."""
    gc.freeze()  # the loop of an earlier run has unfrozen all objects, and the next one would visit them again
    rank, size = dist.get_rank(), dist.get_world_size()
    config = small_config(size, f"job.dump_folder={folder}/run", *settings)
    dist.barrier()  # until all ranks are connected
    dist.destroy_process_group()
    return build_run(
        job_of(config, size), World(rank, rank, size, "cpu"), dist.FileStore(f"{folder}/store", size), {}, ExitStack()
    )


def timeouts_of_a_run(folder: str) -> tuple[list[float], list[float], bool]:
    """(group timeouts in s after the build, timeouts in training, whether the model uses only these groups)"""
    validation = ("enable=true", "sources.0.kind=tokens", f"sources.0.path={TOKENS}")
    settings = (*(f"validation.{setting}" for setting in validation), "checkpoint.enable=true")
    run = build(folder, "parallelism.dp_replicate=2", "parallelism.cp=2", "comm.init_timeout_s=77", *settings)

    def timeouts() -> list[float]:
        backends = [group._get_backend(torch.device("cpu")) for group in run.trainer.mesh.groups]
        return [backend.options._timeout / timedelta(seconds=1) for backend in backends]

    at_start = timeouts()
    run.trainer.mesh.set_timeout(55)
    used = {
        group.group_name
        for parameter in run.trainer.model_parts[0].parameters()
        for group in parameter.device_mesh.get_all_groups()
    }
    used |= {run.trainer.mesh.data_group.group_name, getattr(run.trainer.mesh.cp_group, "group_name", "no group of cp")}
    run.loader.close()
    run.loggers.close()
    return at_start, timeouts(), used <= {group.group_name for group in run.trainer.mesh.groups}


def test_all_groups_have_the_configured_timeout(tmp_path: Path) -> None:
    for at_start, later, complete in run_ranks(timeouts_of_a_run, 4, str(tmp_path)):
        assert set(at_start) == {77.0}
        assert set(later) == {55.0}
        assert complete


def determinism_of_a_run(folder: str, deterministic: str) -> list[object]:
    torch.backends.cudnn.benchmark = True
    run = build(folder, f"debug.deterministic={deterministic}")
    run.loader.close()
    run.loggers.close()
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    ]


def test_deterministic_algorithms_are_set_as_configured(tmp_path: Path) -> None:
    def found(deterministic: str) -> list[object]:
        (tmp_path / deterministic).mkdir()
        return run_ranks(determinism_of_a_run, 1, str(tmp_path / deterministic), deterministic)[0]

    assert found("true") == [True, False, False, True, ":4096:8"]
    assert found("false")[:3] == [False, False, True]


def data_rank_and_streams(folder: str) -> tuple[int, list[int]]:
    run = build(folder, "parallelism.dp_replicate=2", "training.local_batch_size=4", "data.num_streams=8")
    run.loader.close()
    run.loggers.close()
    return dist.get_rank(run.trainer.data_group), list(run.loader.stream_ids)


def test_each_rank_reads_the_streams_of_its_data_rank(tmp_path: Path) -> None:
    """Sums over ranks, and so all other tests, would not change if ranks swapped streams."""
    assert run_ranks(data_rank_and_streams, 4, str(tmp_path)) == [[rank, [rank, rank + 4]] for rank in range(4)]


PEAK = 1e15


def counts_of_a_run(folder: str) -> tuple[list[float], list[str]]:
    """[tokens seen, tokens per step, FLOPs per token] of a metrics record, and the device and dtype of the peak."""
    peak_arguments = []

    def peak(device: torch.device, dtype: torch.dtype) -> float:
        peak_arguments.append(f"{device} {dtype}")
        return PEAK

    settings = ("training.dtype=float32", "training.mixed_precision_param=bfloat16", "training.local_batch_size=2")
    with patch.object(build_module, "device_peak_flops", peak):
        run = build(folder, *settings)
    zero = torch.zeros(())
    stats = StepStats(zero, zero, zero, torch.tensor(5), torch.tensor(False), torch.zeros(3, 1), zero, zero, zero)
    run.meter.update(1, stats, lr=0.1, data_wait_s=0, bad_rows=0)
    record = run.meter.flush()
    run.loader.close()
    run.loggers.close()
    assert record.mfu is not None
    flops_per_token = record.mfu * 2 * PEAK / record.tokens_per_second
    return [record.tokens_seen, record.tokens_per_second * record.step_time_s, flops_per_token], peak_arguments


def test_run_counts_tokens_of_all_ranks_and_flops_of_its_sequence_length(tmp_path: Path) -> None:
    tokens = GLOBAL_BATCH * SEQ_LEN
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48  # queries and output, keys and values, feed-forward
    flops_per_token = 6 * (2 * layer + VOCAB_SIZE * 32) + 12 * 2 * SEQ_LEN * 32
    for counts, peak_arguments in run_ranks(counts_of_a_run, 2, str(tmp_path)):
        assert counts == pytest.approx([tokens, tokens, flops_per_token])
        assert peak_arguments == ["cpu torch.bfloat16"]
