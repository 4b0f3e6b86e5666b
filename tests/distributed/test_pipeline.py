"""Pipeline steps: numbers of collectives and forward passes, logged values, failing stages."""

import copy
import re
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from tests.configuration import EACH_SCHEDULE
from tests.distributed.gradients import CPU, build_on_mesh, difference, local_batches, mesh_of
from tests.distributed.layouts import Layout, is_supported, schedule
from tests.distributed.reference import global_batch, reference_step, small_config
from tests.distributed.test_step import OperationCount
from tests.pool import run_ranks
from titanlite.assembly.job import job_of
from titanlite.assembly.model import build_forward, build_model
from titanlite.metrics.meter import Meter, Work
from titanlite.parallel.mesh import Mesh, ParallelismConfig, PipelineSchedule
from titanlite.parallel.pipeline import fits_schedule, local_stages, num_stages
from titanlite.ranks.distributed import CommConfig, World
from titanlite.ranks.launch import RankError
from titanlite.trainer import Trainer

NAMES = [name for name in PipelineSchedule.__args__ if is_supported(Layout((2, 1, 1, 1), schedule(name)))]


def seconds_for_a_lost_receive() -> float:
    """Seconds until a receive from another stage fails, after a limit of one second for training."""
    mesh = Mesh(ParallelismConfig(pp=2), World(dist.get_rank(), dist.get_rank(), 4, "cpu"))
    mesh.connect(CommConfig(train_timeout_s=1))
    begin = time.monotonic()
    if mesh.coordinate["pp"] == 0:
        group = mesh.group("pp")
        receive = dist.P2POp(dist.irecv, torch.zeros(1), group=group, group_peer=1)
        with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
            dist.batch_isend_irecv([receive])[0].wait()
    else:
        time.sleep(2)
    return time.monotonic() - begin


@pytest.mark.slow
def test_a_receive_between_stages_has_the_time_limit_of_training() -> None:
    assert max(run_ranks(seconds_for_a_lost_receive, 4, timeout_s=30)) < 10


def built(layout: Layout) -> tuple[Trainer, list[Any], Any]:
    """(trainer, batches of one step, reference of that step)"""
    config = layout.config()
    batch = global_batch("silent_ranks", 0, layout.rows)
    trainer, mesh = build_on_mesh(config)
    return trainer, local_batches(config, mesh, batch), reference_step(config, batch)


def count_forwards(trainer: Trainer) -> list[Counter[str]]:
    """Forward passes by module, per model part; the counters grow with each step."""
    counts: list[Counter[str]] = []
    for part in trainer.model_parts:
        count: Counter[str] = Counter()
        for name, module in part.named_modules():
            if re.fullmatch(r"layers\.\d+|tok_embeddings|output", name):
                module.register_forward_hook(lambda *_, name=name, count=count: count.update([name]))
        counts.append(count)
    return counts


def logged(layouts: list[Layout]) -> list[tuple[float, float, float, float, list[int]]]:
    """(logged loss, logged grad_norm, loss and grad_norm of one process, forward passes per module), by layout"""
    found = []
    for layout in layouts:
        trainer, batches, reference = built(layout)
        counts = count_forwards(trainer)
        meter = Meter(dist.group.WORLD, torch.device("cpu"), work=lambda _: Work(1, 0.0), peak_flops=None)
        meter.update(1, trainer.train_step(batches), lr=0.0, data_wait_s=0.0, bad_rows=0)
        record = meter.flush()
        forwards = sorted({number for count in counts for number in count.values()})
        found.append((record.loss, record.grad_norm, reference.loss.item(), reference.grad_norm.item(), forwards))
    return found


