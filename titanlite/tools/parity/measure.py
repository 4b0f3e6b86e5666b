"""Measure the trainer on the ranks, one layout after the other."""

import hashlib
import json
import logging
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import titanlite
from titanlite.assembly.data import build_data, build_tokenizer
from titanlite.assembly.job import job_of
from titanlite.assembly.model import build_model, build_optimizers, build_trainer
from titanlite.batch import FILLER, IGNORE_INDEX, Batch
from titanlite.config.schema import JobConfig
from titanlite.config.stages import batch_stages
from titanlite.data.loader import Loader
from titanlite.models.family import parameters_of
from titanlite.models.init import local_region
from titanlite.optim.schedule import build_factors, build_schedule
from titanlite.parallel.clip import clip_grad_norm_
from titanlite.parallel.compile import CompileConfig
from titanlite.parallel.data import running_dtypes
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.recompute import ActivationCheckpointConfig
from titanlite.ranks.distributed import World
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import REDISTRIBUTION
from titanlite.runtime.torch_internals import reset_compiler
from titanlite.tools.parity.layouts import Layout, config_of
from titanlite.tools.parity.operands import Operands
from titanlite.tools.parity.routing import Routing, carry_places
from titanlite.tools.parity.shrink import gradient_config
from titanlite.trainer import Trainer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """One optimizer step, measured before its update. Uses JSON types only.

    loss: this rank's share of the mean loss; in the reference, the mean loss. rows: number in the run of each sequence
    of this rank -> hash of its tokens, labels and positions. gradients: name -> norm of the difference between the full
    gradient and the reference's, None if the reference lacks the name; in the reference, norm of the gradient. flipped:
    positions that chose other experts than in the reference, of `routed` ones, see Routing. operands: see
    Operands.counts.
    """

    loss: float
    grad_norm: float
    num_valid: int
    skipped: bool
    rows: dict[str, str]
    gradients: dict[str, float | None]
    flipped: int = 0
    routed: int = 0
    operands: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """The steps of one layout in one pass. weights: name -> hash of the full initial parameter. updates: as
    Step.gradients, of the change of the parameters by the configuration's own optimizer; only in the float64 pass.
    dtypes: of parameters, computation and reductions, as they run."""

    weights: dict[str, str]
    steps: list[Step]
    updates: dict[str, float | None] = field(default_factory=dict)
    dtypes: list[str] = field(default_factory=list)

    @staticmethod
    def of_json(value: Any) -> "Measurement":
        return Measurement(**{**value, "steps": [Step(**step) for step in value["steps"]]})


def own_dtypes(config: JobConfig) -> tuple[str, str, str]:
    """The dtypes (parameters, compute, reduction) of a resolved configuration."""
    training = config.training
    return training.dtype, training.mixed_precision_param, training.mixed_precision_reduce


def passes(config: JobConfig) -> list[JobConfig]:
    """The configuration of the steps in float64, and in its own dtypes if they differ.

    In the second one, float8 is neither compiled nor recomputed, since its operands are replaced: see Operands.
    """
    config = gradient_config(config)
    training = replace(
        config.training, dtype="float64", mixed_precision_param="float64", mixed_precision_reduce="float64"
    )
    precise = replace(config, training=training)
    if config.training == training:
        return [precise]
    if config.float8.recipe != "none":
        config = replace(config, compile=CompileConfig(), activation_checkpoint=ActivationCheckpointConfig())
    return [precise, config]


def measure_layouts(config: JobConfig, layouts: Sequence[Layout], steps: int, folder: str) -> list[list[Any]]:
    """Measure each layout and pass on this rank (called by run_ranks). Returns a Measurement as JSON for each.

    config: resolved. folder: contains the reference's gradients; see record_status.
    """
    REDISTRIBUTION.setLevel(logging.ERROR)  # training does not gather
    results: list[list[Any]] = []
    for layout in layouts:
        results.append([])
        for number, settings in enumerate(passes(config_of(config, layout))):
            with record_status(f"{layout}, {settings.training.dtype}", folder):
                own = config if number == 0 else None
                mesh = connected_mesh(settings, layout)
                results[-1].append(asdict(measure_layout(settings, mesh, steps, Path(folder), own)))
    return results


_MESHES: dict[tuple[tuple[int, ...], int], Mesh] = {}


def connected_mesh(config: JobConfig, layout: Layout) -> Mesh:
    """The mesh of a layout of all ranks, the same for all its schedules and dtypes. A collective."""
    key = layout.degrees, layout.ep
    if key not in _MESHES:
        rank = dist.get_rank()
        _MESHES[key] = Mesh(config.parallelism, World(rank, rank, layout.world_size, "cpu"))
        _MESHES[key].connect(config.comm)
    return _MESHES[key]


