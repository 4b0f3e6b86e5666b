"""Training program with a slow operation. Prints a line before the operation and at the end of training.

SLOW selects the operation. first_step: the first step of this start. data: the data of the third step, on rank 1.
save: every write of tensors. SLOW_S is its duration in seconds.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from titanlite import train
from titanlite.assembly.run import Run
from titanlite.batch import Batch, StepStats
from titanlite.checkpoint import saver
from titanlite.checkpoint.manifest import FileRecord
from titanlite.config.schema import JobConfig
from titanlite.data.loader import Loader
from titanlite.metrics.records import Record
from titanlite.runtime.failure import FailureReport, end_process
from titanlite.trainer import Trainer

RANK = int(os.environ.get("RANK", "0"))
SLOW_S = float(os.environ["SLOW_S"])
original_train, next_step, train_step, save_tensors = (
    train.train,
    Loader.next_step,
    Trainer.train_step,
    saver.save_tensors,
)


def print_line(text: str) -> None:
    """Write a line atomically, so that lines of several ranks do not mix."""
    os.write(1, f"{text}\n".encode())


def slow(operation: str) -> None:
    print_line(f"slow {operation} on rank {RANK}")
    time.sleep(SLOW_S)


def counted() -> Callable[[], int]:
    calls = iter(range(1, 10**6))
    return lambda: next(calls)


count_steps, count_data = counted(), counted()


def slow_first_step(self: Trainer, batches: Sequence[Batch]) -> StepStats:
    if count_steps() == 1:
        slow("step")
    return train_step(self, batches)


def slow_third_data(self: Loader) -> list[Batch]:
    if count_data() == 3 and RANK == 1:
        slow("data")
    return next_step(self)


def slow_save(
    folder: Path, tensors: Mapping[str, Tensor], local: Mapping[str, Tensor], group: dist.ProcessGroup
) -> dict[str, FileRecord]:
    slow("save")
    return save_tensors(folder, tensors, local, group)


def train_and_report(config: JobConfig, run: Run, failure: FailureReport) -> Record | None:
    record = original_train(config, run, failure)
    print_line(f"rank {RANK} ended after step {run.trainer.step}")
    return record


def plant(slow_part: str) -> None:
    parts: dict[str, tuple[Any, str, Any]] = {
        "first_step": (Trainer, "train_step", slow_first_step),
        "data": (Loader, "next_step", slow_third_data),
        "save": (saver, "save_tensors", slow_save),
    }
    setattr(*parts[slow_part])
    train.train = train_and_report


if __name__ == "__main__":
    plant(os.environ["SLOW"])
    train.main()
    end_process(0)
