"""Signals that a thread receives, whatever the main thread does.

Does not import torch.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """STOP_SIGNALS, without SIGHUP if it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored]


def receive_in_thread(receive: Callable[[int], None], name: str) -> int:
    """Start a thread that calls `receive` with each signal; returns the descriptor for signal.set_wakeup_fd.

    Python's handlers only run between bytecode instructions of the main thread, not while it blocks inside a library,
    such as in a collective with ranks that have ended.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def read() -> None:
        while True:
            for number in os.read(reader, 64):
                receive(number)

    threading.Thread(target=read, name=name, daemon=True).start()
    return writer


def leave_to_thread(signum: signal.Signals) -> None:
    """Let the thread of receive_in_thread handle a signal. For the main thread only."""
    signal.signal(signum, _do_nothing)
    signal.siginterrupt(signum, False)  # restart system calls: libraries may not expect interruptions


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Python's handler, without which the signal's number is not written to the thread's descriptor."""
