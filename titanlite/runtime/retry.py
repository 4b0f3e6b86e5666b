"""Retry reads, and requests to stores, that fail with a transient error, with exponential backoff."""

import errno
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log

T = TypeVar("T")
Sleep = Callable[[float], None]

DELAYS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Waits between attempts: about a minute in total, besides the waits of the underlying library within one attempt."""

TRANSIENT_ERRNOS = {
    *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EPIPE, errno.EREMOTEIO, errno.ENOTCONN),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET),
}
"""Transient errors of network file systems and connections; without missing files and permissions."""

TRANSIENT_STATUSES = {408, 425, 429, 500, 502, 503, 504}
"""HTTP status codes: timeout, too many requests, server errors."""

TRANSPORT_ERRORS = {"TransportError", "ClientConnectionError", "ClientPayloadError", "FSTimeoutError"}
"""Names of the base classes of connection errors in HTTP libraries. Names, since the version of huggingface_hub
determines which of these libraries is installed."""


_RANDOM = random.SystemRandom()


def is_transient(error: BaseException) -> bool:
    """Whether the same read may succeed after a wait."""
    status = http_status(error)
    if status is not None:
        return status in TRANSIENT_STATUSES
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in TRANSIENT_ERRNOS
    return bool(TRANSPORT_ERRORS & {base.__name__ for base in type(error).__mro__})


def may_pass(error: BaseException) -> bool:
    """Whether the same start may succeed later. Not after an error that the user has to fix, or one of the file system,
    unless it was caused by a transient one."""
    chain = [error]
    while (context := chain[-1].__context__) is not None:
        chain.append(context)
    is_temporary = any(is_transient(each) or getattr(each, "may_pass", False) for each in chain)
    return is_temporary or not isinstance(error, UserError | OSError)


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status code of the error's response; None if absent."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "status", None)
    return status if isinstance(status, int) else None


def retrying(
    what: str,
    read: Callable[[], T],
    delays_s: Sequence[float] = DELAYS_S,
    sleep: Sleep = time.sleep,
    *,
    verb: str = "read",
    transient: Callable[[BaseException], bool] = is_transient,
    jitter: float = 0.0,
) -> T:
    """Return the result of `read()`, retried after each of `delays_s` if it fails with a transient error.

    what: description of the content, for messages; verb: of what is done with it. transient: see is_transient. jitter:
    the part of each delay that is random, so that many ranks do not repeat their requests at the same time. Other
    errors are raised at once. Raises UserError after the last attempt.
    """
    start = time.monotonic()
    for delay_s in delays_s:
        try:
            return read()
        except Exception as error:
            if not transient(error):
                raise
            log.warning("cannot %s %s, retrying in %g s: %s", verb, what, delay_s, reason(error))
        sleep(delay_s * (1 - jitter * _RANDOM.random()))
    try:
        return read()
    except Exception as error:
        if not transient(error):
            raise
        raise UserError(
            f"cannot {verb} {what}: {len(delays_s) + 1} attempts in {time.monotonic() - start:.0f} s, last "
            f"error: {reason(error)}; check that its disk or server can be reached from this host, then restart"
        ) from error


def reason(error: BaseException) -> str:
    """Return the error's text on one line, or its type if empty. Query strings of URLs are removed: they can contain
    signatures, which are secrets."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"(https?://[^\s?]+)\?[^\s'\"]+", r"\1", text)