def verify_log(layouts: list[Layout]) -> None:
    for rank, found in enumerate(run_ranks(logged, layouts[0].world_size, layouts)):
        for layout, (loss, grad_norm, right_loss, right_norm, forwards) in zip(layouts, found, strict=True):
            case = f"rank {rank}, {layout}"
            assert loss == pytest.approx(right_loss, rel=1e-11, abs=0), case
            assert grad_norm == pytest.approx(right_norm, rel=1e-11, abs=0), case
            _, replicate, shard, _ = layout.axes
            assert forwards == [layout.rows // (replicate * shard)], case


@pytest.mark.slow
def test_every_rank_logs_the_global_loss_and_runs_each_microbatch_once() -> None:
    """Also in the first step: shapes of stages are given, so no forward pass infers them."""
    verify_log([Layout((2, 1, 1, 1), schedule(name)) for name in NAMES])


@pytest.mark.soak
def test_the_log_is_right_with_tensor_and_data_parallelism() -> None:
    verify_log([Layout((2, 1, 1, 2), schedule(name)) for name in NAMES])
    verify_log([Layout((2, 1, 2, 1), schedule(name)) for name in NAMES])


UNITS = 4  # embedding, two blocks, head


def collectives(layouts: list[Layout]) -> list[dict[str, int]]:
    """Collectives by name in the second step of each layout."""
    found = []
    for layout in layouts:
        trainer, batches, _ = built(layout)
        trainer.train_step(batches)
        with OperationCount() as count:  # also fails if the host reads a tensor
            trainer.train_step(batches)
        found.append(dict(count.collectives))
    return found


def collectives_before_evaluation() -> dict[str, int]:
    config = small_config(2, "parallelism.pp=2", "parallelism.dp_shard=1")
    mesh = mesh_of(config)
    parts = build_model(config, mesh, CPU)
    with OperationCount() as count:
        build_forward(job_of(config, 2), parts, mesh, CPU)
    return dict(count.collectives)


def test_all_stages_meet_before_some_of_them_send() -> None:
    """NCCL refuses a first call of a group that is not one of all its ranks. Also in commands that do not train."""
    assert run_ranks(collectives_before_evaluation, 2) == [{"allreduce": 1}] * 2


SYNCS = (("1F1B", "every"), ("1F1B", "last"), ("1F1B", "hybrid"), ("Interleaved1F1B", "hybrid"))
SYNCS += (("InterleavedZeroBubble", "every"), ("InterleavedZeroBubble", "last"))


@pytest.mark.slow
@EACH_SCHEDULE
@pytest.mark.parametrize(
    ("sharded", "replicated"),
    [((3, 5), (4,)), pytest.param((0, 1, 2, 4), (2, 3), marks=pytest.mark.soak)],
    ids=["few", "others"],
)
def test_stages_reduce_once_in_each_schedule_step(sharded: tuple[int, ...], replicated: tuple[int, ...]) -> None:
    """A schedule step is a local batch if gradient_sync=every, otherwise an optimizer step. Of SYNCS, by number."""
    layouts = [
        Layout(axes, (*schedule(name), f"parallelism.gradient_sync={sync}"), accumulation=2)
        for axes, numbers in (((2, 1, 2, 1), sharded), ((2, 2, 1, 1), replicated))
        for name, sync in (SYNCS[number] for number in numbers)
    ]
    ranks = run_ranks(collectives, 4, layouts)
    for index, layout in enumerate(layouts):
        steps = 2 if "parallelism.gradient_sync=every" in layout.settings else 1
        for stage in ((0, 2), (1, 3)):  # ranks of the same data rank
            scatters, sums = (
                sum(ranks[rank][index].get(name, 0) for rank in stage) for name in ("reduce_scatter_base", "allreduce")
            )
            # Per rank: one for the number of valid tokens, one for the norm over pp, one for the norm over dp_shard.
            if layout.axes == (2, 1, 2, 1):
                assert (scatters, sums) == (UNITS * steps, 2 * 3), layout
            else:  # `replicate` on a CPU: one reduction per stage
                stages = 2 if "parallelism.pp_schedule=1F1B" in layout.settings else 4
                assert (scatters, sums) == (0, stages * steps + 2 * 2), layout


def runs_with(name: PipelineSchedule, counts: list[int]) -> dict[int, str]:
    """Error of torch's schedule by number of microbatches; "" if the gradients are correct."""
    pp, rank = dist.get_world_size(), dist.get_rank()
    section = ParallelismConfig(pp=pp, pp_schedule=name)
    indexes, total = local_stages(section, rank), num_stages(section)
    errors = {}
    for count in counts:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(total)])
        mine = copy.deepcopy([model[index] for index in indexes])
        tokens = torch.randn(count, 4, dtype=torch.float64)
        model(tokens).square().sum().backward()
        shape = torch.empty(1, 4, dtype=torch.float64, device="meta", requires_grad=True)
        stages = [
            PipelineStage(part, index, total, torch.device("cpu"), input_args=shape, output_args=shape)
            for part, index in zip(mine, indexes, strict=True)
        ]
        try:
            get_schedule_class(name)(
                stages if len(stages) > 1 else stages[0],
                n_microbatches=count,
                loss_fn=lambda out, target: out.square().sum() + 0 * target.sum(),
                scale_grads=False,
            ).step(
                *((tokens,) if 0 in indexes else ()),
                target=tokens if total - 1 in indexes else None,
                return_outputs=False,
            )
        except ValueError as error:
            errors[count] = str(error)
            continue
        for part, index in zip(mine, indexes, strict=True):
            assert part.weight.grad is not None
            assert difference(part.weight.grad, model[index].weight.grad) <= 1e-12, (name, count)
        errors[count] = ""
    return errors


def all_run_with(counts: list[int]) -> dict[str, dict[int, str]]:
    return {name: runs_with(name, counts) for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_schedule_fits_exactly_the_numbers_of_microbatches_that_torch_accepts(pp: int) -> None:
    counts = list(range(1, 9))
    rejected = 0
    for by_name in run_ranks(all_run_with, pp, counts):
        for name, errors in by_name.items():
            for count in counts:
                fits = fits_schedule(ParallelismConfig(pp=pp, pp_schedule=name), count)
                assert fits != bool(errors[str(count)]), f"{name}, {count}: {errors}"
                rejected += not fits
    assert rejected > 0


def failing_stage(name: str) -> None:
    """Take a step in which the stage of rank 1 fails at its third microbatch."""
    trainer, batches, _ = built(Layout((2, 1, 1, 1), schedule(name)))
    calls = 0

    def fail(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal calls
        del module, args
        calls += 1
        if calls == 3 and dist.get_rank() == 1:
            raise ValueError("planted in a stage")

    trainer.model_parts[0].register_forward_pre_hook(fail)
    trainer.train_step(batches)


@pytest.mark.parametrize(
    "name", ["1F1B", pytest.param("InterleavedZeroBubble", marks=[pytest.mark.slow, EACH_SCHEDULE])]
)
def test_failing_stage_stops_all_ranks_with_its_error(name: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError) as raised:
        run_ranks(failing_stage, 2, name)
    assert time.monotonic() - begin < 60  # far below the timeout of 300 s
    assert str(raised.value).startswith("rank 1 failed:")
    assert str(raised.value).count("ValueError: planted in a stage") == 1
    assert "RuntimeError" not in str(raised.value).split("rank 0 failed")[0], "torch's own error instead of the stage's"
