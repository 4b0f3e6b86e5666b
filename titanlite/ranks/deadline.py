"""Calls with a time limit: torch's TCPStore waits without one for a process that is stopped, or a node that is lost."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

ANSWER_S = 2.0
"""Time for an answer of the store, when the process is about to end with an error."""
SETTLE_S = 2.5
"""Time in which a running process gives five signs of life and writes its stacks."""


class NoAnswerError(RuntimeError):
    """A call did not return in time, as if the connection was lost."""


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Return call(), made in a thread of its own. Raises NoAnswerError after `seconds`; the thread remains."""
    try:
        return ThreadPoolExecutor(1).submit(call).result(seconds)
    except TimeoutError:
        raise NoAnswerError(f"no answer within {seconds:g} s") from None
