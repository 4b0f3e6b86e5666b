"""Draw docs/growth.svg from the figures of `python -m benchmarks growth --json FOLDER`.

`python -m scripts.growth_picture FOLDER`, in the repository's root, with matplotlib installed. Speed above, memory
below, over each axis: medians, with the range of the rounds; the dashed line is the plan.
"""

import json
import sys
from pathlib import Path
from statistics import median

from matplotlib import pyplot

PICTURE = Path("docs/growth.svg")
FIGURES = ("tokens/s", "peak (MiB)")


def main() -> None:
    rows = json.loads(Path(sys.argv[1], "growth.json").read_text())["tables"]["Growth"]
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    pyplot.switch_backend("svg")
    pyplot.rcParams["svg.hashsalt"] = "titanlite"  # the same picture for the same numbers
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
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
