"""One clean end for all ranks: the first failure is told once, by the rank that it happened on."""

import os
import signal
import sys
import time
import traceback
from types import FrameType, TracebackType
from typing import NoReturn, Self

import torch.distributed as dist

from titanlite.runtime.errors import ConfigError, UserError

# Before ranks know each other, all of them usually meet the same problem. Rank 0 tells it at once; the first rank of
# another node, which rank 0's end does not reach, waits so long, and tells it then.
OTHER_NODE_WAIT_S = 10.0


class FailureReport:
    """Context of a whole program. An exception that leaves it ends the process: never a hang, never N tracebacks.

    Once ranks are connected, `store` says who failed first: only that rank speaks, the others saw a consequence (a
    lost connection) and end silently. Users' errors are told without a traceback. Exit codes: 2 for a configuration,
    130 for Ctrl-C, 1 for anything else.
    """

    def __init__(self) -> None:
        self.store: dist.Store | None = None
        self._rank = int(os.environ.get("RANK", "0"))
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    def __enter__(self) -> Self:
        signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        if self._speaks():
            if isinstance(error, UserError):
                _tell(f"titanlite: {error}")
            else:
                _tell("".join(traceback.format_exception(kind, error, trace)))
                _tell(f"titanlite: rank {self._rank} failed: {type(error).__name__}: {error}")
        _end(2 if isinstance(error, ConfigError) else 1)

    def _speaks(self) -> bool:
        if self.store is not None:
            try:
                first = self.store.compare_set("titanlite/first_failure", "", str(self._rank))
                return bool(first.decode() == str(self._rank))
            except RuntimeError:  # the store is gone with the launcher: nobody else can speak for us
                return True
        if self._rank != 0:
            time.sleep(OTHER_NODE_WAIT_S)
        return self._local_rank == 0

    def _interrupted(self, signum: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG002
        if self._rank == 0:
            os.write(2, b"\ntitanlite: interrupted\n")
        os._exit(130)


def _tell(message: str) -> None:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)


def _end(code: int) -> NoReturn:
    """Ends at once: an orderly shutdown could wait for ranks and threads that will never answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
