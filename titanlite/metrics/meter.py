"""Aggregation of step statistics over ranks and steps: one collective and one host read per log interval."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, median_low
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from titanlite.batch import NUM_TOTALS, StepStats
from titanlite.metrics.records import WATCH_PREFIX, Record
from titanlite.models.watch import PARTS, Watched
from titanlite.ranks.agreement import run_on_all_ranks
from titanlite.runtime.logging import log
from titanlite.runtime.memory import peak_memory_bytes

SLOW = 1.3
"""Ratio to the median above which a rank is slow."""
SLOW_STEPS = 20
"""Steps for which a rank must stay slow before it is named."""


@dataclass(frozen=True)
class Place:
    """Host of a rank, and its pipeline rank. Pipeline ranks hold different layers, so only equal ones are compared."""

    host: str
    pp_rank: int


@dataclass(frozen=True)
class Slowest:
    """The rank with the highest ratio of its compute time to the median of its peers."""

    rank: int
    host: str
    ratio: float


class SlowRanks:
    """Compares the compute times of ranks at log lines, and warns once about each rank that stays slow.

    places: by rank. logs: whether this rank logs the warnings.
    """

    def __init__(self, places: Sequence[Place], *, logs: bool) -> None:
        self._places = places
        self._logs = logs
        self._slow_steps = [0] * len(places)
        self._warned: set[int] = set()

    def compare(self, num_steps: int, compute_s: Sequence[float]) -> Slowest | None:
        """The slowest rank of the last `num_steps` steps; None if no rank has a peer. Logs the warnings.

        compute_s: median of a rank's compute time per step, by rank.
        """
        ratios = self._ratios(compute_s)
        for rank, place in enumerate(self._places):
            ratio = ratios.get(rank, 0.0)
            self._slow_steps[rank] = self._slow_steps[rank] + num_steps if ratio > SLOW else 0
            if self._slow_steps[rank] >= SLOW_STEPS and rank not in self._warned:
                self._warned.add(rank)
                if self._logs:
                    log.warning(
                        "rank %d on %s has been slow for %d steps: it computes and waits for data %.2f times as long "
                        "as the median of its pipeline stage, %.3g s per step; the other ranks wait for it",
                        *(rank, place.host, self._slow_steps[rank], ratio, compute_s[rank]),
                    )
        if not ratios:
            return None
        slowest = max(ratios, key=lambda rank: ratios[rank])
        return Slowest(slowest, self._places[slowest].host, ratios[slowest])

    def _ratios(self, compute_s: Sequence[float]) -> Mapping[int, float]:
        """Ratio to the median of the peers, by rank. Of two ranks, the faster one is the median."""
        stages: dict[int, list[int]] = {}
        for rank, place in enumerate(self._places):
            stages.setdefault(place.pp_rank, []).append(rank)
        medians = {stage: median_low(compute_s[rank] for rank in ranks) for stage, ranks in stages.items()}
        return {
            rank: compute_s[rank] / medians[stage]
            for stage, ranks in stages.items()
            if len(ranks) > 1 and medians[stage] > 0
            for rank in ranks
        }


@dataclass(frozen=True)
class MeterState:
    """Totals after a step, over the entire mesh, that a resumed run continues; the same on all ranks."""

    tokens_seen: int
    """Input positions of all steps so far, whether valid or not."""
    skipped_steps: int
    """Steps so far whose update was skipped."""
    by_source: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """NUM_TOTALS numbers by name of the source: losses and tokens since the last log line, sequences of the entire run.
    Empty if there is only one source."""
    interval: Sequence[float] = field(default_factory=lambda: [0.0, 0.0])
    """Sum of losses and number of tokens since the last log line, without skipped steps."""


def is_log_step(step: int, *, log_freq: int, total_steps: int) -> bool:
    """Whether `step` (from 1) is logged: the first, the last, and every log_freq-th. The same on all ranks."""
    return step == 1 or step == total_steps or step % log_freq == 0


class Work(NamedTuple):
    """Of a step: input positions, and floating-point operations of forward and backward."""

    tokens: int
    flops: float


class Meter:
    """Accumulates the statistics of steps between log lines; all ranks of `group` must flush at the same steps."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        work: Callable[[int], Work],
        peak_flops: float | None,
        sources: Sequence[str] = (),
        terms: Sequence[str] = (),
        watched: Watched | None = None,
        slow_ranks: SlowRanks | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """
        group: all ranks of the mesh, one device each. device: this rank's device, which holds the StepStats.
        work: of a step, a pure function of its number. peak_flops: of one device; None if unknown: no MFU.
        sources: names of the data sources. terms: names of the terms of the loss. watched: of this rank; None if no
        code notes values. slow_ranks: None: ranks are not compared.
        The first interval begins now, or with `start`.
        """
        self._group = group
        self._device = device
        self._work = work
        self._work_of_interval = Work(0, 0.0)
        self._mesh_peak_flops = None if peak_flops is None else peak_flops * group.size()
        self._watched = watched
        self._slow_ranks = slow_ranks
        self._clock = clock
        self._skipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._interval = torch.zeros(2, dtype=torch.float64, device=device)
        self._names = tuple(sources)
        self._sources = self._names if len(sources) > 1 else ()
        self._terms = tuple(terms)
        self._by_source = torch.zeros(NUM_TOTALS, len(self._sources), dtype=torch.float64, device=device)
        self._tokens_seen = 0
        self._last: tuple[int, StepStats, float] | None = None
        self._num_steps = 0
        self._compute_s: list[float] = []
        self._data_wait_s = self._data_wait_s_logged = 0.0
        self._bad_rows = 0
        self._interval_start = clock()

    def start(self) -> None:
        """Begin the first interval now; call it right before the first batch."""
        self._interval_start = self._clock()

    @contextmanager
    def left_out(self) -> Iterator[Callable[[], float]]:
        """Exclude the time inside the context from the interval. Yields a function: seconds since the context began.

        Waits for the device's work on the steps first. Code inside the context must wait for its own device work.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        begin = self._clock()
        yield lambda: self._clock() - begin
        self._interval_start += self._clock() - begin

    @property
    def tokens_seen(self) -> int:
        """Input positions of all steps so far."""
        return self._tokens_seen

    def state(self) -> MeterState:
        """Totals after the last noted step. A collective that waits for the device."""
        totals = torch.cat([self._interval, self._by_source.T.flatten()])
        dist.all_reduce(totals, group=self._group)
        values = totals.tolist()
        by_source = {name: values[2 + n * NUM_TOTALS :][:NUM_TOTALS] for n, name in enumerate(self._sources)}
        return MeterState(self._tokens_seen, int(self._skipped_steps.item()), by_source, values[:2])

    def load_state(self, state: MeterState) -> None:
        """Continue from the totals of an earlier start, whose batch size may have differed. Call before any step.

        Sources are matched by name: a new source starts at 0, as one with another number of totals; a removed one is
        dropped.
        """
        assert self._last is None, "load_state after a step"
        self._tokens_seen = state.tokens_seen
        self._skipped_steps.fill_(state.skipped_steps)
        if self._group.rank() != 0:  # the sums are over all ranks, so only rank 0 adds them
            return
        self._interval.copy_(torch.tensor(state.interval, dtype=torch.float64))
        if self._sources:
            zeros = (0.0,) * NUM_TOTALS
            totals = [state.by_source.get(name, zeros) for name in self._sources]
            totals = [found if len(found) == NUM_TOTALS else zeros for found in totals]
            self._by_source.copy_(torch.tensor(totals, dtype=torch.float64).T)

    def update(
        self, step: int, stats: StepStats, *, lr: float, data_wait_s: float, bad_rows: int, compute_s: float = 0.0
    ) -> None:
        """Note a finished step. Launches at most a few small kernels; never waits for the device.

        data_wait_s: this rank's total since this start. bad_rows: this data rank's total over the entire run; it is
        summed over ranks, so ranks other than the data leader pass 0. compute_s: this rank's, of this step.
        """
        self._last = (step, stats, lr)
        self._num_steps += 1
        work, before = self._work(step), self._work_of_interval
        self._tokens_seen += work.tokens
        self._work_of_interval = Work(before.tokens + work.tokens, before.flops + work.flops)
        self._skipped_steps += stats.skipped
        # The loss of a skipped step may not be finite; its sequences count, since they are consumed.
        skipped, num_valid = stats.skipped.bool(), stats.num_valid.to(torch.float64)
        counted = num_valid * (self._group.rank() == 0)  # the same number on all ranks, so only rank 0 counts it
        self._interval += torch.where(skipped, 0.0, torch.stack([stats.loss_sum, counted]))
        if self._sources:
            self._by_source[:2] += torch.where(skipped, 0.0, stats.by_source[:2])
            self._by_source[2] += stats.by_source[2]
        self._data_wait_s = data_wait_s
        self._bad_rows = bad_rows
        self._compute_s.append(compute_s)

    def flush(
        self,
        epochs: Sequence[float] = (),
        too_long: Mapping[str, int] | None = None,
        experts: Mapping[str, float] | None = None,
        goodput: Callable[[], Mapping[str, float]] = dict,
        bits: Mapping[str, str | None] | None = None,
    ) -> Record:
        """End the interval; return the record of the last noted step, the same on all ranks except for times.

        epochs, too_long: this data rank's, by source; they are summed over ranks, so ranks other than the data leader
        pass 0. The keys of too_long are those of its columns, the same on all ranks. experts: of the interval. goodput:
        Goodput.columns, called when the steps have ended. bits: columns of Record. A collective over the group. The
        host waits for the device here only (and before it for experts), so the measured time is that of the steps.
        """
        assert self._last is not None, "flush without a step"
        assert self._num_steps > 0, "flush without a step since the last one"
        step, stats, lr = self._last
        too_long = too_long or {}
        of_mesh, of_ranks = self._reduce(stats, [*epochs, *too_long.values()])
        now = self._clock()

        grad_norm, num_valid, skipped_steps, mean_loss, bad_rows, loss_sum, num_counted, *others = of_mesh
        data_time_s, memory, watched, compute_s, max_score = zip(*of_ranks, strict=True)
        of_terms, others = others[: PARTS * len(self._terms)], others[PARTS * len(self._terms) :]
        of_epochs, others = others[: len(epochs)], others[len(epochs) :]
        of_too_long, by_source = others[: len(too_long)], others[len(too_long) :]
        step_time_s = (now - self._interval_start) / self._num_steps
        tokens_per_second = self._work_of_interval.tokens / self._num_steps / step_time_s
        flops = self._work_of_interval.flops / self._num_steps / step_time_s
        slowest = self._slow_ranks.compare(self._num_steps, compute_s) if self._slow_ranks else None
        record = Record(
            step=step,
            loss=mean_loss,
            grad_norm=grad_norm,
            lr=lr,
            num_valid=int(num_valid),
            tokens_seen=self._tokens_seen,
            tokens_per_second=tokens_per_second,
            step_time_s=step_time_s,
            data_time_s=max(data_time_s),
            memory_gib=max(memory) / 2**30,
            skipped_steps=int(skipped_steps),
            bad_rows=int(bad_rows),
            interval_loss=loss_sum / num_counted if num_counted else None,
            max_score=None if stats.max_score is None else max(max_score),
            mfu=None if self._mesh_peak_flops is None else flops / self._mesh_peak_flops,
            slowest_rank=slowest.rank if slowest else None,
            slowest_host=slowest.host if slowest else None,
            slowest_ratio=slowest.ratio if slowest else None,
            epochs={f"epoch/{name}": epoch for name, epoch in zip(self._names, of_epochs, strict=False)},
            too_long={name: int(count) for name, count in zip(too_long, of_too_long, strict=True)},
            by_source=self._describe_sources(by_source),
            terms={f"term/{name}": sum(of_terms[n * PARTS :][:PARTS]) for n, name in enumerate(self._terms)},
            watched=self._watched_means() if any(watched) else {},
            experts=experts or {},
            goodput=goodput(),
            **(bits or {}),
        )
        self._interval.zero_()
        self._by_source[:2] = 0
        self._interval_start = now
        self._num_steps, self._work_of_interval = 0, Work(0, 0.0)
        self._compute_s.clear()
        self._data_wait_s_logged = self._data_wait_s
        return record

    def _describe_sources(self, totals: Sequence[float]) -> dict[str, float]:
        """Record.by_source from the totals over the mesh: losses, tokens, sequences, each by source."""
        count = len(self._sources)
        losses, tokens, sequences = (totals[i * count : (i + 1) * count] for i in range(NUM_TOTALS))
        by_source = list(zip(self._sources, losses, tokens, sequences, strict=True))
        return {f"loss/{name}": loss / num_valid for name, loss, num_valid, _ in by_source if num_valid} | {
            f"share/{name}": number / sum(sequences) for name, _, _, number in by_source if sum(sequences)
        }

    def _watched_means(self) -> dict[str, float]:
        """Record.watched. A collective: the stages of a pipeline have different names."""
        found: dict[str, tuple[list[list[float]], list[list[float]], bool]] = {}
        for of_rank in run_on_all_ranks(lambda: self._watched.take() if self._watched else {}, self._group):
            for name, (values, per, root) in of_rank.items():
                of_all_values, of_all_per, _ = found.setdefault(name, ([], [], root))
                of_all_values.append(values)
                of_all_per.append(per)
        sums = {name: (_total(values), _total(per), root) for name, (values, per, root) in found.items()}
        means = {f"{WATCH_PREFIX}{name}": (values / per, root) for name, (values, per, root) in sums.items() if per}
        return {
            name: (math.sqrt(mean) if mean >= 0 else math.nan) if root else mean for name, (mean, root) in means.items()
        }

    def _reduce(self, stats: StepStats, of_sources: Sequence[float]) -> tuple[list[float], list[list[float]]]:
        """(values that are the same on all ranks, then sums; by rank: data time, memory, watched, compute time, score),
        in float64: counts are exact up to 2^53. of_sources: values of the host that are summed over ranks."""
        equal = torch.stack(
            [each.detach().to(torch.float64) for each in (stats.grad_norm, stats.num_valid, self._skipped_steps)]
        )
        data_time_s = (self._data_wait_s - self._data_wait_s_logged) / self._num_steps
        on_host = [data_time_s, peak_memory_bytes(self._device), len(self._watched or ()), median(self._compute_s)]
        score = self._interval.new_zeros(1) if stats.max_score is None else stats.max_score.to(torch.float64).view(1)
        own = torch.cat([self._interval.new_tensor(on_host), score])
        of_ranks = own.new_zeros(self._group.size(), own.numel())
        of_ranks[self._group.rank()] = own  # one collective for all: the sum of these is a gather
        totals = torch.cat(
            [
                of_ranks.flatten(),
                equal if self._group.rank() == 0 else torch.zeros_like(equal),
                stats.mean_loss.detach().to(torch.float64).view(1),
                self._interval.new_tensor([self._bad_rows]),
                self._interval,
                torch.cat(list(stats.terms)) if stats.terms else self._interval.new_zeros(PARTS * len(self._terms)),
                self._interval.new_tensor(of_sources),
                self._by_source.flatten(),
            ]
        )
        dist.all_reduce(totals, group=self._group)
        values: list[float] = totals.tolist()
        width, count = own.numel(), of_ranks.numel()
        return values[count:], [values[begin : begin + width] for begin in range(0, count, width)]


def _total(of_ranks: Sequence[Sequence[float]]) -> float:
    """The sum of the parts of all ranks, see parts_of."""
    return sum(sum(parts) for parts in zip(*of_ranks, strict=True))
