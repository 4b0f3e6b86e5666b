"""Retries of reads: temporary and permanent failures."""

import errno
import logging
from collections.abc import Callable

import pytest

from titanlite.runtime.errors import UserError
from titanlite.runtime.retry import is_transient, retrying


class HttpError(Exception):
    """Like the errors of HTTP libraries: the status is an attribute of a response."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} for url: https://host/file?signature=canary")
        self.response = type("Response", (), {"status_code": status})()


class TransportError(Exception):
    """Recognized by its name."""


def failing(times: int, error: Exception) -> Callable[[], str]:
    """Return a function that raises `error` the given number of times, then returns "text"."""
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
def test_temporary_failures_are_retried(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    waits: list[float] = []
    with caplog.at_level(logging.WARNING, "titanlite"):
        assert retrying("file.jsonl", failing(3, error), (1, 2, 4, 8), waits.append) == "text"
    assert waits == [1, 2, 4]
    assert caplog.text.count("file.jsonl, retrying in") == 3
    assert "canary" not in caplog.text


@pytest.mark.parametrize("error", [FileNotFoundError(2, "no"), PermissionError(13, "no"), HttpError(404), ValueError()])
def test_permanent_errors_are_raised_immediately(error: Exception) -> None:
    assert not is_transient(error)
    with pytest.raises(type(error)):
        retrying("file", failing(1, error), (1, 2), lambda _: pytest.fail("it waited"))


def test_the_final_error_names_source_tries_and_cause() -> None:
    read = failing(4, HttpError(503))
    with pytest.raises(UserError, match="cannot read rows of the source 'mine': 3 attempts in 0 s, last") as bad:
        retrying("rows of the source 'mine'", read, (1, 2), lambda _: None)
    assert "503" in str(bad.value)
    assert "canary" not in str(bad.value)
    assert read.__closure__ is not None
    with pytest.raises(HttpError):  # the fourth failure is left: there were exactly three tries
        read()
