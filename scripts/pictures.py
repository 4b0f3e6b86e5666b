"""Draw the pictures of the docs, by matplotlib, in the repository's root: `python -m scripts.pictures NAME`.

- growth FOLDER: docs/growth.svg, from the figures of `python -m benchmarks memory --json FOLDER`. Speed above, memory
  below, over each axis: medians, with the range of the rounds; the dashed line is the plan.
- layouts [FOLDER]: README's picture, docs/layouts.svg: loss and gradient norm of the quick start on four layouts.
  Trains the four runs below FOLDER (default: outputs/picture; 4 to 5 minutes each on 2 idle cores) unless they are
  finished there. Prints the relative differences from one process.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from matplotlib import pyplot

LAYOUTS = {
    "one process": (1, ()),
    "FSDP 2": (2, ("--parallelism.dp_shard", "2")),
    "TP 2": (2, ("--parallelism.tp", "2")),
    "PP 2": (2, ("--parallelism.pp", "2")),
}
"""Label -> number of ranks, arguments."""
# Each line is drawn over the last one, thinner and lighter, so that lines of equal values stay visible.
STYLES = (("#1b3a5c", 6.0), ("#2f7ebc", 4.0), ("#f28e2b", 2.2), ("#ffffff", 0.7))
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


def train(folder: Path, ranks: int, arguments: tuple[str, ...]) -> list[dict[str, float]]:
    """The rows of metrics.jsonl, one per step, after a run of the quick start in `folder`."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "titanlite.train")
    options = ("--job.dump_folder", str(folder), "--metrics.log_freq", "1", "--validation.enable", "false")
    subprocess.run([sys.executable, *launcher, "quickstart", *options, *arguments], check=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "grad_norm" in row]


def layouts(folder: Path = Path("outputs/picture")) -> None:
    runs = {name: train(folder / name.replace(" ", "_"), *layout) for name, layout in LAYOUTS.items()}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for panel, (key, title) in zip(axes, (("loss", "loss"), ("grad_norm", "gradient norm")), strict=True):
        for (name, rows), (color, width) in zip(runs.items(), STYLES, strict=True):
            panel.plot([row["step"] for row in rows], [row[key] for row in rows], color=color, lw=width, label=name)
            errors = [abs(row[key] / one[key] - 1) for row, one in zip(rows, runs["one process"], strict=True)]
            found = f"first step {errors[0]:.0e}, median {median(errors):.0e}, largest {max(errors):.0e}"
            print(f"{title}, {name}: relative difference from one process: {found}")
        panel.set(xlabel="step", title=title, facecolor="#dde3ea")
    axes[0].legend(facecolor="#dde3ea")
    figure.savefig("docs/layouts.svg", metadata={"Date": None})


if __name__ == "__main__":
    pyplot.switch_backend("svg")
    pyplot.rcParams["svg.hashsalt"] = "titanlite"  # the same picture for the same numbers
    {"growth": growth, "layouts": layouts}[sys.argv[1]](*map(Path, sys.argv[2:]))
