"""Benchmark of what the checks of faults cost in a run without faults.

    python benchmarks/faults.py [--processes 2] [--rounds 5] [--steps 4]

The model is that of the quick start, with 2,048 tokens per step, replicated over the processes. A round measures steps,
and each check several times, on rank 0. The table shows milliseconds per call (median over rounds, minimum, maximum),
and the share of a step with the default frequency of the check: once per log line (metrics.log_freq), per
faults.check_replicas_every steps, or per phase of a step.
"""

import tempfile
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
import tyro
from measuring import spread, threads_per_process

from titanlite.assembly.model import build_model, build_trainer
from titanlite.assembly.run import build_recorder
from titanlite.batch import Batch
from titanlite.config.load import load_config
from titanlite.data.streams import Origin
from titanlite.faults.record import NotedStep
from titanlite.faults.replicas import Replicas
from titanlite.metrics.meter import Meter
from titanlite.metrics.slow_ranks import Place, SlowRanks
from titanlite.parallel.mesh import Mesh
from titanlite.runtime.distributed import World
from titanlite.runtime.launch import run_ranks
from titanlite.runtime.positions import Positions

CPU = torch.device("cpu")
PHASES_PER_STEP = 4
CALLS = 5


def measure(folder: str, port: int, rounds: int, steps: int, threads: int) -> dict[str, list[float]]:
    """Seconds per call in each round, by name; "step": a step of training."""
    torch.set_num_threads(threads)
    rank, size = dist.get_rank(), dist.get_world_size()
    keys = ["--model.vocab_size=4096", "--training.seq_len=256", "--training.global_batch_size=8"]
    keys += [f"--parallelism.dp_replicate={size}", "--parallelism.dp_shard=1", f"--job.dump_folder={folder}"]
    config = load_config([*keys, f"--training.local_batch_size={8 // size}"], world_size=size, device_type="cpu")
    mesh = Mesh(config.parallelism, World(rank, rank, size, "cpu"))
    mesh.connect(config.comm)
    trainer = build_trainer(config, build_model(config, mesh, CPU), mesh, CPU)
    group = dist.group.WORLD
    assert group is not None
    slow_ranks = SlowRanks([Place("host", 0)] * size, group)
    meter = Meter(group, CPU, tokens_per_step=2048, flops_per_token=0.0, peak_flops=None, slow_ranks=slow_ranks)
    recorder = build_recorder(config, mesh, trainer, [0], group, {})
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    positions = Positions(store, rank, size, range(size), None, 100.0, lambda: None)
    rows = config.training.local_batch_size
    tokens, labels = torch.randint(4096, (2, rows, 256), generator=torch.Generator().manual_seed(rank))
    batch = Batch(tokens, labels, torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    origins = np.zeros((rows, len(Origin._fields)), np.int64)
    stats = trainer.train_step([batch])

    def log_line() -> None:
        meter.update(trainer.step, stats, lr=0.0, data_wait_s=0.0, bad_rows=0, compute_s=1.0)
        meter.flush()

    noted = NotedStep(trainer.step, stats, range(rank, 8, size), origins)
    calls: dict[str, Callable[[], object]] = {
        "log line, with slow ranks": log_line,
        "record of steps": lambda: recorder.write([noted] * config.metrics.log_freq),
        "replicas": lambda: Replicas(trainer.model_parts, trainer.optimizer, mesh, 1).compare(trainer.step),
        "phase": lambda: positions.enter(trainer.step, "logging"),
    }
    seconds: dict[str, list[float]] = {"step": [], **{name: [] for name in calls}}
    for _ in range(rounds):
        begin = perf_counter()
        for _ in range(steps):
            stats = trainer.train_step([batch])
        seconds["step"].append((perf_counter() - begin) / steps)
        for name, call in calls.items():
            dist.barrier()
            begin = perf_counter()
            for _ in range(CALLS):
                call()
            seconds[name].append((perf_counter() - begin) / CALLS)
    return seconds


def main(processes: int = 2, rounds: int = 5, steps: int = 4) -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True)  # chooses a free port
    port = server.port
    del server
    with tempfile.TemporaryDirectory() as folder:
        seconds = run_ranks(measure, processes, folder, port, rounds, steps, threads_per_process(processes))[0]
    config = load_config([], world_size=1, device_type="cpu")
    per_step = {
        "log line, with slow ranks": 1 / config.metrics.log_freq,
        "record of steps": 1 / config.metrics.log_freq,
        "replicas": 1 / config.faults.check_replicas_every,
        "phase": PHASES_PER_STEP,
    }
    for name, values in seconds.items():
        shares = [value * per_step.get(name, 0) / step for value, step in zip(values, seconds["step"], strict=True)]
        share = f"{spread(shares, '.3%')} of a step" if name in per_step else ""
        print(f"{name:<26} ms {spread([1000 * value for value in values], '.3f'):<32}{share}".rstrip())


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
