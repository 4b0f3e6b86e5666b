"""The comparison can fail: mistakes of tensor and pipeline parallelism, planted one at a time, are seen by it.

With -s the table of docs/numerics.md is printed: each mistake, the layout, and the error that gives it away.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from tests.distributed.gradients import replaced
from tests.distributed.layouts import BOUNDS, QWEN3, Layout, measure
from tests.distributed.test_mutations import without_last_sync
from tests.pool import run_ranks
from titanlite import trainer as trainer_module
from titanlite.build import model as build_module
from titanlite.data.loader import Batch
from titanlite.labels import IGNORE_INDEX
from titanlite.loss import cross_entropy_by_row
from titanlite.models.family import TensorStyle
from titanlite.models.init import Init
from titanlite.parallel import clip as clip_module
from titanlite.parallel import tensor as tensor_module
from titanlite.parallel.data import wrapped_modules
from titanlite.trainer import Trainer

PP = Layout((2, 1, 1, 1))
TP = Layout((1, 1, 1, 2))
TP_QWEN3 = Layout((1, 1, 1, 2), QWEN3)
REPLICATE = Layout((1, 2, 1, 1), accumulation=2)
SHARD = Layout((1, 1, 2, 1), ("parallelism.gradient_sync=last",), accumulation=2)


@dataclass(frozen=True)
class Mistake:
    """change: to the built trainer. around: what is different while it is built and runs."""

    name: str
    layout: Layout
    change: Callable[[Trainer], None] | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def divided_after_backward(trainer: Trainer) -> None:
    """The pipeline's backward pass sees the sum of losses; only the loss that is logged gets divided."""
    assert trainer.pipeline is not None
    forward_backward = trainer.pipeline.forward_backward
    trainer.pipeline._loss = lambda logits, labels, num_valid: cross_entropy_by_row(logits, labels)  # noqa: ARG005
    trainer.pipeline.forward_backward = lambda batch, num_valid: forward_backward(batch, num_valid) / num_valid


def scaled_gradients(trainer: Trainer) -> None:
    """scale_grads=True: the schedule divides gradients by its number of microbatches, on top of the loss."""
    assert trainer.pipeline is not None
    trainer.pipeline._schedule.scale_grads = True


def averaged_replicas(trainer: Trainer) -> None:
    """The reduction divides by the number of replicas, which is what torch does unless told otherwise."""
    for module in wrapped_modules(trainer.model_parts[0]):
        module.set_force_sum_reduction_for_comms(False)
        for group in module._get_fsdp_state()._fsdp_param_groups:
            group.gradient_divide_factor = None


def counts_of_the_rank(trainer: Trainer) -> None:
    """Each rank divides by its own valid tokens, as if all ranks had as many."""

    def count(batches: Sequence[Batch]) -> Tensor:
        local = torch.stack([(batch.labels != IGNORE_INDEX).sum() for batch in batches]).sum()
        return local * dist.get_world_size()

    trainer.count_valid_tokens = count


def loss_of_every_rank(trainer: Trainer) -> None:
    """All ranks of the tp axis add the same loss to the sum over the mesh."""
    trainer.counts_loss = True


def labels_of_the_next_microbatch(trainer: Trainer) -> None:
    """The last stage compares its logits with the labels of another microbatch."""
    assert trainer.pipeline is not None
    forward_backward = trainer.pipeline.forward_backward

    def shifted(batch: Batch, num_valid: Tensor) -> Tensor:
        return forward_backward(batch._replace(labels=batch.labels.roll(1, 0)), num_valid)

    trainer.pipeline.forward_backward = shifted


def norms_not_summed_over_tp(trainer: Trainer) -> None:
    """A norm's gradient stays that of the rank's own part of the sequence."""

    def forget(module: nn.Module) -> None:
        weight = module.weight
        local = nn.Parameter(weight.to_local().detach().clone())
        module.forward = lambda x: nn.functional.rms_norm(x.to_local(), local.shape, local, module.eps)
        local.register_hook(lambda gradient: setattr(weight, "grad", _like(weight, gradient)))

    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, nn.RMSNorm):
                forget(module)


