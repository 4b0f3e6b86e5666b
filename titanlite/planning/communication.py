"""Compute the communication of a rank in one optimizer step, by mesh axis and operation, analytically.

tests/distributed/test_plan_collectives.py compares it with the collectives of real steps. planning/owner_rounds.py has
that of the update by Muon. Not counted: scalars (the number of valid tokens, the loss, the gradient norm), the numbers
per row that NorMuon exchanges with the matrices, and the extra collectives of the first step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch

from titanlite.parallel.data import replicates_at_once
from titanlite.parallel.mesh import GradientSync, ParallelismConfig
from titanlite.parallel.pipeline import logits_again, resolve_reshard_after_forward
from titanlite.parallel.recompute import ActivationCheckpointConfig, inside_compilation, recomputed_blocks
from titanlite.planning.pipeline_order import Actions, count_gathers
from titanlite.planning.stages import Stage
from titanlite.runtime.torch_internals import sums_over_tp_are_wide

Operation = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send"]


@dataclass(frozen=True)
class Traffic:
    """The calls of one operation over one mesh axis, with the total `bytes` of their full tensors.

    The full tensor is the output of an all-gather, the input of a reduce-scatter, all-reduce or all-to-all, the message
    of a broadcast or send.
    """

    axis: str
    operation: Operation
    calls: int
    bytes: int
    ranks: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends with ring algorithms: (n - 1)/n of the tensor, twice for an all-reduce (Thakur,
        Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005)."""
        if self.operation == "send":
            return self.bytes
        passes = 2 if self.operation == "all-reduce" else 1
        return passes * self.bytes * (self.ranks - 1) // self.ranks


@dataclass(frozen=True)
class StepShape:
    """The inputs of the traffic formulas besides the stage. sizes: of the mesh axes; dp_shard stands for dp_shard x cp.
    sync: None with a pipeline. microbatches: per optimizer step, of `rows` rows each, of which this rank has
    `positions` positions, `loss_chunk` of them per chunk of the loss. shard_logits: whether each rank has the logits of
    its part of the vocabulary only. exchanged: elements per position that attention exchanges, or gathers, over cp;
    linear_exchanged: those of gated linear attention, which the linear_layers have.
    n_experts, n_active: experts of a block, and those of a position. n_dense_layers: first blocks without experts.
    attention_input: elements per position that attention gathers over tp. wide_norms: norms of a block whose squares
    are summed over tp. schedule_steps: runs of the actions per optimizer step. device_type: "cuda" or "cpu". bit_equal:
    gradients are rounded in the dtype of reductions first."""

    device_type: str
    sizes: Mapping[str, int]
    sync: GradientSync | None
    actions: Actions
    schedule_steps: int
    microbatches: int
    rows: int
    positions: int
    exchanged: int
    linear_exchanged: int
    linear_layers: tuple[bool, ...]
    n_experts: int
    n_active: int
    n_dense_layers: int
    n_further_tokens: int
    attention_input: int
    wide_norms: int
    loss_chunk: int
    shard_logits: bool
    dim: int
    stage_width: int
    vocab_size: int
    param_bytes: int
    reduce_bytes: int
    bit_equal: bool

    def with_experts(self, blocks: Iterable[int]) -> int:
        """How many of the blocks have experts."""
        return sum(index >= self.n_dense_layers for index in blocks) if self.n_experts > 1 else 0


def stage_traffic(
    stage: Stage, section: ParallelismConfig, recompute: ActivationCheckpointConfig, shape: StepShape
) -> list[Traffic]:
    """The traffic of one stage. The traffic of a rank is the sum over its stages."""
    found = [*_data_parallel(stage, section, shape), *_pipeline(stage, section, shape)]
    return [*_real(found), *exchanges(stage, section, recompute, shape)]


def exchanges(
    stage: Stage, section: ParallelismConfig, recompute: ActivationCheckpointConfig, shape: StepShape
) -> list[Traffic]:
    """The traffic of one stage within the computation of microbatches: over cp, ep and tp."""
    degrees = {_context_parallel: shape.sizes["cp"], _expert_parallel: section.ep, _tensor_parallel: shape.sizes["tp"]}
    of_axes = (traffic(stage, section, recompute, shape) for traffic, degree in degrees.items() if degree > 1)
    return _real(chain.from_iterable(of_axes))


