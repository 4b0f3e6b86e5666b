"""What a rank's share of the initial weights costs: `python benchmarks/initial_weights.py`, on one thread.

Draws one matrix of 16.8 M elements whole, and an eighth of it, cut by rows (as fully_shard and column parallelism do)
and by columns (as row parallelism does): blocks are drawn whole, so a cut along the second dimension saves nothing. The
last lines say what that makes of the published sizes, by elements alone.
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
    """Of the fastest of some rounds: filling the first `rows` x `columns` of the matrix."""
    best = float("inf")
    for _ in range(ROUNDS):
        local = torch.empty(rows, columns)
        start = time.perf_counter()
        fill_region_(local, 0, "weight", Init("normal", 0.02), (SIDE, SIDE), (0, 0))
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    torch.set_num_threads(1)
    whole = seconds(SIDE, SIDE)
    print(f"whole: {whole:.3f} s, {1e9 * whole / SIDE**2:.1f} ns per element")
    print(f"1/{PARTS} by rows: {seconds(SIDE // PARTS, SIDE) / whole:.2f} of it")
    print(f"1/{PARTS} by columns: {seconds(SIDE, SIDE // PARTS) / whole:.2f} of it")
    for name, (parameters, ranks, tp, second) in SHAPES.items():
        drawn = parameters / ranks * (1 - second + second * tp)
        print(
            f"{name} on {ranks} ranks, tp {tp}: {drawn / 1e6:,.0f} M elements, {drawn * whole / SIDE**2:.0f} s a rank"
        )


if __name__ == "__main__":
    main()
