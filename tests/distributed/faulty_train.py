"""Training program with a fault on rank FAULTY_RANK. FAULT is one of:

step: a programming error in the third step.
stage: a programming error in the third step's forward pass.
data: data preparation never ends (as in a long index build), while the other ranks wait in a collective.
late: a data error is raised 2 s after those of other ranks.
kill: the rank is killed in the third step.
hang, hang-data: the rank hangs in the third step, or while it waits for that step's data.
gradient: in the fourth step, a gradient of the rank is too large by 0.1 %, as after a fault of the hardware.
stop-save: the rank is stopped (SIGSTOP) while it saves the third step.
stop: the rank is stopped in the third step.
kill-start: the rank is killed before the model is built, while the others wait for its need of memory.
hang-start: the rank hangs before the model is built, while the others wait for its need of memory.
hang-save: the rank hangs while it saves the third step.
hang-end: the rank hangs after all work is done.
slow: the rank sleeps for a while in each step.
held: the rank sleeps for longer in each step, until the file "go" is in its folder.
arguments: the rank is started with further arguments, those in ARGUMENTS, as on a node with another configuration.
evaluate: the ranks are nodes of their own that evaluate a run, with further arguments each: those in ARGUMENTS, after
    the rank's "|".
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from tests.distributed.reference import GLOBAL_BATCH
from titanlite import train
from titanlite import trainer as trainer_module
from titanlite.assembly import run as build_module
from titanlite.batch import Batch, StepStats
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.saver import Saver
from titanlite.data.loader import Loader
from titanlite.parallel.clip import GradNorm, clip_grad_norm_
from titanlite.runtime.dtensors import local_part
from titanlite.runtime.errors import UserError
from titanlite.runtime.failure import end_process
from titanlite.tools import evaluate
from titanlite.trainer import Trainer

WRONG_GRADIENT = "layers.1.attention.wo.weight"

train_step = Trainer.train_step
next_step = Loader.next_step
write = Saver._write


def faulty_train_step(self: Trainer, batches: Sequence[Batch]) -> StepStats:
    if self.step == 2:
        raise ValueError("planted")
    return train_step(self, batches)


def killed_train_step(self: Trainer, batches: Sequence[Batch]) -> StepStats:
    if self.step == 2:
        time.sleep(1)  # the positions of this step are known
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(self, batches)


def stopped_train_step(self: Trainer, batches: Sequence[Batch]) -> StepStats:
    if self.step == 2:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGSTOP)
    return train_step(self, batches)


def hanging_train_step(self: Trainer, batches: Sequence[Batch]) -> StepStats:
    if self.step == 2:
        time.sleep(1000)
    return train_step(self, batches)


def step_with_wrong_gradient(self: Trainer, batches: Sequence[Batch]) -> StepStats:
    def clip(parts: Sequence[nn.Module], *arguments: Any) -> GradNorm:
        gradient = parts[0].get_parameter(WRONG_GRADIENT).grad
        assert gradient is not None
        local_part(gradient).mul_(1.001)
        return clip_grad_norm_(parts, *arguments)

    trainer_module.clip_grad_norm_ = clip if self.step == 3 else clip_grad_norm_
    return train_step(self, batches)


def hanging_next_step(self: Loader) -> list[Batch]:
    if getattr(self, "first_sequence", -1) == GLOBAL_BATCH:
        time.sleep(1000)
    return next_step(self)


def stopped_write(self: Saver, draft: Manifest, *args: Any) -> None:
    if draft.step == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    write(self, draft, *args)


def hanging_write(self: Saver, draft: Manifest, *args: Any) -> None:
    if draft.step == 3:
        time.sleep(1000)
    write(self, draft, *args)


def hang(*args: Any) -> Any:
    del args
    time.sleep(1000)


def kill(*args: Any) -> Any:
    del args
    os.kill(os.getpid(), signal.SIGKILL)


def held_train_step(self: Trainer, batches: Sequence[Batch]) -> StepStats:
    if not Path("go").exists():
        time.sleep(0.8)
    return train_step(self, batches)


def slow_train_step(self: Trainer, batches: Sequence[Batch]) -> StepStats:
    time.sleep(0.15)
    return train_step(self, batches)


def fail(*args: Any) -> None:
    del args
    raise ValueError("planted in a stage")


def step_with_faulty_forward(self: Trainer, batches: Sequence[Batch]) -> StepStats:
    if self.step == 2:
        self.model_parts[0].register_forward_pre_hook(fail)
    return train_step(self, batches)


def endless_build(*args: Any) -> Loader:
    del args
    print("building data", flush=True)
    time.sleep(1000)
    raise AssertionError


def late_next_step(self: Loader) -> list[Batch]:
    try:
        return next_step(self)
    except UserError:
        time.sleep(2)
        raise


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "step": (Trainer, "train_step", faulty_train_step),
    "stage": (Trainer, "train_step", step_with_faulty_forward),
    "data": (build_module, "build_data", endless_build),
    "late": (Loader, "next_step", late_next_step),
    "kill": (Trainer, "train_step", killed_train_step),
    "hang": (Trainer, "train_step", hanging_train_step),
    "hang-data": (Loader, "next_step", hanging_next_step),
    "gradient": (Trainer, "train_step", step_with_wrong_gradient),
    "stop-save": (Saver, "_write", stopped_write),
    "stop": (Trainer, "train_step", stopped_train_step),
    "kill-start": (build_module, "build_parts", kill),
    "hang-start": (build_module, "build_parts", hang),
    "hang-save": (Saver, "_write", hanging_write),
    "hang-end": (train.dist, "destroy_process_group", hang),
    "slow": (Trainer, "train_step", slow_train_step),
    "held": (Trainer, "train_step", held_train_step),
}
"""FAULT -> the object, its attribute, and what replaces it."""


if __name__ == "__main__":
    if os.environ["FAULT"] == "evaluate":
        arguments = os.environ["ARGUMENTS"].split("|")[int(os.environ["RANK"]) + 1]
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        evaluate.main([*sys.argv[1:], *arguments.split()])
        sys.exit()
    if os.environ["RANK"] == os.environ["FAULTY_RANK"]:
        if os.environ["FAULT"] == "arguments":
            sys.argv += os.environ["ARGUMENTS"].split()
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # a node of its own
        else:
            setattr(*PLANTED[os.environ["FAULT"]])
    train.main()
    end_process(0)