def measure_layout(config: JobConfig, mesh: Mesh, steps: int, folder: Path, own: JobConfig | None) -> Measurement:
    """Measure this rank's part of the steps, with the same components as training.

    Every step starts from the reference's weights, so that differences do not grow from step to step. own: the
    configuration whose updates are measured, too; None: no updates.
    """
    if config.compile.enable:
        reset_compiler()  # the compiled blocks of all layouts share the recompilation limit
    loader = build_data(job_of(config, mesh.world.size), mesh, build_tokenizer(config))
    try:
        trainer = build_trainer(job_of(config, mesh.world.size), build_model(config, mesh, CPU), mesh, CPU)
        weights = {name: hash_of(full_tensor(parameter.detach())) for name, parameter in named_parameters(trainer)}
        measured = []
        routing, operands = Routing(trainer.mixtures, largest_step(config)), None
        # Below float64, one near tie that falls otherwise would change gradients by far more than rounding.
        replays = any(name != "float64" for name in own_dtypes(config))
        if replays and config.float8.recipe != "none":
            operands = Operands(trainer.model_parts, largest_step(config))
        if trainer.mixtures or operands is not None:
            carry_places(trainer, loader)
        for step in range(steps):
            if trainer.mixtures:
                routing.compare_with(read_tensors(reference_file(folder, "routing", step)), replays=replays)
            if operands is not None:
                operands.compare_with(read_tensors(reference_file(folder, "operands", step)))
            if step:
                load_weights_(trainer, reference_file(folder, "weights", step))
            batches, rows = mask_and_hash(loader, config)
            stats = trainer.train_step(batches)
            gradients = {name: parameter.grad for name, parameter in named_parameters(trainer)}
            measured.append(
                Step(
                    stats.mean_loss.item(),
                    stats.grad_norm.item(),
                    int(stats.num_valid),
                    bool(stats.skipped),
                    rows,
                    differences_from(gradients, reference_file(folder, "gradients", step)),
                    routing.flipped,
                    routing.compared,
                    {} if operands is None else operands.counts,
                )
            )
        updates = {} if own is None else measure_updates(trainer, own, steps, folder)
        dtypes = [f"{dtype}".removeprefix("torch.") for dtype in running_dtypes(trainer.model_parts[0])]
        return Measurement(weights, measured, updates, dtypes)
    finally:
        loader.close()


def named_parameters(trainer: Trainer) -> Iterable[tuple[str, nn.Parameter]]:
    """The parameters of all model parts on this rank."""
    return parameters_of(trainer.model_parts).items()


def measure_updates(trainer: Trainer, config: JobConfig, steps: int, folder: Path) -> dict[str, float | None]:
    """Measurement.updates: clip the reference's gradients and update with the configuration's own optimizer."""
    load_weights_(trainer, reference_file(folder, "weights", 0))
    optimizer = build_optimizers(config, parameters_of(trainer.model_parts), trainer.mesh, CPU)
    schedule = build_schedule(config.lr_schedule, config.optimizer.lr, config.training.steps, batch_stages(config))
    factors = build_factors(config.optimizer, config.training.steps)
    for step in range(steps):
        gradients = read_tensors(reference_file(folder, "gradients", step))
        for name, parameter in named_parameters(trainer):
            parameter.grad = shard_of(gradients[name], parameter)
        clip_grad_norm_(trainer.model_parts, clipping_norm(config, gradients), trainer.pp_group)
        optimizer.set_lr(schedule(step + 1), factors(step + 1))
        optimizer.step_if(torch.ones((), dtype=torch.bool))
    return differences_from(parameters_of(trainer.model_parts), reference_file(folder, "updated"))


def clipping_norm(config: JobConfig, gradients: Mapping[str, Tensor]) -> float:
    """The norm to clip to: at most half of the gradients' own, so that clipping always acts; 0 if disabled."""
    norm = nn.utils.get_total_norm(gradients.values()).item()
    return min(config.training.max_norm, norm / 2)


def load_weights_(trainer: Trainer, file: Path) -> None:
    """Replace this rank's weights by those of the reference."""
    reference = read_tensors(file)
    for name, parameter in named_parameters(trainer):
        local_region(parameter)[0].copy_(local_box(reference[name], parameter))


def shard_of(full: Tensor, parameter: Tensor) -> Tensor:
    """The part of `full` that this rank holds of the parameter, in the same placement."""
    local = local_box(full, parameter).clone()
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def local_box(full: Tensor, parameter: Tensor) -> Tensor:
    """The part of `full` that this rank holds of the parameter; shares its memory."""
    local, _, offset = local_region(parameter)
    return full[tuple(slice(begin, begin + size) for begin, size in zip(offset, local.shape, strict=True))]


