"""Command: write a report of runs, one HTML file with charts."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import tyro

from titanlite.runtime.durability import replace_file
from titanlite.runtime.environment import expand_home
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import open_regular
from titanlite.runtime.settings import setting
from titanlite.storage.address import place
from titanlite.tools.command import print_lines, run_command
from titanlite.tools.report.charts import Drawing, charts_of
from titanlite.tools.report.ladder import with_ladders
from titanlite.tools.report.page import FIRST_LINE, page
from titanlite.tools.report.runs import over_tokens, read_runs
from titanlite.tools.stores import read_options_of_stores


@dataclass(frozen=True)
class Options:
    """Write a report of one or several runs: one HTML file with charts, which loads nothing from the network."""

    runs: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")
    ] = setting(is_path=True)
    """dump folders of runs, also of runs in progress, or addresses of copies in a store; or ladders: all of their runs,
    with the fitted law"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("report.html")
    """HTML file to write; an earlier report is replaced"""
    over: Literal["steps", "tokens"] = "steps"
    """horizontal axis of the curves; tokens: for runs whose steps have different sizes"""
    png: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """also write each chart as a PNG file into this folder"""


def main(argv: Sequence[str]) -> None:
    """Write the report. Raises UserError."""
    options = read_options_of_stores(Options, argv, "report")
    require_report_or_new(options.out)
    folders, charts = with_ladders([place(expand_home(run)) for run in options.runs])
    runs = read_runs(folders)
    shown = [over_tokens(run) for run in runs] if options.over == "tokens" else runs
    charts += charts_of(shown)
    drawing = Drawing(shown, "tokens" if options.over == "tokens" else "step")
    created = f"{datetime.now():%Y-%m-%d %H:%M}"
    text = page(runs, charts, [drawing.svg(chart) for chart in charts], created)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.out, text.encode(errors="replace"))
        if options.png is not None:
            options.png.mkdir(parents=True, exist_ok=True)
            for chart in charts:
                drawing.png(chart, options.png / f"{chart.key}.png")
    except OSError as error:
        where = error.filename2 or error.filename or options.out
        raise UserError(f"cannot write {where}: {error.strerror or error}; fix this, or choose another path") from None
    print_lines(f"Report: {options.out} ({len(text.encode(errors='replace')) / 1000:,.0f} kB)")
    if options.png is not None:
        print_lines(f"Charts: {len(charts)} PNG files in {options.png}")


def require_report_or_new(path: Path) -> None:
    """Raise UserError if another file than a report is at `path`."""
    try:
        with open_regular(path) as file:  # opening a pipe would wait for a writer
            is_report = file.read(len(FIRST_LINE)) == FIRST_LINE.encode()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError:
        is_report = False
    if not is_report:
        raise UserError(f"{path} exists and is not a report, so it is not overwritten: choose another --out")


if __name__ == "__main__":
    run_command(main)
