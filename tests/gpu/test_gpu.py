"""On CUDA devices: the checks of scripts/gpu_check.py, the quick start, traces, draws, NCCL layouts."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.drawing import drawing_families
from tests.distributed.gradients import connected_mesh, difference, full_tensor
from tests.distributed.layouts import BOUNDS, LEARNING_RATE, Layout, reference_losses, schedule
from tests.distributed.program import REPOSITORY, TORCHRUN, clean_environment, rows
from tests.distributed.reference import global_batch, rank_batches, reference_step
from titanlite.assembly.job import job_of
from titanlite.assembly.model import build_model, build_trainer
from titanlite.batch import Batch
from titanlite.forward import on_device
from titanlite.models.randomness import row_keys, seed_microbatch, uniform
from titanlite.ranks.distributed import CommConfig, World, world_from_environment
from titanlite.ranks.network import connect, init_process_group
from titanlite.trainer import Trainer

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
]


def train(workplace: Path, *arguments: str, ranks: int = 1) -> tuple[list[dict[str, float]], str]:
    """(rows of steps in metrics.jsonl, output) of the quick start, run as a user does, with a log line at each step."""
    run = subprocess.run(
        [
            sys.executable,
            *TORCHRUN,
            "--nproc-per-node",
            str(ranks),
            "-m",
            "titanlite.train",
            "--job.config_file",
            str(REPOSITORY / "configs" / "quickstart.toml"),
            "--job.dump_folder",
            str(workplace / "out"),
            "--metrics.log_freq",
            "1",
            *arguments,
        ],
        cwd=workplace,
        env=clean_environment() | {"PYTHONPATH": str(REPOSITORY), "TITANLITE_CACHE": str(workplace.parent / "cache")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [row for row in rows(workplace / "out") if "loss" in row], run.stdout + run.stderr


def test_the_checks_of_a_gpu_pass(tmp_path: Path) -> None:
    """At small sizes: kernels, steps, waits, checkpoints, two ranks. What they check is not repeated here."""
    command = [sys.executable, str(REPOSITORY / "scripts" / "gpu_check.py"), "--tiny", "--out", str(tmp_path)]
    run = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


STEPS = ("--training.steps", "60", "--lr_schedule.warmup_steps", "10")


def test_the_quick_start_learns(tmp_path: Path) -> None:
    found, output = train(tmp_path, *STEPS)
    losses = [row["loss"] for row in found]
    assert len(losses) == 60
    assert 8.0 < losses[0] < 8.8  # ln(4096) = 8.3
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0
    assert "compute torch.bfloat16" in output
    print(f"peak memory of the quick start: {max(row['memory_gib'] for row in found):.2f} GiB")


def test_traces_have_kernels_and_snapshots_are_written(tmp_path: Path) -> None:
    one_step = ("--profiling.wait", "2", "--profiling.warmup", "1", "--profiling.active", "1")
    both = ("--profiling.enable_trace", "--profiling.enable_memory_snapshot")
    train(tmp_path, "--training.steps", "5", *both, *one_step)
    trace = tmp_path / "out" / "traces" / "step-4" / "rank-0.json.gz"
    categories = {event.get("cat") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"kernel", "user_annotation"} <= categories
    snapshot = tmp_path / "out" / "memory_snapshots" / "step-4" / "rank-0.pickle"
    assert snapshot.stat().st_size > 0


@dataclass(frozen=True)
class OneStep:
    """A trainer on a GPU and its batches of one step."""

    trainer: Trainer
    batches: list[Batch]


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """The process group of training, with this process as its only rank."""
    join(World(0, 0, 1, "cuda"))
    yield
    torch.distributed.destroy_process_group()


def join(world: World) -> None:
    init_process_group(world, connect(world, CommConfig()), CommConfig())


def on_gpu(layout: Layout, settings: Sequence[str]) -> OneStep:
    """A trainer and the batches of one step, of random rows, on this rank's GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    config = layout.config(*settings)
    mesh = connected_mesh(config.parallelism, "cuda")
    trainer = build_trainer(job_of(config, mesh.world.size), build_model(config, mesh, device), mesh, device)
    parts = job_of(config, mesh.world.size).step.batches
    local = rank_batches(global_batch("silent_ranks", 0, layout.rows), mesh.data_rank, mesh.data_degree, parts)
    return OneStep(trainer, [on_device(batch, device) for batch in local])


