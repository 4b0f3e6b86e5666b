"""titanlite report on made-up runs: events, differences, escaping, thinned curves, and a page that loads nothing."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from titanlite.metrics.jsonl import Series
from titanlite.runtime.errors import UsageError, UserError
from titanlite.storage.address import Address
from titanlite.storage.store import Store
from titanlite.tools.report.__main__ import main
from titanlite.tools.report.charts import (
    BUCKETS,
    COLORS,
    VARIABLES,
    Chart,
    Curve,
    Drawing,
    charts_of,
    number_text,
    running_mean,
    thinned,
)
from titanlite.tools.report.page import MAX_EVENTS
from titanlite.tools.report.runs import differing_keys, distinct_names, over_tokens, read_runs

BEGIN = datetime(2026, 5, 1, 12, 0, 0).astimezone()
NASTY = """a<b>&"c'$x$"""
CONFIG = """
[job]
description = "{name}"
dump_folder = "outputs/{name}"
[training]
steps = 40
max_norm = 1.0
[optimizer]
lr = {lr}
[[data.sources]]
kind = "text"
"""


def row(step: int, **values: Any) -> dict[str, Any]:
    numbers = {"loss": 8 / step, "grad_norm": 2.0, "lr": 1e-3, "tokens_seen": 64 * step, "tokens_per_second": 640.0}
    return {"step": step, **numbers, "step_time_s": 2.0, "data_time_s": 0.5, "memory_gib": 1.5, **values}


def write_run(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    lr: float = 1e-3,
    starts: Sequence[tuple[int, float, int]] = (),
    faults: Sequence[float] = (),
    samples: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """starts: step, seconds after BEGIN, ranks. faults: seconds after BEGIN. The last row is of 200 s after BEGIN."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(name="run", lr=lr))
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    os.utime(metrics, (BEGIN.timestamp() + 200,) * 2)
    times = [(step, (BEGIN + timedelta(seconds=after)).isoformat(), ranks) for step, after, ranks in starts]
    lines = [{"step": step, "time": time, "mesh": {"pp": 1, "dp_shard": ranks}} for step, time, ranks in times]
    if lines:
        (folder / "run.json").write_text(json.dumps({"run_id": "a", "starts": lines}))
    for after in faults:
        (folder / "faults" / f"{BEGIN + timedelta(seconds=after):%Y%m%d-%H%M%S}").mkdir(parents=True)
    if samples:
        (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def report(*arguments: str | Path, out: Path) -> str:
    main([*map(str, arguments), "--out", str(out)])
    return out.read_text(encoding="utf-8")


class Checker(HTMLParser):
    """Collects the text, and asserts that elements are closed in order and no attribute refers to another file."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.drawn, self.stack = "", list[str](), list[str]()
        self.feed(page)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe", "object", "image", "base")
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                assert (value or "").startswith("#"), (tag, name, value)
            for reference in re.findall(r"url\(([^)]*)\)", value or ""):
                assert reference.startswith("#")
        if tag != "meta":
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] != "style":
            self.text += data
        if self.stack and self.stack[-1] == "text":
            self.drawn.append(data)


