"""Format the plan as text."""

import math
from collections.abc import Sequence

from titanlite.config.schema import JobConfig
from titanlite.models.decoder import describe_size
from titanlite.planning.estimate import Estimate, RankPlan
from titanlite.planning.memory_check import remedies
from titanlite.runtime.memory import GIB, USABLE
from titanlite.runtime.text import aligned, counted

DEFAULT_GIB = 80.0
"""Memory of a device that is not known."""


def report(config: JobConfig, plan: Estimate, device_memory_gib: float) -> str:
    """The report that `titanlite plan` prints: model, mesh, memory and work per rank; last, whether it fits."""
    training, section = config.training, config.parallelism
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.axes.items())
    hyper_parameters = config.hyper_parameters
    parameters = sum(stage.num_parameters for rank in plan.ranks for stage in rank.stages)
    lines = [
        f"Model: {config.model.family} {config.model.flavor}, {describe_size(parameters, hyper_parameters)}",
        f"Mesh: {axes} = {math.prod(plan.axes.values()):,} ranks"
        + (f"; experts over ep {section.ep} of dp_shard x cp" if section.ep > 1 else ""),
        f"Dtypes: parameters {training.dtype}, compute {training.mixed_precision_param}, "
        f"gradient reduction {training.mixed_precision_reduce}",
        f"Batch: {training.global_batch_size:,} sequences of {training.seq_len:,} tokens = "
        f"{training.global_batch_size * training.seq_len:,} tokens per step; "
        f"each data rank has {counted(plan.microbatches, 'microbatch')} of {counted(plan.rows, 'sequence')}"
        + (f"; {plan.filler_share:.1%} of the rows are filler" if plan.filler_share else ""),
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
    return lines if total <= usable else [*lines, f"Try: {', or '.join(remedies(config, largest))}"]


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
    return aligned(rows)


def _work_table(ranks: Sequence[RankPlan]) -> list[str]:
    keys = list(dict.fromkeys((part.axis, part.operation) for rank in ranks for part in rank.traffic))
    rows = [["pp", "model", "recomputed", *(f"{axis} {operation}" for axis, operation in keys)]]
    for rank in ranks:
        sent = {(part.axis, part.operation): part for part in rank.traffic}
        cells = [f"{sent[key].sent_bytes / GIB:.2f} ({sent[key].calls:,})" if key in sent else "-" for key in keys]
        rows.append([str(rank.pp_rank), f"{rank.flops / 1e15:.2f}", f"{rank.recomputed_flops / 1e15:.2f}", *cells])
    return aligned(rows)
