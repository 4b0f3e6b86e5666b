"""Measure the table of docs/layouts.md: `python -m scripts.layout_table [ranks]`, in the repository root.

Prints, for each layout of tests/distributed/layouts.py, the largest relative error over all ranks of any parameter's
gradient, of the loss over two steps, and of the gradient norm. tests/distributed/test_layouts.py bounds these errors.
ranks: measure only the layouts of at most this many ranks.
"""

import sys
from dataclasses import asdict
from typing import Any

from tests.distributed.layouts import ALL, BOUNDS, Layout, measure_all
from titanlite.ranks.launch import run_ranks


def errors(layouts: list[Layout], dtype: str) -> list[dict[str, Any]]:
    """The errors on this rank, by layout."""
    return [{**asdict(measured), "worst": measured.worst} for measured in measure_all(layouts, dtype)]


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    print(f"| pp x dp_replicate x dp_shard x tp, cp, ep | ranks | schedule | with | {' | '.join(BOUNDS)} |")
    print("|---|---|---|---|" + "---|" * len(BOUNDS))
    for size in sorted({layout.world_size for layout in ALL if layout.world_size <= most}):
        layouts = [layout for layout in ALL if layout.world_size == size]
        found = {dtype: run_ranks(errors, size, layouts, dtype, timeout_s=1800.0) for dtype in BOUNDS}
        for index, layout in enumerate(layouts):
            worst = []
            for ranks in found.values():
                assert all(measured[index]["same_initial_weights"] for measured in ranks), layout
                worst.append(f"{max(measured[index]['worst'] for measured in ranks):.0e}")
            print(f"| {layout.name} | {size} | {layout.schedule} | {layout.other} | {' | '.join(worst)} |", flush=True)


if __name__ == "__main__":
    main()
