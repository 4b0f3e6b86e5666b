"""One training step: forward, backward and update. train.py calls it, and has everything between steps."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.batch import IGNORE_INDEX, NUM_TOTALS, Batch, StepStats, count_sequences, rows_and_tokens
from titanlite.forward import ModelOnMesh, further_labels, to_device
from titanlite.models.experts import end_step
from titanlite.models.family import copies_in, parameters_of
from titanlite.models.watch import Statistic, Watched
from titanlite.optim.optimizer import NO_AVERAGE, GatedOptimizer, WeightAverage
from titanlite.parallel.clip import SpikeGate, clip_grad_norm_
from titanlite.parallel.data import set_gradient_sync
from titanlite.parallel.exact import SHARE_GRID, ExactGradients, on_grid
from titanlite.parallel.mesh import GradientSync
from titanlite.parallel.pipeline import SharedParameters
from titanlite.profiling.regions import ComputeTime, region


class WeightClip(Protocol):
    """Scales weights after an update by what the forward passes of the step have noted: titanlite/optim/qk_clip.py."""

    def start_step(self) -> None: ...

    def clip_if(self, ok: Tensor, *, counts: bool) -> Tensor: ...


@dataclass(kw_only=True, eq=False)
class Trainer(ModelOnMesh):
    """Trains a parallelized model.

    schedule: the learning rate by step, from 1. factors: see build_factors. sync: see set_gradient_sync. num_sources:
    number of data sources; if there are several, steps also compute the totals by source. qk_clip: None: scores are not
    noted. average: of the weights. spikes: None: no step is a spike. statistics: around the update of steps for which
    is_logged. compute_time: of this rank, started by the caller. enter_stage: called with each step before it begins,
    see Stages. before_update: called in each step before state that checkpoints have is changed. exact: with
    training.bit_equal. loss_grid: see on_grid; 0 without bit_equal. shared: parameters of which other pipeline stages
    have copies.
    """

    optimizer: GatedOptimizer
    schedule: Callable[[int], float]
    factors: Callable[[int], Mapping[str, float]]
    sync: GradientSync | None
    max_norm: float
    num_sources: int
    qk_clip: WeightClip | None = None
    average: WeightAverage = NO_AVERAGE
    spikes: SpikeGate | None = None
    statistics: Sequence[Statistic] = ()
    is_logged: Callable[[int], bool] = field(default=lambda _: False)
    compute_time: ComputeTime = field(default_factory=ComputeTime)
    enter_stage: Callable[[int], None] = field(default=lambda _: None)
    before_update: Callable[[], None] = field(default=lambda: None)
    exact: ExactGradients | None = None
    loss_grid: float = 0.0
    shared: SharedParameters | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.counts_positions = self.mesh.is_first(["tp"])  # all ranks of tp compute the same terms
        self.pp_group = self.mesh.group("pp")
        self.data_group = self.mesh.data_group
        self.accum_dtype = torch.promote_types(next(self.model_parts[0].parameters()).dtype, torch.float32)
        by_heads = self.mesh.section.context_parallel == "heads"
        self.watched = Watched(
            self.model_parts,
            self.mesh.cp_group if by_heads else None,
            (self.mesh.coordinate["tp"], self.mesh.degrees["tp"]),
        )

    def train_step(self, batches: Sequence[Batch]) -> StepStats:
        """Run one optimizer step, in which every valid token of the global batch has equal weight.

        batches: this rank's microbatches of the step, on the device; a pipeline splits each of them further.
        """
        self.step += 1
        self.enter_stage(self.step)
        self.optimizer.zero_grad()
        self.compute_time.before_collectives()
        if self.qk_clip is not None:
            self.qk_clip.start_step()
        if self.exact is not None and not self.exact.is_known:
            self.measure_gradients(batches, self.exact)
        num_valid = self.count(batches)
        dtype = self.accum_dtype if self.exact is None else torch.float64
        mean_loss = torch.zeros((), dtype=dtype, device=self.device)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        row_losses = []
        by_source = torch.zeros(NUM_TOTALS, self.num_sources, dtype=torch.float64, device=self.device)
        for index, batch in enumerate(batches):
            self.set_sync(is_last=index == len(batches) - 1)
            with self.watched.noting():
                shares = self.forward_backward(batch, num_valid)
            mean_loss += (shares if self.exact is None else on_grid(shares, SHARE_GRID)).sum()
            row_losses.append(shares)
            if self.exact is not None:
                loss_sum += on_grid(shares * num_valid, self.loss_grid).sum()
            if self.num_sources > 1:
                losses = shares * num_valid
                losses = losses if self.exact is None else on_grid(losses, self.loss_grid)
                by_source += totals_by_source(losses, batch.labels, batch.sources, self.num_sources)
        if self.shared is not None:
            with region("reduce"):
                self.shared.sum_gradients()
        self.before_update()  # also of what bit_equal rounds by
        with region("clip"):
            squares = None if self.exact is None else self.exact.squares
            grad_norm, shard_norms = clip_grad_norm_(self.model_parts, self.max_norm, self.pp_group, squares)
            if self.exact is not None:
                self.exact.end_step()
        self.optimizer.set_lr(self.schedule(self.step), self.factors(self.step))
        ok = (num_valid > 0) & grad_norm.isfinite()
        spike_ratio = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.spikes is not None:
            spike_ratio = self.spikes.ratio(self.step, grad_norm)
            if self.spikes.skips:
                ok &= spike_ratio <= self.spikes.factor
        max_score = None
        with region("update"), ExitStack() as stack:
            if self.statistics and self.is_logged(self.step):
                stack.enter_context(self.watched.noting())
                named, copies = parameters_of(self.model_parts), copies_in(self.model_parts, self.mesh.coordinate["pp"])
                for statistic in self.statistics:
                    stack.enter_context(statistic({name: named[name] for name in named if name not in copies}))
            self.optimizer.step_if(ok)
            if self.qk_clip is not None:
                max_score = self.qk_clip.clip_if(ok, counts=count_sequences(batches) > 0)
            self.average.update_if(ok)
            end_step(self.mixtures, ok, self.mesh.position_group)
        self.watched.end_step(ok)
        return StepStats(
            mean_loss * self.counts_loss,
            (mean_loss * num_valid.to(torch.float64) if self.exact is None else loss_sum) * self.counts_loss,
            grad_norm,
            num_valid,
            skipped=~ok,
            by_source=by_source * self.counts_loss,
            row_losses=torch.cat(row_losses)[: count_sequences(batches)],
            shard_norms=shard_norms,
            spike_ratio=spike_ratio,
            max_score=max_score,
            terms=self.term_shares(),
        )

    def measure_gradients(self, batches: Sequence[Batch], exact: ExactGradients) -> None:
        """Compute the gradients of a run's first step once more than needed, to know how large they are."""
        num_valid = self.count(batches)
        for index, batch in enumerate(batches):
            self.set_sync(is_last=index == len(batches) - 1)
            self.forward_backward(batch, num_valid)
        exact.end_step()
        self.optimizer.zero_grad()

    def set_sync(self, *, is_last: bool) -> None:
        """Set whether the next batch reduces gradients. is_last: whether it is the last one of the step."""
        set_gradient_sync(self.model_parts, self.sync, is_last=is_last)
        if self.pipeline is not None and self.exact is not None:
            self.pipeline.reduces = is_last

    def count(self, batches: Sequence[Batch]) -> Tensor:
        """Number of valid labels of the global batch, see count_valid_tokens; sets the other denominators."""
        with region("reduce"):
            num_valid = self.count_valid_tokens(batches)
            if self.mixtures:
                self.count_rows_and_tokens(batches)
            self.count_terms(batches)
        return num_valid

    def count_valid_tokens(self, batches: Sequence[Batch]) -> Tensor:
        """Number of valid labels of the global batch: int64 scalar on the device; one all-reduce over the data axes."""
        num_valid = torch.stack([(batch.labels != IGNORE_INDEX).sum() for batch in batches]).sum()
        dist.all_reduce(num_valid, group=self.data_group)
        return num_valid

    def count_rows_and_tokens(self, batches: Sequence[Batch]) -> None:
        """Set the denominators of the losses of the routers; one all-reduce over the data axes."""
        counts = to_device(torch.tensor(rows_and_tokens(batches)), self.device)
        dist.all_reduce(counts, group=self.data_group)
        for mixture in self.mixtures:
            mixture.start_step(*counts.clamp(min=1).unbind())

    def count_terms(self, batches: Sequence[Batch]) -> None:
        """Set the denominators of the terms of the objective, if it has any; one all-reduce over the data axes."""
        for head in self.heads_with_terms:
            each = [head.computation.counts(batch.labels, further_labels(batch)) for batch in batches]
            counts = torch.stack(each).sum(0)
            dist.all_reduce(counts, group=self.data_group)
            head.start_step(counts)

    def term_shares(self) -> list[Tensor]:
        """StepStats.terms of the step."""
        sums = [head.term_sums for head in self.heads_with_terms if head.term_sums is not None]
        return [parts for each in sums for parts in (each * self.counts_positions).unbind(1)]

    def forward_backward(self, batch: Batch, num_valid: Tensor) -> Tensor:
        """Accumulate the gradients of this microbatch's share of the mean loss; return the share of each row, (rows,).

        The shares of all microbatches and data ranks add up to the mean loss. In a pipeline they are 0 except on the
        last stage.
        """
        arguments, tokens = self.forward_arguments(batch, num_valid), self.cp_shard(batch.tokens)
        if self.pipeline is not None:
            return self.sum_over_cp(self.pipeline.forward_backward(tokens, **arguments))
        with region("forward"):
            shares: Tensor = self.model_parts[0](tokens, **arguments)
        with region("backward"):
            shares.sum().backward()
        return self.sum_over_cp(shares.detach())


def totals_by_source(loss_sums: Tensor, labels: Tensor, sources: Tensor, num_sources: int) -> Tensor:
    """Totals of these rows: float64 (NUM_TOTALS, num_sources), in which counts are exact up to 2^53.

    loss_sums: (rows,). labels: int64 (rows, seq_len). sources: int64 (rows,), from 0. All on one device; no host read.
    A loss that is not finite affects the totals of its own source only.
    """
    num_valid = (labels != IGNORE_INDEX).sum(1)
    values = torch.stack([value.to(torch.float64) for value in (loss_sums, num_valid, num_valid > 0)])
    is_of = sources == torch.arange(num_sources, device=sources.device)[:, None]
    return torch.where(is_of, values[:, None], 0.0).sum(-1)