LOADS = "dp_replicate x dp_shard"
"""The axis over which the loads of experts are added up; dp_shard stands for dp_shard x cp."""


def loads_traffic(stages: Sequence[Stage], shape: StepShape) -> list[Traffic]:
    """The sum of the loads of all experts of a rank that have biases, once per step."""
    blocks = sum(shape.with_experts(stage.blocks) for stage in stages)
    ranks = shape.sizes["dp_replicate"] * shape.sizes["dp_shard"]
    loads = blocks * shape.n_experts * torch.int64.itemsize
    return _real([Traffic(LOADS, "all-reduce", int(blocks > 0), loads, ranks)])


def rounding_traffic(rows: int, shape: StepShape) -> list[Traffic]:
    """The largest magnitudes and the squares of the rows of gradients, with training.bit_equal: see ExactGradients.
    rows: of all parameters of a rank."""
    calls = {"tp": 2, "dp_shard": 2, "dp_replicate": 1}  # replicas have the same squares
    bytes_ = rows * torch.float64.itemsize
    return _real(Traffic(axis, "all-reduce", n, n * bytes_, shape.sizes[axis]) for axis, n in calls.items())


def _real(found: Iterable[Traffic]) -> list[Traffic]:
    return [traffic for traffic in found if traffic.calls and traffic.ranks > 1]


def reductions(shape: StepShape, axis: str) -> int:
    """Number of reductions of a unit's gradient over a data axis per optimizer step."""
    if shape.sync is None:
        return shape.schedule_steps
    each = shape.sync == "every" or (shape.sync == "hybrid" and axis == "dp_shard")
    return shape.microbatches if each else 1


def reduces_sums(shape: StepShape) -> bool:
    """Whether the gradients of several microbatches are added up before a reduction, in its dtype. In a pipeline torch
    does so for one microbatch, too."""
    return shape.sync is None or (shape.sync == "last" and shape.microbatches > 1)


def frees_after_forward(stage: Stage, section: ParallelismConfig) -> list[bool]:
    """Whether each FSDP unit of the stage is freed between forward and backward."""
    policy = resolve_reshard_after_forward(section)
    return [policy in ("always", "default")] * (len(stage.units) - 1) + [policy == "always"]


def reduced_sizes(stage: Stage, shape: StepShape) -> list[int]:
    """Elements of the gradients that are reduced in one call, for each call of a reduction of the stage."""
    return [sum(stage.reduced)] if reduces_at_once(stage, shape) else stage.reduced


def reduces_at_once(stage: Stage, shape: StepShape) -> bool:
    """Whether all gradients of a wrapped stage are reduced in one call, when a backward pass has ended."""
    return shape.sizes["dp_shard"] == 1 and replicates_at_once(shape.device_type, stage.parameter_bytes)


