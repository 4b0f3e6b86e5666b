"""Construction of the parallelized model, the optimizer and the trainer."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from titanlite.assembly.job import Job
from titanlite.config.schema import JobConfig
from titanlite.config.stages import stage_lines
from titanlite.data.steps import stage_index
from titanlite.forward import ModelOnMesh
from titanlite.metrics.meter import is_log_step
from titanlite.models.attention import chosen_kernel, mask_form
from titanlite.models.decoder import describe_size, flops_of_blocks
from titanlite.models.family import DecoderConfig, LanguageModel, parameters_of
from titanlite.models.head import output_layers_of
from titanlite.models.init import init_parameters_
from titanlite.models.layers import adopt_rotary_
from titanlite.models.losses import CROSS_ENTROPY
from titanlite.models.registry import full_parameters, structure_of
from titanlite.models.watch import STATISTICS
from titanlite.optim.groups import has_owners
from titanlite.optim.optimizer import GatedOptimizer, WeightAverage
from titanlite.optim.qk_clip import QKClip, attentions_of
from titanlite.optim.registry import build_optimizer
from titanlite.optim.schedule import build_factors, build_schedule
from titanlite.parallel.clip import SpikeGate
from titanlite.parallel.data import resolve_gradient_sync, running_dtypes
from titanlite.parallel.exact import ExactGradients, loss_grid
from titanlite.parallel.mesh import Mesh, ShardGroups
from titanlite.parallel.own_code import require_layout
from titanlite.parallel.parallelize import parallelize
from titanlite.parallel.pipeline import ModelPart, Pipeline, SharedParameters, local_stages, share_between, stage_owners
from titanlite.parallel.split import describe_stages, keep_units_, split_stages, stage_structure, unit_weights
from titanlite.precision import DTYPES
from titanlite.runtime.errors import ConfigError, Rules, UserError
from titanlite.runtime.logging import log
from titanlite.trainer import Trainer


def build_model(
    config: JobConfig, mesh: Mesh, device: torch.device, *, draws_weights: bool = True
) -> list[LanguageModel]:
    """Build this rank's parts of the model with initial weights: the full model, or its pipeline stages.

    draws_weights: as for allocate_parts.
    """
    return allocate_parts(config, build_parts(config, mesh), device, draws_weights=draws_weights)


def build_parts(config: JobConfig, mesh: Mesh) -> list[ModelPart]:
    """Build this rank's parts of the model on the meta device, split into stages and parallelized."""
    training = config.training
    family, hyper_parameters = config.family, config.hyper_parameters
    parts: list[ModelPart] = []
    for stage in local_stages(config.parallelism, mesh.coordinate["pp"]):
        with torch.device("meta"):
            part = family.build(hyper_parameters).to(DTYPES[training.dtype])
        part.tie_weights()
        if not parts:
            count = sum(parameter.numel() for parameter in part.parameters())
            size = describe_size(count, hyper_parameters)
            log.info("Model: %s %s, %s", family.name, config.model.flavor, size)
        require_output_layer(config, part)
        structure = structure_of(family, hyper_parameters, part)
        flops = family.flops_per_token(hyper_parameters, training.seq_len)
        layout = config.parallelism, config.activation_checkpoint
        of_blocks = flops_of_blocks(hyper_parameters, training.seq_len)
        weights = unit_weights(part, structure)
        stages = split_stages(weights, structure, flops, *layout, of_blocks, bit_equal=training.bit_equal)
        if not parts:
            require_layout(family, hyper_parameters, part, config.parallelism, stages)
        if config.parallelism.pp > 1:
            if not parts:
                log.info("Pipeline: %s, stages %s", config.parallelism.pp_schedule, describe_stages(structure, stages))
            keep_units_(part, structure, stages, stage, stage_owners(config.parallelism))
        structure = stage_structure(structure, stages[stage])
        applied = parallelize(
            part,
            structure,
            mesh,
            training.dtypes,
            loss=config.loss,
            recompute=config.activation_checkpoint,
            compilation=config.compile,
            float8=config.float8,
            bit_equal=training.bit_equal,
        )
        for attention in attentions_of([part]) if config.optimizer.qk_clip else ():
            attention.note_largest(hyper_parameters.n_heads // config.parallelism.tp)
        for description in applied if not parts else ():
            log.info("Applied %s to the model", description)
        part.tie_weights()
        parts.append(ModelPart(part, structure, stage))
    return parts


def require_output_layer(config: JobConfig, model: LanguageModel) -> None:
    """Raise ConfigError if the full model has no OutputLayer, which another loss and tasks need."""
    if output_layers_of([model]):
        return
    family = f'for model.family = "{config.model.family}", whose output layer is no OutputLayer'
    remedy = "leave it out, or use OutputLayer in the model"
    loss, validation = Rules("loss", config.loss), Rules("validation", config.validation)
    is_plain = config.loss.chosen is CROSS_ENTROPY
    key = "terms" if config.loss.terms else "z_loss" if config.loss.z_loss > 0 else "name"
    rule = '"cross_entropy"' if key == "name" else "left out"
    loss.require(key, is_plain, f"{rule} {family}", remedy)
    has_none = not (config.validation.enable and config.validation.tasks)
    validation.require("tasks", has_none, f"none {family}", remedy)
    if problems := loss.problems + validation.problems:
        raise ConfigError(problems)


def allocate_parts(
    config: JobConfig, parts: Sequence[ModelPart], device: torch.device, *, draws_weights: bool = True
) -> list[LanguageModel]:
    """Allocate the memory of all parts; each rank draws its own shard of the initial weights.

    draws_weights: False leaves the weights undefined, for a caller that loads or draws them next.
    """
    models = [part.model for part in parts]
    for model in models:
        model.to_empty(device=device)
        model.tie_weights()
        model.init_buffers(device)
    share_between(models)
    if draws_weights:
        draw_weights_(config, models)
    parameters, compute, reduce = running_dtypes(models[0])
    log.info("Dtypes: parameters %s, compute %s, gradient reduction %s", parameters, compute, reduce)
    return models


def draw_weights_(config: JobConfig, models: Iterable[nn.Module]) -> None:
    """Draw this rank's shards of the initial weights. A collective."""
    _, structure = full_parameters(config.model)
    for model in models:
        init_parameters_(model, config.debug.seed, structure.init)


def describe_attention(config: JobConfig, device: torch.device) -> str | None:
    """The attention kernel of this rank, for the start log; None on CPUs, and for families that are no decoders."""
    hyper_parameters = config.hyper_parameters
    if device.type == "cpu" or not isinstance(hyper_parameters, DecoderConfig):
        return None
    dtype, tp = DTYPES[config.training.mixed_precision_param], config.parallelism.tp
    gathers_keys = config.parallelism.cp > 1 and config.parallelism.context_parallel == "gather"
    if (config.data.masks_documents or gathers_keys) and mask_form(
        device.type, dtype, hyper_parameters.head_dim
    ) == "blocks":
        return "FlexAttention"
    cp = config.parallelism.cp
    heads = (hyper_parameters.n_heads // (tp * cp), max(hyper_parameters.n_kv_heads // (tp * cp), 1))
    return chosen_kernel(device, dtype, *heads, hyper_parameters.head_dim)


def build_forward(job: Job, model_parts: list[LanguageModel], mesh: Mesh, device: torch.device) -> ModelOnMesh:
    """Build the forward pass and loss of this rank's model parts, for commands that do not train."""
    return ModelOnMesh(**forward_parts(job, model_parts, mesh, device))


def build_trainer(job: Job, model_parts: list[LanguageModel], mesh: Mesh, device: torch.device) -> Trainer:
    """Build the trainer of this rank's model parts."""
    config = job.config
    faults, training, stages = config.faults, config.training, job.batch_stages
    named = parameters_of(model_parts)
    of_interval = config.metrics.log_freq * max(stage.tokens for stage in stages)
    trainer = Trainer(
        **forward_parts(job, model_parts, mesh, device),
        optimizer=build_optimizers(config, named, mesh, device),
        schedule=build_schedule(config.lr_schedule, config.optimizer.lr, config.training.steps, stages),
        factors=build_factors(config.optimizer, config.training.steps),
        sync=resolve_gradient_sync(config.parallelism.gradient_sync, mesh.degrees, bit_equal=training.bit_equal),
        max_norm=training.max_norm,
        exact=ExactGradients(model_parts, mesh, summands_of(job)) if training.bit_equal else None,
        loss_grid=loss_grid(of_interval),
        shared=SharedParameters(model_parts, mesh.group("pp")) if config.parallelism.pp > 1 else None,
        statistics=[STATISTICS[name] for name in config.metrics.statistics],
        is_logged=partial(is_log_step, log_freq=config.metrics.log_freq, total_steps=config.training.steps),
        num_sources=len(config.data.sources),
        qk_clip=build_qk_clip(config, model_parts, mesh),
        average=WeightAverage(named, config.optimizer.ema_decay),
        spikes=SpikeGate(faults.spike_factor, device, skips=faults.on_spike == "skip") if faults.spike_factor else None,
    )
    if job.later:
        trainer.enter_stage = Stages(job, trainer)
    return trainer


def summands_of(job: Job) -> int:
    """Microbatches of a step on all ranks, with training.bit_equal."""
    return job.config.training.global_batch_size // job.step.size


class Stages:
    """Changes what depends on the sizes of a step at the first step of each training stage, on all ranks alike.

    job: of the run. trainer: built for its first stage.
    """

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self._jobs, self._stages = (job, *job.later), job.batch_stages
        self._trainer = trainer
        self._current = 0
        self._texts = ["the first one", *stage_lines(job.config)]

    def __call__(self, step: int) -> None:
        """Enter the stage of a step, if it is another one than that of the call before."""
        index = stage_index(self._stages, step)
        if index == self._current:
            return
        trainer, before, job = self._trainer, self._jobs[self._current], self._jobs[index]
        self._current = index
        log.info("Training: %s", self._texts[index])
        if trainer.pipeline is not None:
            trainer.pipeline = build_pipeline(job, list(trainer.model_parts), trainer.mesh, trainer.device)
        if trainer.exact is not None:
            trainer.exact.set_summands(summands_of(job))
        if job.hyper_parameters != before.hyper_parameters:
            replace_rotary_tables_(trainer, job)
        if job.config.compile.enable and shape_of(job) != shape_of(before):
            log.info("Compile: the blocks are compiled again for microbatches of %d x %d tokens", *shape_of(job))


def replace_rotary_tables_(trainer: Trainer, job: Job) -> None:
    """Compute the rotary tables of the stage of `job`. Raises UserError if the model has no RotaryEmbedding."""
    with torch.device("meta"):
        other = job.family.build(job.hyper_parameters)
    adopted = [adopt_rotary_(part, other) for part in trainer.model_parts]
    if not all(adopted):
        raise UserError(
            f"training.stages: the model of model.family = {job.config.model.family!r} has no RotaryEmbedding, so a "
            "stage cannot change its rotary embeddings; leave these keys out, or use RotaryEmbedding in the model"
        )


def shape_of(job: Job) -> tuple[int, int]:
    """Rows and positions of a microbatch."""
    return job.step.size, job.config.training.seq_len


def build_qk_clip(config: JobConfig, model_parts: Sequence[nn.Module], mesh: Mesh) -> QKClip | None:
    """None without optimizer.qk_clip."""
    tp = mesh.coordinate["tp"], mesh.degrees["tp"]
    threshold = config.optimizer.qk_clip
    return QKClip(model_parts, threshold, mesh.position_group, tp) if threshold else None


def build_optimizers(
    config: JobConfig, named: Mapping[str, nn.Parameter], mesh: Mesh, device: torch.device
) -> GatedOptimizer:
    """Build the optimizers of this rank's parameters, by name. A collective: it may create a process group."""
    section, (full, structure) = config.optimizer, full_parameters(config.model)
    shard_groups = mesh.shard_groups() if has_owners(section, full, structure) else ShardGroups()
    return build_optimizer(
        *(section, named, structure, device, shard_groups, config.debug.seed), bit_equal=config.training.bit_equal
    )


def forward_parts(job: Job, model_parts: list[LanguageModel], mesh: Mesh, device: torch.device) -> dict[str, Any]:
    """Arguments of ModelOnMesh."""
    config = job.config
    return {
        "model_parts": model_parts,
        "pipeline": build_pipeline(job, model_parts, mesh, device) if config.parallelism.pp > 1 else None,
        "mesh": mesh,
        "device": device,
        "seed": config.debug.seed,
    }


def build_pipeline(job: Job, model_parts: list[LanguageModel], mesh: Mesh, device: torch.device) -> Pipeline:
    """Build the pipeline of this rank's stages."""
    config, step = job.config, job.step
    return Pipeline(
        model_parts,
        config.parallelism,
        mesh.device_mesh,
        device,
        microbatches=step.per_batch,
        microbatch_size=step.size,
        seq_len=config.training.seq_len,
        width=config.family.stage_width(job.hyper_parameters),
        dtype=DTYPES[config.training.mixed_precision_param],
    )
