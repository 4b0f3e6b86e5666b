"""Charts of a report, drawn by matplotlib without a display: SVG with the page's colors, or PNG."""

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from titanlite.metrics.jsonl import Series
from titanlite.metrics.records import TASK_PREFIX, WATCH_PREFIX
from titanlite.runtime.durability import replace_file
from titanlite.runtime.errors import UserError
from titanlite.runtime.text import counted
from titanlite.tools.report.runs import DATA_WAIT, MAX_LOAD, MIN_LOAD, Kind, RunFiles

COLORS = ("#2f6fb0", "#c2601a", "#2a8758", "#8b4fa6", "#b83a3f", "#7c6a1d", "#1d7f8c", "#6d7480")
"""Of runs or keys, in this order; then again with other dashes."""
DASHES = ("-", "--", ":")
INK, MUTED, GRID = "#3c4149", "#7b828d", "#e3e6ea"
MARKS: Mapping[Kind, tuple[str, str]] = {
    "restart": ("|", "#4c5667"),
    "mesh change": ("D", "#7a35b8"),
    "skipped steps": ("x", "#d07a00"),
    "fault": ("X", "#d01f2e"),
}
"""Kind -> marker of matplotlib, and color."""

BUCKETS = 400
"""Of the steps of a curve; each keeps its lowest and its highest value, so that spikes stay visible."""
MIN_SMOOTHED = 100
"""Values from which a noisy curve has a running mean, over 1/WINDOWS of them."""
WINDOWS = 50
LOAD = "by the mean of the block's experts, the extreme over the blocks"
HEAT_LEVELS = 21
"""Colors of a heat map."""
LEGEND_ROWS = 5
MAX_CHARTS = 24
"""Of one kind: a chart takes a tenth of a second."""
MAX_CURVES = 256
"""Of one chart."""
LARGEST = 1e100
"""Values from here on are not drawn, as infinities are not: their sums and squares would not be finite."""
LOG_RATIO = 20
"""Ratio of the largest to the smallest value from which a chart of losses or norms has a logarithmic scale."""


