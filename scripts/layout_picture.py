"""Draw README's picture: loss and gradient norm of the quick start on four layouts.

`python -m scripts.layout_picture [FOLDER]`, in the repository's root, with matplotlib installed. Trains the four runs
below FOLDER (default: outputs/picture; 4 to 5 minutes each on 2 idle cores) unless they are finished there, and writes
docs/layouts.svg. Prints the relative differences from one process.
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
PICTURE = Path("docs/layouts.svg")
# Each line is drawn over the last one, thinner and lighter, so that lines of equal values stay visible.
STYLES = (("#1b3a5c", 6.0), ("#2f7ebc", 4.0), ("#f28e2b", 2.2), ("#ffffff", 0.7))


def train(folder: Path, ranks: int, arguments: tuple[str, ...]) -> list[dict[str, float]]:
    """The rows of metrics.jsonl, one per step, after a run of the quick start in `folder`."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "titanlite.train")
    options = ("--job.dump_folder", str(folder), "--metrics.log_freq", "1", "--validation.enable", "false")
    subprocess.run([sys.executable, *launcher, "quickstart", *options, *arguments], check=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "grad_norm" in row]


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/picture")
    runs = {name: train(root / name.replace(" ", "_"), *layout) for name, layout in LAYOUTS.items()}
    pyplot.switch_backend("svg")
    pyplot.rcParams["svg.hashsalt"] = "titanlite"  # the same picture for the same numbers
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for panel, (key, title) in zip(axes, (("loss", "loss"), ("grad_norm", "gradient norm")), strict=True):
        for (name, rows), (color, width) in zip(runs.items(), STYLES, strict=True):
            panel.plot([row["step"] for row in rows], [row[key] for row in rows], color=color, lw=width, label=name)
            errors = [abs(row[key] / one[key] - 1) for row, one in zip(rows, runs["one process"], strict=True)]
            found = f"first step {errors[0]:.0e}, median {median(errors):.0e}, largest {max(errors):.0e}"
            print(f"{title}, {name}: relative difference from one process: {found}")
        panel.set(xlabel="step", title=title, facecolor="#dde3ea")
    axes[0].legend(facecolor="#dde3ea")
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
