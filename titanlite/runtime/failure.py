"""One clean end for all ranks: the first failure is told once, by the rank that it happened on.

Imports no torch, so that Ctrl-C can be taken care of before that import, which takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, Self

from titanlite.runtime.errors import ConfigError, DataError, UserError

if TYPE_CHECKING:
    import torch.distributed as dist

Part = Literal["tells", "names", "silent"]

# Before ranks know each other, all of them usually meet the same problem. Rank 0 tells it at once, and the end of its
# process ends those of its node. Ranks that are still there after this many seconds tell what happened to them: the
# first of another node, or a rank that met a problem of its own; the first rank of a node is ahead of the others.
UNCONNECTED_WAIT_S = 10.0
NODE_ORDER_WAIT_S = 2.0
# A rank that has nothing to tell stays for so long, unless the launcher ends it: the launcher would end the one that is
# just about to tell, and it names the rank whose process ended first as the cause.
SILENT_WAIT_S = 5.0
# A rank that is interrupted stays for so long: until the others are interrupted too, none shall see a lost connection.
INTERRUPTED_WAIT_S = 0.3
# Whatever blocks while a failure is told (a host that does not answer, a full pipe): this ends the process.
LAST_RESORT_S = 60

LOWEST_SEQUENCE = "titanlite/lowest_sequence"
"""Key in the store: the lowest sequence whose data cannot be used."""


class FailureReport:
    """Context of a whole program. An exception that leaves it ends the process: never a hang, never N tracebacks.

    Once ranks are connected, `store` says who failed first: only that rank speaks, the others saw a consequence (a
    lost connection) and end silently. Users' errors are told without a traceback. Exit codes: 2 for a configuration,
    130 for Ctrl-C, 1 for anything else.
    """

    def __init__(self) -> None:
        self.store: dist.Store | None = None
        self._rank = os.environ.get("RANK", "0")
        self._local_rank = os.environ.get("LOCAL_RANK", "0")

    def __enter__(self) -> Self:
        end_on_interrupt()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to stop for: the launcher ends silent ranks
        signal.alarm(LAST_RESORT_S)
        part = self._part(error)
        if part == "silent":
            time.sleep(SILENT_WAIT_S)
        elif isinstance(error, UserError):
            _tell(f"titanlite: {error}")
        elif part == "names" and isinstance(error, RuntimeError):  # what torch raises for a lost connection
            _tell(f"titanlite: rank {self._rank} lost the other ranks: {error}")
        else:
            _tell("".join(traceback.format_exception(kind, error, trace)))
            _tell(f"titanlite: rank {self._rank} failed: {type(error).__name__}: {error}")
        end_process(2 if isinstance(error, ConfigError) else 1)

    def note_data_error(self, error: DataError) -> None:
        """Of the ranks that have noted theirs by the time they fail, the one with the lowest sequence speaks."""
        if self.store is None:
            return
        number = str(error.sequence)
        lowest = self.store.compare_set(LOWEST_SEQUENCE, "", number)
        while int(lowest) > error.sequence:  # the other's number, or one that a third rank has put there meanwhile
            lowest = self.store.compare_set(LOWEST_SEQUENCE, lowest.decode(), number)

    def _part(self, error: BaseException) -> Part:
        """What this rank has to say of its failure: all, what it is in a line, or nothing."""
        if self.store is None:
            if self._rank != "0":
                time.sleep(UNCONNECTED_WAIT_S + (NODE_ORDER_WAIT_S if self._local_rank != "0" else 0.0))
            return "tells"
        try:
            if isinstance(error, DataError) and int(self.store.get(LOWEST_SEQUENCE)) < error.sequence:
                return "silent"
            first = self.store.compare_set("titanlite/first_failure", "", self._rank)
        except RuntimeError:  # the process that holds the store is gone: most likely we see a consequence of that
            return "names"
        return "tells" if first.decode() == self._rank else "silent"


def end_on_interrupt() -> None:
    """From now on Ctrl-C ends the process at once, with exit code 130 and one line from rank 0.

    A thread waits for the signal: Python's own handlers only run between two of its instructions, so not while the main
    thread waits inside a library, such as for ranks that have ended already. For the main thread only.
    """
    if signal.getsignal(signal.SIGINT) is _leave_to_thread:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    threading.Thread(target=_wait_for_interrupt, args=(reader,), name="titanlite-interrupt", daemon=True).start()
    signal.signal(signal.SIGINT, _leave_to_thread)


def _wait_for_interrupt(reader: int) -> None:
    while signal.SIGINT not in os.read(reader, 64):
        pass
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"\ntitanlite: interrupted\n")
    time.sleep(INTERRUPTED_WAIT_S)
    os._exit(130)


def _leave_to_thread(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """Python's handler of SIGINT: the main thread does nothing more, whatever goes wrong around it."""
    time.sleep(LAST_RESORT_S)


def _tell(message: str) -> None:
    with suppress(OSError, ValueError):  # a reader that is gone, a closed stream: end all the same
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)


def end_process(code: int) -> NoReturn:
    """Ends at once. An orderly shutdown of the interpreter could wait for ranks and threads that never answer; after a
    good end, about one in 60 was aborted (SIGABRT on a busy machine, docs/LOG.md)."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
