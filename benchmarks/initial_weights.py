"""Benchmark of drawing a rank's shard of the initial weights: `python benchmarks/initial_weights.py`, on one thread.

Draws a full matrix of 16.8 M elements, and one eighth of it, sharded by rows (as fully_shard and column parallelism do)
or by columns (as row parallelism does). Full blocks of random numbers are drawn, so sharding the second dimension saves
no time. The last lines extrapolate to the published sizes by number of elements.
"""

import time

import torch

from titanlite.models.init import Init, fill_region_

SIDE = 4096
PARTS = 8
ROUNDS = 5
# parameters, ranks, tp, share of the parameters that row parallelism cuts along their second dimension (wo, w2)
SHAPES = {"8B": (8.03e9, 8, 1, 0.35), "405B": (405.9e9, 4096, 8, 0.35)}


def seconds(rows: int, columns: int) -> float:
    """The fastest time over several rounds to fill the first `rows` x `columns` of the matrix."""
    best = float("inf")
    for _ in range(ROUNDS):
        local = torch.empty(rows, columns)
        start = time.perf_counter()
        fill_region_(local, 0, "weight", Init("normal", 0.02), (SIDE, SIDE), (0, 0))
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    torch.set_num_threads(1)
    full = seconds(SIDE, SIDE)
    print(f"full matrix: {full:.3f} s, {1e9 * full / SIDE**2:.1f} ns per element")
    print(f"1/{PARTS} by rows: {seconds(SIDE // PARTS, SIDE) / full:.2f} of it")
    print(f"1/{PARTS} by columns: {seconds(SIDE, SIDE // PARTS) / full:.2f} of it")
    for name, (parameters, ranks, tp, second) in SHAPES.items():
        drawn = parameters / ranks * (1 - second + second * tp)
        print(
            f"{name} on {ranks} ranks, tp {tp}: {drawn / 1e6:,.0f} M elements, {drawn * full / SIDE**2:.0f} s per rank"
        )


if __name__ == "__main__":
    main()
