"""The predicted time of a step against the measured one, by layout, with a hardware profile of this machine.

Measures the profile (or takes --hardware), then two models on random tokens, in rounds: each layout, and the one that
the search chooses for each number of ranks. The fastest round counts: other programs only make steps slower. Processes
share the cores as those of run_train.sh do.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measuring import Row, configuration, report, threads_per_process
from benchmarks.memory import measure
from titanlite.config.value_types import literal
from titanlite.planning.estimate import estimate
from titanlite.planning.hardware.machine import Profile, load_profile
from titanlite.planning.search import search
from titanlite.planning.step_time import predict
from titanlite.ranks.launch import fork_context, run_ranks

MODELS = {
    "small": ("model.vocab_size=4096", "training.seq_len=256", "training.global_batch_size=8"),
    "wide": (
        *("model.dim=512", "model.n_layers=4", "model.n_heads=8", "model.n_kv_heads=4", "model.ffn_dim=1536"),
        *("model.vocab_size=8192", "training.seq_len=512", "training.global_batch_size=4"),
    ),
}
LAYOUTS: Mapping[str, tuple[int, str]] = {
    "1 rank": (1, "local_batch_size=1"),
    "1 rank, all rows": (1, "local_batch_size=4"),
    "1 rank, recompute": (1, "local_batch_size=4 mode=full"),
    "shard 2": (2, "dp_shard=2 local_batch_size=1"),
    "replicate 2": (2, "dp_replicate=2 dp_shard=1 local_batch_size=2"),
    "tp 2": (2, "tp=2 local_batch_size=2"),
    "cp 2": (2, "cp=2 local_batch_size=2"),
    "pp 2": (2, "pp=2 pp_schedule=1F1B local_batch_size=8"),
    "pp 2, interleaved": (2, "pp=2 pp_schedule=Interleaved1F1B local_batch_size=8"),
    "shard 4": (4, "dp_shard=4 local_batch_size=1"),
    "replicate 2 x shard 2": (4, "dp_replicate=2 dp_shard=2 local_batch_size=1"),
    "shard 2 x tp 2": (4, "dp_shard=2 tp=2 local_batch_size=2"),
    "pp 2 x shard 2": (4, "pp=2 dp_shard=2 pp_schedule=1F1B local_batch_size=4"),
    "pp 2 x tp 2": (4, "pp=2 tp=2 pp_schedule=1F1B local_batch_size=4"),
    "tp 4": (4, "tp=4 model.n_kv_heads=4 local_batch_size=2"),
    "pp 4": (4, "pp=4 pp_schedule=GPipe local_batch_size=8"),
}
"""Number of ranks, and settings by the last part of their keys."""
SECTIONS = {"local_batch_size": "training", "mode": "activation_checkpoint"}
CHOSEN = "chosen for "


def settings_of(model: str, layout: str) -> list[str]:
    words = [
        word if "." in word else f"{SECTIONS.get(word.split('=')[0], 'parallelism')}.{word}" for word in layout.split()
    ]
    return [*MODELS[model], *words]


def chosen_settings(model: str, ranks: int, profile: Profile) -> list[str]:
    """The settings of the layout that the search chooses."""
    config = configuration([*MODELS[model], "training.local_batch_size=1"], ranks)
    best = search(config, ranks, profile, memory_gib=profile.memory_gib, count=1).fastest[0]
    found = [f"{key}={literal(value)}".replace('"', "") for key, value in best.settings.items()]
    return [*MODELS[model], *found]


def measured_seconds(settings: Sequence[str], ranks: int, steps: int) -> float:
    """Seconds of a step."""
    speeds = run_ranks(measure, ranks, settings, steps, threads_per_process(ranks), "cpu", timeout_s=3600)
    config = configuration(settings, ranks)
    fastest: float = max(speed for speed, _ in speeds)
    return config.training.global_batch_size * config.training.seq_len / fastest


def predicted_seconds(settings: Sequence[str], ranks: int, profile: Profile) -> float:
    config = configuration(settings, ranks)
    return predict(config, estimate(config, ranks, device_type="cpu"), profile).total


def measured_profile() -> Profile:
    """The profile of 4 processes of this machine, by `titanlite calibrate`."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/profile.toml"
        calibrate = [sys.executable, "-m", "titanlite", "calibrate", "--processes", "4", "--out", out]
        subprocess.run(calibrate, check=True, stdout=subprocess.DEVNULL)
        return load_profile(out)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks."""
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(*ranks)


def main(
    models: tuple[str, ...] = tuple(MODELS),
    hardware: str | None = None,
    rounds: int = 3,
    steps: int = 3,
    json: Path | None = None,
) -> None:
    """hardware: a profile of this machine; by default, one is measured. json: folder of prediction.json."""
    fork_context()
    profile = load_profile(hardware) if hardware else measured_profile()
    rows: list[Row] = []
    summary: list[Row] = []
    for model in models:
        cases = {name: (ranks, settings_of(model, layout)) for name, (ranks, layout) in LAYOUTS.items()}
        for ranks in (1, 2, 4):
            cases[f"{CHOSEN}{ranks}"] = ranks, chosen_settings(model, ranks, profile)
        measured: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, (ranks, settings) in cases.items():
                measured[name].append(measured_seconds(settings, ranks, steps))
                print(f"{model}, {name}: {measured[name][-1]:.3f} s", file=sys.stderr)
        predicted = {name: predicted_seconds(settings, ranks, profile) for name, (ranks, settings) in cases.items()}
        fastest = {name: min(values) for name, values in measured.items()}
        for name, values in measured.items():
            error = predicted[name] / fastest[name] - 1
            rows.append(
                {
                    "model": model,
                    "layout": name,
                    "measured (s)": values,
                    "predicted (s)": predicted[name],
                    "error": error,
                }
            )
        given = list(LAYOUTS)
        line: dict[str, str | float] = {
            "model": model,
            "layouts": len(given),
            "rank correlation": rank_correlation(
                [predicted[name] for name in given], [fastest[name] for name in given]
            ),
            "median error": statistics.median(abs(predicted[name] / fastest[name] - 1) for name in given),
        }
        for ranks in (1, 2, 4):
            best = min(fastest[name] for name, (count, _) in cases.items() if count == ranks)
            line[f"{CHOSEN}{ranks} / best"] = fastest[f"{CHOSEN}{ranks}"] / best
        summary.append(line)
    report("prediction", {"Time of a step": rows, "Summary": summary}, json, {"error": "+.0%", "median error": ".0%"})
