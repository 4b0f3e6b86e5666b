"""The page of a report: one HTML file from the template page.html, without scripts, that loads nothing."""

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2
import numpy as np

from titanlite.config.value_types import literal
from titanlite.metrics.about import mesh_text
from titanlite.metrics.jsonl import Series
from titanlite.metrics.records import SampleRow
from titanlite.runtime.text import counted, duration
from titanlite.tools.report.charts import COLORS, GRID, INK, MARKS, MIN_SMOOTHED, MUTED, Chart, is_limit, number_text
from titanlite.tools.report.runs import Event, Kind, RunFiles, differing_keys

FIRST_LINE = "<!doctype html><!-- titanlite report -->"
"""Of each report: only such a file is replaced."""

MAX_EVENTS = 20
MAX_SAMPLES = 12
"""Per run and prompt: the first, the last, and others at even distances."""

DARK_COLORS = ("#6ba6e6", "#f0945a", "#5cc08c", "#c08ae0", "#f0797e", "#c9b45a", "#56bfce", "#a3abb8")
DARK_MARKS = ("#aab3c2", "#b98af0", "#f0a63c", "#ff6b78")
SYMBOLS: Mapping[Kind, str] = {
    "restart": '<path d="M6 1V11" fill="none"/>',
    "mesh change": '<path d="M6 1.5L10.5 6L6 10.5L1.5 6Z"/>',
    "skipped steps": '<path d="M2.5 2.5L9.5 9.5M9.5 2.5L2.5 9.5" fill="none"/>',
    "fault": '<path d="M2.5 2.5L9.5 9.5M9.5 2.5L2.5 9.5" fill="none" stroke-width="3.4"/>',
}
"""As the markers of MARKS."""


def page(runs: Sequence[RunFiles], charts: Sequence[Chart], drawings: Sequence[str], created: str) -> str:
    """The HTML. drawings: the SVG of each chart. created: the time of the report."""
    figures = [figures_of(run) for run in runs]
    configured = [number for number, run in enumerate(runs) if run.config]
    kinds = {event.kind for run in runs for event in run.events}
    smoothed = [len(curve.series.steps) for chart in charts if chart.smooth for curve in chart.curves]
    marks = [color for _, color in MARKS.values()]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    template = environment.from_string(files("titanlite.tools.report").joinpath("page.html").read_text("utf-8"))
    return template.render(
        runs=runs,
        several=len(runs) > 1,
        created=created,
        colors=COLORS,
        light=_variables(COLORS, marks, ink=INK, muted=MUTED, grid=GRID, page="#ffffff", soft="#f5f6f8"),
        dark=_variables(
            *(DARK_COLORS, DARK_MARKS), ink="#d5d9df", muted="#949ca8", grid="#2b3038", page="#14171b", soft="#1c2026"
        ),
        figures=figures,
        titles=list(dict.fromkeys(title for found in figures for title in found)),
        configured=configured,
        differences=differing_keys([runs[number].config for number in configured]),
        charts=list(zip(charts, drawings, strict=True)),
        is_smoothed=max(smoothed, default=0) >= MIN_SMOOTHED,
        kinds=list(MARKS),
        symbols=SYMBOLS,
        shown_kinds=[kind for kind in MARKS if kind in kinds],
        shown_events=[_most_important(run.events) for run in runs],
        samples=_samples(runs),
        literal=_literal,
        duration=duration,
        counted=counted,
    )


def _literal(value: Any) -> str:
    """A value of a config.toml as TOML, also of a type that no key has: a date."""
    try:
        return literal(value)
    except TypeError:
        return str(value)


def _variables(colors: Sequence[str], marks: Sequence[str], **others: str) -> dict[str, str]:
    """Variable of the page's style -> color."""
    named = {f"c{number}": color for number, color in enumerate(colors)}
    return named | {f"m{number}": color for number, color in enumerate(marks)} | others


def figures_of(run: RunFiles) -> dict[str, str]:
    """The numbers of the summary, by title; unknown ones are left out."""
    total = run.config.get("training.steps")

    def number(key: str, form: str, of: Callable[..., object] = lambda values: values[-1]) -> str:
        return form.format(of(run.series[key].values)) if key in run.series else ""

    found = {
        "Steps": f"{run.last_step:,}" + (f" of {total:,}" if type(total) is int else ""),
        "Tokens": number("tokens_seen", "{}", lambda values: number_text(values[-1])),
        "Training loss": number("loss", "{:.4f}"),
        "Validation loss": number("validation/loss", "{:.4f}"),
        "Best validation loss": _best(run.series.get("validation/loss")),
        "Bits per byte": number("validation/bits_per_byte", "{:.4f}"),
        "Tokens/s (median)": number("tokens_per_second", "{:,.0f}", np.nanmedian),
        "MFU (median)": number("mfu", "{:.1%}", np.nanmedian),
        "Peak memory": number("memory_gib", "{:.2f} GiB"),
        "Skipped steps": number("skipped_steps", "{:,.0f}"),
        "Bad rows": number("bad_rows", "{:,.0f}").removeprefix("0"),
        "Clipped steps": _clipped(run),
        "Starts": f"{len(run.starts):,}" if run.starts else "",
        "Mesh": mesh_text(run.starts[-1].mesh) if run.starts else "",
    }
    return {title: text for title, text in found.items() if text}


def _clipped(run: RunFiles) -> str:
    """The share of logged steps whose gradient was clipped."""
    norms, limit = run.series.get("grad_norm"), run.config.get("training.max_norm")
    return f"{np.mean(norms.values > limit):.0%}" if norms and is_limit(limit) else ""


def _best(validation: Series | None) -> str:
    """The lowest loss, unless it is the last one."""
    if validation is None or np.isnan(validation.values).all():
        return ""
    row = int(np.nanargmin(validation.values))
    if row == len(validation.values) - 1:
        return ""
    return f"{validation.values[row]:.4f} (step {validation.steps[row]:,})"


def _most_important(events: Sequence[Event]) -> list[Event]:
    """At most MAX_EVENTS, in order: faults first, then mesh changes, restarts, skipped steps."""
    order: list[Kind] = ["fault", "mesh change", "restart", "skipped steps"]
    kept = sorted(events, key=lambda event: order.index(event.kind))[:MAX_EVENTS]
    return sorted(kept, key=lambda event: event.step)


def _samples(runs: Sequence[RunFiles]) -> dict[str, list[tuple[int, int, str]]]:
    """What the model generated: by prompt, (number of the run, step, text without the prompt)."""
    found: dict[str, list[tuple[int, int, str]]] = {sample["prompt"]: [] for run in runs for sample in run.samples}
    for number, run in enumerate(runs):
        by_prompt: dict[str, list[SampleRow]] = {}
        for sample in run.samples:
            by_prompt.setdefault(sample["prompt"], []).append(sample)
        for prompt, samples in by_prompt.items():
            last = len(samples) - 1
            for row in sorted({round(last * n / (MAX_SAMPLES - 1)) for n in range(MAX_SAMPLES)}):
                found[prompt].append((number, samples[row]["step"], samples[row]["text"].removeprefix(prompt)))
    return found
