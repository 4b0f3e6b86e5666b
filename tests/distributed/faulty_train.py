"""Training program with a fault on rank FAULTY_RANK ("all": on each rank). FAULT is one of:

step: a programming error in the third step.
data: data preparation never ends (as in a long index build), while the other ranks wait in a collective.
late: a data error is raised 2 s after those of other ranks.
kill: the rank is killed in the third step.
hang, hang-data: the rank hangs in the third step, or while it waits for that step's data.
lock: the rank holds Python's lock in a call of C in the third step, as a launch may that waits for the device.
launch: rank HANGING_RANK hangs in the third step, and the others hold Python's lock, as in launches that wait for it.
gradient: in the fourth step, a gradient of the rank is too large by 0.1 %, as after a fault of the hardware.
stop-save: the rank is stopped (SIGSTOP) while it saves the third step.
stop: the rank is stopped in the third step.
kill-start: the rank is killed before the model is built, while the others wait for its need of memory.
hang-start: the rank hangs before the model is built, while the others wait for its need of memory.
hang-save: the rank hangs while it saves the third step.
hang-end: the rank hangs after all work is done.
slow: the rank sleeps for a while in each step.
slow-step, slow-data, slow-save: the rank prints a line and sleeps for SLOW_S seconds in the first step of this start,
    before the data of the third, and before each write of tensors.
held: the rank sleeps for longer in each step, until the file "go" is in its folder.
orders: each step takes 0.3 s longer, and the last rank obeys an order in the file ORDER_FILE of its folder, once.
    nan: the loss of the next step is not finite. flip: after the next step, a bit of the optimizer's state, which all
    data ranks hold, has flipped.
arguments: the rank is started with further arguments, those in ARGUMENTS, as on a node with another configuration.
evaluate: the ranks are nodes of their own that evaluate a run, with further arguments each: those in ARGUMENTS, after
    the rank's "|".

Each rank prints a line when its training ends.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.distributed.reference import GLOBAL_BATCH
from titanlite import train
from titanlite import trainer as trainer_module
from titanlite.assembly import run as build_module
from titanlite.assembly.run import Run
from titanlite.batch import Batch, StepStats
from titanlite.checkpoint import saver
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.saver import Saver
from titanlite.config.schema import JobConfig
from titanlite.data.loader import Loader
from titanlite.metrics.records import Record
from titanlite.models.head import OutputLayer
from titanlite.parallel.clip import GradNorm, clip_grad_norm_
from titanlite.ranks.failure import FailureReport, end_process
from titanlite.runtime.errors import UserError
from titanlite.runtime.torch_internals import local_part
from titanlite.tools import evaluate
from titanlite.trainer import Trainer

ORDER_FILE = "order"
WRONG_GRADIENT = "layers.1.attention.wo.weight"
SLOW_S = 2.0

original_train = train.train
train_step = Trainer.train_step
next_step = Loader.next_step
write = Saver._write


def print_line(text: str) -> None:
    """Write a line atomically, so that lines of several ranks do not mix."""
    os.write(1, f"{text}\n".encode())


def fail(*_: Any) -> Any:
    raise ValueError("planted")


def hang(*_: Any) -> Any:
    time.sleep(1000)
    raise AssertionError


def hold_lock() -> None:
    time.sleep(1)  # the positions of this step are known then
    ctypes.PyDLL(None).sleep(1000)


def hang_or_hold_lock() -> None:
    if os.environ["RANK"] == os.environ["HANGING_RANK"]:
        hang()
    hold_lock()


def end(number: signal.Signals, after_s: float, *_: Any) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), number)


kill, stop = partial(end, signal.SIGKILL), partial(end, signal.SIGSTOP)


def slow(operation: str) -> None:
    print_line(f"slow {operation} on rank {os.environ['RANK']}")
    time.sleep(SLOW_S)


def before_step(number: int, act: Callable[[], Any]) -> Callable[[Trainer, Sequence[Batch]], StepStats]:
    """`train_step` that calls `act` before this step, or before each step if it is 0."""

    def faulty_train_step(self: Trainer, batches: Sequence[Batch]) -> StepStats:
        if number in (0, self.step + 1):
            act()
        return train_step(self, batches)

    return faulty_train_step


def before_third_write(act: Callable[[], Any]) -> Callable[..., None]:
    def faulty_write(self: Saver, draft: Manifest, *args: Any) -> None:
        if draft.step == 3:
            act()
        write(self, draft, *args)

    return faulty_write


def before_call(number: int, function: Callable[..., Any], act: Callable[[], Any]) -> Callable[..., Any]:
    """`function` that calls `act` before this call, or before each call if it is 0."""
    calls = count(1)

    def faulty(*args: Any, **options: Any) -> Any:
        if number in (0, next(calls)):
            act()
        return function(*args, **options)

    return faulty


def step_with_wrong_gradient(self: Trainer, batches: Sequence[Batch]) -> StepStats:
    def clip(parts: Sequence[nn.Module], *arguments: Any) -> GradNorm:
        gradient = parts[0].get_parameter(WRONG_GRADIENT).grad
        assert gradient is not None
        local_part(gradient).mul_(1.001)
        return clip_grad_norm_(parts, *arguments)

    trainer_module.clip_grad_norm_ = clip if self.step == 3 else clip_grad_norm_
    return train_step(self, batches)


def obedient_train_step(self: Trainer, batches: Sequence[Batch]) -> StepStats:
    time.sleep(0.3)
    order = ""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 and Path(ORDER_FILE).exists():
        order = Path(ORDER_FILE).read_text()
        Path(ORDER_FILE).unlink()
    heads = [module for part in self.model_parts for module in part.modules() if isinstance(module, OutputLayer)]
    with ExitStack() as hooks:
        for head in heads if order == "nan" else ():
            hook = head.register_forward_hook(lambda *arguments: arguments[-1] * float("nan"))
            hooks.callback(hook.remove)
        stats = train_step(self, batches)
    if order == "flip":
        count = next(local_part(tensor) for name, tensor in self.optimizer.named_state() if name.endswith("/step"))
        count.view(torch.int32).bitwise_xor_(1)
    return stats


def hanging_next_step(self: Loader) -> list[Batch]:
    if getattr(self, "first_sequence", -1) == GLOBAL_BATCH:
        hang()
    return next_step(self)


def late_next_step(self: Loader) -> list[Batch]:
    try:
        return next_step(self)
    except UserError:
        time.sleep(2)
        raise


def endless_build(*_: Any) -> Loader:
    print_line("building data")
    return hang()  # type: ignore[no-any-return]


def hold() -> None:
    if not Path("go").exists():
        time.sleep(0.8)


def train_and_report(config: JobConfig, run: Run, failure: FailureReport) -> Record | None:
    record = original_train(config, run, failure)
    print_line(f"rank {os.environ['RANK']} ended after step {run.trainer.step}")
    return record


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "step": (Trainer, "train_step", before_step(3, fail)),
    "data": (build_module, "build_data", endless_build),
    "late": (Loader, "next_step", late_next_step),
    "kill": (Trainer, "train_step", before_step(3, partial(kill, 1))),  # the positions of this step are known then
    "hang": (Trainer, "train_step", before_step(3, hang)),
    "lock": (Trainer, "train_step", before_step(3, hold_lock)),
    "launch": (Trainer, "train_step", before_step(3, hang_or_hold_lock)),
    "hang-data": (Loader, "next_step", hanging_next_step),
    "gradient": (Trainer, "train_step", step_with_wrong_gradient),
    "stop-save": (Saver, "_write", before_third_write(partial(stop, 0))),
    "stop": (Trainer, "train_step", before_step(3, partial(stop, 1))),
    "kill-start": (build_module, "build_parts", partial(kill, 0)),
    "hang-start": (build_module, "build_parts", hang),
    "hang-save": (Saver, "_write", before_third_write(hang)),
    "hang-end": (train.dist, "destroy_process_group", hang),
    "slow": (Trainer, "train_step", before_step(0, partial(time.sleep, 0.15))),
    "slow-step": (Trainer, "train_step", before_call(1, train_step, partial(slow, "step"))),
    "slow-data": (Loader, "next_step", before_call(3, next_step, partial(slow, "data"))),
    "slow-save": (saver, "save_tensors", before_call(0, saver.save_tensors, partial(slow, "save"))),
    "orders": (Trainer, "train_step", obedient_train_step),
    "held": (Trainer, "train_step", before_step(0, hold)),
}
"""FAULT -> the object, its attribute, and what replaces it."""


if __name__ == "__main__":
    if os.environ["FAULT"] == "evaluate":
        arguments = os.environ["ARGUMENTS"].split("|")[int(os.environ["RANK"]) + 1]
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        evaluate.main([*sys.argv[1:], *arguments.split()])
        sys.exit()
    train.train = train_and_report
    if os.environ["FAULTY_RANK"] in ("all", os.environ["RANK"]):
        if os.environ["FAULT"] == "arguments":
            sys.argv += os.environ["ARGUMENTS"].split()
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # a node of its own
        else:
            setattr(*PLANTED[os.environ["FAULT"]])
    train.main()
    end_process(0)
