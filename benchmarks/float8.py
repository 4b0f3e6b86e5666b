"""Float8 on the quick start: loss at equal tokens, and the time of the emulation.

Each run trains the quick start in a process of its own with one thread, one after the other, with the same seed.
Float8 runs compute everything else in float32. "CPU" is of a step with its share of the validations, see recipes.
"""

import sys
import tempfile
from pathlib import Path

from benchmarks.measuring import Row, report
from benchmarks.recipes import trained

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
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, options) in enumerate(CASES.items()):
            place = Path(folder, str(number))
            started, _ = trained(place / "one", 1, interval, options)
            seconds, found = trained(place / "all", steps, interval, options)
            of_step = (seconds - started) / (steps - 1)
            losses = [row["validation/loss"] for row in found if "validation/loss" in row]
            training = [row["loss"] for row in found if "loss" in row][-10:]
            reference, seconds_of_float32 = reference or losses[-1], seconds_of_float32 or of_step
            rows.append(
                {
                    "products": name,
                    "training loss, last 10 steps": sum(training) / len(training),
                    "validation loss": losses[-1],
                    "- float32's": losses[-1] - reference,
                    "CPU (s)": of_step,
                    "CPU / float32's": of_step / seconds_of_float32,
                }
            )
            print(rows[-1], losses, file=sys.stderr, flush=True)
    report("float8", {f"The quick start, {steps} steps": rows}, json)
