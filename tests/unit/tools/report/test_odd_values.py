"""titanlite report on runs whose files have values that titanlite does not write: a page or one line, no traceback."""

import copy
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.report.test_report import BEGIN, CONFIG, row, write_run
from titanlite.runtime.errors import UserError
from titanlite.tools.report.__main__ import main
from titanlite.tools.report.charts import MAX_CHARTS, MAX_CURVES, charts_of
from titanlite.tools.report.ladder import with_ladders
from titanlite.tools.report.runs import read_runs

Path_ = tuple[str | int, ...]
VALUES: list[Any] = [
    *(None, True, -1, 0, 1e308, -1e308, 1e20, 2**62, 10**30, 10**400, "", "x", "2026-01-01", "Infinity"),
    *([], {}, [[1], [2, 3]], [1, 2], {"x": 1}),
]
METRICS = row(
    2, skipped_steps=1, bad_rows=1, mfu=0.5, goodput=0.5, unix_time=1e9, **{"loss/web": 2.0, "epoch/web": 0.1},
    **{"max_load/0": 1.5, "min_load/0": 0.5, "balance_loss": 1.0, "watch/entropy/0": 1.0},
)  # fmt: skip
VALIDATION = {"step": 2, "validation/loss": 3.0, "validation/loss/web": 3.0, "validation/time_s": 1.0}
VALIDATION |= {"validation/task/arc/acc": 0.5, "validation/bits_per_byte": 0.5}
START = {"step": 0, "time": BEGIN.isoformat(), "mesh": {"pp": 1, "dp_shard": 1}}
LATER = {"step": 1, "time": (BEGIN + timedelta(seconds=90)).isoformat(), "mesh": {"pp": 1, "dp_shard": 2}}
RESULT = {
    "first": 1, "last": 2, "verdict": "differs", "notes": ["a"], "differences": ["b"], "recorded": {"device": "cpu"},
    "recomputed": {"device": "cpu"}, "command": "c", "created": "2026-05-01",
}  # fmt: skip
FILES: dict[str, Any] = {
    "metrics.jsonl": [row(1), METRICS, VALIDATION],
    "run.json": {"run_id": "a", "starts": [START, LATER]},
    "samples.jsonl": [{"step": 2, "prompt": "p", "text": "p text"}],
    "experts.jsonl": [{"step": 2, "loads": [[1, 2], [3, 4]]}],
    "audit/audit.json": {"run": "r", "intervals": [RESULT]},
}
POINT = {"rung": "a", "folder": "one", "parameters": 1000, "tokens": 10_000, "loss": 3.0, "fitted": 3.1}
LADDER: dict[str, Any] = {
    "law": {"E": 1.0, "A": 10.0, "B": 10.0, "alpha": 0.5, "beta": 0.5},
    "intervals": {"E": [0.9, 1.1]},
    "runs": [POINT, {**POINT, "folder": "two", "parameters": 2000}],
    "target": {"parameters": 10_000, "tokens": 100_000, "fitted": 2.0, "interval": [1.9, 2.1]},
}


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The paths of all values in a value, itself included."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(value: Any, path: Path_, new: Any) -> Any:
    """A copy of the value with another one at a path."""
    if not path:
        return new
    value = copy.deepcopy(value)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = new
    return value


def write_files(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        is_lines = name.endswith(".jsonl")
        rows = content if is_lines and isinstance(content, list) else [content]
        file.write_text("".join(f"{json.dumps(each)}\n" for each in rows))


def survives(tmp_path: Path, *arguments: str) -> None:
    """Write a report, or refuse in one line."""
    with suppress(UserError):
        main([*arguments, "--out", str(tmp_path / "report.html")])


def run_with(tmp_path: Path, name: str, path: Path_, value: Any, files: dict[str, Any] = FILES) -> str:
    """A run in whose file `name` the value at `path` is another one. files: the others."""
    folder = tmp_path / "run"
    if not folder.exists():
        write_run(folder, [row(1)], faults=[50])
    write_files(folder, {**files, name: replaced(FILES[name], path, value)})
    return str(folder)


FEW = {**FILES, "metrics.jsonl": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.5}]}
"""With one chart of numbers, for the values of other files: most of the time of a report is the drawing of charts."""
# Each made a traceback, or stands for a kind of value.
ODD: list[tuple[str, Path_, Any]] = [
    ("run.json", ("starts", 1, "time"), "2026-05-01T12:00:00"),
    ("run.json", ("starts", 1, "step"), []),
    ("run.json", ("starts", 0, "mesh", "pp"), "x"),
    ("experts.jsonl", (0, "loads"), []),
    ("experts.jsonl", (0, "loads"), [[1], [2, 3]]),
    ("metrics.jsonl", (1, "loss"), -1e308),
    ("metrics.jsonl", (1, "step_time_s"), -1e308),
    ("metrics.jsonl", (1, "skipped_steps"), "Infinity"),
    ("metrics.jsonl", (1, "step"), 2**62),
    ("audit/audit.json", ("intervals", 0, "first"), 10**30),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path", "value"), ODD)
def test_an_odd_value_of_a_run_makes_no_traceback(tmp_path: Path, name: str, path: Path_, value: Any) -> None:
    survives(tmp_path, run_with(tmp_path, name, path, value, FEW))


@pytest.mark.soak
@pytest.mark.parametrize("name", FILES)
def test_no_value_of_a_run_makes_a_traceback(tmp_path: Path, name: str) -> None:
    for number, (path, value) in enumerate(product(places(FILES[name]), VALUES)):
        over = ("--over", "tokens") * (number % 2)
        try:
            survives(tmp_path, run_with(tmp_path, name, path, value), *over)
        except Exception as error:
            raise AssertionError(f"{name}: {path} = {value!r}: {error!r}") from error


def test_a_date_in_the_configurations_of_two_runs(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, [row(1)]) for name in ("one", "two")]
    for day, folder in enumerate(folders, start=1):
        (folder / "config.toml").write_text(CONFIG.format(name="run", lr=1.0) + f"[x]\nday = [2026-05-0{day}]\n")
    main([*map(str, folders), "--out", str(tmp_path / "report.html")])
    assert "datetime.date(2026, 5, 1)" in (tmp_path / "report.html").read_text()


