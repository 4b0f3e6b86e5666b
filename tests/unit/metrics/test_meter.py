"""The meter: the values of a record, and the cost of computing them."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pool import run_ranks
from titanlite.batch import StepStats
from titanlite.metrics import meter as meter_module
from titanlite.metrics.meter import Meter, MeterState, Place, SlowRanks, Work, is_log_step
from titanlite.metrics.records import Record
from titanlite.models.watch import parts_of

CPU = torch.device("cpu")
KEYS = [
    *("step", "loss", "grad_norm", "lr", "num_valid", "tokens_seen", "tokens_per_second", "step_time_s"),
    *("data_time_s", "memory_gib", "skipped_steps", "bad_rows", "interval_loss", "mfu"),
]
SLOWEST = ["slowest_rank", "slowest_host", "slowest_ratio"]  # only with several ranks
HOST_READS = {"tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "__len__"}


class Clock:
    """A clock that advances only when `now` is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class HostReads(TorchFunctionMode):
    """Counts the calls that read values of a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Callable[..., Any], _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_READS:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that reach a device, collectives among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def collectives(self) -> int:
        return sum(count for name, count in self.calls.items() if name.startswith(("c10d", "_c10d")))


def stats_of(
    loss: float,
    grad_norm: float = 1.0,
    num_valid: int = 10,
    skipped: bool = False,
    by_source: Sequence[Sequence[float]] = ((0.0,),) * 3,
) -> StepStats:
    return StepStats(
        torch.tensor(loss, dtype=torch.float64),
        torch.tensor(loss * num_valid, dtype=torch.float64),
        torch.tensor(grad_norm),
        torch.tensor(num_valid),
        torch.tensor(skipped),
        torch.tensor(by_source, dtype=torch.float64),
        torch.zeros(2),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(()),
    )


def meter_of(
    group: dist.ProcessGroup,
    clock: Clock,
    peak_flops: float | None = None,
    sources: Sequence[str] = (),
    terms: Sequence[str] = (),
    slow_ranks: SlowRanks | None = None,
) -> Meter:
    return Meter(
        group,
        CPU,
        work=lambda _: Work(512, 512 * 1e6),
        peak_flops=peak_flops,
        sources=sources,
        terms=terms,
        slow_ranks=slow_ranks,
        clock=clock,
    )


def note(meter: Meter, clock: Clock, step: int, stats: StepStats, *, lr: float = 0.1, bad_rows: int = 0) -> None:
    """Note a step that takes a second."""
    clock.now += 1.0
    meter.update(step, stats, lr=lr, data_wait_s=0.0, bad_rows=bad_rows)


def test_a_record_has_the_last_step_and_means_of_the_interval(group: dist.ProcessGroup) -> None:
    clock = Clock()
    meter = meter_of(group, clock)
    clock.now += 1000  # set-up, not training
    meter.start()
    clock.now += 7.0
    meter.update(1, stats_of(9.0), lr=0.1, data_wait_s=4.0, bad_rows=0)
    meter.flush()
    for step, loss in ((2, 5.0), (3, 1 / 3)):
        clock.now += 0.25
        meter.update(step, stats_of(loss, 0.5, 77), lr=0.3 / step, data_wait_s=4.0 + 0.01 * step, bad_rows=step)
    record = meter.flush()
    assert (record.step, record.loss, record.grad_norm, record.num_valid) == (3, 1 / 3, 0.5, 77)
    assert record.lr == 0.3 / 3
    assert record.tokens_seen == 3 * 512
    assert record.step_time_s == 0.25
    assert record.tokens_per_second == 512 / 0.25
    assert record.data_time_s == pytest.approx(0.015)
    assert record.bad_rows == 3
    assert 0.01 < record.memory_gib < 1000
    assert record.mfu is None
    assert "mfu" not in record.row()


def test_the_keys_of_a_row(group: dist.ProcessGroup) -> None:
    clock = Clock()
    meter = meter_of(group, clock, peak_flops=1e12)
    note(meter, clock, 1, stats_of(1.0))
    row = meter.flush().row()
    left_out = (
        "epochs",
        "too_long",
        "by_source",
        "terms",
        "watched",
        "experts",
        "goodput",
        *SLOWEST,
        "digest",
        "computed_by",
        "max_score",
    )
    assert list(row) == [field.name for field in fields(Record) if field.name not in left_out] == KEYS
    assert row["mfu"] == pytest.approx(512 * 1e6 / 1e12)
    note(meter, clock, 2, replace(stats_of(1.0), max_score=torch.tensor(7.5)))
    assert meter.flush().row()["max_score"] == 7.5


LOSSES = [(8.0, 10), (math.nan, 10), (4.0, 30), (3.0, 20), (math.inf, 0), (1.0, 5)]
"""(mean loss, valid tokens) of each step; steps with a loss that is not finite are skipped."""


def run_losses(meter: Meter, clock: Clock, steps: Iterable[int]) -> list[tuple[float | None, int, int]]:
    """Run these steps of LOSSES; return mean, tokens and skipped steps of the log lines at every third step."""
    found = []
    for step in steps:
        loss, num_valid = LOSSES[step - 1]
        stats = stats_of(loss, num_valid=num_valid, skipped=not math.isfinite(loss))
        note(meter, clock, step, stats)
        if step % 3 == 0:
            record = meter.flush()
            found.append((record.interval_loss, record.tokens_seen, record.skipped_steps))
    return found


def test_earlier_steps_keep_their_own_token_count(group: dist.ProcessGroup) -> None:
    clock = Clock()
    meter = Meter(group, CPU, work=lambda _: Work(100, 100.0), peak_flops=None, clock=clock)
    meter.load_state(MeterState(tokens_seen=5 * 512, skipped_steps=0))
    for step in (6, 7):
        note(meter, clock, step, stats_of(1.0))
    assert meter.flush().tokens_seen == 5 * 512 + 2 * 100


@pytest.mark.parametrize("num_valid", [0, 1, 2**24 + 1, 2**31 + 7, 2**53 - 1, 2**53])
@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_counts_are_exact_up_to_2_to_the_53_and_non_finite_values_are_kept(
    group: dist.ProcessGroup, loss: float, num_valid: int
) -> None:
    clock = Clock()
    meter = meter_of(group, clock)
    note(meter, clock, 1, stats_of(loss, grad_norm=loss, num_valid=num_valid, skipped=True))
    record = meter.flush()
    assert str(record.loss) == str(record.grad_norm) == str(loss)
    assert record.num_valid == num_valid
    assert "interval_loss" not in record.row()  # of skipped steps only


def test_update_reads_nothing_and_flush_costs_one_collective_and_one_transfer(group: dist.ProcessGroup) -> None:
    clock = Clock()
    meter = meter_of(group, clock)
    all_stats = [stats_of(float(step)) for step in range(50)]
    with HostReads() as reads, Operations() as operations:
        for step, stats in enumerate(all_stats, start=1):
            meter.update(step, stats, lr=0.1, data_wait_s=0.0, bad_rows=0)
    assert not reads.calls
    assert operations.collectives() == operations.calls["aten._local_scalar_dense.default"] == 0
    assert operations.calls.total() <= 50 * 10

    clock.now += 1.0
    with HostReads() as reads, Operations() as operations:
        meter.flush()
    assert reads.calls == {"tolist": 1}
    assert operations.calls["aten._local_scalar_dense.default"] == 0
    assert operations.collectives() == 1


def test_left_out_time_is_not_counted(group: dist.ProcessGroup) -> None:
    clock = Clock()
    meter = meter_of(group, clock)
    clock.now += 2.0
    meter.update(1, stats_of(1.0), lr=0.1, data_wait_s=0.0, bad_rows=0)
    with meter.left_out() as seconds:
        clock.now += 100.0
        assert seconds() == 100.0
    clock.now += 1.0
    assert meter.flush().step_time_s == 3.0


def by_source_of(step: int) -> list[list[float]]:
    """Losses, tokens and sequences of three sources; the last source is unused before step 7."""
    return [
        [2.5 * step, 7.0 if step < 4 else 5.0, 3.0 * (step >= 7)],
        [step, 2, 1 * (step >= 7)],
        [1, 2, 1 * (step >= 7)],
    ]


def sources_of_steps(meter: Meter, clock: Clock, steps: range) -> list[dict[str, float]]:
    """Values by source of the log lines at every third step; step 5 is skipped because its loss is not finite."""
    found = []
    for step in steps:
        totals = by_source_of(step)
        if step == 5:
            totals[0] = [math.nan, math.inf, 0.0]
        note(meter, clock, step, stats_of(1.0, skipped=step == 5, by_source=totals))
        if step % 3 == 0:
            found.append(dict(meter.flush().by_source))
    return found


def test_losses_and_shares_by_source(group: dist.ProcessGroup) -> None:
    clock = Clock()
    first, second, third = sources_of_steps(meter_of(group, clock, sources=("a", "b", "c")), clock, range(1, 10))
    assert first == {"loss/a": 2.5, "loss/b": 3.5, "share/a": 1 / 3, "share/b": 2 / 3, "share/c": 0.0}
    assert second["loss/a"] == 2.5  # steps 4 and 6
    assert second["loss/b"] == 2.5  # since the last row
    assert second["share/a"] == 6 / 18  # includes step 5
    assert third["loss/c"] == 3.0
    assert third["share/c"] == 3 / 30


@pytest.mark.parametrize(
    ("sources", "keys"),
    [
        (("a",), {"epoch/a": 0.5, "too_long/a": 7}),
        (
            ("a", "b"),
            {"epoch/a": 0.5, "epoch/b": 2.25, "too_long/b": 7}
            | {"loss/a": 1.0, "loss/b": 3.0, "share/a": 0.25, "share/b": 0.75},
        ),
    ],
)
def test_columns_of_sources_and_terms_of_the_loss(
    group: dist.ProcessGroup, sources: tuple[str, ...], keys: dict[str, float]
) -> None:
    """Terms are those of the last step. A rank that computes no loss adds nothing; the other columns stay in place."""
    clock = Clock()
    meter = meter_of(group, clock, sources=sources, terms=("z_loss", "other"))
    by_source = [[2.0, 3.0], [2.0, 1.0], [1.0, 3.0]] if len(sources) > 1 else [[0.0]] * 3
    for terms, found in (((0.25, 3.0), [0.25, 3.0]), ((), [0.0, 0.0])):
        given = [parts_of(torch.tensor(term)) for term in terms]
        note(meter, clock, 1, replace(stats_of(1.0, by_source=by_source), terms=given))
        row = meter.flush([0.5, 2.25][: len(sources)], {f"too_long/{sources[-1]}": 7}).row()
        of_terms = dict(zip(("term/z_loss", "term/other"), found, strict=True))
        assert {key: row[key] for key in row if "/" in key} == keys | of_terms


def test_the_mean_over_the_interval_weighs_tokens(group: dist.ProcessGroup) -> None:
    clock = Clock()
    expected = [((8.0 * 10 + 4.0 * 30) / 40, 3 * 512, 1), ((3.0 * 20 + 1.0 * 5) / 25, 6 * 512, 2)]
    assert run_losses(meter_of(group, clock), clock, range(1, 7)) == expected


@pytest.mark.parametrize(
    ("run", "last", "stop"),
    [(run_losses, 6, stop) for stop in (1, 2, 3, 5)] + [(sources_of_steps, 9, stop) for stop in (1, 5, 6, 8)],
)
def test_a_resumed_run_continues_the_interval_and_the_shares(
    group: dist.ProcessGroup, run: Callable[[Meter, Clock, range], list[object]], last: int, stop: int
) -> None:
    clock = Clock()
    names = ("a", "b", "c") if run is sources_of_steps else ()
    expected = run(meter_of(group, clock, sources=names), clock, range(1, last + 1))
    meter = meter_of(group, clock, sources=names)
    before = run(meter, clock, range(1, stop + 1))
    state = MeterState(**json.loads(json.dumps(asdict(meter.state()))))
    meter = meter_of(group, clock, sources=names)
    meter.load_state(state)
    assert meter.state() == state  # also before the first step
    assert before + run(meter, clock, range(stop + 1, last + 1)) == expected


def test_state_by_source_is_matched_by_name(group: dist.ProcessGroup) -> None:
    clock = Clock()
    meter = meter_of(group, clock, sources=("b", "new"))
    meter.load_state(MeterState(0, 0, {"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]}))
    assert meter.state().by_source == {"b": [4.0, 5.0, 6.0], "new": [0.0, 0.0, 0.0]}
    meter.load_state(MeterState(0, 0, {"b": [4.0]}))
    assert meter.state().by_source == {"b": [0.0, 0.0, 0.0], "new": [0.0, 0.0, 0.0]}


def _flush_on_a_rank() -> dict[str, Any]:
    rank = dist.get_rank()
    clock = Clock()
    group = dist.group.WORLD
    assert group is not None
    places = [Place(f"node{rank}", 0) for rank in range(2)]
    meter = meter_of(group, clock, peak_flops=1e9, sources=("one",), slow_ranks=SlowRanks(places, logs=False))
    records: list[Record] = []
    memory = mock.patch.object(meter_module, "peak_memory_bytes", return_value=(1 + rank) * 2**29)
    with memory, Operations() as operations:
        for step in (1, 2):
            clock.now += 1.5
            share = stats_of([0.1, 2.0][rank] * step, grad_norm=3.25, num_valid=1000 + step)
            for compute_s in (0.1, 9.0, 0.1 + 0.05 * rank):  # three steps, of which one has a hiccup
                meter.update(
                    step,
                    share,
                    lr=0.01,
                    data_wait_s=0.9 * step * rank,
                    bad_rows=step * (rank + 1),
                    compute_s=compute_s + 0.1 * rank * step,
                )
            records.append(meter.flush([0.25 * step * (rank + 1)]))
    return {"rows": [record.row() for record in records], "collectives": operations.collectives()}


def test_two_ranks_report_the_values_of_the_mesh() -> None:
    first, second = run_ranks(_flush_on_a_rank, 2)
    assert first == second
    assert first["collectives"] == 2
    row = first["rows"][1]
    assert row["loss"] == 0.1 * 2 + 2.0 * 2
    assert row["interval_loss"] == pytest.approx(row["loss"])  # the same step three times
    assert row["grad_norm"] == 3.25
    assert row["num_valid"] == 1002
    assert row["tokens_per_second"] == 512 / 0.5
    assert row["data_time_s"] == pytest.approx(0.3)
    assert row["memory_gib"] == 1.0
    assert row["bad_rows"] == 2 + 4
    assert row["epoch/one"] == 0.5 + 1.0
    assert (row["slowest_rank"], row["slowest_host"], row["slowest_ratio"]) == (1, "node1", pytest.approx(3.5))
    assert row["mfu"] == pytest.approx(512 / 0.5 * 1e6 / (2 * 1e9))


def test_log_steps_are_the_first_the_last_and_every_nth() -> None:
    assert [step for step in range(1, 26) if is_log_step(step, log_freq=10, total_steps=25)] == [1, 10, 20, 25]
