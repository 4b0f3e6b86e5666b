"""From a JobConfig to finished parts, top to bottom in the order of construction: the only code that sees both."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.load import dump_config
from titanlite.config.schema import JobConfig
from titanlite.data.loader import Loader, build_loader
from titanlite.data.tokenizer import prepare_tokenizer
from titanlite.loss import mean_loss_share
from titanlite.metrics.meter import Meter
from titanlite.metrics.sinks import METRICS_FILE, Sinks, build_sinks
from titanlite.models import resolve_model
from titanlite.models.family import LanguageModel
from titanlite.models.init import init_parameters_
from titanlite.optim.optimizer import build_optimizer
from titanlite.optim.schedule import build_schedule
from titanlite.parallel.compile import compiled_loss
from titanlite.parallel.data import resolve_gradient_sync, running_dtypes
from titanlite.parallel.mesh import AXES, build_mesh, data_degree, data_rank, shard_logits
from titanlite.parallel.parallelize import parallelize
from titanlite.parallel.pipeline import (
    Pipeline,
    StageShapes,
    describe_stages,
    keep_units_,
    local_stages,
    resolve_reshard_after_forward,
    rows_per_batch,
    split_stages,
)
from titanlite.runtime.determinism import apply_determinism
from titanlite.runtime.distributed import World, init_process_group, set_timeout
from titanlite.runtime.dump_folder import prepare_dump_folder
from titanlite.runtime.environment import environment_lines
from titanlite.runtime.logging import log, setup_logging
from titanlite.runtime.memory import device_memory_bytes
from titanlite.runtime.peak_flops import device_peak_flops
from titanlite.trainer import DTYPES, Trainer

CONFIG_COPY = "config.toml"


@dataclass(frozen=True)
class Run:
    """The finished parts of one run. groups: all process groups that training uses, with the start-up timeout."""

    trainer: Trainer
    loader: Loader
    meter: Meter
    sinks: Sinks
    groups: tuple[dist.ProcessGroup, ...]


def build_run(config: JobConfig, world: World, store: dist.Store, environment: Mapping[str, str]) -> Run:
    """Builds everything, a line in the log for each part.

    config: checked and resolved. store: where the ranks meet. environment: as the program found it.
    """
    setup_logging(world.rank)
    apply_determinism(config.debug)
    log.info("Job: %s, outputs in %s", config.job.description or "no description", config.job.dump_folder)
    log.info("Device: %s, %.1f GiB", device_name(world.device), device_memory_bytes(world.device) / 2**30)
    # Data comes before the ranks are tied together, so that a long index build by one of them runs into no timeout.
    loader = build_data(config, world)
    group = init_process_group(world, store, config.comm)
    mesh, data_mesh = build_mesh(config.parallelism, world.device_type, world.size)
    groups = (group, *(mesh.get_group(axis) for axis in AXES), data_mesh.get_group())
    set_timeout(groups, config.comm.init_timeout_s)  # torch makes a mesh's groups with its own default, 30 minutes
    log.info("Building %d-D device mesh with %s, %s", mesh.ndim, list(AXES), list(mesh.shape))
    model_parts = build_model(config, mesh, world.device)
    trainer = build_trainer(config, model_parts, mesh, data_mesh, world.device)
    describe_batch(config, data_degree(config.parallelism, world.size))
    for line in environment_lines(environment, os.environ):
        log.info("Environment: %s", line)
    prepare_outputs(config, world)
    meter = build_meter(config, world, group)
    sinks = build_sinks(config.metrics, config.job.dump_folder, world.rank, config.training.steps)
    return Run(trainer, loader, meter, sinks, groups)


def build_data(config: JobConfig, world: World) -> Loader:
    """The tokenizer and this data rank's loader; on first use also the tokenizer's training and the index."""
    _, hyper_parameters = resolve_model(config.model)
    tokenizer = prepare_tokenizer(config.tokenizer, config.data.sources, vocab_size=hyper_parameters.vocab_size)
    log.info("Tokenizer: %s", tokenizer.description if tokenizer else "none, the sources hold tokens")
    loader = build_loader(
        config.data,
        tokenizer,
        seq_len=config.training.seq_len,
        vocab_size=hyper_parameters.vocab_size,
        global_batch_size=config.training.global_batch_size,
        local_batch_size=batch_rows(config, world.size),
        data_rank=data_rank(config.parallelism, world.rank, world.size),
        data_degree=data_degree(config.parallelism, world.size),
    )
    log.info("Data: %s", loader.description)
    return loader


def build_model(config: JobConfig, mesh: DeviceMesh, device: torch.device) -> list[LanguageModel]:
    """This rank's parts of the model with initial weights: the whole of it, or its pipeline stages.

    Built on meta, cut into stages, parallelized, and only then given memory: each rank draws its own share.
    """
    training = config.training
    family, hyper_parameters = resolve_model(config.model)
    parts: list[LanguageModel] = []
    for stage in local_stages(config.parallelism, mesh["pp"].get_local_rank()):
        with torch.device("meta"):
            part = family.build(hyper_parameters).to(DTYPES[training.dtype])
        part.tie_weights()
        if not parts:
            count = sum(parameter.numel() for parameter in part.parameters())
            log.info("Model: %s %s, %s parameters", family.name, config.model.flavor, f"{count:,}")
        plan = family.plan(hyper_parameters)
        if config.parallelism.pp > 1:
            stages = split_stages(part, plan, config.parallelism)
            if not parts:
                log.info("Pipeline: %s, stages %s", config.parallelism.pp_schedule, describe_stages(plan, stages))
            plan = keep_units_(part, plan, stages[stage])
        applied = parallelize(
            part,
            plan,
            mesh,
            shard_logits=shard_logits(config.parallelism),
            recompute=config.activation_checkpoint,
            compilation=config.compile,
            param_dtype=DTYPES[training.mixed_precision_param],
            reduce_dtype=DTYPES[training.mixed_precision_reduce],
            reshard_after_forward=resolve_reshard_after_forward(config.parallelism),
        )
        for what in applied if not parts else ():
            log.info("Applied %s to the model", what)
        part.to_empty(device=device)
        part.tie_weights()
        part.init_buffers(device)
        init_parameters_(part, config.debug.seed, lambda name: family.init(hyper_parameters, name))
        parts.append(part)
    parameters, compute, reduce = running_dtypes(parts[0])
    log.info("Dtypes: parameters %s, compute %s, gradient reduction %s", parameters, compute, reduce)
    return parts


def build_trainer(
    config: JobConfig,
    model_parts: list[LanguageModel],
    mesh: DeviceMesh,
    data_mesh: DeviceMesh,
    device: torch.device,
) -> Trainer:
    """The trainer of this rank's model parts."""
    loss = compiled_loss(mean_loss_share, config.compile)
    return Trainer(
        model_parts=model_parts,
        pipeline=build_pipeline(config, model_parts, mesh, device, loss) if config.parallelism.pp > 1 else None,
        loss=loss,
        shard_logits=shard_logits(config.parallelism),
        optimizer=build_optimizer(config.optimizer, model_parts, device),
        schedule=build_schedule(config.lr_schedule, config.optimizer.lr, config.training.steps),
        sync=resolve_gradient_sync(config.parallelism.gradient_sync, mesh),
        mesh=mesh,
        data_group=data_mesh.get_group(),
        device=device,
        max_norm=config.training.max_norm,
        norm_type=config.training.norm_type,
    )


