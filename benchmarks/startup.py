"""The start: from the command to the first step, and what its parts take.

A round runs each case once, for each checkout of titanlite in turn: imports; torchrun with two processes that run an
empty script; a training of one step, of a model of 0.1 M parameters on the CPU, on one process and with run_train.sh
on one and two. The CPU time is that of all processes of the command; the time ends when the first step is logged, or
with a command without steps. "CPU / first" is the CPU time over that of the first checkout in the same round.
"""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.measuring import Row, ratios, report

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = """\
[model]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
vocab_size = 1024
[training]
steps = 1
seq_len = 32
local_batch_size = 2
global_batch_size = 4
[[data.sources]]
kind = "tokens"
path = "tokens.npy"
"""
IMPORT = (sys.executable, "-c")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CASES: dict[str, tuple[str | Path, ...]] = {
    "import torch": (*IMPORT, "import torch"),
    "import titanlite.train": (*IMPORT, "import titanlite.train"),
    "torchrun, empty script, 2 processes": (*TORCHRUN, "empty.py"),
    "titanlite train, 1 process": (sys.executable, "-m", "titanlite", "train", "config.toml"),
    "run_train.sh, 1 process": ("run_train.sh", "config.toml"),
    "run_train.sh, 2 processes": ("run_train.sh", "config.toml"),
}


def measure(command: tuple[str | Path, ...], processes: int, checkout: Path, folder: Path) -> dict[str, float]:
    """Run the command of a checkout in `folder`; return its CPU time and its time to the first step, in seconds."""
    program = checkout / command[0] if command[0] == "run_train.sh" else command[0]
    settings = {"PYTHON": sys.executable, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "DEVICE": "cpu"}
    environment = os.environ | settings | {"NGPU": str(processes), "CUDA_VISIBLE_DEVICES": ""}
    before, start, first_step = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter(), 0.0
    process = subprocess.Popen(
        [program, *command[1:]],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if " 1/1 " in line:
            first_step = perf_counter() - start
    if process.wait() != 0:
        raise SystemExit(f"{program} of {checkout} failed:\n{output}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu, "wall_s": first_step or perf_counter() - start}


def main(rounds: int = 5, checkouts: tuple[Path, ...] = (REPOSITORY,), json: Path | None = None) -> None:
    """checkouts: of titanlite, to compare. json: folder of startup.json."""
    places = {str(checkout): checkout.resolve() for checkout in checkouts}
    results: dict[tuple[str, str], list[dict[str, float]]] = {(case, name): [] for case in CASES for name in places}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "config.toml").write_text(CONFIG)
        (folder / "empty.py").write_text("")
        np.save(folder / "tokens.npy", np.random.default_rng(0).integers(1024, size=4096, dtype=np.uint16))
        for round_ in range(rounds + 1):
            for case, name in results:
                found = measure(CASES[case], 2 if case.endswith("2 processes") else 1, places[name], folder)
                if round_ > 0:  # the first round compiles and caches files
                    results[case, name].append(found)
    rows: list[Row] = []
    for (case, name), found_ in results.items():
        cpu, time = ([each[key] for each in found_] for key in ("cpu_s", "wall_s"))
        first = [each["cpu_s"] for each in results[case, next(iter(places))]]
        row: Row = {
            "command": case,
            "checkout": name,
            "CPU (s)": cpu,
            "time (s)": time,
            "CPU / first": ratios(cpu, first),
        }
        rows.append(row)
    report("startup", {"Start": rows}, json)
