"""The logger "titanlite", for people who watch a run."""

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import TextIO

from titanlite.runtime.errors import UserError
from titanlite.runtime.files import open_to_append
from titanlite.runtime.text import visible, visible_lines

log = logging.getLogger("titanlite")

REDISTRIBUTION = logging.getLogger("torch.distributed.tensor._redistribute")
"""Warns that gathering a parameter that two axes shard takes two all-gathers."""

PROGRESS_EVERY_S = 30.0
"""Seconds between two lines of Progress."""

_error_file: Path | None = None

DIM, YELLOW, RED, RESET = "\x1b[2m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


class _PlainFormatter(logging.Formatter):
    """Local date and time, and the message, `visible`; shows the level only for warnings and above.

    Line ends of the message and between the lines of a UserError remain; those in other arguments, which may be texts
    of strangers, are escaped.

    has_colors: the time is dim, the level yellow or red.
    """

    def __init__(self, origin: str, *, has_colors: bool) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._origin = origin
        self._has_colors = has_colors

    def format(self, record: logging.LogRecord) -> str:
        time, level = self.formatTime(record, self.datefmt), ""
        if record.levelno >= logging.WARNING:
            color = RED if record.levelno >= logging.ERROR else YELLOW
            level = f"{self._colored(f'{record.levelname.lower()}:', color)} "
        line = f"{self._colored(time, DIM)} {self._origin}{level}{_message(record)}"
        return f"{line}\n{visible_lines(self.formatException(record.exc_info))}" if record.exc_info else line

    def _colored(self, text: str, color: str) -> str:
        return f"{color}{text}{RESET}" if self._has_colors else text


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if isinstance(record.args, tuple) and text.count("\n") > record.msg.count("\n"):
        args = [
            each if isinstance(each, UserError) or "\n" not in str(each) else _OneLine(each) for each in record.args
        ]
        text = record.msg % tuple(args)
    return visible_lines(text)


class _OneLine:
    """An argument of a message whose text has line ends."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return visible(str(self._value))

    def __repr__(self) -> str:
        return repr(self._value)


class _Handler(logging.StreamHandler[TextIO]):
    """Drops lines silently if the stream has no reader (`| head`, a closed terminal), and escapes characters that the
    stream of an importing program, or of a process that is forked, does not take."""

    def format(self, record: logging.LogRecord) -> str:
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        return super().format(record).encode(encoding, "backslashreplace").decode(encoding)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _LogFile(_Handler):
    """Keeps the lines in memory until `open_log_file`. Lines that cannot be written are dropped silently."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.setFormatter(_PlainFormatter("", has_colors=False))


def setup_logging(rank: int, stream: TextIO | None = None) -> None:
    """Set up the logger "titanlite": rank 0 to stdout, from INFO; other ranks to stderr, from WARNING, with their rank.

    stream: replaces stdout, for a command whose stdout is its result.

    Each message is flushed when it is logged. A second call replaces the first handler, so no line is printed twice.
    Nothing is propagated to the root logger, whose handlers belong to the importing program.
    """
    if rank == 0:
        handler, level, origin = _Handler(stream or sys.stdout), logging.INFO, ""
    else:
        handler, level, origin = _Handler(sys.stderr), logging.WARNING, f"[rank {rank}] "
    handler.setFormatter(_PlainFormatter(origin, has_colors=_shows_colors(handler.stream)))
    for earlier in log.handlers:
        if isinstance(earlier, _LogFile):
            earlier.stream.close()
    log.handlers[:] = [handler]
    log.setLevel(level)
    log.propagate = False


def format_library(name: str) -> None:
    """Format what the handlers of a library's logger print as our lines, with the library's name: a stranger's text in
    them is shown `visible`."""
    for handler in logging.getLogger(name).handlers:
        handler.setFormatter(_PlainFormatter(f"{name}: ", has_colors=False))


def warn_in_lines(lines: Sequence[str]) -> None:
    """Log a warning of several lines."""
    log.warning("\n".join(map(visible, lines)))


def keep_for_log_file() -> None:
    """Keep this process's lines from now on for `open_log_file`, in addition to the stream."""
    log.addHandler(_LogFile())


def open_log_file(path: Path) -> None:
    """Append the lines since `keep_for_log_file`, and later ones, to the file at `path`, without colors.

    Does nothing without that call. If the file cannot be opened, a warning is logged.
    """
    for handler in [handler for handler in log.handlers if isinstance(handler, _LogFile)]:
        assert isinstance(handler.stream, io.StringIO), "opened twice"
        try:
            file = io.TextIOWrapper(open_to_append(path), encoding="utf-8", errors="replace", write_through=True)
            file.write(handler.stream.getvalue())
        except OSError as error:
            log.removeHandler(handler)
            log.warning("cannot write %s: %s; the run continues without it", path, error.strerror or error)
        else:
            handler.setStream(file)


def append_errors_to(path: Path) -> None:
    """Set the log file for `log_last_error` in this process."""
    global _error_file
    _error_file = path


@contextmanager
def logging_restored() -> Iterator[None]:
    """Context that undoes the functions above: the loggers are afterwards as before, and a log file is closed."""
    global _error_file
    redistribution = REDISTRIBUTION.level
    before = log.handlers[:], log.level, log.propagate, _error_file
    try:
        yield
    finally:
        for handler in log.handlers:
            if isinstance(handler, _LogFile) and handler not in before[0]:
                handler.stream.close()
        log.handlers[:], level, log.propagate, _error_file = before
        log.setLevel(level)
        REDISTRIBUTION.setLevel(redistribution)


class Progress:
    """Logs how far a long computation is, at most every PROGRESS_EVERY_S. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._start = self._last = clock()

    def note(self, done: str) -> None:
        """Log what is done, and after how many seconds, if the last line is old enough."""
        now = self._clock()
        if now - self._last >= PROGRESS_EVERY_S:
            self._last = now
            log.info("%s, after %.0f s", done, now - self._start)


def log_last_error(message: str) -> None:
    """Append the error that ends this process to the log file of the run, which rank 0 may have open, and only there.

    Does nothing if the run has no log file yet, or none on this node, or if it cannot be written.
    """
    record = logging.LogRecord(log.name, logging.ERROR, "", 0, message, None, None)
    line = f"{_PlainFormatter('', has_colors=False).format(record)}\n"
    with suppress(OSError):
        if _error_file is not None and _error_file.exists():
            with open_to_append(_error_file) as file:
                file.write(line.encode(errors="replace"))


def _shows_colors(stream: TextIO) -> bool:
    """Whether the stream is a terminal, and the user has not set NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
