"""torchrun for the training: it checks the configuration before it starts a rank, and reports errors in one line.

python -m titanlite.torchrun [options of torchrun] -m titanlite.train [CONFIG] [--section.key VALUE ...]
"""

from titanlite.runtime.failure import FailureReport, end_on_interrupt, end_process, raise_on_interrupt

if __name__ == "__main__":  # before the imports that take seconds
    end_on_interrupt()

import signal
import sys
from argparse import Namespace

import torch
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import determine_local_world_size, get_rdzv_endpoint, parse_args, parse_min_max_nnodes, run

from titanlite.config.command_line import read_command_line
from titanlite.runtime.environment import raise_open_file_limit
from titanlite.runtime.errors import UserError

TRAIN = "titanlite.train"


def main() -> None:
    """Check the configuration of a training, then run torchrun in this process."""
    with FailureReport():
        arguments = parse_args(sys.argv[1:])
        check(arguments)
        raise_open_file_limit()
        raise_on_interrupt()
        launch(arguments)


def check(arguments: Namespace) -> None:
    """Check the configuration, if the ranks run titanlite.train and their number is fixed. Raises UsageError."""
    fewest, nodes = parse_min_max_nnodes(arguments.nnodes)
    if arguments.module and arguments.training_script == TRAIN and fewest == nodes:
        read_command_line(
            arguments.training_script_args,
            world_size=nodes * determine_local_world_size(arguments.nproc_per_node),
            device_type="cuda" if torch.cuda.is_available() else "cpu",
        )


def launch(arguments: Namespace) -> None:
    """Run torchrun until all ranks have ended. Raises UserError if it cannot connect the nodes.

    Exits as the first rank that failed, or with 128 + its number after a signal, of which torchrun has informed the
    ranks.
    """
    try:
        run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code, killed = failure.exitcode, f"was killed by {failure.signal_name()}"
        end = killed if code < 0 else "failed: its error is above, or in its log"
        print(f"titanlite: rank {rank} {end}", file=sys.stderr)
        end_process(code if code > 0 else 1)
    except (SignalException, KeyboardInterrupt) as error:
        end_process(128 + (error.sigval if isinstance(error, SignalException) else signal.SIGINT))
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        endpoint, cause = get_rdzv_endpoint(arguments), f"{error.__cause__ or error}".partition("\n")[0]
        if "EADDRINUSE" in cause:
            remedy = "end the program that uses it, or choose another port, the same on all nodes"
            raise UserError(f"the port of {endpoint}, where the nodes connect, is in use: {remedy}") from None
        raise UserError(f"the nodes cannot connect at {endpoint}: {cause or type(error).__name__}") from None


if __name__ == "__main__":
    main()
    end_process(0)
