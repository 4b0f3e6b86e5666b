"""The logger "titanlite", for people who watch a run."""

import logging
import sys
from typing import TextIO

log = logging.getLogger("titanlite")


class _PlainFormatter(logging.Formatter):
    """Local time and the message; shows the level only for warnings and above."""

    def __init__(self, origin: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        line = f"{self.formatTime(record, self.datefmt)} {self._origin}{level}{record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Handler(logging.StreamHandler[TextIO]):
    """Drops lines silently if the stream has no reader (`| head`, a closed terminal)."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


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
    handler.setFormatter(_PlainFormatter(origin))
    log.handlers[:] = [handler]
    log.setLevel(level)
    log.propagate = False
