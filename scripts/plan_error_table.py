"""How far the plan's memory formulas are off, as tables: `python -m scripts.plan_error_table`, in the repository root.

A small model on this machine's CPU. First what one microbatch keeps between forward and backward, then the peak of a
whole step beside parameters and optimizer state (for pipelines of each pipeline rank): planned / measured - 1.
"""

from tests.distributed.test_plan_memory import (
    DTYPE,
    KEPT_LAYOUTS,
    RECOMPUTE,
    STEP_LAYOUTS,
    kept_errors,
    peak_errors,
)


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