@dataclass(frozen=True)
class Curve:
    """A line. number: decides its color. dots: few values, such as validations, drawn with markers and dashes."""

    label: str
    number: int
    series: Series
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart over the steps, or over `x` on a logarithmic axis. key: name of its file. scale: "log" is used only for a
    large range of positive values; "zero" begins at 0. limits: horizontal lines, number of a run -> value. loads: of
    experts relative to the mean, (blocks, experts), drawn as a heat map in place of curves."""

    key: str
    title: str
    curves: Sequence[Curve] = ()
    scale: str = "zero"
    note: str = ""
    smooth: bool = False
    wide: bool = False
    limits: Mapping[int, float] | None = None
    loads: npt.NDArray[np.float64] | None = None
    x: str = ""


OF_RUNS = {
    "lr": Chart("lr", "Learning rate"),
    "tokens_per_second": Chart("tokens_per_second", "Tokens per second", note="all ranks"),
    DATA_WAIT: Chart("data_wait", "Waiting for data", note="% of the step time, slowest rank"),
    "goodput": Chart("goodput", "Goodput", note="share of the wall time spent in steps so far"),
    "memory_gib": Chart("memory", "Peak memory", note="GiB so far, rank with the most"),
    "mfu": Chart("mfu", "Model FLOP/s utilization", note="fraction of the devices' peak"),
}
OF_EXPERTS = {
    MAX_LOAD: Chart("max_load", "Most loaded expert", note=LOAD),
    MIN_LOAD: Chart("min_load", "Least loaded expert", note=LOAD),
    "balance_loss": Chart("balance_loss", "Balance loss of experts", scale="", note="1: balanced"),
}
"""Series -> its chart, with a curve per run."""


def charts_of(runs: Sequence[RunFiles]) -> list[Chart]:
    """The charts for which at least one run has numbers."""
    charts = [
        _losses(runs),
        _norms(runs),
        *(replace(chart, curves=_curves(runs, key)) for key, chart in OF_RUNS.items()),
        *_first(_by_source(runs, "loss/", "Training loss")),
        *_first(_by_source(runs, "validation/loss/", "Validation loss")),
        *_first(_of_tasks(runs)),
        *_first(_by_source(runs, "epoch/", "Epochs", "zero")),
        *(replace(chart, curves=_curves(runs, key)) for key, chart in OF_EXPERTS.items()),
        *_first(_watched(runs)),
    ]
    return [*(_limited(chart) for chart in charts if chart.curves), *_heat_maps(runs)]


def _first(charts: Sequence[Chart]) -> list[Chart]:
    """The first MAX_CHARTS; the last one notes how many others there are."""
    shown, left_out = list(charts[:MAX_CHARTS]), len(charts) - MAX_CHARTS
    if left_out > 0:
        shown[-1] = _with_note(shown[-1], f"… {counted(left_out, 'more chart')}: see metrics.jsonl")
    return shown


def _limited(chart: Chart) -> Chart:
    """The chart with its first MAX_CURVES curves, and a note if there are others."""
    left_out = len(chart.curves) - MAX_CURVES
    if left_out <= 0:
        return chart
    note = f"… {counted(left_out, 'more curve')}: see metrics.jsonl"
    return _with_note(replace(chart, curves=chart.curves[:MAX_CURVES]), note)


def _with_note(chart: Chart, note: str) -> Chart:
    return replace(chart, note=f"{chart.note}; {note}" if chart.note else note)


def _curves(runs: Sequence[RunFiles], key: str, *, dots: bool = False) -> list[Curve]:
    return [Curve(run.name, n, run.series[key], dots) for n, run in enumerate(runs) if key in run.series]


def _losses(runs: Sequence[RunFiles]) -> Chart:
    training, validation = _curves(runs, "loss"), _curves(runs, "validation/loss", dots=True)
    if len(runs) == 1:
        training = [replace(curve, label="training") for curve in training]
        validation = [replace(curve, label="validation", number=1) for curve in validation]
    else:
        validation = [replace(curve, label=f"{curve.label}, validation") for curve in validation]
    return Chart("loss", "Loss", [*training, *validation], "log", smooth=True, wide=True, note="per token")


def _norms(runs: Sequence[RunFiles]) -> Chart:
    limits = {number: run.config.get("training.max_norm") for number, run in enumerate(runs)}
    shown = {number: limit for number, limit in limits.items() if is_limit(limit)}
    note = "before clipping; dashed: training.max_norm"
    return Chart("grad_norm", "Gradient norm", _curves(runs, "grad_norm"), "log", note, smooth=True, limits=shown)


def is_limit(value: object) -> TypeGuard[float]:
    """Whether a training.max_norm clips gradients, and can be drawn."""
    return type(value) in (int, float) and 0 < value < LARGEST  # type: ignore[operator]


def _keys(runs: Sequence[RunFiles], prefix: str) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run.series if key.startswith(prefix)))


def _by_source(runs: Sequence[RunFiles], prefix: str, title: str, scale: str = "log") -> list[Chart]:
    """One chart with all sources of one run; with several runs, one chart per source."""
    keys, name, smooth = _keys(runs, prefix), prefix.strip("/").replace("/", "_"), scale == "log"
    dots = prefix.startswith("validation")
    if len(runs) == 1:
        curves = [Curve(key.removeprefix(prefix), n, runs[0].series[key], dots) for n, key in enumerate(keys)]
        return [Chart(f"{name}_by_source", f"{title} by source", curves, scale, smooth=smooth)]
    titles = [f"{title} of {key.removeprefix(prefix)}" for key in keys]
    return [
        Chart(f"{name}_source_{number}", titles[number], _curves(runs, key, dots=dots), scale, smooth=smooth)
        for number, key in enumerate(keys)
    ]


def _of_tasks(runs: Sequence[RunFiles]) -> list[Chart]:
    """One chart per task and score."""
    charts = []
    for number, key in enumerate(key for key in _keys(runs, TASK_PREFIX) if not key.endswith("_stderr")):
        name, _, score = key.removeprefix(TASK_PREFIX).rpartition("/")
        charts.append(Chart(f"task_{number}", f"Task {name}: {score}", _curves(runs, key, dots=True)))
    return charts


def _watched(runs: Sequence[RunFiles]) -> list[Chart]:
    """A chart per name, with the curves of all layers: of names that differ only in their last number, such as
    entropy/0, entropy/1, … With several runs, those of a run have its color."""
    charts: dict[str, Chart] = {}
    for key in _keys(runs, WATCH_PREFIX):
        name = key.removeprefix(WATCH_PREFIX)
        parts = re.split(r"(?<![^/.])([0-9]+)(?![^/.])", name)
        title = name if len(parts) == 1 else f"{''.join(parts[:-2])}*{parts[-1]}"
        chart = charts.setdefault(title, Chart(f"watch_{len(charts)}", title, scale=""))
        curves = _curves(runs, key)
        if len(parts) > 1 and len(runs) == 1:
            curves = [replace(curve, label=parts[-2], number=len(chart.curves)) for curve in curves]
        charts[title] = replace(chart, curves=[*chart.curves, *curves])
    return [*charts.values()]


def _heat_maps(runs: Sequence[RunFiles]) -> list[Chart]:
    maps = []
    for number, run in enumerate(run for run in runs if run.loads is not None):
        assert run.loads is not None
        loads = np.array(run.loads["loads"], np.float64)
        relative = loads / np.maximum(loads.mean(axis=1, keepdims=True), 1)
        name = "" if len(runs) == 1 else f" of {run.name}"
        note = f"step {run.loads['step']:,}; blue 0, gray the mean, red twice the mean or more"
        maps.append(Chart(f"loads_{number}", f"Loads of experts by block{name}", note=note, loads=relative))
    return maps


def thinned(series: Series) -> Series:
    """The lowest and the highest value of each of BUCKETS ranges of steps, and NaN where none can be drawn."""
    steps, values = series.steps, np.where(_can_draw(series.values), series.values, np.nan)
    if len(steps) > 2 * BUCKETS:
        first, span = steps[0], steps[-1] - steps[0] + 1
        buckets = ((steps - first) * (BUCKETS / span)).astype(np.int64)
        begins = np.flatnonzero(np.diff(buckets, prepend=-1)).tolist()
        ends = [*begins[1:], len(steps)]
        kept = sorted({row for begin, end in zip(begins, ends, strict=True) for row in _extremes(values, begin, end)})
        steps, values = steps[kept], values[kept]
    return Series(steps, values)


def _can_draw(values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    return np.abs(values) < LARGEST


def _extremes(values: npt.NDArray[np.float64], begin: int, end: int) -> tuple[int, ...]:
    part = values[begin:end]
    if np.isnan(part).all():
        return (begin,)
    return begin + int(np.nanargmin(part)), begin + int(np.nanargmax(part))


def running_mean(series: Series) -> Series:
    """The mean over len / WINDOWS values around each one, without those that cannot be drawn."""
    finite = _can_draw(series.values)
    half = max(len(finite) // WINDOWS // 2, 1)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, series.values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    rows = np.arange(len(finite))
    begins, ends = np.maximum(rows - half, 0), np.minimum(rows + half + 1, len(finite))
    with np.errstate(all="ignore"):
        return Series(series.steps, (sums[ends] - sums[begins]) / (counts[ends] - counts[begins]))


class Drawing:
    """matplotlib, for charts over the same steps. x: what the "steps" of the runs are. Raises UserError if it is not
    installed."""

    def __init__(self, runs: Sequence[RunFiles], x: str = "step") -> None:
        try:
            import matplotlib  # slow to import, and an extra
            import matplotlib.figure
            import matplotlib.patches
            import matplotlib.path
            import matplotlib.ticker
        except ImportError:
            raise UserError("a report needs matplotlib: pip install matplotlib") from None
        self._matplotlib: Any = matplotlib
        self._runs, self._x = runs, x
        self._steps = max((run.last_step for run in runs), default=1)
        first = min((int(each.steps[0]) for run in runs for each in run.series.values()), default=0)
        self._first = first if self._steps < 2 * first < 2 * self._steps else 0  # of runs that continue another one

    def svg(self, chart: Chart) -> str:
        """An <svg> element for the page: without sizes, names and metadata, with the variables of its colors."""
        file = io.StringIO()
        self._save(chart, file, "svg")
        text = file.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        text = re.sub(r' (?:xmlns|xmlns:xlink|version)="[^"]*"', "", text)
        text = re.sub(r'<svg width="[^"]*" height="[^"]*"|<svg height="[^"]*"', '<svg role="img"', text, count=1)
        text = re.sub(r'<g id="[^"]*"', "<g", text)
        text = re.sub(r'="[^"]*"', lambda value: re.sub(r"(\d\.\d\d)\d+", r"\1", value[0]), text)
        text = re.sub(r"font-family: [^;]*; ", "", text)
        return re.sub(r"#[0-9a-f]{6}", lambda color: VARIABLES.get(color[0], color[0]), text)

    def png(self, chart: Chart, path: Path) -> None:
        """Write a PNG with its title. Raises OSError."""
        file = io.BytesIO()
        self._save(chart, file, "png")
        replace_file(path, file.getvalue())

    def _save(self, chart: Chart, target: io.StringIO | io.BytesIO, kind: str) -> None:
        settings: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": chart.key, "text.parse_math": False}
        settings |= {"font.size": 8, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6}
        settings |= {"text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED}
        settings |= {"axes.edgecolor": MUTED, "axes.spines.top": False, "axes.spines.right": False}
        with self._matplotlib.rc_context(settings), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from")  # of a name; the browser has the glyph
            warnings.filterwarnings("ignore", "constrained_layout not applied")  # a start far behind the last step
            alone = kind == "png"
            figure = self._figure(chart, alone=alone) if chart.loads is None else self._heat_map(chart.loads)
            if alone:
                figure.set_figheight(figure.get_figheight() + 0.2)
                figure.suptitle(f"{chart.title}{f' ({chart.note})' * bool(chart.note)}", x=0.01, ha="left", fontsize=9)
            options = {"metadata": dict.fromkeys(("Date", "Creator", "Format", "Type"))} if kind == "svg" else {}
            figure.savefig(target, format=kind, dpi=160, transparent=kind == "svg", **options)

    def _figure(self, chart: Chart, *, alone: bool) -> Any:
        marked = [run for run in self._runs if run.events] if chart.wide and not chart.x else []
        strip = 0.16 * len(marked) + 0.1 * bool(marked)
        height = (3.1 if chart.wide else 2.1) + strip
        figure = self._matplotlib.figure.Figure((10 if chart.wide else 4.9, height), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, hspace=0.0)
        rows = figure.subplots(
            1 + bool(marked),
            squeeze=False,
            sharex=True,
            gridspec_kw={"height_ratios": [height - strip, strip][: 1 + bool(marked)]},
        )
        axes = rows[0, 0]
        if not chart.x:
            axes.set_xlim(self._first, self._steps)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        for curve in chart.curves:
            self._draw(axes, curve, smooth=chart.smooth)
        for number, limit in (chart.limits or {}).items():
            axes.axhline(limit, color=_color(number), linewidth=0.8, linestyle=(0, (4, 3)))
        if len(self._runs) == 1 and not chart.x:
            for kind, (_, color) in MARKS.items():
                if kind != "skipped steps":
                    height, options = axes.get_xaxis_transform(), {"linewidth": 0.7, "alpha": 0.6}
                    axes.vlines(self._places(self._runs[0], kind), 0, 1, color, transform=height, **options)
        self._scale(axes, chart)
        if marked:
            axes.tick_params(axis="x", length=0, labelbottom=False)
            self._draw_strip(rows[1, 0], marked)
        rows[-1, 0].set_xlabel(chart.x or self._x, labelpad=1)
        # The page has the colors of the runs in its summary; a PNG stands alone.
        if chart.wide or alone or len(self._runs) == 1:
            self._legend(axes, chart)
        return figure

    def _heat_map(self, loads: npt.NDArray[np.float64]) -> Any:
        figure = self._matplotlib.figure.Figure((4.9, 2.1), layout="constrained")
        axes = figure.subplots()
        levels = np.rint(np.clip(loads / 2, 0, 1) * (HEAT_LEVELS - 1)).astype(int)
        corners = np.array([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]])
        for level in np.unique(levels):  # one path per color: a path per cell would be ten times as large
            rows, columns = np.nonzero(levels == level)
            squares = np.stack((columns, rows), axis=1)[:, None] + corners
            path = self._matplotlib.path.Path.make_compound_path_from_polys(squares)
            color = self._matplotlib.colormaps["coolwarm"](level / (HEAT_LEVELS - 1))
            axes.add_patch(self._matplotlib.patches.PathPatch(path, facecolor=color, linewidth=0))
        axes.set_xlim(-0.5, loads.shape[1] - 0.5)
        axes.set_ylim(-0.5, loads.shape[0] - 0.5)
        axes.set_xlabel("expert", labelpad=1)
        axes.set_ylabel("block", labelpad=1)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(self._matplotlib.ticker.MaxNLocator(8, integer=True))
        return figure

    def _draw(self, axes: Any, curve: Curve, *, smooth: bool) -> None:
        style: dict[str, Any] = {"color": _color(curve.number), "linestyle": _dashes(curve.number)}
        has_mean = smooth and not curve.dots and len(curve.series.steps) >= MIN_SMOOTHED
        points = thinned(curve.series)
        if curve.dots:
            size = 3 if len(points.steps) <= 60 else 0
            style |= {"linestyle": (0, (4, 2)), "marker": "o", "markersize": size, "clip_on": False}
        elif len(points.steps) == 1:
            style |= {"marker": "o", "markersize": 3}
        axes.plot(
            points.steps, points.values, linewidth=0.8 if has_mean else 1.2, alpha=0.3 if has_mean else 1, **style
        )
        if has_mean:
            mean = thinned(running_mean(curve.series))
            axes.plot(mean.steps, mean.values, linewidth=1.4, **style)

    def _scale(self, axes: Any, chart: Chart) -> None:
        values = np.concatenate([curve.series.values for curve in chart.curves])
        values = values[_can_draw(values)]
        ticker = self._matplotlib.ticker
        lowest, highest = (values.min(), values.max()) if len(values) else (0.0, 1.0)
        if chart.scale == "log" and lowest > 0 and highest / lowest > LOG_RATIO:
            axes.set_yscale("log")
            subs = (1.0,) if highest / lowest > 1000 else (1.0, 2.0, 5.0)
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=8))
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        elif chart.scale == "zero":
            axes.set_ylim(0, 1.08 * highest if highest > 1e-300 else 1)
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number_text(value)))
        if chart.x:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
            axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        else:
            axes.xaxis.set_major_locator(ticker.MaxNLocator(10 if chart.wide else 5, integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number_text(value)))

    def _places(self, run: RunFiles, kind: Kind) -> list[int]:
        """The steps of the events of a kind, one for each place that can be told from others."""
        events = [event for event in run.events if event.kind == kind]
        return list({event.step * 2 * BUCKETS // max(self._steps, 1): event.step for event in events}.values())

    def _draw_strip(self, axes: Any, marked: Sequence[RunFiles]) -> None:
        """A row per run with a symbol per event."""
        for row, run in enumerate(marked):
            for kind, (marker, color) in MARKS.items():
                places = self._places(run, kind)
                if not places:
                    continue  # an empty line that is not clipped would widen the margins
                size = 9 if marker == "|" else 4.5  # a restart stays visible below a fault of the same step
                options = {"color": color, "marker": marker, "markersize": size, "linestyle": "", "clip_on": False}
                axes.plot(places, [row] * len(places), **options)
        axes.set_ylim(len(marked) - 0.4, -0.6)
        names = ["events"] if len(self._runs) == 1 else [shortened(run.name, 16) for run in marked]
        axes.set_yticks(range(len(marked)), names, fontsize=7)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)

    def _legend(self, axes: Any, chart: Chart) -> None:
        curves = {(curve.label, curve.number, curve.dots): curve for curve in chart.curves}.values()
        if len(curves) < 2:
            return
        lines = self._matplotlib.lines
        handles, labels = [], []
        for curve in curves:
            dashes = (0, (4, 2)) if curve.dots else _dashes(curve.number)
            if curve.dots and len(self._runs) > 1 and chart.wide and not chart.x:
                continue  # below, once for all runs
            handles.append(lines.Line2D([], [], color=_color(curve.number), linestyle=dashes, linewidth=1.4))
            labels.append(shortened(curve.label, 40 if chart.wide else 24))
        if chart.wide and not chart.x and len(self._runs) > 1 and any(curve.dots for curve in chart.curves):
            handles.append(lines.Line2D([], [], color=MUTED, linestyle=(0, (4, 2)), marker="o", markersize=3))
            labels.append("validation")
        columns = max((130 if chart.wide else 62) // (max(map(len, labels)) + 6), 1)
        if (hidden := len(labels) - columns * LEGEND_ROWS) > 0:  # more would leave no space for the curves
            handles[-hidden - 1 :], labels[-hidden - 1 :] = [lines.Line2D([], [], alpha=0)], [f"… {hidden + 1} more"]
        axes.legend(
            handles,
            # a leading underscore would hide the label
            [f"\u200b{label}" if label.startswith("_") else label for label in labels],
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=columns,
            frameon=False,
            borderaxespad=0.2,
            borderpad=0.2,
            handlelength=1.8,
        )


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _dashes(number: int) -> str:
    return DASHES[number // len(COLORS) % len(DASHES)]


def number_text(value: float) -> str:
    """A short number: 0.0015, 3e-05, 1,250, 120k, 1.5M, 2.1T."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:,.4g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 and math.isclose(value, round(value)) else f"{value:.4g}"


def shortened(text: str, length: int) -> str:
    """The text, without its middle if it is longer."""
    return text if len(text) <= length else f"{text[: length // 2 - 1]}…{text[-(length - length // 2) :]}"


VARIABLES = {color: f"var(--c{number})" for number, color in enumerate(COLORS)}
VARIABLES |= {color: f"var(--m{number})" for number, (_, color) in enumerate(MARKS.values())}
VARIABLES |= {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"}
"""Color -> the variable of the page's style that replaces it in SVG."""
