"""A training step on the ranks of a process group, compared with the one-process reference."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.distributed.reference import Reference, global_batch, rank_batches, reference_step, small_config
from titanlite.assembly.job import job_of
from titanlite.assembly.model import build_model, build_trainer
from titanlite.batch import Batch
from titanlite.config.schema import JobConfig
from titanlite.parallel.mesh import AXES, Mesh, ParallelismConfig
from titanlite.ranks.distributed import CommConfig, World
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


def full_tensor(tensor: Tensor) -> Tensor:
    """The unsharded tensor. A collective for a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(value: Tensor, expected: Tensor) -> float:
    """||value - expected|| / ||expected||; infinity for NaN."""
    error = (torch.linalg.vector_norm(value - expected) / torch.linalg.vector_norm(expected)).item()
    return error if error == error else float("inf")


_meshes: dict[tuple[Any, ParallelismConfig], Mesh] = {}


def mesh_of(config: JobConfig) -> Mesh:
    """Mesh of the configuration; cached per process group, because each build opens several gloo groups."""
    world = dist.group.WORLD
    if any(known is not world for known, _ in _meshes):
        _meshes.clear()
    chosen = {key: getattr(config.parallelism, key) for key in (*AXES, "ep", "context_parallel")}
    axes = ParallelismConfig(**chosen)
    if (world, axes) not in _meshes:
        _meshes[world, axes] = connected_mesh(axes)
    mesh = copy(_meshes[world, axes])
    mesh.section = config.parallelism  # with the keys that change no group
    return mesh


def connected_mesh(section: ParallelismConfig, device_type: str = "cpu") -> Mesh:
    """Mesh over all ranks of torch's default group."""
    mesh = Mesh(section, World(dist.get_rank(), dist.get_rank(), dist.get_world_size(), device_type))
    mesh.connect(CommConfig())
    return mesh


def build_on_mesh(config: JobConfig) -> tuple[Trainer, Mesh]:
    """Build the trainer as training does."""
    mesh = mesh_of(config)
    return build_trainer(job_of(config, mesh.world.size), build_model(config, mesh, CPU), mesh, CPU), mesh


def build_without_updates(config: JobConfig) -> tuple[Trainer, Mesh]:
    """Like build_on_mesh, for comparisons of gradients: the weights stay. An update takes a fifth of a first step."""
    trainer, mesh = build_on_mesh(config)
    trainer.optimizer.step_if = lambda _ok: None  # type: ignore[assignment]
    return trainer, mesh


def local_batches(config: JobConfig, mesh: Mesh, batch: Batch, accumulation: int | None = None) -> list[Batch]:
    """This rank's microbatches of `batch`; accumulation: their number, by default as configured."""
    if accumulation is not None:
        return rank_batches(batch, mesh.data_rank, mesh.data_degree, accumulation)
    step = job_of(config, mesh.world.size).step
    rows = step.rows_per_batch * step.batches
    dealt = {"num_streams": config.data.num_streams, "together": step.size if config.training.bit_equal else 1}
    return rank_batches(batch, mesh.data_rank, mesh.data_degree, step.batches, rows=rows, **dealt)


def step_errors(
    settings: Sequence[str], masks: str, accumulation: int, mutate: Callable[[Trainer], object] | None = None
) -> Errors:
    """Build a trainer, take one step, compare with the reference. mutate: changes the trainer before the step."""
    return errors_of_step(small_config(dist.get_world_size(), *settings), global_batch(masks), accumulation, mutate)


def errors_of_step(
    config: JobConfig, batch: Batch, accumulation: int | None = None, mutate: Callable[[Trainer], object] | None = None
) -> Errors:
    """Like step_errors, for a configuration and a global batch."""
    reference = reference_step(config, batch)
    trainer, mesh = build_without_updates(config)
    same = has_weights(trainer, reference.weights)
    if mutate is not None:
        mutate(trainer)
    stats = trainer.train_step(local_batches(config, mesh, batch, accumulation))
    return compare(trainer, stats.mean_loss, stats.grad_norm, reference, same)


def has_weights(trainer: Trainer, weights: Mapping[str, Tensor]) -> bool:
    """Whether this rank's parameters equal the reference's full weights, bit for bit."""
    named = (item for part in trainer.model_parts for item in part.named_parameters())
    found = [torch.equal(full_tensor(parameter.detach()), weights[name]) for name, parameter in named]
    return all(found)  # not earlier: full_tensor is a collective


def compare(
    trainer: Trainer, mean_loss: Tensor, grad_norm: Tensor, reference: Reference, same_initial_weights: bool
) -> Errors:
    gradients = {
        name: difference(full_tensor(parameter.grad), reference.gradients[name])
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
