"""Estimate the memory, communication and FLOPs per pipeline rank and step, from a configuration and a world size."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from titanlite.config.schema import JobConfig
from titanlite.models.attention import attention_dtype, mask_form
from titanlite.models.experts import multiplies_groups
from titanlite.models.family import DecoderConfig
from titanlite.models.head import tokens_per_chunk
from titanlite.models.losses import extra_logits
from titanlite.models.registry import full_model
from titanlite.optim.muon import muon_dtype
from titanlite.parallel.compile import compiles_blocks
from titanlite.parallel.data import resolve_gradient_sync
from titanlite.parallel.exact import BYTES_PER_ROW
from titanlite.parallel.mesh import DATA_AXES, resolve_degrees, shard_logits
from titanlite.parallel.microbatches import Microbatches, divide_step
from titanlite.parallel.pipeline import local_stages, logits_again, num_stages
from titanlite.parallel.recompute import recomputed_blocks
from titanlite.planning.activations import ActivationBytes, MicrobatchShape, activation_bytes
from titanlite.planning.communication import StepShape, Traffic, loads_traffic, rounding_traffic, stage_traffic
from titanlite.planning.float8 import float8_products, rounded_bytes
from titanlite.planning.owner_rounds import OwnerRounds, owner_rounds
from titanlite.planning.pipeline_order import Actions, bubble_share, schedule_order
from titanlite.planning.rank_memory import Memory, rank_memory
from titanlite.planning.stages import Blueprint, Stage, block_flops, blueprint, plan_stages
from titanlite.precision import DTYPES
from titanlite.runtime.errors import ConfigError, Problem


@dataclass(frozen=True)
class RankPlan:
    """One pipeline rank; the numbers are those of its worst data and tp rank.

    flops: matrix products of the model in an optimizer step, without recomputation; recomputed_flops: those of
    recomputation. owners: the part of the update by owners, whose traffic is part of `traffic`.
    """

    pp_rank: int
    shape: StepShape
    stages: tuple[Stage, ...]
    memory: Memory
    traffic: tuple[Traffic, ...]
    flops: int
    recomputed_flops: int
    owners: OwnerRounds


@dataclass(frozen=True)
class Estimate:
    """The plan of a run. axes: mesh sizes by name. microbatches: per step and data rank, of `rows` rows each, of which
    all data ranks together have filler_share as filler. order: of the actions of each pipeline rank, in one of
    schedule_steps runs of the schedule; stages: of the pipeline."""

    axes: dict[str, int]
    microbatches: int
    rows: int
    schedule_steps: int
    order: Sequence[Actions]
    stages: int
    filler_share: float
    ranks: tuple[RankPlan, ...]

    @property
    def bubble(self) -> float:
        """The share of a schedule step in which a rank is idle, with stages of equal cost."""
        return bubble_share(self.order, self.stages)

    @property
    def largest(self) -> RankPlan:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.memory.total)


def has_estimate(config: JobConfig) -> bool:
    """Whether memory can be estimated for the model's family: only for decoders (DecoderConfig)."""
    return isinstance(config.hyper_parameters, DecoderConfig)


def require_estimate(config: JobConfig, key: str, value: Any, remedy: str) -> None:
    """Raise ConfigError about `key` unless the model's family has an estimate."""
    if not has_estimate(config):
        rule = f"only for families whose hyper-parameters are a DecoderConfig; {config.model.family!r} is another one"
        raise ConfigError([Problem(key, value, rule, remedy)])


def estimate(config: JobConfig, world_size: int, *, device_type: str) -> Estimate:
    """Estimate a run, in its first training stage. config: checked and resolved for this world. device_type: "cuda" or
    "cpu"."""
    section, ranks = config.parallelism, []
    sizes = resolve_degrees(section, world_size)
    step = plan_step(config, sizes)
    order = schedule_order(section, step.per_batch if section.pp > 1 else step.batches)
    planned = plan_stages(config, sizes)
    has_biases = config.hyper_parameters.n_experts > 1 and config.hyper_parameters.bias_rate > 0
    of_first = step_shape(config, sizes, step, order[0], device_type)
    activations = _activations(config, of_first, device_type)
    for pp_rank, actions in enumerate(order):
        stages = tuple(planned[index] for index in local_stages(section, pp_rank))
        shape = replace(of_first, actions=actions)
        owners = _owners(config, stages, shape)
        memory = _memory(config, stages, shape, owners, activations)
        loads = loads_traffic(stages, shape) if has_biases else []
        traffic = *_traffic(config, stages, shape), *owners.traffic, *loads
        ranks.append(RankPlan(pp_rank, shape, stages, memory, traffic, *_flops(config, stages, shape), owners))
    return Estimate(
        *(sizes, step.microbatches, step.size, shape.schedule_steps, order, num_stages(section), step.filler_share),
        tuple(ranks),
    )


