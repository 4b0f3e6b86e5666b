"""Draw the pictures of the docs, by matplotlib, in the repository's root: `python -m scripts.pictures NAME`.

- growth FOLDER: docs/growth.svg, from the figures of `python -m benchmarks memory --json FOLDER`. Speed above, memory
  below, over each axis: medians, with the range of the rounds; the dashed line is the plan.
- bits [FOLDER]: README's picture, docs/bits.svg: 100 steps of the quick start with training.bit_equal on four meshes,
  one of them killed with SIGKILL and resumed on another; and how far the losses of three meshes are apart without the
  key. Trains these seven runs below FOLDER (default: outputs/picture; about 2 minutes each on 2 idle cores) unless they
  are finished there. Fails if the digests of any step differ. Prints the differences.
- transfer: docs/transfer.svg, from the table of losses by width and learning rate in docs/optimizers.md.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from statistics import median
from time import sleep
from typing import Any

from matplotlib import pyplot

STEPS, KILLED_AT = 100, 50
PIPELINE = ("--parallelism.pp", "2", "--parallelism.pp_microbatch_size", "2")
MESHES = {
    "one process": ((1, ()),),
    "dp_shard 2": ((2, ("--parallelism.dp_shard", "2")),),
    "pp 2": ((2, (*PIPELINE, "--parallelism.pp_schedule", "ZBVZeroBubble")),),
    f"dp_shard 3, killed at step {KILLED_AT}, then pp 2": ((3, ("--parallelism.dp_shard", "3")), (2, PIPELINE)),
}
"""Label -> number of ranks and arguments of each start."""
# Each line is drawn over the last one, thinner and lighter, so that lines of equal values stay visible.
STYLES = (("#1b3a5c", 6.0), ("#2f7ebc", 4.0), ("#f28e2b", 2.2), ("#ffffff", 0.7))
Starts = tuple[tuple[int, tuple[str, ...]], ...]
FIGURES = ("tokens/s", "peak (MiB)")


def growth(folder: Path) -> None:
    rows = json.loads((folder / "memory.json").read_text())["tables"]["Growth"]
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    figure, panels = pyplot.subplots(2, len(axes), figsize=(2.3 * len(axes), 4), layout="constrained", squeeze=False)
    for column, axis in enumerate(axes):
        own = [row for row in rows if row["axis"] == axis]
        sizes = [row["size"] for row in own]
        for panel, figure_name in zip(panels[:, column], FIGURES, strict=True):
            values = [row[figure_name] for row in own]
            middle = [median(value) for value in values]
            below = [median(value) - min(value) for value in values]
            above = [max(value) - median(value) for value in values]
            panel.errorbar(sizes, middle, (below, above), marker="o", color="#2f7ebc", capsize=2)
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
            panel.set_ylim(0, 1.15 * max(map(max, values)))
        panels[1, column].plot(sizes, [row["plan (MiB)"] for row in own], "--", color="#f28e2b")
        panels[1, column].set_xlabel(axis)
    for panel, figure_name in zip(panels[:, 0], FIGURES, strict=True):
        panel.set_ylabel(figure_name)
    figure.savefig("docs/growth.svg", metadata={"Date": None})


def train(folder: Path, starts: Starts, *options: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, one per step, after a run in `folder`. starts: all but the last one are killed."""
    file = folder / "metrics.jsonl"
    own = ("--training.steps", str(STEPS), "--metrics.log_freq", "1", "--validation.enable", "false")
    for index, (ranks, arguments) in enumerate(starts):
        launcher = ("-m", "titanlite.torchrun", "--standalone", f"--nproc-per-node={ranks}", "-m", "titanlite.train")
        command = (*launcher, "quickstart", "--job.dump_folder", str(folder), *own, *options, *arguments)
        with subprocess.Popen([sys.executable, *command], start_new_session=True) as process:
            while index < len(starts) - 1 and process.poll() is None:
                sleep(0.1)
                if file.exists() and file.read_text().count("\n") >= KILLED_AT:
                    os.killpg(process.pid, SIGKILL)
        assert process.returncode in (0, -SIGKILL), folder
    return [json.loads(line) for line in file.read_text().splitlines()]