def gradient_errors(trainer: Trainer, expected: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: difference(full_tensor(parameter.grad).cpu().double(), expected[name].double())
        for part in trainer.model_parts
        for name, parameter in part.named_parameters()
        if parameter.grad is not None
    }


ONE = Layout((1, 1, 1, 1), accumulation=2)
MIXED = ("training.dtype=float32", "training.mixed_precision_param=bfloat16", "training.mixed_precision_reduce=float32")


@pytest.mark.usefixtures("process_group")
def test_a_step_that_draws_never_waits_for_the_device() -> None:
    """Of a family that draws random numbers by row; others: scripts/gpu_check.py."""
    with drawing_families():
        step = on_gpu(ONE, [*MIXED, "optimizer.name=AdamW", "training.max_norm=1.0", "model.family=drawing"])
    for _ in range(2):  # allocations
        step.trainer.train_step(step.batches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = step.trainer.train_step(step.batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stats.mean_loss.isfinite()


def test_draws_by_row_key_match_the_cpu() -> None:
    sequences = torch.tensor([0, 1, 2**40])
    drawn = uniform(row_keys(2**63 - 1, 10**9, sequences.cuda()), "layers.0", 100, 30)
    assert torch.equal(drawn.cpu(), uniform(row_keys(2**63 - 1, 10**9, sequences), "layers.0", 100, 30))


def test_draws_from_torch_repeat_for_the_same_microbatch() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    drawn = []
    for sequence in (3, 4, 3):
        seed_microbatch(0, 1, sequence, 0, device)
        drawn.append(torch.rand(8, device=device))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def several(*axes: int) -> object:
    size = Layout(axes).world_size
    return pytest.param(axes, marks=pytest.mark.skipif(size > GPUS, reason=f"needs {size} GPUs"))


@pytest.mark.parametrize(
    "axes",
    [
        several(1, 1, 2, 1),
        several(1, 2, 1, 1),
        several(1, 1, 1, 2),
        several(2, 1, 1, 1),
        several(1, 2, 2, 1),
        several(1, 1, 2, 2),
        several(1, 2, 1, 2),
        several(2, 1, 1, 2),
        several(2, 1, 2, 1),
        several(2, 2, 1, 1),
    ],
)
def test_layouts_over_nccl_match_one_process(axes: tuple[int, int, int, int], tmp_path: Path) -> None:
    world_size = Layout(axes).world_size
    run = subprocess.run(
        [sys.executable, *TORCHRUN, "--nproc-per-node", str(world_size), __file__, *map(str, axes)],
        cwd=tmp_path,
        env=clean_environment() | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("verified") == world_size


def verify_rank(axes: tuple[int, int, int, int]) -> None:
    """Verify the steps in float64 on this rank, with NCCL; pipelines use two schedules."""
    world = world_from_environment()
    join(world)
    for name in ("1F1B", "ZBVZeroBubble") if axes[0] > 1 else ("1F1B",):
        layout = Layout(axes, (*schedule(name), f"optimizer.lr={LEARNING_RATE}", "optimizer.weight_decay=0.0"))
        config = layout.config()
        reference = reference_step(config, global_batch("silent_ranks"))
        expected = reference_losses(config, layout.rows)
        step = on_gpu(layout, [])
        for index in range(len(expected)):
            batch = global_batch("silent_ranks", index, layout.rows)
            degree = axes[1] * axes[2]
            parts = len(step.batches)
            local = rank_batches(batch, torch.distributed.get_rank(step.trainer.data_group), degree, parts)
            stats = step.trainer.train_step([on_device(part, world.device) for part in local])
            loss = stats.mean_loss.clone()
            torch.distributed.all_reduce(loss)
            assert difference(loss.cpu(), expected[index]) <= BOUNDS["float64"]
            if index == 0:
                errors = gradient_errors(step.trainer, reference.gradients)
                assert max(errors.values()) <= BOUNDS["float64"], errors
                assert difference(stats.grad_norm.cpu(), reference.grad_norm) <= BOUNDS["float64"]
    print("verified", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    verify_rank(tuple(int(size) for size in sys.argv[1:]))  # type: ignore[arg-type]
