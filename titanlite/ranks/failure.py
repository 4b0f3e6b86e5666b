"""Failure reports: all ranks exit, and only the first failed rank prints its error.

Does not import torch, which takes seconds, so that Ctrl-C is handled before that import.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, Self

from titanlite.ranks import election
from titanlite.ranks.message import describe_error
from titanlite.ranks.signals import (
    STOP_SIGNALS,
    end_with_launcher,
    in_thread,
    leave_to_thread,
    receive_signals,
    stop_signals,
)
from titanlite.runtime.errors import DataError, UsageError, UserError
from titanlite.runtime.gpus import set_allocator
from titanlite.runtime.logging import log_last_error
from titanlite.runtime.retry import may_pass
from titanlite.runtime.text import visible_lines
from titanlite.runtime.waiting import ANSWER_S, SETTLE_S, call_within

if TYPE_CHECKING:
    import torch.distributed as dist

    from titanlite.ranks.positions import Positions
    from titanlite.ranks.signals import StopRequest

Detail = Literal["full", "brief", "silent"]

# Before the ranks are connected, usually all of them fail with the same error. Rank 0 prints it at once, and the
# launcher then terminates the other ranks of its node. Ranks that still run after this wait print their own error: the
# first rank of another node, or a rank with a different error. The first rank of a node prints before the others.
UNCONNECTED_WAIT_S = 10.0
NODE_ORDER_WAIT_S = 2.0
# A silent rank waits before it exits: its exit would make the launcher terminate the rank that is about to print, and
# name the silent rank as the cause. It exits earlier if the error is printed and the launcher has sent SIGTERM.
SILENT_WAIT_S = 5.0
SILENT_POLL_S = 0.1
# After SIGTERM, the main thread has this time to notice a lost rank. Launchers kill 30 s after SIGTERM.
BUSY_WAIT_S = 10.0
# An interrupted rank waits until the other ranks are interrupted too, so that they do not see a lost connection.
INTERRUPTED_WAIT_S = 0.3
# Kills the process if printing the error blocks (unreachable host, full pipe).
LAST_RESORT_S = 60

REFUSED = 78
"""Exit code of a rank that fails before its first step and would fail again, for a launcher, which ends with 1. No file
could tell it: the disk may be full."""


class FailureReport:
    """Context manager of a program: an exception ends the process without hanging, and only one rank prints it.

    Once ranks are connected, the first failed rank registers itself in `store` and prints its error; the other ranks
    only see a consequence, such as a lost connection, and exit silently. If the first one is killed before it has
    printed, another one takes its place. UserError is printed without a traceback. Exit codes: 2 for a configuration
    error, 130 for Ctrl-C, 143 for SIGTERM, 1 for any other error; under torchrun, REFUSED for some of them.
    """

    def __init__(self) -> None:
        self.store: dist.Store | None = None
        self.positions: Positions | None = None
        self._ending = threading.RLock()  # held by the thread that ends the process
        self._terminated = threading.Event()
        self._signal = 0  # that has set _terminated
        self._is_starting = True
        self._rank = os.environ.get("RANK", "0")
        self._local_rank = os.environ.get("LOCAL_RANK", "0")

    def __enter__(self) -> Self:
        prepare_process()
        gc.freeze()  # the imported modules, which each collection would visit
        gc.enable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and self.store is None):
            return  # --help, for example; once ranks are connected, an exit is an error like any other
        signal.alarm(LAST_RESORT_S)
        self._ending.acquire()
        detail = self._detail(error)
        if detail != "silent" or self._takes_over():
            message = self._describe(error, detail)
            if not isinstance(error, UserError) and message.startswith(f"rank {self._rank} failed"):
                _print_error("".join(traceback.format_exception(kind, error, trace)))
            self._print(message, detail)
        self._wait_for_ranks()
        is_refused = self._is_starting and "TORCHELASTIC_RUN_ID" in os.environ and not may_pass(error)
        end_process(2 if isinstance(error, UsageError) else REFUSED if is_refused else 1)

    def connected(self, positions: Positions) -> None:
        """Report failures together with the other ranks from now on. For the main thread only.

        A launcher sends SIGTERM to the ranks of its node once one of them has ended. From now on, a signal therefore
        ends the process within a second or, if another rank has ended, after an explanation.
        """
        self.positions, self.store = positions, positions.background
        if positions.size > 1:
            receive_signals(self._receive)
            for number in stop_signals():
                leave_to_thread(number)
            positions.on_beat = self._follow

    def _receive(self, number: int) -> None:
        """Handle the first signal. StopRequest.activate replaces this."""
        if number in STOP_SIGNALS and not self._terminated.is_set():
            self._note_signal(number)
            in_thread(partial(self._end_after_signal, number))

    def _end_after_signal(self, number: int) -> None:
        # Taken before looking for lost ranks: others may end meanwhile, which the main thread must not explain.
        self._ending.acquire()
        if self._has_lost_rank(SETTLE_S):
            self._explain_and_end()
        self.end_by_signal(number, f"rank {self._rank} was ended by {signal.Signals(number).name}")

    def _note_signal(self, number: int) -> None:
        self._signal = number
        self._terminated.set()

    def end_by_signal(self, number: int, message: str) -> NoReturn:
        """End the process, with a line of the first rank that is ended, and tell the others. For a thread."""
        self._ending.acquire(timeout=ANSWER_S)  # the main thread stops: see enter. Another thread may be ending, too
        self._leave()
        if (detail := self._register()) != "silent":
            with suppress(RuntimeError):  # a pipe that is full and not read
                call_within(ANSWER_S, lambda: self._print(message, detail))
        time.sleep(INTERRUPTED_WAIT_S)
        self._wait_for_ranks()
        os._exit(128 + number)

    def end_by_error(self, message: str) -> None:
        """End the process because of an error that a thread has found. For a thread."""
        self._ending.acquire()
        signal.alarm(LAST_RESORT_S)
        if (detail := self._register()) != "silent" or self._takes_over():
            self._print(message, detail)
        self._wait_for_ranks()
        end_process(1)

    def _follow(self) -> None:
        """End the process SILENT_WAIT_S after the error of another rank is printed.

        The main thread may wait for that rank without noticing that it has ended.
        """
        assert self.positions is not None
        if self.positions.first_failure == election.PRINTED:
            self.positions.on_beat = lambda: None
            in_thread(self._end_after_message)

    def _end_after_message(self) -> None:
        time.sleep(SILENT_WAIT_S)
        self._ending.acquire()
        signal.alarm(LAST_RESORT_S)
        self._leave()
        self._wait_for_ranks()
        end_process(1)

    def _wait_for_ranks(self) -> None:
        """Wait until the other ranks need the store no more, if it ends with this process: without torchrun, on rank 0.

        Else they would print that the store is lost.
        """
        if self.positions is None or self._rank != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        end = time.monotonic() + 2 * SILENT_WAIT_S
        with suppress(RuntimeError):
            while time.monotonic() < end and self.positions.is_needed():
                time.sleep(SILENT_POLL_S)

    def record_stops(self, stop: StopRequest) -> None:
        """Let signals request a stop from now on. For the main thread only."""
        stop.activate(self.explain_sigterm, self.end_by_signal)

    def explain_sigterm(self) -> None:
        """Print why the launcher has sent SIGTERM, if a rank of this node has ended without a message. For a thread.

        The main thread continues, and may complete a save. If it is busy, the launcher kills it before it can explain.
        """
        self._note_signal(signal.SIGTERM)
        if self.positions is not None and self._has_lost_rank(BUSY_WAIT_S):
            with self._ending:
                if self._register() == "full":
                    self._print(self.positions.explain(), "full")

    def end_from_thread(self) -> None:
        """End the process, which waits for a rank without heartbeats, or for the store. To be called by another than
        the main thread.

        The main thread may be blocked in a collective with a long timeout, such as during a save.
        """
        self._ending.acquire()
        self._explain_and_end()

    def _explain_and_end(self) -> NoReturn:
        assert self.positions is not None
        signal.alarm(LAST_RESORT_S)
        detail = self._register()
        if detail != "silent" or self._takes_over():
            self._print(self.positions.explain(), detail)
            self._wait_for_ranks()
            end_process(1)
        self._leave()
        self._wait_for_ranks()
        end_process(128 + self._signal if self._signal else 1)

    def _has_lost_rank(self, within_s: float) -> bool:
        """Whether a rank has failed, or one of this node gives no heartbeat for so long, or the store is lost."""
        assert self.positions is not None
        try:
            return self._first_failure() != "" or bool(self.positions.silent(within_s))
        except RuntimeError:
            return True

    def _takes_over(self) -> bool:
        """Wait, as a silent rank, for the rank that prints. True: it has ended before, and this rank has to print."""
        begin = time.monotonic()
        with suppress(RuntimeError):  # the process of the store has ended or is stopped
            first = self._first_failure()
            while (now := time.monotonic()) < begin + (3 * SILENT_WAIT_S if first else SILENT_WAIT_S):
                # Not from the store, which all ranks would ask at the same time.
                first = self._first_failure() if self.positions is None else self.positions.first_failure or first
                if first == election.PRINTED:
                    self._leave()
                    self._terminated.wait(max(0.0, begin + SILENT_WAIT_S - now))
                    return False
                if first and self.positions is not None and self.positions.is_first_silent:
                    assert self.store is not None
                    if election.take_over(self.store, first, self._rank):
                        return True
                time.sleep(SILENT_POLL_S)
            return self._register() == "full"  # no rank has registered
        return False

    def _first_failure(self) -> str:
        """The rank that prints, or PRINTED; "" if no rank has failed. Raises RuntimeError."""
        assert self.store is not None
        return call_within(ANSWER_S, partial(election.first_failure, self.store))

    def _print(self, message: str, detail: Detail) -> None:
        """Print the message of the job. detail: "brief" if the store is lost; else the other ranks are told."""
        message = visible_lines(message)
        _print_error(f"titanlite: {message}")
        write_error_file(f"titanlite: {message}")
        if (store := self.store) is not None and detail != "brief":
            with suppress(RuntimeError):
                call_within(ANSWER_S, partial(election.note_printed, store))
            self._leave()
        log_last_error(message)  # last, since the file system may hang

    def _leave(self) -> None:
        """Tell the other ranks that this one ends: they do not wait for it."""
        if self.positions is not None:
            with suppress(RuntimeError):
                call_within(ANSWER_S, self.positions.leave)

    def enter(self, step: int, phase: str) -> None:
        """Note that this rank enters a phase of a step, for messages of other ranks. Does not return once a thread ends
        the process: no step and no line follows its message."""
        self._is_starting = False
        if self.positions is not None:
            self.positions.enter(step, phase)  # without the lock: the store may be slow, or stopped
        with self._ending:
            pass

    def _describe(self, error: BaseException, detail: Detail) -> str:
        """The message of a rank that prints. A lost or slow connection is explained by the positions of the ranks."""
        others = self.positions is not None and self.positions.size > 1
        return describe_error(error, self._rank, is_brief=detail == "brief", explain=self._explain if others else None)

    def _explain(self, late: Sequence[int]) -> str:
        """Describe the ranks that ended or lag. late: those that have sent no message, if known."""
        assert self.positions is not None
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher terminates all ranks once one has ended
        return self.positions.explain(late)

    def note_data_error(self, error: DataError) -> None:
        """Register the sequence of a data error: of all registered ranks, the one with the lowest sequence prints."""
        if self.store is not None:
            election.note_sequence(self.store, error.sequence)

    def _detail(self, error: BaseException) -> Detail:
        """Decide how much this rank prints; before the ranks are connected, wait for rank 0 first."""
        if self.store is None:
            if self._rank != "0" and "WORLD_SIZE" in os.environ:  # else no other rank has this error
                time.sleep(UNCONNECTED_WAIT_S + (NODE_ORDER_WAIT_S if self._local_rank != "0" else 0.0))
            return "full"
        if isinstance(error, UserError) and error.is_shared and self._rank != "0":
            return "silent"
        return self._register(error.sequence if isinstance(error, DataError) else None)

    def _register(self, sequence: int | None = None) -> Detail:
        """Register this rank as the one that prints, unless another one is. sequence: of a data error."""
        assert self.store is not None
        try:
            prints = call_within(ANSWER_S, partial(election.register, self.store, self._rank, sequence))
            return "full" if prints else "silent"
        except RuntimeError:  # the process of the store has ended or is stopped, most likely the cause of this error
            return "brief"

    def finish(self, step: int) -> None:
        """Wait until all ranks have finished their work, after `step`, or have failed. Raises RuntimeError."""
        if self.positions is not None:
            self.positions.finish(step)


class EmbeddedReport(FailureReport):
    """The report of a run inside a program that continues after it: errors are raised, and the process is not ended.

    Not entered as a context. A rank that loses another one gets torch's error. cleanup: ends the recording of signals.
    """

    def __init__(self, cleanup: ExitStack) -> None:
        super().__init__()
        self._cleanup = cleanup
        self._error = ""

    def end_by_error(self, message: str) -> None:
        """Raise UserError when the main thread enters the next phase."""
        self._error = message

    def enter(self, step: int, phase: str) -> None:
        if self._error:
            raise UserError(self._error)
        super().enter(step, phase)

    def record_stops(self, stop: StopRequest) -> None:
        self._cleanup.enter_context(stop.recorded())


def write_error_file(message: str) -> None:
    """Write torchrun's error file of this process, which torchrun's summary shows, if it has one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    content = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
    if path:
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": content}), encoding="utf-8")


