"""Format the plan as text: memory and work, and of a predicted step, the throughput and what a training costs."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.config.schema import JobConfig
from titanlite.config.stages import batch_stages, stage_configs, stage_lines
from titanlite.data.steps import tokens_until
from titanlite.models.decoder import describe_size, flops_per_token
from titanlite.planning.estimate import Estimate, RankPlan, estimate
from titanlite.planning.float8 import float8_products
from titanlite.planning.hardware.machine import Profile
from titanlite.planning.memory_check import remedies
from titanlite.planning.step_time import UNCERTAINTY, StepTime, has_float8_rates
from titanlite.runtime.memory import GIB, USABLE
from titanlite.runtime.text import aligned, counted

DEFAULT_GIB = 80.0
"""Memory of a device that is not known."""


def estimate_largest(config: JobConfig, world_size: int, *, device_type: str) -> tuple[int, JobConfig, Estimate]:
    """Estimate the training stage that needs the most memory: its number from 0, its configuration, the estimate."""
    found = [(each, estimate(each, world_size, device_type=device_type)) for each in stage_configs(config)]
    number = max(range(len(found)), key=lambda number: found[number][1].largest.memory.total)
    return number, *found[number]


def stage_heading(config: JobConfig, number: int) -> str:
    """The training stages and the number of that which is planned, from 0; "" if there is only one."""
    lines = list(stage_lines(config))
    if not lines:
        return ""
    rest = "".join(f"  {line}\n" for line in lines)
    return f"Planned: stage {number + 1} of {len(lines) + 1}, which needs the most memory\n{rest}"


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
    products = float8_products(config, plan.ranks[0].shape.device_type)
    if products is not None:
        on_device = "by the matrix unit of GPUs from compute capability 9.0 on, those of experts emulated"
        how = on_device if products.on_device else "emulated"
        lines.append(f"Float8: {config.float8.recipe}, products {how}; activations include rounded operands")
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


SHOWN = 0.001
"""Share of a step from which on a part is shown."""
FEW_TOKENS = 4096
"""Tokens of a rank and step below which published runs are much slower than predicted: up to SLOWER times."""
SLOWER = 3
FASTER = 1.75
"""A published run with experts (ep 8) is 1.7 times as fast as predicted."""


@dataclass(frozen=True)
class Price:
    """of_rank_hour: price of one rank for an hour; None: not given."""

    of_rank_hour: float | None

    def describe(self, hours: float, ranks: int) -> str:
        """The time and the price of a training, for a report."""
        text = f"{hours / 24:.1f} days, {hours * ranks:,.0f} rank-hours" if hours >= 48 else f"{hours:.1f} hours"
        text = text if hours >= 48 else f"{text}, {hours * ranks:,.1f} rank-hours"
        return text if self.of_rank_hour is None else f"{text}, cost {hours * ranks * self.of_rank_hour:,.0f}"


def tokens_per_step(config: JobConfig) -> int:
    return config.training.global_batch_size * config.training.seq_len


def tokens_per_second(config: JobConfig, time: StepTime, ranks: int) -> float:
    """Of one rank."""
    return tokens_per_step(config) / time.total / ranks


def mfu(config: JobConfig, time: StepTime, ranks: int, profile: Profile) -> float | None:
    """Model FLOPs utilization; None if the profile has no peak for the dtype of computation."""
    peak = profile.peak_flops.get(config.training.mixed_precision_param)
    flops = flops_per_token(config.hyper_parameters, config.training.seq_len)
    return None if peak is None else tokens_per_second(config, time, ranks) * flops / peak


def hours(config: JobConfig, time: StepTime) -> float:
    """Of the entire training, without saving and validation."""
    return config.training.steps * time.total / 3600


def describe_time(
    config: JobConfig, plan: Estimate, profile: Profile, time: StepTime, price: Price, run: JobConfig
) -> str:
    """The predicted time of a step by part, the throughput, and the duration of the training."""
    ranks = math.prod(plan.axes.values())
    used = mfu(config, time, ranks, profile)
    rate = tokens_per_second(config, time, ranks)
    tokens = tokens_until(batch_stages(run), run.training.steps)
    steps = f"{run.training.steps:,} steps of {tokens_per_step(config):,} tokens"
    if run.training.stages:
        steps = f"{run.training.steps:,} steps in {len(run.training.stages) + 1} stages, all at this throughput"
    shown = {part: share for part, seconds in time.parts.items() if (share := seconds / time.total) > SHOWN}
    shares = [f"{part}\xa0{share:.1%}" for part, share in shown.items()]
    likely = []
    if profile.device == "cuda":
        is_short = tokens_per_step(config) / ranks < FEW_TOKENS
        has_experts = config.hyper_parameters.n_experts > 1
        least = rate / (SLOWER if is_short else 1 + UNCERTAINTY)
        most = rate * FASTER if has_experts else rate / (1 - UNCERTAINTY)
        known = "" if is_short or has_experts else ", as 9 of 10 published runs"
        likely = [f"Likely: {least:,.0f} to {most:,.0f} tokens/s per rank{known} (docs/planning.md)"]
        if is_short:
            text = f"below {FEW_TOKENS:,} tokens per rank and step, published runs are up to {SLOWER} times slower"
            likely.append(f"Uncertain: {text}")
        if has_experts:
            likely.append("Uncertain: few runs with experts are published, and they are faster")
    products = float8_products(config, profile.device)
    if products is not None and products.on_device and not has_float8_rates(profile):
        rate_of = config.training.mixed_precision_param
        likely.append(f"Uncertain: the profile has no rates of float8; products are predicted at those of {rate_of}")
    lines = [
        f"Predicted step: {time.total:.3g} s on {profile.name}",
        f"Throughput: {rate:,.0f} tokens/s per rank, {rate * ranks:,.0f} in all"
        + ("" if used is None else f", MFU {used:.1%}"),
        *likely,
        *textwrap.wrap(f"Parts: {', '.join(shares)}", 120, subsequent_indent="  "),
        f"Training: {steps} = {tokens:,} tokens, "
        f"{price.describe(tokens / rate / ranks / 3600, ranks)} (without saving and validation)",
    ]
    return "\n".join(lines).replace("\xa0", " ") + "\n"  # a part and its share are on one line
