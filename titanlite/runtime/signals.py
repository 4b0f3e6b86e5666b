"""A signal that asks training to stop is remembered until all ranks can act on it; who asks again ends it at once.

Imports no torch.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from titanlite.runtime.failure import INTERRUPTED_WAIT_S

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A signal often comes twice, from a terminal or a scheduler and from torchrun, which passes on its own.
SAME_SIGNAL_S = 1.0


class StopRequest:
    """The first of SIGTERM, SIGINT and SIGUSR1 that this process got since `activate`, which ends nothing by itself.

    A second SIGTERM or SIGINT, more than SAME_SIGNAL_S after the first of these two, ends the process at once, with
    exit code 143 or 130 and one line from rank 0. SIGUSR1 is a scheduler's early warning: the SIGTERM after it asks for
    the same once more, and never ends the process. Before `activate` signals do what they did: see end_on_interrupt.
    """

    def __init__(self) -> None:
        self.number = 0
        """The signal's number; 0: nobody has asked."""
        self._asked_at: float | None = None

    @property
    def signal(self) -> str | None:
        """The signal's name, such as "SIGTERM"; None: nobody has asked."""
        return signal.Signals(self.number).name if self.number else None

    def activate(self) -> None:
        """From now on. For the main thread only, and once.

        A thread takes the signals in, at any time: Python's own handlers only run between two instructions of the main
        thread, so not while it waits inside a library, such as for another rank.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        threading.Thread(target=self._listen, args=(reader,), name="titanlite-stop-request", daemon=True).start()
        # In this order no signal is lost: until the new descriptor is set, SIGINT ends the process by the thread of
        # end_on_interrupt, which hears nothing from then on, and SIGTERM by itself.
        _leave_to_thread(signal.SIGINT)
        signal.set_wakeup_fd(writer)
        _leave_to_thread(signal.SIGTERM)
        _leave_to_thread(signal.SIGUSR1)

    def _listen(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64):
                if number in STOP_SIGNALS:
                    self._receive(number)

    def _receive(self, number: int) -> None:
        self.number = self.number or number
        if number == signal.SIGUSR1:
            return
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > SAME_SIGNAL_S:
            _end_at_once(number)


def _end_at_once(number: int) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"\ntitanlite: {signal.Signals(number).name} again: ended at once\n".encode())
    time.sleep(INTERRUPTED_WAIT_S)
    os._exit(128 + number)


def _leave_to_thread(signum: signal.Signals) -> None:
    signal.signal(signum, _do_nothing)
    signal.siginterrupt(signum, False)  # system calls of libraries, which may not expect to be interrupted, go on


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Python's handler: with one, the signal's number goes to the descriptor that the thread reads."""
