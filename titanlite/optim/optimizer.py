"""The optimizer: groups by parameter name, and updates that are gated on the device."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and its hyper-parameters."""

    name: Literal["AdamW", "SGD"] = "AdamW"
    """SGD is plain: no momentum, hence no state."""
    lr: float = 3e-4
    """Peak learning rate; [lr_schedule] scales it step by step."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.95
    """AdamW: decay of the second moment."""
    eps: float = 1e-8
    """AdamW: added to the denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay (AdamW), added to the gradient (SGD)."""
    weight_decay_skip: tuple[str, ...] = ("*norm*", "*bias*")
    """Parameters without weight decay: shell patterns, matched against the full parameter name."""
    implementation: Literal["auto", "fused", "foreach", "for-loop"] = "auto"
    """auto: fused AdamW, foreach SGD. Fused SGD is refused: torch has none for sharded parameters."""