def estimate_memory(
    config: JobConfig, sizes: Mapping[str, int], pp_rank: int, stages: Sequence[Stage], *, device_type: str
) -> Memory:
    """Estimate the memory of a rank that owns `stages`. config: as for estimate. sizes: degrees of the mesh axes."""
    # Without a pipeline, one microbatch follows the other: one needs as much memory as all.
    step = plan_step(config, sizes)
    order = schedule_order(config.parallelism, step.per_batch)
    shape = step_shape(config, sizes, step, order[pp_rank], device_type)
    owners, activations = _owners(config, stages, shape), _activations(config, shape, device_type)
    return _memory(config, stages, shape, owners, activations)


def plan_step(config: JobConfig, sizes: Mapping[str, int]) -> Microbatches:
    """The microbatches of a data rank. sizes: degrees of the mesh axes."""
    return divide_step(
        config.parallelism,
        math.prod(sizes[axis] for axis in DATA_AXES),
        global_batch_size=config.training.global_batch_size,
        local_batch_size=config.training.local_batch_size,
        num_streams=config.data.num_streams,
        bit_equal=config.training.bit_equal,
    )


def step_shape(
    config: JobConfig, sizes: Mapping[str, int], step: Microbatches, actions: Actions, device_type: str
) -> StepShape:
    """sizes: degrees of the mesh axes. actions: of this rank, in one run of the schedule."""
    training, cp, tp = config.training, config.parallelism.cp, config.parallelism.tp
    family, model = config.family, config.hyper_parameters
    widths, of_keys = model.head_dim + model.value_dim, model.n_kv_heads // tp
    if config.parallelism.context_parallel == "gather":
        exchanged = of_keys * widths
    else:
        exchanged = (model.n_heads // tp + max(of_keys, cp)) * widths  # queries, results, keys and values
    inner = (2 * model.linear_key_heads * model.linear_key_dim + 2 * model.linear_value_heads) // tp
    values = model.linear_value_heads * model.linear_value_dim // tp
    features = blueprint(config.model).features
    latent = (model.q_lora_rank or model.dim) + model.kv_lora_rank + model.rotary_dim if features.is_latent else 0
    return StepShape(
        device_type=device_type,
        sizes={**sizes, "dp_shard": sizes["dp_shard"] * cp},
        sync=resolve_gradient_sync(config.parallelism.gradient_sync, sizes, bit_equal=training.bit_equal),
        actions=actions,
        schedule_steps=step.batches if config.parallelism.pp > 1 else 1,
        microbatches=step.microbatches,
        rows=step.size,
        positions=step.size * training.seq_len // cp,
        exchanged=exchanged,
        linear_exchanged=inner + 2 * values,
        linear_layers=model.linear_layers,
        n_experts=model.n_experts,
        n_active=model.n_active_experts,
        n_dense_layers=model.n_dense_layers,
        n_further_tokens=model.n_further_tokens,
        attention_input=latent or model.dim,
        wide_norms=2 * features.wide_norms,
        loss_chunk=loss_chunk(config, model.vocab_size, device_type, step.size),
        shard_logits=_shards_logits(config),
        dim=model.dim,
        stage_width=family.stage_width(model),
        vocab_size=model.vocab_size,
        param_bytes=DTYPES[training.mixed_precision_param].itemsize,
        reduce_bytes=DTYPES[training.mixed_precision_reduce].itemsize,
        bit_equal=training.bit_equal,
    )


def loss_chunk(config: JobConfig, vocab_size: int, device_type: str, rows: int) -> int:
    """Tokens whose logits exist at the same time on a rank. rows: of a microbatch."""
    columns = -(-vocab_size // config.parallelism.tp) if _shards_logits(config) else vocab_size
    wide = torch.promote_types(DTYPES[config.training.mixed_precision_param], torch.float32)
    tokens = rows * config.training.seq_len // config.parallelism.cp
    return tokens_per_chunk(config.loss.chunk_tokens, columns * wide.itemsize, device_type, tokens)


def _shards_logits(config: JobConfig) -> bool:
    return shard_logits(config.parallelism, needs_logits=config.loss.chosen.needs_logits)


def _logits_again(config: JobConfig) -> int:
    return logits_again(config.parallelism, bit_equal=config.training.bit_equal)


def _memory(
    config: JobConfig, stages: Sequence[Stage], shape: StepShape, owners: OwnerRounds, activations: ActivationBytes
) -> Memory:
    memory = rank_memory(
        stages, config.parallelism, config.activation_checkpoint, shape, activations, owners.temporary_bytes
    )
    if not config.training.bit_equal:
        return memory
    return replace(memory, buffers=memory.buffers + sum(stage.rows for stage in stages) * BYTES_PER_ROW)


def _activations(config: JobConfig, shape: StepShape, device_type: str) -> ActivationBytes:
    plan, microbatch = blueprint(config.model), microbatch_shape(config, shape, device_type)
    products = float8_products(config, device_type)
    if products is not None:
        rounded = rounded_bytes(config.float8, full_model(config.model), plan, microbatch, products)
        microbatch = replace(microbatch, rounded_bytes=rounded, emulates_float8=not products.on_device)
    return _activation_bytes(plan, microbatch)


@lru_cache(maxsize=1024)  # the same for many layouts of a search
def _activation_bytes(model: Blueprint, shape: MicrobatchShape) -> ActivationBytes:
    return activation_bytes(model.hyper_parameters, model.features, shape)


def _owners(config: JobConfig, stages: Sequence[Stage], shape: StepShape) -> OwnerRounds:
    stored, sizes = DTYPES[config.training.dtype], shape.sizes
    return owner_rounds(
        *(stages, sizes["dp_shard"] * sizes["tp"], sizes["dp_replicate"]),
        *(muon_dtype(config.optimizer, stored), stored, config.optimizer.newton_schulz_steps),
    )


def microbatch_shape(config: JobConfig, shape: StepShape, device_type: str) -> MicrobatchShape:
    section, training = config.parallelism, config.training
    model = config.hyper_parameters
    compute_dtype = DTYPES[training.mixed_precision_param]
    gathers_keys = section.cp > 1 and section.context_parallel == "gather"
    form = mask_form(device_type, compute_dtype, model.head_dim)
    return MicrobatchShape(
        rows=shape.positions * section.cp // training.seq_len,
        seq_len=training.seq_len,
        cp=section.cp,
        tp=section.tp,
        element_bytes=compute_dtype.itemsize,
        attention_bytes=attention_dtype(device_type, compute_dtype).itemsize,
        loss_chunk=shape.loss_chunk,
        shard_logits=_shards_logits(config),
        recomputes_logits=_logits_again(config) > 0,
        mask=form if config.data.masks_documents or gathers_keys else None,
        gathers_keys=gathers_keys,
        extra_logits=extra_logits(config.loss.chosen) if config.loss.chosen.needs_logits else None,
        form=form,
        compiled=compiles_blocks(config.compile, model, reads_counts=_reads_counts(config, device_type)),
    )


def _reads_counts(config: JobConfig, device_type: str) -> bool:
    """Experts.reads_counts of those of a rank."""
    section, model = config.parallelism, config.hyper_parameters
    sizes, dtype = (model.dim, model.ffn_dim // section.tp), DTYPES[config.training.mixed_precision_param]
    is_plain = section.ep == 1 and config.float8.recipe == "none"
    return not (is_plain and multiplies_groups(device_type, dtype, *sizes))


def _traffic(config: JobConfig, stages: Sequence[Stage], shape: StepShape) -> tuple[Traffic, ...]:
    """The sum over the stages, by axis and operation, without that of owners."""
    total: dict[tuple[str, str], Traffic] = {}
    section, recompute = config.parallelism, config.activation_checkpoint
    parts = [part for stage in stages for part in stage_traffic(stage, section, recompute, shape)]
    if config.training.bit_equal:
        parts += rounding_traffic(sum(stage.rows for stage in stages), shape)
    for part in parts:
        key = part.axis, part.operation
        if (before := total.get(key)) is not None:
            part = replace(part, calls=before.calls + part.calls, bytes=before.bytes + part.bytes)
        total[key] = part
    return tuple(total.values())


def _flops(config: JobConfig, stages: Sequence[Stage], shape: StepShape) -> tuple[int, int]:
    """RankPlan.flops and RankPlan.recomputed_flops."""
    recompute = config.activation_checkpoint
    output = 6 * shape.vocab_size * shape.dim * (1 + shape.n_further_tokens)
    of_block = block_flops(blueprint(config.model), config.training.seq_len)
    blocks = [index for stage in stages for index in stage.blocks]
    by_op = recompute.mode == "selective" and recompute.selective_policy == "op"
    again = 0 if by_op else sum(of_block[index] for index in recomputed_blocks(recompute, blocks))
    tokens = shape.microbatches * shape.positions
    output *= any(stage.is_last for stage in stages)
    # a forward pass is a third of a step
    recomputed = (again + _logits_again(config) * output) // 3
    flops = sum(of_block[index] for index in blocks) + output
    return flops * tokens // shape.sizes["tp"], recomputed * tokens // shape.sizes["tp"]