def write_ladder(tmp_path: Path, path: Path_, value: Any) -> str:
    folder = tmp_path / "ladder"
    for name in ("one", "two"):
        if not (folder / name).exists():
            write_run(folder / name, [row(1)])
    write_files(folder, {"ladder.json": replaced(LADDER, path, value)})
    return str(folder)


def test_a_ladder_names_only_runs_inside_of_its_folder(tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [row(1)])
    write_ladder(tmp_path, (), LADDER)
    (tmp_path / "ladder" / "link").symlink_to(other)
    for name in ("../other", str(other), "link", "one/../../other", "a\0b"):
        folder = write_ladder(tmp_path, ("runs", 0, "folder"), name)
        with pytest.raises(
            UserError, match=r"ladder.json names the run '.*, which is not inside of the ladder's folder"
        ):
            with_ladders([Path(folder)])
    assert len(with_ladders([Path(write_ladder(tmp_path, (), LADDER))])[0]) == 2


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("law",), {"E": 1.0, "C": 2.0}, "has not the constants of a law, A, B, E, alpha, beta"),
        (("law", "alpha"), 1e308, "is invalid: law.alpha: "),
        (("law", "beta"), 3.0, "has an exponent above 2"),
        (("runs", 0, "tokens"), 0, "is invalid: runs.0.tokens: "),
        (("target", "parameters"), 10**400, "is invalid: target.parameters: "),
        (("target", "interval"), [1.0], "is invalid: target.interval: "),
    ],
)
def test_an_odd_value_of_a_ladder_is_named(tmp_path: Path, path: Path_, value: Any, reason: str) -> None:
    with pytest.raises(UserError, match=f"ladder.json {reason}"):
        with_ladders([Path(write_ladder(tmp_path, path, value))])


@pytest.mark.soak
def test_no_value_of_a_ladder_makes_a_traceback(tmp_path: Path) -> None:
    for path, value in product(places(LADDER), VALUES):
        try:
            survives(tmp_path, write_ladder(tmp_path, path, value))
        except Exception as error:
            raise AssertionError(f"{path} = {value!r}: {error!r}") from error


def test_the_number_of_charts_and_curves_is_limited(tmp_path: Path) -> None:
    names = {f"watch/{chr(97 + n // 26)}{chr(97 + n % 26)}": 1.0 for n in range(100)}
    names |= {f"watch/layers/{n}": 1.0 for n in range(MAX_CURVES + 5)}
    (run,) = read_runs([write_run(tmp_path / "run", [{"step": 1, **names}])])
    watched = [chart for chart in charts_of([run]) if chart.key.startswith("watch_")]
    assert len(watched) == MAX_CHARTS
    assert watched[-1].note == f"… {101 - MAX_CHARTS} more charts: see metrics.jsonl"
    (run,) = read_runs([write_run(tmp_path / "layers", [{"step": 1, **dict(list(names.items())[100:])}])])
    (chart,) = charts_of([run])
    assert len(chart.curves) == MAX_CURVES
    assert chart.note == "… 5 more curves: see metrics.jsonl"


def test_tokens_that_do_not_grow(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [row(1), row(2, tokens_seen=-5)])
    with pytest.raises(UserError, match=r"tokens_seen in .*run does not grow from row to row: leave out --over tokens"):
        main([str(folder), "--over", "tokens", "--out", str(tmp_path / "report.html")])


@pytest.mark.parametrize("place", ["report.html", "pngs"])
def test_a_pipe_in_place_of_an_output_is_not_waited_for(tmp_path: Path, place: str) -> None:
    folder, out = write_run(tmp_path / "run", [{"step": 1, "loss": 1.0}]), tmp_path / place
    if place == "report.html":
        os.mkfifo(out)
        with pytest.raises(UserError, match=r"report.html exists and is not a report, so it is not overwritten"):
            main([str(folder), "--out", str(out)])
    else:
        out.mkdir()
        os.mkfifo(out / "loss.png")
        main([str(folder), "--png", str(out), "--out", str(tmp_path / "other.html")])
        assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_marks_that_cannot_be_told_apart_are_drawn_once(tmp_path: Path) -> None:
    starts = [(2 * number, number / 20, 1 + number % 2) for number in range(2000)]
    folder = write_run(tmp_path / "run", [row(step) for step in range(1, 4001, 10)], starts=starts)
    main([str(folder), "--out", str(tmp_path / "report.html")])
    assert (tmp_path / "report.html").stat().st_size < 1_200_000  # 2.5 MB with all