def bits(folder: Path = Path("outputs/picture")) -> None:
    exact = ("--training.bit_equal", "true", "--checkpoint.interval", "20")
    names = [name.replace(" ", "_").replace(",", "") for name in MESHES]
    runs = [train(folder / name, starts, *exact) for name, starts in zip(names, MESHES.values(), strict=True)]
    rounded = {name: train(folder / f"rounded_{names[n]}", MESHES[name]) for n, name in enumerate(list(MESHES)[:3])}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained", facecolor="white")
    for name, rows, (color, width) in zip(MESHES, runs, STYLES, strict=True):
        left.plot([row["step"] for row in rows], [row["loss"] for row in rows], color=color, lw=width, label=name)
    digests = {tuple(row["digest"] for row in rows) for rows in runs}
    assert len(digests) == 1, "the runs have different bits"
    last = runs[0][-1]["digest"]
    left.axvline(KILLED_AT, color="#7a1f1f", lw=0.8, ls=":")
    left.set(title="loss with bit_equal", xlabel="step")
    figure.supxlabel(f"digest of the weights after step {STEPS}, on all four: {last}")
    one, *others = rounded.items()
    for (name, rows), (color, _) in zip(others, STYLES[1:], strict=False):
        errors = [abs(row["loss"] / reference["loss"] - 1) for row, reference in zip(rows, one[1], strict=True)]
        found = f"first step {errors[0]:.0e}, median {median(errors):.0e}, largest {max(errors):.0e}"
        print(f"{name}, without bit_equal: relative difference of the loss from one process: {found}")
        right.plot(range(1, STEPS + 1), errors, color=color, lw=1.5, label=f"{name}, without the key")
    right.plot(range(1, STEPS + 1), [0] * STEPS, color="#1b3a5c", lw=3, label="all four, with the key")
    right.set_yscale("symlog", linthresh=1e-8)
    right.set(title="relative difference of the loss from one process", xlabel="step", ylim=(-2e-9, 1e-2))
    for panel in (left, right):
        panel.set_facecolor("#dde3ea")
        panel.legend(facecolor="#dde3ea", fontsize=8)
    figure.savefig("docs/bits.svg", metadata={"Date": None})


def transfer() -> None:
    text = Path("docs/optimizers.md").read_text(encoding="utf-8")
    head, _, *lines = text[text.index("| dim | base_dim |") :].partition("\n\n")[0].splitlines()
    rates = [float(cell) for cell in head.split("|")[3:-1]]
    rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in lines]
    figure, panels = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
    for panel, base, title in zip(panels, ("64", "none"), ("with base_dim = 64", "without a base model"), strict=True):
        own = [row for row in rows if row[1] in (base, "64, or none")]
        for (dim, _, *cells), (color, _) in zip(own, STYLES, strict=False):
            losses = {rate: float(cell) for rate, cell in zip(rates, cells, strict=True) if cell}
            best = min(losses, key=losses.__getitem__)
            panel.plot([*losses], [*losses.values()], ".-", color=color, label=f"dim {dim}")
            panel.plot(best, losses[best], "o", color=color, ms=9)
        panel.set(title=title, xlabel="learning rate", xscale="log")
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates], fontsize=7)
        panel.minorticks_off()
        panel.legend()
    panels[0].set_ylabel("validation loss")
    figure.savefig("docs/transfer.svg", metadata={"Date": None})


if __name__ == "__main__":
    pyplot.switch_backend("svg")
    pyplot.rcParams["svg.hashsalt"] = "titanlite"  # the same picture for the same numbers
    pictures: dict[str, Callable[..., None]] = {"growth": growth, "bits": bits, "transfer": transfer}
    pictures[sys.argv[1]](*map(Path, sys.argv[2:]))
