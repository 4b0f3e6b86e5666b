"""Measure tables of the docs, on this machine's CPU, in the repository's root: `python -m scripts.tables NAME`.

- layouts [RANKS]: the table of docs/layouts.md: for each layout of tests/distributed/layouts.py, of at most RANKS
  ranks, the largest relative error over all ranks of any parameter's gradient, of the loss over two steps, and of the
  gradient norm. tests/distributed/test_layouts.py bounds these errors.
- bits [RANKS]: the second table of docs/layouts.md: the digest of the weights for each layout of
  tests/distributed/test_bit_equal.py, of at most RANKS ranks. Fails if anything that the test compares differs.
- plan: planned / measured - 1 of the plan's memory formulas, for a small model: the memory that one microbatch keeps
  between forward and backward; the peak of a step without parameters and optimizer state (with a pipeline, per
  pipeline rank).
"""

import sys
from dataclasses import asdict
from math import prod
from typing import Any

from tests.distributed.layouts import ALL, BOUNDS, SHORT, Layout, measure_all
from tests.distributed.test_bit_equal import ALONE, FOUR, QUICK, SOAK, STEPS, TWO, different, run
from tests.distributed.test_plan_memory import DTYPE, KEPT_LAYOUTS, RECOMPUTE, STEP_LAYOUTS, kept_errors, peak_errors
from titanlite.ranks.launch import run_ranks


def errors(layouts: list[Layout], dtype: str) -> list[dict[str, Any]]:
    """The errors on this rank, by layout."""
    return [{**asdict(measured), "worst": measured.worst} for measured in measure_all(layouts, dtype)]


def layout_table(most: int = 16) -> None:
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


def bits_table(most: int = 8) -> None:
    print("| what is computed | pp x dp_replicate x dp_shard | ranks | with | digest |\n|---|---|---|---|---|")
    rows = {name: settings for table in (QUICK, TWO, FOUR, SOAK) for name, (settings, _) in table.items()}
    for name, settings in rows.items():
        cases = [case for table in (QUICK, TWO, FOUR, SOAK) for case in table.get(name, ((), ()))[1]]
        expected: list[str] = []
        for size in sorted({prod(axes) for axes, _ in [ALONE, *cases] if prod(axes) <= most}):
            own = [case for case in [ALONE, *cases] if prod(case[0]) == size]
            results = run_ranks(run, size, [(case, settings) for case in own], timeout_s=1800.0)[0]
            for (axes, other), found in zip(own, results, strict=True):
                expected = expected or found
                assert not different(expected, found), (axes, other)
                short = [SHORT.get(text, text.partition(".")[2]).removeprefix("pp_schedule=") for text in other]
                short += ["1F1B"] if axes[0] > 1 and not any("pp_schedule" in text for text in other) else []
                mesh, last_digest = " x ".join(map(str, axes[:3])), found[4 * STEPS - 1]
                print(f"| {name} | {mesh} | {size} | {', '.join(short)} | {last_digest} |", flush=True)


def plan_table() -> None:
    print(f"| kept by a microbatch | compute | {' | '.join(RECOMPUTE)} |\n|---|---|{'---|' * len(RECOMPUTE)}")
    for layout in KEPT_LAYOUTS:
        for dtype in DTYPE:
            cells = [f"{error:+.1%}" for error in kept_errors(layout, dtype).values()]
            print(f"| {layout} | {dtype} | {' | '.join(cells)} |", flush=True)
    print("\n| peak of a step | compute | none | full |\n|---|---|---|---|")
    for layout in STEP_LAYOUTS:
        for dtype in DTYPE:
            found = peak_errors(layout, dtype)
            cells = [", ".join(f"{error:+.0%}" for error in found.get(mode, [])) for mode in ("none", "full")]
            print(f"| {layout} | {dtype} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    {"layouts": layout_table, "bits": bits_table, "plan": plan_table}[sys.argv[1]](*map(int, sys.argv[2:]))
