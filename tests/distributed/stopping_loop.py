"""Training loop without a model: each step is an all-reduce. It stops when its ranks agree on a stop request."""

import os
import signal
import time

import torch
import torch.distributed as dist

from titanlite.runtime.agreement import Agreement
from titanlite.runtime.distributed import CommConfig, connect, init_process_group, world_from_environment
from titanlite.runtime.failure import FailureReport, end_process
from titanlite.runtime.orphans import end_with_launcher
from titanlite.runtime.signals import StopRequest

STEP_S = float(os.environ.get("STEP_S", "0.02"))


def print_line(text: str) -> None:
    """Write a line atomically, so that lines of several ranks do not mix."""
    os.write(1, f"{text}\n".encode())


def main() -> None:
    end_with_launcher()
    with FailureReport() as failure:
        world, comm = world_from_environment(), CommConfig()
        failure.store = connect(world, comm)
        group = init_process_group(world, failure.store, comm)
        control = Agreement(dist.new_group(backend="gloo"), 1)
        request = StopRequest()
        request.activate(failure.explain_sigterm, failure.end_by_signal)
        step = stop = 0
        while not stop:
            step += 1
            time.sleep(STEP_S)
            dist.all_reduce(torch.zeros(1), group=group)
            (stop,) = control.exchange([request.number])
            print_line(f"step {step}/ of rank {world.rank}")
        control.finish()
        received = request.signal or "none"
        agreed_on = signal.Signals(stop).name
        print_line(f"rank {world.rank}, received {received}, stopped after step {step} by {agreed_on}")
        if "SAVE_S" in os.environ:
            time.sleep(float(os.environ["SAVE_S"]))
        dist.barrier()
        dist.destroy_process_group()
    end_process(0)


if __name__ == "__main__":
    main()
