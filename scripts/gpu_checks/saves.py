"""Check 5: asynchronous checkpoints: resume to the same bits, and the time that a save blocks training."""

import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpu_checks.processes import Call, Send, run_calls
from gpu_checks.rows import Emit, Found, Row, Value, WrongError, run_case
from gpu_checks.workload import Setup, dtypes, small_model
from titanlite.checkpoint.config import AsyncMode
from titanlite.train import main as train

CHECK = "5 checkpoints"
LIMIT_S = 150.0
MODES: tuple[AsyncMode, ...] = ("async", "async_with_pinned_mem")


def check(emit: Emit, setup: Setup, mode: AsyncMode) -> None:
    name = f"save and resume, {mode}"
    if mode == "async_with_pinned_mem" and setup.device_type == "cpu":
        emit(Row(CHECK, name, "skipped", "page-locked memory only speeds up copies from a device"))
    else:
        emit(run_case(CHECK, name, partial(save_and_resume, setup, mode)))


def save_and_resume(setup: Setup, mode: AsyncMode) -> Found:
    """Train with three saves; resume from the second one, and compare the checkpoints at the end."""
    folder = Path(setup.folder, mode)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        return _save_and_resume(setup, mode, folder)
    finally:
        shutil.rmtree(folder)


def _save_and_resume(setup: Setup, mode: AsyncMode, folder: Path) -> Found:
    settings, interval = training_settings(setup, mode, folder)
    rows, files = run_training(setup, settings, folder / "run", folder / "run.log")
    resumed = folder / "resumed"
    others = shutil.ignore_patterns(f"step-{interval}", f"step-{3 * interval}", "metrics.jsonl")
    shutil.copytree(folder / "run", resumed, ignore=others)
    again, repeated = run_training(setup, settings, resumed, folder / "resumed.log")
    if not again or again[0]["step"] != 2 * interval + 1:
        raise WrongError(f"resumed at step {again[0]['step'] if again else '-'}, not at {2 * interval + 1}")
    for row, expected in zip(again, rows[2 * interval :], strict=True):
        for key in ("loss", "grad_norm"):
            if row[key] != expected[key]:
                raise WrongError(f"{key} of step {row['step']} after the resume: {row[key]}, before: {expected[key]}")
    if files != repeated:
        raise WrongError(f"the last checkpoints differ: {files} and {repeated}")
    size = sum(record["bytes"] for record in files.values()) / 2**30
    seconds = [row["step_time_s"] for row in rows]
    saves = [interval, 2 * interval]  # the step after a save includes the time that the save blocked
    usual = statistics.median(time for index, time in enumerate(seconds) if index not in (0, *saves))
    blocked = [max(0.0, seconds[index] - usual) for index in saves]
    values: dict[str, Value] = {
        "GiB": size,
        "step s": usual,
        "first blocked s": blocked[0],
        "second blocked s": blocked[1],
    }
    text = (
        f"bit-identical; {size:.2f} GiB, blocked for {blocked[0]:.3f} s, then {blocked[1]:.3f} s (step {usual:.3f} s)"
    )
    return Found(text, values)


def training_settings(setup: Setup, mode: AsyncMode, folder: Path) -> tuple[list[str], int]:
    """Settings of a deterministic run of three saves, and the steps between two saves."""
    interval, batch = (2, 2) if setup.tiny else (20, 4)
    sizes = {"dim": 1024, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 4096, "vocab_size": 32_000}
    model = small_model(setup, "llama3")
    if not setup.tiny:
        model = [*(f"model.{key}={value}" for key, value in sizes.items()), "training.seq_len=1024"]
    tokens = np.random.default_rng(0).integers(131, size=2**20, dtype=np.uint16)
    np.save(folder / "tokens.npy", tokens)
    (folder / "run.toml").write_text(f'[[data.sources]]\nkind = "tokens"\npath = "{folder / "tokens.npy"}"\n')
    settings = [
        *model,
        *dtypes("bfloat16"),
        f"job.config_file={folder / 'run.toml'}",
        f"training.steps={3 * interval}",
        f"training.local_batch_size={batch}",
        f"training.global_batch_size={batch}",
        "checkpoint.enable=true",
        f"checkpoint.interval={interval}",
        f"checkpoint.async_mode={mode}",
        "metrics.log_freq=1",
        "debug.deterministic=true",
    ]
    return settings, interval


def run_training(
    setup: Setup, settings: Sequence[str], dump_folder: Path, log_file: Path
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Run titanlite.train in a process; returns the rows of its metrics, and size and hash of each file it saved last.

    Raises WrongError with the end of its output if it fails.
    """
    arguments = [f"--{setting}" for setting in (*settings, f"job.dump_folder={dump_folder}")]
    call = Call(train_in_process, (arguments, str(log_file)))
    (outcome,) = run_calls([call], setup.device_type, LIMIT_S)
    if outcome.failure is not None:
        end = log_file.read_text(errors="replace").strip().splitlines()[-3:] if log_file.exists() else []
        raise WrongError(f"the run failed: {outcome.failure.strip().splitlines()[-1]}: {' | '.join(end)}")
    rows = [json.loads(line) for line in (dump_folder / "metrics.jsonl").read_text().splitlines()]
    last = max((dump_folder / "checkpoint").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    files: dict[str, dict[str, Any]] = json.loads((last / "MANIFEST.json").read_text())["files"]
    return [row for row in rows if "grad_norm" in row], files


def train_in_process(_send: Send, arguments: Sequence[str], log_file: str) -> None:
    """The command titanlite train, with its output in a file."""
    with open(log_file, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["titanlite", *arguments]
    train()
