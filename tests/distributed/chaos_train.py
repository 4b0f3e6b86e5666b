"""Training program whose last rank obeys an order in the file ORDER_FILE of its working folder, once:

nan: the loss of the next step is not finite.
flip: after the next step, a bit of the optimizer's state, which all data ranks hold, has flipped.

If there is a file PACE_FILE, each step takes as many seconds longer as it says: without it, a run may end during a
fault.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from titanlite import train
from titanlite.batch import Batch, StepStats
from titanlite.models.head import OutputLayer
from titanlite.runtime.dtensors import local_part
from titanlite.runtime.failure import end_process
from titanlite.trainer import Trainer

ORDER_FILE = "order"
PACE_FILE = "pace"

train_step = Trainer.train_step


def obedient_train_step(self: Trainer, batches: Sequence[Batch]) -> StepStats:
    if Path(PACE_FILE).exists():
        time.sleep(float(Path(PACE_FILE).read_text()))
    order = ""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 and Path(ORDER_FILE).exists():
        order = Path(ORDER_FILE).read_text()
        Path(ORDER_FILE).unlink()
    heads = [module for part in self.model_parts for module in part.modules() if isinstance(module, OutputLayer)]
    hooks = [head.register_forward_hook(lambda *arguments: arguments[-1] * float("nan")) for head in heads]
    for hook in hooks if order != "nan" else ():
        hook.remove()
    stats = train_step(self, batches)
    for hook in hooks:
        hook.remove()
    if order == "flip":
        count = next(local_part(tensor) for name, tensor in self.optimizer.named_state() if name.endswith("/step"))
        count.view(torch.int32).bitwise_xor_(1)
    return stats


if __name__ == "__main__":
    Trainer.train_step = obedient_train_step  # type: ignore[method-assign]
    train.main()
    end_process(0)
