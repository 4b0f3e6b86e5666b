"""Waits for other processes: with a line that says for what, and with a time limit. Their answers."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
log = logging.getLogger("titanlite")  # without runtime.logging: the trainer imports this module

FIRST_S = 8.0
"""Time after which a wait is logged."""
AGAIN_S = 30.0
"""Time between later lines of the same wait."""
ANSWER_S = 2.0
"""Time for an answer of the store, when the process is about to end with an error."""
SETTLE_S = 2.5
"""Time in which a running process gives five heartbeats and writes its stacks."""


class NoAnswerError(RuntimeError):
    """A call did not return in time, as if the connection was lost."""


@contextmanager
def waiting(describe: Callable[[], str]) -> Iterator[None]:
    """Log what the block waits for, after FIRST_S and then each AGAIN_S.

    describe: what it waits for, and the remedy. It is called in another thread. The first rank of each node logs;
    without torchrun each rank, since any of them may be alone.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    ended, begin = threading.Event(), time.monotonic()

    def report() -> None:
        delay_s = FIRST_S
        while not ended.wait(delay_s):
            log.warning("waiting for %.0f s for %s", time.monotonic() - begin, describe())
            delay_s = AGAIN_S

    threading.Thread(target=report, name="titanlite-waiting", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return call(), made in a thread of its own: torch's TCPStore waits without a limit for a process that is stopped,
    or a node that is lost. Raises NoAnswerError after `seconds`; the thread remains."""
    try:
        return ThreadPoolExecutor(1).submit(call).result(seconds)
    except TimeoutError:
        raise NoAnswerError(f"no answer within {seconds:g} s") from None


def parse_value(value: bytes, parse: Callable[[bytes], T]) -> T | None:
    """`parse` of a value of the store, which every program that reaches its port may have written; None, as for a key
    that is absent, if the value is not as expected."""
    try:
        return parse(value)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        return None
