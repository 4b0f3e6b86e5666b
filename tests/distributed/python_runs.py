"""A program with several runs in one process, the same on each rank. Prints the result of each.

Its runs: with the meshes of MESHES in turn, then one that fails, one that Ctrl-C interrupts, and the first again.
"""

import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import titanlite
from titanlite import train
from titanlite.api import TrainedRun
from titanlite.batch import Batch

MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {"parallelism.dp_shard": -1},
    "tp": {"parallelism.tp": 2},
    "pp": {"parallelism.pp": 2},
}


def run(name: str, settings: dict[str, Any]) -> TrainedRun:
    return titanlite.run("config.toml", {"job.dump_folder": name, **settings})


def main() -> None:
    ranks = int(sys.argv[1])
    meshes = MESHES if ranks == 2 else {"fsdp": MESHES["fsdp"], "other": {"model.n_layers": 1, "optimizer.lr": 1.0}}
    for name, settings in meshes.items():
        run(name, settings)
    next_batches, action = train.next_batches, lambda: None

    def in_third_step(part: Any, failure: Any) -> list[Batch]:
        if part.trainer.step == 2:
            action()
        return next_batches(part, failure)

    def fail() -> None:
        raise titanlite.UserError("planted on all ranks")

    train.next_batches = in_third_step
    action = fail
    try:
        run("failed", {})
    except titanlite.UserError as error:
        print(f"error: {error}")
    action = lambda: signal.raise_signal(signal.SIGINT)  # noqa: E731
    stopped = run("stopped", {"checkpoint.enable": True})
    print(f"{stopped.ended} after step {stopped.step}")
    action = lambda: None  # noqa: E731
    again = run("again", meshes["fsdp"])
    resumed = run("stopped", {"checkpoint.enable": True})
    assert resumed.loss == again.loss
    data = [{"kind": "tokens", "path": again.config.data.sources[0].path}]
    found = titanlite.evaluate_run(resumed, overrides={"validation.sources": data}, steps=2)
    assert found.tasks == {}
    print(f"loss {found.loss:.4f} over {found.by_source}; groups: {dist.is_initialized()}")
    Path("done").touch()


if __name__ == "__main__":
    main()