@pytest.mark.slow
def test_a_report_of_two_runs(tmp_path: Path) -> None:
    rows = [
        row(step, skipped_steps=max(step - 19, 0), **{"loss/web": 2.0, "loss/<code>": 1.0}) for step in range(1, 41)
    ]
    rows.insert(30, {"step": 30, "validation/loss": 3.25, "validation/time_s": 4.0})
    sample = {"step": 20, "prompt": "Once <b>", "text": "Once <b> upon <script>a</script> time"}
    first = write_run(
        tmp_path / "one" / NASTY, rows, starts=[(0, 0, 1), (10, 100, 1), (20, 150, 2)], samples=[sample], faults=[90]
    )
    second = write_run(tmp_path / "two" / NASTY, rows[:10], lr=2e-3)
    page = report(first, second, out=tmp_path / "out" / "report.html")
    checked = Checker(page)
    assert f"one/{NASTY}" in checked.drawn  # a legend
    assert "http" not in page
    assert "@import" not in page
    assert page.count("url(#") >= 1  # clipping inside of the drawings
    for text in (
        f"one/{NASTY}",
        f"two/{NASTY}",
        "Prompt Once <b>",
        " upon <script>a</script> time",
        "Training loss of <code>",
    ):
        assert text in checked.text, text
    for text in ("restart", "mesh change", "fault", "skipped steps", "step 20 skipped", "one process → dp_shard 2"):
        assert text in checked.text, text
    assert f"{21 + 3 - MAX_EVENTS} more events" in checked.text
    assert "optimizer.lr0.0010.002" in checked.text.replace("\n", "")
    assert "job.dump_folder" not in page.partition("Resolved configuration")[0]
    assert "3.2500" in checked.text
    assert "100%" in checked.text  # clipped: all norms are above training.max_norm
    assert not any(color in page.partition("</style>")[2] for color in COLORS)  # variables, for the dark style


def test_marks_are_at_their_steps(tmp_path: Path) -> None:
    rows = [row(step, skipped_steps=3 * (step > 20)) for step in range(10, 50, 10)]
    starts = [(0, 0, 1), (10, 100, 1), (20, 150, 2)]
    (run,) = read_runs([write_run(tmp_path / "run", rows, starts=starts, faults=[90, 199])])
    assert [(event.kind, event.step) for event in run.events] == [
        *(("restart", 10), ("fault", 10)),
        *(("mesh change", 20), ("skipped steps", 30), ("fault", 40)),
    ]
    assert [event.text for event in run.events if event.kind == "skipped steps"] == ["3 of the steps 21 to 30 skipped"]


def test_curves_over_tokens(tmp_path: Path) -> None:
    """Of a run that continues another one at step 101, and validates between two rows."""
    rows = [row(101, tokens_seen=6400), {"step": 103, "validation/loss": 2.0}, row(105, tokens_seen=7200)]
    write_run(tmp_path / "run", rows)
    run = over_tokens(read_runs([tmp_path / "run"])[0])
    assert run.series["loss"].steps.tolist() == [6400, 7200]
    assert run.series["validation/loss"].steps.tolist() == [6800]
    axes = Drawing([run], "tokens")._figure(charts_of([run])[0], alone=True).axes[0]
    assert (axes.get_xlim(), axes.get_xlabel()) == ((6400, 7200), "tokens")


def test_goodput_is_the_share_of_steps_that_count(tmp_path: Path) -> None:
    rows = [row(1), row(10), row(40), {"step": 40, "validation/loss": 1.0, "validation/time_s": 20.0}]
    folder = write_run(tmp_path / "run", rows, starts=[(0, 0, 1)])
    (run,) = read_runs([folder])
    assert run.goodput is not None
    assert (run.goodput.steps, run.goodput.validation, run.goodput.other) == (80.0, 20.0, 100.0)
    os.utime(folder / "metrics.jsonl", (BEGIN.timestamp() + 50,) * 2)  # before the steps can have ended
    (run,) = read_runs([folder])
    assert run.goodput is None


@pytest.mark.slow
def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [], starts=[(0, 0, 1)])
    assert "No logged step yet: run" in Checker(report(folder, out=tmp_path / "r.html")).text
    (folder / "metrics.jsonl").unlink()
    assert "No logged step yet: run" in Checker(report(folder, out=tmp_path / "r.html")).text
    (folder / "config.toml").write_text("[broken")
    (folder / "metrics.jsonl").write_bytes(json.dumps(row(1, loss="NaN")).encode() + b'\n\0\xff\n{"step": 2, "lo')
    (folder / "samples.jsonl").write_text('{"step": 1, "prompt": "a", "text": "b"}\n{"step": 2, "pro')
    page = Checker(report(folder, out=tmp_path / "r.html"))
    assert "Steps1Tokens64Training lossnan" in page.text.replace("\n", "")
    assert "Prompt a" in page.text


