"""Reads that fail for a while, and those that fail for ever."""

import errno
import logging
from collections.abc import Callable

import pytest

from titanlite.runtime.errors import UserError
from titanlite.runtime.retry import is_transient, retrying


class HttpError(Exception):
    """As HTTP libraries have it: the status is that of a response."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} for url: https://host/file?signature=canary")
        self.response = type("Response", (), {"status_code": status})()


class TransportError(Exception):
    """Found by its name."""


def failing(times: int, error: Exception) -> Callable[[], str]:
    """Raises `error` so many times, then returns "text"."""
    errors = iter([error] * times)

    def read() -> str:
        for one in errors:
            raise one
        return "text"

    return read


TRANSIENT = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    ConnectionResetError("reset"),
    TimeoutError(),
    HttpError(429),
    HttpError(503),
    type("ReadError", (TransportError,), {})("gone"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_what_fails_for_a_while_is_read_in_the_end(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    waits: list[float] = []
    with caplog.at_level(logging.WARNING, "titanlite"):
        assert retrying("file.jsonl", failing(3, error), (1, 2, 4, 8), waits.append) == "text"
    assert waits == [1, 2, 4]
    assert caplog.text.count("file.jsonl cannot be read just now, trying again in") == 3
    assert "canary" not in caplog.text


@pytest.mark.parametrize("error", [FileNotFoundError(2, "no"), PermissionError(13, "no"), HttpError(404), ValueError()])
def test_what_will_not_get_better_is_raised_at_once(error: Exception) -> None:
    assert not is_transient(error)
    with pytest.raises(type(error)):
        retrying("file", failing(1, error), (1, 2), lambda _: pytest.fail("it waited"))


def test_in_the_end_one_error_says_all() -> None:
    read = failing(4, HttpError(503))
    with pytest.raises(
        UserError, match="rows of the source 'mine' could not be read: tried 3 times in 0 s, last"
    ) as bad:
        retrying("rows of the source 'mine'", read, (1, 2), lambda _: None)
    assert "503" in str(bad.value)
    assert "canary" not in str(bad.value)
    assert read.__closure__ is not None
    with pytest.raises(HttpError):  # the fourth failure is still to come: there were three tries, and not more
        read()
