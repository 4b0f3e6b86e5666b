"""Learning-rate schedule: a pure function of the step, without state to checkpoint."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from titanlite.data.steps import ONE_STAGE, BatchStage, stage_index, tokens_until
from titanlite.optim.lengths import Length, in_steps
from titanlite.optim.optimizer import OWN, OptimizerConfig, optimizers_of
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Needs, setting

_FALLS = Needs(
    "lr_schedule.min_lr_factor below 1", lambda section: section.decay == "none" or section.min_lr_factor < 1
)
_HAS_DECAY = Needs("lr_schedule.decay other than none", lambda section: section.decay != "none")
_DECAYS = Needs("lr_schedule.decay other than none and min_lr_factor below 1", lambda section: decays(section))


@dataclass(frozen=True)
class ScheduleConfig:
    """Warm-up, constant learning rate, decay. Steps count from 1; step 1 has a learning rate above 0.

    A length is a number of steps, or a text: "2_000_000 tokens", rounded up to full steps, or "5 %" of training.steps,
    rounded. At most one key gives the length of the decay; by default, it is over all steps after the warm-up.
    """

    warmup_steps: Length = setting(100, "0 starts at the full learning rate", least=0)
    """Length of the linear warm-up; may exceed training.steps."""
    decay: str = setting("linear", needs=_FALLS)
    """Shape of the decay from optimizer.lr to min_lr_factor x optimizer.lr; none keeps optimizer.lr."""
    final_decay_steps: Length = setting(-1, "leave it out to decay after the warm-up", least=1, unset=-1, needs=_DECAYS)
    """Length of the decay at the end of the run, at most the entire run: warm-up, stable, decay (WSD)."""
    decay_ratio: float = setting(
        -1.0, "0.2 decays over the last fifth of the run", above=0, most=1, unset=-1, needs=_DECAYS
    )
    """Length of the decay as a fraction of training.steps, at the end of the run."""
    decay_steps: Length = setting(-1, "leave it out to decay after the warm-up", least=1, unset=-1, needs=_DECAYS)
    """Length of the decay right after the warm-up. In steps or tokens, it is independent of training.steps."""
    min_lr_factor: float = setting(0.1, "0.1 ends at a tenth of optimizer.lr", least=0, most=1, needs=_HAS_DECAY)
    """Learning rate at the end of the decay and after it, as a factor of optimizer.lr."""
    over: Literal["steps", "tokens"] = "steps"
    """Progress inside the warm-up and the decay: by steps, or by tokens seen, which differ if training.stages change
    the size of a step. The first and the last step of both are the same."""
    batch_scaling: Literal["none", "sqrt"] = "none"
    """sqrt: the learning rate is multiplied by the square root of the tokens of a step, relative to the first stage."""


# Position between the peak (0) and the minimum (1) as a function of the completed fraction of the decay. "sqrt" is the
# 1-sqrt decay of Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", 2024.
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "none": lambda progress: 0.0,  # noqa: ARG005
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 * (1.0 - math.cos(math.pi * progress)),
    "sqrt": math.sqrt,
}


def decays(section: ScheduleConfig) -> bool:
    """Whether the learning rate falls after the warm-up."""
    return section.decay != "none" and section.min_lr_factor < 1.0


def decay_span(section: ScheduleConfig, steps: int) -> tuple[int, int]:
    """(last step before the decay, length of the decay in steps), also for decay = "none".

    section: with lengths in steps. steps: of the run.
    """
    warmup, after_warmup, final = (
        in_steps(getattr(section, key)) for key in ("warmup_steps", "decay_steps", "final_decay_steps")
    )
    if after_warmup != -1:
        return warmup, after_warmup
    if final != -1:
        length = min(final, steps)
    elif section.decay_ratio != -1.0:
        length = max(1, round(section.decay_ratio * steps))
    else:
        return warmup, max(1, steps - warmup)
    return steps - length, length


def depends_on_steps(section: ScheduleConfig) -> bool:
    """Whether a change of training.steps can change the learning rate of a step.

    If not, an extended run equals a run that was longer from the start.
    """
    return decays(section) and section.decay_steps == -1


def build_schedule(
    section: ScheduleConfig, peak_lr: float, steps: int, stages: Sequence[BatchStage] = ONE_STAGE
) -> Callable[[int], float]:
    """Learning rate as a function of the step, from 1: `peak_lr` times the smaller of warm-up and decay.

    section: with lengths in steps. stages: of the training.
    """
    shape, minimum = DECAY_SHAPES[section.decay], section.min_lr_factor
    start, length = decay_span(section, steps)
    warmup_steps = in_steps(section.warmup_steps)

    def passed(step: int) -> int:
        return tokens_until(stages, step) if section.over == "tokens" else step

    warmup_end, begin, end = passed(warmup_steps), passed(start), passed(start + length)

    def lr(step: int) -> float:
        warmup = min(1.0, passed(step) / warmup_end) if warmup_steps else 1.0
        progress = min(max(passed(step) - begin, 0) / (end - begin), 1.0)
        decay = minimum + (1.0 - minimum) * (1.0 - shape(progress))  # exact at both ends
        scale = 1.0
        if section.batch_scaling == "sqrt":
            scale = math.sqrt(stages[stage_index(stages, step)].tokens / stages[0].tokens)
        return scale * peak_lr * min(warmup, decay)

    return lr


@dataclass(frozen=True)
class Ramp:
    """A hyper-parameter on its way from `first` to `last`, which it has from the step `steps` on."""

    first: float
    last: float
    shape: str
    steps: int

    def __call__(self, step: int) -> float:
        return self.first + (self.last - self.first) * DECAY_SHAPES[self.shape](min(step / self.steps, 1.0))

    def __str__(self) -> str:
        return f"{self.first:g} to {self.last:g} in steps 1 to {self.steps:,}, {self.shape}"


def ramps(section: OptimizerConfig, steps: int) -> dict[str, Ramp]:
    """Those of weight_decay and momentum, if they change. steps: of the run."""
    found = {}
    if section.weight_decay_end != -1:
        found["weight_decay"] = Ramp(section.weight_decay, section.weight_decay_end, section.weight_decay_shape, steps)
    if section.momentum_start != -1:
        momentum = (section.momentum_start, section.momentum, section.momentum_shape)
        found["momentum"] = Ramp(*momentum, in_steps(section.momentum_steps))
    return found


def build_factors(section: OptimizerConfig, steps: int) -> Callable[[int], Mapping[str, float]]:
    """Factors of the groups' weight_decay and momentum by step, from 1; without those that do not change."""
    found = ramps(section, steps)
    return lambda step: {key: ramp(step) / getattr(section, key) for key, ramp in found.items()}


