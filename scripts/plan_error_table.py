"""Measure the error of the plan's memory formulas: `python -m scripts.plan_error_table`, in the repository root.

Runs a small model on this machine's CPU and prints planned / measured - 1 in two tables: the memory that one microbatch
keeps between forward and backward; the peak of a step without parameters and optimizer state (with a pipeline, per
pipeline rank).
"""

from tests.distributed.test_plan_memory import DTYPE, KEPT_LAYOUTS, RECOMPUTE, STEP_LAYOUTS, kept_errors, peak_errors


def main() -> None:
    print(f"| kept by a microbatch | compute | {' | '.join(RECOMPUTE)} |\n|---|---|{'---|' * len(RECOMPUTE)}")
    for layout in KEPT_LAYOUTS:
        for dtype in DTYPE:
            cells = [f"{error:+.1%}" for error in kept_errors(layout, dtype).values()]
            print(f"| {layout} | {dtype} | {' | '.join(cells)} |", flush=True)
    print("\n| peak of a step | compute | none | full |\n|---|---|---|---|")
    for layout in STEP_LAYOUTS:
        for dtype in DTYPE:
            errors = peak_errors(layout, dtype)
            cells = [", ".join(f"{error:+.0%}" for error in errors.get(mode, [])) for mode in ("none", "full")]
            print(f"| {layout} | {dtype} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
