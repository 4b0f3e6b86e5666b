"""Logging: levels and streams per rank, without repeated lines; waits with their reason; numbers and nouns."""

import io
import logging
import math
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from titanlite.config.schema import TrainingConfig
from titanlite.runtime import waiting
from titanlite.runtime.errors import Rules
from titanlite.runtime.logging import (
    Progress,
    append_errors_to,
    keep_for_log_file,
    log,
    log_last_error,
    open_log_file,
    setup_logging,
)
from titanlite.runtime.settings import Range
from titanlite.runtime.text import counted

pytestmark = pytest.mark.usefixtures("own_log")


def log_one_line_per_level() -> None:
    log.debug("detail")
    log.info("loss %.1f", 1.25)
    log.warning("slow disk")


def test_rank_0_logs_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    log_one_line_per_level()
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["loss 1.2", "warning: slow disk"]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    assert err == ""


def test_other_ranks_log_warnings_to_stderr_with_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(3)
    log_one_line_per_level()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.split(" ", 2)[2] == "[rank 3] warning: slow disk\n"


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "variables", "colored"),
    [
        (Terminal, {}, True),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {}, False),
    ],
)
def test_only_terminals_have_colors(
    stream: type[io.StringIO], variables: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    out = stream()
    setup_logging(0, out)
    log_one_line_per_level()
    assert ("\x1b[33mwarning:\x1b[0m slow disk" in out.getvalue()) == colored
    assert ("\x1b" in out.getvalue()) == colored


def test_the_log_file_has_the_lines_since_the_start_and_is_appended_to(tmp_path: Path) -> None:
    out, path = Terminal(), tmp_path / "train.log"
    for _ in range(2):
        setup_logging(0, out)
        keep_for_log_file()
        log.info("before")
        open_log_file(path)
        log.info("after ü")
    setup_logging(0, out)  # closes the file
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["before", "after ü"] * 2
    assert "\x1b" not in "".join(lines)


def test_a_log_file_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    out = io.StringIO()
    setup_logging(0, out)
    keep_for_log_file()
    open_log_file(tmp_path)
    log.info("after")
    assert f"warning: cannot write {tmp_path}: Is a directory" in out.getvalue()
    assert out.getvalue().endswith("after\n")
    setup_logging(0, out)
    open_log_file(tmp_path / "not asked for")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def error_file(tmp_path: Path) -> Iterator[Path]:
    """The file for the last error, which does not exist yet."""
    path = tmp_path / "train.log"
    append_errors_to(path)
    yield path
    append_errors_to(Path())


def test_the_last_error_is_appended_if_the_run_has_a_log_file(
    error_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_last_error("too early")
    assert not error_file.exists()
    setup_logging(0)
    keep_for_log_file()
    open_log_file(error_file)
    log.info("step")
    log_last_error("rank 3 failed: \udcff\nfix it")
    setup_logging(0)  # closes the file
    step, error, more = error_file.read_text().splitlines()
    assert re.fullmatch(r"[\d-]+ [\d:]+ step", step)
    assert re.fullmatch(r"[\d-]+ [\d:]+ error: rank 3 failed: \\udcff", error)
    assert more == "fix it"
    assert "rank 3" not in capsys.readouterr().out


def test_a_last_error_that_cannot_be_written_is_dropped(error_file: Path) -> None:
    error_file.write_text("full\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
        log_last_error("lost")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error_file.read_text() == "full\n"
    error_file.unlink()
    error_file.mkdir()
    log_last_error("lost")


def test_progress_is_logged_every_30_s(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    now = 100.0
    progress = Progress(clock=lambda: now)
    for batch in range(1, 92):
        now += 1.0
        progress.note(f"batch {batch}")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("batch ")[2] for line in lines] == ["30, after 30 s", "60, after 60 s", "90, after 90 s"]


def test_a_stream_of_a_program_gets_escapes_for_what_it_does_not_take() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    setup_logging(0, stream)
    log.info("Versuch \u201eä\u4f60\u201c")
    assert stream.buffer.getvalue().endswith(rb"Versuch \u201e\xe4\u4f60\u201c" + b"\n")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("variables", "logs"),
    [({}, True), ({"RANK": "3", "LOCAL_RANK": "3"}, True), ({"TORCHELASTIC_RUN_ID": "a", "LOCAL_RANK": "3"}, False)],
    ids=["one process", "without torchrun", "not the first rank of its node"],
)
def test_a_wait_is_logged_again_and_again_until_it_ends(
    variables: dict[str, str], logs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(waiting, "FIRST_S", 0.01)
    monkeypatch.setattr(waiting, "AGAIN_S", 0.02)
    end = time.monotonic() + (20 if logs else 0.2)
    with waiting.waiting(lambda: "a door: open it"):
        while len(caplog.messages) < 2 and time.monotonic() < end:
            time.sleep(0.01)
    count = len(caplog.messages)
    assert count >= 2 if logs else count == 0
    assert all(re.fullmatch("waiting for 0 s for a door: open it", message) for message in caplog.messages)
    time.sleep(0.1)
    assert len(caplog.messages) <= count + 1  # one may be under way


def test_a_short_wait_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with waiting.waiting(lambda: "a door"):
        pass
    assert caplog.messages == []


def test_a_number_and_its_noun() -> None:
    assert [counted(n, "file") for n in (0, 1, 2, 2000)] == ["0 files", "1 file", "2 files", "2,000 files"]
    assert [counted(n, "microbatch") for n in (1, 2)] == ["1 microbatch", "2 microbatches"]


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"above": 0, "below": math.inf}, "a finite number above 0"),
        ({"least": 0, "below": math.inf}, "a finite number, 0 or more"),
        ({"above": 1, "below": math.inf, "unset": 0}, "0 or a finite number above 1"),
        ({"least": 0, "below": 1}, "at least 0 and below 1"),
        ({"least": 0}, "0 or more"),
    ],
)
def test_a_range(bounds: dict[str, float], text: str) -> None:
    assert str(Range("", **bounds)) == text


def test_rules_name_the_key_and_take_its_value() -> None:
    rules = Rules("training", TrainingConfig(seq_len=10))
    assert rules.divides("seq_len", "parallelism.tp", 5)
    assert not rules.divides("seq_len", "parallelism.tp", 4)
    assert not rules.needs("steps", False, "a wish")
    first, second = rules.problems
    assert (first.key, first.value, first.rule) == ("training.seq_len", 10, "divisible by parallelism.tp = 4")
    assert first.remedy == "set training.seq_len = 8 or 12, or change parallelism.tp"
    assert (second.key, second.rule, second.remedy) == ("training.steps", "only with a wish", "leave it out")
    options = Rules("--", TrainingConfig())
    options.require("seq_len", False, "", "")
    assert options.problems[0].key == "--seq-len"
