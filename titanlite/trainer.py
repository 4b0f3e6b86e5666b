"""The training loop: it receives finished parts, and its step reads as the maths of one update."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.data.loader import Batch, Loader
from titanlite.forward import ModelOnMesh, on_device
from titanlite.labels import IGNORE_INDEX
from titanlite.metrics.by_source import NUM_TOTALS, totals_by_source
from titanlite.metrics.meter import Meter, Record, StepStats, is_log_step
from titanlite.metrics.sinks import Sinks
from titanlite.models.family import LanguageModel
from titanlite.optim.optimizer import GatedOptimizer
from titanlite.parallel.clip import NormType, clip_grad_norm_
from titanlite.parallel.data import gradient_sync
from titanlite.parallel.mesh import GradientSync
from titanlite.parallel.pipeline import Pipeline
from titanlite.parallel.tensor import parallel_loss
from titanlite.runtime.errors import DataError, Problem, UserError, require
from titanlite.runtime.garbage import PacedGarbageCollection

DtypeName = Literal["float32", "float64", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}


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


class Trainer(ModelOnMesh):
    """Trains a model that is already on its mesh.

    sync: see gradient_sync. data_group: the process group of the mesh's data axes. schedule: the learning rate by step.
    Steps count from 1. num_sources: of the data; where there are several, steps also give their losses apart.
    """

    def __init__(
        self,
        *,
        model_parts: Sequence[LanguageModel],
        pipeline: Pipeline | None,
        loss: Callable[[Tensor, Tensor, Tensor], Tensor],
        shard_logits: bool,
        optimizer: GatedOptimizer,
        schedule: Callable[[int], float],
        sync: GradientSync | None,
        mesh: DeviceMesh,
        data_group: dist.ProcessGroup,
        device: torch.device,
        max_norm: float,
        norm_type: NormType,
        seed: int,
        num_sources: int,
    ) -> None:
        super().__init__(
            model_parts=model_parts,
            pipeline=pipeline,
            loss=loss,
            shard_logits=shard_logits,
            mesh=mesh,
            device=device,
            seed=seed,
        )
        self.optimizer = optimizer
        self.schedule = schedule
        self.sync = sync
        self.pp_group = mesh.get_group("pp")
        self.data_group = data_group
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.num_sources = num_sources
        parameter_dtype = next(model_parts[0].parameters()).dtype
        self.accum_dtype = torch.promote_types(parameter_dtype, torch.float32)

    def train_step(self, batches: Sequence[Batch]) -> StepStats:
        """One update in which every valid token of the global batch has equal weight.

        batches: this rank's microbatches of the step, on the device; a pipeline cuts each of them further.
        """
        self.step += 1
        self.optimizer.zero_grad()
        num_valid = self.count_valid_tokens(batches)
        mean_loss = torch.zeros((), dtype=self.accum_dtype, device=self.device)
        by_source = torch.zeros(NUM_TOTALS, self.num_sources, dtype=torch.float64, device=self.device)
        for batch, is_last in mark_last(batches):
            with gradient_sync(self.model_parts, self.sync, is_last=is_last):
                shares = self.forward_backward(batch, num_valid)
            mean_loss += shares.sum()
            if self.num_sources > 1:
                by_source += totals_by_source(shares * num_valid, batch.labels, batch.sources, self.num_sources)
        grad_norm = clip_grad_norm_(self.model_parts, self.max_norm, self.norm_type, self.pp_group)
        self.optimizer.set_lr(self.schedule(self.step))
        ok = (num_valid > 0) & grad_norm.isfinite()
        self.optimizer.step_if(ok)
        return StepStats(
            mean_loss * self.counts_loss, grad_norm, num_valid, skipped=~ok, by_source=by_source * self.counts_loss
        )

    def count_valid_tokens(self, batches: Sequence[Batch]) -> Tensor:
        """Valid labels of the whole global batch: int64 scalar on the device, one all-reduce over the data axes."""
        num_valid = torch.stack([(batch.labels != IGNORE_INDEX).sum() for batch in batches]).sum()
        dist.all_reduce(num_valid, group=self.data_group)
        return num_valid

    def forward_backward(self, batch: Batch, num_valid: Tensor) -> Tensor:
        """Adds this microbatch's share of the mean loss's gradient to the parameters; returns the shares of its rows.

        (rows,): those of all microbatches and data ranks add up to the mean loss. In a pipeline they are known on the
        last stage, and 0 on the others.
        """
        keys = self.keys_of(batch)
        with parallel_loss(shard_logits=self.shard_logits):
            if self.pipeline is not None:
                return self.pipeline.forward_backward(batch, num_valid, **keys)
            shares = self.loss(self.model_parts[0](batch.tokens, **keys), batch.labels, num_valid)
            shares.sum().backward()
            return shares.detach()

    def wait_for_ranks(self) -> None:
        """Until all data ranks have come to this step: takes part in its first collective, in place of the step."""
        with suppress(RuntimeError):  # a rank that is gone will not come
            nothing = torch.zeros((), dtype=torch.int64, device=self.device)
            dist.all_reduce(nothing, group=self.data_group)
            nothing.tolist()

    def fit(
        self,
        loader: Loader,
        meter: Meter,
        sinks: Sinks,
        *,
        steps: int,
        log_freq: int,
        gc_freq: int,
        max_bad_rows: int,
        after_first_step: Callable[[], None],
        data_ended: Callable[[], bool],
        after_step: Callable[[int, bool], bool],
        on_data_error: Callable[[DataError], None],
    ) -> Record | None:
        """Trains until `steps` optimizer steps are done or the data has ended; returns the last step's record.

        after_first_step: called after the first step of this start. data_ended: whether no step can follow the one just
        done; the same on all ranks. after_step: called at the end of each step with its number, and whether it is the
        last; where it says so, on all ranks alike, training stops there, and None is returned.
        Between two log steps the host only launches work: the device is asked nothing. Raises UserError where more
        than `max_bad_rows` rows turned out bad, at the next log step, on all ranks alike; DataError where this rank's
        data cannot be used, once `on_data_error` has heard of those of all ranks in the same step.
        """
        assert self.step < steps, "nothing is left to train"
        first_step = self.step + 1
        with PacedGarbageCollection(gc_freq) as garbage:
            meter.start()
            while True:
                try:
                    batches = [on_device(batch, self.device) for batch in loader.next_step()]
                except DataError as error:
                    on_data_error(error)
                    self.wait_for_ranks()
                    raise
                stats = self.train_step(batches)
                meter.update(
                    self.step,
                    stats,
                    lr=self.schedule(self.step),
                    data_wait_s=loader.wait_s,
                    bad_rows=loader.bad_rows if self.counts_rows else 0,
                )
                last = data_ended() or self.step == steps
                if last or is_log_step(self.step, log_freq=log_freq, total_steps=steps):
                    record = meter.flush()
                    sinks.write(record)
                    if record.bad_rows > max_bad_rows:
                        raise UserError(
                            f"data.max_bad_rows = {max_bad_rows}: {record.bad_rows} rows were skipped as bad by step "
                            f"{self.step}; mend the data, or raise data.max_bad_rows"
                        )
                if self.step == first_step:
                    after_first_step()
                stops = after_step(self.step, last)
                if last:
                    return record
                if stops:
                    return None
                garbage.after_step(self.step)


def mark_last(batches: Sequence[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Each microbatch, and whether it is the last one of the step."""
    for index, batch in enumerate(batches):
        yield batch, index == len(batches) - 1
