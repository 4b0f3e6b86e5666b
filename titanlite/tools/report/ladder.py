"""The chart of a ladder: its runs, the law that was fitted to them, and the prediction."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from titanlite.metrics.jsonl import Series
from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import JsonError, read_json
from titanlite.storage.address import Place
from titanlite.tools.ladder.fit import MAX_EXPONENT, Law
from titanlite.tools.ladder.prediction import LADDER_FILE, Prediction
from titanlite.tools.report.charts import Chart, Curve, number_text

POINTS = 60
"""Of a curve of the law."""


def with_ladders(folders: Sequence[Place]) -> tuple[list[Place], list[Chart]]:
    """(folders of runs: those of a ladder in place of its folder; charts of the ladders). Raises UserError."""
    runs: list[Place] = []
    charts: list[Chart] = []
    for folder in folders:
        path = folder / LADDER_FILE
        if not isinstance(path, Path) or not path.is_file():
            runs.append(folder)
            continue
        try:
            found = _read(path)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}: run titanlite ladder again") from None
        except JsonError as error:
            raise UserError(f"{path} {error}: run titanlite ladder again") from None
        runs += [folder / row["folder"] for row in found["runs"]]
        charts.append(_chart(found, f"law_{len(charts)}"))
    return runs, charts


def _read(path: Path) -> Prediction:
    """The prediction in a file that others may have written. Raises OSError and JsonError."""
    found: Prediction = read_json(path, Prediction)
    constants = {field.name for field in fields(Law)}
    if found["law"].keys() != constants:
        raise JsonError(f"has not the constants of a law, {', '.join(sorted(constants))}")
    if max(found["law"]["alpha"], found["law"]["beta"]) > MAX_EXPONENT:
        raise JsonError(f"has an exponent above {MAX_EXPONENT:g}")
    top = path.parent.resolve()
    for row in found["runs"]:
        if "\0" in row["folder"] or not (top / row["folder"]).resolve().is_relative_to(top):
            raise JsonError(f"names the run {row['folder']!r}, which is not inside of the ladder's folder")
    return found


def _chart(found: Prediction, key: str) -> Chart:
    """Loss over tokens: a color per size, with dots for runs and a line for the law."""
    law, target, curves = Law(**found["law"]), found["target"], list[Curve]()
    by_size: dict[int, list[tuple[int, float]]] = {}
    for row in sorted(found["runs"], key=lambda row: row["tokens"]):
        by_size.setdefault(row["parameters"], []).append((row["tokens"], row["loss"]))
    lowest, highest = (choose(row["tokens"] for row in [*found["runs"], target]) for choose in (min, max))
    tokens = np.geomspace(lowest, highest, POINTS).astype(np.int64)
    for number, size in enumerate([*sorted(by_size), target["parameters"]]):
        label = f"N = {number_text(size)}" + ", target" * (number == len(by_size))
        curves.append(Curve(label, number, Series(tokens, np.array([law.loss(size, each) for each in tokens]))))
    for number, size in enumerate(sorted(by_size)):
        steps, losses = zip(*by_size[size], strict=True)
        curves.append(Curve("measured", number, Series(np.array(steps), np.array(losses)), dots=True))
    low, high = target["interval"]
    ends = Series(np.full(3, target["tokens"]), np.array([low, target["fitted"], high]))
    curves.append(Curve("predicted, 90 %", len(by_size), ends, dots=True))
    note = "dots: measured, with the interval of the prediction; lines: E + A / N^alpha + B / D^beta"
    return Chart(key, "Validation loss by size", curves, "", note, wide=True, x="trained tokens D")
