"""On CUDA devices: the quick start, mixed precision and compilation, no host reads, repeats, NCCL layouts."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.gradients import difference, whole
from tests.distributed.layouts import BOUNDS, LEARNING_RATE, Layout, reference_losses, schedule
from tests.distributed.program import REPOSITORY, TORCHRUN, clean_environment, rows
from tests.distributed.reference import global_batch, rank_batches, reference_step
from titanlite.build import batch_rows, build_model, build_trainer
from titanlite.data.loader import Batch
from titanlite.parallel.mesh import build_mesh
from titanlite.trainer import Trainer, on_device

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
]

BFLOAT16_BOUND = 0.05
"""Relative error of a gradient in bfloat16, whose rounding is 2^-9 = 0.002: about 25 roundings, the worst one after the
other. A wrong scale or a forgotten microbatch is beyond it."""


def train(workplace: Path, *arguments: str, ranks: int = 1) -> tuple[list[dict[str, float]], str]:
    """(rows of metrics.jsonl, output) of the quick start, run as a user does, with a log line at every step."""
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
    return rows(workplace / "out"), run.stdout + run.stderr


STEPS = ("--training.steps", "60", "--lr_schedule.warmup_steps", "10")


def test_the_quick_start_learns(tmp_path: Path) -> None:
    found, output = train(tmp_path, *STEPS)
    losses = [row["loss"] for row in found]
    assert len(losses) == 60
    assert 8.0 < losses[0] < 8.8  # ln(4096) = 8.3
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0
    assert "compute torch.bfloat16" in output
    print(f"peak memory of the quick start: {max(row['memory_gib'] for row in found):.2f} GiB")


def test_repeats_are_bit_identical(tmp_path: Path) -> None:
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        run, _ = train(tmp_path / name, "--training.steps", "12", "--debug.deterministic", "true")
        found.append([(row["loss"], row["grad_norm"]) for row in run])
    assert found[0] == found[1]


@dataclass(frozen=True)
class OneStep:
    """What a trainer on the first GPU did in one step."""

    trainer: Trainer
    batches: list[Batch]


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """NCCL with this process as its only rank."""
    torch.cuda.set_device(0)
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    torch.distributed.destroy_process_group()


def on_gpu(layout: Layout, settings: Sequence[str]) -> OneStep:
    """A trainer of the layout and its batches of one step, both on this rank's GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    config = layout.config(*settings)
    mesh, data = build_mesh(config.parallelism, "cuda", layout.world_size)
    trainer = build_trainer(config, build_model(config, mesh, device), mesh, data, device)
    parts = layout.rows // data.size() // batch_rows(config, layout.world_size)
    local = rank_batches(global_batch("silent_ranks", 0, layout.rows), data.get_local_rank(), data.size(), parts)
    return OneStep(trainer, [on_device(batch, device) for batch in local])


def gradient_errors(trainer: Trainer, expected: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: difference(whole(parameter.grad).cpu().double(), expected[name].double())
        for part in trainer.model_parts
        for name, parameter in part.named_parameters()
        if parameter.grad is not None
    }


ONE = Layout((1, 1, 1, 1), accumulation=2)
MIXED = ("training.dtype=float32", "training.mixed_precision_param=bfloat16", "training.mixed_precision_reduce=float32")
INDUCTOR = ("compile.enable=true", "compile.backend=inductor")
BY_OP = ("activation_checkpoint.mode=selective",)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        (["training.dtype=float64"], BOUNDS["float64"]),
        (["training.dtype=float32"], 1e-4),  # TF32 is off by default, kernels add in another order
        (MIXED, BFLOAT16_BOUND),
        ([*MIXED, *INDUCTOR], BFLOAT16_BOUND),
        ([*MIXED, *INDUCTOR, *BY_OP], BFLOAT16_BOUND),
        ([*MIXED, *BY_OP], BFLOAT16_BOUND),
    ],
)
def test_gradients_are_those_of_the_cpu(settings: list[str], bound: float) -> None:
    torch._dynamo.reset()
    torch.cuda.reset_peak_memory_stats()
    reference = reference_step(ONE.config("training.dtype=float64"), global_batch("silent_ranks"))
    step = on_gpu(ONE, settings)
    stats = step.trainer.train_step(step.batches)
    errors = gradient_errors(step.trainer, reference.gradients)
    assert errors.keys() == reference.gradients.keys()
    worst = max(errors, key=lambda name: errors[name])
    peak = torch.cuda.max_memory_allocated() / 2**20
    print(f"{' '.join(settings)}: {worst} off by {errors[worst]:.1e}, peak {peak:.1f} MiB")
    assert errors[worst] <= bound, worst
    assert difference(stats.mean_loss.cpu().double(), reference.loss) <= bound
    assert difference(stats.grad_norm.cpu().double(), reference.grad_norm) <= bound


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("settings", [[], list(INDUCTOR), list(BY_OP)])
def test_a_step_never_waits_for_the_device(settings: list[str]) -> None:
    torch._dynamo.reset()
    step = on_gpu(ONE, [*MIXED, "optimizer.name=AdamW", "training.max_norm=1.0", *settings])
    for _ in range(2):  # allocations, compilation
        step.trainer.train_step(step.batches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = step.trainer.train_step(step.batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stats.mean_loss.isfinite()


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
def test_layouts_over_nccl_have_the_numbers_of_one_process(axes: tuple[int, int, int, int], tmp_path: Path) -> None:
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
    """On each rank of a launcher, with NCCL: three steps in float64, under two schedules where there is a pipeline."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    for name in ("1F1B", "ZBVZeroBubble") if axes[0] > 1 else ("1F1B",):
        layout = Layout(axes, (*schedule(name), f"optimizer.lr={LEARNING_RATE}", "optimizer.weight_decay=0.0"))
        config = layout.config()
        reference = reference_step(config, global_batch("silent_ranks"))
        expected = reference_losses(config, 3, layout.rows)
        step = on_gpu(layout, [])
        for index in range(3):
            batch = global_batch("silent_ranks", index, layout.rows)
            degree = axes[1] * axes[2]
            parts = len(step.batches)
            local = rank_batches(batch, torch.distributed.get_rank(step.trainer.data_group), degree, parts)
            stats = step.trainer.train_step([on_device(part, device) for part in local])
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
