"""How costs grow with ranks, data and rows: agreements, groups, plans, saves, heartbeats, initial weights, logs.

Each part runs with real functions of titanlite for several numbers of ranks. The law is the exponent of the growth
between the last two: 1 is linear in the ranks of a job, 0 is constant. Counts are exact; CPU seconds depend on the
machine.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.growth import agreements, data, files, heartbeats, history, plans, saves, weights
from benchmarks.growth.count import Count
from benchmarks.measuring import Row, report

Part = Callable[[int], Iterable[Count]]
PARTS: tuple[tuple[Part, tuple[int, ...]], ...] = (
    (agreements.of_start, (64, 256, 1024)),
    (agreements.of_groups, (32, 64, 128)),
    (plans.of_microbatches, (4096, 8192, 16_384)),
    (plans.of_shards, (1024, 4096, 16_384)),
    (files.of_start, (500, 1000, 2000)),
    (files.of_index, (10_000, 100_000, 1_000_000)),
    (heartbeats.of_heartbeats, (256, 1024, 4096)),
    (saves.of_saves, (64, 256, 1024)),
    (saves.of_retention, (10, 40)),
    (data.of_stored_tokens, (1, 8, 64, 512)),
    (data.of_sources, (1, 10, 100)),
    (weights.of_experts, (256, 512, 4096)),
    (history.of_history, (1000, 10_000, 100_000)),
    (history.of_ledger, (10_000, 100_000, 1_000_000)),
)
"""What each part is simulated with. More threads in one process would measure the threads."""


def main(json: Path | None = None) -> None:
    """Simulate all parts, in about 7 minutes, with up to 1.4 GB of temporary files.

    json: folder for scale.json.
    """
    rows: list[Row] = []
    for part, sizes in PARTS:
        found = [count for size in sizes for count in part(size)]
        rows += [row_of(list(counts)) for counts in by_name(found)]
    report("scale", {"Costs by ranks": rows}, json)


def by_name(counts: Iterable[Count]) -> Iterable[Iterable[Count]]:
    """The counts of each cost, by ranks."""

    def name(count: Count) -> tuple[str, str]:
        return count.part, count.name

    ordered = sorted(counts, key=lambda count: (*name(count), count.ranks))
    return (list(group) for _, group in groupby(ordered, name))


def row_of(counts: Sequence[Count]) -> Row:
    """A row of the table. counts: of one cost, by ranks."""
    first = counts[0]
    measured = ", ".join(f"{count.ranks:,}: {count.value:,.6g}" for count in counts)
    return {"part": first.part, "cost": first.name, "by ranks": measured, "law": f"{law(counts):.2f}"}


def law(counts: Sequence[Count]) -> float:
    """The exponent of the growth between the last two."""
    before, last = counts[-2:]
    return math.log(max(last.value, 1e-9) / max(before.value, 1e-9)) / math.log(last.ranks / before.ranks)
