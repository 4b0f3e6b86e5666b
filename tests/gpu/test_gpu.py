"""On CUDA devices: the quick start, mixed precision and compilation, no host reads, repeats, NCCL layouts."""

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
from torch.nn.attention.flex_attention import BlockMask

from tests.distributed.documents import documents_reference, packed_batch
from tests.distributed.drawing import drawing_families
from tests.distributed.gradients import connected_mesh, difference, full_tensor
from tests.distributed.layouts import BOUNDS, LEARNING_RATE, Layout, reference_losses, schedule
from tests.distributed.program import REPOSITORY, TORCHRUN, clean_environment, rows
from tests.distributed.reference import global_batch, rank_batches, reference_step
from titanlite.assembly.job import job_of
from titanlite.assembly.model import build_model, build_trainer
from titanlite.batch import Batch
from titanlite.forward import on_device
from titanlite.models.attention import attend, attention_mask, document_arguments
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

BFLOAT16_BOUND = 0.05
"""Relative error of a gradient in bfloat16: about 25 worst-case roundings of 2^-9 = 0.002 each. A wrong scale or a
missing microbatch exceeds it."""


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


def on_gpu(layout: Layout, settings: Sequence[str], batch: Batch | None = None) -> OneStep:
    """A trainer and its batches of one step on this rank's GPU. batch: all rows; None: a random batch."""
    device = torch.device("cuda", torch.cuda.current_device())
    config = layout.config(*settings)
    mesh = connected_mesh(config.parallelism, "cuda")
    trainer = build_trainer(job_of(config, mesh.world.size), build_model(config, mesh, device), mesh, device)
    parts = job_of(config, mesh.world.size).step.batches
    batch = global_batch("silent_ranks", 0, layout.rows) if batch is None else batch
    local = rank_batches(batch, mesh.data_rank, mesh.data_degree, parts)
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


WIDE_HEADS = ("model.dim=64",)  # head dimension 16, the minimum of FlexAttention; the default is 8


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        (["training.dtype=float64"], BOUNDS["float64"]),
        (["training.dtype=float32"], 1e-4),
        (["training.dtype=float32", *WIDE_HEADS], 1e-4),
        (["training.dtype=float32", *WIDE_HEADS, *BY_OP], 1e-4),
        (["training.dtype=float32", *WIDE_HEADS, "activation_checkpoint.mode=full"], 1e-4),
        ([*MIXED, *WIDE_HEADS], BFLOAT16_BOUND),
        ([*MIXED, *WIDE_HEADS, *INDUCTOR], BFLOAT16_BOUND),
        ([*MIXED, *WIDE_HEADS, *INDUCTOR, *BY_OP], BFLOAT16_BOUND),
    ],
)
def test_packed_documents_match_separate_documents(settings: list[str], bound: float) -> None:
    torch._dynamo.reset()
    batch = packed_batch(ONE.rows)
    shape = [setting for setting in settings if setting.startswith("model.")]
    reference = documents_reference(ONE.config("training.dtype=float64", *shape), batch)
    step = on_gpu(ONE, settings, batch)
    stats = step.trainer.train_step(step.batches)
    errors = gradient_errors(step.trainer, reference.gradients)
    assert errors.keys() == reference.gradients.keys()
    worst = max(errors, key=lambda name: errors[name])
    print(f"documents, {' '.join(settings)}: {worst} off by {errors[worst]:.1e}")
    assert errors[worst] <= bound, worst
    assert difference(stats.mean_loss.cpu().double(), reference.loss) <= bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 1, 24), (2, 2, 64)])
def test_the_fused_kernel_inside_documents(heads: tuple[int, int, int], dtype: torch.dtype, bound: float) -> None:
    """Forward and backward over several blocks of scores, the last one partial; other documents do not recompile."""
    n_heads, n_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(0)
    torch._dynamo.reset()
    for index, starts in enumerate([[0, 130, 131, 256], [0], [0, 1, 299], [0, 128, 200, 256]]):
        positions = torch.ones(2, 300, dtype=torch.int64)
        positions[0, starts] = positions[1, 0] = 0
        ids = document_arguments(positions)["document_ids"]
        shapes = [(2, n, 300, head_dim) for n in (n_heads, n_kv_heads, n_kv_heads, n_heads)]
        *inputs, upstream = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        exact = [tensor.double().requires_grad_() for tensor in inputs]
        expected = attend(*exact, attention_mask(ids, torch.float64, head_dim))
        wanted = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
        own = [tensor.cuda().requires_grad_() for tensor in inputs]
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            mask = attention_mask(ids.cuda(), dtype, head_dim)
            assert isinstance(mask, BlockMask)
            out = attend(*own, mask)
            found = [out, *torch.autograd.grad(out, own, upstream.cuda())]
        for name, value, right in zip(("out", "queries", "keys", "values"), found, wanted, strict=True):
            assert difference(value.cpu().double(), right) <= bound, (name, starts)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("settings", [[], list(INDUCTOR), list(BY_OP), ["model.family=drawing"]])
def test_a_step_never_waits_for_the_device(settings: list[str], packed: bool) -> None:
    torch._dynamo.reset()
    with drawing_families():
        batch = packed_batch(ONE.rows) if packed else None
        shape = WIDE_HEADS if packed else ()
        step = on_gpu(ONE, [*MIXED, *shape, "optimizer.name=AdamW", "training.max_norm=1.0", *settings], batch)
    for _ in range(2):  # allocations, compilation
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
