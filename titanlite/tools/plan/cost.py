"""The throughput of a predicted step, and what a training costs."""

import math
import textwrap
from dataclasses import dataclass

from titanlite.config.schema import JobConfig
from titanlite.models.decoder import flops_per_token
from titanlite.planning.estimate import Estimate
from titanlite.planning.hardware.machine import Profile
from titanlite.planning.step_time import UNCERTAINTY, StepTime

SHOWN = 0.001
"""Share of a step from which on a part is shown."""
FEW_TOKENS = 4096
"""Tokens of a rank and step below which published runs are much slower than predicted."""


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


def describe_time(config: JobConfig, plan: Estimate, profile: Profile, time: StepTime, price: Price) -> str:
    """The predicted time of a step by part, the throughput, and the duration of the training."""
    ranks = math.prod(plan.axes.values())
    used = mfu(config, time, ranks, profile)
    rate = tokens_per_second(config, time, ranks)
    tokens = config.training.steps * tokens_per_step(config)
    shown = {part: share for part, seconds in time.parts.items() if (share := seconds / time.total) > SHOWN}
    shares = [f"{part}\xa0{share:.1%}" for part, share in shown.items()]
    likely = []
    if profile.device == "cuda":
        of_rank = tokens_per_step(config) / ranks
        few = f"below {FEW_TOKENS:,} tokens per rank and step, published runs are up to 3 times slower"
        reasons = {
            few: of_rank < FEW_TOKENS,
            "few runs with experts are published": config.hyper_parameters.n_experts > 1,
        }
        likely = [
            f"Likely: {rate / (1 + UNCERTAINTY):,.0f} to {rate / (1 - UNCERTAINTY):,.0f} tokens/s per rank, as 9 of 10 "
            "published runs (docs/planning.md)",
            *(f"Uncertain: {reason}" for reason, holds in reasons.items() if holds),
        ]
    lines = [
        f"Predicted step: {time.total:.3g} s on {profile.name}",
        f"Throughput: {rate:,.0f} tokens/s per rank, {rate * ranks:,.0f} in all"
        + ("" if used is None else f", MFU {used:.1%}"),
        *likely,
        *textwrap.wrap(f"Parts: {', '.join(shares)}", 120, subsequent_indent="  "),
        f"Training: {config.training.steps:,} steps of {tokens_per_step(config):,} tokens = {tokens:,} tokens, "
        f"{price.describe(hours(config, time), ranks)} (without saving and validation)",
    ]
    return "\n".join(lines).replace("\xa0", " ") + "\n"  # a part and its share are on one line
