"""The [training] section: how much is trained, in which batches, in which precision."""

import math
from dataclasses import dataclass
from typing import Literal

from titanlite.parallel.clip import NormType
from titanlite.precision import DtypeName
from titanlite.runtime.errors import Problem, require


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
    -1: local_batch_size x data degree, resolved at the first start and kept by its checkpoints."""
    max_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 or less: no clipping."""
    norm_type: NormType = "2"
    """Which norm of all gradients: "2", or "inf", the largest absolute value."""
    dtype: DtypeName = "float32"
    """Dtype of the parameters, and so of gradients and optimizer state."""
    mixed_precision_param: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Dtype of the computation; auto: bfloat16 on CUDA, training.dtype on CPU and where that is float64."""
    mixed_precision_reduce: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Dtype of gradient reductions; auto: float32 on CUDA, training.dtype on CPU and where that is float64."""
    gc_freq: int = 50
    """Python's garbage is collected every so many steps, at the same step on all ranks."""


def check_training(section: TrainingConfig, data_degree: int, tp: int) -> list[Problem]:
    """data_degree: number of data-parallel ranks, 0 where it is not known because of another problem.

    tp: number of tensor-parallel ranks, each with a part of every sequence.
    """
    key = "training"
    problems = [
        problem
        for name in ("steps", "seq_len", "local_batch_size", "gc_freq")
        for problem in require(
            getattr(section, name) >= 1, f"{key}.{name}", getattr(section, name), "at least 1", "give a positive number"
        )
    ]
    if tp > 1:
        problems += require(
            section.seq_len % tp == 0,
            f"{key}.seq_len",
            section.seq_len,
            f"a multiple of parallelism.tp = {tp}, whose ranks share each sequence evenly",
            f"{key}.seq_len = {max(section.seq_len // tp, 1) * tp}",
        )
    batch, micro = section.global_batch_size, section.local_batch_size
    problems += require(
        batch == -1 or batch >= 1,
        f"{key}.global_batch_size",
        batch,
        "at least 1, or -1",
        "-1 takes local_batch_size x data degree",
    )
    if not problems and batch != -1 and data_degree > 0 and batch % (micro * data_degree):
        unit = micro * data_degree
        fitting = math.gcd(batch // data_degree, micro)
        smaller = f"{key}.local_batch_size = {fitting}, or " if batch % data_degree == 0 else ""
        problems += require(
            False,
            f"{key}.global_batch_size",
            batch,
            f"a multiple of local_batch_size {micro} x data degree {data_degree} = {unit}",
            f"{smaller}{key}.global_batch_size = {-(-batch // unit) * unit}",
        )
    return problems
