"""Float8 on the quick start: loss at equal tokens, and the time of the emulation.

Each run trains the quick start in a process of its own with one thread, one after the other, with the same seed.
Float8 runs compute everything else in float32. "CPU" is of a step with its share of the validations, see recipes.
"""

import sys
from pathlib import Path

from benchmarks.measuring import Row, report
from benchmarks.recipes import quick_starts

CASES: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("--training.mixed_precision_param", "bfloat16"),
    "mxfp8": ("--float8.recipe", "mxfp8"),
    "mxfp8, floor": ("--float8.recipe", "mxfp8", "--float8.scale", "floor"),
    "blockwise": ("--float8.recipe", "blockwise"),
    "blockwise, float32 scales": ("--float8.recipe", "blockwise", "--float8.scale", "float32"),
    "rowwise": ("--float8.recipe", "rowwise"),
}


def main(steps: int = 300, interval: int = 50, json: Path | None = None) -> None:
    """json: folder of float8.json."""
    rows: list[Row] = []
    reference, seconds_of_float32 = 0.0, 0.0
    for run in quick_starts(CASES, steps, interval):
        loss = run.validation[-1][1]
        reference, seconds_of_float32 = reference or loss, seconds_of_float32 or run.step_s
        rows.append(
            {
                "products": run.name,
                "training loss, last 10 steps": run.training,
                "validation loss": loss,
                "- float32's": loss - reference,
                "CPU (s)": run.step_s,
                "CPU / float32's": run.step_s / seconds_of_float32,
            }
        )
        print(rows[-1], run.validation, file=sys.stderr, flush=True)
    report("float8", {f"The quick start, {steps} steps": rows}, json)
