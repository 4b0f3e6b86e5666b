"""Logging: levels and streams per rank, without repeated lines."""

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from titanlite.runtime.logging import log, setup_logging


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Restore the logger after each test."""
    before = (log.handlers[:], log.level, log.propagate)
    yield
    log.handlers[:], log.level, log.propagate = before[0], before[1], before[2]


def log_one_line_per_level() -> None:
    log.debug("detail")
    log.info("loss %.1f", 1.25)
    log.warning("slow disk")


def test_rank_0_logs_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    log_one_line_per_level()
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["loss 1.2", "warning: slow disk"]
    assert all(len(line.split(" ", 1)[0].split(":")) == 3 for line in lines)
    assert err == ""


def test_other_ranks_log_warnings_to_stderr_with_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(3)
    log_one_line_per_level()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.split(" ", 1)[1] == "[rank 3] warning: slow disk\n"


def test_a_second_call_does_not_repeat_lines(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    setup_logging(0)
    log.info("once")
    assert capsys.readouterr().out.count("once") == 1


def test_nothing_reaches_the_root_logger(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers = root.handlers[:]
    setup_logging(0)
    assert root.handlers == handlers
    handler = logging.StreamHandler()
    root.addHandler(handler)
    try:
        log.warning("once")
    finally:
        root.removeHandler(handler)
    out, err = capsys.readouterr()
    assert (out + err).count("once") == 1


def test_a_requested_traceback_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    try:
        raise ValueError("deep")
    except ValueError:
        log.exception("failed")
    out = capsys.readouterr().out
    assert "error: failed\n" in out
    assert out.endswith("ValueError: deep\n")


class Unread(io.StringIO):
    """A stream without a reader."""

    def write(self, text: str) -> int:  # noqa: ARG002
        raise BrokenPipeError


def test_a_broken_pipe_is_ignored(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", Unread())
    setup_logging(0)
    log.info("into the void")
    assert capsys.readouterr().err == ""
    log.info("%d arguments are missing", "two")
    assert "Logging error" in capsys.readouterr().err