def differences_from(tensors: Mapping[str, Tensor | None], reference_file: Path) -> dict[str, float | None]:
    """L2 norm of each tensor's difference from the reference file, by parameter name.

    None if the shapes differ or the reference has no such tensor. A missing tensor (None) counts as zero. Gathers
    one tensor at a time.
    """
    reference = read_tensors(reference_file)
    differences: dict[str, float | None] = {}
    for name, tensor in tensors.items():
        expected = reference.get(name)
        if tensor is None:
            differences[name] = None if expected is None else torch.linalg.vector_norm(expected).item()
            continue
        value = full_tensor(tensor.detach()).to(torch.float64)
        if expected is None or expected.shape != value.shape:
            differences[name] = None
        else:
            differences[name] = torch.linalg.vector_norm(value - expected).item()
    return differences


def read_tensors(file: Path) -> dict[Any, Tensor]:
    found: dict[Any, Tensor] = torch.load(file, mmap=True, weights_only=True)
    return found


Written = Literal["gradients", "weights", "routing", "operands", "updated"]


def reference_file(folder: Path, what: Written, step: int = 0) -> Path:
    """A file of the reference's tensors by name, in float64.

    gradients: of a step, counted from 0. weights: before it. routing: its choices of experts, by block. operands: of
    float8, see Operands; in float32. updated: the weights after the updates of the configuration's own optimizer.
    """
    return folder / f"{what}-{step}.pt"


def full_tensor(tensor: Tensor) -> Tensor:
    """The global tensor; for a DTensor a collective over its mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def record_status(what: str, folder: str) -> Iterator[None]:
    """Write what this rank is doing, and the error if it fails, to folder/rank-R.json, which the command reads."""
    file = Path(folder, f"rank-{dist.get_rank()}.json")
    file.write_text(json.dumps({"what": what}))
    try:
        yield
    except Exception as error:
        file.write_text(json.dumps({"what": what, "error": _one_line(error), "time": time.time()}))
        raise


def _one_line(error: Exception) -> str:
    """The message; for errors other than UserError also the last line in titanlite's own code or a plugin's."""
    text = " ".join(str(error).split())
    if isinstance(error, UserError):
        return text
    package, others = f"{Path(titanlite.__file__).parent}", ("<", f"{Path(traceback.__file__).parent}")
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(package)
        or not (frame.filename.startswith(others) or "site-packages" in frame.filename)
    ]
    own = [frame for frame in own if frame.name != record_status.__name__]
    root = f"{Path(package).parent}/"
    where = f" ({own[-1].filename.removeprefix(root)}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text}{where}"


def largest_step(config: JobConfig) -> int:
    """Positions of the largest step of all training stages."""
    return max(stage.tokens for stage in batch_stages(config))


def mask_and_hash(loader: Loader, config: JobConfig) -> tuple[list[Batch], dict[str, str]]:
    """The batches of the next step with labels masked by `keep_label`, and the hash of each row's tokens, labels and
    positions (if any) by its number in the run; without filler rows."""
    rows: dict[str, str] = {}
    masked = []
    for batch in loader.next_step():
        labels = batch.labels.clone()
        for index, number in enumerate(batch.sequences.tolist()):
            if number == FILLER:
                continue
            keeps = keep_label(config, number, number - loader.first_sequence, labels.shape[1])
            labels[index, ~keeps] = IGNORE_INDEX
            positions = [] if batch.positions is None else [batch.positions[index]]
            rows[str(number)] = hash_of(torch.stack([batch.tokens[index], labels[index], *positions]))
        masked.append(batch._replace(labels=labels))
    return masked, rows


def keep_label(config: JobConfig, number: int, place: int, seq_len: int) -> Tensor:
    """Which labels of sequence `number` of the run, at `place` in its step, stay valid: bool (seq_len).

    Depends only on debug.seed, the number and the place. Each sequence keeps a random share between 0 and 1; the first
    sequence of a step keeps no labels, the second all. A batch of one sequence keeps about half.
    """
    random = np.random.default_rng([config.debug.seed, number])
    share, drawn = random.random(), random.random(seq_len)
    fixed = {0: 0.0, 1: 1.0} if config.training.global_batch_size > 1 else {0: 0.5}
    return torch.from_numpy(drawn < fixed.get(place, share))


def hash_of(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's bytes."""
    assert tensor.numel(), "nothing to hash"
    data: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data).hexdigest()