def build_pipeline(
    config: JobConfig,
    model_parts: list[LanguageModel],
    mesh: DeviceMesh,
    device: torch.device,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Pipeline:
    """The schedule of this rank's stages."""
    section, training = config.parallelism, config.training
    _, hyper_parameters = resolve_model(config.model)
    rows = batch_rows(config, mesh.size())
    shapes = StageShapes.of_microbatch(
        section,
        seq_len=training.seq_len,
        dim=hyper_parameters.dim,
        vocab_size=hyper_parameters.vocab_size,
        dtype=DTYPES[training.mixed_precision_param],
    )
    return Pipeline(
        model_parts,
        section,
        mesh,
        device,
        shapes=shapes,
        num_microbatches=rows // section.pp_microbatch_size,
        loss=loss,
    )


def batch_rows(config: JobConfig, world_size: int) -> int:
    """Sequences in a batch of this rank, as the loader gives them: several make an optimizer step."""
    training = config.training
    degree = data_degree(config.parallelism, world_size)
    return rows_per_batch(config.parallelism, training.local_batch_size, training.global_batch_size // degree)


def build_meter(config: JobConfig, world: World, group: dist.ProcessGroup) -> Meter:
    """Counts over all ranks; the peak of the device only where it is known."""
    family, hyper_parameters = resolve_model(config.model)
    return Meter(
        group,
        world.device,
        tokens_per_step=config.training.global_batch_size * config.training.seq_len,
        flops_per_token=family.flops_per_token(hyper_parameters, config.training.seq_len),
        peak_flops=device_peak_flops(world.device, DTYPES[config.training.mixed_precision_param]),
    )


def prepare_outputs(config: JobConfig, world: World) -> None:
    """The dump folder, free of an earlier run's files, with the resolved configuration in it."""
    prepare_dump_folder(config.job.dump_folder, [CONFIG_COPY, METRICS_FILE, config.metrics.folder], world.rank)
    if world.rank == 0:
        Path(config.job.dump_folder, CONFIG_COPY).write_text(dump_config(config), encoding="utf-8")
    dist.barrier()


def describe_batch(config: JobConfig, degree: int) -> None:
    """What one step consumes, and how many there are."""
    training = config.training
    rows = rows_per_batch(config.parallelism, training.local_batch_size, training.global_batch_size // degree)
    if config.parallelism.pp > 1:
        size = config.parallelism.pp_microbatch_size
        log.info("Pipeline: %d microbatches of %d sequences go through it at once", rows // size, size)
    log.info(
        "Batch: local %d, global %d, accumulation %d, sequence length %d, steps %d, warm-up %d",
        training.local_batch_size,
        training.global_batch_size,
        training.global_batch_size // (rows * degree),
        training.seq_len,
        training.steps,
        config.lr_schedule.warmup_steps,
    )


def device_name(device: torch.device) -> str:
    """As torch names it; a CPU by its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"
