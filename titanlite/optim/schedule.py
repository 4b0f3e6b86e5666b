"""The learning rate as a pure function of the step: nothing to checkpoint, nothing to resume."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ScheduleConfig:
    """Warm-up, stable, decay. Steps count from 1; step 1 already has a learning rate above 0."""

    warmup_steps: int = 100
    """Steps of linear warm-up; may be as large as training.steps or larger."""
    decay: Literal["none", "linear", "cosine", "sqrt"] = "linear"
    """Shape of the decay from optimizer.lr to min_lr_factor * optimizer.lr; "none" keeps optimizer.lr."""
    decay_steps: int = -1
    """Steps of decay at the end of the run; -1: decay_ratio says it. Give one of the two."""
    decay_ratio: float = -1.0
    """Decay as a share of training.steps; -1: all steps after the warm-up (where decay_steps is -1 too)."""
    min_lr_factor: float = 0.1
    """Learning rate at the last step, as a factor of optimizer.lr."""
