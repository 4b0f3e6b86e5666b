"""Reads that fail for a while: tried again with backoff, then one error that says so."""

import errno
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from titanlite.runtime.errors import UserError

T = TypeVar("T")
Sleep = Callable[[float], None]

DELAYS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Waits between tries: about a minute in all, beside what a library below waits within one try."""

TRANSIENT_ERRNOS = {
    *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EPIPE, errno.EREMOTEIO, errno.ENOTCONN),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET),
}
"""What network file systems and connections fail with for a while; a missing file or right is not among them."""

TRANSIENT_STATUSES = {408, 425, 429, 500, 502, 503, 504}
"""HTTP: too busy, too many requests, faults of the server."""

TRANSPORT_ERRORS = {"TransportError", "ClientConnectionError", "ClientPayloadError", "FSTimeoutError"}
"""Classes, by name, from which HTTP libraries derive what is wrong with a connection. By name, since it depends on
the version of huggingface_hub which of these libraries it stands on."""

logger = logging.getLogger("titanlite")


def is_transient(error: BaseException) -> bool:
    """Whether the same read may well succeed a little later."""
    status = http_status(error)
    if status is not None:
        return status in TRANSIENT_STATUSES
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in TRANSIENT_ERRNOS
    return bool(TRANSPORT_ERRORS & {one.__name__ for one in type(error).__mro__})


def http_status(error: BaseException) -> int | None:
    """Of the response that the error is about; None where there is none."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "status", None)
    return status if isinstance(status, int) else None


def retrying(what: str, read: Callable[[], T], delays_s: Sequence[float] = DELAYS_S, sleep: Sleep = time.sleep) -> T:
    """The result of `read()`, tried again after each of `delays_s` where it fails with a transient error.

    what: the thing that is read, for messages. Other errors pass at once. Raises UserError once all tries are used up.
    """
    start = time.monotonic()
    for delay_s in delays_s:
        try:
            return read()
        except Exception as error:
            if not is_transient(error):
                raise
            logger.warning("%s cannot be read just now, trying again in %g s: %s", what, delay_s, reason(error))
        sleep(delay_s)
    try:
        return read()
    except Exception as error:
        if not is_transient(error):
            raise
        raise UserError(
            f"{what} could not be read: tried {len(delays_s) + 1} times in {time.monotonic() - start:.0f} s, last "
            f"error: {reason(error)}; see whether its disk or server can be reached from here, then start again"
        ) from error


def reason(error: BaseException) -> str:
    """The error's text on one line, or its kind where it has none. What signs a URL is left out: it is a secret."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"(https?://[^\s?]+)\?[^\s'\"]+", r"\1", text)
