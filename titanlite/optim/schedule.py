"""Learning-rate schedule: a pure function of the step, without state to checkpoint."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from titanlite.runtime.errors import Needs, Problem, check_ranges, ranged


@dataclass(frozen=True)
class ScheduleConfig:
    """Warm-up, constant learning rate, decay. Steps count from 1; step 1 has a learning rate above 0.

    At most one key of each length is given, in steps, tokens or as a ratio. The decay is over all steps after the
    warm-up if no key gives its length.
    """

    warmup_steps: int = ranged(100, "0 starts at the full learning rate", least=0)
    """Steps of linear warm-up; may exceed training.steps."""
    warmup_tokens: int = ranged(-1, "leave it out to give warmup_steps", least=0, unset=-1)
    """Tokens of the warm-up in place of warmup_steps, rounded up to full steps."""
    warmup_ratio: float = ranged(-1.0, "0.01 warms up for a hundredth of the run", least=0, most=1, unset=-1)
    """Fraction of training.steps in place of warmup_steps."""
    decay: str = "linear"
    """Shape of the decay from optimizer.lr to min_lr_factor x optimizer.lr; none keeps optimizer.lr."""
    final_decay_steps: int = ranged(-1, "leave it out to decay over all steps after the warm-up", least=1, unset=-1)
    """Length of the decay in steps, at the end of the run, at most the entire run: warm-up, stable, decay (WSD)."""
    final_decay_tokens: int = ranged(-1, "leave it out to give final_decay_steps", least=1, unset=-1)
    """Tokens of the decay in place of final_decay_steps, rounded up to full steps."""
    decay_ratio: float = ranged(-1.0, "0.2 decays over the last fifth of the run", above=0, most=1, unset=-1)
    """Length of the decay as a fraction of training.steps, at the end of the run."""
    decay_steps: int = ranged(-1, "leave it out to decay over all steps after the warm-up", least=1, unset=-1)
    """Length of the decay in steps, right after the warm-up, independent of training.steps."""
    decay_tokens: int = ranged(-1, "leave it out to give decay_steps", least=1, unset=-1)
    """Tokens of the decay in place of decay_steps, rounded up to full steps."""
    min_lr_factor: float = ranged(0.1, "0.1 ends at a tenth of optimizer.lr", least=0, most=1)
    """Learning rate at the end of the decay and after it, as a factor of optimizer.lr."""


_DECAYS = Needs("lr_schedule.decay other than none and min_lr_factor below 1", lambda section: decays(section))
NEEDS = {
    "decay": Needs(
        "lr_schedule.min_lr_factor below 1", lambda section: section.decay == "none" or section.min_lr_factor < 1
    ),
    "min_lr_factor": Needs("lr_schedule.decay other than none", lambda section: section.decay != "none"),
    **dict.fromkeys(("final_decay_steps", "final_decay_tokens", "decay_ratio", "decay_steps", "decay_tokens"), _DECAYS),
}
"""See Needs."""


# Position between the peak (0) and the minimum (1) as a function of the completed fraction of the decay. "sqrt" is the
# 1-sqrt decay of Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", 2024.
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "none": lambda progress: 0.0,  # noqa: ARG005
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 * (1.0 - math.cos(math.pi * progress)),
    "sqrt": math.sqrt,
}


def check_schedule(section: ScheduleConfig) -> list[Problem]:
    """Check [lr_schedule]. warmup_steps may exceed training.steps, so that a shortened run keeps its warm-up."""
    return check_ranges(section, "lr_schedule")


def decays(section: ScheduleConfig) -> bool:
    """Whether the learning rate falls after the warm-up."""
    return section.decay != "none" and section.min_lr_factor < 1.0


def decay_span(section: ScheduleConfig, steps: int) -> tuple[int, int]:
    """(last step before the decay, length of the decay in steps), also for decay = "none".

    section: with tokens and the ratio of the warm-up resolved to steps. steps: of the run.
    """
    if section.decay_steps != -1:
        return section.warmup_steps, section.decay_steps
    if section.final_decay_steps != -1:
        length = min(section.final_decay_steps, steps)
    elif section.decay_ratio != -1.0:
        length = max(1, round(section.decay_ratio * steps))
    else:
        return section.warmup_steps, max(1, steps - section.warmup_steps)
    return steps - length, length


def depends_on_steps(section: ScheduleConfig) -> bool:
    """Whether a change of training.steps can change the learning rate of a step.

    If not, an extended run equals a run that was longer from the start.
    """
    return decays(section) and section.decay_steps == -1


def build_schedule(section: ScheduleConfig, peak_lr: float, steps: int) -> Callable[[int], float]:
    """Learning rate as a function of the step, from 1: `peak_lr` times the smaller of warm-up and decay.

    section: with tokens and the ratio of the warm-up resolved to steps.
    """
    shape, minimum = DECAY_SHAPES[section.decay], section.min_lr_factor
    start, length = decay_span(section, steps)

    def lr(step: int) -> float:
        warmup = min(1.0, step / section.warmup_steps) if section.warmup_steps else 1.0
        progress = min(max(step - start, 0) / length, 1.0)
        decay = minimum + (1.0 - minimum) * (1.0 - shape(progress))  # exact at both ends
        return peak_lr * min(warmup, decay)

    return lr


def describe_schedule(section: ScheduleConfig, peak_lr: float, steps: int) -> str:
    """The phases of the schedule with their steps, for the log: "warm-up to 0.001 in steps 1 to 10, then constant".

    section: with tokens and the ratio of the warm-up resolved to steps.
    """
    phases, warmup = [], section.warmup_steps
    start, length = decay_span(section, steps)
    if warmup:
        phases.append(f"warm-up to {peak_lr:g} in steps 1 to {warmup:,}")
    if not decays(section):
        phases.append("then constant" if warmup else f"constant at {peak_lr:g}")
    if not decays(section) or start >= steps:
        return ", ".join(phases)
    if start > warmup:
        phases.append(f"constant to step {start:,}" if warmup else f"constant at {peak_lr:g} to step {start:,}")
    end, lowest = start + length, section.min_lr_factor * peak_lr
    origin = "" if phases else f"from {peak_lr:g} "
    phases.append(f"{section.decay} decay {origin}to {lowest:g} in steps {start + 1:,} to {end:,}")
    if end < steps:
        phases.append("then constant")
    return ", ".join(phases) + ("; the smaller of both where they overlap" if start < warmup else "")