def _like(weight: Tensor, gradient: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return DTensor.from_local(gradient, weight.device_mesh, weight.placements, run_check=False)


def norm_in_single_precision(trainer: Trainer) -> None:
    """A bare .float() in a norm of a float64 run."""
    norm = next(module for module in trainer.model_parts[0].modules() if isinstance(module, nn.RMSNorm))
    forward = norm.forward
    norm.forward = lambda x: forward(x.float().to(x.dtype))


def bypassed_wrapper(trainer: Trainer) -> None:
    """The forward pass calls modules whose hooks are gone, so nothing gathers and nothing reduces."""
    for module in trainer.model_parts[0].modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()


@contextmanager
def norm_without(axis: str) -> Iterator[None]:
    """The squared norm is not added up over that axis."""
    if axis == "pp":
        clip = clip_module.clip_grad_norm_

        def of_this_stage(parts: Sequence[nn.Module], max_norm: float, norm_type: str, group: object) -> Tensor:
            del group
            return clip(parts, max_norm, norm_type, dist.new_group([dist.get_rank()], use_local_synchronization=True))

        with replaced(trainer_module, "clip_grad_norm_", of_this_stage):
            yield
    else:
        with replaced(clip_module, "_shard_groups", lambda parameter: ()):  # noqa: ARG005
            yield


@contextmanager
def replicas_counted_twice() -> Iterator[None]:
    """Parameters that are whole on every rank of the tp axis are added up over it as if they were sharded."""

    def all_groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        return tuple(mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)

    with replaced(clip_module, "_shard_groups", all_groups):
        yield


@contextmanager
def stage_without_sync() -> Iterator[None]:
    """The stages of a pipeline never reduce what they have accumulated."""
    with replaced(PipelineStage, "perform_reduce_grad", lambda self, grad_scale_factor: None):  # noqa: ARG005
        yield


@contextmanager
def random_by_torch() -> Iterator[None]:
    """Initial weights come from torch's own normal_ on the parameters as they lie on the mesh, under one seed."""

    def draw(module: nn.Module, seed: int, init: Callable[[str], Init]) -> None:
        torch.manual_seed(seed)
        for name, parameter in module.named_parameters():
            distribution = init(name)
            with torch.no_grad():
                _ = parameter.fill_(1.0) if distribution.kind == "ones" else parameter.normal_(0.0, distribution.std)

    with replaced(build_module, "init_parameters_", draw):
        yield


@contextmanager
def heads_taken_for_all() -> Iterator[None]:
    """The norm of queries and keys takes a rank's heads for all of them: its gradient stays that of these heads.

    The loss of the step does not show it.
    """
    torch_style = tensor_module._torch_style

    def style_of(style: TensorStyle, module: nn.Module, shard_logits: bool) -> ParallelStyle:
        found = torch_style(style, module, shard_logits)
        if style == "head_norm":
            found.sequence_sharding = (Replicate(),)
        return found

    with replaced(tensor_module, "_torch_style", style_of):
        yield


MISTAKES = (
    Mistake("sum of losses divided only after the pipeline's backward pass", PP, divided_after_backward),
    Mistake("scale_grads=True on top of the division by tokens", PP, scaled_gradients),
    Mistake("averaging over replicas instead of summing", REPLICATE, averaged_replicas),
    Mistake("token counts of each rank instead of the global one", REPLICATE, counts_of_the_rank),
    Mistake("parameters whole on each tp rank counted twice in the norm", TP, around=replicas_counted_twice),
    Mistake("gradient norm not reduced over tp", TP, around=lambda: norm_without("tp")),
    Mistake("gradient norm not reduced over pp", PP, around=lambda: norm_without("pp")),
    Mistake("forgotten reduction at the last microbatch", SHARD, around=without_last_sync),
    Mistake("forgotten reduction at the end of a pipeline's step", Layout((2, 2, 1, 1)), around=stage_without_sync),
    Mistake("initial weights by torch's own random numbers on DTensors", TP, around=random_by_torch),
    Mistake("initial weights by torch's own random numbers on stages", PP, around=random_by_torch),
    Mistake("forward pass around the wrapper", SHARD, bypassed_wrapper),
    Mistake("a .float() in a norm", TP, norm_in_single_precision),
    Mistake("gradients of norms not summed over tp", TP, norms_not_summed_over_tp),
    Mistake("gradients of the norms of queries and keys not summed over tp", TP_QWEN3, around=heads_taken_for_all),
    Mistake("loss counted on every tp rank", TP, loss_of_every_rank),
    Mistake("labels of another microbatch", PP, labels_of_the_next_microbatch),
)


def answer(layout: Layout, change: Callable[[Trainer], None] | None) -> str:
    """What differs most, and by how much; or the exception that ends it."""
    try:
        found = measure(layout, mutate=change)
    except (RuntimeError, AssertionError, AttributeError) as error:
        return type(error).__name__
    if not found.same_initial_weights:
        return f"initial weights {found.gradient:.1e}"
    what = max(("gradient", "loss", "grad_norm"), key=lambda key: getattr(found, key))
    return f"{what} {getattr(found, what):.1e}"


def answers(indexes: Sequence[int]) -> list[tuple[str, str]]:
    """Without and with each mistake."""
    right = {layout: answer(layout, None) for layout in {MISTAKES[index].layout for index in indexes}}
    found = []
    for mistake in (MISTAKES[index] for index in indexes):
        with mistake.around():
            found.append((right[mistake.layout], answer(mistake.layout, mistake.change)))
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_mistake_is_seen(world_size: int) -> None:
    indexes = [index for index, mistake in enumerate(MISTAKES) if mistake.layout.world_size == world_size]
    ranks = run_ranks(answers, world_size, indexes)
    for position, index in enumerate(indexes):
        mistake = MISTAKES[index]
        seen = set()
        for rank in ranks:
            right, wrong = rank[position]
            assert float(right.split()[-1]) <= BOUNDS["float64"], f"{mistake.name}: {right} without it"
            error = wrong.split()[-1]
            if not error[0].isdigit() or float(error) > 10 * BOUNDS["float64"]:
                seen.add(wrong)
        assert seen, f"{mistake.name} went unseen"
        print(f"| {mistake.name} | {mistake.layout.name} | {', '.join(sorted(seen))} |")
