"""Predictions by data-sheet profiles against throughput that others have published. Takes half a minute; no GPU.

published.csv has a row for each figure: its source (repository, commit, file), and the nearest configuration of
titanlite. Rows with comparable = yes have the same precision, attention kernel and length. They are divided by the
CRC-32 of their settings: even ones may be fitted (GAPS and its neighbors in titanlite/planning/step_time.py),
odd ones are held out, and nothing is chosen by them.

torchtitan's H100s have 96 GB of HBM2e at 2.4 TB/s and are limited to 500 W, as the profile h100_500w. The policy "op/2"
recomputes every second matrix product; titanlite's "op" keeps all, and half of the products of a forward pass are
added. Figures with float8 are compared with predictions for bfloat16, since titanlite has no float8.
"""

import csv
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.measuring import Row, report
from titanlite.config.load import load_config
from titanlite.planning.estimate import estimate
from titanlite.planning.hardware.machine import Grid, Profile, load_profile
from titanlite.planning.step_time import UNCERTAINTY, predict

ROWS = Path(__file__).with_suffix(".csv")


def profile_of(hardware: str) -> Profile:
    """The shipped profile, with the changes of the source's card. Links per node are as the profile has them."""
    name, _, card = hardware.partition("@")
    sheet = load_profile(name)
    if card != "40GB":
        return sheet
    memory = Grid(sheet.memory.sizes, tuple(1555 / 2039 * value for value in sheet.memory.values))
    return replace(sheet, memory_gib=39.5, memory=memory)


def predicted(row: dict[str, str], profile: Profile) -> float:
    """Tokens per second of one rank."""
    ranks, arguments = int(row["gpus"]), [f"--{setting}" for setting in row["settings"].split()]
    config = load_config(arguments, world_size=ranks, device_type="cuda", checks_files=False)
    time = predict(config, estimate(config, ranks, device_type="cuda"), profile)
    # a third of the products belongs to the forward pass
    again = time.parts["products"] / 6 if row["recompute"] == "op/2" else 0.0
    return config.training.global_batch_size * config.training.seq_len / ranks / (time.total + again)


def group(row: dict[str, str]) -> str:
    if row["comparable"] == "yes":
        return "held out" if zlib.crc32(row["settings"].encode()) % 2 else "fitted"
    return "float8" if row["precision"] == "fp8" else "not like for like"


def main(json: Path | None = None) -> None:
    """json: folder of published.json."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    profiles = {hardware: profile_of(hardware) for hardware in dict.fromkeys(row["hardware"] for row in rows)}
    found: list[Row] = []
    ratios: dict[str, list[float]] = {"like for like": []}
    for row in rows:
        published, rate = float(row["tokens_per_s"]), predicted(row, profiles[row["hardware"]])
        ratios.setdefault(group(row), []).append(rate / published)
        if row["comparable"] == "yes":
            ratios["like for like"].append(rate / published)
        shown = {name: row[name] for name in ("source", "model", "hardware", "gpus", "layout", "recompute")}
        figures = {"published": published, "predicted": rate, "ratio": rate / published}
        found.append({"group": group(row), **shown, **figures})
    summary: list[Row] = []
    for name, values in ratios.items():
        lower, median, upper = np.quantile(values, (0.25, 0.5, 0.75))
        errors, shares = np.abs(np.array(values) - 1), (0.1, 0.15, UNCERTAINTY)
        within = {f"within {share:.0%}": np.mean(errors <= share) for share in shares}
        quartiles = {"lower quartile": lower, "median": median, "upper quartile": upper}
        extremes = {"least": min(values), "most": max(values)}
        figures = {key: float(value) for key, value in {**within, **quartiles, **extremes}.items()}
        summary.append({"group": name, "rows": str(len(values)), **figures})
    forms = {"ratio": ".3f", **dict.fromkeys(within, ".0%"), **dict.fromkeys((*quartiles, *extremes), ".3f")}
    tables = {"Tokens per second of one GPU": found, "Predicted / published": summary}
    report("published", tables, json, forms)
