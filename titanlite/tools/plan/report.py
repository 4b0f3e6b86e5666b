"""Format the plan as text."""

import math
from collections.abc import Iterable, Sequence

from titanlite.config.schema import JobConfig
from titanlite.planning.estimate import Estimate, RankPlan

GIB = 2**30
USABLE = 0.9
"""Share of device memory available to tensors. The rest is for the CUDA context, NCCL's buffers and fragmentation."""


def report(config: JobConfig, plan: Estimate, device_memory_gib: float) -> str:
    """The full report, with the verdict last."""
    training, section = config.training, config.parallelism
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.axes.items())
    parameters = sum(stage.num_parameters for rank in plan.ranks for stage in rank.stages)
    lines = [
        f"Model: {config.model.family} {config.model.flavor}, {parameters:,} parameters",
        f"Mesh: {axes} = {math.prod(plan.axes.values()):,} ranks",
        f"Dtypes: parameters {training.dtype}, compute {training.mixed_precision_param}, "
        f"gradient reduction {training.mixed_precision_reduce}",
        f"Batch: {training.global_batch_size:,} sequences of {training.seq_len:,} tokens = "
        f"{training.global_batch_size * training.seq_len:,} tokens per step; "
        f"each data rank has {plan.microbatches} microbatches of {plan.rows}",
    ]
    if section.pp > 1:
        steps = "" if plan.schedule_steps == 1 else f" in {plan.schedule_steps} runs of the schedule"
        lines.append(f"Pipeline: {section.pp_schedule}{steps}, bubble {plan.bubble:.1%} of the time")
    lines += ["", "Peak memory per pipeline rank (worst data and tp rank), GiB:", *_memory_table(plan.ranks)]
    lines += ["", "Per rank and optimizer step: PFLOPs, and GiB sent (number of calls) by axis:"]
    return "\n".join([*lines, *_work_table(plan.ranks), "", *verdict(config, plan, device_memory_gib)]) + "\n"


def verdict(config: JobConfig, plan: Estimate, device_memory_gib: float) -> list[str]:
    """Whether the rank with the highest memory fits, its largest item, and the settings that reduce that item."""
    memory = plan.largest.memory
    total, usable = memory.total / GIB, USABLE * device_memory_gib
    items = memory.items
    largest = max(items, key=lambda item: items[item])
    head = f"{'Fits' if total <= usable else 'Does not fit'}: {total:.1f} GiB"
    lines = [
        f"{head} of tensors, {usable:.1f} GiB usable ({USABLE:.0%} of a device of {device_memory_gib:g} GiB; the rest "
        "is for the CUDA context, NCCL and fragmentation)",
        f"Largest item: {largest}, {items[largest] / GIB:.1f} GiB",
    ]
    return lines if total <= usable else [*lines, f"Try: {_advice(config, largest)}"]


def _advice(config: JobConfig, item: str) -> str:
    section, training = config.parallelism, config.training
    ranks = "a larger parallelism.dp_shard, tp or pp (more ranks share the model)"
    if item == "activations":
        options = {
            'activation_checkpoint.mode = "full"': config.activation_checkpoint.mode != "full",
            "training.local_batch_size = 1": section.pp == 1 and training.local_batch_size > 1,
            "parallelism.pp_microbatch_size = 1": section.pp > 1 and section.pp_microbatch_size > 1,
            "parallelism.loss_parallel = true": section.tp > 1 and not section.loss_parallel,
            'parallelism.pp_schedule = "1F1B" (fewer microbatches in flight)': section.pp > 1
            and section.pp_schedule != "1F1B",
            "a larger parallelism.tp": True,
        }
        return ", or ".join(option for option, helps in options.items() if helps)
    if item == "data parallel":
        policy = 'parallelism.gradient_sync = "hybrid" or "every", or '
        return (policy if section.pp == 1 and section.gradient_sync == "last" else "") + "a larger parallelism.tp or pp"
    if item == "update":
        return 'optimizer.implementation = "fused", which needs no copies, or ' + ranks
    if item == "pipeline":
        return 'parallelism.gradient_sync = "every" (fewer microbatches at once), or a larger parallelism.tp'
    return ranks


def _memory_table(ranks: Sequence[RankPlan]) -> list[str]:
    head = ["pp", "stages", "parameters", "params", "grads", "optimizer", "buffers", "activations"]
    rows = [[*head, "data parallel", "pipeline", "update", "total", "in flight"]]
    for rank in ranks:
        memory = rank.memory
        sizes = [memory.parameters, memory.gradients, memory.optimizer, memory.buffers, memory.activations]
        sizes += [memory.data_parallel, memory.pipeline, memory.update, memory.total]
        rows.append(
            [
                str(rank.pp_rank),
                ",".join(str(stage.index) for stage in rank.stages),
                f"{sum(stage.num_parameters for stage in rank.stages):,}",
                *(f"{size / GIB:.2f}" for size in sizes),
                "+".join(str(count) for count in memory.in_flight.values()),
            ]
        )
    return _aligned(rows)


def _work_table(ranks: Sequence[RankPlan]) -> list[str]:
    keys = list(dict.fromkeys((part.axis, part.operation) for rank in ranks for part in rank.traffic))
    rows = [["pp", "model", "recomputed", *(f"{axis} {operation}" for axis, operation in keys)]]
    for rank in ranks:
        sent = {(part.axis, part.operation): part for part in rank.traffic}
        cells = [f"{sent[key].sent_bytes / GIB:.2f} ({sent[key].calls:,})" if key in sent else "-" for key in keys]
        rows.append([str(rank.pp_rank), f"{rank.flops / 1e15:.2f}", f"{rank.recomputed_flops / 1e15:.2f}", *cells])
    return _aligned(rows)


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    rows = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
