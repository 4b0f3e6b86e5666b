"""The device mesh pp x dp_replicate x dp_shard x tp: all four axes by name, size-1 ones included."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ParallelismConfig:
    """How the processes are laid out. A choice of hardware, never of numerics."""

    dp_replicate: int = 1
    """Data-parallel replicas of the parameters."""
    dp_shard: int = -1
    """Ranks over which parameters, gradients and optimizer state are sharded; -1: what is left of the world."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    gradient_sync: Literal["every", "last", "hybrid"] = "hybrid"
    """When accumulated gradients are reduced: every microbatch (least memory), the last one only (least
    communication), or hybrid: reduce-scatter at every microbatch, all-reduce over replicas at the last."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether sharded parameters are freed between forward and backward; default: all blocks but the last unit."""