def prepare_process() -> None:
    """End a rank with its launcher, and at once on Ctrl-C; hide the warnings of torch's C++ code; set its allocator.
    Idempotent.

    To be called by a program before it imports torch, which takes seconds, a fifth less without garbage collections:
    FailureReport allows them again. When a connection is lost, the warnings are 60 lines after the message that has the
    cause.
    """
    gc.disable()
    end_with_launcher()
    end_on_interrupt()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    set_allocator()


def end_on_interrupt() -> None:
    """Make Ctrl-C end the process at once, with exit code 130 and one line from rank 0. For the main thread only.

    SIGTERM, too, in process 1 of a container, for which the kernel drops signals without a handler.
    """
    if signal.getsignal(signal.SIGINT) is _block_main_thread:
        return
    prepare_streams()  # first: the pipe below could take the descriptors of closed ones
    receive_signals(_end_if_interrupted)
    for number in (signal.SIGINT, signal.SIGTERM) if os.getpid() == 1 else (signal.SIGINT,):
        signal.signal(number, _block_main_thread)


def prepare_streams() -> None:
    """Let standard streams take any text: characters that the encoding of the locale lacks are written as \\u4f60.
    Tracebacks are `visible`.

    Opens /dev/null in place of those that are closed, as by `>&-`: Python has None for them, and the next files opened
    would receive what libraries print. Every program calls it, first.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 it takes the lowest free descriptor
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.closed:
            stream.reconfigure(errors="backslashreplace")
    sys.excepthook = lambda *error: _print_error("".join(traceback.format_exception(*error)).rstrip("\n"))


def raise_on_interrupt() -> None:
    """Undo end_on_interrupt: Ctrl-C raises KeyboardInterrupt, so that temporary files are removed."""
    if signal.getsignal(signal.SIGINT) is _block_main_thread:
        # This order loses no signal: until the descriptor is removed, the thread ends the process.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGTERM) is _block_main_thread:
            signal.signal(signal.SIGTERM, lambda number, _: end_process(128 + number))
        signal.set_wakeup_fd(-1)


def _end_if_interrupted(number: int) -> None:
    if number in (signal.SIGINT, signal.SIGTERM):
        if os.environ.get("RANK", "0") == "0":
            os.write(2, b"\ntitanlite: interrupted\n")
        time.sleep(INTERRUPTED_WAIT_S)
        os._exit(128 + number)


def _block_main_thread(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """Python's handler: wait until the signal thread ends the process."""
    time.sleep(LAST_RESORT_S)


def _print_error(message: str) -> None:
    with suppress(OSError, ValueError):  # broken pipe or closed stream: the exit must not depend on it
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(visible_lines(message), file=sys.stderr, flush=True)


def end_process(code: int) -> NoReturn:
    """Exit at once, without the interpreter's shutdown, which could wait for ranks and threads without limit.

    After a successful run, about one shutdown in 60 aborted (SIGABRT on a busy machine, docs/LOG.md).
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: in a signal handler, while it is written
            stream.flush()
    os._exit(code)
