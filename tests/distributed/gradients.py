"""One training step on the ranks of a process group, compared with the one-process reference."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.distributed.reference import Reference, global_batch, rank_batches, reference_step, small_config
from titanlite.build.model import build_model, build_trainer
from titanlite.config.schema import JobConfig
from titanlite.parallel.mesh import build_mesh
from titanlite.trainer import Trainer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Errors:
    """Relative differences from the reference, the largest over parameters and ranks."""

    gradient: float
    parameter: str
    loss: float
    grad_norm: float
    same_initial_weights: bool

    @property
    def worst(self) -> float:
        return max(self.gradient, self.loss, self.grad_norm)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(value: Tensor, expected: Tensor) -> float:
    """||value - expected|| / ||expected||; not finite counts as infinitely wrong."""
    error = (torch.linalg.vector_norm(value - expected) / torch.linalg.vector_norm(expected)).item()
    return error if error == error else float("inf")


def build_on_mesh(config: JobConfig) -> tuple[Trainer, DeviceMesh]:
    """The trainer that training itself would build, and its data mesh."""
    mesh, data_mesh = build_mesh(config.parallelism, "cpu", dist.get_world_size())
    return build_trainer(config, build_model(config, mesh, CPU), mesh, data_mesh, CPU), data_mesh


def step_errors(
    settings: Sequence[str],
    masks: str,
    accumulation: int,
    mutate: Callable[[Trainer], None] | None = None,
) -> Errors:
    """Builds, takes one step, compares. mutate: changes the trainer first, to see that the comparison can fail."""
    size = dist.get_world_size()
    config = small_config(size, *settings)
    batch = global_batch(masks)
    reference = reference_step(config, batch)
    trainer, data = build_on_mesh(config)
    initial = {name: whole(p.detach()) for part in trainer.model_parts for name, p in part.named_parameters()}
    same = all(torch.equal(weight, reference.weights[name]) for name, weight in initial.items())
    if mutate is not None:
        mutate(trainer)
    stats = trainer.train_step(rank_batches(batch, data.get_local_rank(), data.size(), accumulation))
    return compare(trainer, stats.mean_loss, stats.grad_norm, reference, same)


def compare(
    trainer: Trainer, mean_loss: Tensor, grad_norm: Tensor, reference: Reference, same_initial_weights: bool
) -> Errors:
    gradients = {
        name: difference(whole(parameter.grad), reference.gradients[name])
        for part in trainer.model_parts
        for name, parameter in part.named_parameters()
        if parameter.grad is not None
    }
    names: list[set[str]] = [set()] * dist.get_world_size(trainer.pp_group)
    dist.all_gather_object(names, set(gradients), group=trainer.pp_group)
    assert set().union(*names) == reference.gradients.keys(), "a parameter has no gradient"
    worst = max(gradients, key=lambda name: gradients[name])
    loss = mean_loss.clone()
    dist.all_reduce(loss)
    return Errors(
        gradients[worst],
        worst,
        difference(loss, reference.loss),
        difference(grad_norm, reference.grad_norm),
        same_initial_weights,
    )


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` inside."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
