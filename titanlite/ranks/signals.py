"""Stop requests: the first signal stops training after a step that all ranks agree on; a second one exits at once.

Does not import torch.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from titanlite.ranks.signal_thread import STOP_SIGNALS, leave_to_thread, receive_in_thread, stop_signals

# A signal often arrives twice: from a terminal or a scheduler, and forwarded by torchrun.
SAME_SIGNAL_S = 1.0
POLL_S = 0.05
DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)
"""Those of a program that handles no signal itself."""


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

        on_sigterm: called at each SIGTERM, in a thread of its own, after it is recorded. end: ends the process, given
        the number of the second signal and a message.
        """
        descriptor = receive_in_thread(partial(self._receive, on_sigterm, end), "titanlite-stop-request")
        # This order loses no signal: until the new descriptor is set, the thread of end_on_interrupt ends the process
        # on SIGINT, and SIGTERM has its default action, or that of FailureReport.connected. Afterwards, the threads of
        # these two receive no more signals.
        leave_to_thread(signal.SIGINT)
        signal.set_wakeup_fd(descriptor)
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
        if self._note(number):
            end(number, f"second {signal.Signals(number).name}: exiting at once")
        if number == signal.SIGTERM:
            threading.Thread(target=on_sigterm, name="titanlite-sigterm", daemon=True).start()
