"""Bad rows of the commands that read documents: skipped or raised, by data.on_bad_row. Imports no torch."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from titanlite.data.config import DataConfig
from titanlite.data.preparation import bad_row_policy
from titanlite.data.sources.pieces import BadRowError
from titanlite.runtime.progress import tqdm

T = TypeVar("T")


class UsableRows:
    """Filter out bad rows, or raise them, by data.on_bad_row. Raises UserError. bad_rows: the count so far."""

    def __init__(self, section: DataConfig) -> None:
        self._policy = bad_row_policy(section)
        self.bad_rows = 0

    def of(self, results: Iterable[T | Exception]) -> Iterator[T]:
        for result in results:
            if isinstance(result, Exception):
                self.check(result)
            else:
                yield result

    def check(self, error: Exception) -> None:
        """Print and count a bad row that is skipped; raise any other error."""
        if not isinstance(error, BadRowError):
            raise error
        self.bad_rows += 1
        self._policy.check(error, self.bad_rows)
        tqdm.write(f"skipped a bad row: {error}", file=sys.stderr)  # above the progress bar
