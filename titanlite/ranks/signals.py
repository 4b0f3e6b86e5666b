"""The thread of a process that never blocks, and stop requests.

The thread receives signals, looks for the end of the launcher, and for silence of the store and the ranks. The first
signal stops training after a step that all ranks agree on; a second one exits at once.

Does not import torch, which takes seconds, so that it also works during that import.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
TICK_S = 0.5
"""Seconds between two checks of the thread."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# A signal often arrives twice: from a terminal or a scheduler, and forwarded by torchrun.
SAME_SIGNAL_S = 1.0
POLL_S = 0.05
DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)
"""Those of a program that handles no signal itself."""


class Watch:
    """The thread that calls `receive` with each signal, and each of `checks` at each tick. None of them may block: what
    may block runs in a thread of its own, see in_thread.

    Python's handlers only run between bytecode instructions of the main thread, not while it blocks inside a library,
    such as in a collective with ranks that have ended.
    """

    def __init__(self) -> None:
        self.receive: Callable[[int], None] = lambda _: None
        self.checks: list[Callable[[], None]] = []
        self._reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        threading.Thread(target=self._run, name="titanlite-watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            if select.select([self._reader], [], [], TICK_S)[0]:
                for number in os.read(self._reader, 64):
                    self.receive(number)
            else:
                for check in tuple(self.checks):
                    check()


@cache
def watch() -> Watch:
    """The thread of this process, started by the first call."""
    return Watch()


def in_thread(function: Callable[[], object]) -> None:
    """Run a function that may block, and as a rule ends the process."""
    threading.Thread(target=function, name="titanlite-end", daemon=True).start()


def receive_signals(receive: Callable[[int], None]) -> None:
    """Let the thread call `receive`, in place of an earlier one, with each signal that has a handler of Python. For the
    main thread only."""
    watch().receive = receive
    signal.set_wakeup_fd(watch().writer)


def stop_signals() -> list[signal.Signals]:
    """STOP_SIGNALS, without SIGHUP if it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored]


def leave_to_thread(signum: signal.Signals) -> None:
    """Let the thread alone handle a signal. For the main thread only."""
    signal.signal(signum, _do_nothing)
    signal.siginterrupt(signum, False)  # restart system calls: libraries may not expect interruptions


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Python's handler, without which the signal's number is not written to the thread's descriptor."""


def end_with_launcher() -> None:
    """Kill this process as soon as the torchrun that started it has ended, even by SIGKILL. Idempotent.

    The next attempt may already use the same folders.

    torchrun starts each rank in a new session, so ranks would outlive it. Without torchrun this does nothing: the
    process may outlive its shell.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if sys.platform == "linux" and _kernel_kills_with_parent():
        if _adopted_by_init():
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        watch().checks.append(partial(_require_parent, os.getppid()))


def _kernel_kills_with_parent() -> bool:
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)


def _adopted_by_init() -> bool:
    """Whether the launcher ended before prctl was called. In a container, torchrun itself may be process 1."""
    try:
        return os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes()
    except OSError:  # no /proc
        return False


def _require_parent(launcher: int) -> None:
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)


class StoppedError(Exception):
    """All ranks have agreed to stop. number: of the signal that requested it."""

    def __init__(self, number: int) -> None:
        self.number = number


class StopRequest:
    """The first SIGTERM, SIGINT, SIGUSR1 or SIGHUP since `activate`, recorded without ending the process.

    A second SIGTERM or SIGINT, more than SAME_SIGNAL_S after the first of these two, ends the process at once, with
    exit code 143 or 130 and one line from the first rank. SIGUSR1 is a scheduler's early warning, and SIGHUP the end of
    a terminal: the first SIGTERM after them repeats the request and does not end the process. Before `activate`,
    signals keep their handlers: see end_on_interrupt and FailureReport.connected.
    """

    def __init__(self) -> None:
        self.number = 0
        """The signal's number; 0: no request."""
        self._requested_at: float | None = None
        self._is_ending = False

    @property
    def signal(self) -> str | None:
        """The signal's name, such as "SIGTERM"; None: no request."""
        return signal.Signals(self.number).name if self.number else None

    def received_within(self, seconds: float) -> bool:
        """Wait for a request; whether this process has received one."""
        deadline = time.monotonic() + seconds
        while not self.number and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.number != 0

    def activate(self, on_sigterm: Callable[[], None], end: Callable[[int, str], None]) -> None:
        """Start to record signals. To be called once, from the main thread.

        on_sigterm: called at each SIGTERM, in a thread of its own, after it is recorded. end: ends the process, in a
        thread of its own, given the number of the second signal and a message.
        """
        # This order loses no signal: until `receive` is replaced, that of end_on_interrupt ends the process on SIGINT,
        # and SIGTERM has its default action, or that of FailureReport.connected.
        leave_to_thread(signal.SIGINT)
        receive_signals(partial(self._receive, on_sigterm, end))
        for number in stop_signals():
            leave_to_thread(number)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context of `activate` for a program that continues: the process is not ended, and handlers are restored.

        A second SIGTERM or SIGINT goes to the handler from before: Ctrl-C raises KeyboardInterrupt. Signals that the
        program handles itself are not recorded, and none is outside of the main thread, which has all handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in stop_signals()}
        own = {number: handler for number, handler in before.items() if handler in DEFAULT_HANDLERS}

        def receive(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            if self._note(number):
                signal.signal(number, own[signal.Signals(number)])
                signal.raise_signal(number)

        try:
            for number in own:
                signal.signal(number, receive)
            yield
        finally:
            for number, handler in own.items():
                signal.signal(number, handler)

    def _note(self, number: int) -> bool:
        """Record a signal; whether it is a second one, which ends the process."""
        self.number = self.number or number
        if number in (signal.SIGUSR1, signal.SIGHUP):
            return False
        now = time.monotonic()
        if self._requested_at is None:
            self._requested_at = now
        return now - self._requested_at > SAME_SIGNAL_S

    def _receive(self, on_sigterm: Callable[[], None], end: Callable[[int, str], None], number: int) -> None:
        if number not in STOP_SIGNALS:
            return
        if self._note(number) and not self._is_ending:
            self._is_ending = True
            in_thread(partial(end, number, f"second {signal.Signals(number).name}: exiting at once"))
        elif number == signal.SIGTERM:
            in_thread(on_sigterm)
