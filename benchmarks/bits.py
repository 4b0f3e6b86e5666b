"""Bit-equal training: what `training.bit_equal` costs a step, and a digest of the weights, by layout.

Each case trains the quick start's model on random tokens, 2,048 per step, with the key and without, in turns in the
same processes, with the same rows of a microbatch and the same gradient_sync. On one process, "wrapped" is the model
wrapped by `replicate` with reductions in float64, whose output layer computes its logits again: what the key needs
there beside exact sums. Ratios are of CPU seconds of rank 0, which other programs disturb less than time, except for
"elapsed".
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from unittest.mock import patch

import torch.distributed as dist

from benchmarks.measuring import Layout, Row, build, case, configuration, in_turns, ratios, report
from titanlite.models.head import LossComputation
from titanlite.parallel import parallelize
from titanlite.parallel.digest import weights_digest
from titanlite.ranks.launch import run_ranks


class Recomputing(LossComputation):
    """The form of a pipeline."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **(options | {"recomputes": True}))  # type: ignore[arg-type]


def measure(layout: Layout, batch: Sequence[str], rounds: int, steps: int) -> Row:
    """The row of a layout, on each rank."""
    ranks, own = case(layout, settings=batch)
    sides = {"off": [], "bit_equal": ["training.bit_equal=true"]}
    if layout == "single":
        sides["wrapped"] = ["training.mixed_precision_reduce=float64"]
    built = {}
    for side, settings in sides.items():
        with patch.object(parallelize, "LossComputation", Recomputing if side == "wrapped" else LossComputation):
            built[side] = build(configuration([*own, *settings], ranks))
    steps_of = {side: partial(trainer.train_step, batches) for side, (trainer, batches) in built.items()}
    for step in steps_of.values():
        step()
    seconds = in_turns(steps_of, rounds, steps, dist.barrier)
    cpu = {side: [each for _, each in found] for side, found in seconds.items()}
    elapsed = {side: [each for each, _ in found] for side, found in seconds.items()}
    begin = process_time()
    exact = built["bit_equal"][0].exact
    assert exact is not None
    weights_digest(exact)
    digest = process_time() - begin
    return {
        "ms": [1000 * each for each in elapsed["off"]],
        "bit_equal / off": ratios(cpu["bit_equal"], cpu["off"]),
        "elapsed": ratios(elapsed["bit_equal"], elapsed["off"]),
        "wrapped / off": ratios(cpu["wrapped"], cpu["off"]) if "wrapped" in cpu else "",
        "digest / step": digest / median(cpu["off"]),
    }


def main(rounds: int = 7, steps: int = 2, json: Path | None = None) -> None:
    """rounds: of `steps` steps of each side. json: folder for the figures."""
    rows = []
    layouts: Sequence[Layout] = ("single", "dp_shard", "dp_replicate", "pp")
    for layout in layouts:
        for size in (1, 2):
            batch = (f"training.local_batch_size={size}", f"parallelism.pp_microbatch_size={size}")
            row, *_ = run_ranks(measure, case(layout)[0], layout, batch, rounds, steps)
            rows.append({"layout": layout, "rows of a microbatch": size, **row})
    report("bits", {"A step with training.bit_equal": rows}, json)
