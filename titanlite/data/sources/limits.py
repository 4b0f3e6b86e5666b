"""Limits for rows, and for small files of much data: their content would fill the memory or the disk."""

import gzip
import zlib

from titanlite.data.sources.pieces import BadRowError
from titanlite.runtime.retry import is_transient

MAX_ROW_BYTES = 2**28
"""Longest line or text that is parsed, which takes several times its size in memory. A longer one is a bad row."""

MAX_RATIO = 1000
"""Content that is longer than its file by this factor, and longer than a limit, is damage. Text shrinks 3 to 20 times,
logs up to 100 times."""

MAX_UNPACKED_BYTES = 2**30
"""Limit for the content of a file that is written to a disk or read in order."""

MAX_LOADED_BYTES = 2**28
"""Limit for what is in memory at once: a batch, or the text of a row group."""

MAX_SHORT_ROWS = 2**21
MAX_ROWS_PER_BYTE = 10
"""A file that has more rows than the first, and more for each of its bytes than the second, is damaged: each row takes
time and 56 bytes of the index, also if it is empty."""


class ExpansionError(ValueError):
    """A file has too much content for its size."""


UNPACKING_ERRORS = (EOFError, zlib.error, OSError, ExpansionError)
"""Exceptions of truncated or corrupt compressed data, among other errors: see is_damage."""


def is_damage(error: Exception) -> bool:
    """Whether one of UNPACKING_ERRORS means damaged data. Other errors are of the system or of a connection.

    pyarrow raises OSError without an errno.
    """
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        return type(error) is OSError and error.errno is None and not is_transient(error)
    return True


def require_rows(count: int, packed: int, what: str = "rows") -> None:
    """Raise ExpansionError if a file of `packed` bytes has too many rows."""
    if count > max(MAX_SHORT_ROWS, MAX_ROWS_PER_BYTE * packed):
        most = max(MAX_SHORT_ROWS, MAX_ROWS_PER_BYTE * packed)
        raise ExpansionError(f"its {packed:,} bytes have more than {most:,} {what}")


def require_ratio(size: int, packed: int, limit: int, what: str) -> None:
    """Raise ExpansionError if `size` bytes exceed the limit, and MAX_RATIO times the `packed` bytes they come from."""
    if size > max(limit, MAX_RATIO * packed):
        raise ExpansionError(f"{what} of {packed:,} bytes expands to more than {max(limit, MAX_RATIO * packed):,}")


def long_row(size: int, most: int) -> BadRowError:
    """The error of a row of more than `most` bytes, MAX_ROW_BYTES."""
    return BadRowError(f"the line has {size:,} bytes, more than {most:,}: divide its text")
