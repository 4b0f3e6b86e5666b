"""The page of a report: one HTML file, without scripts, that loads nothing."""

import os
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

import numpy as np

from titanlite.config.fields import literal
from titanlite.metrics.jsonl import Series
from titanlite.runtime.text import counted
from titanlite.tools.report.charts import (
    COLORS,
    DARK_COLORS,
    DASHES,
    GRID,
    INK,
    MARKS,
    MIN_SMOOTHED,
    MUTED,
    Chart,
    HeatMap,
    number_text,
)
from titanlite.tools.report.runs import Event, Goodput, Kind, RunFiles, differing_keys, mesh_text

FIRST_LINE = "<!doctype html><!-- titanlite report -->"
"""Of each report: only such a file is replaced."""

MAX_EVENTS = 20
MAX_SAMPLES = 12
"""Per run and prompt: the first, the last, and others at even distances."""


def page(runs: Sequence[RunFiles], charts: Sequence[Chart | HeatMap], drawings: Sequence[str], created: str) -> str:
    """The HTML. drawings: the SVG of each chart. created: the time of the report."""
    title = "Training report: " + ", ".join(run.name for run in runs)
    kinds = list(dict.fromkeys(event.kind for run in runs for event in run.events))
    parts = [
        f'{FIRST_LINE}\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
        f"<header><h1>{escape(', '.join(run.name for run in runs))}</h1>",
        f"<p>{'Training report' if len(runs) == 1 else f'Training report of {len(runs)} runs'} · {escape(created)}</p>",
        f"{_folders(runs)}</header>",
        _summary(runs),
        _differences(runs),
        _charts(charts, drawings, kinds),
        _goodput(runs),
        _events(runs),
        _samples(runs),
        _configurations(runs),
        "</main></body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _swatch(number: int) -> str:
    dashes = ("solid", "dashed", "dotted")[number // len(COLORS) % len(DASHES)]
    return f'<i class="swatch" style="border-top: 3px {dashes} var(--c{number % len(COLORS)})"></i>'


def _name(runs: Sequence[RunFiles], number: int) -> str:
    """A run's name with its color."""
    return (_swatch(number) if len(runs) > 1 else "") + escape(runs[number].name)


def _folders(runs: Sequence[RunFiles]) -> str:
    description = str(runs[0].config.get("job.description", "")) if len(runs) == 1 else ""
    return f"<p>{escape(description)}</p>" if description else ""


def figures_of(run: RunFiles) -> dict[str, str]:
    """The numbers of the summary, by title; unknown ones are left out."""
    series, config = run.series, run.config
    total = config.get("training.steps")
    validation = series.get("validation/loss")
    found = {
        "Steps": f"{run.last_step:,}" + (f" of {total:,}" if type(total) is int else ""),
        "Tokens": number_text(series["tokens_seen"].values[-1]) if "tokens_seen" in series else "",
        "Training loss": _last(series, "loss", "{:.4f}"),
        "Validation loss": _last(series, "validation/loss", "{:.4f}"),
        "Best validation loss": _best(validation) if validation else "",
        "Bits per byte": _last(series, "validation/bits_per_byte", "{:.4f}"),
        "Tokens/s (median)": _of(series, "tokens_per_second", np.nanmedian, "{:,.0f}"),
        "MFU (median)": _of(series, "mfu", np.nanmedian, "{:.1%}"),
        "Peak memory": _last(series, "memory_gib", "{:.2f} GiB"),
        "Skipped steps": _last(series, "skipped_steps", "{:,.0f}"),
        "Bad rows": _last(series, "bad_rows", "{:,.0f}").removeprefix("0"),
        "Clipped steps": _clipped(run),
        "Starts": f"{len(run.starts):,}" if run.starts else "",
        "Mesh": mesh_text(run.starts[-1].mesh) if run.starts else "",
    }
    return {title: text for title, text in found.items() if text}


def _clipped(run: RunFiles) -> str:
    """The share of logged steps whose gradient was clipped."""
    norms, limit = run.series.get("grad_norm"), run.config.get("training.max_norm")
    return f"{np.mean(norms.values > limit):.0%}" if norms and isinstance(limit, int | float) and limit > 0 else ""


def _last(series: Mapping[str, Series], key: str, form: str) -> str:
    return form.format(series[key].values[-1]) if key in series else ""


def _of(series: Mapping[str, Series], key: str, reduce: object, form: str) -> str:
    return form.format(reduce(series[key].values)) if key in series and callable(reduce) else ""


def _best(validation: Series) -> str:
    if np.isnan(validation.values).all():
        return ""
    row = int(np.nanargmin(validation.values))
    if row == len(validation.values) - 1:
        return ""
    return f"{validation.values[row]:.4f} (step {validation.steps[row]:,})"


def _summary(runs: Sequence[RunFiles]) -> str:
    figures = [figures_of(run) for run in runs]
    empty = [run.name for run in runs if not run.series]
    note = f'<p class="note">No logged step yet: {escape(", ".join(empty))}</p>' if empty else ""
    if len(runs) == 1:
        tiles = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(text)}</dd></div>" for key, text in figures[0].items())
        return f'<section><dl class="tiles">{tiles}</dl>{note}</section>'
    titles = dict.fromkeys(title for found in figures for title in found)
    head = "".join(f'<th class="number">{escape(title)}</th>' for title in titles)
    rows = "".join(
        f"<tr><th>{_name(runs, number)}</th>"
        + "".join(f'<td class="number">{escape(found.get(title, ""))}</td>' for title in titles)
        + "</tr>"
        for number, found in enumerate(figures)
    )
    table = f'<table class="summary"><thead><tr><th>Run</th>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<section><h2>Summary</h2><div class="scroll">{table}</div>{note}</section>'


def _differences(runs: Sequence[RunFiles]) -> str:
    """The keys in which the configurations differ."""
    known = [(number, run) for number, run in enumerate(runs) if run.config]
    if len(known) < 2:
        return ""
    keys = differing_keys([run.config for _, run in known])
    if not keys:
        return "<section><h2>Configuration</h2><p>The configurations differ in no key.</p></section>"
    head = "".join(f"<th>{_name(runs, number)}</th>" for number, _ in known)
    rows = "".join(
        f"<tr><th><code>{escape(key)}</code></th>"
        + "".join(f"<td><code>{_value(run.config, key)}</code></td>" for _, run in known)
        + "</tr>"
        for key in keys
    )
    table = f'<div class="scroll"><table><thead><tr><th>Key</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return f"<section><h2>Differences of the configurations</h2>{table}</section>"


def _value(config: Mapping[str, object], key: str) -> str:
    return escape(literal(config[key])) if key in config else ""


def _charts(charts: Sequence[Chart | HeatMap], drawings: Sequence[str], kinds: Sequence[Kind]) -> str:
    if not charts:
        return ""
    figures = "".join(
        f'<figure class="{"wide" if chart.wide else "half"}"><figcaption>{escape(chart.title)}'
        f"<span>{escape(chart.note)}</span></figcaption>{drawing}</figure>"
        for chart, drawing in zip(charts, drawings, strict=True)
    )
    legend = "".join(f"<span>{_mark(kind)}{kind}</span>" for kind in MARKS if kind in kinds)
    curves = [curve for chart in charts if chart.smooth for curve in chart.curves]
    if any(len(curve.series.steps) >= MIN_SMOOTHED for curve in curves):
        legend = f"<span>Pale: all logged steps. Strong: their running mean.</span>{legend}"
    legend = f'<p class="legend">{legend}</p>' if legend else ""
    return f'<section><h2>Curves</h2>{legend}<div class="charts">{figures}</div></section>'


SYMBOLS: Mapping[Kind, str] = {
    "restart": '<path d="M6 1V11" fill="none"/>',
    "mesh change": '<path d="M6 1.5L10.5 6L6 10.5L1.5 6Z"/>',
    "skipped steps": '<path d="M2.5 2.5L9.5 9.5M9.5 2.5L2.5 9.5" fill="none"/>',
    "fault": '<path d="M2.5 2.5L9.5 9.5M9.5 2.5L2.5 9.5" fill="none" stroke-width="3.4"/>',
}
"""As the markers of MARKS."""


def _mark(kind: Kind) -> str:
    color = f"var(--m{list(MARKS).index(kind)})"
    return f'<svg class="mark" viewBox="0 0 12 12" style="stroke:{color};fill:{color}">{SYMBOLS[kind]}</svg>'


def _goodput(runs: Sequence[RunFiles]) -> str:
    """A bar per run: the uses of the time from its first start to its last logged step."""
    known = [(number, run.goodput) for number, run in enumerate(runs) if run.goodput]
    rows = "".join(_goodput_row(_name(runs, number), goodput) for number, goodput in known)
    if not rows:
        return ""
    legend = (
        '<p class="legend"><span><i class="box good"></i>steps that count</span><span><i class="box check"></i>'
        'validation</span><span><i class="box other"></i>start-up, lost steps, time between starts</span></p>'
    )
    return f'<section><h2>Goodput</h2>{legend}<table class="goodput"><tbody>{rows}</tbody></table></section>'


def _goodput_row(name: str, goodput: Goodput) -> str:
    parts = {"good": goodput.steps, "check": goodput.validation, "other": goodput.other}
    total = max(sum(parts.values()), 1e-9)
    bar = "".join(f'<i class="{kind}" style="width:{100 * part / total:.2f}%"></i>' for kind, part in parts.items())
    return (
        f'<tr><th>{name}</th><td class="number">{goodput.steps / total:.1%}</td><td class="number">'
        f'of {duration(total)}</td><td class="fill"><div class="bar">{bar}</div></td></tr>'
    )


def duration(seconds: float) -> str:
    """Seconds in the two largest units: 42 s, 3 min 7 s, 5 h 2 min, 2 d 3 h."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    rest, words = round(seconds), list[str]()
    for unit, size in units:
        count, rest = divmod(rest, size)
        if count or words or unit == "s":
            words.append(f"{count} {unit}")
    return " ".join(words[:2])


def _events(runs: Sequence[RunFiles]) -> str:
    rows = []
    for number, run in enumerate(runs):
        shown = _most_important(run.events)
        rows += [
            f'<tr><td class="number">{event.step:,}</td><td class="kind">{_mark(event.kind)}{event.kind}</td>'
            + (f"<td>{_name(runs, number)}</td>" if len(runs) > 1 else "")
            + f"<td>{escape(event.text)}</td></tr>"
            for event in shown
        ]
        if hidden := len(run.events) - len(shown):
            columns = 4 if len(runs) > 1 else 3
            rows.append(f'<tr><td colspan="{columns}">{escape(run.name)}: {counted(hidden, "more event")}</td></tr>')
    if not rows:
        return ""
    head = '<th class="number narrow">Step</th><th class="narrow">Event</th>'
    head += "<th>Run</th><th>What</th>" if len(runs) > 1 else "<th>What</th>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<section><h2>Events</h2><div class="scroll">{table}</div></section>'


def _most_important(events: Sequence[Event]) -> list[Event]:
    """At most MAX_EVENTS, in order: faults first, then mesh changes, restarts, skipped steps."""
    order: list[Kind] = ["fault", "mesh change", "restart", "skipped steps"]
    kept = sorted(events, key=lambda event: order.index(event.kind))[:MAX_EVENTS]
    return sorted(kept, key=lambda event: event.step)


def _samples(runs: Sequence[RunFiles]) -> str:
    """What the model generated, by prompt, run and step."""
    rows = [(sample["prompt"], number, sample) for number, run in enumerate(runs) for sample in run.samples]
    prompts = list(dict.fromkeys(prompt for prompt, _, _ in rows))
    rows.sort(key=lambda row: (prompts.index(row[0]), row[1]))
    parts = []
    for prompt, of_prompt in groupby(rows, key=lambda row: row[0]):
        parts.append(f'<h3>Prompt <code>{escape(prompt)}</code></h3><table class="samples"><tbody>')
        for number, of_run in groupby(of_prompt, key=lambda row: row[1]):
            samples = [sample for _, _, sample in of_run]
            last = len(samples) - 1
            chosen = sorted({round(last * n / (MAX_SAMPLES - 1)) for n in range(MAX_SAMPLES)})
            name = f'<td class="narrow kind">{_name(runs, number)}</td>' if len(runs) > 1 else ""
            parts += [
                f'<tr>{name}<td class="number">{samples[row]["step"]:,}</td>'
                f"<td><pre>{escape(samples[row]['text'].removeprefix(prompt))}</pre></td></tr>"
                for row in chosen
            ]
        parts.append("</tbody></table>")
    return f"<section><h2>Generated text by step</h2>{''.join(parts)}</section>" if parts else ""


def _configurations(runs: Sequence[RunFiles]) -> str:
    parts = [
        f"<details><summary>{_name(runs, number)} <span>{escape(os.path.realpath(run.folder))}</span></summary>"
        f"<pre>{escape(run.config_text)}</pre></details>"
        for number, run in enumerate(runs)
        if run.config_text
    ]
    return f"<section><h2>Resolved configuration</h2>{''.join(parts)}</section>" if parts else ""


def _variables(colors: Sequence[str], marks: Sequence[str], **others: str) -> str:
    named = {f"c{number}": color for number, color in enumerate(colors)}
    named |= {f"m{number}": color for number, color in enumerate(marks)}
    return "".join(f"--{name}:{value};" for name, value in (named | others).items())


LIGHT = _variables(
    COLORS, [color for _, color in MARKS.values()], ink=INK, muted=MUTED, grid=GRID, page="#ffffff", soft="#f5f6f8"
)
DARK = _variables(
    DARK_COLORS,
    ("#aab3c2", "#b98af0", "#f0a63c", "#ff6b78"),
    ink="#d5d9df",
    muted="#949ca8",
    grid="#2b3038",
    page="#14171b",
    soft="#1c2026",
)

STYLE = (
    f":root{{color-scheme:light dark;{LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:14px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:22px;font-weight:650;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:15px;font-weight:650;margin:40px 0 12px}
h3{font-size:13px;font-weight:600;margin:20px 0 6px}
header p{margin:4px 0 0;color:var(--muted)}
.note,.legend{color:var(--muted);font-size:12.5px;margin:0 0 12px}
.legend>span{margin-right:18px;white-space:nowrap}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:0 24px;margin:24px 0 0}
.tiles div{border-top:1px solid var(--grid);padding:10px 0 14px}
dt{color:var(--muted);font-size:12px}
dd{margin:2px 0 0;font-size:16px;font-weight:600;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:28px 24px}
figure{margin:0;min-width:0;break-inside:avoid}
figure.wide{grid-column:1/-1}
figcaption{font-weight:600;font-size:13px;margin-bottom:4px}
figcaption span{color:var(--muted);font-weight:400;font-size:12px;margin-left:8px}
figure svg{display:block;width:100%;height:auto}
svg text{font-family:inherit}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{text-align:left;vertical-align:top;padding:6px 16px 6px 0;border-bottom:1px solid var(--grid);font-weight:400}
thead th{color:var(--muted);font-size:12px}
tbody th{font-weight:600;white-space:nowrap}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.kind{white-space:nowrap}.summary th,.summary td{padding-right:0;padding-left:12px}
.summary tr>:first-child{padding-left:0}.summary thead th{white-space:normal;vertical-align:bottom}
.narrow{width:1%}td{min-width:60px}
code,pre{font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
.swatch{display:inline-block;width:16px;height:0;margin-right:8px;vertical-align:middle}
.mark{width:11px;height:11px;margin-right:6px;vertical-align:-1px;stroke-width:1.6}
.goodput .fill{width:60%;padding-right:0;vertical-align:middle}
.goodput th,.goodput .number{width:1%}
.bar{display:flex;height:12px;border-radius:3px;overflow:hidden;background:var(--soft)}
.bar i,.box{display:block;height:12px;print-color-adjust:exact;-webkit-print-color-adjust:exact}
.box{display:inline-block;width:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.good{background:var(--c2)}.check{background:var(--c0)}.other{background:var(--muted)}
.samples td{padding-top:4px;padding-bottom:4px}.samples td.number{width:64px;color:var(--muted)}
details{border-top:1px solid var(--grid);padding:8px 0}
details pre{background:var(--soft);border-radius:6px;padding:12px 16px;margin-top:8px}
summary{cursor:pointer;font-weight:600}summary span{color:var(--muted);font-weight:400}
@media (max-width:720px){.charts{grid-template-columns:1fr}main{padding:20px 14px}}
@media print{main{max-width:none;padding:0}body{font-size:11px}h2{break-after:avoid}tr{break-inside:avoid}
table{font-size:9.5px}.scroll{overflow:visible}.summary .number{white-space:normal}}
"""
)
