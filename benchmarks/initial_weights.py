"""Drawing a rank's shard of the initial weights, on one thread.

Draws a full matrix of 16.8 M elements, and one eighth of it, sharded by rows (as fully_shard and column parallelism do)
or by columns (as row parallelism does). Full blocks of random numbers are drawn, so sharding the second dimension saves
no time. The second table extrapolates from the fastest round to the published sizes, by number of elements.
"""

import time
from pathlib import Path

import torch

from benchmarks.measuring import Row, ratios, report
from titanlite.models.family import Init
from titanlite.models.init import fill_region_

SIDE = 4096
PARTS = 8
CASES = {
    "full matrix": (SIDE, SIDE),
    f"1/{PARTS} by rows": (SIDE // PARTS, SIDE),
    f"1/{PARTS} by columns": (SIDE, SIDE // PARTS),
}
# parameters, ranks, tp, share of the parameters that row parallelism cuts along their second dimension (wo, w2)
SHAPES = {"8B": (8.03e9, 8, 1, 0.35), "405B": (405.9e9, 4096, 8, 0.35)}


def seconds(rows: int, columns: int) -> float:
    """The time to fill the first `rows` x `columns` of the matrix."""
    local = torch.empty(rows, columns)
    start = time.perf_counter()
    fill_region_(local, 0, "weight", Init("normal", 0.02), (SIDE, SIDE), (0, 0))
    return time.perf_counter() - start


def main(rounds: int = 5, json: Path | None = None) -> None:
    """json: folder of initial_weights.json."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for case, shape in CASES.items():
            found[case].append(seconds(*shape))
    full = found["full matrix"]
    drawn: list[Row] = [
        {
            "shard": case,
            "seconds": values,
            "ns per element": [1e9 * value / (CASES[case][0] * CASES[case][1]) for value in values],
            "time / full matrix": ratios(values, full),
        }
        for case, values in found.items()
    ]
    planned: list[Row] = []
    for name, (parameters, ranks, tp, second) in SHAPES.items():
        count = parameters / ranks * (1 - second + second * tp)
        row: Row = {"model": name, "ranks": ranks, "tp": tp, "elements per rank (M)": count / 1e6}
        planned.append({**row, "seconds per rank": count * min(full) / SIDE**2})
    report("initial_weights", {"Drawing a shard": drawn, "Published sizes, extrapolated": planned}, json)