def check_schedules(schedule: ScheduleConfig, optimizer: OptimizerConfig) -> list[Problem]:
    """Problems of shapes, which a plugin may have let leave 0 to 1, and of what they change."""
    rules = Rules("optimizer", optimizer)
    remedy = "write the value that it has without a schedule"
    uses = bool(optimizers_of(optimizer) & {"Muon", "SGD"}) or not optimizers_of(optimizer) <= OWN
    rules.needs("momentum_start", optimizer.momentum_start == -1 or uses, "Muon or SGD")
    if rules.problems:
        return rules.problems
    rule = "a value above 0 with optimizer.weight_decay_end"
    rules.require("weight_decay", optimizer.weight_decay_end == -1 or optimizer.weight_decay > 0, rule, remedy)
    rule = "a value above 0 with optimizer.momentum_start"
    rules.require("momentum", optimizer.momentum_start == -1 or optimizer.momentum > 0, rule, remedy)
    if rules.problems:
        return rules.problems
    for key, ramp in ramps(optimizer, 100).items():
        values = [replace(ramp, steps=100)(step) for step in range(101)]
        bound = 1 if key == "momentum" else math.inf
        rule = f"a shape with which {key} is at least 0{' and below 1' * (bound == 1)}; it is {min(values):g} to "
        fits = min(values) >= 0 and max(values) < bound
        rules.require(f"{key}_shape", fits, f"{rule}{max(values):g}", '"linear"')
    whole = replace(schedule, warmup_steps=0, decay_steps=100, final_decay_steps=-1)
    least = min(map(build_schedule(whole, 1.0, 100), range(101)))
    own = Rules("lr_schedule", schedule, rules.problems)
    own.require("decay", least >= 0, f"a shape with a rate of at least 0; it is {least:g} of optimizer.lr", '"linear"')
    return own.problems


def describe_schedule(section: ScheduleConfig, peak_lr: float, steps: int) -> str:
    """The phases of the schedule with their steps, for the log: "warm-up to 0.001 in steps 1 to 10, then constant".

    section: with lengths in steps.
    """
    phases, warmup = [], in_steps(section.warmup_steps)
    start, length = decay_span(section, steps)
    if warmup:
        phases.append(f"warm-up to {peak_lr:g} in steps 1 to {warmup:,}")
    if not decays(section):
        phases.append("then constant" if warmup else f"constant at {peak_lr:g}")
    overlap = ""
    if decays(section) and start < steps:
        if start > warmup:
            phases.append(f"constant to step {start:,}" if warmup else f"constant at {peak_lr:g} to step {start:,}")
        end, lowest = start + length, section.min_lr_factor * peak_lr
        origin = "" if phases else f"from {peak_lr:g} "
        phases.append(f"{section.decay} decay {origin}to {lowest:g} in steps {start + 1:,} to {end:,}")
        if end < steps:
            phases.append("then constant")
        overlap = "; the smaller of both where they overlap" * (start < warmup)
    tokens = "; progress by tokens" * (section.over == "tokens")
    scaling = "; times the square root of the tokens of a step, relative to stage 1" * (section.batch_scaling == "sqrt")
    return ", ".join(phases) + overlap + tokens + scaling