@pytest.mark.parametrize("content", [None, "notes"])
def test_a_folder_without_a_run_is_refused(content: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if content:
        folder.mkdir()
        (folder / "notes.txt").write_text(content)
    with pytest.raises(UserError, match="pass the dump folder of a run"):
        read_runs([folder])


def test_only_a_report_is_replaced(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"step": 1, "loss": 2.0}])
    out = tmp_path / "train.py"
    out.write_text("precious")
    with pytest.raises(UserError, match="is not a report, so it is not overwritten"):
        main([str(folder), "--out", str(out)])
    assert out.read_text() == "precious"
    out.unlink()
    first = report(folder, out=out)
    assert report(folder, out=out)[:100] == first[:100]
    with pytest.raises(UserError, match=r"cannot write .*train\.py"):
        main([str(folder), "--out", str(out / "report.html")])
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["run", "train.py"]


@pytest.mark.slow
def test_loads_of_experts(tmp_path: Path) -> None:
    """The last complete line of experts.jsonl is drawn; max_load and min_load are the extremes over the blocks."""
    of_blocks = {"max_load/0": 1.5, "max_load/1": 1.2, "min_load/0": 0.5, "min_load/1": 0.25, "balance_loss": 1.1}
    folder = write_run(tmp_path / "run", [row(step, **of_blocks) for step in (1, 2)])
    lines = [{"step": step, "loads": [[step, 3 - step], [2, 2]]} for step in (1, 2)]
    (folder / "experts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "loa')
    page = report(folder, out=tmp_path / "r.html")
    checked = Checker(page)
    assert "Loads of experts by block" in checked.text
    assert "step 2; blue 0" in checked.text
    assert "Most loaded expert" in checked.text
    charts = {chart.key: chart for chart in charts_of(read_runs([folder]))}
    assert charts["max_load"].curves[0].series.values.tolist() == [1.5, 1.5]
    assert charts["min_load"].curves[0].series.values.tolist() == [0.25, 0.25]
    loads = charts["loads_0"].loads
    assert loads is not None
    assert loads.tolist() == [[4 / 3, 2 / 3], [1.0, 1.0]]


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_own_numbers_of_many_layers_fit_into_a_chart_per_name(tmp_path: Path) -> None:
    """Before, the legend of all parameters left no space for their curves, and two runs had a chart for each."""
    layers = {f"watch/{name}": n for n in range(40) for name in (f"norm/layers.{n}.w1.weight", f"load/3/{n}")}
    numbers = {"watch/norm/w1.weight": 1.0, "watch/load": 2.0, **layers}
    first, second = (write_run(tmp_path / name, [row(step, **numbers) for step in (1, 2)]) for name in "ab")
    titles = ["norm/w1.weight", "load", "norm/layers.*.w1.weight", "load/3/*"]
    for folders, labels in (([first], [*map(str, range(40))]), ([first, second], [*"ab"] * 40)):
        charts = [chart for chart in charts_of(read_runs(folders)) if chart.key.startswith("watch")]
        assert [chart.title for chart in charts] == titles
        assert sorted(curve.label for curve in charts[2].curves) == sorted(labels)
        report(*folders, *(["--png", tmp_path / "png"] if labels == [*"ab"] * 40 else []), out=tmp_path / "r.html")


def test_png_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {"step": 1, "loss": 2.0}
    folder = write_run(tmp_path / "run", [numbers, {**numbers, "step": 2}], starts=[(0, 0, 1), (1, 60, 1)])
    main([str(folder), "--out", str(tmp_path / "r.html"), "--png", str(tmp_path / "png")])
    (file,) = (tmp_path / "png").iterdir()
    assert (file.name, file.read_bytes()[:4]) == ("loss.png", b"\x89PNG")
    assert "Charts: 1 PNG files in" in capsys.readouterr().out


def test_without_matplotlib_the_error_has_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = write_run(tmp_path / "run", [row(1)])
    with pytest.raises(UserError, match="a report needs matplotlib: pip install matplotlib"):
        main([str(folder), "--out", str(tmp_path / "r.html")])


def test_a_long_run_is_a_small_drawing_with_its_spikes(tmp_path: Path) -> None:
    count = 1_000_000
    values = np.random.default_rng(0).normal(2, 0.1, count)
    values[654_321], values[1234] = 9.0, np.nan
    series = Series(np.arange(1, count + 1), values)
    points = thinned(series)
    assert len(points.steps) <= 2 * BUCKETS
    assert points.steps[np.nanargmax(points.values)] == 654_322
    assert (np.diff(points.steps) > 0).all()
    (run,) = read_runs([write_run(tmp_path / "run", [row(count)])])
    drawing = Drawing([run]).svg(Chart("loss", "Loss", [Curve("training", 0, series)], "log", smooth=True, wide=True))
    assert len(drawing) < 60_000
    assert VARIABLES[COLORS[0]] in drawing


def test_buckets_without_a_finite_value_are_gaps() -> None:
    values = np.ones(10 * BUCKETS)
    values[100:200] = np.inf
    points = thinned(Series(np.arange(10 * BUCKETS), values))
    assert np.isnan(points.values[(points.steps >= 100) & (points.steps < 200)]).all()
    assert np.isfinite(points.values).sum() >= BUCKETS - 10


def test_a_copy_in_a_store(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [row(1), row(2)], starts=[(0, 0, 1)], faults=[90])
    copy = Store(Address.parse(f"memory://{uuid4().hex}/run"))
    for file in folder.rglob("*"):
        name = str(file.relative_to(folder))
        copy.write(name if file.is_file() else f"{name}/rank-0.txt", file.read_bytes() if file.is_file() else b"")
    local, stored = read_runs([folder, copy.address])
    assert (stored.folder, stored.goodput) == (str(copy.address), None)  # its times are unknown
    assert (stored.events, stored.config, stored.last_step) == (local.events, local.config, 2)
    copy.write("checkpoints/step-2/MANIFEST.json", b"{}")
    with pytest.raises(UserError, match=r"run/checkpoints has neither .* pass the dump folder of a run; checkpoint"):
        read_runs([copy.address / "checkpoints"])


def test_running_mean() -> None:
    values = np.array([0.0, np.nan, 4.0] * 100)
    mean = running_mean(Series(np.arange(300), values))  # over 7 values around each
    assert mean.values[0] == pytest.approx(np.nanmean(values[:4]))
    assert mean.values[150] == pytest.approx(np.nanmean(values[147:154]))


def test_runs_are_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a/x/run", "a/y/run", "b/x/run", "other")]
    assert distinct_names(folders) == ["a/x/run", "y/run", "b/x/run", "other"]
    with pytest.raises(UsageError, match="is given twice"):
        distinct_names([tmp_path / "a", tmp_path / "b" / ".." / "a"])
    assert distinct_names([tmp_path / "a\x1b[31m"]) == ["a\ufffd[31m"]


def test_differing_keys() -> None:
    configs = [{"a.b": 1, "a.c": [1], "job.dump_folder": "x"}, {"a.b": 1, "a.c": [2], "job.dump_folder": "y", "d": 1}]
    assert differing_keys(configs) == ["a.c", "d"]
    assert differing_keys([configs[0]] * 2) == []


@pytest.mark.parametrize(
    ("number", "text"), [(0.0015, "0.0015"), (3e-5, "3e-05"), (1250.0, "1,250"), (122_880, "122.9k"), (2.5e12, "2.5T")]
)
def test_short_numbers(number: float, text: str) -> None:
    assert number_text(number) == text