def _data_parallel(stage: Stage, section: ParallelismConfig, shape: StepShape) -> list[Traffic]:
    if not stage.wrapped:
        return []
    shards, replicas = shape.sizes["dp_shard"], shape.sizes["dp_replicate"]
    expert_shards = shards // section.ep
    gathers = gathered = expert_gathers = gathered_experts = 0
    syncs = range(shape.microbatches if shape.sync in ("every", "hybrid") else 0)
    frees = dict.fromkeys(syncs, True) | ({shape.microbatches - 1: True} if shape.sync else {})
    is_freed = frees_after_forward(stage, section)
    of_unit = {
        freed: count_gathers(shape.actions, stage.index, frees_after_forward=freed, frees_after_backward=frees)
        for freed in set(is_freed)
    }
    for index, unit in enumerate(stage.units):
        count = shape.schedule_steps * of_unit[is_freed[index]]
        if shape.sync is not None and index == len(stage.units) - 1 and stage.units[0].block is None:
            # With several microbatches, fully_shard's backward prefetch gathers the last unit once more per step; not
            # if it has the tied embedding, which is in use then.
            count += shape.microbatches > 1
        gathers, gathered = gathers + count, gathered + count * unit.elements * shape.param_bytes
        if unit.experts:
            expert_gathers += count
            gathered_experts += count * unit.experts * shape.param_bytes
    calls = len(reduced_sizes(stage, shape))
    of_experts = [unit.experts for unit in stage.units if unit.experts]
    over_shards, over_replicas = reductions(shape, "dp_shard"), reductions(shape, "dp_replicate")
    gradient = sum(unit.elements for unit in stage.units) * shape.reduce_bytes
    expert_gradient = sum(of_experts) * shape.reduce_bytes
    replicated = (gradient // shards + expert_gradient // expert_shards) * over_replicas
    own_calls, expert_calls = (calls - len(of_experts)) * over_shards, len(of_experts) * over_shards
    return [
        Traffic("dp_shard", "all-gather", gathers, gathered, shards),
        Traffic("dp_shard", "reduce-scatter", own_calls, gradient * over_shards, shards),
        Traffic("expert_shard", "all-gather", expert_gathers, gathered_experts, expert_shards),
        Traffic("expert_shard", "reduce-scatter", expert_calls, expert_gradient * over_shards, expert_shards),
        Traffic("dp_replicate", "all-reduce", calls * over_replicas, replicated, replicas),
    ]


def _context_parallel(
    stage: Stage, section: ParallelismConfig, recompute: ActivationCheckpointConfig, shape: StepShape
) -> list[Traffic]:
    """Each block exchanges the inputs of its core in one call, and its results, per direction, and if it is recomputed;
    or attention gathers keys and values, also if it is recomputed, and scatters their gradients."""
    cp = shape.sizes["cp"]
    linear, other = ([index for index in stage.blocks if shape.linear_layers[index] is kind] for kind in (True, False))
    backward, of_linear = (len(blocks) * shape.microbatches for blocks in (other, linear))
    forward = backward + _recomputed(recompute, stage, other) * shape.microbatches
    of_linear += of_linear + _recomputed(recompute, stage, linear) * shape.microbatches
    moved = of_linear * shape.positions * shape.linear_exchanged * shape.param_bytes
    part = shape.positions * shape.exchanged * shape.param_bytes
    # of the choices and probabilities of each row's experts, for their balance
    balances, _ = _passes_of_experts(stage, recompute, shape)
    sums = 2 * shape.rows * shape.n_experts * max(4, shape.param_bytes)
    balance = Traffic("cp", "all-reduce", balances, balances * sums, cp)
    if section.context_parallel == "heads":
        calls = 2 * (forward + backward + of_linear)
        return [Traffic("cp", "all-to-all", calls, (forward + backward) * part + moved, cp), balance]
    return [
        balance,
        Traffic("cp", "all-to-all", 2 * of_linear, moved, cp),
        Traffic("cp", "all-gather", 2 * forward, forward * part * cp, cp),
        Traffic("cp", "reduce-scatter", 2 * backward, backward * part * cp, cp),
    ]


def _recomputed(recompute: ActivationCheckpointConfig, stage: Stage, blocks: Iterable[int]) -> int:
    return len({*recomputed_blocks(recompute, stage.blocks)} & {*blocks})


def _passes_of_experts(stage: Stage, recompute: ActivationCheckpointConfig, shape: StepShape) -> tuple[int, int]:
    """(forward, backward) passes through blocks with experts per step."""
    backward = shape.with_experts(stage.blocks) * shape.microbatches
    return backward + shape.with_experts(recomputed_blocks(recompute, stage.blocks)) * shape.microbatches, backward


def _expert_parallel(
    stage: Stage, section: ParallelismConfig, recompute: ActivationCheckpointConfig, shape: StepShape
) -> list[Traffic]:
    """Each block sends counts and the rows of all choices, and results return, also if it is recomputed, but for counts
    that the policy keeps; gradients take both ways once. Bytes if all experts are chosen equally often."""
    forward, backward = _passes_of_experts(stage, recompute, shape)
    counts = backward if inside_compilation(recompute) else forward
    rows = shape.positions * shape.n_active * shape.dim * shape.param_bytes
    exchanged = 2 * (forward + backward) * rows + counts * shape.n_experts * 8
    return [Traffic("ep", "all-to-all", 2 * (forward + backward) + counts, exchanged, section.ep)]


def _tensor_parallel(
    stage: Stage, section: ParallelismConfig, recompute: ActivationCheckpointConfig, shape: StepShape
) -> list[Traffic]:
    """Each block gathers and scatters the residual stream twice per direction; embedding and head once each. Recomputed
    blocks gather again, and scatter again unless the policy keeps the scattered outputs."""
    tp, count = shape.sizes["tp"], shape.microbatches
    again = len(recomputed_blocks(recompute, stage.blocks))
    # With early stop, recomputation skips the last scatter of a block, which backward does not need.
    scatters_again = 0 if inside_compilation(recompute) else 1 if recompute.early_stop else 2
    # the head has more rows, and so has the embedding, or the last stage has an embedding of its own
    further = shape.n_further_tokens * stage.is_last
    always = 4 * len(stage.blocks) + (stage.index == 0) + stage.is_last + further * (stage.index > 0)
    more = further * (1 + (stage.index == 0)) * shape.dim
    gathers = always + 2 * again
    scatters = always + scatters_again * again
    if further and scatters_again == 1 and stage.blocks[-1] in recomputed_blocks(recompute, stage.blocks):
        scatters += 1  # which the norm after this block needs
    of_position = shape.positions * shape.param_bytes
    # the input of attention may be narrower
    wider = shape.dim - shape.attention_input
    gathered = gathers * shape.dim - (len(stage.blocks) + again) * wider + more
    scattered = scatters * shape.dim - len(stage.blocks) * wider + more
    found = [
        Traffic("tp", "all-gather", count * gathers, count * gathered * of_position, tp),
        Traffic("tp", "reduce-scatter", count * scatters, count * scattered * of_position, tp),
    ]
    if stage.is_last:
        chunks, loss_bytes = -(-shape.positions // shape.loss_chunk), shape.positions * max(4, shape.param_bytes)
        # per position: maximum, and in one call the sum of exponentials and the label's own score; or all logits, which
        # backward may compute again
        calls, numbers = (2 * chunks, 3) if shape.shard_logits else (chunks, shape.vocab_size)
        passes = count * (1 + (0 if shape.shard_logits else logits_again(section))) * (1 + further)
        found.append(Traffic("tp", "all-reduce", passes * calls, passes * numbers * loss_bytes, tp))
    # the squares of each position, also if they are recomputed, and one product backward
    sums = shape.wide_norms * (2 * len(stage.blocks) + again) * count
    found.append(Traffic("tp", "all-reduce", sums, sums * shape.positions * max(4, shape.param_bytes), tp))
    replicated = [elements for unit in stage.units for elements in unit.replicated_over_tp]
    times = reductions(shape, "dp_shard" if shape.sizes["dp_shard"] > 1 else "dp_replicate")
    is_wide = reduces_sums(shape) or shape.bit_equal or sums_over_tp_are_wide()
    size = shape.reduce_bytes if is_wide else shape.param_bytes
    found.append(Traffic("tp", "all-reduce", len(replicated) * times, sum(replicated) * times * size, tp))
    return found


def _pipeline(stage: Stage, section: ParallelismConfig, shape: StepShape) -> list[Traffic]:
    """Sends activations to the next stage and gradients to the previous one; gradients of shared parameters to all
    other ranks with copies."""
    boundary = shape.positions // shape.sizes["tp"] * shape.stage_width * shape.param_bytes
    calls = remote_neighbors(stage, shape) * shape.microbatches
    copies = sum(others for _, others in stage.shared)
    of_copies = sum(size * others for size, others in stage.shared)
    return [Traffic("pp", "send", calls + copies, calls * boundary + of_copies, section.pp)]


def remote_neighbors(stage: Stage, shape: StepShape) -> int:
    """How many of the previous and the next stage are on another rank."""
    mine = shape.actions.stages
    return (not stage.is_last and stage.index + 1 not in mine) + (stage.index > 0 and stage.index - 1 not in mine)
