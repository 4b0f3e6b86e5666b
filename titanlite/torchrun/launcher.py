"""The program of run_train.sh: counts GPUs, sets threads, and trains in this process or, on several, by torchrun.

    python -m titanlite.torchrun.launcher [--nnodes N ... of torchrun] -- [CONFIG] [--section.key VALUE ...]

run_train.sh documents the environment variables. Does not import torch: its libraries read some variables only once.
"""

import os
import runpy
import sys

from titanlite.ranks.failure import FailureReport
from titanlite.runtime.environment import CHOSE_THREADS, usable_cores
from titanlite.runtime.errors import UsageError, integer_variable
from titanlite.runtime.gpus import usable_gpus

OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""Variables of a rank, which the environment of a container or of an earlier shell may have."""

MAX_PROCESSES = 1024
"""Of a node."""


def main() -> None:
    """Start the training, in this process if it is the only one."""
    forget_rank()
    with FailureReport():
        options, arguments = split_at_dashes(sys.argv[1:])
        gpus = usable_gpus(os.environ.get("DEVICE", ""))
        processes = integer_variable("NGPU", max(gpus, 1), least=1, most=MAX_PROCESSES)
        set_threads(processes)
    if processes == 1 and not options:
        run_module("titanlite.train", arguments)
    else:
        nodes = options or ["--standalone"]
        ranks = f"--nproc-per-node={processes}"
        run_module("titanlite.torchrun", [*nodes, ranks, "-m", "titanlite.train", *arguments])


def forget_rank() -> None:
    """Unset the variables of a rank: a launcher is none, so that it prints its errors and waits, and ends by itself."""
    for name in OF_RANKS:
        os.environ.pop(name, None)


def split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """(torchrun's options, arguments of the training): the words before and after the first "--". Raises UsageError."""
    if "--" not in argv:
        command = "python -P -m titanlite.torchrun.launcher [--nnodes N ...] -- CONFIG"
        raise UsageError(f'write "--" before the configuration: {command}')
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


def set_threads(processes: int) -> None:
    """Set the number of threads of each of several processes; a value in the environment is kept."""
    if processes > 1 and "OMP_NUM_THREADS" not in os.environ:  # torchrun would set 1, with a warning
        cores = usable_cores()
        threads = max(cores // processes, 1)
        os.environ |= {"OMP_NUM_THREADS": str(threads), CHOSE_THREADS: "1"}
        print(f"titanlite: OMP_NUM_THREADS={threads} ({cores} cores, {processes} processes)", file=sys.stderr)


def run_module(module: str, arguments: list[str]) -> None:
    """Run a module as a program with these arguments."""
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
