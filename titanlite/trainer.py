"""The training loop: it receives finished parts and reads as the maths of one step."""

from dataclasses import dataclass
from typing import Literal

DtypeName = Literal["float32", "float64", "bfloat16"]


@dataclass(frozen=True)
class TrainingConfig:
    """How much is trained, in which batches, in which precision."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    seq_len: int = 2048
    """Tokens per sequence."""
    local_batch_size: int = 8
    """Sequences per microbatch and data-parallel rank."""
    global_batch_size: int = -1
    """Sequences per optimizer step over all ranks; gradient accumulation follows from it.
    -1: local_batch_size x data degree, resolved at the first start and written to <dump_folder>/config.toml."""
    max_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 or less: no clipping."""
    dtype: DtypeName = "float32"
    """Dtype of the parameters, and so of gradients and optimizer state."""
    mixed_precision_param: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Dtype of the computation; auto: bfloat16 on CUDA, training.dtype on CPU."""
    mixed_precision_reduce: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Dtype of gradient reductions; auto: float32 on CUDA, training.dtype on CPU."""
    gc_freq: int = 50
    """Python's garbage is collected every so many steps, at the same step on all ranks."""
