"""The checks of faults: what they cost in a run without faults.

The model is that of the quick start, with 2,048 tokens per step, replicated over two processes. A round measures a step
and each check `--calls` times, on rank 0. The share of a step is for the default frequency of the check: once per log
line (metrics.log_freq), per faults.check_replicas_every steps, or per phase of a step.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.measuring import CPU, Row, build, case, configuration, in_turns, ratios, report, threads_per_process
from titanlite.assembly.run import build_recorder
from titanlite.data.streams import Origin
from titanlite.faults.record import NotedStep
from titanlite.faults.replicas import Replicas
from titanlite.metrics.meter import Meter, Place, SlowRanks, Work
from titanlite.ranks.launch import run_ranks
from titanlite.ranks.positions import Positions

PHASES_PER_STEP = 4


def measure(
    settings: Sequence[str], folder: str, port: int, rounds: int, count: int, threads: int
) -> dict[str, list[float]]:
    """Seconds per call in each round of `count` calls, by name; "step": a step of training."""
    torch.set_num_threads(threads)
    rank, size = dist.get_rank(), dist.get_world_size()
    config = configuration([*settings, f"job.dump_folder={folder}"], size)
    trainer, (batch,) = build(config)
    group = dist.group.WORLD
    assert group is not None
    slow_ranks = SlowRanks([Place("host", 0)] * size, logs=False)
    meter = Meter(group, CPU, work=lambda _: Work(2048, 0.0), peak_flops=None, slow_ranks=slow_ranks)
    recorder = build_recorder(config, trainer.mesh, trainer, [0], group, {})
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    positions = Positions(store, rank, size, range(size), None, 100.0, lambda: None)
    origins = np.zeros((len(batch.tokens), len(Origin._fields)), np.int64)
    stats = trainer.train_step([batch])

    def log_line() -> None:
        meter.update(trainer.step, stats, lr=0.0, data_wait_s=0.0, bad_rows=0, compute_s=1.0)
        meter.flush()

    noted = NotedStep(trainer.step, stats, 0, range(rank, 8, size), origins)
    calls: dict[str, Callable[[], object]] = {
        "step": partial(trainer.train_step, [batch]),
        "log line, with slow ranks": log_line,
        "record of steps": lambda: recorder.write([noted] * config.metrics.log_freq),
        "replicas": lambda: Replicas(trainer.model_parts, trainer.optimizer, trainer.mesh, 1).compare(trainer.step),
        "phase": lambda: positions.enter(trainer.step, "logging"),
    }
    found = in_turns(calls, rounds, count, lambda: None, lambda _side: dist.barrier())
    return {name: [elapsed for elapsed, _ in times] for name, times in found.items()}


def main(rounds: int = 5, calls: int = 5, json: Path | None = None) -> None:
    """json: folder of faults.json."""
    server = dist.TCPStore("127.0.0.1", 0, None, True)  # chooses a free port
    port = server.port
    del server
    ranks, settings = case("dp_replicate")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (settings, folder, port, rounds, calls, threads_per_process(ranks))
        seconds = run_ranks(measure, ranks, *arguments)[0]
    config = configuration([], 1)
    per_step = {
        "log line, with slow ranks": 1 / config.metrics.log_freq,
        "record of steps": 1 / config.metrics.log_freq,
        "replicas": 1 / config.faults.check_replicas_every,
        "phase": PHASES_PER_STEP,
    }
    rows: list[Row] = []
    for name, values in seconds.items():
        row: Row = {"check": name, "ms per call": [1000 * value for value in values]}
        if name in per_step:
            shares = ratios([value * per_step[name] for value in values], seconds["step"])
            row = {**row, "share of a step": shares}
        rows.append(row)
    report("faults", {"Checks of faults": rows}, json, {"share of a step": ".3%"})
